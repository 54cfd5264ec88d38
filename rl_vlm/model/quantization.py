"""QLoRA (arXiv:2305.14314): the base weights of an adapter in 4 bits.

bitsandbytes quantizes the linear layers of the language model as they are loaded, in blocks of 64 values with one scale
each. A layer's weights are dequantized in every forward and backward. Parts with few weights, and parts that are not
linear layers, keep `model.dtype`: vision tower, projector, embeddings, norms, LM head, routed experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rl_vlm.config.schema import ModelConfig
from rl_vlm.errors import ModelError, require_bitsandbytes
from rl_vlm.model.families import family_of
from rl_vlm.model.remote.code import with_placeholder

LM_HEAD = "lm_head"
"""The LM head's weights are read in chunks, without calling the module."""


def load_in_4bit(source: str, config: ModelConfig) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` for loading a checkpoint in 4 bits.

    Raises ConfigError if bitsandbytes is not installed.
    """
    require_bitsandbytes("model.load_in_4bit")
    from transformers import BitsAndBytesConfig

    dtype = getattr(torch, config.precision)
    family = family_of(checkpoint_config(source, config))
    quantization = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=config.bnb_4bit_quant_type,
        bnb_4bit_use_double_quant=config.use_bnb_nested_quant,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=[*family.vision_modules, LM_HEAD],  # applies to 4 bits as well
    )
    return {"quantization_config": quantization, "dtype": dtype}


def keep_format(model: nn.Module) -> None:
    """Make 4-bit layers keep their format on CPUs.

    On some CPUs bitsandbytes changes the format in the first forward in eval mode, for a kernel without a gradient.
    This rounds the scales to bfloat16, so the first rollout would change the policy.
    """
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "support_avx512bf16_for_cpu")]
    for layer in layers:
        layer.support_avx512bf16_for_cpu = False


def is_in_4bit(parameter: Any) -> bool:
    """Return whether a parameter holds two weights in each byte."""
    return getattr(parameter, "quant_state", None) is not None


def num_weights(parameter: Any) -> int:
    """Return the number of weights that a parameter holds."""
    return parameter.quant_state.shape.numel() if is_in_4bit(parameter) else parameter.numel()


def refuse_quantized(source: str, config: ModelConfig) -> None:
    """Raise ModelError if the weights of a checkpoint are quantized already.

    The checkpoint would then decide how parts are quantized, the vision tower and the LM head included.
    """
    quantization: Any = getattr(checkpoint_config(source, config), "quantization_config", None)
    if quantization:
        raise ModelError(
            f"{source} is quantized ({dict(quantization).get('quant_method')}, by its config.json), but rl-vlm needs "
            "weights of 16 or 32 bits: name the checkpoint that it was made from. model.load_in_4bit quantizes that "
            "one while loading"
        )


def checkpoint_config(source: str, config: ModelConfig) -> Any:
    """Read the transformers config of a checkpoint."""
    from transformers import AutoConfig

    found = AutoConfig.from_pretrained(
        source, revision=config.model_revision, trust_remote_code=config.trust_remote_code
    )
    return with_placeholder(found, source, config.model_revision)
