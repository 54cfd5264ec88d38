"""Renders samples for one model: chat template, tokens, and the model's own image inputs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, runtime_checkable

import jinja2

from rl_vlm.config.image_tokens import IMAGE_BECOMES, image_token_id
from rl_vlm.config.schema import DataConfig, ModelConfig
from rl_vlm.data.frames import frames_as_images
from rl_vlm.data.images import pixel_limits
from rl_vlm.data.messages import blocks_of
from rl_vlm.data.one_input import expanded, has_one_input
from rl_vlm.data.problems import BEYOND_CONTEXT
from rl_vlm.data.remote.chat import ChatProcessor
from rl_vlm.data.remote.processors import own_processor
from rl_vlm.data.samples import Rows
from rl_vlm.data.video.frames import FrameRule
from rl_vlm.data.video.sizes import has_size, smallest_frame
from rl_vlm.errors import ConfigError, DataError, ModelError, is_out_of_memory
from rl_vlm.types import Prompt, Sample, Video, VideoFormat

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor
    from transformers import BatchFeature, ProcessorMixin

REFUSALS = (
    ValueError, TypeError, KeyError, IndexError, ZeroDivisionError, RuntimeError, StopIteration, jinja2.TemplateError,
)  # fmt: skip
"""Errors that templates and processors raise for messages and images that they do not take."""


def load_processor(path: str, model: ModelConfig, data: DataConfig) -> ProcessorMixin:
    """Load the processor of a checkpoint with the config's `min_pixels` and `max_pixels`.

    Raises ModelError if it has no image processor, ConfigError if it has no such limits or if they contradict each
    other.
    """
    from transformers import AutoImageProcessor, AutoProcessor

    source = {"revision": model.model_revision, "trust_remote_code": model.trust_remote_code}
    try:
        processor = own_processor(path, model) or AutoProcessor.from_pretrained(path, **source)
    except (OSError, ValueError) as error:
        raise ModelError(f"No processor can be loaded from {path!r}: {error}") from error
    if not hasattr(processor, "image_processor"):
        raise ModelError(f"{path!r} has no image processor, only a {type(processor).__name__}: it is no vision model.")
    limits = pixel_limits(data)
    if limits and isinstance(processor, ChatProcessor):
        raise ConfigError(
            f"data.{min(limits)} has no effect on {path}, whose code chooses the size of images; unset it"
        )
    if limits:  # AutoProcessor would also pass them to the tokenizer, which would save them
        processor.image_processor = AutoImageProcessor.from_pretrained(path, **source, **limits)
        check_limits(processor.image_processor, limits)
    return processor


def check_limits(image_processor: Any, limits: dict[str, int]) -> None:
    """Raise ConfigError if the processor ignores a limit, or if the limits contradict each other.

    Processors with pixel limits store them as edges of `size`; others ignore them silently.
    """
    size = dict(image_processor.size)
    edges = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}
    for name, value in limits.items():
        if size.get(edges[name]) != value:
            kind = type(image_processor).__name__
            raise ConfigError(
                f"data.{name} has no effect on the checkpoint's {kind}, which has no such limit; unset it."
            )
    if size["shortest_edge"] > size["longest_edge"]:
        raise ConfigError(
            f"min_pixels = {size['shortest_edge']} is more than max_pixels = {size['longest_edge']}; the limit that "
            "data does not set is the checkpoint's, set both."
        )


def has_max_pixels(processor: Any) -> bool:
    """Return whether the processor resizes images to `data.max_pixels`."""
    settings = getattr(processor.image_processor, "valid_kwargs", None)
    return "max_pixels" in getattr(settings, "__annotations__", {})


class SmallestPixels(NamedTuple):
    """The smallest limits on pixels that make a difference. None if a limit makes none."""

    image: int | None
    """Of `data.max_pixels`."""
    frame: int | None
    """Of `data.video_max_pixels`."""


def placeholder_tokens(processor: Any) -> list[str]:
    """Return the tokens that a text must not contain: placeholders of images and videos, before or after expansion."""
    owners, names = (processor, processor.tokenizer), ("image_token", "video_token", "img_patch_token")
    tokens = {getattr(owner, name, None) for owner in owners for name in names}
    return sorted(str(each) for each in tokens | {IMAGE_BECOMES.get(type(processor).__name__)} if each)


def token_kinds(processor: Any) -> dict[str, bool]:
    """Return the argument that asks a processor for the kind of each token, if it has them among its model's inputs.

    Most of these processors return them anyway. Cosmos 3 Edge's does not.
    """
    names = getattr(processor, "model_input_names", ())  # code with a checkpoint may have none
    return {"return_mm_token_type_ids": True} if "mm_token_type_ids" in names else {}


SplitFeatures = tuple["Tensor", dict[str, "Tensor"], dict[str, "Tensor"]]
"""Token ids (tokens,), further inputs per token, and inputs of images and videos."""


def split_features(features: BatchFeature | dict[str, Tensor]) -> SplitFeatures:
    """Split a processor's output for one text into token ids, inputs per token and inputs of images and videos."""
    found = dict(features)
    token_ids = found.pop("input_ids")  # (1, tokens)
    for name in ("attention_mask", "labels"):  # PaliGemma's processor labels the prompt, for supervised training
        found.pop(name, None)
    found = {name: value.float() if value.is_floating_point() else value for name, value in found.items()}  # Llama 4
    token_inputs = {name: value[0] for name, value in found.items() if value.shape == token_ids.shape}
    return token_ids[0], token_inputs, {name: value for name, value in found.items() if name not in token_inputs}


