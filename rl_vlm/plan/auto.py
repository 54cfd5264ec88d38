"""`micro_batch_tokens: auto`: the budget that a run starts with, from the memory plan for its own device."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from rl_vlm.checkpoint import random_states, restore_random_states
from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.strategy import Strategy
from rl_vlm.plan.build import Hardware, plan_memory, read_config, traced_model
from rl_vlm.plan.engines import ENGINES, Engine
from rl_vlm.plan.hardware import GIB, Card
from rl_vlm.types import Prompt

CPU_TOKENS = 8192
"""Largest budget on CPUs, which larger micro-batches do not make faster."""
CPU_SHARE = 0.5
"""Fraction of the machine's memory that the processes of a run may plan with on CPUs."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StartBudget:
    """The budget of the first step."""

    tokens: int
    patch_price: float
    """Language tokens that a patch of an image counts as; 0 if that was not planned."""


def start_budget(
    config: RunConfig, initial: str, ranks: Ranks, strategy: Strategy, prompts: Iterable[Prompt]
) -> StartBudget:
    """Return the budget of the settings, or that of the memory plan, which does not depend on the memory that is free.

    It is equal on all ranks. `prompts` are some of the run's own, of which the longest is planned with.
    """
    tokens = config.memory.micro_batch_tokens
    if tokens != "auto":
        return StartBudget(tokens, 0.0)
    with ranks.agree():
        planned = [planned_budget(config, initial, ranks, strategy, prompts)] if ranks.is_main else []
    return ranks.gather(planned)[0]


def planned_budget(
    config: RunConfig, initial: str, ranks: Ranks, strategy: Strategy, prompts: Iterable[Prompt]
) -> StartBudget:
    """Make the memory plan of a run on this device, and return its budget."""
    on_gpu = ranks.device.type != "cpu"
    hardware = Hardware(this_card(ranks.device), ranks.world_size, 1, engine_of(strategy, ranks))
    before = random_states()
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids))
    model = traced_model(config, initial, read_config(config, initial), longest, on_gpu)
    restore_random_states(before)
    plan = plan_memory(config, hardware, model)
    tokens = plan.micro_batch_tokens if on_gpu else min(plan.micro_batch_tokens, CPU_TOKENS)
    logger.info(
        "memory plan: micro_batch_tokens %d; peak %s, %.1f of %.1f GiB",
        tokens, plan.peak.name, plan.peak.total / GIB, plan.available / GIB,
    )  # fmt: skip
    if not plan.fits:
        logger.warning("the memory plan does not fit; `rl-vlm plan CONFIG --suggest` shows set-ups that do")
    return StartBudget(tokens, model.activations.patch_price)


def this_card(device: torch.device) -> Card:
    """Return the device of this rank; of a CPU, its share of half of the machine's memory."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return Card(found.name, found.total_memory)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Card("CPU", int(machine * CPU_SHARE / processes))


def engine_of(strategy: Strategy, ranks: Ranks) -> Engine:
    """Return how the strategy holds the model, for the plan."""
    name = {"DDP": "ddp", "FSDP2": "fsdp2", "ZeRO-3": "zero3"}.get(strategy.name, "zero2")
    zero = ranks.launch.deepspeed.get("zero_optimization", {})
    offloads = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    return ENGINES["zero3_offload" if name == "zero3" and offloads else name]
