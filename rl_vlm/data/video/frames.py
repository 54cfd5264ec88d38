"""Which frames of a video the model gets, and in which size. Both are decided once, when the row is read."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_vlm.data.video.sizes import check_limits, frame_size, resize, tower_pixels
from rl_vlm.data.video.source import FRAME_RATE, ClipHeader
from rl_vlm.data.video.timeline import FrameRange, Timeline, constant
from rl_vlm.errors import ConfigError

if TYPE_CHECKING:
    from rl_vlm.config.schema import DataConfig

PROBES = {"fps": (0.5, 1.0), "num_frames": (8, 16)}
"""Two values of each setting. They give other frames of a long video, unless the processor ignores the setting."""
ROUNDING = 1e-9
"""Part of a rate that is added, since processors round its product with the seconds down."""


@dataclass(frozen=True)
class FrameRule:
    """Chooses frames for a checkpoint with a video processor, or evenly for a checkpoint without one."""

    data: DataConfig
    processor: Any = None
    """The checkpoint's video processor. It chooses frames from metadata alone, without pixels."""

    def choose(self, shown: Timeline, span: FrameRange) -> list[int]:
        """Return the numbers of the frames to read, in order. A number is repeated if frames are lacking.

        The checkpoint's own rule chooses them. Drop frames above `max_frames`, and add frames up to `min_frames`. Their
        number becomes a multiple of the frames that the tower joins. If the video has at most `min_frames` frames, take
        all.
        """
        first, total = shown.clip(span)
        chosen = np.arange(span.first, span.stop)
        if len(chosen) > max(self.data.min_frames, self.joined):
            ticks = self.sampled(total, shown.fps)
            given = np.array([shown.frame_at(first + tick) for tick in sorted(ticks)])
            given = given if shown.is_constant else np.unique(given)
            count = min(max(len(given) // self.joined * self.joined, self.fewest), self.most)
            chosen = given if len(given) >= count else chosen
            chosen = spread(chosen, count) if len(chosen) > count else chosen
        numbers = chosen.tolist()
        return numbers + numbers[-1:] * (-len(numbers) % self.joined)

    def sampled(self, total: int, fps: float) -> list[int]:
        """Return the ticks that the checkpoint's own rule samples from a video with this number of ticks.

        A checkpoint without a rule gets evenly spaced frames.
        """
        wanted = {"fps": self.data.fps, "num_frames": self.data.num_frames}
        if self.processor is None:
            count = self.data.num_frames or max(round(total / fps * (self.data.fps or FRAME_RATE)), 1)
            return np.linspace(0, total - 1, min(max(count, self.data.min_frames), total)).round().astype(int).tolist()
        return own_sample(self.processor, total, fps, wanted, self.data.min_frames)

    @cached_property
    def joined(self) -> int:
        """Frames that the tower joins to one: the temporal patch, or 1."""
        return num_joined(self.processor)

    @property
    def fewest(self) -> int:
        """The smallest multiple of `joined` that is not below `min_frames`."""
        return -(-self.data.min_frames // self.joined) * self.joined

    @property
    def most(self) -> int:
        """The largest multiple of `joined` that is not above `max_frames`."""
        return self.data.max_frames // self.joined * self.joined

    def size(self, num_frames: int, width: int, height: int) -> tuple[int, int]:
        """Return width and height of the frames that the tower gets."""
        return frame_size(self.processor, num_frames, width, height, self.data)

    def resized(self, frame: np.ndarray, width: int, height: int) -> np.ndarray:
        """Return a frame in this size."""
        return resize(frame, width, height, getattr(self.processor, "resample", None))

    def num_pixels(self, clip: ClipHeader) -> int:
        """Return how many pixels of a clip the tower gets, from its header alone. Joined frames count once.

        The rate of the frames is taken as constant, so the number of a video with another rate is not exact.
        """
        header = clip.header
        shown = constant(header.num_frames, header.num_frames / header.duration)
        count = len(self.choose(shown, shown.span(clip.start, clip.end)))
        width, height = self.size(count, header.width, header.height)
        return count // self.joined * tower_pixels(self.processor, width, height)

    def check(self) -> None:
        """Raise ConfigError if the checkpoint ignores a setting of frames, or if no number of frames is possible.

        The number is a multiple of the frames that the tower joins, from `min_frames` to `max_frames`.
        """
        if self.processor is None:
            return
        check_limits(self.processor, self.data)
        if self.most < self.fewest:
            raise ConfigError(
                f"data.max_frames {self.data.max_frames} is too small: the checkpoint's tower joins {self.joined} "
                f"frames to one, and {self.fewest} is the first multiple from data.min_frames {self.data.min_frames} "
                "on. Set it higher, or data.min_frames lower."
            )
        for name, values in PROBES.items():
            if getattr(self.data, name) is None:
                continue
            results = [own_sample(self.processor, 6000, 30.0, {name: value}, 1) for value in values]
            if results[0] == results[1]:
                other = "num_frames" if name == "fps" else "fps"
                kind = type(self.processor).__name__
                raise ConfigError(
                    f"data.{name} has no effect on the checkpoint's {kind}, which chooses frames by another rule; "
                    f"unset it, try data.{other}, or bound the frames with data.max_frames."
                )


def num_joined(processor: Any) -> int:
    """Return the number of frames that a checkpoint's tower joins to one: the temporal patch, or 1."""
    return int(getattr(processor, "temporal_patch_size", None) or 1)


def own_sample(processor: Any, total: int, fps: float, wanted: dict[str, Any], min_frames: int) -> list[int]:
    """Return the frame numbers that a video processor samples from `total` frames at a rate.

    `wanted` has `fps` or `num_frames` if the settings have one. Else the checkpoint's own values count, or else
    `FRAME_RATE`. A number is rounded down to a multiple of the frames that the tower joins, since processors may round
    it up. Neither gives more frames than the video has. The rate gives at least `min_frames`.
    """
    from transformers.video_utils import VideoMetadata

    own: dict[str, Any] = {name: getattr(processor, name, None) for name in processor.valid_kwargs.__annotations__}
    given = {name: value for name, value in wanted.items() if value is not None}
    if given:
        own |= {"fps": None, "num_frames": None} | given
    elif own.get("fps") is None and own.get("num_frames") is None:
        own["fps"] = FRAME_RATE
    if (count := own.get("num_frames")) is not None:
        joined = num_joined(processor)
        own["num_frames"] = max(min(count, total) // joined, 1) * joined
    if (rate := own.get("fps")) is not None:
        own["fps"] = min(max(rate, min_frames * fps / total * (1 + ROUNDING)), fps)
    metadata = VideoMetadata(total_num_frames=total, fps=fps, duration=total / fps)
    try:
        sampled = processor.sample_frames(metadata=metadata, **own)
    except TypeError:  # SmolVLM's rule takes the smaller number of both, and needs both
        both = {"fps": own.get("fps") or fps, "num_frames": own.get("num_frames") or total}
        sampled = processor.sample_frames(metadata=metadata, **own | both)
    return [int(number) for number in sampled]


def spread(numbers: np.ndarray, count: int) -> np.ndarray:
    """Return `count` of the numbers at even distances, the first and the last included."""
    return numbers[np.linspace(0, len(numbers) - 1, count).round().astype(int)]