class LongPromptError(DataError):
    """The prompt has `num_tokens` tokens, too many for the model's context."""

    def __init__(self, message: str, num_tokens: int) -> None:
        super().__init__(message, BEYOND_CONTEXT)
        self.num_tokens = num_tokens


@runtime_checkable
class SampleRenderer(Protocol):
    """Builds prompts from samples. `PromptBuilder` does so with a processor."""

    def build(self, sample: Sample) -> Prompt: ...

    def media_inputs(self, media: Sequence[Image | Video]) -> dict[str, Tensor]: ...


class Introduction(NamedTuple):
    """A text before the conversation, such as one that describes tools."""

    text: str
    role: Literal["system", "user"]
    """The first message of this role starts with the text. Without a system message, one is added."""


class PromptBuilder:
    """Renders samples with a checkpoint's processor, one call per prompt so that no image affects another's size."""

    def __init__(
        self,
        processor: ProcessorMixin,
        data: DataConfig,
        max_tokens: int | None = None,
        template_kwargs: dict[str, Any] | None = None,
        introduction: Introduction | None = None,
        video_format: VideoFormat = "native",
        most_videos: int | None = None,
    ) -> None:
        """`max_tokens` is the longest prompt that fits into the model's context, or None if there is no limit.

        `template_kwargs` are further arguments of the chat template. `data.chat_template_kwargs` come first. Every
        conversation starts with the `introduction`. With the `video_format` "frames", the frames of videos are images.
        `most_videos` is the largest number of videos in a prompt, or None if it is not known.

        Raises ConfigError if the chat template does not use one of the `chat_template_kwargs`.
        """
        template = str(processor.chat_template or "")
        unused = [name for name in data.chat_template_kwargs if not re.search(rf"\b{re.escape(name)}\b", template)]
        if unused:
            raise ConfigError(f"data.chat_template_kwargs: the checkpoint's chat template has no {', '.join(unused)}.")
        self.processor: Any = processor  # its type annotations lack images and tensors
        self.placeholders = placeholder_tokens(processor)
        self.data = data
        self.template_kwargs = (template_kwargs or {}) | data.chat_template_kwargs
        self.introduction = introduction
        self.max_tokens = max_tokens
        self.video_format: VideoFormat = video_format
        self.most_videos = most_videos

    @property
    def video_processor(self) -> Any:
        """The processor that chooses the frames of videos, or None if they are chosen at even distances."""
        return getattr(self.processor, "video_processor", None) if self.video_format == "native" else None

    @property
    def frame_rule(self) -> FrameRule:
        """The rule that chooses frames of videos."""
        return FrameRule(self.data, self.video_processor)

    @property
    def smallest_pixels(self) -> SmallestPixels:
        """The smallest limits on pixels that make a difference. Frames that are images use the limit of images."""
        sizes = self.processor.image_processor.size if has_max_pixels(self.processor) else {}
        image = dict(sizes).get("shortest_edge")
        return SmallestPixels(image, image if self.video_format == "frames" else smallest_frame(self.video_processor))

    def adapted(self, template_kwargs: dict[str, Any], introduction: Introduction | None = None) -> PromptBuilder:
        """Return a builder with these arguments of the chat template, and with this introduction."""
        return PromptBuilder(
            self.processor, self.data, self.max_tokens, template_kwargs, introduction, self.video_format,
            self.most_videos,
        )  # fmt: skip

    def build(self, sample: Sample) -> Prompt:
        """Build the sample's prompt up to the start of the model's answer. A final assistant turn is continued.

        Raises DataError if the text holds placeholder tokens, or if the processor refuses the messages or an image.
        Raises LongPromptError if the prompt is too long for the model.
        """
        self._refuse_placeholders(sample)
        sample = self.shown(sample)
        with refusals(f"Sample {sample.sample_id}: {unequal_lengths(sample.videos)}the model's processor refuses it"):
            self._check_marks(sample)
            features = self._features(sample)
        if (num_prompts := len(features["input_ids"])) != 1:
            raise DataError(
                f"Sample {sample.sample_id}: the model's processor returned {num_prompts} prompts instead of one. "
                "Such processors are not supported."
            )
        token_ids, token_inputs, mm_inputs = split_features(features)
        image_sizes = self._image_sizes(mm_inputs) if sample.images else []
        prompt = Prompt(sample, token_ids, token_inputs, mm_inputs, image_sizes)
        self._check_images(prompt)
        self._check_length(prompt)
        return prompt

    def part(self, text: str, images: Sequence[Image], videos: Sequence[Video] = ()) -> SplitFeatures:
        """Return the model's inputs for a part of a rendered conversation, and for its images and videos."""
        if videos and has_one_input(self.processor):
            text, inputs = expanded(self.processor, text, images, videos)
            ids = self.processor.tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]
            return split_features({"input_ids": ids} | inputs)
        features = self.processor(
            text=[text], images=list(images) or None, return_tensors="pt", add_special_tokens=False,
            **token_kinds(self.processor), **self._frames(videos),
        )  # fmt: skip
        return split_features(features)

    def media_inputs(self, media: Sequence[Image | Video]) -> dict[str, Tensor]:
        """Return the model's inputs for images and videos of an observation. They do not depend on its text."""
        if not media:
            return {}
        images, videos = by_kind(media)
        message = {"role": "user", "content": [{"type": kind_of(each)} for each in media]}
        return self.part(self.templated([message], images, videos, tokenize=False), images, videos)[2]

    def unexpanded_ids(self, sample: Sample) -> list[int]:
        """Return the prompt's token ids with one placeholder per image and video, for engines that expand them.

        The tokenizer's own special tokens come first, unless the chat template has already added them.
        """
        return self._token_ids(self.text(sample))

    def text(self, sample: Sample) -> str:
        """Return the sample's prompt as text, with one placeholder per image and video."""
        sample = self.shown(sample)
        return (
            self.templated(sample.messages, sample.images, sample.videos, tokenize=False)
            if self.processor.chat_template
            else self._lines(sample)
        )

    def shown(self, sample: Sample) -> Sample:
        """Return the sample, with frames in place of its videos if the model gets frames as images."""
        return frames_as_images(sample) if self.video_format == "frames" else sample

    def _features(self, sample: Sample) -> BatchFeature | dict[str, Tensor]:
        """Return the model's inputs for a sample."""
        if sample.videos and has_one_input(self.processor):
            text, inputs = expanded(self.processor, self.text(sample), sample.images, sample.videos)
            return {"input_ids": self._token_ids(text, return_tensors="pt")} | inputs
        return self._chat(sample) if self.processor.chat_template else self._plain_text(sample)

    def _token_ids(self, text: str, **form: Any) -> Any:
        """Return the tokens of a prompt's text, which may start with the tokenizer's own special tokens already."""
        tokenizer = self.processor.tokenizer
        starts_itself = tokenizer.bos_token is not None and text.startswith(tokenizer.bos_token)
        return tokenizer(text, add_special_tokens=not starts_itself, **form)["input_ids"]

    def _chat(self, sample: Sample) -> BatchFeature:
        form: dict[str, Any] = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        kinds, videos = token_kinds(self.processor), as_sampled(self.processor, sample.videos) if sample.videos else {}
        if kinds or videos:
            form["processor_kwargs"] = kinds | videos
        return self.templated(sample.messages, sample.images, sample.videos, **form)

    def templated(
        self, messages: list[dict[str, Any]], images: Sequence[Image], videos: Sequence[Video] = (), **output: Any
    ) -> Any:
        """Apply the chat template to messages. `output` are arguments that set the form of the result.

        For videos, SmolVLM's processor would replace the checkpoint's template by its own. It does so only if the
        checkpoint's writes none.
        """
        continues = messages[-1]["role"] == "assistant"
        if videos and not self.leaves_videos_out:
            output.setdefault("chat_template", self.processor.chat_template)
        if self.introduction:
            text, role = self.introduction
            messages = introduced(messages, [{"type": "text", "text": text}], role)
        return self.processor.apply_chat_template(
            fill_media(messages, images, videos),
            add_generation_prompt=not continues,
            continue_final_message=continues,
            **output,
            **self.template_kwargs,
        )

    def _plain_text(self, sample: Sample) -> BatchFeature:
        """Render the sample for a checkpoint without a chat template."""
        return self.processor(
            text=[self._lines(sample)],
            images=list(sample.images) or None,
            return_tensors="pt",
            **token_kinds(self.processor),
            **self._frames(sample.videos),
        )

    def _frames(self, videos: Sequence[Video]) -> dict[str, Any]:
        """Return the processor's arguments for videos, if there are any."""
        frames = {"videos": [each.frames for each in videos]}
        return frames | as_sampled(self.processor, videos) if videos else {}

    def _lines(self, sample: Sample) -> str:
        """Return one line per message, with tokens of images and videos in place of their blocks."""
        tokens = {kind: str(getattr(self.processor, f"{kind}_token", "")) for kind in ("image", "video")}
        lines = [[tokens.get(b["type"]) or b["text"] for b in message["content"]] for message in sample.messages]
        return "\n".join(map("".join, lines))

    def _refuse_placeholders(self, sample: Sample) -> None:
        texts = [block.get("text", "") for message in sample.messages for block in message["content"]]
        for token in self.placeholders:
            if any(token in text for text in texts):
                raise DataError(
                    f"Sample {sample.sample_id}: the text holds {token}, which the model reads as a place for pixels. "
                    'Remove it; images go where {"type": "image"} blocks are.'
                )

    def _image_sizes(self, mm_inputs: dict[str, Tensor]) -> list[tuple[int, int]] | None:
        """Compute width and height of the resized images from their patch grids (Qwen-VL, GLM-V)."""
        if "image_grid_thw" not in mm_inputs:
            return None
        side = self.processor.image_processor.patch_size
        return [(width * side, height * side) for _, height, width in mm_inputs["image_grid_thw"].tolist()]

    @property
    def leaves_videos_out(self) -> bool:
        """Whether the checkpoint's own chat template writes no token of a video."""
        template = self.processor.chat_template
        return not isinstance(template, str) or self.processor.video_token not in template

    def _check_marks(self, sample: Sample) -> None:
        """Raise DataError if the text of a prompt with videos lacks a token for one of them, or for an image.

        Raises it too if the processor replaces the chat template by one with other text.
        """
        if not sample.videos:
            return
        text, owner = self.text(sample), self.processor
        self.check_tokens(text, sample.images, sample.videos, f"Sample {sample.sample_id}")
        if isinstance(owner.chat_template, str) and self.leaves_videos_out:
            media = sample.messages, sample.images, sample.videos
            own = self.templated(*media, tokenize=False, chat_template=owner.chat_template)
            if own not in (text, text.replace(owner.video_token, "")):
                raise DataError(
                    f"Sample {sample.sample_id}: the checkpoint's chat template leaves videos out, and its processor "
                    f"would replace it by another with other text. Let the template write {owner.video_token} for "
                    'blocks of the type "video", or set data.video_format: frames.'
                )

    def check_tokens(self, text: str, images: Sequence[Image], videos: Sequence[Video], where: str) -> None:
        """Raise DataError if a rendered text lacks the token of an image or of a video, or has too many."""
        for kind, token, num in (
            ("images", self.processor.image_token, len(images)),
            ("videos", self.processor.video_token, len(videos)),
        ):
            if text.count(token) != num:
                raise DataError(
                    f"{where}: {num} {kind} became {text.count(token)} tokens {token}. "
                    f"The checkpoint's chat template leaves {kind} out, so that the model would be trained blind."
                )

    def _check_images(self, prompt: Prompt) -> None:
        placeholder = image_token_id(self.processor)
        if placeholder is None or prompt.sample.videos:  # their text is checked, as frames may have tokens of images
            return
        num_tokens, num_images = int((prompt.token_ids == placeholder).sum()), len(prompt.sample.images)
        if (num_tokens > 0) != (num_images > 0):
            raise DataError(
                f"Sample {prompt.sample.sample_id}: {num_images} images became {num_tokens} image tokens. "
                "The checkpoint's chat template leaves images out, so that the model would be trained blind."
            )

    def _check_length(self, prompt: Prompt) -> None:
        num_tokens = len(prompt.token_ids)
        if self.max_tokens is not None and num_tokens > self.max_tokens:
            raise LongPromptError(
                f"Sample {prompt.sample.sample_id}: its prompt has {num_tokens} tokens, images included, and the model "
                f"takes at most {self.max_tokens} (the max_position_embeddings of its config less "
                "rollout.max_completion_length). Shorten the prompt, or leave out such rows before the run with "
                f"data.max_prompt_length={self.max_tokens}.",
                num_tokens,
            )


