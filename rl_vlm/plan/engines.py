"""What each way to hold a model keeps on a rank, and gathers or exchanges, by arithmetic on the weights.

docs/benchmarks.md#sharding compares these figures with measured ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_vlm.plan.weights import TRAINED_BYTES, Weights

EngineName = Literal["ddp", "zero2", "zero3", "zero3_offload", "fsdp2"]

MAX_LIVE_PARAMETERS = 10**9
"""Values of gathered weights that ZeRO-3 keeps (`stage3_max_live_parameters`), DeepSpeed's default."""
EIGHT_BIT = 2 + 2 * 4 / 256
"""Bytes of both moments of a value in 8-bit AdamW: a byte each, and a float32 scale per block of 256."""


@dataclass(frozen=True)
class Engine:
    """How N ranks hold weights, gradients and optimizer state."""

    name: EngineName
    shards_weights: bool = False
    shards_state: bool = False
    """Gradients and optimizer state."""
    copies: bool = False
    """DeepSpeed's optimizer updates a flat copy of the trained weights."""
    offloads: bool = False
    """Weights, their copy and the optimizer state are in host memory."""

    def share(self, num_ranks: int) -> int:
        """Return the number of parts of gradients and optimizer state."""
        return num_ranks if self.shards_state else 1

    def weights(self, weights: Weights, num_ranks: int) -> int:
        """Return the bytes of weights that stay on a rank's device."""
        whole = weights.bytes // (num_ranks if self.shards_weights else 1)
        copy = weights.trained_bytes // num_ranks if self.copies else 0
        return 0 if self.offloads else whole + copy

    def reference(self, weights: Weights, num_ranks: int) -> int:
        """Return the bytes of a separate reference model on a rank's device."""
        return 0 if self.offloads else weights.reference_bytes // (num_ranks if self.shards_weights else 1)

    def gradients(self, weights: Weights, num_ranks: int) -> int:
        return 0 if self.offloads else TRAINED_BYTES * weights.num_trained // self.share(num_ranks)

    def optimizer_state(self, weights: Weights, num_ranks: int, optim: str) -> int:
        return 0 if self.offloads else state_bytes(weights, optim) // self.share(num_ranks)

    def gathered(self, weights: Weights, num_ranks: int) -> int:
        """Return the bytes of whole weights, and of gradients before they are reduced, in a pass with gradients."""
        if num_ranks == 1 or not self.shards_state:
            return 0
        layer_gradients = TRAINED_BYTES * weights.layer_trained
        if not self.shards_weights:
            return layer_gradients
        if self.name == "fsdp2":  # the root's weights, a layer and the next one
            return weights.rest_bytes + 2 * weights.layer_bytes + layer_gradients
        live = weights.bytes * min(1.0, MAX_LIVE_PARAMETERS / weights.num)
        return int(live) + weights.layer_bytes + layer_gradients

    def update(self, weights: Weights, num_ranks: int, optim: str) -> int:
        """Return the bytes of temporary tensors of the update. The kernels of AdamW need none."""
        if optim == "adafactor":
            return 3 * TRAINED_BYTES * weights.largest_trained
        if self.offloads or not self.copies:
            return 0
        return TRAINED_BYTES * weights.num_trained // num_ranks  # DeepSpeed makes its gradients one tensor


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("ddp"),
        Engine("zero2", shards_state=True, copies=True),
        Engine("fsdp2", shards_weights=True, shards_state=True),
        Engine("zero3", shards_weights=True, shards_state=True, copies=True),
        Engine("zero3_offload", shards_weights=True, shards_state=True, copies=True, offloads=True),
    )
}


def state_bytes(weights: Weights, optim: str) -> int:
    """Return the bytes of the optimizer state of all trained weights."""
    if optim == "adafactor":
        return TRAINED_BYTES * weights.matrix_rows_and_columns
    return int(weights.num_trained * (EIGHT_BIT if optim == "adamw_8bit" else 2 * TRAINED_BYTES))
