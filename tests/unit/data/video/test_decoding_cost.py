"""Thirty-two frames of ten minutes: what seeking costs in processor time and memory, against decoding in sequence."""

import json
import subprocess
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import pytest

from tests.helpers.two_processes import REPOSITORY
from tests.helpers.video_files import moving_frames

MEASURE = """
import hashlib, json, re, sys, time
import numpy as np
from rl_vlm.data.video.files import VideoFile

def peak():  # the one of `getrusage` is that of the process that has started this one
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024

def measured(read):
    begin, found = time.process_time(), [pixels for pixels in read if pixels is not None]
    return {"seconds": time.process_time() - begin, "digest": hashlib.sha256(np.stack(found)).hexdigest()}

numbers = np.linspace(0, 14999, 32).round().astype(int).tolist()
with open(sys.argv[1], "rb") as file:
    next(VideoFile(file, 10**6).read([0]))  # libraries are loaded
    start = peak()
    by_seeking = measured(VideoFile(file, 10**6).read(numbers))
    memory = peak() - start
    in_sequence = measured(VideoFile(file, 10**6).in_sequence(numbers))
print(json.dumps({"by_seeking": by_seeking, "in_sequence": in_sequence, "bytes": memory}))
"""


def write_ten_minutes(path: Path) -> Path:
    """Write 15,000 frames at 25 per second, with a key frame every 50."""
    pictures = [av.VideoFrame.from_ndarray(each, format="rgb24") for each in moving_frames(64, 640, 360)]
    pictures = [picture.reformat(format="yuv420p") for picture in pictures]
    with av.open(str(path), "w") as container:
        stream: Any = container.add_stream("h264", rate=25)
        stream.width, stream.height, stream.pix_fmt = 640, 360, "yuv420p"
        stream.codec_context.gop_size = 50
        stream.options = {"preset": "ultrafast", "sc_threshold": "0", "crf": "35"}
        for number in range(15_000):
            frame = pictures[number % len(pictures)]
            frame.pts, frame.time_base = number, Fraction(1, 25)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


@pytest.mark.slow
def test_seeking_costs_a_tenth_of_decoding_in_sequence(tmp_path: Path):
    path = write_ten_minutes(tmp_path / "long.mp4")
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path)], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    found = json.loads(done.stdout)
    print(found)
    assert found["by_seeking"]["digest"] == found["in_sequence"]["digest"]
    assert found["by_seeking"]["seconds"] <= found["in_sequence"]["seconds"] / 10
    assert 30e6 < found["bytes"] < 100e6  # 32 frames have 22 MB, and their stack again
