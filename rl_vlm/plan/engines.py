"""What each way to hold a model keeps on a rank, and gathers or exchanges, by arithmetic on the weights.

docs/benchmarks.md#sharding compares these figures with measured ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from rl_vlm.distributed.ddp import BUCKET_ELEMENTS
from rl_vlm.errors import ConfigError
from rl_vlm.plan.weights import TRAINED_BYTES, Weights

EngineName = Literal[
    "ddp", "zero1", "zero1_offload", "zero2", "zero2_offload", "zero3", "zero3_offload_optimizer",
    "zero3_offload_param", "zero3_offload", "fsdp2",
]  # fmt: skip

REDUCE_BUCKET = 5 * 10**8
"""Values of gradients that DeepSpeed sends at once (`reduce_bucket_size`), its default."""
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
    """Optimizer state."""
    shards_gradients: bool = False
    """Gradients of every micro-batch. ZeRO-1 adds them up on every rank, and reduces the sums after the last one."""
    copies: bool = False
    """DeepSpeed's optimizer updates a flat copy of the trained weights."""
    offloads_state: bool = False
    """Gradients, optimizer state and the copy of the weights are in host memory."""
    offloads_weights: bool = False
    """Weights are in host memory, and come to the device for each use."""
    keeps_gradients: bool = False
    """Gradients stay allocated from the first step on."""
    reduce_bucket: int | None = None
    """Values in DeepSpeed's buffer of gradients to send; by default the square of the model's width."""

    def gathers(self, num_ranks: int) -> bool:
        """Return whether weights come to the device for each use, from other ranks or from host memory."""
        return self.offloads_weights or (self.shards_weights and num_ranks > 1)

    def weights(self, weights: Weights, num_ranks: int) -> int:
        """Return the bytes of weights that stay on a rank's device."""
        whole = weights.bytes // (num_ranks if self.shards_weights else 1)
        copy = weights.trained_bytes // num_ranks if self.copies else 0
        return (0 if self.offloads_weights else whole) + (0 if self.offloads_state else copy)

    def reference(self, weights: Weights, num_ranks: int) -> int:
        """Return the bytes of a separate reference model on a rank's device."""
        whole = weights.reference_bytes // (num_ranks if self.shards_weights else 1)
        return 0 if self.offloads_weights else whole

    def gradients(self, weights: Weights, num_ranks: int) -> int:
        """Return the bytes of gradients on a rank's device. ZeRO-1 offloads them after the last backward pass."""
        if self.offloads_state and self.shards_gradients:
            return 0
        return TRAINED_BYTES * weights.num_trained // (num_ranks if self.shards_gradients else 1)

    def optimizer_state(self, weights: Weights, num_ranks: int, optim: str) -> int:
        whole = state_bytes(weights, optim)
        return 0 if self.offloads_state else whole // (num_ranks if self.shards_state else 1)

    def gathered(self, weights: Weights, num_ranks: int) -> int:
        """Return the bytes of whole weights, and of gradients before they are reduced, in a pass with gradients.

        ZeRO-2 makes this rank's part of a micro-batch's gradients beside the sum of the earlier ones.
        """
        gradients = 0
        if self.shards_gradients and num_ranks > 1:
            # The gradient of a tensor of its own, such as the LM head, can be larger than those of a layer.
            gradients = TRAINED_BYTES * max(weights.layer_trained, weights.largest_trained)
            if not self.shards_weights:
                gradients += self.gradients(weights, num_ranks)
        if not self.gathers(num_ranks):
            return gradients
        if self.name == "fsdp2":  # the root's weights, a layer and the next one
            return weights.rest_bytes + 2 * weights.layer_bytes + gradients
        live = weights.bytes * min(1.0, MAX_LIVE_PARAMETERS / weights.num)
        return int(live) + weights.layer_bytes + gradients

    def update(self, weights: Weights, num_ranks: int, optim: str) -> int:
        """Return the bytes of temporary tensors of the update. The kernels of AdamW need none.

        DeepSpeed makes its gradients one tensor. ZeRO-1 copies this rank's part beside the whole gradients, and drops
        these before it does, so that both take the same.
        """
        if optim == "adafactor":
            return 3 * TRAINED_BYTES * weights.largest_trained
        if self.offloads_state or not self.copies:
            return 0
        return TRAINED_BYTES * weights.num_trained // num_ranks

    def buffers(self, weights: Weights, num_ranks: int, width: int) -> int:
        """Return the bytes of buffers from which gradients are sent, for a model of this width.

        ZeRO-1 and 2 allocate theirs in each backward pass. They are counted in all phases, as the others.
        """
        if self.name == "ddp":
            return TRAINED_BYTES * BUCKET_ELEMENTS if num_ranks > 1 else 0
        if not self.copies:
            return 0
        bucket = TRAINED_BYTES * (self.reduce_bucket or width**2)
        # ZeRO-1 and 2 move gradients from and to host memory through a buffer for the largest one.
        passes_through = self.offloads_state and not self.shards_weights
        return bucket + (TRAINED_BYTES * weights.largest_trained if passes_through else 0)


