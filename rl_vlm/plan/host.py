"""Host memory of a node, by arithmetic: loading, offloaded state, sleeping vLLM, data workers, saving."""

from __future__ import annotations

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.shardings import Sharding
from rl_vlm.plan.hardware import GIB
from rl_vlm.plan.memory import MemoryPlan, Phase
from rl_vlm.plan.sharding import state_bytes
from rl_vlm.plan.weights import TRAINED_BYTES, Weights
from rl_vlm.stages import Stage

PROCESS = 4 * GIB
"""Bytes of a rank's process without tensors, an assumption: the code of torch, transformers and CUDA's libraries."""
WORKER = GIB
"""Bytes of a data worker, an assumption: Python with transformers, and some decoded images."""


def host_phases(config: RunConfig, plan: MemoryPlan, gpus: int) -> list[Phase]:
    """Return the bytes of one node with `gpus` ranks. If there are several nodes, it is the node of rank 0."""
    workers = gpus * config.data.dataloader_num_workers * WORKER
    running = {
        "processes": gpus * PROCESS,
        "data workers": workers,
        "offloaded": offloaded(plan.sharding, plan.weights, plan.optim) * gpus // plan.num_ranks,
        "sleeping vLLM": plan.rollouts.in_host_memory * gpus,
    }
    # If weights are sharded, rank 0 alone reads the checkpoint. Otherwise every rank reads all of it.
    readers = 1 if plan.sharding.shards_weights else gpus
    return [
        Phase(Stage.LOAD.value, running | {"offloaded": 0, "checkpoint": readers * loaded(plan.weights)}),
        Phase(Stage.TRAINING.value, running),
        Phase(Stage.SAVE.value, running | {"checkpoint": saved(plan, gpus)}),
    ]


def loaded(weights: Weights) -> int:
    """Return the bytes of a model while it is loaded: in float32, or in its own precision if it is an adapter's base.

    4-bit weights are quantized one by one on loading.
    """
    return weights.bytes if weights.is_adapter else TRAINED_BYTES * weights.num


def offloaded(sharding: Sharding, weights: Weights, optim: str) -> int:
    """Return the bytes of weights, their copy, gradients and optimizer state in host memory, over all ranks."""
    gradients = TRAINED_BYTES * weights.num_trained
    state = weights.trained_bytes + gradients + state_bytes(weights, optim) if sharding.offloads_state else 0
    return state + (weights.bytes + weights.reference_bytes if sharding.offloads_weights else 0)


def saved(plan: MemoryPlan, gpus: int) -> int:
    """Return the bytes of a checkpoint that a node's ranks hold until it is written. The main process holds all parts
    that are not sharded.
    """
    share = gpus / plan.num_ranks
    model = plan.weights.trained_bytes * (share if plan.sharding.shards_weights else 1)
    return int(model + state_bytes(plan.weights, plan.optim) * (share if plan.sharding.shards_state else 1))
