"""Conversion of prompts to chat messages. Marks in texts become blocks, or images and videos are put first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rl_vlm.data.media import BASE64
from rl_vlm.data.problems import EMPTY_PROMPT, UNEQUAL_MARKS
from rl_vlm.data.tables import TableRow
from rl_vlm.errors import DataError, shorten

Message = dict[str, Any]

ROLES = ("system", "user", "assistant")
SPEAKERS = {"system": "system", "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
MARKS = re.compile(r"<(image|video|audio)>")


def read_conversations(turns: Any, where: str) -> list[Message]:
    """Convert turns of `from` and `value` to messages. Raises DataError if it is not a list of such turns."""
    if not isinstance(turns, list):
        raise DataError(f"{where}: found {shorten(repr(turns), 200)} for `conversations`, expected a list of turns.")
    return [read_turn(turn, where) for turn in turns]


def read_turn(turn: Any, where: str) -> Message:
    """Convert a turn of `from` and `value` to a message. Raises DataError if one is missing or is not text."""
    match turn:
        case {"from": str(speaker), "value": str(text)} if speaker in SPEAKERS:
            return {"role": SPEAKERS[speaker], "content": split_marks(text)}
    raise DataError(
        f"{where}: found turn {shorten(repr(turn), 200)}, expected `value`, which is text, and `from` "
        f"({', '.join(SPEAKERS)})."
    )


def ends_with_answer(turns: Any) -> bool:
    """Return whether the last turn is the assistant's and has a value."""
    last = turns[-1] if isinstance(turns, list) and turns else None
    return isinstance(last, dict) and "value" in last and SPEAKERS.get(str(last.get("from"))) == "assistant"


def split_marks(text: str) -> list[TableRow]:
    """Split text into content blocks at `<image>`, `<video>` and `<audio>`. The latter is refused later."""
    parts = MARKS.split(text)
    blocks = [{"type": "text", "text": part} if i % 2 == 0 else {"type": part} for i, part in enumerate(parts)]
    return [block for block in blocks if block != {"type": "text", "text": ""}]


def to_messages(messages: list[Message], where: str, takes_empty: bool = False) -> list[Message]:
    """Convert contents of messages to lists of blocks. Raises DataError for content that the model cannot take.

    Prompts without content are refused unless `takes_empty` is true.
    """
    for message in messages:
        if {"from", "value"} <= message.keys():
            raise DataError(
                f"{where}: the prompt has turns of `from` and `value`, as VLM-R1's column `conversations` has. Name "
                "its column with data.columns: {conversations: its name}, which splits off the last answer."
            )
        refuse_extras(message, ("role", "content"), where)
        if message.get("role") not in ROLES:
            raise DataError(f"{where}: a message has role {message.get('role')!r}; roles are {', '.join(ROLES)}.")
    converted = [{"role": message["role"], "content": to_blocks(message.get("content"), where)} for message in messages]
    blocks = [block for message in converted if message["role"] != "system" for block in message["content"]]
    if not takes_empty and not any(block.get("text", "image").strip() for block in blocks):
        raise DataError(
            f"{where}: the prompt is empty: its messages have no text, and no block or mark of an image or a video.",
            EMPTY_PROMPT,
        )
    return converted


def without_blocks(messages: Sequence[Message], kind: str) -> list[Message]:
    """Return the messages without their blocks of a kind."""
    return [
        message | {"content": [block for block in message["content"] if block["type"] != kind]} for message in messages
    ]


def to_blocks(content: Any, where: str) -> list[TableRow]:
    """Convert the content of a message to blocks of text, images and videos."""
    blocks = []
    for block in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        match block:
            case {"type": "text", "text": str(text)}:
                blocks += read_text(text, where)
            case {"type": "image" | "video" as kind}:
                blocks.append({"type": kind})
            case _:
                raise DataError(
                    f"{where}: content {shorten(repr(block), 200)} is not supported; a message holds text, or a list "
                    'of blocks {"type": "text", "text": …}, {"type": "image"} and {"type": "video"}.'
                )
        refuse_extras(block, ("type", "text"), where)
    return blocks


def read_text(text: str, where: str) -> list[TableRow]:
    """Convert a text to blocks. Raises DataError if it holds an audio mark, or an image as base64 text."""
    blocks = split_marks(text) or [{"type": "text", "text": ""}]
    if any(block["type"] == "audio" for block in blocks):
        raise DataError(
            f"{where}: the text has a mark <audio>, and audio is not in this project. Remove the mark, or leave the "
            "row out."
        )
    if pasted := BASE64.search(text):
        raise DataError(
            f"{where}: the text holds an image as base64 ({shorten(text[pasted.start() :], 40)}, {len(text)} "
            "characters), which the model would read as text. Move the image to column `image` or `images`, which "
            "take base64 text, and mark its place with <image>."
        )
    return blocks


def as_messages(prompt: str | list[Message]) -> list[Message]:
    """Return a prompt as messages. A text is a message of the user."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def blocks_of(content: str | Sequence[TableRow]) -> Sequence[TableRow]:
    """Return the content of a message as blocks."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def refuse_extras(given: TableRow, known: tuple[str, ...], where: str) -> None:
    """Raise DataError for keys without an effect. None is accepted, since Arrow fills missing keys with it."""
    extras = [name for name, value in given.items() if name not in known and value is not None]
    if extras:
        raise DataError(
            f"{where}: {', '.join(extras)} in {shorten(repr(given), 200)} would have no effect. Images belong in "
            "column `images` and videos in `videos`, in the order of their blocks; tool calls are not supported."
        )


def place_media(messages: list[Message], counts: dict[str, int], where: str) -> list[Message]:
    """Put blocks of images, and after them of videos, before the text of the first user message.

    `counts` are the numbers of images and videos of the row. A kind that the row places itself is left where it is.
    Raises DataError if the numbers of blocks and of images or videos differ.
    """
    first_user = next((message for message in messages if message["role"] == "user"), None)
    placed: list[TableRow] = []
    for kind, count in counts.items():
        num_blocks = sum(block["type"] == kind for message in messages for block in message["content"])
        if num_blocks == 0 and first_user:
            placed += [{"type": kind} for _ in range(count)]
        elif num_blocks != count:
            raise DataError(
                f"{where}: the prompt has {num_blocks} {kind} blocks and the row has {count} {kind}s. Pairing them "
                f"anyway would train on answers about other {kind}s, and nothing later would notice. "
                f"Write one block (or <{kind}> mark) per {kind}, or none to have all {kind}s put first.",
                UNEQUAL_MARKS,
            )
    if first_user:
        first_user["content"][:0] = placed
    return messages
