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

import numpy as np

from rl_vlm.data.call_readers import (
    CALL_FORMS,
    Reader,
    TemplateReader,
    UnreadableCall,
    read_json_calls,
    read_python_calls,
)
from rl_vlm.data.messages import without_blocks
from rl_vlm.data.observations import ASKED, Message, ObservationRenderer, Role, call_id, observed_messages
from rl_vlm.data.prompts import REFUSALS, Introduction, PromptBuilder, image_token_id, introduced
from rl_vlm.data.tool_calls import Schema, introduction_of
from rl_vlm.errors import ConfigError, DataError, shorten
from rl_vlm.types import Sample, ToolCall, Video

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
HOSTILE = """"quoted" isn't <b>\\n</b> & {é}:\n[1]"""
"""Text that a template changes if it writes results as JSON, Python or HTML."""
THOUGHTS = ("<think>\ntried thought\n</think>\n\n", "<|channel>thought\ntried thought\n<channel|>")


class Form(NamedTuple):
    """A way to write tools and calls that works with a template."""

    kind: Literal["template", "text", "none"]
    """The form `none` has no tools."""
    name: str
    builder: PromptBuilder
    reader: Reader
    notes: tuple[str, ...] = ()


class TurnChoice(NamedTuple):
    """How turns are written."""

    form: Form
    role: Role
    """Role of messages that hold results."""
    description: str
    """One line that says what was chosen, and why."""
    shows_videos: bool = False
    """Whether results can hold videos. Otherwise their frames are images."""
    starts_show_videos: bool = False
    """Whether the prompt can hold videos that `reset` shows."""


