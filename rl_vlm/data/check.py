"""Checks of the data before a run. They find the rows that can be used, and the problems of the others.

load_rows ─► Rows ─ check_rows: columns, then every row and image header ─► UsableRows ─ fitting_rows ─► UsableRows
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from rl_vlm.config.schema import DataSource
from rl_vlm.data.columns import refuse_unread_media
from rl_vlm.data.problems import LONG_PROMPT, UNUSABLE
from rl_vlm.data.prompts import LongPromptError, PromptBuilder, build_prompt
from rl_vlm.data.sampler import Share
from rl_vlm.data.samples import FindGold, ParsedRow, Rows, columns_to_check
from rl_vlm.data.tables import TableRow
from rl_vlm.data.video.source import ClipHeader
from rl_vlm.errors import DataError, Finding, Problem, Severity

if TYPE_CHECKING:
    from rl_vlm.distributed.ranks import Ranks
    from rl_vlm.types import Sample

logger = logging.getLogger(__name__)

T = TypeVar("T")

NUM_THREADS = 16
"""Image headers that are read at once. To find and open the files takes most of the time."""
EXAMPLES = 100
"""Number of rows per source that `UsableRows.example` searches for a complete one."""
SHORT_TEXT = 1024
"""Texts of more bytes are noted as long. The context of every model has more tokens."""
SMALL_IMAGES = 512 * 512
"""Images of a row with more pixels in all are noted as large."""


def no_gold(row: TableRow, text: str) -> None:
    """Find no gold answer."""


class RowNote(NamedTuple):
    """The check's notes on one row."""

    row: int
    finding: Finding | None
    """The row's problem. It is an error unless `on_bad_row` drops the row."""
    num_bytes: int
    """Bytes of the prompt's text."""
    num_pixels: int
    """Pixels of the images."""
    continues: bool
    """Whether the prompt ends with an assistant message."""
    headers: tuple[ClipHeader, ...] = ()
    """Headers of the videos."""


class DroppedRow(NamedTuple):
    """A row that a run leaves out, unless its finding is an error, which ends the run."""

    finding: Finding
    record: dict[str, Any]
    """The line about it in `dropped_prompts.jsonl`."""

    @property
    def is_long(self) -> bool:
        """Whether its prompt has more tokens than `data.max_prompt_length`."""
        return self.finding.kind == LONG_PROMPT.kind


