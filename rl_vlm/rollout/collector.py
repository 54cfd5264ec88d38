"""Collection of generation windows.

    draw rows ─► prompts ─► generate completions ─► rewards ─► advantages ─► deal groups to ranks ─► Window

With `max_staleness` the next window is generated while the current one is trained on:

    training            window 0        window 1        window 2
    engine    window 0  window 1        window 2        window 3
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from rl_vlm.algorithm.advantages import reward_std
from rl_vlm.algorithm.turn_advantages import advantages_of_groups
from rl_vlm.checkpoint.random_states import random_states, restore_random_states
from rl_vlm.config.batches import batch_sizes
from rl_vlm.config.schema import RunConfig
from rl_vlm.data.loader import PromptLoader
from rl_vlm.data.sampler import Draw
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.signals import wait_for, wait_until_done
from rl_vlm.log.completions import CompletionsLog
from rl_vlm.log.metrics import ENGINE_WAIT, FAULTED, StepMetrics, add_reward_metrics
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.rollout.agreement import AgreementCheck
from rl_vlm.rollout.balance import GroupCost, balance
from rl_vlm.rollout.engine import SyncedEngine
from rl_vlm.rollout.environments.driver import Trajectories, generated
from rl_vlm.rollout.partial import InFlight, PartialRollouts, check_in_flight
from rl_vlm.rollout.sampling import sampling_params
from rl_vlm.rollout.scoring import check_faults, replace_rows, score_groups, weighted_rewards, without_variance
from rl_vlm.rollout.states import Builder
from rl_vlm.rollout.window import PolicyOutputs, Window, WindowSource
from rl_vlm.stages import AHEAD, Stage
from rl_vlm.types import Group, Progress, RewardTable, RolloutRequest, ScoredGroup, TrainerState


@dataclass(frozen=True)
class Rollout:
    """Generated groups and their rewards."""

    draws: list[Draw]
    groups: list[Group]
    table: RewardTable


@dataclass(frozen=True)
class Prefetch:
    """A window that is being generated in the background."""

    position: dict[str, Any]
    """`Collector.position` before the window's rows were drawn."""
    state: TrainerState
    metrics: StepMetrics
    rollout: Future[Rollout]


@dataclass(frozen=True)
class NextWindow:
    """A prefetched window that is complete, with its metrics."""

    window: Window
    metrics: StepMetrics

    def state_dict(self) -> dict[str, Any]:
        return {"window": self.window.state_dict(), "metrics": self.metrics.state_dict()}

    @classmethod
    def from_state(cls, state: dict[str, Any], builder: Builder) -> NextWindow:
        """Restore `state_dict`. `builder` makes the prompts of its draws."""
        return cls(Window.from_state(state["window"], builder), StepMetrics.from_state(state["metrics"]))


