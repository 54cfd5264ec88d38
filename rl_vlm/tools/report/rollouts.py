"""Data of a report's rollout browser: groups with their completions, and each image and strip of a video once."""

from __future__ import annotations

import base64
import hashlib
import io
import math
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from rl_vlm.log.completions import kept_files, windows_of
from rl_vlm.log.images import LONG_SIDE, QUALITY, copy_size, small_copy
from rl_vlm.reward.intervals import Interval, Intervals
from rl_vlm.reward.regions import Regions
from rl_vlm.stages import COLUMN_PREFIX, is_column
from rl_vlm.tools.report.read import LoggedRow, RunResults
from rl_vlm.tools.report.turns import GroupTurns

MOST_ROLLOUTS = 10_000
"""Completions on the page."""
HELD_OUT_SHARE = 5
"""At most one in this many rollouts on the page is held out."""
MOST_IMAGES = 1_000
"""Images on the page. Frames of games are small."""
IMAGE_BYTES = 9_000_000
"""Bytes of all images on the page, as text: a few more photos than a run keeps of its prompts."""
MOST_FILE_BYTES = 30_000_000
MOST_PIXELS = 32_000_000
"""Largest number of pixels of an image file. Runs write small images themselves."""
TEXT_BYTES = 3_500_000
"""Bytes of all completions on the page. Longer ones lose their middle first."""
PROMPT_BYTES = 1_500_000
"""Bytes of all prompts on the page."""
CELL_BYTES = 2_000_000
"""Bytes of all values that reward functions logged, and of all columns of the data."""
LONGEST_CELL = 300
"""Largest number of bytes of one such value."""
MOST_REGIONS = 50
"""Largest number of boxes and points, or of intervals, that are drawn for a completion."""
ALL_REGIONS = 40_000
"""Boxes and points on the page."""
REGION_SECONDS = 3.0
"""Seconds for reading boxes, points and intervals. A text that is nearly JSON takes milliseconds."""
THOUGHT = re.compile(
    r"(?s)<think(?:ing)?>(?P<closed>.*?)(?:</think(?:ing)?>|\Z)|\A(?P<begun>(?:(?!<think).)*?)</think(?:ing)?>"
)
"""Thinking: text between the tags, or before the closing tag if the prompt has the opening tag."""

LoggedGroup = Sequence[LoggedRow]
T = TypeVar("T")


