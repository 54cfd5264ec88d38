"""GRPO, in the order of `Trainer.step`:

    draw rows ─ generate ─ rewards ─ advantages               once per generation window, see rollout/collector.py
    check the engine ─ prefetch ─ old and reference log-probs  once per generation window
    groups ─► micro-batches ─► log-probs ─► loss ─► gradients ─► update       every optimizer step

`run.py` calls it, evaluates, and writes files.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rl_vlm.algorithm.losses import (
    Denominators,
    LossInputs,
    LossMetrics,
    count_denominators,
    policy_loss,
    top_entropy_threshold,
    trained_completions,
)
from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.optimizer import Optimizer
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import TrainingError
from rl_vlm.log.metrics import StepMetrics, add_reward_metrics
from rl_vlm.memory.micro_batches import make_micro_batches, pad_with_dummies
from rl_vlm.model.loading import usable_sharing
from rl_vlm.model.policy import Policy
from rl_vlm.model.reference import Reference
from rl_vlm.model.vision import NO_RUNS, TowerRuns, VisionEncoder
from rl_vlm.rollout.agreement import check_agreement
from rl_vlm.rollout.collector import Collector
from rl_vlm.rollout.window import LogprobField, Window, store_logprobs, stored_logprobs
from rl_vlm.types import MicroBatch, PolicyOutput, Progress, ScoredGroup, Sharing, length_mask, pad_rows

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
    ) -> None:
        self.config = config
        self.ranks = ranks
        self.policy = policy
        self.reference = reference
        self.optimizer = optimizer
        self.collector = collector
        self.progress = progress
        self.engine_checked = config.rollout.engine == "hf"  # hf samples from the policy itself
        self.sharing: Sharing = usable_sharing(policy.transformer, config.memory.prefix_sharing)
        # Without gradients hybrid families share prompts by their cache, in one forward per prompt.
        by_cache = policy.family.hybrid and not optimizer.strategy.equal_calls
        self.logprob_sharing: Sharing = config.memory.prefix_sharing if by_cache else self.sharing
        self.nonfinite_groups: list[ScoredGroup] = []
        """Groups of the last step, if its loss or gradient was not finite."""
        self.is_updating = False
        """Whether the step's update has begun and the step is not complete, so that the weights belong to no step."""

    def step(self) -> StepMetrics:
        """Take one optimizer step and return its metrics."""
        metrics = StepMetrics()
        self.start_step()
        with metrics.stage("step"):
            window = self.collector.current(self.progress, metrics)  # draw, generate, reward, advantages
            if window.is_new:
                self.check_engine(window)
                self.collector.prefetch(self.progress)
                self.add_logprobs(window.later_groups(), self.policy, "old_logprobs", metrics)
                self.add_logprobs(window.groups, self.reference, "ref_logprobs", metrics)
            groups = window.step_groups()
            with metrics.stage("training"):
                batches = self.micro_batches(groups, self.sharing)
                loss = self.accumulate_gradients(window, groups, batches, metrics)
                self.update(loss, batches, metrics)
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

    def check_engine(self, window: Window) -> None:
        """Raise RolloutError if an engine has other weights than the policy. Checked once, before the first update."""
        if not self.engine_checked:
            check_agreement(self.config, self.ranks, self.collector.engine, window.groups, self.policy_outputs)
            self.engine_checked = True
            self.start_step()

    @torch.no_grad()
    def add_logprobs(
        self, groups: Sequence[ScoredGroup], model: Policy | Reference | None, name: LogprobField, metrics: StepMetrics
    ) -> None:
        """Compute the `old_logprobs` or `ref_logprobs` of the groups."""
        if not groups or model is None:
            return
        with metrics.stage(name):
            for batch, output in self.outputs(model, self.micro_batches(groups, self.logprob_sharing)):
                store_logprobs(batch, output.logprobs_NT, name)

    @torch.no_grad()
    def outputs(
        self, model: Policy | Reference, batches: Sequence[MicroBatch]
    ) -> Iterator[tuple[MicroBatch, PolicyOutput]]:
        """Compute a model's outputs without gradients, one micro-batch after the other. Dummies are left out."""
        self.policy.eval()
        for batch, runs in zip(batches, self.tower_runs(batches, model.vision), strict=True):
            output = model(batch, runs)
            if not batch.is_dummy:
                yield batch, output
        self.policy.train()

    def policy_outputs(self, groups: Sequence[ScoredGroup]) -> Iterator[tuple[MicroBatch, PolicyOutput]]:
        """Compute the policy's outputs for groups that differ between ranks, in equally many micro-batches."""
        return self.outputs(self.policy, self.pack(groups, self.logprob_sharing, spare=groups[0]))

    def micro_batches(self, groups: Sequence[ScoredGroup], sharing: Sharing) -> list[MicroBatch]:
        """Cut the groups that contribute to the loss into micro-batches, equally many on every rank."""
        contributing = [g for g in groups if g.has_variance or self.reference is not None]
        return self.pack(contributing, sharing, spare=groups[0])

    def pack(self, groups: Sequence[ScoredGroup], sharing: Sharing, spare: ScoredGroup) -> list[MicroBatch]:
        """Cut groups into micro-batches under the token budget, equally many on every rank with dummies of `spare`."""
        batches = make_micro_batches(
            groups,
            self.config.memory.micro_batch_tokens,
            sharing,
            self.policy.vision.tokens,
            mixes_prompts=not self.policy.family.cross_attends,
        )
        return pad_with_dummies(batches, self.ranks.max([len(batches)])[0], spare)

    def tower_runs(self, batches: Sequence[MicroBatch], vision: VisionEncoder) -> list[TowerRuns]:
        """Return the runs of the vision tower for each micro-batch, equally many on every rank."""
        plan = vision.plan(batches)
        most = self.ranks.max([num for runs in plan for num in runs.numbers])
        return [runs.at_least(most[3 * i : 3 * i + 3], vision.idle_prompt) for i, runs in enumerate(plan)]

    def accumulate_gradients(
        self, window: Window, groups: Sequence[ScoredGroup], batches: Sequence[MicroBatch], metrics: StepMetrics
    ) -> Tensor:
        """Run forward and backward over the micro-batches, and return this rank's share of the step's loss."""
        lags = [self.progress.policy_version - group.group.policy_version for group in groups]
        metrics.add_mean("sampling/policy_version_lag", sum(lags), len(lags))
        denominators = self.denominators(window, groups)
        threshold = self.entropy_threshold(batches)
        batches, tower_runs = self.training_runs(batches, spare=groups[0])
        step_loss = torch.zeros((), device=self.ranks.device)
        start = time.perf_counter()
        for i, batch in enumerate(batches):
            last = i == len(batches) - 1
            with self.optimizer.strategy.accumulating(last):
                output = self.optimizer.policy(batch, tower_runs[i])
                loss, sums = self.loss(batch, output, denominators, threshold)
                if last and not self.optimizer.strategy.is_sharded:  # shards make ranks wait in every micro-batch
                    seconds = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
                    metrics.add_values(seconds, max="balance/seconds_max", mean="balance/seconds_mean")
                self.optimizer.strategy.backward(loss)
                for prompt in tower_runs[i].after:
                    self.optimizer.strategy.backward(self.optimizer.policy(prompt), is_share=False)
            step_loss += loss.detach()
            metrics.add_loss_metrics(sums)
            if window.is_new and window.outlives_update and not batch.is_dummy:
                store_logprobs(batch, output.logprobs_NT.detach(), "old_logprobs")  # for later iterations
        return step_loss

    def training_runs(
        self, batches: Sequence[MicroBatch], spare: ScoredGroup
    ) -> tuple[list[MicroBatch], list[TowerRuns]]:
        """Return the micro-batches to train on, and the runs of the vision tower for each."""
        batches, tower_runs = list(batches), self.tower_runs(batches, self.policy.vision)
        if not self.optimizer.strategy.needs_all_gradients or self.policy.vision.is_frozen:
            return batches, tower_runs
        if batches and tower_runs[-1].after:  # the last backward must give a gradient to the language model as well
            batches, tower_runs = pad_with_dummies(batches, len(batches) + 1, spare), [*tower_runs, NO_RUNS]
        return batches, [replace(runs, within=max(1, runs.within)) for runs in tower_runs]

    def denominators(self, window: Window, groups: Sequence[ScoredGroup]) -> Denominators:
        """Return the denominators of this step's losses, over all ranks and including skipped groups.

        With `loss_normalizer` window, the tokens are the average over the steps of one pass over the window.
        """
        mask_truncated = self.config.algorithm.mask_truncated_completions
        local = count_denominators(groups, mask_truncated)
        if self.config.algorithm.loss_normalizer == "window":
            of_window = count_denominators(window.groups, mask_truncated)
            local = replace(local, tokens=of_window.tokens / window.steps_per_window)
        return Denominators(*self.ranks.sum([local.tokens, local.completions]))

    def entropy_threshold(self, batches: Sequence[MicroBatch]) -> float | None:
        """Return the entropy below which tokens of this step are not trained. Takes a forward pass over all of them."""
        quantile = self.config.algorithm.top_entropy_quantile
        if quantile == 1.0:
            return None
        outputs = self.outputs(self.policy, batches)
        gathered = self.ranks.gather([o.entropies_NT[self.trained_tokens(batch)].cpu() for batch, o in outputs])
        return top_entropy_threshold(torch.cat(gathered), quantile) if gathered else None

    def trained_tokens(self, batch: MicroBatch) -> Tensor:
        """Return a mask of shape (N, T) of the tokens in the loss."""
        mask_truncated = self.config.algorithm.mask_truncated_completions
        trains = torch.cat([trained_completions(s.scored, mask_truncated)[s.members] for s in batch.subgroups])
        return (length_mask([len(c.token_ids) for c in batch.completions]) & trains[:, None]).to(self.ranks.device)

    def loss(
        self, batch: MicroBatch, output: PolicyOutput, denominators: Denominators, threshold: float | None
    ) -> tuple[Tensor, LossMetrics]:
        """Return the micro-batch's share of the step's loss, and its metrics."""
        if batch.is_dummy:
            return 0.0 * output.logprobs_NT.sum(), {}
        device = self.ranks.device
        generator_logprobs_NT = None
        if self.config.rollout.is_off_policy:
            generator_logprobs_NT = pad_rows([c.generator_logprobs for c in batch.completions]).to(device)
        inputs = LossInputs(
            policy_logprobs_NT=output.logprobs_NT,
            old_logprobs_NT=stored_logprobs(batch, "old_logprobs", device),
            ref_logprobs_NT=stored_logprobs(batch, "ref_logprobs", device),
            advantages_N=torch.cat([s.scored.advantages_G[s.members] for s in batch.subgroups]).to(device),
            mask_NT=self.trained_tokens(batch),
            entropies_NT=output.entropies_NT,
            entropy_threshold=threshold,
            generator_logprobs_NT=generator_logprobs_NT,
        )
        return policy_loss(inputs, self.config.algorithm, denominators, self.config.rollout.max_completion_length)

    def update(self, loss: Tensor, batches: Sequence[MicroBatch], metrics: StepMetrics) -> None:
        """Update the weights, unless no group contributes, or a loss or gradient of any rank is not finite."""
        loss_sum = self.ranks.sum([loss.item()])[0]
        norm, finite = 0.0, True
        if batches:
            self.is_updating = True
            norm, finite = self.optimizer.strategy.update(math.isfinite(loss_sum))
            self.is_updating = finite
        metrics.add_mean("loss", loss_sum, 1)
        metrics.add_mean("grad_norm", norm, 1)
        metrics.add_mean("learning_rate", self.optimizer.learning_rate, 1)
        metrics.add_mean("skipped_updates/no_variance", float(not batches), 1)
        metrics.add_mean("skipped_updates/nonfinite", float(not finite), 1)
        self.stop_if_nonfinite(finite, batches)
        self.is_updating = True
        self.progress.policy_version += bool(batches and finite)
        self.optimizer.strategy.clear_gradients()
        self.optimizer.advance_schedule()
        self.move_reference()

    def stop_if_nonfinite(self, finite: bool, batches: Sequence[MicroBatch]) -> None:
        """Raise TrainingError after three steps in a row that were not finite."""
        if finite:
            self.progress.nonfinite_in_a_row = 0
            return
        self.nonfinite_groups = [subgroup.scored for batch in batches for subgroup in batch.subgroups]
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
        for model in filter(None, (self.policy, self.reference)):
            for name, value in model.counters.items():
                metrics.add_sum(f"compute/{name}", value)
