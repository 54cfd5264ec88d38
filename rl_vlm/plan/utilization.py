"""The range of `vllm_gpu_memory_utilization` if vLLM and the trainer share a card."""

from __future__ import annotations

from typing import NamedTuple

from rl_vlm.config.schema import RunConfig
from rl_vlm.plan.build import Model, vllm_needs
from rl_vlm.plan.memory import MemoryPlan


class Utilization(NamedTuple):
    """Values of `vllm_gpu_memory_utilization`."""

    least: float
    """Smallest value for which vLLM's cache holds one sequence of full length."""
    enough: float
    """Smallest value for which the cache holds `max_num_seqs` such sequences."""
    most: float
    """Largest value for which the trainer still fits; below 0 if it does not fit even without vLLM."""

    @staticmethod
    def of(config: RunConfig, model: Model, plan: MemoryPlan) -> Utilization:
        """Return the range for a plan with engine vllm."""
        needed = vllm_needs(config, model, plan.card)
        free = plan.available - plan.peak.total + plan.rollouts.while_training
        if config.vllm.vllm_enable_sleep_mode:
            free = plan.free_for_vllm
        return Utilization(
            needed.utilization(plan.card, 1),
            needed.utilization(plan.card, config.rollout.max_num_seqs),
            free / plan.card.memory,
        )