class TemplateTrial:
    """Tries a chat template on a made-up call with an image in its result, and then with a video."""

    def __init__(
        self,
        builder: PromptBuilder,
        stop_token_ids: Sequence[int],
        schemas: Sequence[Schema],
        takes_images: bool,
        takes_videos: bool = False,
    ) -> None:
        """Take a builder whose prompts have no tools."""
        self.builder, self.stop_token_ids, self.schemas = with_thoughts_kept(builder), stop_token_ids, schemas
        self.takes_images, self.takes_videos = takes_images, takes_videos

    def choose(self, tool_format: str, observation_role: str) -> TurnChoice:
        """Choose the first form and role that work. Raises ConfigError if none does."""
        forms = {"template": self._in_template, "text": self._in_text}
        kinds = [tool_format] if tool_format in forms else list(forms)
        if not self.schemas:
            forms, kinds = {"none": self._without_tools}, ["none"]
        problems: list[str] = []
        for kind in kinds:
            try:
                form = forms[kind]()
            except REFUSALS as error:
                problems.append(one_line(error))
                continue
            for role in roles(kind, observation_role):
                if problem := self.problem_of(form, role):
                    problems.append(f"{problem} in {role} messages")
                else:
                    starts_show_videos = self.takes_videos and self.starts_show_video(form)
                    shows_videos = starts_show_videos and self.shows_video(form, role)
                    if self.takes_videos and not shows_videos:
                        of = " of results" if starts_show_videos else ""
                        problems.append(f"the chat template leaves out videos{of}, so their frames are images")
                    described = self._described(form, role, problems)
                    return TurnChoice(form, role, described, shows_videos, starts_show_videos)
        settings = {"tool_format": tool_format, "observation_role": observation_role}
        chosen = [f"rollout.{name}: {value}" for name, value in settings.items() if value != "auto"]
        raise ConfigError(
            f"{' with '.join(chosen) or 'rollout.tools, rollout.environment'}: turns cannot be written for this "
            f"checkpoint: {'; '.join(dict.fromkeys(problems))}. "
            + ("Use auto." if chosen else "Choose another checkpoint, or change its chat template.")
        )

    def _described(self, form: Form, role: Role, problems: list[str]) -> str:
        notes = [*dict.fromkeys(problems), *form.notes, *self.notes]
        observed = f"results as {role} messages" if self.schemas else f"observations as {role} messages"
        return f"tools: {form.name}, {observed}{': ' if notes else ''}{'; '.join(notes)}"

    def problem_of(self, form: Form, role: Role) -> str | None:
        """Return why messages of a role cannot show results, or None if they can."""
        pictures = [tried_image(), tried_image()] if self.takes_images else []
        contents: list[list[Message]] = [
            [{"type": "text", "text": f"tried result {i}"}, *({"type": "image"} for _ in pictures[:1])] for i in (1, 2)
        ]
        names = [TRIED.name, "tried_other"] if form.kind == "template" else []
        messages = observed_messages(
            contents, role, is_split=bool(names) and role == "tool", is_tagged=bool(self.schemas)
        )
        renderer = ObservationRenderer(form.builder, self.stop_token_ids)
        try:
            text = renderer.text_after_turn(messages, pictures, names)
            if pictures and text == renderer.text_after_turn(without_blocks(messages, "image"), [], names):
                return "the chat template leaves out images"
            found = renderer.render("trial", messages, pictures, [b""] * len(pictures), [], names)
            shown = self._num_image_tokens(found.token_ids)
            expected = sum(self._num_image_tokens(self._prompt_ids(picture)) for picture in pictures)
        except (*REFUSALS, DataError) as error:
            return f"the chat template refuses results ({one_line(error)})"
        places = [text.find(f"tried result {i}") for i in (1, 2)]
        if not 0 <= places[0] < places[1] or any(text.count(f"tried result {i}") != 1 for i in (1, 2)):
            return "the chat template changes the order of results"
        if any(schema["function"]["description"] in text for schema in self.schemas):
            return "the chat template writes the tools again"
        if "'text':" in text or '"text":' in text:
            return "the chat template writes results as Python lists"
        if shown != expected:
            return f"the chat template leaves out images ({shown} image tokens, expected {expected})"
        hostile = [message | {"content": [{"type": "text", "text": HOSTILE}]} for message in messages]
        try:
            renderer.text_after_turn(hostile, [], names)
        except REFUSALS:
            return "the chat template changes the text of results"
        return None

    def starts_show_video(self, form: Form) -> bool:
        """Return whether a video can be shown in a prompt."""
        messages: list[Message] = [{"role": "user", "content": [{"type": "text", "text": "tried"}, {"type": "video"}]}]
        try:
            form.builder.build(Sample("trial", messages, [], {}, messages, videos=[tried_video()]))
        except (*REFUSALS, DataError):
            return False
        return True

    def shows_video(self, form: Form, role: Role) -> bool:
        """Return whether a message of a role can show a result with a video."""
        names = [TRIED.name] if form.kind == "template" else []
        content: list[Message] = [{"type": "text", "text": "tried result"}, {"type": "video"}]
        messages = observed_messages(
            [content], role, is_split=bool(names) and role == "tool", is_tagged=bool(self.schemas)
        )
        if form.builder.leaves_videos_out:
            return False
        try:
            ObservationRenderer(form.builder, self.stop_token_ids).render(
                "trial", messages, [tried_video()], [b""], [], names
            )
        except (*REFUSALS, DataError):
            return False
        return True

    def _num_image_tokens(self, token_ids: Any) -> int:
        token = image_token_id(self.builder.processor)
        return int((token_ids == token).sum()) if token is not None else 0

    def _prompt_ids(self, *pictures: Image) -> Any:
        """Return the tokens of a prompt with images. Before the last one is a text."""
        *before, last = ({"type": "image"} for _ in pictures)
        content = [*before, {"type": "text", "text": "tried"}, last]
        text = self.builder.templated([{"role": "user", "content": content}], pictures, tokenize=False)
        return self.builder.part(text, pictures)[0]

    @property
    def notes(self) -> list[str]:
        """Facts about the template that do not decide."""
        kept = self.builder.template_kwargs.get("preserve_thinking") is True
        chosen = kept and "preserve_thinking" not in self.builder.data.chat_template_kwargs
        notes = ["preserve_thinking: true in chat_template_kwargs"] if chosen else []
        in_field = {"reasoning_content": "tried thought", "content": [{"type": "text", "text": "tried answer"}]}
        in_text = [{"content": [{"type": "text", "text": f"{thought}tried answer"}]} for thought in THOUGHTS]
        if self._drops_thought(in_field) and any(map(self._drops_thought, in_text)):
            notes.append(
                "earlier thoughts stay in the context as they were sampled, although this chat template would drop them"
            )
        if self.takes_images and self._counts_images():
            notes.append("the processor counts images, and begins again with each observation")
        return notes

    def _counts_images(self) -> bool:
        """Return whether an image is written in another way after another image, such as with a number."""
        decode, picture = self.builder.processor.tokenizer.decode, tried_image()
        try:
            first, second = (decode(self._prompt_ids(*[picture] * number)) for number in (1, 2))
        except REFUSALS:  # of more than one image
            return False
        return first.partition("tried")[2] != second.partition("tried")[2]

    def _drops_thought(self, message: Message) -> bool:
        """Return whether the template leaves out the thought of an earlier turn."""
        text = self.builder.templated([ASKED, {"role": "assistant"} | message, ASKED], [], tokenize=False)
        return "tried thought" not in text

    def _without_tools(self) -> Form:
        return Form("none", "none", self.builder, read_json_calls)

    def _in_text(self) -> Form:
        """Return the form that describes tools in a text. Raises ValueError if the template leaves that text out."""
        text = introduction_of(self.schemas)
        role = introducing_role(self.builder, text=text)
        if role is None:
            raise ValueError("the chat template leaves out a text that describes the tools")
        note = ("the first user message describes the tools",) if role == "user" else ()
        builder = self.builder.adapted(self.builder.template_kwargs, Introduction(text, role))
        return Form("text", "calls as JSON in <tool_call> tags", builder, read_json_calls, note)

    def _in_template(self) -> Form:
        """Return the form of the template. Raises an error if it drops something, or if no reader reads its calls."""
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
        return Form("template", f"calls as {name}", builder, reader)

    def _reader_of(self, prefix: str, written: str) -> tuple[str, Reader]:
        """Find the reader of a written call, and return its name and itself. Raises ValueError if there is none."""
        tokenizer = self.builder.processor.tokenizer
        opening = next(iter(re.findall(r"<[^<>]+>|\[[A-Z_]+\]", written)), "")
        own = getattr(tokenizer, "response_template", None)
        readers: list[tuple[str, Reader]] = []
        if own:
            readers.append(
                ("the tokenizer's response template has them", TemplateReader(tokenizer, own, prefix, opening))
            )
        readers.append(("JSON in <tool_call> tags", read_json_calls))
        readers.append(("Python between <|tool_call_start|> and <|tool_call_end|>", read_python_calls))
        for name, form in CALL_FORMS.items():
            readers.append((name, TemplateReader(tokenizer, form, "", opening, skips_thoughts=True)))
        for name, reader in readers:
            try:
                if reader(written, [TRIED_SCHEMA]).calls == (TRIED,):
                    return name, reader
            except UnreadableCall:
                continue
        raise ValueError(f"calls as the chat template writes them cannot be read ({shorten(repr(written), 120)})")


