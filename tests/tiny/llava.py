"""LLaVA NeXT and OneVision, Pixtral in LLaVA's form, Mistral 3, FastVLM and Granite 4 Vision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_vlm.tiny.family import TinyFamily, chat_template, hf_class, text_sizes, vision_sizes
from rl_vlm.tiny.llava import IMAGE_TOKEN

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel, ProcessorMixin

PIXTRAL_TOKENS = ("[IMG]", "[IMG_BREAK]", "[IMG_END]")
TILE = {"height": 16, "width": 16}
GRIDS = [[16, 32], [32, 16], [32, 32]]
"""Heights and widths to which an image may be enlarged; it is cut into tiles."""


def _llava_next_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    return hf_class("LlavaNextConfig")(
        text_config=text_sizes(tokenizer, hidden_size, "mistral"),
        vision_config=vision_sizes(patch_size=8, image_size=16) | {"model_type": "clip_vision_model"},
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        image_seq_length=4,
        image_grid_pinpoints=GRIDS,
    )


def _llava_next_processor(tokenizer: Any) -> ProcessorMixin:
    return hf_class("LlavaNextProcessor")(
        image_processor=hf_class("LlavaNextImageProcessor")(
            size={"shortest_edge": 16}, crop_size=TILE, image_grid_pinpoints=GRIDS
        ),
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=chat_template(IMAGE_TOKEN),
    )


def _llava_onevision_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    siglip = {"model_type": "siglip_vision_model", "vision_use_head": False}
    return hf_class("LlavaOnevisionConfig")(
        text_config=text_sizes(tokenizer, hidden_size, "qwen2"),
        vision_config=vision_sizes(patch_size=8, image_size=16, num_layers=1) | siglip,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        video_token_index=tokenizer.convert_tokens_to_ids("<video>"),
        image_grid_pinpoints=GRIDS,
    )


def _llava_onevision_processor(tokenizer: Any) -> ProcessorMixin:
    return hf_class("LlavaOnevisionProcessor")(
        image_processor=hf_class("LlavaOnevisionImageProcessor")(size=TILE, image_grid_pinpoints=GRIDS),
        tokenizer=tokenizer,
        video_processor=hf_class("LlavaOnevisionVideoProcessor")(size=TILE),
        num_image_tokens=4,
        vision_feature_select_strategy="full",
        chat_template=chat_template(IMAGE_TOKEN, "<video>"),
    )


def _llava_pixtral_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    return hf_class("LlavaConfig")(
        text_config=text_sizes(tokenizer, hidden_size, "mistral"),
        vision_config=vision_sizes(patch_size=8, image_size=32, num_layers=1) | {"model_type": "pixtral"},
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        image_seq_length=1,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
    )


def _mistral3_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    return hf_class("Mistral3Config")(
        text_config=text_sizes(tokenizer, hidden_size, "mistral") | {"sliding_window": None},
        vision_config=vision_sizes(patch_size=4, image_size=32, num_layers=1) | {"model_type": "pixtral"},
        image_token_index=tokenizer.convert_tokens_to_ids("[IMG]"),
        spatial_merge_size=2,
    )


def _pixtral_processor(tokenizer: Any, patch_size: int, merge_size: int) -> ProcessorMixin:
    return hf_class("PixtralProcessor")(
        image_processor=hf_class("PixtralImageProcessor")(size={"longest_edge": 32}, patch_size=patch_size),
        tokenizer=tokenizer,
        patch_size=patch_size,
        spatial_merge_size=merge_size,
        chat_template=chat_template("[IMG]"),
    )


def _fast_vlm_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    """Use a tower of two stages. A patch has 8 x 8 pixels."""
    stages = {
        "layers": [1, 1], "embed_dims": [16, 32], "mlp_ratios": [2, 2], "downsamples": [False, True],
        "se_downsamples": [False, False], "pos_embs": [None, None], "token_mixers": ["repmixer", "attention"],
        "layer_scale_init_value": 0.1, "inference_mode": True,
    }  # fmt: skip
    vision = {
        "model_type": "timm_wrapper", "architecture": "fastvit_mci3", "do_pooling": True, "global_pool": "avg",
        "hidden_size": 64, "model_args": stages,
    }  # fmt: skip
    return hf_class("FastVlmConfig")(
        text_config=text_sizes(tokenizer, hidden_size, "qwen2"),
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        image_seq_length=16,
    )


def _random_convolutions(model: PreTrainedModel) -> None:
    """Give convolutions random weights of usual size: with transformers' own, features would be almost zero."""
    for weight in model.model.vision_tower.parameters():
        if weight.ndim == 4:
            weight.data.normal_(std=weight[0].numel() ** -0.5)


