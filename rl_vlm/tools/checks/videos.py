"""Show the frames that the model gets of a video, and the number of their tokens."""

from __future__ import annotations

from dataclasses import replace

from rl_vlm.data.check import UsableRows
from rl_vlm.data.messages import without_blocks
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.tools.checks.diagnosis import Checking, Note
from rl_vlm.types import Video

MOST_TIMES = 12
"""Maximum times of frames in a line. A longer list shows the first ones and the last."""
FORMS = {"native": "in the model's own input for videos", "frames": "as images"}


def video_notes(usable: UsableRows, builder: PromptBuilder) -> Checking[None]:
    """Yield a line about the first row with videos, if any. Raises DataError if the row has no prompt."""
    rows = usable.rows
    row = next((row for row in usable.indices if rows.parse(row).videos), None)
    if row is None:
        return
    sample = rows[row]
    num_frames = sum(len(video.frames) for video in sample.videos)
    without = replace(sample, messages=without_blocks(sample.messages, "video"), videos=[])
    tokens = len(builder.build(sample).token_ids) - len(builder.build(without).token_ids)
    shown = "; ".join(map(video_text, sample.videos))
    form = FORMS[builder.video_format]
    yield Note(f"{rows.place(row)}: {shown}, {form}: {tokens} tokens, {tokens / num_frames:.1f} per frame")


def video_text(video: Video) -> str:
    """Describe the frames of a video."""
    number, height, width = video.frames.shape[:3]
    times = [f"{time:.1f}" for time in video.times]
    if len(times) > MOST_TIMES:
        times = [*times[: MOST_TIMES - 2], "…", times[-1]]
    frames = "frame" if number == 1 else "frames"
    return f"{number} {frames} of {width}x{height} pixels at {', '.join(times)} s of {video.duration:.1f} s"
