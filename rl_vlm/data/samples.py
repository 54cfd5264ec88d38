"""Conversion of rows to samples: reading the prompt and placing images and videos.

load_rows: open_source, choose_columns ─► Rows ─ parse_row ─► ParsedRow ─ read_image, read_video ─► Sample
                        parse_row: with_media, read_prompt, to_messages, media_values, place_media
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from numbers import Number
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any

import numpy as np

from rl_vlm.config.data_names import Which, num_draws
from rl_vlm.config.data_sources import NAMES, SPLITS, data_sources, is_mixture
from rl_vlm.config.schema import DataConfig, DataSource
from rl_vlm.data.columns import choose_columns, prompt_columns, reward_columns
from rl_vlm.data.images import check_image, image_file, read_image
from rl_vlm.data.layouts import LAYOUT_COLUMNS, log_layouts, read_layout, with_media
from rl_vlm.data.media import media_errors
from rl_vlm.data.messages import Message, as_messages, place_media, to_messages
from rl_vlm.data.problems import ANSWERED_PROMPT, EMPTY_PROMPT, UNFILLED_TEMPLATE
from rl_vlm.data.sources import open_source
from rl_vlm.data.tables import (
    IMAGE_COLUMNS,
    MEDIA_COLUMNS,
    SOURCE,
    VIDEO_COLUMNS,
    MixedRows,
    Table,
    TableRow,
    is_filled,
)
from rl_vlm.data.video.frames import FrameRule
from rl_vlm.data.video.read import check_video, read_video
from rl_vlm.data.video.source import ClipHeader
from rl_vlm.data.video.values import CLIP_COLUMNS, is_frame_list, with_columns
from rl_vlm.errors import DataError, TrainingError, is_of_machine, shorten, text_of

if TYPE_CHECKING:
    from rl_vlm.types import Sample

FindGold = Callable[[TableRow, str], str | None]
"""Takes a row and a text. Returns the column whose gold answer the text gives, or None."""
ANSWERED_COLUMNS = ("messages", "conversations")
"""Columns whose final assistant message is the answer, in the layouts of ms-swift and VLM-R1."""
REFUSED_COLUMNS = {
    "tools": "the tools of a run are named in rollout.tools and rollout.environment, and a row has no others",
}
"""Columns that the model would not be given, and why."""


@dataclass(frozen=True)
class ParsedRow:
    """A row whose images and videos are not read yet."""

    messages: list[Message]
    columns: TableRow
    prompt: Any
    images: list[tuple[str, Any]]
    """Column and value of each image."""
    videos: list[tuple[str, Any]]
    """Column and value of each video."""
    num_pixels: int = 0
    """Pixels of the images, each limited to `data.max_pixels`, if their headers were read."""
    headers: tuple[ClipHeader, ...] = ()
    """Headers of the videos, if they were read."""

    @property
    def continues(self) -> bool:
        """Return whether the prompt ends with an assistant message. Completions continue it."""
        return self.messages[-1]["role"] == "assistant"

    @property
    def final_answer(self) -> str:
        """Return the text of the assistant message at the end of the prompt, or "" if there is none."""
        blocks = self.messages[-1]["content"] if self.continues else []
        return "".join(block.get("text", "") for block in blocks).strip()

    @property
    def num_bytes(self) -> int:
        """Return the number of UTF-8 bytes of the prompt's text. No tokenizer makes more tokens of it."""
        texts = [block.get("text", "") for message in self.messages for block in message["content"]]
        return sum(len(text.encode("utf-8", "replace")) for text in texts)


@dataclass(frozen=True)
class Part:
    """Consecutive rows of one entry of the data."""

    entry: DataSource
    rows: Table
    image_folder: Path
    start: int = 0
    """Index of the first row among the rows of all entries."""
    num_unread: int = 0
    """Number of rows after the first ones, if only these were read."""
    own_video_folder: Path | None = None
    """Folder of relative video paths, if it differs from the images'."""

    @property
    def video_folder(self) -> Path:
        return self.own_video_folder or self.image_folder

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def label(self) -> str:
        """Return the name, plus the configuration and the split if they are set."""
        return "@".join(filter(None, (self.name, self.entry.dataset_config, self.entry.split)))


