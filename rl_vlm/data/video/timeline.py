"""When the frames of a video are shown, on the clock that processors read: frame numbers or milliseconds."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MILLISECONDS = 1000.0
"""The rate of the clock of a video without a constant rate."""
ROUNDING = 1.0
"""Seconds by which the end of a clip may exceed the end of its file, since such ends are often rounded."""


class FrameRange(NamedTuple):
    """A part of a video: the number of its first frame, and of the frame after its last."""

    first: int
    stop: int


@dataclass(frozen=True)
class Timeline:
    """The times of all frames of a video, on a clock of `fps` ticks per second."""

    ticks: Sequence[int]
    """The tick at which each frame is shown, in order."""
    fps: float
    """Frames per second, or 1000 if the frames have no constant rate."""
    total: int
    """Ticks of the video: its number of frames, or its length in milliseconds."""
    duration: float
    """Seconds."""

    @property
    def is_constant(self) -> bool:
        """Whether a tick is a frame."""
        return len(self.ticks) == self.total

    def span(self, start: float | None, end: float | None) -> FrameRange:
        """Return the frames that are shown from second `start` to second `end`, at least one.

        Raises ValueError if the interval is empty or outside of the video.
        """
        first, last = interval(start, end, self.duration)
        number = max(bisect_right(self.ticks, round(first * self.fps, 6)) - 1, 0)
        return FrameRange(number, max(bisect_left(self.ticks, round(last * self.fps, 6)), number + 1))

    def clip(self, span: FrameRange) -> tuple[int, int]:
        """Return the first tick of a part, and its number of ticks."""
        is_end = span.stop == len(self.ticks)
        return self.ticks[span.first], (self.total if is_end else self.ticks[span.stop]) - self.ticks[span.first]

    def frame_at(self, tick: int) -> int:
        """Return the number of the frame that is shown at a tick."""
        return max(bisect_right(self.ticks, tick) - 1, 0)


def interval(start: float | None, end: float | None, duration: float) -> tuple[float, float]:
    """Return start and end of a clip in seconds. Raises ValueError if it is empty or outside of the video."""
    first, last = start or 0.0, duration if end is None else end
    if not 0 <= first < last or first >= duration or last > duration + ROUNDING:
        raise ValueError(
            f"video_start {first:g} and video_end {last:g} do not select a part of the video, which has "
            f"{duration:.6g} seconds."
        )
    return first, last


def constant(num_frames: int, fps: float) -> Timeline:
    """Return the timeline of frames at a constant rate."""
    return Timeline(range(num_frames), fps, num_frames, num_frames / fps)


def timeline(times: Sequence[float], duration: float, fps: float | None = None) -> Timeline:
    """Return the timeline of frames that are shown at these seconds, the first at 0.

    `fps` is the rate that the file tells. The rate is constant if no frame is more than half a frame away from its
    place. Otherwise the clock has milliseconds, so that an index divided by the rate is the frame's time.
    """
    mean = (len(times) - 1) / times[-1] if times[-1] > 0 else None
    for rate in filter(None, (fps, mean, len(times) / duration if duration > 0 else None)):
        if all(abs(time * rate - number) <= 0.5 for number, time in enumerate(times)):
            return constant(len(times), rate)
    length = max(round(MILLISECONDS * duration), round(MILLISECONDS * times[-1]) + 1)
    return Timeline([round(MILLISECONDS * time) for time in times], MILLISECONDS, length, length / MILLISECONDS)
