"""Video files are read in processes of their own, since a damaged or hostile file can hang a decoder or crash it.

    this process    open a file    ask for its times    ask for frames by their numbers
    its decoder     header         timeline             frames, one reply each

A decoder is used again for the next file, unless it hangs or is left in the middle of its replies. Replies are JSON,
followed by pixels or numbers as bytes: nothing that a decoder sends is unpickled.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from io import BytesIO
from pathlib import Path
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_vlm.data.images import TooManyPixels, open_regular_file
from rl_vlm.data.video.container import Packets, load_av
from rl_vlm.data.video.files import VideoFile
from rl_vlm.data.video.source import FrameSource, Header, TooLong
from rl_vlm.data.video.timeline import Timeline
from rl_vlm.errors import TrainingError, refuse_shadow

if TYPE_CHECKING:
    from rewards.process import Answerer, IsolatedProcess

STILL_SECONDS = 60.0
"""A decoder hangs if it sends nothing for so long."""
SLOWEST = 10e6
"""Bytes per second that a disk reads at least."""
FRAMES_PER_SIGN = 20
"""Decoded frames that are not taken between two signs of life."""
MAX_BYTES = 4 * 2**30
"""Memory of a decoder. It is killed if it uses more."""
MOST_DECODERS = 4
"""Decoders of a process at once. Each takes 60 MB."""
KNOWN_FRAMES = 2_000_000
"""Frames of all files whose packets a decoder remembers. They take 32 bytes each if their rate is not constant."""
LENGTH_BYTES = 8
ERRORS = {kind.__name__: kind for kind in (TooManyPixels, TooLong, MemoryError)}
"""Errors that are raised again as they are. Others are OSErrors if they have a number, else ValueErrors."""

VideoSource = str | bytes
"""The absolute path of a file, or its bytes."""


class Decoders:
    """The decoders of this process. They are started when they are needed. Any thread may use them."""

    def __init__(self, most: int, load: Callable[[], Answerer], still_seconds: float, max_bytes: int) -> None:
        self.most = most
        self.load = load
        self.still_seconds = still_seconds
        self.max_bytes = max_bytes
        self.forget()

    def forget(self) -> None:
        """Start with no decoders. A forked process calls it, since the decoders belong to its parent."""
        self.idle: list[IsolatedProcess] = []
        self.free = BoundedSemaphore(self.most)

    @contextmanager
    def open(self, source: VideoSource, max_pixels: int) -> Iterator[DecodedFile]:
        """Open a video in a decoder that does nothing else in the meantime.

        Raises ConfigError if PyAV is not installed, and TrainingError if the machine cannot start a decoder.
        """
        if importlib.util.find_spec("av") is None:
            load_av()  # raises the error
        with self.free:
            process = self.idle.pop() if self.idle else self.started()
            file = DecodedFile(process, source, max_pixels, self.still_seconds)
            try:
                yield file
            finally:
                if file.is_answering or not process.is_running:
                    process.kill()
                else:
                    self.idle.append(process)

    def started(self) -> IsolatedProcess:
        """Start a decoder."""
        refuse_shadow()
        from rewards.process import IsolatedProcess, StartError

        process = None
        try:
            process = IsolatedProcess(self.load, self.max_bytes)
            process.wait_until_loaded()
            return process
        except (OSError, StartError) as error:
            if process is not None:
                process.kill()
            raise TrainingError(f"no process that reads videos could be started: {error}") from error


class DecodedFile(FrameSource):
    """A video file that a decoder reads. It has the header, times and frames of `VideoFile`."""

    def __init__(self, process: IsolatedProcess, source: VideoSource, max_pixels: int, still_seconds: float) -> None:
        self.process = process
        self.source = source
        self.max_pixels = max_pixels
        self.still_seconds = still_seconds
        self.is_answering = False
        """Whether replies of the decoder are still to come."""

    @cached_property
    def opened(self) -> tuple[Header, str]:
        """Size and length, and the software that reads the file."""
        (found,) = self.ask(Decoder.open, self.source, self.max_pixels)
        return Header(*found["header"]), found["reader"]

    @property
    def header(self) -> Header:
        return self.opened[0]

    @property
    def reader(self) -> str:
        return self.opened[1]

    @cached_property
    def timeline(self) -> Timeline:
        (found,) = self.ask(Decoder.times)
        ticks = np.frombuffer(found["bytes"], np.int64).tolist()
        return Timeline(ticks or range(found["total"]), found["fps"], found["total"], found["duration"])

    def read(self, numbers: Sequence[int]) -> Iterator[np.ndarray]:
        """Yield frames. Raises like `VideoFile.read`, and ValueError if the decoder hangs or crashes."""
        for found in self.ask(Decoder.frames, list(numbers)):
            yield np.frombuffer(found["bytes"], np.uint8).reshape(found["shape"])

    @property
    def seconds(self) -> float:
        """Time limit for a reply."""
        size = os.stat(self.source).st_size if isinstance(self.source, str) else len(self.source)
        return self.still_seconds + size / SLOWEST

    def ask(self, function: Callable[..., Any], *arguments: Any) -> Iterator[dict[str, Any]]:
        """Call a method of the `Decoder`, and yield its replies but signs of life."""
        limit, self.is_answering = self.seconds, True
        try:
            self.process.send(pickle.dumps((function.__name__, arguments)))
            while found := unpacked(self.process.receive(time.monotonic() + limit)):
                if "error" in found:
                    self.is_answering = False
                    raise error_of(found)
                if not found.get("is_sign"):
                    yield found
            self.is_answering = False
        except TimeoutError as error:
            raise ValueError(f"its decoder hangs: it has sent nothing for {limit:.0f} s.") from error
        except EOFError as error:
            raise self.ending() from error

    def ending(self) -> Exception:
        """Return the error for a decoder that has ended."""
        ending = self.process.ending()
        if ending.used_bytes is not None:
            return ValueError(f"its decoder {ending}.")
        if ending.exit_code in (None, -9):
            return TrainingError("the process that read it was killed. The system may have run out of memory.")
        return ValueError(f"its decoder crashed: it {ending}.")


class Decoder:
    """Reads one file after another, in a process that can be killed."""

    def __init__(self) -> None:
        self.file: VideoFile | None = None
        self.known: OrderedDict[tuple[Any, ...], Packets] = OrderedDict()
        """Packets of the latest files, which several rows or draws may use."""

    def answer(self, request: bytes) -> Iterator[bytes]:
        """Call a method. Its replies are followed by an empty one, unless the last is an error."""
        name, arguments = pickle.loads(request)
        try:
            yield from getattr(self, name)(*arguments)
            yield packed({})
        except Exception as error:  # a damaged file can make a decoder raise anything
            yield packed(description(error))

    def open(self, source: VideoSource, max_pixels: int) -> Iterator[bytes]:
        """Open a file, and send its header."""
        if self.file is not None:
            self.file.file.close()
            self.file = None
        content = open_regular_file(Path(), source) if isinstance(source, str) else BytesIO(source)
        self.file = KnownFile(content, max_pixels, self.known)
        yield packed({"header": self.file.header, "reader": self.file.reader})

    def times(self) -> Iterator[bytes]:
        """Send the timeline. Without a constant rate its ticks are sent as numbers."""
        assert self.file is not None
        shown = self.file.timeline
        ticks = b"" if isinstance(shown.ticks, range) else np.array(shown.ticks, np.int64).tobytes()
        yield packed({"fps": shown.fps, "total": shown.total, "duration": shown.duration}, ticks)

    def frames(self, numbers: Sequence[int]) -> Iterator[bytes]:
        """Send frames, and signs of life while others are decoded."""
        assert self.file is not None
        num_passed = 0
        for pixels in self.file.decoded(numbers):
            num_passed += pixels is None
            if pixels is not None:
                yield packed({"shape": pixels.shape}, pixels.tobytes())
            elif num_passed % FRAMES_PER_SIGN == 0:
                yield packed({"is_sign": True})


class KnownFile(VideoFile):
    """A file whose packets are read once, as long as it does not change."""

    def __init__(self, file: Any, max_pixels: int, known: OrderedDict[tuple[Any, ...], Packets]) -> None:
        super().__init__(file, max_pixels)
        self.known = known

    @cached_property
    def packets(self) -> Packets:
        """Times of the frames, and which of them are key frames."""
        if isinstance(self.file, BytesIO):
            return VideoFile(self.file, self.max_pixels).packets
        state = os.fstat(self.file.fileno())
        key = state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns
        if key not in self.known:
            self.known[key] = VideoFile(self.file, self.max_pixels).packets
        self.known.move_to_end(key)
        while len(self.known) > 1 and sum(len(each.timeline.ticks) for each in self.known.values()) > KNOWN_FRAMES:
            self.known.popitem(last=False)
        return self.known[key]


def load_decoder() -> Answerer:
    """Return the answers of a decoder. It is called in its process."""
    load_av()
    return Decoder().answer


def packed(found: dict[str, Any], content: bytes = b"") -> bytes:
    """Return a reply: the length of the JSON text, the text, and bytes."""
    text = json.dumps(found).encode()
    return len(text).to_bytes(LENGTH_BYTES, "little") + text + content


def unpacked(reply: bytes) -> dict[str, Any]:
    """Return the content of a reply. Its bytes are under "bytes", unless the reply is empty."""
    end = LENGTH_BYTES + int.from_bytes(reply[:LENGTH_BYTES], "little")
    found = json.loads(reply[LENGTH_BYTES:end])
    return found and found | {"bytes": memoryview(reply)[end:]}


def description(error: Exception) -> dict[str, Any]:
    """Describe an error, for `error_of`."""
    name, number = type(error).__name__, getattr(error, "errno", None)
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return {"error": name, "text": text or name, "number": number, "path": getattr(error, "filename", None)}


def error_of(found: dict[str, Any]) -> Exception:
    """Return the error that a decoder has described."""
    if found["error"] in ERRORS:
        return ERRORS[found["error"]](found["text"])
    if found["number"] is not None:
        return OSError(found["number"], found["text"], found["path"])
    return ValueError(found["text"])


decoders = Decoders(min(MOST_DECODERS, os.cpu_count() or 1), load_decoder, STILL_SECONDS, MAX_BYTES)
os.register_at_fork(after_in_child=decoders.forget)
