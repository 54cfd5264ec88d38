"""Makes generation windows: draws rows, samples groups, scores them, and writes them down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from rl_vlm.in_flight import InFlight, roll_on
from rl_vlm.metrics import StepMetrics
from rl_vlm.prefetch import Prefetcher
from rl_vlm.reward import RewardSuite
from rl_vlm.rollout_log import completion_rows, print_rows
from rl_vlm.run_directory import RunDirectory
from rl_vlm.sampler import Draw, PromptSampler
from rl_vlm.types import Group, Prompt, RewardTable, RolloutRequest, ScoredGroup, TrainerState
from rl_vlm.window import Window


@dataclass(frozen=True)
class Place:
    """Where the collector is: what it draws next, and what it has begun."""

    cursor: dict[str, Any]
    in_flight: list[InFlight]


@dataclass(frozen=True)
class Sampled:
    """A window's groups, and what the reward functions say of them."""

    draws: list[Draw]
    groups: list[Group]
    table: RewardTable


@dataclass(frozen=True)
class Ahead:
    """A window that is being sampled while the one before it is trained on."""

    before: Place
    state: TrainerState
    metrics: StepMetrics
    sampled: Future[Sampled]


@dataclass(frozen=True)
class Ready:
    """The window ahead, once it is sampled and written down, and what was counted of it."""

    window: Window
    metrics: StepMetrics

    def state_dict(self) -> dict[str, Any]:
        return {"window": self.window.state_dict(), "metrics": self.metrics.state_dict()}

    @classmethod
    def from_state(cls, state: dict[str, Any], build: Callable[[Draw], Prompt]) -> Ready:
        """What `state_dict` holds, with the prompts that `build` makes of its draws."""
        return cls(Window.from_state(state["window"], build), StepMetrics.from_state(state["metrics"]))


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
    in_flight: list[InFlight] = field(default_factory=list)
    ahead: Ahead | None = None
    ready: Ready | None = None
    background: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(max_workers=1))

    def collect(self, state: TrainerState, metrics: StepMetrics) -> Window:
        """The next window of this rank. An error leaves the collector where it was."""
        before = self.place()
        try:
            windows = self.draw()
            new = self.engine.together(lambda: self.begin(windows, state, metrics))
            sampled = self.engine.together(lambda: self.sample(new, len(windows[0]), state, metrics))
            return self.window(sampled, state, metrics)
        except BaseException:
            self.go_back(before)
            raise

    def collect_ahead(self, state: TrainerState) -> None:
        """Begin to sample the next window, which training will reach at `state`, with the weights of now."""
        before, windows, metrics = self.place(), self.draw(), StepMetrics()

        def sample() -> Sampled:
            return self.sample(self.begin(windows, state, metrics), len(windows[0]), state, metrics)

        sampled = self.background.submit(sample)
        self.ahead = Ahead(before, state, metrics, sampled)

    def take_ahead(self, metrics: StepMetrics) -> Window | None:
        """The window that was begun, once it is there; None if none was."""
        if self.ahead is not None:
            with metrics.stage("rollout_wait"):
                self.finish_ahead()
        ready, self.ready = self.ready, None
        if ready is None:
            return None
        metrics.include(ready.metrics, stages="ahead/")
        return ready.window

    def finish_ahead(self) -> None:
        """Make the window that was begun `ready`. An error takes the collector back to where it was before it."""
        ahead, self.ahead = self.ahead, None
        if ahead is None:
            return
        try:
            sampled = self.engine.together(ahead.sampled.result)
            self.ready = Ready(self.window(sampled, ahead.state, ahead.metrics), ahead.metrics)
        except BaseException:
            self.go_back(ahead.before)
            raise

    def wait(self) -> None:
        """Until the generator is free for something else."""
        if self.ahead is not None:
            wait([self.ahead.sampled])

    def place(self) -> Place:
        return Place(self.sampler.state_dict(), self.in_flight)

    def go_back(self, place: Place) -> None:
        self.sampler.load_state_dict(place.cursor)
        self.in_flight = place.in_flight

    def close(self) -> None:
        self.background.shutdown(cancel_futures=True)

    def window(self, sampled: Sampled, state: TrainerState, metrics: StepMetrics) -> Window:
        """The window of sampled groups, with advantages, and written down."""
        scored = self.scored_groups(sampled.groups, sampled.table)
        self.record(state.global_step, scored, sampled.table, metrics)
        return Window(sampled.draws, scored, self.plan.steps_per_window, self.plan.num_iterations)

    def draw(self) -> list[list[Draw]]:
        """The draws of the next window; where completions can be paused, one window more is kept in flight."""
        begins_two = self.config.rollout.max_rollout_tokens is not None and not self.in_flight
        return [self.sampler.next_window(self.plan.steps_per_window) for _ in range(2 if begins_two else 1)]

    def begin(self, windows: list[list[Draw]], state: TrainerState, metrics: StepMetrics) -> list[InFlight]:
        """The drawn rows with their prompts."""
        draws = [draw for window in windows for draw in window]
        with metrics.stage("data"):
            return [
                InFlight(draw, RolloutRequest(f"{state.global_step}/{draw.epoch}/{prompt.sample.sample_id}", prompt))
                for draw, prompt in zip(draws, self.prefetcher.prompts(draws), strict=True)
            ]

    def sample(self, new: list[InFlight], num: int, state: TrainerState, metrics: StepMetrics) -> Sampled:
        """The `num` groups of a window, of what was in flight and what is new."""
        limit = self.config.rollout.max_rollout_tokens
        finished, self.in_flight = roll_on(
            [*self.in_flight, *new], num, lambda requests: self.generate(requests, metrics, limit)
        )
        groups = list(finished.values())
        table = self.score(groups, state, metrics)
        if self.config.rollout.max_resampling_rounds:
            self.resample(groups, table, state, metrics)
        return Sampled(list(finished), groups, table)

    def generate(
        self, requests: list[RolloutRequest], metrics: StepMetrics, max_rollout_tokens: int | None = None
    ) -> list[Group]:
        """One group per request; without a limit, whole ones."""
        rollout = self.config.rollout
        with metrics.stage("generation"):
            sampling = sampling_of(self.config, rollout.num_generations, rollout.temperature, max_rollout_tokens)
            return self.generator.generate(requests, sampling)

    def score(self, groups: list[Group], state: TrainerState, metrics: StepMetrics) -> RewardTable:
        """What the reward functions say of the groups."""
        with metrics.stage("rewards"):
            return self.rewards.score(groups, state)

    def resample(self, groups: list[Group], table: RewardTable, state: TrainerState, metrics: StepMetrics) -> None:
        """Dynamic sampling (DAPO, https://arxiv.org/abs/2503.14476) for the prompts whose groups have no variance.

        A new group that has some takes its place in `groups` and `table`. Ranks need different numbers of rounds.
        """
        rounds = num_groups = num_recovered = 0
        constant, first_ids = self.without_variance(table), [group.group_id for group in groups]
        while constant and rounds < self.config.rollout.max_resampling_rounds:
            rounds += 1
            again = [RolloutRequest(f"{first_ids[p]}/resample-{rounds}", groups[p].prompt) for p in constant]
            new_groups = self.generate(again, metrics)
            new_table = self.score(new_groups, state, metrics)
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

        def write() -> None:
            if self.engine.is_main:
                print_rows(rows[: log.num_completions_to_print])
                if log.log_completions:
                    self.directory.write_completions(step, rows)

        self.engine.together(write)


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
