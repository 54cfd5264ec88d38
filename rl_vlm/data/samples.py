"""Conversion of rows to samples: reading the prompt and placing the images.

source ─ load_rows ─► Rows ─ sample(index): parse_row ─► ParsedRow ─ read_image ─► Sample
                        parse_row: read_prompt, to_messages, image_values, place_images
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Number
from pathlib import Path
from string import Formatter
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rl_vlm.config.schema import DataConfig
from rl_vlm.data.columns import choose_columns, prompt_columns, reward_columns
from rl_vlm.data.images import check_image, read_image
from rl_vlm.data.messages import Message, place_images, read_conversations, to_messages
from rl_vlm.data.sources import Source, open_source, unique_ids
from rl_vlm.data.tables import IMAGE_COLUMNS, Row, is_filled
from rl_vlm.errors import DataError, shorten, text_of

if TYPE_CHECKING:
    from rl_vlm.types import Sample

SourceOpener = Callable[[str, str, str | None, str | None], tuple[Source, Path]]
"""`open_source`, or a function with its arguments."""
REFUSED_COLUMNS = ("video", "videos", "tools")


@dataclass(frozen=True)
class ParsedRow:
    """A row whose images are not read yet."""

    messages: list[Message]
    columns: Row
    prompt: Any
    images: list[tuple[str, Any]]
    """Column and value of each image."""
    num_pixels: int = 0
    """Pixels of the images, if their headers were read: of each at most `data.max_pixels`, to which it is resized."""

    @property
    def continues(self) -> bool:
        """Return whether the prompt ends with a message of the assistant, which completions continue."""
        return self.messages[-1]["role"] == "assistant"

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the prompt's text in UTF-8, which no tokenizer splits into more tokens."""
        texts = [block.get("text", "") for message in self.messages for block in message["content"]]
        return sum(len(text.encode("utf-8", "replace")) for text in texts)


@dataclass(frozen=True)
class Rows:
    """The rows of one split. Iteration decodes one sample after another."""

    name: str
    source: Source
    sample_ids: list[str]
    image_folder: Path
    config: DataConfig

    def __len__(self) -> int:
        return len(self.sample_ids)

    def __iter__(self) -> Iterator[Sample]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Sample:
        """Read row `index` and decode its images. Raises DataError, naming the row, if it cannot be used."""
        from rl_vlm.types import Sample  # imports torch, which a dry run does not need

        where = self.place(index)
        with row_errors(where):
            row = parse_row(self.source[index], self.config, where)
        limit = self.config.max_image_pixels
        found = [read_image(value, self.image_folder, limit, f"{where}, column {name}") for name, value in row.images]
        encoded_images = {i: encoded for i, (_, encoded) in enumerate(found) if encoded is not None}
        images = [image for image, _ in found]
        return Sample(self.sample_ids[index], row.messages, images, row.columns, row.prompt, encoded_images)

    def check(self, index: int, row: Row) -> ParsedRow:
        """Read `row`, which is row `index`, and its images as far as their headers. Raises DataError like `[]`."""
        where = self.place(index)
        with row_errors(where):
            parsed = parse_row(row, self.config, where)
        limit = self.config.max_image_pixels
        sizes = [
            check_image(value, self.image_folder, limit, f"{where}, column {name}") for name, value in parsed.images
        ]
        return replace(parsed, num_pixels=sum(min(size, self.config.max_pixels or limit) for size in sizes))

    def place(self, index: int) -> str:
        """Return the name of a row for error messages."""
        return f"{self.name}, row {index}"

    @property
    def columns(self) -> list[str]:
        """Return the columns of all rows that reward functions can ask for."""
        return reward_columns(self.source, self.config.prompt_template)

    def first_value(self, column: str) -> Any:
        """Return the column's first value that is not null, or None. Images are not decoded."""
        values = self.source.values(column) if column in self.source.columns else ()
        return next((value for value in values if value is not None), None)


def load_rows(config: DataConfig, split: Literal["train", "eval"], open_source: SourceOpener = open_source) -> Rows:
    """Open the training or held-out data without decoding images.

    `open_source` opens them; a dry run has its own.
    Raises DataError if the data cannot be read, is empty or has no column for a prompt, if `columns` names one that
    is not there, or if a sample id occurs twice.
    """
    key, name, part_key, part = {
        "train": ("dataset_name", config.dataset_name, "dataset_train_split", config.dataset_train_split),
        "eval": ("eval_dataset_name", config.eval_dataset_name, "dataset_test_split", config.dataset_test_split),
    }[split]
    if name is None:
        raise DataError(f"data.{key} is not set, so there are no {split} rows to load.")
    is_default = part == DataConfig.model_fields[part_key].default
    source, folder = open_source(name, part, config.dataset_config, None if is_default else part_key)
    if len(source) == 0:
        raise DataError(f"{name} (data.{key}, split {part!r}) has no rows.")
    source = choose_columns(source, config, name)
    rows = Rows(name, source, unique_ids(source, name), Path(config.image_root or folder), config)
    if not any(columns.issubset(source.columns) for columns in prompt_columns(config.prompt_template)):
        read_prompt(source[0], config.prompt_template, rows.place(0))  # raises an error that names the columns
    return rows


