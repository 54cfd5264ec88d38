"""Renders observations: messages between two turns of the model, and the template's text around them.

A chat template writes text around each message. This module renders a short conversation in which a marker replaces
the assistant's turn, and takes the text after the marker. Sampled tokens are never decoded and encoded again:

    [user] [assistant: marker] [observation] ─ template ─► … marker<|im_end|>⏎<|im_start|>user … <|im_start|>assistant⏎
                                                                   └─────────────── its text ──────────────────────┘

The turn itself ends with a stop token, which the template writes as well. The observation's tokens begin after it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakValueDictionary

from rl_vlm.data.prompts import PromptBuilder, by_kind, join_blocks, kind_of, refusals, unequal_lengths
from rl_vlm.errors import DataError, shorten
from rl_vlm.types import Observation, Video

if TYPE_CHECKING:
    from PIL.Image import Image

Message = dict[str, Any]
Role = Literal["tool", "user"]
"""Role of messages that hold results of tools."""

MARKER = "markedturn"
"""Stands for an assistant's turn, or for an argument of its last call. It is before all observed text."""
BREAK = "\u200b"
"""A zero-width space, which breaks special tokens in observed text."""
ASKED: Message = {"role": "user", "content": [{"type": "text", "text": "."}]}


class ObservationRenderer:
    """Renders observations for one model."""

    def __init__(self, builder: PromptBuilder, stop_token_ids: Sequence[int]) -> None:
        """`stop_token_ids` are the tokens that end a turn. Raises ValueError if there are none."""
        if not stop_token_ids:
            raise ValueError("turns need a token that ends them")
        self.builder = builder
        tokenizer = builder.processor.tokenizer
        self.stops: list[str] = tokenizer.convert_ids_to_tokens(list(stop_token_ids))
        tokens = special_tokens(builder) | set(self.stops)
        self.special = re.compile("|".join(map(re.escape, sorted(tokens, key=len, reverse=True))))
        self.rendered: WeakValueDictionary[Any, Observation] = WeakValueDictionary()
        """Observations that completions still hold, by content. Completions of a group often see the same."""

    def render(
        self,
        name: str,
        messages: Sequence[Message],
        media: Sequence[Image | Video],
        files: Sequence[bytes],
        turn: Sequence[int],
        calls: Sequence[str] = (),
    ) -> Observation:
        """Render messages that follow a turn, up to the start of the next turn.

        The messages have content blocks, and observed text in them must be `harmless`. Their blocks of images and
        videos stand for `media`, in order, and `files` are the same as files. `turn` is the turn's tokens. `calls` are
        the names of the functions that it called. Messages of tools after them are the results, in order. `name` is how
        errors name the observation.

        Raises DataError if the template or the processor refuses the messages, or if it leaves something out.
        """
        # no token of the observation but the first ends a turn, so it depends on the turn's last token only
        key = (json.dumps(messages), tuple(files), tuple(turn[-1:]), tuple(calls))
        known = self.rendered.get(key)
        if known is not None:
            return replace(known, name=name)
        self.rendered[key] = made = self.render_anew(name, messages, media, files, turn, calls)
        return made

    def render_anew(
        self,
        name: str,
        messages: Sequence[Message],
        media: Sequence[Image | Video],
        files: Sequence[bytes],
        turn: Sequence[int],
        calls: Sequence[str],
    ) -> Observation:
        """Render messages, even if equal ones have been rendered. See `render`."""
        images, videos = by_kind(media)
        with refusals(f"{name}: {unequal_lengths(videos)}the model's processor refuses the observation"):
            check_media(messages, media, files)
            text = self.text_after_turn(messages, media, calls)
            anchor = "" if text.startswith(tuple(self.stops)) else self.stops[0]
            token_ids, token_inputs, mm_inputs = self.builder.part(anchor + text, images, videos)
        if bool(mm_inputs) != bool(media):
            raise DataError(f"{name}: the model's chat template leaves out the images of the observation.")
        if videos:
            self.builder.check_tokens(text, images, videos, name)
        if anchor:
            start = len(self.builder.part(anchor, ())[0])
        else:
            start = self.num_before + shared_length(turn, token_ids[self.num_before :].tolist())
        token_inputs = {key: values[start:] for key, values in token_inputs.items()}
        unexpanded = self.unexpanded_ids(anchor, text, turn) if media else ()
        return Observation(name, token_ids[start:], token_inputs, mm_inputs, tuple(files), unexpanded)

    @cached_property
    def num_before(self) -> int:
        """The number of tokens that the processor writes before any text: Llama 3.2 Vision's writes a start token."""
        return len(self.builder.part(self.stops[0], ())[0]) - 1

    def unexpanded_ids(self, anchor: str, text: str, turn: Sequence[int]) -> tuple[int, ...]:
        """Return the tokens of a text that follows a turn, with one placeholder per image and video."""
        tokenizer = self.builder.processor.tokenizer
        ids, before = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in (anchor + text, anchor))
        return tuple(ids[len(before) if anchor else shared_length(turn, ids) :])

    def text_after_turn(self, messages: Sequence[Message], media: Sequence[Image | Video], calls: Sequence[str]) -> str:
        """Return the text that the template writes after a turn with these calls, with a token per image and video.

        Raises ValueError if the template leaves out the turn or a text, or writes no stop token after calls.
        """
        conversation = [ASKED, marked_turn(calls), *with_call_ids(messages, calls)]
        _, marker, text = self.builder.templated(conversation, *by_kind(media), tokenize=False).partition(MARKER)
        if not marker:
            raise ValueError("the chat template leaves out the turn before it")
        if calls:
            places = [at for stop in self.stops if (at := text.find(stop)) >= 0]
            if not places:
                raise ValueError(f"the chat template writes none of {', '.join(self.stops)} after a call")
            text = text[min(places) :]
        elif text.lstrip().startswith(tuple(self.stops)):
            text = text.lstrip()
        for block in (block for message in messages for block in message["content"] if block["type"] == "text"):
            if block["text"].strip() not in text:
                raise ValueError(f"the chat template leaves out the text {shorten(block['text'].strip())!r}")
        return text

    def harmless(self, content: Sequence[Message]) -> tuple[list[Message], int]:
        """Join neighbouring texts, and break the special tokens in them, so that none can end a turn.

        Return the new content, and the number of broken tokens.
        """
        broken, total = [], 0
        for block in join_blocks(content):
            if block["type"] == "text":
                text, number = self.special.subn(lambda found: found[0][0] + BREAK + found[0][1:], block["text"])
                block, total = {"type": "text", "text": text}, total + number
            broken.append(block)
        return broken, total


