"""Conversion of rows to samples: reading the prompt and placing the images.

source ─ load_rows ─► Rows ─ sample(index): read_prompt, to_messages, row_images, place_images ─► Sample
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from PIL import Image

from rl_vlm.config.schema import DataConfig
from rl_vlm.data.images import read_image
from rl_vlm.data.sources import IMAGE_COLUMNS, Row, open_source, unique_ids
from rl_vlm.errors import DataError, shorten

if TYPE_CHECKING:
    from rl_vlm.types import Sample

Message = dict[str, Any]
SourceOpener = Callable[[str, str, str | None, str | None], tuple[Sequence[Row], Path]]
"""`open_source`, or a function with its arguments."""

REFUSED_COLUMNS = ("video", "videos", "tools")
ROLES = ("system", "user", "assistant")
SPEAKERS = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}


@dataclass(frozen=True)
class Rows:
    """The rows of one split. Iteration decodes one sample after another."""

    name: str
    source: Sequence[Row]
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

        return Sample(**self.fields(index))

    def fields(self, index: int) -> dict[str, Any]:
        """Return the fields of a `Sample` by name. Raises DataError like `__getitem__`."""
        row, where = self.source[index], f"{self.name}, row {index}"
        prompt, columns = read_prompt(row, self.config.prompt_template, where)
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self.config.system_prompt and all(message.get("role") != "system" for message in messages):
            messages = [{"role": "system", "content": self.config.system_prompt}, *messages]
        prompt = prompt if isinstance(prompt, str) else messages
        found = row_images(row, self.image_folder, self.config.max_image_pixels, where)
        images = [image for image, _ in found]
        encoded_images = {i: encoded for i, (_, encoded) in enumerate(found) if encoded is not None}
        messages = place_images(to_messages(messages, where), len(images), where)
        return {
            "sample_id": self.sample_ids[index], "messages": messages, "images": images, "columns": columns,
            "prompt": prompt, "encoded_images": encoded_images,
        }  # fmt: skip


def load_rows(config: DataConfig, split: Literal["train", "eval"], open_source: SourceOpener = open_source) -> Rows:
    """Open the training or held-out data without decoding images.

    `open_source` opens them; a dry run has its own.
    Raises DataError if the data cannot be read, is empty or has no prompt, or if a sample id occurs twice.
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
    read_prompt(source[0], config.prompt_template, f"{name}, row 0")
    return Rows(name, source, unique_ids(source, name), Path(config.image_root or folder), config)


def read_prompt(row: Row, template: str | None, where: str) -> tuple[str | list[Message], Row]:
    """Return a row's prompt, as text or messages, and the columns for reward functions.

    Rows of VLM-R1 hold `conversations`; their final answer becomes column `solution`. Raises DataError if a row has no
    prompt, or a value in a column of `REFUSED_COLUMNS`.
    """
    refused = [name for name in REFUSED_COLUMNS if row.get(name) is not None]
    if refused:
        raise DataError(
            f"{where}: column {', '.join(refused)} is filled; video and tool calls are not in this project, and the "
            "model would not be given them. Drop the column, or empty it."
        )
    columns = {name: value for name, value in row.items() if name not in ("prompt", *IMAGE_COLUMNS)}
    if template is not None:
        return fill_template(template, row, where), columns
    prompt = row.get("prompt")
    if prompt is None and row.get("conversations"):
        prompt, gold = read_conversations(columns.pop("conversations"), where)
        columns |= gold
    is_messages = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    if isinstance(prompt, str) or (is_messages and prompt):
        return prompt, columns
    raise DataError(
        f"{where}: found {shorten(repr(prompt), 200)} for a prompt, expected text or messages in column "
        f"`prompt`. The columns are {', '.join(row)}; rename one, or make the prompt from others with "
        "data.prompt_template."
    )


def fill_template(template: str, row: Row, where: str) -> str:
    try:
        return template.format(**row)
    except (LookupError, ValueError, AttributeError) as error:
        raise DataError(
            f"{where}: data.prompt_template {template!r} cannot be filled: {type(error).__name__} {error}. "
            f"The columns are {', '.join(row)}; a literal brace is written twice."
        ) from error


