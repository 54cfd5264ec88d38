"""Tries a chat template on a made-up call, to choose how tools, calls and observations are written.

Chat templates differ in the messages that they write. Some write tools and calls, others drop them without a word, and
some drop images in messages of tools. There are two forms:

    template    tools, calls and results as the chat template writes them
    text        tools in a system message, calls as JSON in <tool_call> tags, results as messages of the user
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jinja2

from rl_vlm.data.observations import ASKED, Message, ObservationRenderer, Role, call_id, observed_messages
from rl_vlm.data.prompts import Introduction, PromptBuilder, image_token_id
from rl_vlm.data.tool_calls import (
    CALL_FORMS,
    Reader,
    Schema,
    TemplateReader,
    UnreadableCall,
    introduction_of,
    read_json_calls,
)
from rl_vlm.errors import ConfigError, DataError, shorten
from rl_vlm.types import Sample, ToolCall

if TYPE_CHECKING:
    from PIL.Image import Image

TRIED = ToolCall("tried_tool", {"text": "tried text", "count": 3, "share": 0.5, "flag": True, "names": ["b", "a"]})
"""A call that a template must write, and that must be read again."""
TRIED_SCHEMA: Schema = {
    "type": "function",
    "function": {
        "name": TRIED.name,
        "description": "Tried description.",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string", "description": "Tried argument."},
                "count": {"type": "integer", "description": "A count."},
                "share": {"type": "number", "description": "A share."},
                "flag": {"type": "boolean", "description": "A flag."},
                "names": {"type": "array", "items": {"type": "string"}, "description": "Names."},
            },
            "required": ["text"],
        },
    },
}
THOUGHTS = ("<think>\ntried thought\n</think>\n\n", "<|channel>thought\ntried thought\n<channel|>")
REFUSALS = (ValueError, TypeError, KeyError, jinja2.TemplateError)
"""Errors of templates and processors for messages that they do not take."""


class Form(NamedTuple):
    """A way to write tools and calls that works with a template."""

    name: str
    builder: PromptBuilder
    reader: Reader
    in_text: bool
    notes: tuple[str, ...] = ()


class TemplateTrial:
    """Tries a chat template on a made-up call with an image in its result."""

    def __init__(
        self, builder: PromptBuilder, stop_token_ids: Sequence[int], schemas: Sequence[Schema], takes_images: bool
    ) -> None:
        """`builder` is without tools."""
        self.builder, self.stop_token_ids, self.schemas = builder, stop_token_ids, schemas
        self.takes_images = takes_images

    def form(self, setting: Literal["auto", "template", "text"]) -> Form:
        """Return the form of tools. Raises ConfigError if that of the setting does not work with the template."""
        if not self.schemas:
            return Form("none", self.builder, read_json_calls, in_text=False)
        if setting == "text":
            return self._in_text()
        try:
            return self._in_template()
        except REFUSALS as error:
            problem = shorten(" ".join(str(error).split()), 200)
        if setting == "template":
            raise ConfigError(
                f"rollout.tool_format: template does not work with this checkpoint: {problem}. Use text, which writes "
                "tools and calls as text, or leave it at auto."
            )
        form = self._in_text()
        return form._replace(notes=(problem, *form.notes))

    def role(self, form: Form, setting: Literal["auto", "tool", "user"]) -> tuple[Role, list[str]]:
        """Return the role of results, and why it is not that of tools. Raises ConfigError if none works."""
        tried: list[Role] = [setting] if setting != "auto" else ["user"] if form.in_text else ["tool", "user"]
        tried = ["user"] if setting == "auto" and not self.schemas else tried
        problems: list[str] = []
        for role in tried:
            if not (problem := self.problem_of(form, role)):
                return role, problems
            problems.append(f"{problem} in {role} messages")
        if setting != "auto":
            raise ConfigError(
                f"rollout.observation_role: {setting} does not work with this checkpoint and rollout.tool_format: "
                f"{'text' if form.in_text else 'template'}: {problems[0]}. Leave both at auto."
            )
        raise ConfigError(
            f"rollout.tools, rollout.environment: results of tools cannot be shown to this checkpoint: "
            f"{'; '.join(problems)}. Choose another checkpoint, or change its chat template."
        )

    def problem_of(self, form: Form, role: Role) -> str | None:
        """Return why results cannot be shown in messages of a role, or None."""
        pictures = [tried_image(), tried_image()] if self.takes_images else []
        contents: list[list[Message]] = [
            [{"type": "text", "text": f"tried result {i}"}, *({"type": "image"} for _ in pictures[:1])] for i in (1, 2)
        ]
        names = [TRIED.name, "tried_other"] if role == "tool" and not form.in_text and self.schemas else []
        messages = observed_messages(contents, "tool" if names else "user")
        messages = messages if names else [message | {"role": role} for message in messages]
        renderer = ObservationRenderer(form.builder, self.stop_token_ids)
        try:
            text = renderer.text_after_turn(messages, pictures, names)
            if pictures and text == renderer.text_after_turn(without_images(messages), [], names):
                return "the chat template leaves out images"
            found = renderer.render("trial", messages, pictures, [b""] * len(pictures), [], names)
            shown = self._num_image_tokens(found.token_ids)
            expected = self._num_image_tokens(self._prompt_ids(pictures))
        except (*REFUSALS, DataError) as error:
            return f"the chat template refuses results ({shorten(' '.join(str(error).split()), 200)})"
        places = [text.find(f"tried result {i}") for i in (1, 2)]
        if not 0 <= places[0] < places[1] or any(text.count(f"tried result {i}") != 1 for i in (1, 2)):
            return "the chat template changes the order of results"
        if any(schema["function"]["description"] in text for schema in self.schemas):
            return "the chat template writes the tools again"
        if shown != expected:
            return f"{shown} image tokens where a prompt has {expected}"
        return None

    def _num_image_tokens(self, token_ids: Any) -> int:
        token = image_token_id(self.builder.processor)
        return int((token_ids == token).sum()) if token is not None else 0

    def _prompt_ids(self, pictures: list[Image]) -> Any:
        """Return the tokens of a prompt with images."""
        content = [{"type": "text", "text": "tried"}, *({"type": "image"} for _ in pictures)]
        messages = [{"role": "user", "content": content}]
        return self.builder.build(Sample("trial", messages, pictures, {}, messages)).token_ids

    @property
    def notes(self) -> list[str]:
        """Further facts about the template."""
        kept = self.builder.template_kwargs.get("preserve_thinking") is True
        chosen = kept and "preserve_thinking" not in self.builder.data.chat_template_kwargs
        notes = ["chat_template_kwargs has preserve_thinking: true"] if chosen else []
        in_field = {"reasoning_content": "tried thought", "content": [{"type": "text", "text": "tried answer"}]}
        in_text = [{"content": [{"type": "text", "text": f"{thought}tried answer"}]} for thought in THOUGHTS]
        if self._drops_thought(in_field) and any(map(self._drops_thought, in_text)):
            notes.append(
                "earlier thoughts stay in the context as they were sampled, although this chat template would drop them"
            )
        return notes

    def _drops_thought(self, message: Message) -> bool:
        """Return whether the template leaves out the thought of an earlier turn."""
        text = self.builder.templated([ASKED, {"role": "assistant"} | message, ASKED], [], tokenize=False)
        return "tried thought" not in text

    def _in_text(self) -> Form:
        """Return the form in text. Raises ConfigError if the template cannot tell the model of tools."""
        note = ()
        for role in ("system", "user"):
            introduction = Introduction(introduction_of(self.schemas), role)
            builder = self.builder.adapted(self.builder.template_kwargs, introduction)
            asked = {"role": "user", "content": [{"type": "text", "text": "tried question"}]}
            try:
                text = builder.templated([asked], [], tokenize=False)
            except REFUSALS:
                text = ""
            if introduction.text in text and "tried question" in text:
                return Form("calls as JSON in <tool_call> tags", builder, read_json_calls, in_text=True, notes=note)
            note = ("the tools are described in the first user message",)
        raise ConfigError("rollout.tools, rollout.environment: this checkpoint's chat template leaves out texts.")

    def _in_template(self) -> Form:
        """Return the form of the template. Raises an error if it leaves out something, or if calls cannot be read."""
        if "tools" not in str(self.builder.processor.chat_template):
            raise ValueError("the chat template leaves out tools")
        tried = self.builder.adapted(self.builder.template_kwargs | {"tools": [*self.schemas, TRIED_SCHEMA]})
        header = tried.templated([ASKED], [], tokenize=False)
        told = [*(schema["function"]["name"] for schema in self.schemas), TRIED.name, "Tried description.", "Tried arg"]
        if missing := [text for text in told if text not in header]:
            raise ValueError(f"the chat template leaves out tools ({missing[0]})")
        call = {"id": call_id(0), "type": "function", "function": {"name": TRIED.name, "arguments": TRIED.arguments}}
        turn: Message = {"role": "assistant", "content": [], "tool_calls": [call]}
        result: Message = {"role": "tool", "content": [{"type": "text", "text": "tried result"}]}
        result |= {"name": TRIED.name, "tool_call_id": call_id(0)}
        whole = tried.templated([ASKED, turn, result], [], tokenize=False)
        start = next((i for i, (a, b) in enumerate(zip(header, whole, strict=False)) if a != b), len(header))
        stops = self.builder.processor.tokenizer.convert_ids_to_tokens(list(self.stop_token_ids))
        ends = [at for stop in stops if (at := whole.find(stop, start)) >= 0]
        written = whole[start : min(ends, default=start)]
        if TRIED.name not in written or "tried text" not in written:
            raise ValueError("the chat template leaves out calls")
        name, reader = self._reader_of(whole[:start], written)
        builder = self.builder.adapted(self.builder.template_kwargs | {"tools": list(self.schemas)})
        return Form(f"calls as {name}", builder, reader, in_text=False)

    def _reader_of(self, prefix: str, written: str) -> tuple[str, Reader]:
        """Return the name of a written call's form, and its reader. Raises ValueError if none can read it."""
        tokenizer = self.builder.processor.tokenizer
        opening = next(iter(re.findall(r"<[^<>]+>|\[[A-Z_]+\]", written)), "")
        own = getattr(tokenizer, "response_template", None)
        readers: list[tuple[str, Reader]] = []
        if own:
            readers.append(
                ("the tokenizer's response template has them", TemplateReader(tokenizer, own, prefix, opening))
            )
        readers.append(("JSON in <tool_call> tags", read_json_calls))
        for name, form in CALL_FORMS.items():
            readers.append((name, TemplateReader(tokenizer, form, "", opening, skips_thoughts=True)))
        for name, reader in readers:
            try:
                if reader(written, [TRIED_SCHEMA]).calls == (TRIED,):
                    return name, reader
            except UnreadableCall:
                continue
        raise ValueError(f"calls as the chat template writes them cannot be read ({shorten(repr(written), 120)})")


