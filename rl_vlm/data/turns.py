"""Reads the calls of a model's turns, and renders the observations that follow.

`TurnFormat` holds how tools, calls and observations are written for one model. `TemplateTrial` chooses it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal

from rl_vlm.data.call_readers import UnreadableCall
from rl_vlm.data.messages import as_messages, blocks_of
from rl_vlm.data.observations import Message, ObservationRenderer, observed_messages
from rl_vlm.data.prompts import PromptBuilder, introduced, join_blocks
from rl_vlm.data.template_trial import TemplateTrial, TurnChoice, introducing_role, stop_sequences
from rl_vlm.data.tool_calls import CLOSE, Schema
from rl_vlm.errors import ConfigError, DataError
from rl_vlm.types import Observation, Sample, ToolCall, ToolResult

if TYPE_CHECKING:
    from PIL.Image import Image


@dataclass(frozen=True)
class ParsedTurn:
    """A turn as it was read."""

    text: str
    """Its text without special tokens."""
    content: str
    """Its text without calls."""
    calls: tuple[ToolCall, ...] = ()
    problem: str | None = None
    """Why a call cannot be read, for the model to see. Then there are no calls."""


class TurnFormat:
    """How tools, calls and observations are written for one model."""

    def __init__(
        self, choice: TurnChoice, stop_token_ids: Sequence[int], schemas: Sequence[Schema], takes_images: bool
    ) -> None:
        """`choose` builds it for a model."""
        self.builder = choice.form.builder
        """Builds prompts that tell the model of its tools."""
        self.description = choice.description
        """One line that says what was chosen, and why."""
        self.tokenizer = self.builder.processor.tokenizer
        in_text = choice.form.kind == "text"
        self.stop_sequences: tuple[tuple[int, ...], ...] = stop_sequences(self.tokenizer, CLOSE) if in_text else ()
        """Sequences of tokens that end a turn, as stop tokens do."""
        self.counters: Counter[str] = Counter()
        """Numbers of events since the start, by the name of their metric."""
        self.choice, self.schemas, self.takes_images = choice, list(schemas), takes_images
        self.renderer = ObservationRenderer(self.builder, stop_token_ids)
        self._introducing_role = cache(partial(introducing_role, self.builder))
        added = {str(token) for token in self.tokenizer.added_tokens_decoder.values() if token.special}
        hidden = sorted({*added, *self.tokenizer.all_special_tokens, *self.renderer.stops}, key=len, reverse=True)
        self.hidden = re.compile("|".join(map(re.escape, hidden)))

    @classmethod
    def choose(
        cls,
        builder: PromptBuilder,
        stop_token_ids: Sequence[int],
        schemas: Sequence[Schema],
        tool_format: Literal["auto", "template", "text"],
        observation_role: Literal["auto", "tool", "user"],
        takes_images: bool,
    ) -> TurnFormat:
        """Choose how turns are written, by trying the chat template.

        `takes_images` says whether the model takes images after the prompt. Raises ConfigError if the template cannot
        write turns at all, or not with these settings.
        """
        if not builder.processor.chat_template:
            raise ConfigError(
                "rollout.tools, rollout.environment: the checkpoint has no chat template, so turns after the first "
                "cannot be written. Choose another checkpoint, or add a chat template to it."
            )
        trial = TemplateTrial(builder, stop_token_ids, schemas, takes_images)
        return cls(trial.choose(tool_format, observation_role), stop_token_ids, schemas, takes_images)

    def parse(self, token_ids: Sequence[int]) -> ParsedTurn:
        """Read a turn. Calls that cannot be read are a problem to tell the model."""
        ids, plain = list(token_ids), {"clean_up_tokenization_spaces": False}
        text = self.tokenizer.decode(ids, skip_special_tokens=True, **plain)
        try:
            content, calls = self.choice.form.reader(
                self.tokenizer.decode(ids, skip_special_tokens=False, **plain), self.schemas
            )
        except UnreadableCall as error:
            return ParsedTurn(text, text.strip(), problem=str(error))
        return ParsedTurn(text, self.hidden.sub("", content).strip(), calls)

    def observe(
        self,
        name: str,
        token_ids: Sequence[int],
        calls: Sequence[ToolCall],
        results: Sequence[ToolResult],
        images: Sequence[Sequence[Image]],
    ) -> Observation:
        """Render the results of a turn's calls, in order. Without calls, render the only result as a user's message.

        `token_ids` is the turn. `images` are the results' images. Raises DataError if the model does not take them.
        """
        pictures = list(chain.from_iterable(images))
        if pictures and not self.takes_images:
            raise DataError(
                f"{name}: an observation has an image, and this model takes images in the first prompt only. Return "
                "text, or choose another model."
            )
        contents = [self._harmless(result.content) for result in results]
        names = [self._harmless_text(call.name) for call in calls] if self.choice.form.kind == "template" else []
        role = self.choice.role if calls else "user"
        messages = observed_messages(
            contents, role, is_split=bool(names) and role == "tool", is_tagged=bool(self.schemas)
        )
        files = list(chain.from_iterable(result.images for result in results))
        return self.renderer.render(name, messages, pictures, files, token_ids, names)

    def reset_sample(
        self, sample: Sample, content: Sequence[Message], images: Sequence[Image], files: Sequence[bytes]
    ) -> Sample:
        """Return the sample with content at the end of its last message.

        Image blocks of the content stand for `images`, in order. `files` are these images as files.
        """
        number = len(sample.images)
        added = self._harmless(content)
        return replace(
            sample,
            messages=with_content(sample.messages, added),
            images=[*sample.images, *images],
            encoded_images=sample.encoded_images | {number + i: file for i, file in enumerate(files)},
            image_files=[*sample.image_files, *(None for _ in images)],
            prompt=prompt_with(sample.prompt, added),
        )

    def system_sample(
        self, sample: Sample, content: Sequence[Message], images: Sequence[Image], files: Sequence[bytes]
    ) -> Sample:
        """Return the sample with content in a message of the system, or of the user if the template has no other.

        `content`, `images` and `files` are as in `reset_sample`. Raises DataError if the template leaves it out.
        """
        number, added = len(images), self._harmless(content)
        role = self._introducing_role(bool(images))
        if role is None:
            raise DataError("the chat template leaves out the content of `system_prompt`")
        return replace(
            sample,
            messages=introduced(sample.messages, added, role),
            images=[*images, *sample.images],
            encoded_images=dict(enumerate(files)) | {number + i: file for i, file in sample.encoded_images.items()},
            image_files=[*(None for _ in images), *sample.image_files],
            frame_starts=[number + start for start in sample.frame_starts],
            prompt=introduced(as_messages(sample.prompt), added, role),
        )

    def _harmless(self, content: Sequence[Message]) -> list[Message]:
        harmless, number = self.renderer.harmless(content)
        self.counters["tools/broken_special_tokens"] += number
        return harmless

    def _harmless_text(self, text: str) -> str:
        return self._harmless([{"type": "text", "text": text}])[0]["text"]


def with_content(messages: Sequence[Message], content: Sequence[Message]) -> list[Message]:
    """Return new messages with content at the end of the last one."""
    last = messages[-1]
    return [*messages[:-1], last | {"content": join_blocks(blocks_of(last["content"]), content)}]


def prompt_with(prompt: Any, content: Sequence[Message]) -> Any:
    """Return a row's prompt with content at its end. The prompt of a plain-text row stays text if the content is."""
    if not isinstance(prompt, str):
        return with_content(prompt, content)
    if all(block["type"] == "text" for block in content):
        return prompt + "".join(block["text"] for block in content)
    return with_content(as_messages(prompt), content)
