"""Conversion of prompts to chat messages. Marks in texts become image blocks, or images are put first."""

from __future__ import annotations

import re
from typing import Any

from rl_vlm.data.images import BASE64
from rl_vlm.data.problems import EMPTY_PROMPT, UNEQUAL_MARKS
from rl_vlm.data.tables import Row
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


def split_marks(text: str) -> list[Row]:
    """Split text into content blocks at `<image>`, `<video>` and `<audio>`. The latter two are refused later."""
    parts = MARKS.split(text)
    blocks = [{"type": "text", "text": part} if i % 2 == 0 else {"type": part} for i, part in enumerate(parts)]
    return [block for block in blocks if block != {"type": "text", "text": ""}]


def to_messages(messages: list[Message], where: str) -> list[Message]:
    """Convert contents of messages to lists of blocks. Raises DataError for content that the model cannot take."""
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
    if not any(block.get("text", "image").strip() for block in blocks):
        raise DataError(
            f"{where}: the prompt is empty: its messages have no text, and no block or mark of an image.", EMPTY_PROMPT
        )
    return converted


def to_blocks(content: Any, where: str) -> list[Row]:
    """Convert the content of a message to text and image blocks."""
    blocks = []
    for block in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        match block:
            case {"type": "text", "text": str(text)}:
                blocks += read_text(text, where)
            case {"type": "image"}:
                blocks.append({"type": "image"})
            case _:
                raise DataError(
                    f"{where}: content {shorten(repr(block), 200)} is not supported; a message holds text, or a list "
                    'of blocks {"type": "text", "text": …} and {"type": "image"}.'
                )
        refuse_extras(block, ("type", "text"), where)
    return blocks


def read_text(text: str, where: str) -> list[Row]:
    """Convert a text to blocks. Raises DataError if it holds a video or audio mark, or an image as base64 text."""
    blocks = split_marks(text) or [{"type": "text", "text": ""}]
    others = [f"<{block['type']}>" for block in blocks if block["type"] not in ("text", "image")]
    if others:
        raise DataError(
            f"{where}: the text has a mark {others[0]}, and video and audio are not in this project. Remove the mark, "
            "or leave the row out."
        )
    if pasted := BASE64.search(text):
        raise DataError(
            f"{where}: the text holds an image as base64 ({shorten(text[pasted.start() :], 40)}, {len(text)} "
            "characters), which the model would read as text. Move the image to column `image` or `images`, which "
            "take base64 text, and mark its place with <image>."
        )
    return blocks


def refuse_extras(given: Row, known: tuple[str, ...], where: str) -> None:
    """Raise DataError for keys without an effect. None is accepted, since Arrow fills missing keys with it."""
    extras = [name for name, value in given.items() if name not in known and value is not None]
    if extras:
        raise DataError(
            f"{where}: {', '.join(extras)} in {shorten(repr(given), 200)} would have no effect. Images belong in "
            "column `images`, in the order of their blocks; tool calls are not supported."
        )


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
            "Write one block (or <image> mark) per image, or none to have all images put first.",
            UNEQUAL_MARKS,
        )
    return messages