def _fast_vlm_processor(tokenizer: Any) -> ProcessorMixin:
    size = {"height": 32, "width": 32}
    return hf_class("LlavaProcessor")(
        image_processor=hf_class("CLIPImageProcessor")(size={"shortest_edge": 32}, crop_size=size),
        tokenizer=tokenizer,
        patch_size=8,
        vision_feature_select_strategy="full",
        num_additional_image_tokens=0,
        chat_template=chat_template(IMAGE_TOKEN),
    )


GRANITE_GRIDS = [[32, 64], [64, 32], [64, 64]]


def _granite4_vision_config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    """Use tiles of 8 x 8 patches. A window of 4 x 4 becomes 2 x 2 tokens."""
    multipliers = {
        "num_hidden_layers": 6, "embedding_multiplier": 6.0, "residual_multiplier": 0.5, "logits_scaling": 2.0,
        "attention_multiplier": 0.2, "intermediate_size": hidden_size,
    }  # fmt: skip
    qformer = {
        "hidden_size": 32, "encoder_hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 64, "cross_attention_frequency": 1, "vocab_size": 1, "max_position_embeddings": 16,
    }  # fmt: skip
    vision = {"model_type": "siglip_vision_model", "vision_use_head": False, "hidden_size": 32, "intermediate_size": 64}
    return hf_class("Granite4VisionConfig")(
        text_config=text_sizes(tokenizer, hidden_size, "granite4_vision_text") | multipliers,
        vision_config=vision_sizes(patch_size=4, image_size=32, num_layers=2) | vision,
        qformer_config=qformer,
        image_token_index=tokenizer.convert_tokens_to_ids(IMAGE_TOKEN),
        image_grid_pinpoints=GRANITE_GRIDS,
        downsample_rate="2/4",
        deepstack_layer_map=[[-2, 0], [-1, 1]],
        spatial_target_layers=[2, 3, 4, 5],
        vision_feature_select_strategy="full",
    )


def _granite4_vision_processor(tokenizer: Any) -> ProcessorMixin:
    tile = {"height": 32, "width": 32}
    return hf_class("Granite4VisionProcessor")(
        image_processor=hf_class("LlavaNextImageProcessor")(
            size=tile, crop_size=tile, image_grid_pinpoints=GRANITE_GRIDS
        ),
        tokenizer=tokenizer,
        patch_size=4,
        vision_feature_select_strategy="full",
        downsample_rate="2/4",
        chat_template=chat_template(IMAGE_TOKEN),
    )


LLAVA: dict[str, TinyFamily] = {
    "llava_next": TinyFamily((IMAGE_TOKEN,), _llava_next_config, _llava_next_processor),
    "llava_onevision": TinyFamily((IMAGE_TOKEN, "<video>"), _llava_onevision_config, _llava_onevision_processor),
    "llava_pixtral": TinyFamily(
        PIXTRAL_TOKENS, _llava_pixtral_config, lambda tokenizer: _pixtral_processor(tokenizer, 8, merge_size=1)
    ),
    "fast_vlm": TinyFamily((IMAGE_TOKEN,), _fast_vlm_config, _fast_vlm_processor, after_init=_random_convolutions),
    "granite4_vision": TinyFamily((IMAGE_TOKEN,), _granite4_vision_config, _granite4_vision_processor),
    "mistral3": TinyFamily(
        PIXTRAL_TOKENS, _mistral3_config, lambda tokenizer: _pixtral_processor(tokenizer, 4, merge_size=2)
    ),
}
