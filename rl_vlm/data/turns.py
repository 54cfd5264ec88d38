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
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from rl_vlm.data.call_readers import UnreadableCall
from rl_vlm.data.frames import frames_as_images
from rl_vlm.data.images import png_bytes
from rl_vlm.data.messages import as_messages, blocks_of
from rl_vlm.data.observations import Message, ObservationRenderer, observed_messages
from rl_vlm.data.prompts import PromptBuilder, by_kind, introduced, join_blocks
from rl_vlm.data.template_trial import TemplateTrial, TurnChoice, introducing_role, stop_sequences
from rl_vlm.data.tool_calls import CLOSE, Schema
from rl_vlm.data.video.frames import FrameRule
from rl_vlm.errors import ConfigError, DataError
from rl_vlm.types import Observation, Sample, ToolCall, ToolResult, Video, is_clip

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
        self,
        choice: TurnChoice,
        stop_token_ids: Sequence[int],
        schemas: Sequence[Schema],
        takes_images: bool,
    ) -> None:
        """`choose` builds it for a model."""
        self.builder = choice.form.builder
        """Builds prompts that tell the model of its tools."""
        self.description = choice.description
        """One line with the choice and its reason."""
        self.tokenizer = self.builder.processor.tokenizer
        in_text = choice.form.kind == "text"
        self.stop_sequences: tuple[tuple[int, ...], ...] = stop_sequences(self.tokenizer, CLOSE) if in_text else ()
        """Sequences of tokens that end a turn, as stop tokens do."""
        self.counters: Counter[str] = Counter()
        """Numbers of events since the start, by the name of their metric."""
        self.choice, self.schemas = choice, list(schemas)
        self.takes_images, self.takes_videos = takes_images, choice.starts_show_videos
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
        takes_videos: bool = False,
    ) -> TurnFormat:
        """Choose how turns are written, by trying the chat template.

        `takes_images` says whether the model takes images after the prompt, and `takes_videos` whether the engine takes
        videos that an environment shows. Raises ConfigError if the template cannot write turns at all, or not with
        these settings.
        """
        if not builder.processor.chat_template:
            raise ConfigError(
                "rollout.tools, rollout.environment: the checkpoint has no chat template, so turns after the first "
                "cannot be written. Choose another checkpoint, or add a chat template to it."
            )
        takes_videos = takes_videos and takes_images and builder.video_processor is not None
        trial = TemplateTrial(builder, stop_token_ids, schemas, takes_images, takes_videos)
        choice = trial.choose(tool_format, observation_role)
        return cls(choice, stop_token_ids, schemas, takes_images)

    @property
    def prompt_rule(self) -> FrameRule:
        """The rule that chooses frames of clips in a prompt."""
        return self.builder.frame_rule if self.takes_videos else FrameRule(self.builder.data)

    @property
    def result_rule(self) -> FrameRule:
        """The rule that chooses frames of clips in results."""
        return self.builder.frame_rule if self.choice.shows_videos else FrameRule(self.builder.data)

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
        media: Sequence[Sequence[Image | Video]],
    ) -> Observation:
        """Render the results of a turn's calls, in order. Without calls, render the only result as a user's message.

        `token_ids` is the turn. `media` are the results' images and clips. Raises DataError if the model does not take
        them.
        """
        shown = [
            self._shown(result.content, some, result.images, self.choice.shows_videos)
            for result, some in zip(results, media, strict=True)
        ]
        if not self.takes_images and any(each.media for each in shown):
            raise DataError(
                f"{name}: an observation has an image, and this model takes images in the first prompt only. Return "
                "text, or choose another model."
            )
        contents = [each.content for each in shown]
        names = [self._harmless_text(call.name) for call in calls] if self.choice.form.kind == "template" else []
        role = self.choice.role if calls else "user"
        messages = observed_messages(
            contents, role, is_split=bool(names) and role == "tool", is_tagged=bool(self.schemas)
        )
        pictures = list(chain.from_iterable(each.media for each in shown))
        files = list(chain.from_iterable(each.files for each in shown))
        return self.renderer.render(name, messages, pictures, files, token_ids, names)

    def reset_sample(
        self, sample: Sample, content: Sequence[Message], media: Sequence[Image | Video], files: Sequence[bytes]
    ) -> Sample:
        """Return the sample with content at the end of its last message.

        Blocks of images and videos stand for `media`, in order. `files` are the same as files.
        """
        added = self._shown(content, media, files, self.takes_videos)
        return with_media(
            sample, added, is_first=False,
            messages=with_content(sample.messages, added.content), prompt=prompt_with(sample.prompt, added.content),
        )  # fmt: skip

    def system_sample(
        self, sample: Sample, content: Sequence[Message], media: Sequence[Image | Video], files: Sequence[bytes]
    ) -> Sample:
        """Return the sample with content in a message of the system, or of the user if the template has no other.

        `content`, `media` and `files` are as in `reset_sample`. Raises DataError if the template leaves it out.
        """
        added = self._shown(content, media, files, self.takes_videos)
        role = self._introducing_role(bool(media))
        if role is None:
            raise DataError("the chat template leaves out the content of `system_prompt`")
        return with_media(
            sample, added, is_first=True, messages=introduced(sample.messages, added.content, role),
            prompt=introduced(as_messages(sample.prompt), added.content, role),
        )  # fmt: skip

    def _shown(
        self, content: Sequence[Message], media: Sequence[Image | Video], files: Sequence[bytes], as_videos: bool
    ) -> AddedContent:
        """Return content as the model gets it. Without `as_videos`, each frame of a clip is an image after its time."""
        images, videos = by_kind(media)
        encoded = dict(enumerate(file for file in files if not is_clip(file)))
        found = Sample("", [{"role": "user", "content": list(content)}], images, {}, "", encoded, videos=videos)
        if not as_videos:
            found = frames_as_images(found)
            files = [found.encoded_images.get(i) or png_bytes(image) for i, image in enumerate(found.images)]
            media = found.images
        (message,) = found.messages
        return AddedContent(self._harmless(message["content"]), list(media), list(files), found)

    def _harmless(self, content: Sequence[Message]) -> list[Message]:
        harmless, number = self.renderer.harmless(content)
        self.counters["tools/broken_special_tokens"] += number
        return harmless

    def _harmless_text(self, text: str) -> str:
        return self._harmless([{"type": "text", "text": text}])[0]["text"]


class AddedContent(NamedTuple):
    """Content as the model gets it."""

    content: list[Message]
    media: list[Image | Video]
    """The images and videos of its blocks, in order."""
    files: list[bytes]
    """`media` as files."""
    sample: Sample
    """A sample of the content alone."""


def with_media(sample: Sample, added: AddedContent, is_first: bool, **fields: Any) -> Sample:
    """Return the sample with further images and videos, before its own if `is_first`, and with these fields."""
    some = [added.sample, sample] if is_first else [sample, added.sample]
    numbers = [0, len(some[0].images)]
    pairs = list(zip(numbers, some, strict=True))
    return replace(
        sample,
        images=[image for each in some for image in each.images],
        encoded_images={number + i: file for number, each in pairs for i, file in each.encoded_images.items()},
        image_files=[file for each in some for file in each.image_files or [None] * len(each.images)],
        videos=[video for each in some for video in each.videos],
        frames_of=[video for each in some for video in each.frames_of],
        frame_starts=[number + start for number, each in pairs for start in each.frame_starts],
        **fields,
    )


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
