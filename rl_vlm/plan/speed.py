"""Estimated time of an optimizer step, to compare set-ups with each other. Only ratios of times are meaningful."""

from __future__ import annotations

import math

from rl_vlm.config.batches import batch_sizes
from rl_vlm.config.schema import RunConfig
from rl_vlm.plan.build import Model
from rl_vlm.plan.hardware import Hardware
from rl_vlm.plan.memory import MemoryPlan
from rl_vlm.plan.sharding import EIGHT_BIT
from rl_vlm.plan.weights import TRAINED_BYTES

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


def step_seconds(config: RunConfig, hardware: Hardware, plan: MemoryPlan, model: Model) -> float:
    """Estimate the seconds of a step, without rollouts. Completions are assumed to have half of their maximum length.

    Compute and network overlap; the update and copies to host memory overlap with nothing. Speeds are those of data
    sheets and the assumptions above (docs/memory.md). docs/distributed.md has measured ratios.

    compute   2 operations per token, weight and product (arXiv:2001.08361, section 2.1). Each weight that a token uses
              has a product in the forward, one for the gradient of its input, and one in a recomputed forward. A
              trained weight has one more for its own gradient.
    network   bytes that a rank receives, as in docs/benchmarks.md#sharding
    copies    offloaded weights, gradients and activations, and a sleeping vLLM's weights
    """
    card, sharding, weights = plan.card, plan.sharding, plan.weights
    prompts = batch_sizes(config, plan.num_ranks).prompts_per_rank_step
    tokens = prompts * (
        model.prompt_tokens + config.rollout.num_generations * config.rollout.max_completion_length // 2
    )
    micro_batches = math.ceil(tokens / plan.load.tokens)
    recomputes = config.memory.gradient_checkpointing in (True, "language_model")
    products = (3 if recomputes else 2) * weights.num_active + min(weights.num_trained, weights.num_active)
    compute = 2.0 * products * tokens / (UTILIZATION * (card.flops or ASSUMED_FLOPS))

    gradients = TRAINED_BYTES * weights.num_trained
    reductions = micro_batches if sharding.shards_gradients else 1
    if plan.num_ranks == 1:
        sent = 0
    elif sharding.shards_weights:  # gathered for the forward and the backward; gradients are reduced
        sent = micro_batches * (2 * weights.sent + gradients)
    elif sharding.shards_state:  # updated weights are gathered
        sent = reductions * gradients + weights.trained_bytes
    else:
        sent = 2 * gradients
    link = card.link or ASSUMED_LINK
    network = sent / (min(link, NETWORK) if hardware.nodes > 1 else link)

    copied = 2 * plan.rollouts.in_host_memory  # when vLLM falls asleep and when it wakes up
    if sharding.offloads_weights:
        copied += 2 * micro_batches * weights.bytes // plan.num_ranks
    if sharding.offloads_state:  # reduced gradients go to host memory; updated weights come back
        copied += (reductions * gradients + weights.trained_bytes) // plan.num_ranks
    if config.memory.activation_offloading:
        patches, found = model.patches * prompts, plan.activations
        copied += 2 * round(found.layers_per_token * tokens + found.layers_per_patch * patches)

    updated = weights.num_trained / (plan.num_ranks if sharding.shards_state else 1)
    return max(compute, network) + UPDATE_BYTES[plan.optim] * updated / MEMORY_BANDWIDTH + copied / HOST_LINK
