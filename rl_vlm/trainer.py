"""GRPO, in the order of `Trainer.step`:

    draw rows ─ generate ─ rewards ─ advantages               once per generation window, see rollout/collector.py
    check the engine ─ prefetch ─ old and reference log-probs  once per generation window
    groups ─► micro-batches ─► log-probs ─► loss ─► gradients ─► update       every optimizer step

`run.py` calls it, evaluates, and writes files.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from rl_vlm.algorithm.logprobs import store_logprobs
from rl_vlm.algorithm.objective import Objective, contributes
from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.optimizer import Optimizer
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import TrainingError
from rl_vlm.log.metrics import StepMetrics, add_reward_metrics
from rl_vlm.memory.micro_batches import make_micro_batches, pad_with_dummies
from rl_vlm.memory.peaks import held_gib
from rl_vlm.memory.recovery import Recovery
from rl_vlm.model.loading import usable_sharing
from rl_vlm.model.policy import Policy
from rl_vlm.model.reference import Reference
from rl_vlm.model.vision import NO_RUNS, TowerRuns, VisionEncoder
from rl_vlm.rollout.agreement import check_agreement
from rl_vlm.rollout.collector import Collector
from rl_vlm.rollout.window import Window
from rl_vlm.stages import NO_ONE, LogprobStage, Stage, Stages
from rl_vlm.types import MicroBatch, PolicyOutput, Progress, ScoredGroup, Sharing, synchronize, to_host

T = TypeVar("T")

MAX_NONFINITE_STEPS = 3


class Trainer:
    """One rank of GRPO. `step` is the algorithm."""

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        policy: Policy,
        reference: Reference | None,
        optimizer: Optimizer,
        collector: Collector,
        progress: Progress,
        recovery: Recovery,
        stages: Stages = NO_ONE,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.policy = policy
        self.reference = reference
        self.optimizer = optimizer
        self.collector = collector
        self.progress = progress
        self.recovery = recovery
        self.stages = stages
        self.engine_checked = config.rollout.engine == "hf"  # hf samples from the policy itself
        self.contributes = partial(contributes, has_kl=reference is not None, trains_on=policy.trains_on)
        self.sharing: Sharing = usable_sharing(policy.transformer, config.memory.prefix_sharing)
        self.nonfinite_groups: list[ScoredGroup] = []
        """Groups of the last step, if its loss or gradient was not finite."""
        self.is_updating = False
        """Whether the step's update has begun and the step is not complete, so that the weights belong to no step."""

    def step(self) -> StepMetrics:
        """Take one optimizer step and return its metrics."""
        metrics = StepMetrics(self.stages)
        self.start_step()
        self.recovery.events.clear()
        with metrics.stage(Stage.STEP):
            window = self.collector.current(self.progress, metrics)  # draw, generate, reward, advantages
            if window.is_new:
                self.check_engine(window, metrics)
                self.collector.prefetch(self.progress)
                self.add_logprobs(window.later_groups(), self.policy, Stage.OLD_LOGPROBS, metrics)
                self.add_logprobs(window.groups, self.reference, Stage.REF_LOGPROBS, metrics)
            groups = window.step_groups()
            with metrics.stage(Stage.TRAINING):
                objective = self.objective(window, groups, metrics)
                loss = self.accumulate_gradients(window, objective, metrics)
                with metrics.stage(Stage.UPDATE):
                    self.update(loss, objective.contributing, metrics)
            window.updates_done += 1
        self.add_metrics(groups, metrics)
        self.progress.global_step += 1
        self.is_updating = False
        return metrics

    def start_step(self) -> None:
        """Clear the counters and caches of the last step, check or evaluation."""
        self.nonfinite_groups = []
        self.policy.start_step()
        if self.reference is not None:
            self.reference.start_step()

    def check_engine(self, window: Window, metrics: StepMetrics) -> None:
        """Raise RolloutError if an engine has other weights than the policy. Checked once, before the first update."""
        if not self.engine_checked:
            with metrics.stage(Stage.CHECK):
                check_agreement(self.config, self.ranks, self.collector.engine, window.groups, self.policy_outputs)
            self.engine_checked = True
            self.start_step()

    @torch.no_grad()
    def add_logprobs(
        self, groups: Sequence[ScoredGroup], model: Policy | Reference | None, stage: LogprobStage, metrics: StepMetrics
    ) -> None:
        """Compute the old or reference log-probs of the groups."""
        if not groups or model is None:
            return
        with metrics.stage(stage):
            contributing = list(filter(self.contributes, groups))
            for batch, output in self.outputs(stage, model, contributing, self.sharing, spare=groups[0]):
                store_logprobs(batch, output.logprobs_NT, stage)

    @torch.no_grad()
    def outputs(
        self,
        stage: Stage,
        model: Policy | Reference,
        groups: Sequence[ScoredGroup],
        sharing: Sharing,
        spare: ScoredGroup,
    ) -> list[tuple[MicroBatch, PolicyOutput]]:
        """Compute a model's outputs without gradients, in host memory. Dummies are left out."""
        together = self.optimizer.strategy.equal_calls

        def passes() -> list[tuple[MicroBatch, PolicyOutput]]:
            batches, outputs = self.pack(groups, sharing, spare, together), []
            for batch, runs in zip(batches, self.tower_runs(batches, model.vision, together), strict=True):
                with self.recovery.watch(batch):
                    outputs.append((batch, PolicyOutput(*map(to_host, model(batch, runs)))))
            synchronize(self.ranks.device)
            return [(batch, output) for batch, output in outputs if not batch.is_dummy]

        self.policy.eval()
        try:
            return self.repeated(stage, passes, together)
        finally:
            self.policy.train()

    def repeated(self, stage: Stage, passes: Callable[[], T], together: bool) -> T:
        """Run passes over micro-batches, again under a smaller budget if they run out of memory.

        `together` says whether ranks communicate within them.
        """
        frozen = self.reference and self.reference.frozen
        marks = [model.mark() for model in (self.policy, frozen) if model is not None]

        def undo() -> None:
            self.optimizer.strategy.clear_gradients()
            for go_back in marks:
                go_back()

        return self.recovery.repeat(stage, passes, undo, together)

    def policy_outputs(self, groups: Sequence[ScoredGroup]) -> list[tuple[MicroBatch, PolicyOutput]]:
        """Compute the policy's outputs for groups that differ between ranks."""
        return self.outputs(Stage.CHECK, self.policy, groups, self.sharing, spare=groups[0])

    def pack(
        self, groups: Sequence[ScoredGroup], sharing: Sharing, spare: ScoredGroup, together: bool
    ) -> list[MicroBatch]:
        """Cut groups into micro-batches under the token budget. If ranks run them together, dummies of `spare` make
        them equally many on every rank.
        """
        batches = make_micro_batches(
            groups,
            self.progress.micro_batch_tokens,
            sharing,
            self.policy.vision.tokens,
            mixes_prompts=not self.policy.family.cross_attends,
        )
        return pad_with_dummies(batches, self.ranks.max([len(batches)])[0], spare) if together else batches

    def tower_runs(self, batches: Sequence[MicroBatch], vision: VisionEncoder, together: bool) -> list[TowerRuns]:
        """Return the runs of the vision tower for each micro-batch, equally many on every rank if they run together."""
        plan = vision.plan(batches)
        if not together:
            return plan
        most = self.ranks.max([num for runs in plan for num in runs.numbers])
        return [runs.at_least(most[3 * i : 3 * i + 3], vision.idle_prompt) for i, runs in enumerate(plan)]

    def objective(self, window: Window, groups: Sequence[ScoredGroup], metrics: StepMetrics) -> Objective:
        """Return the objective of an optimizer step on these groups of the window."""

        def outputs() -> list[tuple[MicroBatch, PolicyOutput]]:
            with metrics.stage(Stage.ENTROPY):
                return self.outputs(Stage.ENTROPY, self.policy, groups, self.sharing, spare=groups[0])

        return Objective.of_step(
            self.config,
            self.ranks,
            groups,
            window.groups,
            window.steps_per_window,
            self.contributes,
            outputs,
        )

    def accumulate_gradients(self, window: Window, objective: Objective, metrics: StepMetrics) -> Tensor:
        """Run forward and backward over micro-batches, and return this rank's share of the step's loss."""
        lags = [self.progress.policy_version - group.group.policy_version for group in objective.groups]
        metrics.add_mean("sampling/policy_version_lag", sum(lags), len(lags))
        keep = window.is_new and window.outlives_update  # log-probs for later iterations
        passes = partial(self.training_passes, objective, keep)
        loss, outputs, found = self.repeated(Stage.TRAINING, passes, together=self.optimizer.strategy.is_sharded)
        metrics.include(found)
        for batch, logprobs_NT in outputs:
            store_logprobs(batch, logprobs_NT, Stage.OLD_LOGPROBS)
        return loss

    def training_passes(
        self, objective: Objective, keep: bool
    ) -> tuple[Tensor, list[tuple[MicroBatch, Tensor]], StepMetrics]:
        """Add the gradients of all micro-batches. Returns the loss, the log-probs to `keep`, and metrics."""
        strategy, metrics, start = self.optimizer.strategy, StepMetrics(), time.perf_counter()
        spare = objective.groups[0]
        batches = self.pack(objective.contributing, self.sharing, spare, together=strategy.is_sharded)
        batches, tower_runs = self.training_runs(batches, spare)
        step_loss, outputs, sums = torch.zeros((), device=self.ranks.device), [], []
        for i, batch in enumerate(batches):
            with self.recovery.watch(batch), strategy.accumulating(last=i == len(batches) - 1):
                output = self.optimizer.policy(batch, tower_runs[i])
                loss, found = objective.loss(batch, output)
                strategy.backward(loss)
                for prompt in tower_runs[i].after:
                    strategy.backward(self.optimizer.policy(prompt), is_share=False)
            step_loss += loss.detach()
            sums.append(found)
            if keep and not batch.is_dummy:
                outputs.append((batch, to_host(output.logprobs_NT.detach())))
        synchronize(self.ranks.device)  # once for all: a wait in a micro-batch would leave a GPU idle
        metrics.add_loss_metrics(sums)
        if not strategy.is_sharded:  # shards make ranks wait in every micro-batch
            seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            metrics.add_values(seconds, max="balance/seconds_max", mean="balance/seconds_mean")
        return step_loss, outputs, metrics

    def training_runs(
        self, batches: Sequence[MicroBatch], spare: ScoredGroup
    ) -> tuple[list[MicroBatch], list[TowerRuns]]:
        """Return the micro-batches to train on, and the runs of the vision tower for each."""
        strategy = self.optimizer.strategy
        tower_runs = self.tower_runs(batches, self.policy.vision, together=strategy.is_sharded)
        batches = list(batches)
        if not strategy.needs_all_gradients or self.policy.vision.is_frozen:
            return batches, tower_runs
        if batches and tower_runs[-1].after:  # the last backward must give a gradient to the language model as well
            batches, tower_runs = pad_with_dummies(batches, len(batches) + 1, spare), [*tower_runs, NO_RUNS]
        return batches, [replace(runs, within=max(1, runs.within)) for runs in tower_runs]

    def update(self, loss: Tensor, contributing: Sequence[ScoredGroup], metrics: StepMetrics) -> None:
        """Update the weights, unless no group contributes, or a loss or gradient of any rank is not finite."""
        loss_sum = self.ranks.sum([loss.item()])[0]
        norm, finite = 0.0, True
        any_contributes = self.ranks.max([len(contributing)])[0] > 0
        if any_contributes:
            self.recovery.reserve(self.optimizer.strategy.reserve_update)
            self.is_updating = True
            norm, finite = self.optimizer.strategy.update(math.isfinite(loss_sum))
            self.is_updating = finite
        metrics.add_mean("loss", loss_sum, 1)
        metrics.add_mean("grad_norm", norm, 1)
        metrics.add_mean("learning_rate", self.optimizer.learning_rate, 1)
        metrics.add_mean("skipped_updates/no_variance", float(not any_contributes), 1)
        metrics.add_mean("skipped_updates/nonfinite", float(not finite), 1)
        self.stop_if_nonfinite(finite, contributing)
        self.is_updating = True
        self.progress.policy_version += any_contributes and finite
        self.optimizer.strategy.clear_gradients()
        self.optimizer.advance_schedule()
        self.move_reference()

    def stop_if_nonfinite(self, finite: bool, groups: Sequence[ScoredGroup]) -> None:
        """Raise TrainingError after three steps in a row that were not finite."""
        if finite:
            self.progress.nonfinite_in_a_row = 0
            return
        self.nonfinite_groups = list(groups)
        with self.ranks.agree():
            if self.progress.nonfinite_in_a_row + 1 >= MAX_NONFINITE_STEPS:
                raise TrainingError(
                    f"{MAX_NONFINITE_STEPS} steps in a row had a loss or gradient that is not finite. The weights are "
                    "those of the last finite step. A lower learning_rate often helps."
                )
        self.progress.nonfinite_in_a_row += 1

    def move_reference(self) -> None:
        """Move the reference towards the policy every `ref_model_sync_steps` steps, if `sync_ref_model` is set."""
        algorithm = self.config.algorithm
        due = (self.progress.global_step + 1) % algorithm.ref_model_sync_steps == 0
        if algorithm.sync_ref_model and self.reference is not None and due:
            self.reference.move_towards_policy(algorithm.ref_model_mixup_alpha)

    def add_metrics(self, groups: Sequence[ScoredGroup], metrics: StepMetrics) -> None:
        """Add rewards, lengths, the tokens of this rank, and the models' compute counters."""
        add_reward_metrics(metrics, groups, self.collector.rewards.names)
        tokens = torch.tensor([sum(map(self.collector.cost, groups))], dtype=torch.float64)
        metrics.add_values(tokens, max="balance/tokens_max", mean="balance/tokens_mean")
        metrics.add_mean("memory/micro_batch_tokens", self.progress.micro_batch_tokens, 1)
        metrics.add_values(torch.tensor([held_gib()], dtype=torch.float64), max="memory/held_gib")
        for stage, num_events in self.recovery.events.items():
            if num_events and self.ranks.is_main:
                metrics.add_sum(f"out_of_memory/{stage}", num_events)
        for model in filter(None, (self.policy, self.reference)):
            for name, value in model.counters.items():
                metrics.add_sum(f"compute/{name}", value)
