"""Estimated time of an optimizer step on a set-up, to compare set-ups with each other.

Compute and communication overlap. Speeds are peaks of data sheets, which a run does not reach. So only ratios of times
are meaningful. docs/distributed.md has measured ratios.
"""

from __future__ import annotations

from dataclasses import dataclass

from rl_vlm.plan.memory import MemoryPlan
from rl_vlm.plan.sharding import EIGHT_BIT
from rl_vlm.plan.weights import TRAINED_BYTES, Weights

UTILIZATION = 0.4
"""Fraction of a card's peak FLOP/s that training reaches, an assumption."""
NETWORK = 50e9
"""Bytes per second from a GPU to another node: InfiniBand of 400 Gbit/s, an assumption."""
HOST_LINK = 25e9
"""Bytes per second between a GPU and host memory: PCIe 4 with 16 lanes."""
ASSUMED_FLOPS, ASSUMED_LINK = 312e12, 64e9
"""Speeds to assume if only a card's memory is known: an A100 without NVLink."""
MEMORY_BANDWIDTH = 2e12
"""Bytes per second of a card's own memory, an assumption: an A100's."""
UPDATE_BYTES = {"adamw_torch": 7 * 4, "adamw_8bit": 3 * 4 + 2 * EIGHT_BIT, "adafactor": (3 + 2 * 3) * 4}
"""Bytes that the update of a weight reads and writes: the weight twice, its gradient, and the moments twice. Adafactor
writes and reads three temporary tensors."""


@dataclass(frozen=True)
class Step:
    """The work of one rank in an optimizer step."""

    tokens: int
    """Unique tokens of prompts and completions."""
    micro_batches: int
    copied: int = 0
    """Bytes of activations and of a sleeping vLLM's weights, from and to host memory. `host_bytes` counts the rest."""


def step_seconds(plan: MemoryPlan, step: Step, nodes: int, checkpointing: bool) -> float:
    """Estimate the seconds of a step without rollouts."""
    flops, link = plan.card.flops or ASSUMED_FLOPS, plan.card.link or ASSUMED_LINK
    compute = step_flops(plan.weights, step.tokens, checkpointing) / (UTILIZATION * flops)
    link = min(link, NETWORK) if nodes > 1 else link
    updated = plan.weights.num_trained / (plan.num_ranks if plan.sharding.shards_state else 1)
    update = UPDATE_BYTES[plan.optim] * updated / MEMORY_BANDWIDTH
    copies = (host_bytes(plan, step) + step.copied) / HOST_LINK
    return max(compute, sent_bytes(plan, step) / link) + update + copies


def step_flops(weights: Weights, tokens: int, checkpointing: bool) -> float:
    """Return the operations of a forward and backward pass: two per token, weight and product.

    Each weight that a token uses has a product in the forward, one for the gradient of its input, and one in a
    recomputed forward. A trained weight has one more for its own gradient.
    """
    products = (3 if checkpointing else 2) * weights.num_active + min(weights.num_trained, weights.num_active)
    return 2.0 * products * tokens


def sent_bytes(plan: MemoryPlan, step: Step) -> int:
    """Return the bytes that a rank receives in a step, as in docs/benchmarks.md#sharding."""
    if plan.num_ranks == 1:
        return 0
    gradients = TRAINED_BYTES * plan.weights.num_trained
    if plan.sharding.shards_weights:  # gathered for the forward and the backward; gradients are reduced
        return step.micro_batches * (2 * plan.weights.bytes + gradients)
    if plan.sharding.shards_state:  # updated weights are gathered
        reductions = step.micro_batches if plan.sharding.shards_gradients else 1
        return reductions * gradients + plan.weights.trained_bytes
    return 2 * gradients


def host_bytes(plan: MemoryPlan, step: Step) -> int:
    """Return the bytes that a rank copies from and to host memory in a step: offloaded weights and gradients."""
    weights, gradients = plan.weights.bytes, TRAINED_BYTES * plan.weights.num_trained
    of_weights = 2 * step.micro_batches * weights if plan.sharding.offloads_weights else 0
    reductions = step.micro_batches if plan.sharding.shards_gradients else 1
    # Reduced gradients go to host memory; updated weights come back.
    of_state = reductions * gradients + plan.weights.trained_bytes if plan.sharding.offloads_state else 0
    return (of_weights + of_state) // plan.num_ranks
