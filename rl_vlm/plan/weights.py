"""The weights of a model, counted on the meta device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from rl_vlm.config.schema import ModelConfig, RunConfig
from rl_vlm.distributed.layers import layers_of
from rl_vlm.model.loading import load_policy
from rl_vlm.model.policy import Policy
from rl_vlm.model.quantization import LM_HEAD

TRAINED_BYTES = 4
"""Trained weights, their gradients and each of AdamW's moments are float32."""

EXPERTS = (("num_experts_per_tok", "top_k_experts"), ("num_experts", "n_routed_experts", "num_local_experts"))
"""Config names for the number of experts that a token uses, and for all experts of a layer."""


@dataclass(frozen=True)
class Weights:
    """Numbers and bytes of a policy's weights if nothing is sharded."""

    num: int
    num_active: int
    """Weights that one token uses. Experts that are not chosen for it do not count."""
    num_vision: int
    trains_vision: bool
    is_adapter: bool
    """Whether an adapter is trained, and the model is loaded in the compute precision."""
    num_trained: int
    trained_bytes: int
    frozen_bytes: int
    reference_bytes: int
    """Bytes of a separate reference model; 0 if there is none."""
    layer_bytes: int
    """Bytes of the largest layer, as it is held."""
    layer_cast: int
    """Bytes of the largest layer in the compute precision."""
    layers_cast: int
    """Bytes of all layers in the compute precision."""
    rest_bytes: int
    """Bytes outside of layers: embeddings, LM head, norms."""
    layer_trained: int
    """Trained weights in the layer that has most of them."""
    largest_trained: int
    """Values in the largest trained tensor."""
    dequantized_bytes: int
    """Bytes of the largest 4-bit tensor after its layer has dequantized it."""
    matrix_rows_and_columns: int
    """Rows plus columns of all trained matrices, and values of all trained vectors: Adafactor's state."""

    @property
    def bytes(self) -> int:
        return self.trained_bytes + self.frozen_bytes

    @property
    def sent(self) -> int:
        """Return the bytes of all weights as a forward sends them. Weights outside of layers keep their dtype."""
        return self.layers_cast + self.rest_bytes


def count_weights(config: RunConfig, checkpoint: str) -> Weights:
    """Count the weights of the model whose config is in the directory `checkpoint`."""
    policy = load_policy(traceable(config), checkpoint, empty=True)
    parameters = list(policy.parameters())
    trained = [p for p in parameters if p.requires_grad]
    layers = layers_of(policy)
    in_layers = {p for layer in layers for p in layer.parameters()}

    def cast(weights: Iterable[Tensor]) -> int:
        return sum(p.numel() for p in weights) * policy.compute_dtype.itemsize

    in_4bit = quantized(policy) if config.model.load_in_4bit else []
    bits_saved = sum(p.numel() for p in in_4bit) * (policy.compute_dtype.itemsize - bytes_in_4bit(config.model))
    has_reference = config.algorithm.beta > 0 and policy.model is policy.transformer
    return Weights(
        num=sum(p.numel() for p in parameters),
        num_active=num_active(policy),
        num_vision=sum(p.numel() for p in policy.family.vision_parameters(policy.transformer)),
        trains_vision=not policy.vision.is_frozen,
        is_adapter=policy.model is not policy.transformer,
        num_trained=sum(p.numel() for p in trained),
        trained_bytes=num_bytes(trained),
        frozen_bytes=num_bytes(p for p in parameters if not p.requires_grad) - round(bits_saved),
        reference_bytes=num_bytes(parameters) if has_reference else 0,
        layer_bytes=max(num_bytes(layer.parameters()) for layer in layers),
        layer_cast=max(cast(layer.parameters()) for layer in layers),
        layers_cast=cast(in_layers),
        rest_bytes=num_bytes(p for p in parameters if p not in in_layers),
        layer_trained=max(sum(p.numel() for p in layer.parameters() if p.requires_grad) for layer in layers),
        largest_trained=max(p.numel() for p in trained),
        dequantized_bytes=max((num_bytes([p]) for p in in_4bit), default=0),
        matrix_rows_and_columns=sum(sum(p.shape) if p.ndim > 1 else p.numel() for p in trained),
    )


def num_experts(text: Any) -> tuple[int, int]:
    """Return the number of experts that a token uses, and of all experts of a layer; 1 and 1 without experts."""
    chosen, experts = (next((getattr(text, name) for name in names if getattr(text, name, 0)), 1) for names in EXPERTS)
    return chosen, experts


def num_active(policy: Policy) -> int:
    """Return the number of weights that one token uses. Only the chosen experts count."""
    chosen, experts = num_experts(policy.transformer.config.get_text_config())
    of_experts = sum(p.numel() for name, p in policy.named_parameters() if ".experts." in name)
    return sum(p.numel() for p in policy.parameters()) - of_experts + of_experts * chosen // experts


def traceable(config: RunConfig) -> RunConfig:
    """Return the settings without quantization and compilation, which need values."""
    without = {"load_in_4bit": False, "fused": "off"}
    return config.model_copy(update={"model": config.model.model_copy(update=without)})


def quantized(policy: Policy) -> list[Tensor]:
    """Return the weights that `load_in_4bit` quantizes: linear layers of the language model, without its LM head."""
    kept = (*policy.family.vision_prefixes, f"{LM_HEAD}.")
    return [
        module.weight
        for name, module in policy.transformer.named_modules()
        if isinstance(module, nn.Linear) and not f"{name}.".startswith(kept) and not module.weight.requires_grad
    ]


def bytes_in_4bit(model: ModelConfig) -> float:
    """Return the bytes of a weight in 4 bits with its share of a block's scale (arXiv:2305.14314, section 3)."""
    scale = 1 / 64 + 4 / (64 * 256) if model.use_bnb_nested_quant else 4 / 64
    return 0.5 + scale


def num_bytes(parameters: Any) -> int:
    """Return the bytes of parameters, each counted once."""
    return sum(p.numel() * p.element_size() for p in set(parameters))
