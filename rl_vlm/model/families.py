"""The supported model families: a table with one row per family, looked up by `config.model_type`.

Other modules pass a model's image inputs on as a keyword dict, and do not depend on the family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Int
from packaging.version import Version
from torch import Tensor

from rl_vlm.errors import ModelError
from rl_vlm.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


_positions: WeakKeyDictionary[Prompt, Tensor] = WeakKeyDictionary()

Inputs = Mapping[str, Tensor]
"""Inputs of a model by name: per token of a row, or per image."""


def mrope_positions(model: PreTrainedModel, row: Inputs, images: Sequence[Inputs]) -> Int[Tensor, "3 tokens"]:
    """Compute a row's 3-D M-RoPE positions (time, height, width; Qwen2-VL, arXiv:2409.12191, section 2.1)."""
    return _rope_index(model, row, image_grid_thw=joined("image_grid_thw", images))


def canvas_positions(model: PreTrainedModel, row: Inputs, images: Sequence[Inputs]) -> Int[Tensor, "3 tokens"]:
    """Compute M-RoPE positions that place the crops of an image on one canvas (MiniCPM-V 4.7)."""
    return _rope_index(model, row, target_sizes=joined("target_sizes", images))


def _rope_index(model: PreTrainedModel, row: Inputs, **sizes: Tensor | None) -> Int[Tensor, "3 tokens"]:
    """Call the model's own position function and return its positions."""
    positions, _ = model.model.get_rope_index(row["input_ids"][None], row["mm_token_type_ids"][None], **sizes)
    return positions[:, 0]


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
    row_positions: Callable[[PreTrainedModel, Inputs, Sequence[Inputs]], Int[Tensor, "axes tokens"]] = text_positions
    """Position ids of a row with the images of prompts and observations, in order. Text continues at the maximum + 1,
    on every axis."""
    other_placeholders: tuple[str, ...] = ("video_token_id",)
    """Config attributes with ids of further placeholder tokens. They are ignored if the config lacks them."""
    completion_inputs: Mapping[str, int] = field(default_factory=dict)
    """Values of per-token inputs at completion tokens. The default is 0."""
    joins_images: bool = False
    """Whether image inputs of several prompts can be batched by concatenation along dimension 0."""
    cross_attends: bool = False
    """Whether images enter through cross-attention layers, not as tokens of the row (Mllama). Text before an image
    attends to all images of a forward, so a forward holds one prompt."""
    first_images_only: str | None = None
    """Reason why images can be in the prompt alone, and not in observations after it."""
    unshardable: str | None = None
    """Reason why ranks cannot shard its weights, if different rows call different modules."""
    since: str | None = None
    """The first version of transformers with a correct model, if older supported versions are wrong."""

    @property
    def is_available(self) -> bool:
        """Return whether the installed transformers has a correct model."""
        return self.since is None or Version(version("transformers")) >= Version(self.since)

    def prompt_positions(self, model: PreTrainedModel, prompt: Prompt) -> Int[Tensor, "axes prompt_tokens"]:
        """Return the positions of a prompt. They are cached, since rollouts and all passes need them."""
        if prompt not in _positions:
            row = {"input_ids": prompt.token_ids, **prompt.token_inputs}
            _positions[prompt] = self.row_positions(model, row, [prompt.mm_inputs])
        return _positions[prompt]

    @property
    def vision_prefixes(self) -> tuple[str, ...]:
        """Return the name prefixes of vision parameters."""
        return tuple(f"{name}." for name in self.vision_modules)

    @property
    def projector_modules(self) -> tuple[str, ...]:
        """Return the names of the projector, which maps features to the language model's width, and of the vectors."""
        return self.vision_modules[1:] or tuple(f"{self.vision_modules[0]}.{name}" for name in PROJECTORS_WITHIN)

    def banned_token_ids(self, config: PreTrainedConfig) -> list[int]:
        """Return the placeholder tokens. They must never be sampled: no training pass could score the completion."""
        if self.cross_attends:
            return []  # its image token has no logit
        found = [getattr(config, name, None) for name in ("image_token_id", *self.other_placeholders)]
        tokens = [ids if isinstance(ids, list) else [ids] for ids in found]
        return sorted({token for ids in tokens for token in ids if token is not None})

    def image_prefixes(self, config: PreTrainedConfig) -> tuple[str, ...]:
        """Return the name prefixes of parameters that a forward without images does not use."""
        crossing = config.get_text_config().cross_attention_layers if self.cross_attends else ()
        return (*self.vision_prefixes, *(f"model.language_model.layers.{i}." for i in crossing))

    def vision_parameters(self, model: PreTrainedModel) -> list[torch.nn.Parameter]:
        """Return the parameters of the vision tower and projector, adapters included."""
        return [p for name, p in model.named_parameters() if f"{name}.".startswith(self.vision_prefixes)]