def introducing_role(
    builder: PromptBuilder, has_image: bool = False, text: str = "tried introduction"
) -> Literal["system", "user"] | None:
    """Return the first role, system or user, whose message keeps an introduction when the template writes it.

    Return None if the template leaves it out of both.
    """
    content: list[Message] = [{"type": "text", "text": text}, *({"type": "image"},) * has_image]
    question: Message = {"role": "user", "content": [{"type": "text", "text": "tried question"}]}
    roles: list[Literal["system", "user"]] = ["system", "user"]
    for role in roles:
        messages, pictures = introduced([question], content, role), [tried_image()] * has_image
        try:
            written = builder.templated(messages, pictures, tokenize=False)
            without = builder.templated(without_blocks(messages, "image"), [], tokenize=False)
            shows_image = not has_image or written != without
        except REFUSALS:
            continue
        if text in written and "tried question" in written and shows_image:
            return role
    return None


def roles(kind: str, setting: str) -> list[Role]:
    """Return the roles that messages with results can have in a form, in the order in which to try them."""
    if setting != "auto":
        return ["tool" if setting == "tool" else "user"]
    return ["tool", "user"] if kind == "template" else ["user"]


def one_line(error: Exception) -> str:
    """Return the start of an error's message on one line."""
    return shorten(" ".join(str(error).split()), 200)


def with_thoughts_kept(builder: PromptBuilder) -> PromptBuilder:
    """Return a builder whose template keeps the thoughts of earlier turns, if it has a setting for it."""
    has_setting = "preserve_thinking" in str(builder.processor.chat_template)
    return builder.adapted({"preserve_thinking": True}) if has_setting else builder


def stop_sequences(tokenizer: Any, text: str) -> tuple[tuple[int, ...], ...]:
    """Return sequences of tokens that end with a text. The first token may begin before the text."""
    found = set()
    for before in ("", "\n", "}\n", "}", "}}", '"}}', "}} ", "]}}", "{}}"):
        ids = tokenizer(before + text, add_special_tokens=False)["input_ids"]
        ends = (ids[start:] for start in range(len(ids) - 1, -1, -1))
        found.add(next(tuple(end) for end in ends if text in tokenizer.decode(end, skip_special_tokens=False)))
    return tuple(sorted(found))


def tried_video() -> Video:
    """Return four grey frames, two per second."""
    return Video(np.full((4, 64, 64, 3), 128, np.uint8), (0, 1, 2, 3), 2.0, 4, 2.0)


def tried_image() -> Image:
    """Return a grey image."""
    from PIL import Image as images

    return images.new("RGB", (64, 64), (128, 128, 128))