@dataclass(frozen=True)
class UsableRows:
    """The rows of a split that a run uses."""

    rows: Rows
    indices: list[int]
    dropped: list[DroppedRow]
    text_bytes: dict[int, int]
    """Bytes of the prompt's text by row, if it may be long."""
    num_pixels: dict[int, int]
    """Pixels of the images by row, if they may be large."""

    @classmethod
    def of_notes(cls, rows: Rows, indices: Sequence[int], notes: Sequence[RowNote]) -> UsableRows:
        """Take the sizes of texts, images and videos from notes."""
        rows = replace(rows, headers={note.row: note.headers for note in notes if note.headers})
        text_bytes = {note.row: note.num_bytes for note in notes}
        return cls(rows, list(indices), [], text_bytes, {note.row: note.num_pixels for note in notes})

    @property
    def headers(self) -> Mapping[int, tuple[ClipHeader, ...]]:
        """Headers of the videos by row."""
        return self.rows.headers

    @property
    def most_videos(self) -> int:
        """Return the largest number of videos in a row."""
        return max((len(self.headers.get(row, ())) for row in self.indices), default=0)

    def __len__(self) -> int:
        return len(self.indices)

    def example(self, columns: Collection[str], is_wanted: Callable[[TableRow], bool] = lambda row: True) -> Sample:
        """Return an early row of a source with values in all of `columns` that the data has, or else the first row.

        The row's columns must also pass `is_wanted`.
        """
        wanted = set(self.rows.columns).intersection(columns)
        firsts = [bisect_left(self.indices, part.start) for part in self.rows.parts]
        for index in chain(*(self.indices[first : first + EXAMPLES] for first in firsts)):
            found = self.rows.parse(index).columns
            if all(found.get(name) is not None for name in wanted) and is_wanted(found):
                return self.rows[index]
        return self.rows[self.indices[0]]

    def shares(self) -> list[Share]:
        """Return the sources of a mixture with weights, or an empty list if there are no weights.

        Raises DataError if a source has no usable row.
        """
        shares = []
        for part in self.rows.parts:
            entry: DataSource = part.entry
            if entry.weight is None:
                return []
            first, end = (bisect_left(self.indices, row) for row in (part.start, part.start + len(part.rows)))
            if first == end:
                raise DataError(f"{part.label}: none of its rows can be used, and it has weight {entry.weight:g}.")
            shares.append(Share(end - first, entry.weight))
        return shares

    def pixels_of(self, row: int) -> int:
        """Return the pixels of a row's images and videos that the tower gets, or 0 if its images are small.

        Raises DataError if the checkpoint's video processor cannot choose the frames of a video.
        """
        return self.num_pixels.get(row, 0) + self.rows.video_pixels(row)

    def largest(self, count: int) -> list[int]:
        """Return `count` rows whose images and videos have the most pixels, and `count` rows with the longest texts."""
        sizes = {row: self.pixels_of(row) for row in self.indices}
        by_size = [
            sorted(self.indices, key=lambda row: found.get(row, 0), reverse=True)[:count]
            for found in (sizes, self.text_bytes)
        ]
        return list(dict.fromkeys(by_size[0] + by_size[1]))

    def without(self, dropped: Sequence[DroppedRow]) -> UsableRows:
        """Leave out further rows. Raises DataError if none is left."""
        gone = {each.finding.row for each in dropped}
        left = replace(self, indices=[i for i in self.indices if i not in gone], dropped=[*self.dropped, *dropped])
        if not left.indices:
            raise DataError(f"{self.rows.name}: none of its {len(self.rows)} rows can be used. {summary(left.dropped)}")
        return left


def bad_row(rows: Rows, row: int, error: DataError) -> Finding:
    """Build the finding about a row that cannot be used. It is an error unless `on_bad_row` drops the row."""
    data, (kind, remedy) = rows.config, error.problem or UNUSABLE
    severity: Severity = "error" if data.on_bad_row == "raise" else "warning"
    return Finding(severity, kind, str(error), remedy, rows.name, row)


def long_row(rows: Rows, row: int, num_tokens: int, limit: int) -> DroppedRow:
    """Leave out a row whose prompt has more than `limit` tokens."""
    kind, remedy = LONG_PROMPT
    reason = f"its prompt has {num_tokens} tokens, more than data.max_prompt_length {limit}"
    finding = Finding("warning", kind, f"{rows.place(row)}: {reason}", remedy, rows.name, row)
    return DroppedRow(finding, record_of(rows, row, reason) | {"tokens": num_tokens, "limit": limit})


def dropped_row(rows: Rows, row: int, finding: Finding) -> DroppedRow:
    """Leave out a row because of a finding about it."""
    return DroppedRow(finding, record_of(rows, row, finding.what))


def record_of(rows: Rows, row: int, reason: str) -> dict[str, Any]:
    """Build the record of a dropped row."""
    part = rows.part(row)
    return {"data": part.name, "sample_id": rows.sample_ids[row], "row": row - part.start, "reason": reason}


