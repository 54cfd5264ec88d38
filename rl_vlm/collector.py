"""Makes generation windows: draws rows, samples groups, scores them, and writes them down."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
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


@dataclass(frozen=True)
class Ahead:
    """A window that is being sampled while the one before it is trained on."""

    cursor: dict[str, Any]
    """Of the sampler, before the window's draws."""
    draws: list[Draw]
    state: TrainerState
    metrics: StepMetrics
    sampled: Future[tuple[list[Group], RewardTable]]


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
    ahead: Ahead | None = None
    background: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=1))

    def collect(self, state: TrainerState, metrics: StepMetrics) -> Window:
        """The next window of this rank. An error leaves the sampler where it was."""
        cursor = self.sampler.state_dict()
        try:
            draws = self.sampler.next_window(self.plan.steps_per_window)
            groups, table = self.engine.together(lambda: self.sample(draws, state, metrics))
        except BaseException:
            self.sampler.load_state_dict(cursor)
            raise
        return self.window(draws, groups, table, state, metrics)

    def collect_ahead(self, state: TrainerState) -> None:
        """Begin to sample the next window, which training will reach at `state`, with the weights of now."""
        cursor, metrics = self.sampler.state_dict(), StepMetrics()
        draws = self.sampler.next_window(self.plan.steps_per_window)
        sampled = self.background.submit(self.sample, draws, state, metrics)
        self.ahead = Ahead(cursor, draws, state, metrics, sampled)

    def take_ahead(self, metrics: StepMetrics) -> Window | None:
        """The window that was begun, once it is there; None if none was. An error takes the sampler back before it."""
        ahead, self.ahead = self.ahead, None
        if ahead is None:
            return None
        try:
            with metrics.stage("rollout_wait"):
                groups, table = self.engine.together(ahead.sampled.result)
        except BaseException:
            self.sampler.load_state_dict(ahead.cursor)
            raise
        metrics.include(ahead.metrics)
        return self.window(ahead.draws, groups, table, ahead.state, metrics)

    def wait(self) -> None:
        """Until the generator is free for something else."""
        if self.ahead is not None:
            wait([self.ahead.sampled])

    def sampler_state(self) -> dict[str, Any]:
        """For a checkpoint, which does not hold the window ahead: a resumed run samples it again."""
        return self.ahead.cursor if self.ahead else self.sampler.state_dict()

    def close(self) -> None:
        self.background.shutdown(cancel_futures=True)

    def window(
        self, draws: list[Draw], groups: list[Group], table: RewardTable, state: TrainerState, metrics: StepMetrics
    ) -> Window:
        """The window of sampled groups, with advantages, and written down."""
        scored = self.scored_groups(groups, table)
        self.record(state.global_step, scored, table, metrics)
        return Window(draws, scored, self.plan.steps_per_window, self.plan.num_iterations)

    def sample(self, draws: list[Draw], state: TrainerState, metrics: StepMetrics) -> tuple[list[Group], RewardTable]:
        """Groups for the drawn rows, and what the reward functions say of them."""
        with metrics.stage("data"):
            requests = [
                RolloutRequest(f"{state.global_step}/{draw.epoch}/{prompt.sample.sample_id}", prompt)
                for draw, prompt in zip(draws, self.prefetcher.prompts(draws), strict=True)
            ]
        groups, table = self.rollout(requests, state, metrics)
        if self.config.rollout.max_resampling_rounds:
            self.resample(requests, groups, table, state, metrics)
        return groups, table

    def rollout(
        self, requests: list[RolloutRequest], state: TrainerState, metrics: StepMetrics
    ) -> tuple[list[Group], RewardTable]:
        """One group per request, and its scores."""
        rollout = self.config.rollout
        with metrics.stage("generation"):
            sampling = sampling_of(self.config, rollout.num_generations, rollout.temperature)
            groups = self.generator.generate(requests, sampling)
        with metrics.stage("rewards"):
            return groups, self.rewards.score(groups, state)

    def resample(
        self,
        requests: list[RolloutRequest],
        groups: list[Group],
        table: RewardTable,
        state: TrainerState,
        metrics: StepMetrics,
    ) -> None:
        """Dynamic sampling (DAPO, https://arxiv.org/abs/2503.14476) for the requests whose groups have no variance.

        A new group that has some takes its place in `groups` and `table`. Ranks need different numbers of rounds.
        """
        rounds = num_groups = num_recovered = 0
        constant = self.without_variance(table)
        while constant and rounds < self.config.rollout.max_resampling_rounds:
            rounds += 1
            again = [RolloutRequest(f"{requests[p].group_id}/resample-{rounds}", requests[p].prompt) for p in constant]
            new_groups, new_table = self.rollout(again, state, metrics)
            still_constant = self.without_variance(new_table)
            recovered = {p: i for i, p in enumerate(constant) if i not in still_constant}
            for p, i in recovered.items():
                groups[p] = new_groups[i]
            replace_rows(table, new_table, recovered)
            num_groups, num_recovered = num_groups + len(again), num_recovered + len(recovered)
            constant = [constant[i] for i in still_constant]
        metrics.add_values(torch.tensor([float(rounds)]), max="resampling/rounds")
        metrics.add_sum("resampling/completions", num_groups * self.config.rollout.num_generations)
        metrics.add_sum("resampling/groups_recovered", num_recovered)

    def without_variance(self, table: RewardTable) -> list[int]:
        """The table's rows whose valid rewards are all equal."""
        has_variance_P = compute_advantages(self.total_rewards(table), table.valid_PG, "none").has_variance_P
        return [p for p, varies in enumerate(has_variance_P.tolist()) if not varies]

    def total_rewards(self, table: RewardTable) -> Float[Tensor, "prompts group"]:
        return total_rewards(table.scores_PGF, torch.tensor(self.rewards.weights), table.valid_PG)

    def scored_groups(self, groups: Sequence[Group], table: RewardTable) -> list[ScoredGroup]:
        """Rewards and advantages of each group; `scale_rewards: batch` spans the window over all ranks."""
        rewards_PG = self.total_rewards(table)
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


def replace_rows(table: RewardTable, new: RewardTable, rows: Mapping[int, int]) -> None:
    """Put row `rows[p]` of `new` in place of row p of `table`, for every p in `rows`.

    What reward functions logged and their faults add up: they tell of the calls, also where a group is dropped.
    """
    for p, i in rows.items():
        table.scores_PGF[p] = new.scores_PGF[i]
        table.valid_PG[p] = new.valid_PG[i]
    num_groups, group_size = table.valid_PG.shape
    for column in dict.fromkeys([*table.breakdown, *new.breakdown]) if rows else ():
        values = table.breakdown.setdefault(column, [[None] * group_size for _ in range(num_groups)])
        for p, i in rows.items():
            values[p] = new.breakdown[column][i] if column in new.breakdown else [None] * group_size
    for metric, logged in new.metrics.items():
        table.metrics.setdefault(metric, []).extend(logged)
    for fault, count in new.fault_counts.items():
        table.fault_counts[fault] = table.fault_counts.get(fault, 0) + count
    table.fault_messages += new.fault_messages
