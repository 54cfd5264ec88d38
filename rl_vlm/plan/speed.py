"""Estimated time of an optimizer step on a set-up, to compare set-ups with each other.

Compute and communication overlap. The figures are peaks of data sheets, of which a run reaches a part: only ratios mean
something. docs/distributed.md has measured ratios.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_vlm.plan.memory import MemoryPlan
from rl_vlm.plan.weights import TRAINED_BYTES

UTILIZATION = 0.4
"""Fraction of a card's peak FLOP/s that training reaches, an assumption."""
NETWORK = 50e9
"""Bytes per second from a GPU to another node: InfiniBand of 400 Gbit/s, an assumption."""
HOST_LINK = 25e9
"""Bytes per second between a GPU and host memory: PCIe 4 with 16 lanes."""
ASSUMED_FLOPS, ASSUMED_LINK = 312e12, 64e9
"""Speeds of a card of which only the memory is known: those of an A100 without NVLink."""


@dataclass(frozen=True)
class Step:
    """The work of one rank in an optimizer step."""

    tokens: int
    """Unique tokens of prompts and completions."""
    micro_batches: int


def step_seconds(plan: MemoryPlan, step: Step, nodes: int, checkpointing: bool) -> float:
    """Estimate the seconds of a step without rollouts."""
    flops, link = plan.card.flops or ASSUMED_FLOPS, plan.card.link or ASSUMED_LINK
    passes = 4 if checkpointing else 3  # a forward and a backward of twice its cost, and the recomputed forward
    compute = passes * 2 * plan.weights.num * step.tokens / (UTILIZATION * flops)
    link = min(link, NETWORK) if nodes > 1 else link
    return max(compute, sent_bytes(plan, step) / link) + host_bytes(plan, step) / HOST_LINK


def sent_bytes(plan: MemoryPlan, step: Step) -> int:
    """Return the bytes that a rank receives in a step, as in docs/benchmarks.md#sharding."""
    if plan.num_ranks == 1:
        return 0
    gradients = TRAINED_BYTES * plan.weights.num_trained
    if plan.engine.shards_weights:  # gathered for the forward and the backward; gradients are reduced
        return step.micro_batches * (2 * plan.weights.bytes + gradients)
    if plan.engine.shards_state:
        return step.micro_batches * gradients + plan.weights.trained_bytes
    return 2 * gradients


def host_bytes(plan: MemoryPlan, step: Step) -> int:
    """Return the bytes that a rank copies from and to host memory in a step, if its state is offloaded."""
    if not plan.engine.offloads:
        return 0
    weights, gradients = plan.weights.bytes, TRAINED_BYTES * plan.weights.num_trained
    return (step.micro_batches * (2 * weights + gradients) + weights) // plan.num_ranks