class Images:
    """The images of the page, each once, as small JPEG files in data URIs."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}
        """Numbers by data URI. Runs of a comparison have files of the same image."""
        self.index: dict[str, int | None] = {}
        self.num_left_out = 0
        self.size = 0

    def add(self, path: Path, root: Path) -> int | None:
        """Return an image's number on the page. Return None if it is not an image file below `root`, or if the page is
        full."""
        key = os.path.normpath(path)
        if key not in self.index:
            self.index[key] = self.read(path) if is_file_below(root, path) else None
        return self.index[key]

    def read(self, path: Path) -> int | None:
        if len(self.numbers) >= MOST_IMAGES or self.size > IMAGE_BYTES:
            self.num_left_out += 1
            return None
        try:
            uri = data_uri(path)
        except Exception:  # Pillow raises errors of many kinds for damaged and for huge files
            return None
        if uri not in self.numbers:
            self.numbers[uri] = len(self.numbers)
            self.size += len(uri)
        return self.numbers[uri]


def is_file_below(root: Path, path: Path) -> bool:
    """Return whether a path, with links and dots resolved, is a file below `root` of at most `MOST_FILE_BYTES`.

    The files of a run may come from someone else. They may name an endless device, or another file of this machine.
    """
    try:
        real = path.resolve()
        return real.is_relative_to(root.resolve()) and real.is_file() and real.stat().st_size <= MOST_FILE_BYTES
    except (OSError, ValueError):  # a loop of links, a name that is too long, or a null byte
        return False


def data_uri(path: Path) -> str:
    """Return an image as a JPEG in the size of a copy in a data URI. Raises ValueError if it has too many pixels."""
    from PIL import Image, ImageOps

    content = path.read_bytes()
    with Image.open(io.BytesIO(content), formats=["JPEG", "PNG"]) as image:
        if image.width * image.height > MOST_PIXELS:
            raise ValueError(f"{path} has {image.width} x {image.height} pixels")
        if image.format != "JPEG" or copy_size(image) != image.size or image.getexif():
            image.draft("RGB", (2 * LONG_SIDE, 2 * LONG_SIDE))
            file = io.BytesIO()
            small_copy(ImageOps.exif_transpose(image)).save(file, format="JPEG", quality=QUALITY)
            content = file.getvalue()
    return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}"


def browser_data(runs: Sequence[RunResults], most: int = MOST_ROLLOUTS) -> dict[str, Any]:
    """Return all data of the browser, with `most` completions, ready for JSON. page.js reads these short keys."""
    shown = [one for i, run in enumerate(runs) for one in shown_groups(i, run, most // len(runs))]
    rows = [row for one in shown for row in one.group]
    prompts = list(dict.fromkeys(one.group[0]["prompt"] for one in shown))
    prompt_limit = length_limit(list(map(num_bytes, prompts)), PROMPT_BYTES)
    regions = AllRegions(runs, shown)
    page = Page(
        images=Images(),
        prompts={prompt: i for i, prompt in enumerate(prompts)},
        regions=regions,
        text_limit=length_limit([num_bytes(row.get("turns") or row["completion"]) for row in rows], TEXT_BYTES),
        cell_limit=length_limit([cells_size(cells) for one in shown for cells in (one.data, *one.logged)], CELL_BYTES),
    )
    fill_images(page.images, runs, shown)
    return {
        "runs": [run.name for run in runs],
        "names": [run.names for run in runs],
        "training": [run.kind == "training" for run in runs],
        "groups": [describe_group(one, runs[one.number], page) for one in shown],
        "prompts": [cut(prompt, prompt_limit) for prompt in prompts],
        "images": list(page.images.numbers),
        "numShown": len(rows),
        "numAll": sum(run.num_rows + run.num_held_out for run in runs),
        "numImagesLeftOut": page.images.num_left_out,
        "numUnread": regions.num_unread,
    }


@dataclass(frozen=True)
class Shown:
    """A group on the page."""

    group: LoggedGroup
    number: int
    """Index of its run."""
    is_held_out: bool
    data: dict[str, str]
    """Columns of its row of the data, as text."""
    logged: list[dict[str, str]]
    """Values that reward functions logged on each completion, as text."""
    turns: GroupTurns


@dataclass(frozen=True)
class Page:
    """Data that all groups on the page share: images and prompts, each once, and limits of texts in bytes."""

    images: Images
    prompts: dict[str, int]
    regions: AllRegions
    text_limit: int
    cell_limit: int


def shown_groups(number: int, run: RunResults, most_rows: int) -> list[Shown]:
    """Choose the groups of a run that the page shows, held-out ones first."""
    held_out = choose_groups(run.held_out, most_rows // HELD_OUT_SHARE)
    others = choose_groups(run.rows, most_rows - sum(map(len, held_out)))

    def show(group: LoggedGroup, is_held_out: bool) -> Shown:
        logged = [logged_on(row, run) for row in group]
        return Shown(group, number, is_held_out, data_of(group[0]), logged, GroupTurns(group))

    return [show(group, True) for group in held_out] + [show(group, False) for group in others]


class AllRegions:
    """The boxes, points and intervals of the groups on the page, within limits of time and number."""

    def __init__(self, runs: Sequence[RunResults], shown: Sequence[Shown]) -> None:
        """Parse the regions of the completions. If time runs out, the parsed groups are spread evenly over all."""
        self.readers = [Regions.of_rewards(run.reward_funcs) for run in runs]
        self.interval_readers = [Intervals.of_rewards(run.reward_funcs) for run in runs]
        self.predicted: dict[int, list[Any]] = {}
        self.intervals: dict[int, list[Interval]] = {}
        self.num_unread = 0
        end = time.monotonic() + REGION_SECONDS
        for one in spread_out(shown):
            reader, of_intervals = self.readers[one.number], self.interval_readers[one.number]
            if not (reader or of_intervals):
                continue
            if time.monotonic() > end:
                self.num_unread += len(one.group)
                continue
            if reader:
                self.predicted |= {id(row): reader.predicted(row) for row in one.group}
            if of_intervals:
                self.intervals |= {id(row): of_intervals.predicted(row) for row in one.group}
        self.most = min(MOST_REGIONS, length_limit(list(map(len, self.predicted.values())), ALL_REGIONS))

    def gold(self, one: Shown) -> list[dict[str, Any]]:
        """Describe the true regions of a group."""
        reader = self.readers[one.number]
        return describe_regions(reader.gold(one.group[0])[:MOST_REGIONS]) if reader else []

    def of_row(self, row: LoggedRow) -> list[dict[str, Any]]:
        """Describe the regions of a completion."""
        return describe_regions(self.predicted.get(id(row), [])[: self.most])

    def gold_intervals(self, one: Shown) -> list[list[float]]:
        """Describe the true intervals of a group."""
        reader = self.interval_readers[one.number]
        return describe_intervals(reader.gold(one.group[0])) if reader else []

    def intervals_of(self, row: LoggedRow) -> list[list[float]]:
        """Describe the intervals of a completion."""
        return describe_intervals(self.intervals.get(id(row), []))

    def image_index(self, number: int) -> int:
        """Return the index of the image that a run's regions lie on."""
        reader = self.readers[number]
        return reader.frames.image_index if reader else 0


