"""Makes generation windows: draws rows, samples groups, scores them, and writes them down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_vlm.advantages import compute_advantages, reward_std, total_rewards
from rl_vlm.config.batch_algebra import BatchPlan
from rl_vlm.config.schema import RunConfig
from rl_vlm.engine import Engine
from rl_vlm.generation import RolloutEngine
from rl_vlm.generation.sampling import sampling_of
from rl_vlm.metrics import StepMetrics
from rl_vlm.prefetch import Prefetcher
from rl_vlm.reward import RewardSuite
from rl_vlm.rollout_log import completion_rows, print_rows
from rl_vlm.run_directory import RunDirectory
from rl_vlm.sampler import Draw, PromptSampler
from rl_vlm.types import Group, RewardTable, RolloutRequest, ScoredGroup, TrainerState
from rl_vlm.window import Window


@dataclass
class Collector:
    """What it takes to get from the sampler's next draws to scored groups."""

    config: RunConfig
    plan: BatchPlan
    engine: Engine
    directory: RunDirectory
    sampler: PromptSampler
    prefetcher: Prefetcher
    generator: RolloutEngine
    rewards: RewardSuite

    def collect(self, state: TrainerState, metrics: StepMetrics) -> Window:
        """The next window of this rank. An error leaves the sampler where it was."""
        cursor = self.sampler.state_dict()
        try:
            draws = self.sampler.next_window(self.plan.steps_per_window)
            groups, table = self.engine.together(lambda: self.sample(draws, state, metrics))
        except BaseException:
            self.sampler.load_state_dict(cursor)
            raise
        scored = self.scored_groups(groups, table)
        self.record(state.global_step, scored, table, metrics)
        return Window(draws, scored, self.plan.steps_per_window, self.plan.num_iterations)

    def sample(self, draws: list[Draw], state: TrainerState, metrics: StepMetrics) -> tuple[list[Group], RewardTable]:
        """Groups for the drawn rows, and what the reward functions say of them."""
        rollout = self.config.rollout
        with metrics.stage("data"):
            requests = [
                RolloutRequest(f"{state.global_step}/{draw.epoch}/{prompt.sample.sample_id}", prompt)
                for draw, prompt in zip(draws, self.prefetcher.prompts(draws), strict=True)
            ]
        with metrics.stage("generation"):
            sampling = sampling_of(self.config, rollout.num_generations, rollout.temperature)
            groups = self.generator.generate(requests, sampling)
        with metrics.stage("rewards"):
            return groups, self.rewards.score(groups, state)

    def scored_groups(self, groups: Sequence[Group], table: RewardTable) -> list[ScoredGroup]:
        """Rewards and advantages of each group; `scale_rewards: batch` spans the window over all ranks."""
        rewards_PG = total_rewards(table.scores_PGF, torch.tensor(self.rewards.weights), table.valid_PG)
        scale = self.config.algorithm.scale_rewards
        batch_std = self.std_over_ranks(rewards_PG) if scale == "batch" else None
        advantages = compute_advantages(rewards_PG, table.valid_PG, scale, batch_std)
        return [
            ScoredGroup(
                group,
                scores_GF=table.scores_PGF[p],
                rewards_G=rewards_PG[p],
                advantages_G=advantages.advantages_PG[p],
                valid_G=table.valid_PG[p],
                has_variance=bool(advantages.has_variance_P[p]),
            )
            for p, group in enumerate(groups)
        ]

    def std_over_ranks(self, rewards_PG: Tensor) -> float:
        return reward_std(torch.tensor(self.engine.gather(rewards_PG.flatten().tolist()))).item()

    def record(self, step: int, groups: Sequence[ScoredGroup], table: RewardTable, metrics: StepMetrics) -> None:
        """Count faults, log what reward functions logged, and write the completions of all ranks."""
        for fault, count in table.fault_counts.items():
            metrics.add_sum(f"reward_faults/{fault}", count)
        for name, values in table.metrics.items():
            metrics.add_mean(name, sum(values), len(values))
        log = self.config.log
        if not log.log_completions and not log.num_completions_to_print:
            return
        rows = self.engine.gather(completion_rows(step, groups, table))
        if self.engine.is_main:
            print_rows(rows[: log.num_completions_to_print])
            if log.log_completions:
                self.directory.write_completions(step, rows)
