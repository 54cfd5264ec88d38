"""Passes of a model over the groups of a step: in micro-batches under the token budget, repeated if memory runs out.

groups ─ micro-batches, equally many on ranks that run together ─► outputs without gradients
                                                               └─► gradients of an objective
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from rl_vlm.algorithm.logprobs import store_logprobs
from rl_vlm.algorithm.objective import Objective
from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.optimizer import Optimizer
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.log.metrics import StepMetrics
from rl_vlm.model.loading import usable_sharing
from rl_vlm.model.policy import Policy
from rl_vlm.model.reference import Reference
from rl_vlm.model.vision import NO_RUNS, TowerRuns, VisionEncoder
from rl_vlm.passes.micro_batches import make_micro_batches, pad_with_dummies
from rl_vlm.passes.recovery import Recovery
from rl_vlm.stages import Stage
from rl_vlm.types import MicroBatch, PolicyOutput, ScoredGroup, Sharing, synchronize, to_host

T = TypeVar("T")

Where = Callable[[ScoredGroup], bool]


class Passes:
    """Passes of one rank. All ranks call each method together."""

    def __init__(
        self,
        config: RunConfig,
        ranks: Ranks,
        policy: Policy,
        reference: Reference | None,
        optimizer: Optimizer,
        recovery: Recovery,
    ) -> None:
        self.ranks = ranks
        self.policy = policy
        self.reference = reference
        self.optimizer = optimizer
        self.recovery = recovery
        self.sharing: Sharing = usable_sharing(policy.transformer, config.memory.prefix_sharing)

    @torch.no_grad()
    def outputs(
        self,
        stage: Stage,
        model: Policy | Reference,
        groups: Sequence[ScoredGroup],
        where: Where = lambda group: True,
    ) -> list[tuple[MicroBatch, PolicyOutput]]:
        """Compute a model's outputs without gradients, in host memory, for the groups that `where` is true of."""
        together = self.optimizer.strategy.equal_calls

        def attempt() -> list[tuple[MicroBatch, PolicyOutput]]:
            batches, outputs = self.pack(list(filter(where, groups)), groups[0], together), []
            for batch, runs in zip(batches, self.tower_runs(batches, model.vision, together), strict=True):
                with self.recovery.watch(batch):
                    outputs.append((batch, PolicyOutput(*map(to_host, model(batch, runs)))))
            synchronize(self.ranks.device)
            return [(batch, output) for batch, output in outputs if not batch.is_dummy]

        self.policy.eval()
        try:
            return self.repeated(stage, attempt, together)
        finally:
            self.policy.train()

    def gradients(self, objective: Objective, keeps_logprobs: bool) -> tuple[Tensor, StepMetrics]:
        """Add the gradients of an objective. Returns this rank's share of the step's loss, and metrics.

        `keeps_logprobs` stores the log-probs of the forwards with the groups, as their old log-probs.
        """
        attempt = partial(self.add_gradients, objective, keeps_logprobs)
        loss, outputs, metrics = self.repeated(Stage.TRAINING, attempt, together=self.optimizer.strategy.is_sharded)
        for batch, logprobs_NT in outputs:
            store_logprobs(batch, logprobs_NT, Stage.OLD_LOGPROBS)
        return loss, metrics

    def add_gradients(
        self, objective: Objective, keeps_logprobs: bool
    ) -> tuple[Tensor, list[tuple[MicroBatch, Tensor]], StepMetrics]:
        """Run the training passes once. Returns the loss, the log-probs to keep, and metrics."""
        strategy, metrics, start = self.optimizer.strategy, StepMetrics(), time.perf_counter()
        spare = objective.groups[0]
        batches = self.pack(objective.contributing, spare, together=strategy.is_sharded)
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
            if keeps_logprobs and not batch.is_dummy:
                outputs.append((batch, to_host(output.logprobs_NT.detach())))
        synchronize(self.ranks.device)  # once for all: a wait in a micro-batch would leave a GPU idle
        metrics.add_loss_metrics(sums)
        if not strategy.is_sharded:  # shards make ranks wait in every micro-batch
            seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            metrics.add_values(seconds, max="balance/seconds_max", mean="balance/seconds_mean")
        return step_loss, outputs, metrics

    def repeated(self, stage: Stage, attempt: Callable[[], T], together: bool) -> T:
        """Run passes over micro-batches, again under a smaller budget if they run out of memory.

        `together` says whether ranks communicate within them.
        """
        frozen = self.reference and self.reference.frozen
        marks = [model.mark() for model in (self.policy, frozen) if model is not None]

        def undo() -> None:
            self.optimizer.strategy.clear_gradients()
            for go_back in marks:
                go_back()

        return self.recovery.repeat(stage, attempt, undo, together)

    def pack(self, groups: Sequence[ScoredGroup], spare: ScoredGroup, together: bool) -> list[MicroBatch]:
        """Cut groups into micro-batches under the token budget. If ranks run them together, dummies of `spare` make
        them equally many on every rank.
        """
        batches = make_micro_batches(
            groups,
            self.recovery.budget.tokens,
            self.sharing,
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