@contextmanager
def refusals(message: str) -> Iterator[None]:
    """Raise DataError with this message if a template or processor refuses something in the block.

    An image of 1,540 × 1 pixels, for instance, can have no rows after it was resized. Errors about memory stay.
    """
    try:
        yield
    except REFUSALS as error:
        if is_out_of_memory(error):
            raise
        raise DataError(f"{message}: {str(error) or type(error).__name__}") from error


def build_prompt(rows: Rows, index: int, builder: SampleRenderer) -> Prompt:
    """Build the prompt of a row. Raises DataError with the row's name if it cannot be used."""
    sample = rows[index]
    try:
        return builder.build(sample)
    except DataError as error:
        error.args = (f"{rows.place(index)}: {error}",)
        raise


def introduced(
    messages: Sequence[dict[str, Any]], content: Sequence[dict[str, Any]], role: str
) -> list[dict[str, Any]]:
    """Return new messages in which the first one of a role starts with content. Without one, it is added first."""
    at = next((i for i, message in enumerate(messages) if message["role"] == role), None)
    if at is None:
        return [{"role": role, "content": list(content)}, *messages]
    joined = join_blocks(content, [{"type": "text", "text": "\n\n"}], blocks_of(messages[at]["content"]))
    return [*messages[:at], messages[at] | {"content": joined}, *messages[at + 1 :]]


