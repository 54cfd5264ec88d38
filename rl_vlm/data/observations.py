"""Renders what a conversation shows the model between two of its turns.

A chat template writes text around each message. What follows an assistant's turn is taken from a short conversation in
which a marker stands for the turn, so sampled tokens are never decoded and encoded again:

    [user] [assistant: marker] [observation] ─ template ─► … marker<|im_end|>⏎<|im_start|>user … <|im_start|>assistant⏎
                                                                   └─────────────── its text ──────────────────────┘

The turn itself ends with a stop token, which the template writes as well. The observation's tokens begin after it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import jinja2

from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.errors import DataError
from rl_vlm.types import Observation

if TYPE_CHECKING:
    from PIL.Image import Image

Message = dict[str, Any]

MARKER = "markedturn"
"""Stands for an assistant's turn, or for an argument of its last call. Templates copy it unchanged."""
BREAK = "\u200b"
"""A zero-width space, which breaks special tokens in observed text."""
ASKED: Message = {"role": "user", "content": [{"type": "text", "text": "."}]}


class ObservationRenderer:
    """Renders observations for one model."""

    def __init__(self, builder: PromptBuilder, stop_token_ids: Sequence[int]) -> None:
        """`stop_token_ids` are the tokens that end a turn."""
        self.builder = builder
        tokenizer = builder.processor.tokenizer
        self.stops: list[str] = tokenizer.convert_ids_to_tokens(list(stop_token_ids))
        added = {str(token) for token in tokenizer.added_tokens_decoder.values()}
        tokens = added | {*tokenizer.all_special_tokens, *builder.placeholders}
        self.special = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))

    def render(
        self,
        name: str,
        messages: Sequence[Message],
        images: Sequence[Image],
        files: Sequence[bytes],
        turn: Sequence[int],
        calls: Sequence[str] = (),
    ) -> Observation:
        """Render messages that follow a turn, up to the start of the next turn.

        The messages have content blocks. Their `{"type": "image"}` blocks stand for `images`, in order, and `files` are
        the images as files. `turn` is the turn's tokens. `calls` are the names of the functions that it called. If
        there are any, the messages are their results, in order. `name` is how errors name the observation.

        Raises DataError if the template or the processor refuses the messages, or if it leaves something out.
        """
        try:
            text = self.text_after_turn(self.without_special_tokens(messages), images, calls)
            anchor = "" if text.startswith(tuple(self.stops)) else self.stops[0]
            token_ids, token_inputs, mm_inputs = self.builder.part(anchor + text, images)
        except (ValueError, TypeError, jinja2.TemplateError) as error:
            raise DataError(f"{name}: the model's processor refuses the observation: {error}") from error
        if bool(mm_inputs) != bool(images):
            raise DataError(f"{name}: the model's chat template leaves out the images of the observation.")
        ids = token_ids.tolist()
        start = len(self.builder.part(anchor, ())[0]) if anchor else shared_length(turn, ids)
        token_inputs = {key: values[start:] for key, values in token_inputs.items()}
        return Observation(name, token_ids[start:], token_inputs, mm_inputs, tuple(files))

    def text_after_turn(self, messages: Sequence[Message], images: Sequence[Image], calls: Sequence[str]) -> str:
        """Return the text that the template writes after a turn with these calls, with a placeholder per image.

        Raises ValueError if the template does not write the turn once, or no stop token after its calls.
        """
        conversation = [ASKED, marked_turn(calls), *with_call_ids(messages, calls)]
        text = self.builder.templated(conversation, images, tokenize=False)
        _, *after = text.split(MARKER)
        if len(after) != 1:
            raise ValueError(f"the chat template writes the turn before it {len(after)} times")
        if not calls:
            return after[0]
        places = [at for stop in self.stops if (at := after[0].find(stop)) >= 0]
        if not places:
            raise ValueError(f"the chat template writes none of {', '.join(self.stops)} after a call")
        return after[0][min(places) :]

    def without_special_tokens(self, messages: Sequence[Message]) -> list[Message]:
        """Break the special tokens in texts, so that an observation cannot end a turn."""

        def safe(block: Message) -> Message:
            if block["type"] != "text":
                return block
            return block | {"text": self.special.sub(lambda found: found[0][0] + BREAK + found[0][1:], block["text"])}

        return [message | {"content": [safe(block) for block in message["content"]]} for message in messages]


def marked_turn(calls: Sequence[str]) -> Message:
    """Return an assistant's message with the marker as its text, or as an argument of its last call."""
    if not calls:
        return {"role": "assistant", "content": [{"type": "text", "text": MARKER}]}
    values = [*({} for _ in calls[1:]), {"value": MARKER}]
    made = [
        {"id": call_id(i), "type": "function", "function": {"name": name, "arguments": arguments}}
        for i, (name, arguments) in enumerate(zip(calls, values, strict=True))
    ]
    return {"role": "assistant", "content": [], "tool_calls": made}  # Gemma 4 would write text after the results


def with_call_ids(messages: Sequence[Message], calls: Sequence[str]) -> list[Message]:
    """Name the call that each message answers. Messages that answer none stay as they are."""
    if not calls:
        return list(messages)
    return [
        message | {"name": name, "tool_call_id": call_id(i)}
        for i, (message, name) in enumerate(zip(messages, calls, strict=True))
    ]


def call_id(index: int) -> str:
    """Return an id of nine letters and digits. Mistral's template refuses shorter ones."""
    return f"call{index:05}"


def shared_length(before: Sequence[int], after: Sequence[int]) -> int:
    """Return the length of the longest start of `after` that is an end of `before`."""
    lengths = range(min(len(before), len(after)), 0, -1)
    return next((length for length in lengths if list(before[-length:]) == list(after[:length])), 0)
