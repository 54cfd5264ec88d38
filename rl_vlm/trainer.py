"""GRPO, in the order of `Trainer.step`:

    draw rows ─ generate ─ rewards ─ advantages               once per generation window, see rollout/collector.py
    check of the engine, if due ─ engine sleeps ─ check of shared rows, in the first step ─ prefetch
    old and reference log-probs                                once per generation window
    groups ─► objective ─► gradients ─► update                        every optimizer step

`passes/` runs a model over groups, and `algorithm/` has the loss. `run/` calls the step, evaluates, and writes files.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from rl_vlm.algorithm.objective import Objective, configured_loss, contributes
from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.collectives import Collectives
from rl_vlm.distributed.optimizer import Optimizer
from rl_vlm.errors import TrainingError
from rl_vlm.log.metrics import ITERATION, StepMetrics
from rl_vlm.model.policy import Policy
from rl_vlm.model.reference import Reference
from rl_vlm.passes.passes import Passes
from rl_vlm.passes.peaks import held_gib
from rl_vlm.passes.start_check import StartCheck
from rl_vlm.rollout.window import Window, WindowSource
from rl_vlm.stages import NO_ONE, LogprobStage, Stage, Stages
from rl_vlm.types import MicroBatch, PolicyOutput, Progress, ScoredGroup

MAX_NONFINITE_STEPS = 3


class Trainer:
    """One rank of GRPO. `step` is the algorithm."""

    def __init__(
        self,
        config: RunConfig,
        ranks: Collectives,
        policy: Policy,
        reference: Reference | None,
        optimizer: Optimizer,
        collector: WindowSource,
        progress: Progress,
        passes: Passes,
        stages: Stages = NO_ONE,
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.policy = policy
        self.reference = reference
        self.optimizer = optimizer
        self.collector = collector
        self.progress = progress
        self.passes = passes
        self.recovery = passes.recovery
        self.start_check = StartCheck(config, passes, optimizer.strategy)
        self.stages = stages
        self.loss_form = configured_loss(config.algorithm)
        self.contributes = partial(contributes, has_kl=reference is not None, trains_on=policy.trains_on)
        self.nonfinite_groups: list[ScoredGroup] = []
        """Groups of the last step, if its loss or gradient was not finite."""
        self.is_updating = False
        """Whether an update has begun and its step is not complete. The weights then belong to no step."""

    def step(self) -> StepMetrics:
        """Take one optimizer step and return its metrics."""
        metrics = StepMetrics(self.stages)
        self.start_step()
        self.recovery.start_step()
        with metrics.stage(Stage.STEP):
            window = self.collector.current(self.progress, metrics)  # draw, generate, reward, advantages
            self.check_engine(window, metrics)
            self.collector.sleep_engine()
            self.check_rows(window, metrics)
            if window.is_new:
                self.collector.prefetch(self.progress)
                self.add_logprobs(Stage.OLD_LOGPROBS, self.policy, window.later_groups(), metrics)
                self.add_logprobs(Stage.REF_LOGPROBS, self.reference, window.groups, metrics)
            with metrics.stage(Stage.TRAINING):
                objective = self.objective(window, window.step_groups(), metrics)
                loss, found = self.passes.gradients(objective, keeps_logprobs=window.is_new and window.outlives_update)
                metrics.include(found)
                with metrics.stage(Stage.UPDATE):
                    self.update(loss, objective.contributing, metrics)
            window.updates_done += 1
        self.add_metrics(objective.groups, metrics)
        self.progress.step_done()
        self.is_updating = False
        return metrics

    def start_step(self) -> None:
        """Clear the counters and caches of the last step, check or evaluation."""
        self.nonfinite_groups = []
        self.policy.start_step()
        if self.reference is not None:
            self.reference.start_step()

    def check_engine(self, window: Window, metrics: StepMetrics) -> None:
        """Raise RolloutError if an engine's weights differ from the policy's, and a check is due."""
        if window.is_new and self.collector.check_is_due(self.progress):
            outputs = partial(self.passes.outputs, Stage.CHECK, self.policy)
            with metrics.stage(Stage.CHECK):
                self.collector.check_engine(self.progress, window.groups, outputs)
            self.start_step()

    def check_rows(self, window: Window, metrics: StepMetrics) -> None:
        """Prove the rows of the first step of a process, see `StartCheck`."""
        if self.start_check.is_due:
            with metrics.stage(Stage.CHECK):
                self.start_check.run(window.groups, self.progress.policy_version)

    def add_logprobs(
        self, stage: LogprobStage, model: Policy | Reference | None, groups: Sequence[ScoredGroup], metrics: StepMetrics
    ) -> None:
        """Compute the old or reference log-probs of the groups. Do nothing without groups or without a model."""
        if groups and model is not None:
            with metrics.stage(stage):
                self.passes.add_logprobs(stage, model, groups, self.contributes)

    def objective(self, window: Window, groups: Sequence[ScoredGroup], metrics: StepMetrics) -> Objective:
        """Build the objective of an optimizer step on these groups of the window."""
        lags = [self.progress.policy_version - group.group.policy_version for group in groups]
        metrics.add_mean("sampling/policy_version_lag", sum(lags), len(lags))
        metrics.add_mean(ITERATION, window.iteration, 1)

        def outputs() -> list[tuple[MicroBatch, PolicyOutput]]:
            with metrics.stage(Stage.ENTROPY):
                return self.passes.outputs(Stage.ENTROPY, self.policy, groups)

        return Objective.of_step(
            self.config, self.ranks, groups, window.groups, window.steps_per_window,
            self.contributes, outputs, self.loss_form,
        )  # fmt: skip

    def update(self, loss: Tensor, contributing: Sequence[ScoredGroup], metrics: StepMetrics) -> None:
        """Update the weights. Skip this if no group contributes, or if a loss or gradient of any rank is not finite."""
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
        self.progress.update_done(any_contributes and finite, finite)
        self.optimizer.strategy.clear_gradients()
        self.optimizer.advance_schedule()
        self.move_reference()

    def stop_if_nonfinite(self, finite: bool, groups: Sequence[ScoredGroup]) -> None:
        """Raise TrainingError after three consecutive steps with a non-finite loss or gradient."""
        if finite:
            return
        self.nonfinite_groups = list(groups)
        with self.ranks.agree():
            if self.progress.nonfinite_in_a_row + 1 >= MAX_NONFINITE_STEPS:
                raise TrainingError(
                    f"{MAX_NONFINITE_STEPS} steps in a row had a loss or gradient that is not finite. The weights are "
                    "those of the last finite step. A lower learning_rate often helps."
                )

    def move_reference(self) -> None:
        """Move the reference towards the policy every `ref_model_sync_steps` steps, if `sync_ref_model` is set."""
        algorithm = self.config.algorithm
        due = (self.progress.global_step + 1) % algorithm.ref_model_sync_steps == 0
        if algorithm.sync_ref_model and self.reference is not None and due:
            self.reference.move_towards_policy(algorithm.ref_model_mixup_alpha)

    def add_metrics(self, groups: Sequence[ScoredGroup], metrics: StepMetrics) -> None:
        """Add the groups' rewards and lengths, memory, and the models' compute counters."""
        self.collector.add_metrics(groups, metrics)
        metrics.add_mean("memory/micro_batch_tokens", self.recovery.budget.tokens, 1)
        metrics.add_values(torch.tensor([held_gib()], dtype=torch.float64), max="memory/held_gib")
        for stage, num_events in self.recovery.events.items():
            if num_events and self.ranks.is_main:
                metrics.add_sum(f"out_of_memory/{stage}", num_events)
        for model in filter(None, (self.policy, self.reference)):
            for name, value in model.counters.items():
                metrics.add_sum(f"compute/{name}", value)