class Collector(WindowSource):
    """Holds one rank's current window, and makes the next one.

    If a window cannot be made, the collector returns to its state before the attempt and raises the error.
    """

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        loader: PromptLoader,
        engine: SyncedEngine,
        rewards: RewardSuite,
        log: CompletionsLog,
        cost: GroupCost,
        trajectories: Trajectories | None = None,
    ) -> None:
        """`trajectories` generates completions of several turns, if the run has tools."""
        self.config = config
        self.sizes = batch_sizes(config, ranks.world_size)
        self.ranks = ranks
        self.loader = loader
        self.engine = engine
        self.rewards = rewards
        self.log = log
        self.cost = cost
        self.trajectories = trajectories
        self.agreement = AgreementCheck(config, ranks, engine)
        self.window: Window | None = None
        self.prefetched: Prefetch | None = None
        self.next_window: NextWindow | None = None
        limit = config.rollout.max_rollout_tokens
        self.partial_rollouts = None if limit is None else PartialRollouts(limit)
        self.background = ThreadPoolExecutor(max_workers=1)

    def check_is_due(self, progress: Progress) -> bool:
        """Return whether to compare the engine with the policy before this step's passes."""
        return self.agreement.is_due(progress)

    def check_engine(self, progress: Progress, groups: Sequence[ScoredGroup], policy_outputs: PolicyOutputs) -> None:
        """Raise RolloutError on every rank if the engine's log-probs differ from the policy's."""
        self.agreement.run(progress, groups, policy_outputs)

    def sleep_engine(self) -> None:
        """Free the memory that the engine takes on the trainer's device, until it is next used."""
        self.engine.sleep()

    def current(self, progress: Progress, metrics: StepMetrics) -> Window:
        """Return the current window. If all its updates are done, get the next one first."""
        if self.window is None or self.window.is_spent:
            self.window = self.take_prefetched(metrics)
        with self.restored_on_failure(self.position()):
            if self.window is None or self.window.is_new:
                self.sync(progress, self.config.rollout.weight_sync_steps, metrics)
            if self.window is None:
                self.window = self.collect(progress, metrics)
        return self.window

    def sync(self, progress: Progress, max_updates_behind: int, metrics: StepMetrics) -> None:
        """Send the policy's weights if the engine's are this many updates old, or older than the last checkpoint.

        A run that resumes from this checkpoint could not restore older weights.
        """
        oldest = max(progress.policy_version + 1 - max_updates_behind, progress.saved_version)
        if self.engine.sent_version < oldest:
            with metrics.stage(Stage.WEIGHT_SYNC):
                metrics.add_sum("weight_sync/bytes", self.engine.sync(progress.policy_version))

    def collect(self, progress: Progress, metrics: StepMetrics) -> Window:
        """Draw, generate and score the next window."""
        state, draws = self.state_at(progress), self.draw()
        with self.ranks.agree():
            requests = self.requests(draws, state, metrics)
        with self.ranks.agree(), self.engine.gathered():
            rollout = self.generate_and_reward(requests, state, metrics)
        return self.make_window(rollout, state, metrics)

    def prefetch(self, progress: Progress) -> None:
        """Start to generate the next window in the background, if `max_staleness` is set."""
        assert self.window is not None
        step = progress.global_step + self.window.updates_left
        if not self.config.rollout.max_staleness or self.next_window is not None or step >= progress.max_steps:
            return
        position, metrics = self.position(), StepMetrics()
        state, draws = replace(self.state_at(progress), global_step=step), self.draw()

        def generate() -> Rollout:
            return self.generate_and_reward(self.requests(draws, state, metrics), state, metrics)

        self.prefetched = Prefetch(position, state, metrics, self.background.submit(generate))

    def take_prefetched(self, metrics: StepMetrics) -> Window | None:
        """Wait for the prefetched window and return it, or None if there is none."""
        if self.prefetched is not None:
            with metrics.stage(Stage.ROLLOUT_WAIT):
                self.finish_prefetch()
        taken, self.next_window = self.next_window, None
        if taken is None:
            return None
        metrics.include(taken.metrics, prefix=AHEAD)
        return taken.window

    def finish_prefetch(self) -> None:
        """Wait for the prefetched window. If it fails, restore the position before it."""
        prefetched, self.prefetched = self.prefetched, None
        if prefetched is None:
            return
        with self.restored_on_failure(prefetched.position):
            with self.ranks.agree():
                rollout = wait_for(prefetched.rollout)
            window = self.make_window(rollout, prefetched.state, prefetched.metrics)
            self.next_window = NextWindow(window, prefetched.metrics)

    def free_engine(self, progress: Progress) -> None:
        """Wait until the engine is idle, and send it the policy's latest weights."""
        with self.ranks.agree():
            if self.prefetched is not None:
                wait_until_done(self.prefetched.rollout)
        self.sync(progress, 1, StepMetrics())

    def step_of_next_generation(self, global_step: int) -> int:
        """Return the first optimizer step whose window is not generated yet.

        `global_step` is the number of completed steps. A window belongs to its first step.
        """
        if self.next_window is not None:
            return global_step + (self.window.updates_left if self.window else 0) + 1
        return global_step + 1 if self.window is not None and self.window.is_new else global_step

    def add_metrics(self, groups: Sequence[ScoredGroup], metrics: StepMetrics) -> None:
        """Add the rewards and lengths of an optimizer step's groups, and the tokens of this rank."""
        add_reward_metrics(metrics, groups, self.rewards.names)
        tokens = torch.tensor([sum(map(self.cost, groups))], dtype=torch.float64)
        metrics.add_values(tokens, max="balance/tokens_max", mean="balance/tokens_mean")

    def close(self) -> None:
        """Close the engine, which ends a prefetch, and close the loader."""
        self.engine.close()
        self.background.shutdown(cancel_futures=True)
        self.loader.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the state to resume from: the position in the data, the windows, and the groups in flight."""
        return {
            "loader": self.loader.state_dict(),
            "window": None if self.window is None or self.window.is_spent else self.window.state_dict(),
            "next_window": self.next_window and self.next_window.state_dict(),
            "in_flight": [group.state_dict() for group in self.partial_rollouts.in_flight]
            if self.partial_rollouts
            else [],
            "sent_version": self.engine.sent_version,
        }

    def load_state_dict(self, state: dict[str, Any], progress: Progress) -> None:
        """Restore `state_dict`, and send the policy's weights if the engine had them.

        The groups of windows are dealt to ranks again, since the state may come from `redistributed`. Groups that were
        saved on this rank stay here. Raises CheckpointError if the order of rows has changed, or if paused completions
        do not fit the settings.
        """
        with self.ranks.agree():
            self.loader.load_state_dict(state["loader"])
            window = state["window"] and Window.from_state(state["window"], self.loader.source)
            coming = state["next_window"] and NextWindow.from_state(state["next_window"], self.loader.source)
            in_flight = [InFlight.from_state(group, self.loader.source) for group in state["in_flight"]]
            check_in_flight(in_flight, self.config.rollout)
        self.window = window and self.balanced(window, StepMetrics())
        self.next_window = coming and replace(coming, window=self.balanced(coming.window, coming.metrics))
        if self.partial_rollouts is not None:
            self.partial_rollouts.restore(in_flight)
        if state["sent_version"] == progress.policy_version:
            self.sync(progress, 1, StepMetrics())

    def position(self) -> dict[str, Any]:
        """Return the state that a step changes before it updates the weights."""
        return {
            "window": self.window,
            "loader": self.loader.state_dict(),
            "in_flight": self.partial_rollouts and self.partial_rollouts.in_flight,
            "sent_version": self.engine.sent_version,
            "random": random_states(),
        }

    def undo_on_failure(self) -> AbstractContextManager[None]:
        """Return a context for a step. If the step fails, the collector returns to its state before the step.

        With `max_staleness` nothing is undone: other weights have generated the prefetched windows.
        """
        return nullcontext() if self.config.rollout.max_staleness else self.restored_on_failure(self.position())

    @contextmanager
    def restored_on_failure(self, position: dict[str, Any]) -> Iterator[None]:
        """Run a block, and restore `position` if it fails."""
        try:
            yield
        except BaseException:
            self.window = position["window"]
            self.loader.load_state_dict(position["loader"])
            self.engine.forget_syncs(position["sent_version"])
            restore_random_states(position["random"])
            if self.partial_rollouts is not None:
                self.partial_rollouts.restore(position["in_flight"])
            raise

    def state_at(self, progress: Progress) -> TrainerState:
        """Return the state that reward functions receive."""
        return TrainerState(progress.global_step, progress.max_steps, self.loader.epoch)

    def draw(self) -> list[Draw]:
        """Draw the rows of the next window, or of two windows if partial rollouts have no groups in flight yet."""
        num_windows = 1 if self.partial_rollouts is None or self.partial_rollouts.in_flight else 2
        return [draw for _ in range(num_windows) for draw in self.loader.draw_window()]

    def requests(self, draws: Sequence[Draw], state: TrainerState, metrics: StepMetrics) -> dict[Draw, RolloutRequest]:
        """Build the prompts of the drawn rows, and a request for each."""
        with metrics.stage(Stage.DATA):
            prompts = self.loader.prompts(draws)
        return {
            draw: RolloutRequest(f"{state.global_step}/{draw.epoch}/{prompt.sample.sample_id}", prompt)
            for draw, prompt in zip(draws, prompts, strict=True)
        }

    def generate_and_reward(
        self, requests: Mapping[Draw, RolloutRequest], state: TrainerState, metrics: StepMetrics
    ) -> Rollout:
        """Generate the groups of one window and score them."""
        if self.partial_rollouts is None:
            groups = dict(zip(requests, self.generate(list(requests.values()), metrics), strict=True))
        else:
            generate = partial(self.generate, metrics=metrics, limit=self.partial_rollouts.max_rollout_tokens)
            groups = self.partial_rollouts.finish(requests, self.loader.window_size, generate)
        rollout = Rollout(list(groups), list(groups.values()), self.score(list(groups.values()), state, metrics))
        if self.config.rollout.max_resampling_rounds:
            self.resample(rollout, state, metrics)
        if self.trajectories is not None:
            self.trajectories.release()
        return rollout

    def generate(self, requests: list[RolloutRequest], metrics: StepMetrics, limit: int | None = None) -> list[Group]:
        """Generate one group per request. With a `limit`, completions are paused after that many new tokens."""
        rollout = self.config.rollout
        with metrics.stage(Stage.GENERATION):
            sampling = sampling_params(self.config, rollout.num_generations, rollout.temperature, limit)
            groups = generated(self.engine.engine, self.trajectories, requests, sampling)
        counters = self.engine.take_counters()
        if self.trajectories is not None:
            counters.update(self.trajectories.take_counters())
            metrics.add_mean(ENGINE_WAIT, self.trajectories.clock.waited, self.trajectories.clock.total)
        for name, count in counters.items():
            metrics.add_sum(name, count)
        return groups

    def score(self, groups: list[Group], state: TrainerState, metrics: StepMetrics) -> RewardTable:
        """Call the reward functions on the groups."""
        with metrics.stage(Stage.REWARDS):
            return self.rewards.score(groups, state)

    def resample(self, rollout: Rollout, state: TrainerState, metrics: StepMetrics) -> None:
        """Generate new completions for groups without variance (DAPO's dynamic sampling, https://arxiv.org/abs/2503.14476).

        A new group with variance replaces the old one in `rollout`. Ranks can need different numbers of rounds.
        """
        groups, table = rollout.groups, rollout.table
        find_constant = partial(without_variance, weights=self.rewards.weights, algorithm=self.config.algorithm)
        rounds = num_groups = num_recovered = 0
        constant, first_ids = find_constant(groups, table), [group.group_id for group in groups]
        while constant and rounds < self.config.rollout.max_resampling_rounds:
            rounds += 1
            again = [RolloutRequest(f"{first_ids[p]}/resample-{rounds}", groups[p].prompt) for p in constant]
            new_groups = self.generate(again, metrics)
            new_table = self.score(new_groups, state, metrics)
            still_constant = find_constant(new_groups, new_table)
            recovered = {p: i for i, p in enumerate(constant) if i not in still_constant}
            for p, i in recovered.items():
                groups[p] = new_groups[i]
            replace_rows(table, new_table, recovered)
            num_groups, num_recovered = num_groups + len(again), num_recovered + len(recovered)
            constant = [constant[i] for i in still_constant]
        metrics.add_values(torch.tensor([float(rounds)]), max="resampling/rounds")
        metrics.add_sum("resampling/completions", num_groups * self.config.rollout.num_generations)
        metrics.add_sum("resampling/groups_recovered", num_recovered)

    def make_window(self, rollout: Rollout, state: TrainerState, metrics: StepMetrics) -> Window:
        """Compute advantages, log the completions of all ranks, and deal the groups to ranks.

        Raises RewardError on every rank if no completion has a reward, or too many have a fault.
        """
        table = rollout.table
        scored = self.scored_groups(rollout.groups, table)
        for fault, count in table.fault_counts.items():
            metrics.add_sum(f"reward_faults/{fault}", count)
        metrics.add_mean(FAULTED, table.faulted_PG.sum().item(), table.faulted_PG.numel())
        for name, values in table.metrics.items():
            metrics.add_mean(name, sum(values), len(values))
        self.log.write(state.global_step, scored, table)
        check_faults(table, self.ranks, self.config.rewards.max_fault_fraction, self.rewards.must_not_fail)
        window = Window.of(rollout.draws, scored, self.sizes.steps_per_window, self.sizes.num_iterations)
        return self.balanced(window, metrics)

    def balanced(self, window: Window, metrics: StepMetrics) -> Window:
        """Move groups between ranks until all train on about equally many tokens. See `balance`."""
        if self.ranks.world_size == 1:
            return window
        with metrics.stage(Stage.BALANCE):
            return balance(window, self.ranks, self.cost, self.loader.source)

    def scored_groups(self, groups: Sequence[Group], table: RewardTable) -> list[ScoredGroup]:
        """Add rewards and advantages to each group. `scale_rewards: batch` scales over the windows of all ranks."""

        def batch_std(values: torch.Tensor) -> float:
            return reward_std(torch.tensor(self.ranks.gather(values.flatten().tolist()))).item()

        rewards_PG = weighted_rewards(table, self.rewards.weights)
        advantages = advantages_of_groups(groups, rewards_PG, table.valid_PG, self.config.algorithm, batch_std)
        return score_groups(groups, table, rewards_PG, advantages, self.rewards.decisive)