ZERO1 = Engine("zero1", shards_state=True, copies=True)
ZERO2 = replace(ZERO1, name="zero2", shards_gradients=True)
ZERO3 = replace(ZERO2, name="zero3", shards_weights=True, keeps_gradients=True)
ENGINES = {
    engine.name: engine
    for engine in (
        Engine("ddp"),
        ZERO1,
        replace(ZERO1, name="zero1_offload", offloads_state=True),
        ZERO2,
        replace(ZERO2, name="zero2_offload", offloads_state=True),
        Engine("fsdp2", shards_weights=True, shards_state=True, shards_gradients=True),
        ZERO3,
        replace(ZERO3, name="zero3_offload_optimizer", offloads_state=True),
        replace(ZERO3, name="zero3_offload_param", offloads_weights=True),
        replace(ZERO3, name="zero3_offload", offloads_state=True, offloads_weights=True),
    )
}


def zero_engine(zero: Mapping[str, Any]) -> Engine:
    """Return the engine that a DeepSpeed config's section `zero_optimization` asks for.

    Raises ConfigError if there is none, such as for weights in host memory at stage 2.
    """
    state, weights = (is_offloaded(zero, name) for name in ("offload_optimizer", "offload_param"))
    for engine in ENGINES.values():
        stage = 1 + engine.shards_gradients + engine.shards_weights
        offloads = (engine.offloads_state, engine.offloads_weights)
        if engine.copies and stage == zero.get("stage") and offloads == (state, weights):
            return replace(engine, reduce_bucket=reduce_bucket(zero))
    raise ConfigError(f"ZeRO stage {zero.get('stage')} with offload_param is not supported: use stage 3")


def reduce_bucket(zero: Mapping[str, Any]) -> int | None:
    """Return the size of DeepSpeed's bucket, or None if the model decides it. Raises ConfigError if it is no size."""
    size = zero.get("reduce_bucket_size", REDUCE_BUCKET)
    if size == "auto":
        return None
    if not isinstance(size, int | float) or not 0 < size < 2**63:
        raise ConfigError(f"zero_optimization.reduce_bucket_size is {size!r}: it should be a number of values, or auto")
    return int(size)


def is_offloaded(zero: Mapping[str, Any], name: str) -> bool:
    return (zero.get(name) or {}).get("device", "none") != "none"


def state_bytes(weights: Weights, optim: str) -> int:
    """Return the bytes of the optimizer state of all trained weights."""
    if optim == "adafactor":
        return TRAINED_BYTES * weights.matrix_rows_and_columns
    return int(weights.num_trained * (EIGHT_BIT if optim == "adamw_8bit" else 2 * TRAINED_BYTES))
