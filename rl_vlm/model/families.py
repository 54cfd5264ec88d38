"""The families of models: a table with one row per `model_type` that the tests check, and `family_of`.

A type without a row gets its facts from the model (`rl_vlm/model/derived.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rl_vlm.config.own_code import has_own_code
from rl_vlm.errors import ConfigError, ModelError
from rl_vlm.model.derived import derived_family
from rl_vlm.model.family import Family, positions_after_videos, positions_from_one, rope_positions
from rl_vlm.model.projection import (
    kimi_features,
    lfm2_features,
    minicpm_features,
    onevision_features,
    paddleocr_features,
    perception_features,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from rl_vlm.types import VideoFormat

TOWER = ("model.vision_tower", "model.multi_modal_projector")
TOWER_AND_NEWLINE = (*TOWER, "model.image_newline")
CHECKED = "5.19"
"""The version of transformers that the families of autumn 2026 are checked with, and no older one."""
AUDIO = ("model.audio_tower", "model.embed_audio")
ANY_NUMBER = 999
"""Of videos in a prompt: vLLM's own limit."""
MROPE: dict[str, Any] = {"row_positions": rope_positions, "joins_images": True}
VIDEO_GRIDS: dict[str, Any] = MROPE | {"videos": "patches", "videos_in_vllm": ANY_NUMBER}
TIMED_GRIDS: dict[str, Any] = VIDEO_GRIDS | {"row_positions": positions_after_videos}
GLM_VIDEO: dict[str, Any] = VIDEO_GRIDS | {"video_token": "image_token_id", "videos_in_vllm": 1}
THINKER: dict[str, Any] = {
    "row_positions": rope_positions, "joins_images": True, "other_modules": ("audio_tower",),
    "other_placeholders": ("video_token_id", "audio_token_id"),
}  # fmt: skip

