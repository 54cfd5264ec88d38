"""Completions of several turns, as reward functions receive them: in TRL's messages, and turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from itertools import chain
from typing import TYPE_CHECKING, Any

from rewards.forms import CompletionForm, completion_in

if TYPE_CHECKING:
    from rl_vlm.types import Completion, ToolResult, Turn

Message = dict[str, Any]

UNREAD = "unknown"
"""Name in the message about a call that could not be read. It is TRL's name for calls that it does not know."""


def completion_as(form: CompletionForm, completion: Completion) -> str | list[Message]:
    """Return a completion as text, its last turn's, or as messages: of the model, and with the results of tools."""
    if form == "messages" and completion.turns:
        return list(chain.from_iterable(map(messages_of, completion.turns)))
    return completion_in(form, completion.text)


def messages_of(turn: Turn) -> list[Message]:
    """Return the message of a turn, and a message for each result: of a tool, or of the user after a step."""
    if turn.reward is not None:
        seen = [{"role": "user", "content": content_of(result)} for result in turn.results]
        return [{"role": "assistant", "content": turn.content}, *seen]
    calls = [{"type": "function", "function": call} for call in called(turn)]
    names = [call.name for call in turn.calls] or [UNREAD]
    results = zip(names[: len(turn.results)], turn.results, strict=True)
    return [
        {"role": "assistant", "content": turn.content} | ({"tool_calls": calls} if calls else {}),
        *({"role": "tool", "name": name, "content": content_of(result)} for name, result in results),
    ]


def content_of(result: ToolResult) -> str | list[Message]:
    """Return the text of a result, or its blocks if it is not one text.

    Images are decoded when they are used. A video is an array (frames, height, width, 3) of the frames that the model
    got.
    """

    match result.content:
        case [{"type": "text", "text": str(text)}]:
            return text
    files = iter(result.images)
    return [dict(block) if block["type"] == "text" else with_pixels(block, next(files)) for block in result.content]


def with_pixels(block: Message, file: bytes) -> Message:
    """Return the block with its decoded image, or with the frames of its video."""
    from PIL import Image

    from rl_vlm.types import Video

    kind = block["type"]
    return block | {kind: Video.decoded(file).frames if kind == "video" else Image.open(BytesIO(file))}


def turns_of(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Return turns as plain dicts."""
    return [
        {
            "text": turn.text,
            "calls": called(turn),
            "results": [
                {"content": content_of(result), "error": result.error, "seconds": result.seconds}
                for result in turn.results
            ],
            "reward": turn.reward,
            "seconds": sum(result.seconds for result in turn.results),
        }
        for turn in turns
    ]


def called(turn: Turn) -> list[dict[str, Any]]:
    """Return the calls of a turn as plain dicts."""
    return [{"name": call.name, "arguments": call.arguments} for call in turn.calls]
