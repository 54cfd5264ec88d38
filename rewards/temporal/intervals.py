"""Intervals and moments of a video in a text or in a gold answer, in seconds."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, TypeVar, get_args

from rewards.contract import Fault, Score, plain
from rewards.text import TextOrMessages, answer_text, score_golds

T = TypeVar("T")

DECIMALS = r"(?:\.[0-9]{1,22})?"
"""Python prints a number from 0.0001 on with 21 decimals or fewer."""
CLOCK = rf"(?:[0-9]{{1,3}}:)?[0-9]{{1,2}}:[0-9]{{2}}{DECIMALS}"
SECONDS = rf"[0-9]{{1,9}}{DECIMALS}"
UNIT = r"\s?(?:seconds|second|secs|sec|s)?\b"
TIME = rf"(?:{CLOCK}|{SECONDS}{UNIT})"
NOT_NEGATIVE = r"(?<![-−.:0-9])"
INTERVAL = re.compile(rf"{NOT_NEGATIVE}({TIME})\s?(?:to|and|until|-|–|—|,)\s?({TIME})", re.IGNORECASE)
MOMENT = re.compile(NOT_NEGATIVE + TIME, re.IGNORECASE)
MOST = 100
"""The largest number of intervals. An answer with more counts as unreadable."""


SolutionTimes = Literal["seconds", "frames"]
"""The unit of gold answers: seconds of the file, or numbers of the frames that the model gets, from 0."""


class Interval(NamedTuple):
    """A part of a video, in seconds."""

    start: float
    end: float

    def iou(self, other: Interval) -> float:
        """Return the intersection over union, or 0.0 if the intervals do not overlap."""
        shared = min(self.end, other.end) - max(self.start, other.start)
        either = max(self.end, other.end) - min(self.start, other.start)
        return shared / either if shared > 0 else 0.0


def read_intervals(text: str) -> list[Interval]:
    """Return the intervals of an answer, or none if it has another number or an interval that ends before it starts."""
    answer = answer_text(text)
    found = _of_json(answer)
    if found is None:
        found = [Interval(_seconds(start), _seconds(end)) for start, end in INTERVAL.findall(answer)]
        if re.search(r"[0-9]", INTERVAL.sub("", answer)):
            return []
    return found if len(found) <= MOST and all(each.start < each.end for each in found) else []


def read_moment(text: str) -> float | None:
    """Return the only time of an answer, or None."""
    answer = answer_text(text)
    times = MOMENT.findall(answer)
    return _seconds(times[0]) if len(times) == 1 and not re.search(r"[0-9]", MOMENT.sub("", answer)) else None


def gold_intervals(solution: Any, clock: Clock | None = None) -> list[Interval] | Fault | None:
    """Return the intervals of a gold answer, None if there is none, or a fault if one is bad or has no length.

    With a clock, the answer has numbers of frames, which become seconds.
    """
    gold = plain(solution)
    if gold is None or gold != gold:
        return None
    found = read_intervals(gold) if isinstance(gold, str) else _of_values(gold)
    if not found or not all(each.start < each.end for each in found):
        return Fault("type", f"`solution` is {str(gold)[:60]!r}, no interval of a start before an end")
    if clock is None:
        return found
    if not all(clock.has(each.start) and clock.has(each.end) for each in found):
        return clock.fault(gold)
    return [Interval(clock.seconds(each.start), clock.seconds(each.end)) for each in found]


def gold_moment(solution: Any, clock: Clock | None = None) -> float | Fault | None:
    """Return the time of a gold answer, None if there is none, or a fault if it is unreadable.

    With a clock, the answer is the number of a frame, which becomes seconds.
    """
    gold = plain(solution)
    if gold is None or gold != gold:
        return None
    found = read_moment(gold) if isinstance(gold, str) else _of_scalar(gold)
    if found is None:
        return Fault("type", f"`solution` is {str(gold)[:60]!r}, no time")
    if clock is None:
        return found
    return clock.seconds(found) if clock.has(found) else clock.fault(gold)


class Clock(NamedTuple):
    """Converts numbers of frames, from 0, to seconds of the file."""

    times: Sequence[float]
    """The second of each frame that the model gets."""

    def has(self, number: float) -> bool:
        """Return whether a number belongs to a frame, or is the next number, where the video ends."""
        return len(self.times) > 0 and number <= len(self.times)

    def seconds(self, number: float) -> float:
        """Return the time of a frame. Numbers with a fraction are between two frames."""
        count = len(self.times)
        step = (self.times[-1] - self.times[0]) / (count - 1) if count > 1 else 1.0
        ends = [*self.times, self.times[-1] + step, self.times[-1] + step]
        first = int(number)
        return ends[first] + (number - first) * (ends[first + 1] - ends[first])

    def fault(self, gold: Any) -> Fault:
        """Return the fault of a gold answer whose number belongs to no frame."""
        return Fault("type", f"`solution` is {str(gold)[:60]!r}, and the first video has {len(self.times)} frames")


def score_rows(
    rows: tuple[Sequence[TextOrMessages], Sequence[Any], Sequence[Sequence[Sequence[float]]] | None],
    solution_times: SolutionTimes,
    read_gold: Callable[[Any, Clock | None], T | Fault | None],
    score: Callable[[str, T], float],
) -> list[Score]:
    """Score the text of each completion against its gold answer, as `score_golds` does.

    `rows` are completions, solutions, and the frame times of videos in seconds. If gold answers are numbers of frames,
    they mean frames of the row's first video. Raises ValueError if `solution_times` is neither "seconds" nor "frames".
    """
    completions, solutions, frame_times = rows
    if solution_times not in get_args(SolutionTimes):
        raise ValueError(f"solution_times is {solution_times!r}, expected seconds or frames")
    clocks: list[Clock | None] = [None] * len(completions)
    if solution_times == "frames":
        clocks = [Clock(videos[0] if videos else ()) for videos in frame_times or [()] * len(completions)]
    return score_golds(completions, map(read_gold, solutions, clocks), score)


def _of_json(answer: str) -> list[Interval] | None:
    """Return the intervals of a list or object in JSON, or None for any other answer."""
    if not answer.startswith(("[", "{")) or len(answer) > 100 * MOST:
        return None
    try:
        return _of_values(json.loads(answer)) or []
    except (ValueError, RecursionError):
        return None


def _of_values(value: Any) -> list[Interval] | None:
    """Return the intervals of `[start, end]`, `{"start": …, "end": …}`, or a list of them, or None."""
    one = _of_pair(value)
    if one is not None:
        return [one]
    if not isinstance(value, list | tuple):
        return None
    found = [_of_pair(each) for each in value]
    return None if None in found else [each for each in found if each is not None]


def _of_pair(value: Any) -> Interval | None:
    pair = [value.get("start"), value.get("end")] if isinstance(value, dict) else value
    if not isinstance(pair, list | tuple) or len(pair) != 2:
        return None
    times = [_of_scalar(each) for each in pair]
    return None if times[0] is None or times[1] is None else Interval(times[0], times[1])


def _of_scalar(value: Any) -> float | None:
    if isinstance(value, str):
        return _seconds(value.strip()) if MOMENT.fullmatch(value.strip()) else None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and 0 <= value < 1e9 and math.isfinite(value) else None


def _seconds(text: str) -> float:
    """Convert `75.5`, `75.5 s`, `1:15.5` or `0:01:15.5` to seconds."""
    parts = re.sub(r"[^0-9:.]", "", text).split(":")
    return sum(float(part) * 60**power for power, part in enumerate(reversed(parts)))