def read_conversations(turns: list[Row], where: str) -> tuple[list[Message], Row]:
    """Convert turns of `from` and `value` to messages, and a final answer to `{"solution": value}`."""
    for turn in turns:
        if turn.get("from") not in SPEAKERS or "value" not in turn:
            found = shorten(repr(turn), 200)
            raise DataError(f"{where}: found turn {found}, expected `value` and `from` ({', '.join(SPEAKERS)}).")
    gold = {}
    if SPEAKERS[turns[-1]["from"]] == "assistant":
        gold = {"solution": turns[-1]["value"]}
        turns = turns[:-1]
    return [{"role": SPEAKERS[turn["from"]], "content": split_marks(str(turn["value"]))} for turn in turns], gold


def split_marks(text: str) -> list[Row]:
    """Split text at `<image>` marks, and at marks of media that are refused later, into content blocks."""
    parts = re.split(r"<(image|video|audio)>", text)
    blocks = [{"type": "text", "text": part} if i % 2 == 0 else {"type": part} for i, part in enumerate(parts)]
    return [block for block in blocks if block != {"type": "text", "text": ""}]


def to_messages(messages: list[Message], where: str) -> list[Message]:
    """Convert contents of messages to lists of blocks. Raises DataError for anything that the model cannot be given."""
    for message in messages:
        refuse_extras(message, ("role", "content"), where)
        if message.get("role") not in ROLES:
            raise DataError(f"{where}: a message has role {message.get('role')!r}; roles are {', '.join(ROLES)}.")
    return [{"role": message["role"], "content": to_blocks(message.get("content"), where)} for message in messages]


def to_blocks(content: Any, where: str) -> list[Row]:
    blocks = []
    for block in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        match block:
            case {"type": "text", "text": str(text)}:
                blocks.append({"type": "text", "text": text})
            case {"type": "image"}:
                blocks.append({"type": "image"})
            case _:
                raise DataError(
                    f"{where}: content {shorten(repr(block), 200)} is not supported; a message holds text, or a list "
                    'of blocks {"type": "text", "text": …} and {"type": "image"}.'
                )
        refuse_extras(block, ("type", "text"), where)
    return blocks


def refuse_extras(given: Row, known: tuple[str, ...], where: str) -> None:
    """Raise DataError for keys that would have no effect. Arrow fills keys missing in a row with None."""
    extras = [name for name, value in given.items() if name not in known and value is not None]
    if extras:
        raise DataError(
            f"{where}: {', '.join(extras)} in {shorten(repr(given), 200)} would have no effect. Images belong in "
            "column `images`, in the order of their blocks; tool calls are not supported."
        )


def row_images(row: Row, folder: Path, max_pixels: int, where: str) -> list[tuple[Image.Image, bytes | None]]:
    """Read the images of column `image` or `images` with `read_image`. The list is empty for a text row."""
    given = {name: row[name] for name in IMAGE_COLUMNS if row.get(name) is not None}
    if len(given) > 1:
        raise DataError(f"{where}: `image` and `images` are both filled; leave one of them empty.")
    return [
        read_image(value, folder, max_pixels, f"{where}, column {name}")
        for name, values in given.items()
        for value in (values if isinstance(values, list) else [values])
    ]


def place_images(messages: list[Message], num_images: int, where: str) -> list[Message]:
    """Put image blocks before the text of the first user message, unless the row places them itself.

    Raises DataError if the numbers of image blocks and images differ.
    """
    num_blocks = sum(block["type"] == "image" for message in messages for block in message["content"])
    first_user = next((message for message in messages if message["role"] == "user"), None)
    if num_blocks == 0 and first_user:
        first_user["content"][:0] = [{"type": "image"} for _ in range(num_images)]
    elif num_blocks != num_images:
        raise DataError(
            f"{where}: the prompt has {num_blocks} image blocks and the row has {num_images} images. Pairing them "
            "anyway would train on answers about other images, and nothing later would notice. "
            "Write one block (or <image> mark) per image, or none to have all images put first."
        )
    return messages