GEMMA4: dict[str, Any] = {
    "joins_images": True, "videos": "patches", "own_forward_takes_videos": False, "other_modules": AUDIO,
    "other_placeholders": ("video_token_id", "audio_token_id"),
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    family.model_type: family
    for family in (
        Family("qwen2_vl", ("model.visual",), **TIMED_GRIDS),
        Family("qwen2_5_vl", ("model.visual",), **TIMED_GRIDS),
        Family("qwen3_vl", ("model.visual",), **VIDEO_GRIDS),
        Family("qwen3_vl_moe", ("model.visual",), **VIDEO_GRIDS),
        Family("glm4v", ("model.visual",), **GLM_VIDEO),
        Family("glm4v_moe", ("model.visual",), since=CHECKED, **GLM_VIDEO),
        Family("glm46v", ("model.visual",), **{**GLM_VIDEO, "videos_in_vllm": 0}),
        Family("glm_ocr", ("model.visual",), since=CHECKED, **GLM_VIDEO),
        Family("internvl", TOWER, joins_images=True, videos="images"),
        Family("llava", TOWER),  # the tower is CLIP's, or Pixtral's with padded images
        Family("fast_vlm", TOWER, joins_images=True, since=CHECKED),
        Family("llava_next", TOWER_AND_NEWLINE),
        Family(
            "granite4_vision",
            ("model.vision_tower", "model.layerwise_projectors", "model.spatial_projectors", "model.image_newline"),
            since=CHECKED,
        ),
        Family(
            "llava_onevision", TOWER_AND_NEWLINE, videos="patches", image_features=onevision_features,
            stacks_videos=True, videos_since="5.18",  # 5.17 adds the newline to features itself
        ),
        Family("mistral3", TOWER),
        Family("idefics3", ("model.vision_model", "model.connector")),
        Family("smolvlm", ("model.vision_model", "model.connector"), videos="images"),
        Family(
            "ovis2",
            ("model.vision_tower", "model.visual_embeddings_table"),
            joins_images=True,
            other_placeholders=("video_token_id", "visual_indicator_token_ids"),
        ),
        Family("gemma3", TOWER, joins_images=True),
        Family("gemma4", ("model.vision_tower", "model.embed_vision"), **GEMMA4),
        Family("gemma4_unified", ("model.embed_vision",), since=CHECKED, **GEMMA4),
        Family(
            "paligemma", TOWER, joins_images=True, row_positions=positions_from_one,
            completion_inputs={"token_type_ids": 1}, first_images_only="its prompts have no turns",
            caps_logits_since="5.24",
        ),
        Family("aya_vision", TOWER, joins_images=True),
        Family("cohere2_vision", TOWER, joins_images=True),
        Family("deepseek_vl", ("model.vision_model", "model.aligner"), joins_images=True),
        Family(
            "kimi_k25", ("model.vision_tower", "model.mm_projector"), joins_images=True, videos="patches",
            own_forward_takes_videos=False, image_features=kimi_features,
        ),
        Family("got_ocr2", TOWER, joins_images=True, first_images_only="its prompts have no turns"),
        Family(
            "perception_lm", TOWER, videos="patches", image_features=perception_features,
            getters=("get_image_features", "get_image_features"),
        ),
        Family(
            "llama4", ("vision_model", "multi_modal_projector"), joins_images=True, padding_matters=True,
            unshardable="its projector runs in the forward of rows with images alone", since=CHECKED,
        ),
        Family(
            "minimax_m3_vl", TOWER, padding_matters=True, other_modules=("indexer",),
            first_images_only="its tower lets all images of a call see each other", since=CHECKED,
        ),
        Family(
            "mllama", ("model.vision_model", "model.multi_modal_projector"), cross_attends=True,
            first_images_only="text before an image attends to it through cross-attention",
            unshardable="rows without images skip its cross-attention layers",
            since="5.19",  # 5.17 needs cross-attention masks of all tokens
        ),
        Family(
            "exaone4_5", ("model.visual",), joins_images=True, videos="patches", videos_in_vllm=ANY_NUMBER,
            since=CHECKED,
        ),
        Family("video_llama_3", ("model.vision_model", "model.projector"), joins_images=True, since=CHECKED),
        Family(
            "paddleocr_vl", ("model.visual", "model.projector"), image_features=paddleocr_features, since=CHECKED,
            **MROPE,
        ),
        Family(
            "hunyuan_vl", ("model.vision_tower",), unshardable="its projector runs once per image", since=CHECKED,
            **MROPE,
        ),
        Family(
            "ernie4_5_vl_moe", ("model.vision_tower", "model.resampler_model"), **MROPE,
            unshardable="rows without images skip its experts for images", since=CHECKED,
        ),
        Family(
            "step3p7", ("model.vision_model", "model.multi_modal_projector"),
            unshardable="its tower runs again for the tiles of an image, which not all have", since=CHECKED,
        ),
        Family("qwen2_5_omni_thinker", ("visual",), since=CHECKED, **THINKER),
        Family("qwen3_omni_moe_thinker", ("visual",), since=CHECKED, **THINKER),
        Family("qwen3_5", ("model.visual",), **VIDEO_GRIDS),
        Family("qwen3_5_moe", ("model.visual",), **VIDEO_GRIDS),
        Family(
            "qwen4_exp", ("model.visual",), other_modules=("indexer",), videos="patches", **MROPE,
            unshardable="its layers select tokens for one query at a time", since=CHECKED,
        ),
        Family("lfm2_vl", TOWER, image_features=lfm2_features),
        Family(
            "minicpmv4_6", ("model.vision_tower", "model.merger"), image_features=minicpm_features, videos="patches",
            videos_in_vllm=ANY_NUMBER, since="5.19",  # older versions need images of one size in a prompt
        ),
        Family(
            "minicpmv4_7", ("model.vision_tower", "model.merger"), image_features=minicpm_features,
            row_positions=rope_positions, videos="patches", videos_in_vllm=ANY_NUMBER, since="5.19",
        ),
    )
}  # fmt: skip


def family_of(config: PreTrainedConfig) -> Family:
    """Return the family of a model's config: the row of the table, or facts that are derived from the model.

    Code that comes with a checkpoint has no row, whatever its model_type. Raises ModelError if the installed
    transformers is too old for the family, or if no facts can be derived.
    """
    row = None if has_own_code(config) else FAMILIES.get(config.model_type)
    family = derived_family(config) if row is None else row
    if family.problem is not None:
        raise ModelError(family.problem)
    return family


def video_format(config: PreTrainedConfig, wanted: Literal["auto", "native", "frames"] = "auto") -> VideoFormat:
    """Return the form in which a model gets videos: its own input for videos, if it has a tested one, or else images.

    Raises ConfigError if `native` is set and it has no such input.
    """
    row = None if has_own_code(config) else FAMILIES.get(config.model_type)
    is_native = row is not None and row.takes_videos
    if wanted == "native" and not is_native:
        able = ", ".join(name for name, other in FAMILIES.items() if other.takes_videos)
        raise ConfigError(
            f"data.video_format: native needs a model with an input for videos, and {config.model_type} is used "
            f"without one. Use auto or frames, with which frames are images, or one of these models: {able}."
        )
    return "native" if is_native and wanted != "frames" else "frames"


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