@dataclass(frozen=True)
class Rows:
    """The rows of one split. Iteration decodes one sample after another."""

    name: str
    source: Table
    sample_ids: list[str]
    parts: list[Part]
    config: DataConfig
    video_processor: Any = None
    """The video processor of the checkpoint that gets the rows, which chooses the frames of videos, or None."""
    headers: Mapping[int, tuple[ClipHeader, ...]] = field(default_factory=dict)
    """Headers of the videos by row, which the check has found. A row whose videos have others now cannot be used."""

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __iter__(self) -> Iterator[Sample]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Sample:
        """Read row `index` and decode its images and videos. Raises DataError with the row's name if this fails."""
        return self.sample(index)

    def sample(self, index: int, decode_videos: bool = True) -> Sample:
        """Read row `index` like `[]`. If `decode_videos` is false, frames of videos are black."""
        from rl_vlm.types import Sample  # imports torch, which a dry run does not need

        row, where, part = self.parse(index), self.place(index), self.part(index)
        limit, folder = self.config.max_image_pixels, part.image_folder
        found = [read_image(value, folder, limit, f"{where}, column {name}") for name, value in row.images]
        encoded_images = {i: encoded for i, (_, encoded) in enumerate(found) if encoded is not None}
        images, files = [image for image, _ in found], [image_file(value, folder) for _, value in row.images]
        checked = self.headers.get(index, [None] * len(row.videos))
        videos = [
            read_video(value, part.video_folder, self.frame_rule, f"{where}, column {name}", header, decode_videos)
            for (name, value), header in zip(row.videos, checked, strict=True)
        ]
        return Sample(
            self.sample_ids[index], row.messages, images, row.columns, row.prompt, encoded_images, files, videos
        )

    @property
    def frame_rule(self) -> FrameRule:
        """The rule that chooses frames of videos."""
        return FrameRule(self.config, self.video_processor)

    def with_frames_of(self, video_processor: Any) -> Rows:
        """Return the rows with the frames that a checkpoint's video processor takes. None takes even distances.

        Raises ConfigError if the processor ignores a setting of frames.
        """
        rows = replace(self, video_processor=video_processor)
        rows.frame_rule.check()
        return rows

    def check(self, index: int, row: TableRow) -> ParsedRow:
        """Read `row`, which has this index, and the headers of its images and videos. Raises DataError like `[]`."""
        parsed, where, part = self.parse(index, row), self.place(index), self.part(index)
        limit, folder = self.config.max_image_pixels, part.image_folder
        sizes = [check_image(value, folder, limit, f"{where}, column {name}") for name, value in parsed.images]
        num_pixels = sum(min(size, self.config.max_pixels or limit) for size in sizes)
        headers = [
            check_video(value, part.video_folder, self.frame_rule, f"{where}, column {name}")
            for name, value in parsed.videos
        ]
        return replace(parsed, num_pixels=num_pixels, headers=tuple(headers))

    def video_pixels(self, index: int) -> int:
        """Return the pixels that the tower gets of the videos of row `index`, by their headers.

        Raises DataError like `[]` if the checkpoint's video processor cannot choose frames.
        """
        total = 0
        for number, header in enumerate(self.headers.get(index, ())):
            try:
                total += self.frame_rule.num_pixels(header)
            except Exception:
                name, value = self.parse(index).videos[number]
                with media_errors("video", value, f"{self.place(index)}, column {name}"):
                    raise
        return total

    def refuse_answered(self, index: int, find_gold: FindGold) -> None:
        """Raise DataError if the prompt of row `index` ends with its answer.

        A prompt ends with its answer if its last message is the assistant's and one of two conditions holds:
        `find_gold` finds a column with this answer, or the last message is the answer in the layout of the prompt's
        column.
        """
        parsed, entry = self.parse(index), self.part(index).entry
        if not parsed.final_answer:
            return
        column = entry.columns.get("prompt", "prompt")
        gold = find_gold(parsed.columns, parsed.final_answer)
        if gold is None and column not in ANSWERED_COLUMNS:
            return
        whose = f"in column {gold}" if gold else f"by the layout of column {column}"
        way = f"data.columns: {{messages: {column}}}"
        if column == "messages":
            way = "`prompt: messages` left out of data.columns"
        raise DataError(
            f"{self.place(index)}: its prompt ends with its answer: the last message is the assistant's, "
            f"{shorten(repr(parsed.final_answer), 80)}, which is the gold answer {whose}, and completions would "
            f"continue it. With {way} the last message is split off. Or leave the message out of the prompt.",
            ANSWERED_PROMPT,
        )

    def parse(self, index: int, row: TableRow | None = None) -> ParsedRow:
        """Parse row `index` without its images and videos. Raises DataError if the row cannot be used."""
        where = self.place(index)
        with row_errors(where):
            is_drawn = num_draws(self.part(index).name) is not None
            return parse_row(self.source[index] if row is None else row, self.config, where, is_drawn)

    def place(self, index: int) -> str:
        """Return the name of a row for error messages."""
        part = self.part(index)
        return f"{part.name}, row {index - part.start}"

    def part(self, index: int) -> Part:
        """Return the part of the data that contains row `index`."""
        return self.parts[bisect_right(self.parts, index, key=lambda part: part.start) - 1]

    @property
    def num_unread(self) -> int:
        """Number of rows of the split that were not read, since only the first ones were asked for."""
        return sum(part.num_unread for part in self.parts)

    @cached_property
    def columns(self) -> list[str]:
        """Return all columns that reward functions can ask for."""
        of_parts = [reward_columns(part.rows, self.config.prompt_template) for part in self.parts]
        added = [SOURCE] if isinstance(self.source, MixedRows) else []
        return list(dict.fromkeys([*chain(*of_parts), *added]))

    def first_value(self, column: str) -> Any:
        """Return the column's first value that is not null, or None. Nothing is decoded."""
        values = self.source.values(column) if column in self.source.columns else ()
        return next((value for value in values if value is not None), None)


