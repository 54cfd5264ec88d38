"""Bytes that each sharding keeps, gathers and exchanges on a rank, computed from the weights.

docs/benchmarks.md#sharding compares these figures with measured ones.
"""

from __future__ import annotations

from rl_vlm.distributed.ddp import BUCKET_ELEMENTS
from rl_vlm.distributed.shardings import Sharding
from rl_vlm.plan.weights import TRAINED_BYTES, Weights

MAX_LIVE_PARAMETERS = 10**9
"""Values of gathered weights that ZeRO-3 keeps (`stage3_max_live_parameters`), DeepSpeed's default."""
EIGHT_BIT = 2 + 2 * 4 / 256
"""Bytes of both moments of a value in 8-bit AdamW: a byte each, and a float32 scale per block of 256."""


def held_weights(sharding: Sharding, weights: Weights, num_ranks: int) -> int:
    """Return the bytes of weights that stay on a rank's device."""
    whole = weights.bytes // (num_ranks if sharding.shards_weights else 1)
    copy = weights.trained_bytes // num_ranks if sharding.copies else 0
    return (0 if sharding.offloads_weights else whole) + (0 if sharding.offloads_state else copy)


def held_reference(sharding: Sharding, weights: Weights, num_ranks: int) -> int:
    """Return the bytes of a separate reference model on a rank's device."""
    whole = weights.reference_bytes // (num_ranks if sharding.shards_weights else 1)
    return 0 if sharding.offloads_weights else whole


def held_gradients(sharding: Sharding, weights: Weights, num_ranks: int) -> int:
    """Return the bytes of gradients on a rank's device. ZeRO-1 offloads them only after the last backward pass."""
    if sharding.offloads_state and sharding.shards_gradients:
        return 0
    return TRAINED_BYTES * weights.num_trained // (num_ranks if sharding.shards_gradients else 1)


def held_state(sharding: Sharding, weights: Weights, num_ranks: int, optim: str) -> int:
    """Return the bytes of optimizer state on a rank's device."""
    whole = state_bytes(weights, optim)
    return 0 if sharding.offloads_state else whole // (num_ranks if sharding.shards_state else 1)


def gathered_bytes(sharding: Sharding, weights: Weights, num_ranks: int) -> int:
    """Return the bytes of gathered weights and of unreduced gradients in a pass with gradients.

    ZeRO-2 holds this rank's part of a micro-batch's gradients in addition to the sum over earlier micro-batches.
    """
    gradients = 0
    if sharding.shards_gradients and num_ranks > 1:
        # The gradient of a tensor outside of layers, such as the LM head, can be larger than a layer's gradients.
        gradients = TRAINED_BYTES * max(weights.layer_trained, weights.largest_trained)
        if not sharding.shards_weights:
            gradients += held_gradients(sharding, weights, num_ranks)
    if not sharding.gathers(num_ranks):
        return gradients
    layer = weights.layer_cast if sharding.casts_gathered else weights.layer_bytes
    if sharding.frees_layers:  # the root's weights, a layer and the next one
        return weights.rest_bytes + 2 * layer + gradients
    live = weights.bytes * min(1.0, MAX_LIVE_PARAMETERS / weights.num)
    return int(live) + layer + gradients


def update_bytes(sharding: Sharding, weights: Weights, num_ranks: int, optim: str) -> int:
    """Return the bytes of temporary tensors in the update. AdamW's kernels need none.

    DeepSpeed flattens its gradients into one tensor. ZeRO-1 first copies this rank's part of the whole gradients. It
    frees the whole gradients before it flattens, so it needs no more.
    """
    if optim == "adafactor":
        return 3 * TRAINED_BYTES * weights.largest_trained
    if sharding.offloads_state or not sharding.copies:
        return 0
    return TRAINED_BYTES * weights.num_trained // num_ranks


def buffer_bytes(sharding: Sharding, weights: Weights, num_ranks: int, width: int) -> int:
    """Return the bytes of the buffers from which gradients are sent. `width` is the model's hidden size.

    ZeRO-1 and 2 allocate these buffers in each backward pass. They are counted in all phases, like the other buffers.
    """
    if sharding.sums_in_update:
        return TRAINED_BYTES * BUCKET_ELEMENTS if num_ranks > 1 else 0
    if not sharding.copies:
        return 0
    bucket = TRAINED_BYTES * (sharding.reduce_bucket or width**2)
    # ZeRO-1 and 2 move gradients from and to host memory through a buffer for the largest one.
    passes_through = sharding.offloads_state and not sharding.shards_weights
    return bucket + (TRAINED_BYTES * weights.largest_trained if passes_through else 0)


def state_bytes(weights: Weights, optim: str) -> int:
    """Return the bytes of the optimizer state of all trained weights."""
    if optim == "adafactor":
        return TRAINED_BYTES * weights.matrix_rows_and_columns
    return int(weights.num_trained * (EIGHT_BIT if optim == "adamw_8bit" else 2 * TRAINED_BYTES))