def with_thoughts_kept(builder: PromptBuilder) -> PromptBuilder:
    """Return a builder whose template keeps the thoughts of earlier turns, if it has a setting for it."""
    has_setting = "preserve_thinking" in str(builder.processor.chat_template)
    return builder.adapted({"preserve_thinking": True}) if has_setting else builder


def stop_sequences(tokenizer: Any, text: str) -> tuple[tuple[int, ...], ...]:
    """Return sequences of tokens that end with a text, whose first token may begin before it."""
    found = set()
    for before in ("", "\n", "}\n", "}", "}}", '"}}', "}} ", "]}}", "{}}"):
        ids = tokenizer(before + text, add_special_tokens=False)["input_ids"]
        ends = (ids[start:] for start in range(len(ids) - 1, -1, -1))
        found.add(next(tuple(end) for end in ends if text in tokenizer.decode(end, skip_special_tokens=False)))
    return tuple(sorted(found))


def without_images(messages: Sequence[Message]) -> list[Message]:
    """Return the messages without their image blocks."""
    return [
        message | {"content": [block for block in message["content"] if block["type"] != "image"]}
        for message in messages
    ]


def tried_image() -> Image:
    """Return a grey image."""
    from PIL import Image as images

    return images.new("RGB", (64, 64), (128, 128, 128))