def load_rows(config: DataConfig, split: Which, max_rows: int | None = None) -> Rows:
    """Open the training or held-out data without decoding images and videos. `max_rows` is passed to `open_source`.

    Raises DataError if the data cannot be read, is empty or has no column for a prompt, if `columns` names a missing
    column, or if a sample id occurs twice.
    """
    given = data_sources(config, split)
    if not given:
        raise DataError(f"data.{NAMES[split]} is not set, so there are no {split} rows to load.")
    parts: list[Part] = []
    for entry in given:
        start = parts[-1].start + len(parts[-1].rows) if parts else 0
        parts.append(load_part(entry, config, split, start, max_rows))
    names, tables = [part.name for part in parts], [part.rows for part in parts]
    source = MixedRows(names, tables) if is_mixture(config, split) else tables[0]
    return Rows(" + ".join(names), source, sample_ids(parts), parts, config)


def load_part(entry: DataSource, config: DataConfig, split: Which, start: int, max_rows: int | None) -> Part:
    """Open one entry of the data, whose first row has index `start`. Raises DataError like `load_rows`."""
    name, template = entry.name, config.prompt_template
    wanted, asked_by = wanted_split(entry, config, split)
    for kind, root in (("image", entry.image_root), ("video", entry.video_root)):
        if root is not None and not Path(root).is_dir():
            raise DataError(f"{name}: data.{kind}_root {root} is no directory; name the folder of its {kind}s.")
    opened = open_source(name, wanted, entry.dataset_config, asked_by, max_rows)
    if len(opened.rows) == 0:
        raise DataError(f"{name} (data.{NAMES[split]}, split {wanted!r}) has no rows.")
    is_only = len(data_sources(config, "train") + data_sources(config, "eval")) == 1
    source = choose_columns(opened.rows, entry, is_only)
    if not any(columns.issubset(source.columns) for columns in prompt_columns(template)):
        read_prompt(source[0], template, f"{name}, row 0")  # raises an error that names the columns
    log_layouts(name, source.columns, with_prompt=template is None)
    image_folder = Path(entry.image_root or opened.image_folder)
    video_folder = Path(entry.video_root) if entry.video_root is not None else None
    return Part(entry, source, image_folder, start, opened.num_unread, video_folder)