def join_blocks(*contents: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return contents of messages as one, with neighbouring texts joined. Texts are not separated."""
    joined: list[dict[str, Any]] = []
    for block in chain.from_iterable(contents):
        if block["type"] == "text" and joined and joined[-1]["type"] == "text":
            joined[-1] = {"type": "text", "text": joined[-1]["text"] + block["text"]}
        else:
            joined.append(block)
    return joined


def kind_of(medium: Image | Video) -> str:
    """Return the type of the content block of an image or a video."""
    return "video" if isinstance(medium, Video) else "image"


def by_kind(media: Sequence[Image | Video]) -> tuple[list[Image], list[Video]]:
    """Return the images, and the videos."""
    return [m for m in media if not isinstance(m, Video)], [m for m in media if isinstance(m, Video)]


def unequal_lengths(videos: Sequence[Video]) -> str:
    """Return advice for videos that differ in length, which some processors refuse, or an empty text."""
    lengths = [len(video.frames) for video in videos]
    if len(set(lengths)) < 2:
        return ""
    return (
        f"its videos have {', '.join(map(str, lengths))} frames, and some processors need equally many (set "
        "data.num_frames, or data.video_format to frames): "
    )


def as_sampled(processor: Any, videos: Sequence[Video]) -> dict[str, Any]:
    """Return processor arguments that keep the given frames and their times in the file."""
    given: dict[str, Any] = {"do_sample_frames": False, "video_metadata": [video.metadata for video in videos]}
    resizer: Any = getattr(processor, "video_processor", None)
    is_sized = bool(videos) and all(has_size(resizer, *video.frames.shape[1:3]) for video in videos)
    if not is_sized:
        return given
    sized = {"do_resize": False}
    if "cap_pixels_per_frame" in resizer.valid_kwargs.__annotations__:  # without it, each call logs a warning
        sized["cap_pixels_per_frame"] = True
    return given | {"videos_kwargs": sized}


def fill_media(
    messages: list[dict[str, Any]], images: Sequence[Image], videos: Sequence[Video] = ()
) -> list[dict[str, Any]]:
    """Return new messages with images and frames of videos in their blocks, as the chat template needs them."""
    left = {"image": iter(images), "video": (video.frames for video in videos)}

    def fill(block: dict[str, Any]) -> dict[str, Any]:
        kind = block["type"]
        return block | {kind: next(left[kind])} if kind in left else block

    return [message | {"content": [fill(block) for block in message["content"]]} for message in messages]