PROJECTORS_WITHIN = ("merger", "deepstack_merger_list")
"""Projectors of towers that contain them (Qwen, GLM)."""
TOWER = ("model.vision_tower", "model.multi_modal_projector")
TOWER_AND_NEWLINE = (*TOWER, "model.image_newline")
PROJECTOR_PER_IMAGE = "its projector runs once per image"
MROPE: dict[str, Any] = {"row_positions": mrope_positions, "joins_images": True}

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("qwen2_vl", ("model.visual",), **MROPE),
        Family("qwen2_5_vl", ("model.visual",), **MROPE),
        Family("qwen3_vl", ("model.visual",), **MROPE),
        Family("qwen3_vl_moe", ("model.visual",), **MROPE),
        Family("glm4v", ("model.visual",), **MROPE),
        Family("glm46v", ("model.visual",), **MROPE),
        Family("internvl", TOWER, joins_images=True),
        Family("llava", TOWER),  # the tower is CLIP's, or Pixtral's with padded images
        Family("llava_next", TOWER_AND_NEWLINE),
        Family("llava_onevision", TOWER_AND_NEWLINE),
        Family("mistral3", TOWER),
        Family("idefics3", ("model.vision_model", "model.connector")),
        Family("smolvlm", ("model.vision_model", "model.connector")),
        Family(
            "ovis2",
            ("model.vision_tower", "model.visual_embeddings_table"),
            joins_images=True,
            other_placeholders=("video_token_id", "visual_indicator_token_ids"),
        ),
        Family("gemma3", TOWER, joins_images=True),
        Family(
            "gemma4", ("model.vision_tower", "model.embed_vision"), joins_images=True,
            other_placeholders=("video_token_id", "audio_token_id"),
        ),
        Family(
            "paligemma", TOWER, joins_images=True, row_positions=positions_from_one,
            completion_inputs={"token_type_ids": 1}, first_images_only="its prompts have no turns",
        ),
        Family("aya_vision", TOWER, joins_images=True),
        Family("cohere2_vision", TOWER, joins_images=True),
        Family("deepseek_vl", ("model.vision_model", "model.aligner"), joins_images=True),
        Family("kimi_k25", ("model.vision_tower", "model.mm_projector"), joins_images=True),
        Family("got_ocr2", TOWER, joins_images=True, first_images_only="its prompts have no turns"),
        Family("perception_lm", TOWER),
        Family(
            "mllama", ("model.vision_model", "model.multi_modal_projector"), cross_attends=True,
            first_images_only="text before an image attends to it through cross-attention",
            unshardable="rows without images skip its cross-attention layers",
            since="5.19",  # 5.17 needs cross-attention masks of all tokens
        ),
        Family("qwen3_5", ("model.visual",), **MROPE),
        Family("qwen3_5_moe", ("model.visual",), **MROPE),
        Family("lfm2_vl", TOWER, unshardable=PROJECTOR_PER_IMAGE),
        Family(
            "minicpmv4_6", ("model.vision_tower", "model.merger"), unshardable=PROJECTOR_PER_IMAGE,
            since="5.19",  # older versions need images of one size in a prompt
        ),
        Family(
            "minicpmv4_7", ("model.vision_tower", "model.merger"), unshardable=PROJECTOR_PER_IMAGE,
            row_positions=canvas_positions, since="5.19",
        ),
    )
}  # fmt: skip


def family_of(config: PreTrainedConfig) -> Family:
    """Return the family of a model's config.

    Raises ModelError if the family is not in the table, or if the installed transformers is too old for it.
    """
    if config.model_type not in FAMILIES:
        raise ModelError(
            f"model_type {config.model_type!r} is not supported; supported families: {', '.join(sorted(FAMILIES))}. "
            "A family must be checked before it shares prefixes, or its log-probs may be silently wrong."
        )
    family = FAMILIES[config.model_type]
    if not family.is_available:
        raise ModelError(f"{family.model_type} needs transformers {family.since}, found {version('transformers')}")
    return family


def head_dim(text: Any) -> int:
    """Return the number of values of an attention head, from the config of a language model."""
    return getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads


def stop_token_ids(generation_config: Any, tokenizer: Any) -> list[int]:
    """Return the tokens that end a completion: the EOS tokens of the tokenizer and of the generation config.

    Chat models often end a turn with another token than the tokenizer's EOS. Other values of the checkpoint's
    generation config are not used.
    """
    named = generation_config.eos_token_id
    named = named if isinstance(named, list) else [named]
    return sorted({token for token in [tokenizer.eos_token_id, *named] if token is not None})


@dataclass(frozen=True)
class TokenRules:
    """Tokens that end a completion, and tokens that must never be sampled."""

    stop: list[int]
    banned: list[int]

    @staticmethod
    def of(config: PreTrainedConfig, generation_config: Any, tokenizer: Any) -> TokenRules:
        """Build the rules of a checkpoint from its two configs and its tokenizer."""
        return TokenRules(stop_token_ids(generation_config, tokenizer), family_of(config).banned_token_ids(config))
