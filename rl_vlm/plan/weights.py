"""The weights of a model, counted on the meta device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.layers import layers_of
from rl_vlm.model.loading import load_policy

TRAINED_BYTES = 4
"""Trained weights, their gradients and each of AdamW's moments are float32."""


@dataclass(frozen=True)
class Weights:
    """Numbers and bytes of a policy's weights, as they are if nothing is sharded."""

    num: int
    num_vision: int
    num_trained: int
    trained_bytes: int
    frozen_bytes: int
    reference_bytes: int
    """Of a reference model with weights of its own."""
    layer_bytes: int
    """Of the largest layer that is gathered at once."""
    rest_bytes: int
    """Of all that is in no layer: embeddings, LM head, norms."""
    layer_trained: int
    """Trained weights in the layer that has most of them."""
    largest_trained: int
    """Values in the largest trained tensor."""
    matrix_rows_and_columns: int
    """Rows plus columns of all trained matrices, and values of all trained vectors: Adafactor's state."""

    @property
    def bytes(self) -> int:
        return self.trained_bytes + self.frozen_bytes


def count_weights(config: RunConfig, checkpoint: str) -> Weights:
    """Count the weights of the model whose configuration is in the directory `checkpoint`."""
    policy = load_policy(config, checkpoint, empty=True)
    parameters = list(policy.parameters())
    trained = [p for p in parameters if p.requires_grad]
    layers = layers_of(policy)
    in_layers = {p for layer in layers for p in layer.parameters()}
    has_reference = config.algorithm.beta > 0 and policy.model is policy.transformer
    return Weights(
        num=sum(p.numel() for p in parameters),
        num_vision=sum(p.numel() for p in policy.family.vision_parameters(policy.transformer)),
        num_trained=sum(p.numel() for p in trained),
        trained_bytes=num_bytes(trained),
        frozen_bytes=num_bytes(p for p in parameters if not p.requires_grad),
        reference_bytes=sum(p.numel() for p in parameters) * policy.compute_dtype.itemsize if has_reference else 0,
        layer_bytes=max(num_bytes(layer.parameters()) for layer in layers),
        rest_bytes=num_bytes(p for p in parameters if p not in in_layers),
        layer_trained=max(sum(p.numel() for p in layer.parameters() if p.requires_grad) for layer in layers),
        largest_trained=max(p.numel() for p in trained),
        matrix_rows_and_columns=sum(sum(p.shape) if p.ndim > 1 else p.numel() for p in trained),
    )


def num_bytes(parameters: Any) -> int:
    """Return the bytes of parameters, each counted once."""
    return sum(p.numel() * p.element_size() for p in set(parameters))