def spread_out(values: Sequence[T]) -> list[T]:
    """Shuffle values in a fixed order, so that any first part is spread over all of them."""
    order = sorted(range(len(values)), key=lambda i: hashlib.sha256(str(i).encode()).digest())
    return [values[i] for i in order]


def choose_groups(rows: Sequence[LoggedRow], most_rows: int) -> list[LoggedGroup]:
    """Choose equally many groups from each window or evaluation. If there are too many, take every n-th and the last.

    Groups with kept images come first, then others in order of a hash of their ids. So a prompt that is shown once is
    shown whenever it is drawn.
    """
    windows = [sorted(groups, key=rank) for groups in windows_of(rows).values()]
    if not windows:
        return []
    size = max(1, len(windows[0][0]))
    every = max(1, -(-len(windows) * size // most_rows))
    windows = [groups for i, groups in enumerate(windows) if i % every == 0 or i == len(windows) - 1]
    each = max(1, most_rows // size // len(windows))
    return [group for groups in windows for group in groups[:each]]


def rank(group: LoggedGroup) -> tuple[bool, str]:
    """Return a sort key of groups. Groups with images come first."""
    return not kept_files(group[0]), hashlib.sha256(group[0]["sample_id"].encode()).hexdigest()


def length_limit(lengths: Sequence[int], budget: int) -> int:
    """Return the length to cut texts to, so that their sum is at most `budget`."""
    left, limit = budget, 0
    for i, length in enumerate(sorted(lengths)):
        limit = left // (len(lengths) - i)
        if length > limit:
            return limit
        left -= length
    return max(lengths, default=0)


def fill_images(images: Images, runs: Sequence[RunResults], shown: Sequence[Shown]) -> None:
    """Add the images of all prompts, and then images of turns. If the page gets full, images of turns are spread over
    it."""
    for one in shown:
        start_images(one.group[0], runs[one.number], images)
        describe_videos(one.group[0], runs[one.number], images)
    for one in spread_out(shown):
        for path in one.turns.kept:
            images.add(runs[one.number].image_folder / path, runs[one.number].root)


def start_images(row: LoggedRow, run: RunResults, images: Images) -> list[int | None]:
    """Return the numbers of the images of a row's prompt."""
    return [images.add(run.image_folder / name, run.root) for name in row.get("images") or []]


def describe_videos(row: LoggedRow, run: RunResults, images: Images) -> list[dict[str, Any]]:
    """Describe the videos of a row's prompt: the number of its strip on the page, if it is kept, and its seconds.

    The part of the file between `from` and `to` has the frames of the prompt.
    """
    durations, times = row.get("video_duration") or [], row.get("video_frame_times") or []
    strips = [images.add(run.image_folder / name, run.root) for name in row.get("videos") or []]
    strips += [None] * (len(durations) - len(strips))
    return [
        {"strip": strip, **dict(zip(("from", "to"), part_of(shown, duration), strict=True))}
        for strip, shown, duration in zip(strips, times, durations, strict=False)
    ]


def part_of(times: Sequence[float], duration: float) -> tuple[float, float]:
    """Return the start and end of a video's frames in seconds: their times, with a step before and after, within the
    file."""
    step = (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else duration
    return round(max(0.0, times[0] - step), 2), round(min(duration, times[-1] + step), 2)


def describe_group(one: Shown, run: RunResults, page: Page) -> dict[str, Any]:
    """Describe a group and its completions."""
    row = one.group[0]
    numbers, source = start_images(row, run, page.images), row.get(f"{COLUMN_PREFIX}data_source")
    return {
        "run": one.number,
        "heldOut": one.is_held_out,
        "prompt": page.prompts[row["prompt"]],
        "step": row["step"],
        "id": row["sample_id"],
        "source": None if source is None else str(source),
        "data": fitting(one.data, page.cell_limit),
        "images": numbers,
        "noImage": not any(number is not None for number in numbers) and bool(row.get("image_sizes")),
        "videos": describe_videos(row, run, page.images),
        "goldIntervals": page.regions.gold_intervals(one),
        "sizes": row.get("image_sizes") or [],
        "boxed": page.regions.image_index(one.number),
        "gold": page.regions.gold(one),
        "rows": [describe_row(one, i, run, page) for i in range(len(one.group))],
    }


def describe_row(one: Shown, index: int, run: RunResults, page: Page) -> dict[str, Any]:
    """Describe one completion."""
    row, logged = one.group[index], one.logged[index]
    return {
        **described_text(row["completion"], page.text_limit),
        **describe_turns(one, index, run, page),
        "end": row["finish_reason"],
        "tokens": row["completion_length"],
        "reward": rounded(row["reward"]),
        "advantage": rounded(row["advantage"]),
        "scores": [rounded(row.get(name)) for name in run.names],
        "logged": fitting(logged, page.cell_limit),
        "fault": None if row.get("fault") is None else cut(row["fault"], LONGEST_CELL),
        "regions": page.regions.of_row(row),
        "intervals": page.regions.intervals_of(row),
    }


def describe_turns(one: Shown, index: int, run: RunResults, page: Page) -> dict[str, Any]:
    """Describe the turns of a completion, its own start if it has one, and where it parts from its siblings."""
    row = one.group[index]
    turns = one.turns.described(
        index,
        lambda name: page.images.add(run.image_folder / name, run.root),
        lambda text: cut(text, page.text_limit // max(1, len(one.turns.turns[index]))),
    )
    if not turns:
        return {}
    start = {"start": start_images(row, run, page.images)} if one.turns.starts[index] != one.turns.starts[0] else {}
    return {"turns": turns, "parting": one.turns.parting(index), **start}


def described_text(text: str, limit: int) -> dict[str, Any]:
    """Split a completion into its thinking, which the page folds, and the rest. The rest is cut last."""
    thought = THOUGHT.search(text)
    if thought is None:
        return {"text": cut(text, limit)}
    before, after = (cut(part.strip(), limit) for part in (text[: thought.start()], text[thought.end() :]))
    inner = (thought["closed"] if thought["begun"] is None else thought["begun"]).strip()
    left = max(0, limit - num_bytes(before) - num_bytes(after))
    return {"before": before, "thought": cut(inner, left), "thoughtLength": len(inner), "text": after}


def data_of(row: LoggedRow) -> dict[str, str]:
    """Return the columns of the data in a row, as text."""
    return {
        name.removeprefix(COLUMN_PREFIX): cut(str(value), LONGEST_CELL)
        for name, value in row.items()
        if name.startswith(COLUMN_PREFIX) and value is not None
    }


def logged_on(row: LoggedRow, run: RunResults) -> dict[str, str]:
    """Return the values that reward functions logged on a completion, as text."""
    return {
        name: cut(str(value), LONGEST_CELL)
        for name, value in row.items()
        if value is not None and name not in run.names and not is_column(name)
    }


def cells_size(cells: Mapping[str, str]) -> int:
    """Return the bytes of cells with their names."""
    return sum(num_bytes(name) + num_bytes(value) for name, value in cells.items())


def fitting(cells: Mapping[str, str], limit: int) -> dict[str, str]:
    """Return the first cells up to `limit` bytes, and the number of cells that are left out."""
    kept: dict[str, str] = {}
    for name, value in cells.items():
        limit -= cells_size({name: value})
        if limit < 0:
            return kept | {"…": f"{len(cells) - len(kept)} more left out"}
        kept[name] = value
    return kept


def num_bytes(text: str) -> int:
    """Return the length of a text in UTF-8."""
    return len(text.encode("utf-8", "replace"))


def describe_regions(regions: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"at": [round(number, 1) for number in region.numbers], "label": region.label} for region in regions]


def describe_intervals(intervals: Sequence[Interval]) -> list[list[float]]:
    """Return the start and end of intervals, at most `MOST_REGIONS`."""
    return [[round(one.start, 2), round(one.end, 2)] for one in intervals[:MOST_REGIONS]]


def cut(text: str, limit: int) -> str:
    """Leave out the middle of a text above `limit` bytes in UTF-8, and note how many characters are missing."""
    if len(text) * 4 <= limit or (size := num_bytes(text)) <= limit:
        return text
    half = max(20, limit * len(text) // size // 2)
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n[… {left_out:,} characters left out …]\n{text[-half:]}" if left_out > 0 else text


def rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else round(value, 4)


def faulty_rows(runs: Sequence[RunResults], most: int = 50) -> Sequence[Mapping[str, Any]]:
    """Return the first completions that a reward function failed on, with their runs."""
    found = (row | {"run": run.name} for run in runs for row in run.rows if row.get("fault"))
    return list(islice(found, most))