def observed_messages(
    contents: Sequence[Sequence[Message]], role: Role, is_split: bool, is_tagged: bool
) -> list[Message]:
    """Return the messages of results: one for each if `is_split`, else one for all.

    One for all has tags around each result, as templates of Qwen write them, if `is_tagged`.
    """
    if is_split:
        return [{"role": role, "content": list(content)} for content in contents]
    before, after = ("<tool_response>\n", "\n</tool_response>") if is_tagged else ("", "")
    parts: list[Sequence[Message]] = []
    for i, content in enumerate(contents):
        start = f"\n{before}" if i else before
        parts += [[{"type": "text", "text": start}], content, [{"type": "text", "text": after}]]
    return [{"role": role, "content": [block for block in join_blocks(*parts) if block.get("text", "image")]}]


def special_tokens(builder: PromptBuilder) -> set[str]:
    """Return the tokens with which a template writes turns and images, without added words of a vocabulary."""
    tokenizer, template = builder.processor.tokenizer, str(builder.processor.chat_template or "")
    added = [token for token in tokenizer.added_tokens_decoder.values() if token.special or str(token) in template]
    tokens = {*map(str, added), *tokenizer.all_special_tokens, *builder.placeholders}
    return {token for token in tokens if len(token.strip()) > 1}


def check_media(messages: Sequence[Message], media: Sequence[Image | Video], files: Sequence[bytes]) -> None:
    """Raise ValueError if blocks of images and videos, images and videos, and files do not correspond."""
    blocks = [block["type"] for message in messages for block in message["content"] if block["type"] != "text"]
    if blocks != list(map(kind_of, media)) or len(media) != len(files):
        raise ValueError(f"it has blocks {blocks} for {list(map(kind_of, media))} in {len(files)} files")


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
    """Name the call that each message of a tool answers. Without calls, messages stay as they are.

    Raises ValueError if there are calls and messages of tools, and not one message for each call.
    """
    results = [message for message in messages if message["role"] == "tool"]
    if not calls or not results:
        return list(messages)
    if len(calls) != len(messages):
        raise ValueError(f"it has {len(messages)} results for {len(calls)} calls")
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