def sample_ids(parts: Sequence[Part]) -> list[str]:
    """Return the ids of all rows. If an id occurs in two parts, all ids are prefixed with the labels of their parts."""
    ids = [unique_ids(part.rows, part.name) for part in parts]
    flat = list(chain(*ids))
    if len(set(flat)) == len(flat):
        return flat
    return [f"{part.label}:{sample_id}" for part, own in zip(parts, ids, strict=True) for sample_id in own]


def unique_ids(rows: Table, name: str) -> list[str]:
    """Return each row's `id` as text, or its index if it has no id.

    Raises DataError if an id occurs twice, because both rows would use the same random numbers.
    """
    given = rows.values("id") if "id" in rows.columns else [None] * len(rows)
    ids = [str(index if value is None else value) for index, value in enumerate(given)]
    first_rows: dict[str, int] = {}
    for index, sample_id in enumerate(ids):
        if (first := first_rows.setdefault(sample_id, index)) != index:
            raise DataError(
                f"{name}: rows {first} and {index} have the same id {sample_id!r}, so they would share random numbers "
                "and count as one sample. Make column `id` unique, or leave it out with data.ignore_columns: [id]."
            )
    return ids


def wanted_split(entry: DataSource, config: DataConfig, split: Which) -> tuple[str, str | None]:
    """Return the split of an entry, and the setting that asks for it or None if data without splits may be opened."""
    common = getattr(config, SPLITS[split])
    if entry.split is not None:
        return entry.split, f"split {entry.split!r} of data.{NAMES[split]}"
    is_default = common == DataConfig.model_fields[SPLITS[split]].default
    return common, None if is_default or is_mixture(config, split) else f"data.{SPLITS[split]} {common!r}"


def columns_to_check(template: str | None) -> set[str]:
    """Return all columns that affect whether a row can be used."""
    return {*set().union(*prompt_columns(template)), *LAYOUT_COLUMNS, *MEDIA_COLUMNS, *CLIP_COLUMNS, *REFUSED_COLUMNS}


@contextmanager
def row_errors(where: str) -> Iterator[None]:
    """Turn an error in the block into a DataError, or into a TrainingError if it is one of the machine.

    The message begins with `where`.
    """
    try:
        yield
    except (DataError, KeyboardInterrupt):
        raise
    except BaseException as error:  # a row of a function or a file can hold anything
        kind = TrainingError if is_of_machine(error) else DataError
        raise kind(f"{where}: it cannot be read: {type(error).__name__}: {shorten(text_of(error))}") from error


def parse_row(row: TableRow, config: DataConfig, where: str, takes_empty: bool) -> ParsedRow:
    """Read a row's prompt and place its images and videos. Reads none. Raises DataError if the row cannot be used.

    A prompt without content cannot be used, unless `takes_empty` is true.
    """
    row = with_media(row)
    prompt, columns = read_prompt(row, config.prompt_template, where)
    messages = as_messages(prompt)
    if config.system_prompt and all(message.get("role") != "system" for message in messages):
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    prompt = prompt if isinstance(prompt, str) else messages
    images = media_values(row, IMAGE_COLUMNS, where)
    videos = with_columns(media_values(row, VIDEO_COLUMNS, where), row, where)
    if config.text_only and (images or videos):
        kind, (column, _) = ("an image", images[0]) if images else ("a video", videos[0])
        raise DataError(
            f"{where}: column {column} holds {kind}, and data.text_only is set. Unset it, or leave the column out with "
            "data.ignore_columns."
        )
    messages = to_messages(messages, where, takes_empty)
    messages = place_media(messages, {"image": len(images), "video": len(videos)}, where)
    return ParsedRow(messages, columns, prompt, images, videos)