@contextmanager
def row_errors(where: str) -> Iterator[None]:
    """Raise DataError, whose message begins with `where`, for any error in the block."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:  # a row of a function or a file can hold anything
        raise DataError(f"{where}: it cannot be read: {type(error).__name__}: {shorten(text_of(error))}") from error


def parse_row(row: Row, config: DataConfig, where: str) -> ParsedRow:
    """Read a row's prompt and place its images. Raises DataError if the row cannot be used; reads no image."""
    prompt, columns = read_prompt(row, config.prompt_template, where)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if config.system_prompt and all(message.get("role") != "system" for message in messages):
        messages = [{"role": "system", "content": config.system_prompt}, *messages]
    prompt = prompt if isinstance(prompt, str) else messages
    images = image_values(row, where)
    if config.text_only and images:
        raise DataError(
            f"{where}: column {images[0][0]} holds an image, and data.text_only is set. Unset it, or leave the column "
            "out with data.ignore_columns."
        )
    messages = place_images(to_messages(messages, where), len(images), where)
    return ParsedRow(messages, columns, prompt, images)


def read_prompt(row: Row, template: str | None, where: str) -> tuple[str | list[Message], Row]:
    """Return a row's prompt, as text or messages, and the columns for reward functions.

    Rows of VLM-R1 hold `conversations`; their final answer becomes column `solution`. Raises DataError if a row has no
    prompt, or a value in a column of `REFUSED_COLUMNS`.
    """
    refused = [name for name in REFUSED_COLUMNS if is_filled(row.get(name))]
    if refused:
        raise DataError(
            f"{where}: column {', '.join(refused)} is filled; video and tool calls are not in this project, and the "
            "model would not be given them. Drop the column, or empty it."
        )
    columns = {name: value for name, value in row.items() if name not in ("prompt", *IMAGE_COLUMNS)}
    if template is not None:
        return refuse_empty(fill_template(template, row, where), where), columns
    prompt = row.get("prompt")
    if prompt is None and row.get("conversations"):
        prompt, gold = read_conversations(columns.pop("conversations"), where)
        columns |= gold
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
    """Return the text of a prompt. Raises DataError if it is empty or only whitespace."""
    if not text.strip():
        raise DataError(
            f"{where}: the prompt is {shorten(repr(text), 40)}, without any text. Write one, or <image> alone for an "
            "image without a question."
        )
    return text


class PlainFormatter(Formatter):
    """Formats text, numbers and booleans as `str.format` does, and raises ValueError for other values.

    Null would become the text "None", the null of pandas "nan", and a list or dict its Python code.
    """

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> Any:
        """Return the value of a field and its name."""
        value, used = super().get_field(field_name, args, kwargs)
        if value is None or (isinstance(value, Number) and value != value):
            raise ValueError(f"`{field_name}` is null")
        if not isinstance(value, str | Number | np.bool_):
            raise ValueError(f"`{field_name}` is a {type(value).__name__}, neither text nor a number nor a boolean")
        return value, used


def fill_template(template: str, row: Row, where: str) -> str:
    """Fill the template with columns of the row. Raises DataError if one is missing null, or not plain."""
    try:
        return PlainFormatter().vformat(template, (), row)
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        raise DataError(
            f"{where}: data.prompt_template {template!r} cannot be filled: {type(error).__name__} {error}. "
            f"The columns are {', '.join(row)}; a literal brace is written twice."
        ) from error


def image_values(row: Row, where: str) -> list[tuple[str, Any]]:
    """Return column and value of each image in column `image` or `images`. The list is empty for a text row."""
    given = {name: row[name] for name in IMAGE_COLUMNS if is_filled(row.get(name))}
    if len(given) > 1:
        raise DataError(
            f"{where}: `image` and `images` are both filled; leave one of them empty, or name it in "
            "data.ignore_columns."
        )
    return [
        (name, value) for name, values in given.items() for value in (values if isinstance(values, list) else [values])
    ]
