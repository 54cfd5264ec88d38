"""`micro_batch_tokens: auto`: the budget that a run starts with, from the memory plan for its own device."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import replace

import torch

from rl_vlm.checkpoint.random_states import random_states, restore_random_states
from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import shorten
from rl_vlm.model.families import family_of
from rl_vlm.model.loading import base_of
from rl_vlm.model.quantization import checkpoint_config
from rl_vlm.passes.budget import PlannedBudget
from rl_vlm.plan.bound import bytes_at_most
from rl_vlm.plan.build import plan_memory, read_config, traced_model
from rl_vlm.plan.hardware import GIB, Card, Hardware
from rl_vlm.plan.memory import MemoryPlan
from rl_vlm.plan.tracing.activations import MOST_TOKENS
from rl_vlm.types import Prompt

CPU_TOKENS = 8192
"""Largest budget on CPUs. Larger micro-batches are not faster there."""
UNPLANNED_TOKENS = 8192
"""Budget if no plan can be made."""
CPU_SHARE = 0.5
"""Fraction of the machine's memory that all processes of a run on CPUs may use together."""

logger = logging.getLogger(__name__)


def start_budget(
    config: RunConfig, initial: str, ranks: Ranks, prompts: Iterable[Prompt]
) -> tuple[PlannedBudget, MemoryPlan | None]:
    """Return the budget that a run starts with, and the memory plan, if one was made.

    The settings give the budget, or with `auto` the plan, which ignores how much memory is free. All ranks get the same
    budget. `prompts` are some prompts of the run; the plan is made for the longest. To build them and to plan leaves
    the global random states as they are. A memory profile needs a plan even if the settings give the budget.
    """
    tokens = config.memory.micro_batch_tokens
    if tokens != "auto" and not config.log.memory_profile:
        return PlannedBudget(tokens), None
    with ranks.agree():
        before = random_states()
        try:
            made = [planned_budget(config, initial, ranks, prompts)] if ranks.is_main else []
        finally:
            restore_random_states(before)
    ((planned, plan),) = ranks.gather(made)
    return (planned if tokens == "auto" else replace(planned, tokens=tokens, patch_price=0.0)), plan


def planned_budget(
    config: RunConfig, initial: str, ranks: Ranks, prompts: Iterable[Prompt]
) -> tuple[PlannedBudget, MemoryPlan | None]:
    """Make the memory plan of a run on this device, and return its budget and the plan.

    If the model's steps cannot be traced, return `UNPLANNED_TOKENS` and no plan: the model can still be trained. Do the
    same if there are no prompts: the first step may leave out or refuse the rows.
    """
    on_gpu = ranks.device.type != "cpu"
    hardware = Hardware(this_card(ranks.device), ranks.world_size, 1, ranks.launch.sharding)
    if family_of(checkpoint_config(base_of(initial), config.model)).is_derived:
        return unplanned("its model_type has no row in the table of families")
    longest = max(prompts, key=lambda prompt: len(prompt.token_ids), default=None)
    if longest is None:
        return unplanned("no row of the data makes a prompt")
    try:
        needs_none = not on_gpu and surely_fits(config, initial, hardware, longest)
        if needs_none and not config.log.memory_profile:
            logger.info("micro_batch_tokens %d, the most on a CPU: the model is too small to need a plan", CPU_TOKENS)
            return PlannedBudget(CPU_TOKENS), None
        model = traced_model(config, initial, read_config(config, initial), longest, on_gpu)
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError) as error:  # from the model's own code
        return unplanned(shorten(repr(error), 200))
    plan = plan_memory(config, hardware, model)
    tokens = plan.micro_batch_tokens if on_gpu else min(plan.micro_batch_tokens, CPU_TOKENS)
    logger.info(
        "memory plan: micro_batch_tokens %d; peak %s, %.1f of %.1f GiB",
        tokens, plan.peak.name, plan.peak.total / GIB, plan.available / GIB,
    )  # fmt: skip
    if not plan.fits:
        logger.warning("the memory plan does not fit; `rl-vlm plan CONFIG --suggest` shows set-ups that do")
    if needs_none:
        return PlannedBudget(CPU_TOKENS), plan  # a profile does not change the run
    planned = PlannedBudget(
        tokens,
        model.activations.patch_price,
        available=plan.available - plan.rollouts.while_training,
        fixed=plan.activations.fixed,
        peak=plan.training.total,
        most_tokens=MOST_TOKENS,
    )
    return planned, plan


def surely_fits(config: RunConfig, initial: str, hardware: Hardware, prompt: Prompt) -> bool:
    """Return whether the largest budget surely fits on these CPUs, so that no plan is needed.

    An engine that reserves memory needs the plan.
    """
    if config.rollout.facts.reserves_memory:
        return False
    return bytes_at_most(config, initial, prompt, CPU_TOKENS) <= hardware.card.budget(hardware.num_ranks)


def unplanned(reason: str) -> tuple[PlannedBudget, None]:
    """Return the budget of a run without a plan, and log the reason."""
    logger.warning(
        "no memory plan can be made (%s): memory.micro_batch_tokens is %d. Set it if that is too many or too few",
        reason, UNPLANNED_TOKENS,
    )  # fmt: skip
    return PlannedBudget(UNPLANNED_TOKENS), None


def this_card(device: torch.device) -> Card:
    """Return the device of this rank. A CPU has this process's share of half of the machine's memory."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        return Card(found.name, found.total_memory)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Card("CPU", int(machine * CPU_SHARE / processes))