def read_prompt(row: TableRow, template: str | None, where: str) -> tuple[str | list[Message], TableRow]:
    """Return a row's prompt, as text or messages, and the columns for reward functions.

    Rows of other systems are read with `read_layout`. Raises DataError if a row has no prompt, or if a column of
    `REFUSED_COLUMNS` is filled.
    """
    refused = [name for name in REFUSED_COLUMNS if is_filled(row.get(name))]
    if refused:
        raise DataError(
            f"{where}: column {', '.join(refused)} is filled; "
            f"{'; '.join(dict.fromkeys(REFUSED_COLUMNS[name] for name in refused))}. The model would not be given it: "
            "drop the column, or empty it."
        )
    read = read_layout(row, where, with_prompt=template is None)
    columns = {name: value for name, value in read.items() if name not in ("prompt", *MEDIA_COLUMNS)}
    if template is not None:
        return refuse_empty(fill_template(template, read, where), where), columns
    prompt = read.get("prompt")
    is_messages = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    if isinstance(prompt, str):
        return refuse_empty(prompt, where), columns
    if is_messages and prompt:
        return prompt, columns
    raise DataError(
        f"{where}: found {shorten(repr(prompt), 200)} for a prompt, expected text or messages in column "
        f"`prompt`. The columns are {', '.join(row)}; name one with data.columns, as in {{prompt: question}}, or make "
        "the prompt from others with data.prompt_template."
    )


def refuse_empty(text: str, where: str) -> str:
    """Return the text of a prompt. Raises DataError if it is empty or whitespace only."""
    if not text.strip():
        raise DataError(
            f"{where}: the prompt is {shorten(repr(text), 40)}, without any text. Write one, or <image> alone for an "
            "image without a question.",
            EMPTY_PROMPT,
        )
    return text


class PlainFormatter(Formatter):
    """Formats text, numbers and booleans as `str.format` does, and raises ValueError for other values.

    Otherwise null would become "None", the null of pandas "nan", and a list or dict its Python code.
    """

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        """Return the value of a field and its name."""
        value, used = super().get_field(field_name, args, kwargs)
        if value is None or (isinstance(value, Number) and value != value):
            raise ValueError(f"`{field_name}` is null")
        if not isinstance(value, str | Number | np.bool_):
            raise ValueError(f"`{field_name}` is a {type(value).__name__}, neither text nor a number nor a boolean")
        return value, used


def fill_template(template: str, row: TableRow, where: str) -> str:
    """Fill the template with columns of the row. Raises DataError if a column is missing, null, or not plain."""
    try:
        return PlainFormatter().vformat(template, (), row)
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        raise DataError(
            f"{where}: data.prompt_template {template!r} cannot be filled: {type(error).__name__} {error}. "
            f"The columns are {', '.join(row)}; a literal brace is written twice.",
            UNFILLED_TEMPLATE,
        ) from error


def media_values(row: TableRow, columns: tuple[str, str], where: str) -> list[tuple[str, Any]]:
    """Return the column and value of each image, or of each video, in the two columns. The list may be empty.

    A list in column `video` is one video if it holds frames.
    """
    given = {name: row[name] for name in columns if is_filled(row.get(name))}
    if len(given) > 1:
        raise DataError(
            f"{where}: `{columns[0]}` and `{columns[1]}` are both filled; leave one of them empty, or name it in "
            "data.ignore_columns."
        )
    lists = {
        name: values if isinstance(values, list) and not (name == "video" and is_frame_list(values)) else [values]
        for name, values in given.items()
    }
    return [(name, value) for name, values in lists.items() for value in values]
