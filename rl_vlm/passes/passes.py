"""Passes of a model over a step's groups: scheduled under the token budget, and repeated if memory runs out.

groups ─ micro-batches ─ schedule ─► outputs without gradients
                                 └─► gradients of an objective
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from rl_vlm.algorithm.cut_completions import CutOutputs
from rl_vlm.algorithm.logprobs import store_logprobs
from rl_vlm.algorithm.objective import Objective
from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.collectives import Collectives
from rl_vlm.distributed.optimizer import Optimizer
from rl_vlm.log.metrics import StepMetrics
from rl_vlm.model.loading import usable_sharing
from rl_vlm.model.policy import Policy
from rl_vlm.model.reference import Reference
from rl_vlm.passes.recovery import Recovery
from rl_vlm.passes.rounds import Rounds
from rl_vlm.passes.schedule import Round, make_schedule
from rl_vlm.stages import LogprobStage, Stage
from rl_vlm.types import MicroBatch, PolicyOutput, ScoredGroup, synchronize, to_host

T = TypeVar("T")

Where = Callable[[ScoredGroup], bool]


class Passes(Rounds):
    """Passes of one rank. All ranks call each method together."""

    def __init__(
        self,
        config: RunConfig,
        ranks: Collectives,
        policy: Policy,
        reference: Reference | None,
        optimizer: Optimizer,
        recovery: Recovery,
    ) -> None:
        frozen = reference.frozen if reference is not None else None
        sharing = usable_sharing(policy.transformer, config.memory.prefix_sharing)
        super().__init__(config, ranks, policy, recovery, sharing, others=[] if frozen is None else [frozen])
        self.optimizer = optimizer

    @torch.no_grad()
    def outputs(
        self, stage: Stage, model: Policy | Reference, groups: Sequence[ScoredGroup], where: Where = lambda group: True
    ) -> list[tuple[MicroBatch, PolicyOutput]]:
        """Compute a model's outputs for the groups that `where` accepts, without gradients and in host memory."""
        together = self.optimizer.strategy.equal_calls  # ranks gather the weights in each forward

        def attempt() -> list[tuple[MicroBatch, PolicyOutput]]:
            rounds = self.schedule(list(filter(where, groups)), groups[0], model.vision, together)
            return self.outputs_of(rounds, model)

        self.policy.eval()
        try:
            return self.repeated(stage, attempt, together)
        finally:
            self.policy.train()

    def outputs_of(self, rounds: Sequence[Round], model: Policy | Reference) -> list[tuple[MicroBatch, PolicyOutput]]:
        """Run the forwards of rounds, and return their outputs in host memory."""
        outputs = []
        for work in rounds:
            with self.running(work):
                output = PolicyOutput(*map(to_host, model(work.forward)))
            outputs.append((work.forward.batch, output))
        synchronize(self.ranks.device)
        return [(batch, output) for batch, output in outputs if not batch.is_dummy]

    def add_logprobs(
        self, stage: LogprobStage, model: Policy | Reference, groups: Sequence[ScoredGroup], where: Where
    ) -> None:
        """Compute a model's log-probs for the groups that `where` accepts, and store them with the groups."""
        for batch, output in self.outputs(stage, model, groups, where):
            store_logprobs(batch, output.logprobs_NT, stage)

    def gradients(self, objective: Objective, keeps_logprobs: bool) -> tuple[Tensor, StepMetrics]:
        """Add the gradients of an objective. Return this rank's share of the step's loss, and metrics.

        With `keeps_logprobs`, store the forwards' log-probs with the groups, as their old log-probs.
        """
        attempt = partial(self.add_gradients, objective, keeps_logprobs)
        together = self.optimizer.strategy.is_sharded  # ranks reduce gradients to their shards in each backward
        loss, outputs, metrics = self.repeated(Stage.TRAINING, attempt, together)
        for batch, logprobs_NT in outputs:
            store_logprobs(batch, logprobs_NT, Stage.OLD_LOGPROBS)
        return loss, metrics

    def add_gradients(
        self, objective: Objective, keeps_logprobs: bool
    ) -> tuple[Tensor, list[tuple[MicroBatch, Tensor]], StepMetrics]:
        """Run the training passes once. Return the loss, the log-probs to keep, and metrics."""
        strategy, metrics, start = self.optimizer.strategy, StepMetrics(), time.perf_counter()
        step_loss, outputs, sums = torch.zeros((), device=self.ranks.device), [], []
        cut = self.cut_outputs(objective)
        for work in self.training_schedule(objective):
            batch = work.forward.batch
            with self.running(work), strategy.accumulating(last=work.is_last):
                output = self.optimizer.policy(work.forward)
                loss, found = objective.loss(batch, output, cut)
                strategy.backward(loss)
                for tower_backward in work.tower_backwards:
                    strategy.backward(self.optimizer.policy(tower_backward), is_share=False)
            step_loss += loss.detach()
            sums.append(found)
            if keeps_logprobs and not batch.is_dummy:
                outputs.append((batch, to_host(output.logprobs_NT.detach())))
        synchronize(self.ranks.device)  # once at the end: a wait in each micro-batch would leave the GPU idle
        metrics.add_loss_metrics(sums)
        if not strategy.is_sharded:  # shards make ranks wait in every micro-batch
            seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
            metrics.add_values(seconds, max="balance/seconds_max", mean="balance/seconds_mean")
        return step_loss, outputs, metrics

    @torch.no_grad()
    def cut_outputs(self, objective: Objective) -> CutOutputs:
        """Compute the outputs for completions that the training passes cut, if their losses need all tokens.

        If ranks communicate within the passes, all make equally many forwards.
        """
        batches = list(filter(objective.needs_all_tokens, self.micro_batches(objective.contributing)))
        together = self.optimizer.strategy.is_sharded and objective.config.rollout.max_contexts > 1
        if not batches and not together:
            return CutOutputs()
        ranks = self.ranks if together else None
        self.policy.eval()
        try:
            schedule = make_schedule(batches, self.policy.vision, objective.groups[0], ranks)
            return CutOutputs(self.outputs_of(schedule, self.policy))
        finally:
            self.policy.train()

    def training_schedule(self, objective: Objective) -> list[Round]:
        """Return the rounds of the training passes."""
        strategy, spare = self.optimizer.strategy, objective.groups[0]
        return self.schedule(
            objective.contributing, spare, self.policy.vision, strategy.is_sharded, strategy.needs_all_gradients
        )

    def repeated(self, stage: Stage, attempt: Callable[[], T], together: bool) -> T:
        """Run passes and return their result. Repeat them under a smaller budget if they run out of memory."""
        marks = [model.mark() for model in self.models]

        def undo() -> None:
            self.optimizer.strategy.clear_gradients()
            for go_back in marks:
                go_back()

        return self.recovery.repeat(stage, attempt, undo, together)
