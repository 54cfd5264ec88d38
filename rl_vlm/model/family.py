"""A model family: the facts about a `model_type` that the rest of the code needs.

Other modules pass a model's image inputs on as a keyword dict, and do not depend on the family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from inspect import signature
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Bool, Int
from packaging.version import Version
from torch import Tensor

from rl_vlm.errors import ModelError, shorten
from rl_vlm.types import Prompt, Rendered, has_video

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


_positions: WeakKeyDictionary[Prompt, Tensor] = WeakKeyDictionary()

VIDEO_TYPE = 2
"""Value of `mm_token_type_ids` at placeholder tokens of videos. Images have 1."""
Inputs = Mapping[str, Tensor]
"""Inputs of a model by name: per token of a row, or per image."""


def rope_positions(model: PreTrainedModel, row: Inputs, images: Sequence[Inputs]) -> Int[Tensor, "axes tokens"]:
    """Compute a row's M-RoPE positions (time, height, width; Qwen2-VL, arXiv:2409.12191, section 2.1).

    The model's own `get_rope_index` gets the inputs that its signature names, of the row and of its images. Hunyuan has
    four axes: the place in the row, width, height, and the number of the image.
    """
    function: Any = model.base_model.get_rope_index
    per_token = {name: values[None] for name, values in row.items()}
    per_token["attention_mask"] = torch.ones_like(per_token["input_ids"])
    found = {name: per_token.get(name, joined(name, images)) for name in signature(function).parameters}
    positions, _ = function(**{name: value for name, value in found.items() if value is not None})
    return positions[:, 0].long()


def positions_after_videos(model: PreTrainedModel, row: Inputs, images: Sequence[Inputs]) -> Int[Tensor, "3 tokens"]:
    """Compute M-RoPE positions in which text after a video starts at the largest position of any axis + 1.

    vLLM, the code of Qwen2-VL's and Qwen2.5-VL's authors, and transformers before 5.3 do the same. Later versions
    ignore the time axis, so that text after a long video has positions of its frames.
    """
    positions = rope_positions(model, row, images).clone()
    is_video = row["mm_token_type_ids"] == VIDEO_TYPE
    for end in (is_video[:-1] & ~is_video[1:]).nonzero()[:, 0] + 1:
        positions[:, end:] += positions[:, :end].max() + 1 - positions[:, end].min()
    return positions


def joined(name: str, images: Sequence[Inputs]) -> Tensor | None:
    """Concatenate one input of the images of a row, or return None if there is none."""
    found = [inputs[name] for inputs in images if name in inputs]
    return torch.cat(found) if found else None


def text_positions(model: PreTrainedModel, row: Inputs, images: Sequence[Inputs]) -> Int[Tensor, "1 tokens"]:
    """Return positions 0, 1, 2, …, for models whose image tokens take one position each."""
    return torch.arange(len(row["input_ids"]))[None]


def positions_from_one(model: PreTrainedModel, row: Inputs, images: Sequence[Inputs]) -> Int[Tensor, "1 tokens"]:
    """Return positions 1, 2, 3, … (PaliGemma)."""
    return text_positions(model, row, images) + 1


@dataclass(frozen=True)
class Family:
    """One model family."""

    model_type: str
    vision_modules: tuple[str, ...]
    """Names, from the model's root, of the vision tower, its projector, and vectors inserted between image tokens, in
    this order. If only the tower is named, it contains its projector."""
    num_towers: int = 1
    """How many of `vision_modules` are vision towers. They come first."""
    other_modules: tuple[str, ...] = ()
    """Names of modules without a gradient: modules for audio or for making images, and indexers, which select tokens.
    They are frozen, and get no adapter."""
    row_positions: Callable[[PreTrainedModel, Inputs, Sequence[Inputs]], Int[Tensor, "axes tokens"]] = text_positions
    """Position ids of a row with the images of prompts and observations, in order. Text continues at the maximum + 1,
    on every axis."""
    pixels: tuple[str, ...] = ("pixel_values",)
    """Arguments of the model's forward that have pixels of images. They get features in place of pixels."""
    image_token: str = "image_token_id"
    """Config attribute with the id of an image's placeholder token."""
    videos: Literal["patches", "images"] | None = None
    """How the model takes videos: as patches that its tower can take for patches of images, or as images, with text
    that its processor writes. None: it takes none, and each frame is an image of the prompt."""
    video_token: str = "video_token_id"
    """Config attribute with the id of a video's placeholder token. It can be an image's (GLM-V)."""
    own_forward_takes_videos: bool = True
    """Whether transformers' own forward of the model takes videos. Gemma 4's and Kimi's fail. Here they get features
    of videos."""
    caps_logits_since: str | None = None
    """The first version of transformers whose own forward bounds logits as the config says, if older ones do not."""
    getters: tuple[str, str] = ("get_image_features", "get_video_features")
    """The functions that the model's own forward calls for features of images, and then for features of videos."""
    stacks_videos: bool = False
    """Whether the getter of videos returns one tensor, although the getter of images returns a list."""
    videos_since: str | None = None
    """The first version of transformers whose forward gets features of videos as here, if it is not the oldest."""
    videos_in_vllm: int = 0
    """Number of videos in a prompt that vLLM takes, with the policy's tokens and log-probs. 0: it gets their frames as
    images."""
    other_placeholders: tuple[str, ...] = ("video_token_id",)
    """Config attributes with ids of further placeholder tokens. They are ignored if the config lacks them."""
    completion_inputs: Mapping[str, int] = field(default_factory=dict)
    """Values of per-token inputs at completion tokens. The default is 0."""
    joins_images: bool = False
    """Whether image inputs of several prompts can be batched by concatenation along dimension 0."""
    cross_attends: bool = False
    """Whether images enter through cross-attention layers, not as tokens of the row (Mllama). Text before an image
    attends to all images of a forward, so a forward holds one prompt."""
    padding_matters: bool = False
    """Whether padding before a prompt changes the model's output. Rollouts then prefill one prompt at once."""
    first_images_only: str | None = None
    """Reason why only prompts, and not observations after them, can have images."""
    image_features: Callable[..., Any] | None = None
    """Computes the output of the model's `get_image_features` with one call of the projector, if the model's own code
    calls it once per image."""
    unshardable: str | None = None
    """Reason why ranks cannot shard its weights, if different rows call different modules."""
    is_derived: bool = False
    """Whether the facts come from the model alone, and only the proof before the first step says if they are right."""
    since: str | None = None
    """The first version of transformers with a correct model, if older supported versions are wrong."""

    @property
    def has_rope_index(self) -> bool:
        """Whether positions come from the model's `get_rope_index`, on several axes."""
        return self.row_positions in (rope_positions, positions_after_videos)

    @property
    def is_available(self) -> bool:
        """Return whether the installed transformers has a correct model."""
        return self.problem is None

    @property
    def problem(self) -> str | None:
        """Return why the installed transformers cannot be used, or None if it can."""
        found = version("transformers")
        is_old = self.since is not None and Version(found) < Version(self.since)
        return f"{self.model_type} needs transformers {self.since}, found {found}" if is_old else None

    @property
    def takes_videos(self) -> bool:
        """Return whether the model takes videos with the installed transformers."""
        return self.videos is not None and (
            self.videos_since is None or Version(version("transformers")) >= Version(self.videos_since)
        )

    @property
    def omits_soft_cap(self) -> bool:
        """Return whether the model's own forward omits the soft cap of logits with the installed transformers."""
        return self.caps_logits_since is not None and Version(version("transformers")) < Version(self.caps_logits_since)

    def prompt_positions(self, model: PreTrainedModel, prompt: Prompt) -> Int[Tensor, "axes prompt_tokens"]:
        """Return the positions of a prompt. They are cached, since rollouts and all passes need them."""
        if prompt not in _positions:
            row = {"input_ids": prompt.token_ids, **prompt.token_inputs}
            with self.own_errors():
                _positions[prompt] = self.row_positions(model, row, [prompt.mm_inputs])
        return _positions[prompt]

    @property
    def has_one_token(self) -> bool:
        """Return whether images and videos have the same placeholder token (GLM-V)."""
        return self.image_token == self.video_token

    def is_video(self, config: PreTrainedConfig, rendered: Rendered) -> Bool[Tensor, " placeholders"]:
        """Return which placeholder tokens are of videos. The others are of images."""
        token_ids, image = rendered.token_ids, getattr(config, self.image_token)
        if self.videos != "patches":
            return torch.zeros(int((token_ids == image).sum()), dtype=torch.bool)
        video = getattr(config, self.video_token)
        is_placeholder = (token_ids == image) | (token_ids == video)
        if image == video:
            return rendered.token_inputs["mm_token_type_ids"][is_placeholder] == VIDEO_TYPE
        return token_ids[is_placeholder] == video

    def own_forward_takes(self, prompt: Prompt) -> bool:
        """Return whether the model's own forward takes a prompt. GLM-V's takes no prompt with images and videos."""
        if self.own_forward_takes_videos and not self.has_one_token:
            return True
        return not has_video(prompt) or (self.own_forward_takes_videos and "pixel_values" not in prompt.mm_inputs)

    @contextmanager
    def own_errors(self) -> Iterator[None]:
        """Raise ModelError in place of an error of the model's own code in this context, if the facts are derived."""
        try:
            yield
        except (TypeError, ValueError, AttributeError, LookupError) as error:
            if not self.is_derived:
                raise
            raise ModelError(
                f"model_type {self.model_type!r} is not supported: it has no row in the table of families, and its "
                f"code does not take images as the run gives them ({type(error).__name__}: {shorten(str(error))})"
            ) from error

    @property
    def one_prompt_at_once(self) -> bool:
        """Return whether a rollout of several prompts in a batch would be wrong."""
        return self.cross_attends or self.padding_matters

    def has_gradient(self, name: str) -> bool:
        """Return whether the module or parameter of this name can have a gradient."""
        return not any(f".{module}." in f".{name}." for module in self.other_modules)

    @property
    def vision_prefixes(self) -> tuple[str, ...]:
        """Return the name prefixes of vision parameters."""
        return tuple(f"{name}." for name in self.vision_modules)

    @property
    def tower_modules(self) -> tuple[str, ...]:
        """Return the names of the vision towers."""
        return self.vision_modules[: self.num_towers]

    @property
    def projector_modules(self) -> tuple[str, ...]:
        """Return the names of the projector, which maps features to the language model's width, and of the vectors."""
        beside = self.vision_modules[self.num_towers :]
        return beside or tuple(f"{tower}.{name}" for tower in self.tower_modules for name in PROJECTORS_WITHIN)

    def banned_token_ids(self, config: PreTrainedConfig) -> list[int]:
        """Return the placeholder tokens. They must never be sampled: no training pass could score the completion.

        Mllama's token of images and Kimi's token of videos have no logit.
        """
        found = [getattr(config, name, None) for name in (self.image_token, *self.other_placeholders)]
        tokens = [ids if isinstance(ids, list | tuple) else [ids] for ids in found]
        num_logits = config.get_text_config().vocab_size
        return sorted({token for ids in tokens for token in ids if token is not None and token < num_logits})

    def image_prefixes(self, config: PreTrainedConfig) -> tuple[str, ...]:
        """Return the name prefixes of parameters that a forward without images does not use."""
        crossing = config.get_text_config().cross_attention_layers if self.cross_attends else ()
        return (*self.vision_prefixes, *(f"model.language_model.layers.{i}." for i in crossing))

    def vision_parameters(self, model: PreTrainedModel) -> list[torch.nn.Parameter]:
        """Return the parameters of the vision tower and projector, adapters included."""
        return [p for name, p in model.named_parameters() if f"{name}.".startswith(self.vision_prefixes)]


PROJECTORS_WITHIN = (
    "merger", "deepstack_merger_list", "merger_list", "patch_merger", "multimodal_embedder", "conv", "linear_proj",
)  # fmt: skip
"""Projectors of towers that contain them (Qwen, GLM, Hunyuan, Gemma 4, CogVLM)."""