def check_rows(rows: Rows, used: Collection[str], ranks: Ranks, find_gold: FindGold = no_gold) -> UsableRows:
    """Check the columns and all rows, and return the rows to use. Each rank checks its share of the rows.

    `used` are the columns that reward functions name. `find_gold` finds out whether a prompt ends with its gold answer.
    Raises DataError if images are in a column that nobody reads, if no row has an image, or if a row cannot be used and
    `on_bad_row` does not drop it. Images are not decoded: damage after a header is found only when the row is drawn.
    """
    num, rank, size = len(rows), ranks.rank, ranks.world_size
    share = range(num * rank // size, num * (rank + 1) // size)
    with ranks.agree():
        refuse_unread_media(rows.source, rows.config, rows.name, used)
        mine = list(find_problems(rows, share, find_gold))
    notes = sorted(ranks.gather(mine), key=lambda note: note.row)
    if ranks.is_main:
        warn_of_continued(rows, sum(note.continues for note in notes))
    usable = UsableRows.of_notes(rows, range(num), notes)
    return without_bad(usable, [dropped_row(rows, note.row, note.finding) for note in notes if note.finding])


def find_problems(rows: Rows, share: range, find_gold: FindGold = no_gold) -> Iterator[RowNote]:
    """Yield notes on rows with a problem, a long text, large images, videos, or a final message of the assistant."""
    for note, _ in over_rows(rows, share, partial(inspect_row, rows, find_gold)):
        is_large = note.num_bytes > SHORT_TEXT or note.num_pixels > SMALL_IMAGES or note.headers
        if note.finding or note.continues or is_large:
            yield note


def over_rows(rows: Rows, share: range, inspect: Callable[[int, TableRow], T]) -> Iterator[T]:
    """Call `inspect` on each row of a share in several threads, and yield the results in order.

    The rows have only the columns that checks read.
    """
    columns = columns_to_check(rows.config.prompt_template)
    start = share.start
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        for batch in rows.source.batches(share, columns):
            numbered = list(enumerate(batch, start))
            size = -(-len(batch) // NUM_THREADS)
            parts = [numbered[i : i + size] for i in range(0, len(batch), size)]
            for inspected in pool.map(lambda part: [inspect(index, row) for index, row in part], parts):
                yield from inspected
            start += len(batch)


def inspect_row(rows: Rows, find_gold: FindGold, index: int, row: TableRow) -> tuple[RowNote, ParsedRow | None]:
    """Read a row, and the headers of its images and videos. Also return the parsed row if it can be used."""
    try:
        parsed = rows.check(index, row)
        if parsed.continues:
            rows.refuse_answered(index, find_gold)
        return RowNote(index, None, parsed.num_bytes, parsed.num_pixels, parsed.continues, parsed.headers), parsed
    except DataError as error:
        return RowNote(index, bad_row(rows, index, error), 0, 0, False), None


def warn_of_continued(rows: Rows, num_continued: int) -> None:
    """Log how many prompts end with an assistant message. It may be an answer that should not be there."""
    if num_continued:
        logger.warning(
            "%s: the prompts of %d of %d rows end with a message of the assistant, and completions continue it. If it "
            "is the answer, leave it out of the prompt.", rows.name, num_continued, len(rows),
        )  # fmt: skip


def fitting_rows(usable: UsableRows, builder: PromptBuilder, limit: int | None) -> UsableRows:
    """Choose the frames of videos for the builder's processor, and leave out rows whose prompts are too long.

    It is checked that the processor can choose frames. Prompts may have `limit` tokens, and it is checked that they can
    be built.

    With a limit every prompt is built once, images included. Without one, a prompt is built only if its text alone may
    exceed the model's context. Prompts are not truncated, because that would remove image tokens. Raises DataError if
    a prompt cannot be built or is too long for the model, and `on_bad_row` does not drop it.
    """
    usable = with_frames(usable, builder)
    usable = without_bad(usable, list(frameless_rows(usable)))
    return without_bad(usable, list(unbuilt_rows(usable, usable.indices, builder, limit)))


def with_frames(usable: UsableRows, builder: PromptBuilder) -> UsableRows:
    """Choose the frames of videos for the builder's processor. Log it if the model gets them as images."""
    usable = replace(usable, rows=usable.rows.with_frames_of(builder.video_processor))
    if usable.headers and builder.video_format == "frames" and usable.rows.config.video_format == "auto":
        logger.info(
            "%s: the model gets the frames of videos as images (data.video_format: auto), since it or the engine has "
            "no tested input for videos", usable.rows.name,
        )  # fmt: skip
    return usable


def unfitting_rows(usable: UsableRows, builder: PromptBuilder, limit: int | None) -> Iterator[DroppedRow]:
    """Yield the rows that `fitting_rows` leaves out. Rows without frames come first."""
    frameless = list(frameless_rows(usable))
    yield from frameless
    bad = {each.finding.row for each in frameless}
    yield from unbuilt_rows(usable, [row for row in usable.indices if row not in bad], builder, limit)


def frameless_rows(usable: UsableRows) -> Iterator[DroppedRow]:
    """Yield the rows with a video for which the processor cannot choose frames."""
    for row in usable.indices:
        try:
            usable.pixels_of(row)
        except DataError as error:
            yield dropped_row(usable.rows, row, bad_row(usable.rows, row, error))


def unbuilt_rows(
    usable: UsableRows, indices: Sequence[int], builder: PromptBuilder, limit: int | None
) -> Iterator[DroppedRow]:
    """Yield the rows among `indices` whose prompts cannot be built or are too long."""
    rows, longest = usable.rows, builder.max_tokens
    if limit is None:
        indices = [i for i in indices if longest is not None and usable.text_bytes.get(i, 0) > longest]
    if len(indices) > 1:
        logger.info("counting the tokens of %d prompts of %s", len(indices), rows.name)
    for row in indices:
        if (found := unfitting_row(rows, row, builder, limit)) is not None:
            yield found


def unfitting_row(rows: Rows, row: int, builder: PromptBuilder, limit: int | None) -> DroppedRow | None:
    """Build the prompt of a row. Leave the row out if that fails, or if the prompt is too long."""
    try:
        num_tokens = len(build_prompt(rows, row, builder).token_ids)
    except DataError as error:
        if limit is None or not isinstance(error, LongPromptError) or error.num_tokens <= limit:
            return dropped_row(rows, row, bad_row(rows, row, error))
        num_tokens = error.num_tokens
    return long_row(rows, row, num_tokens, limit) if limit is not None and num_tokens > limit else None


def without_bad(usable: UsableRows, dropped: Sequence[DroppedRow]) -> UsableRows:
    """Leave out rows. Raises DataError if the finding about one of them is an error."""
    errors = [each.finding for each in dropped if each.finding.severity == "error"]
    if errors:
        first, others = errors[0], ""
        if len(errors) > 1:
            others = f" {len(errors) - 1} more of {len(usable.rows)} rows cannot be used."
        raise DataError(
            f"{first.what.rstrip('.')}.{others} To leave such rows out and list them, set data.on_bad_row: drop.",
            Problem(first.kind, first.remedy),
        )
    return usable.without(dropped)


def summary(dropped: Sequence[DroppedRow]) -> str:
    """Describe the dropped rows: how many prompts are too long, how many rows are bad, and why the first one is."""
    long = [each.record for each in dropped if each.is_long]
    bad = [each.record for each in dropped if not each.is_long]
    parts = []
    if long:
        shortest = min(record["tokens"] for record in long)
        parts.append(
            f"{len(long)} prompts are longer than data.max_prompt_length {long[0]['limit']}; the shortest of them has "
            f"{shortest} tokens."
        )
    if bad:
        parts.append(f"{len(bad)} rows cannot be used, the first because: {bad[0]['reason']}")
    return " ".join(parts)


def warn_of_dropped(dropped: Sequence[DroppedRow], file: Path) -> None:
    """Log how many rows of each data source are dropped, and the file that lists them."""
    for name in dict.fromkeys(each.record["data"] for each in dropped):
        some = [each for each in dropped if each.record["data"] == name]
        logger.warning("%s: %d rows are left out and listed in %s. %s", name, len(some), file, summary(some))
