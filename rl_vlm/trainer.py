"""The training loop, in the order of `Trainer.step`:

dataset rows ─ prompts ─► generate ─► reward ─► advantages                    once per generation window
groups of the step ─► micro-batches ─► log-probs ─► loss ─► gradient ─► update          every optimizer step
metrics.jsonl, completions/, checkpoint-N/, summary.json                                  see run_directory.py
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from rl_vlm import checkpoint
from rl_vlm.batching import make_micro_batches, pad_with_dummies
from rl_vlm.collector import Collector
from rl_vlm.config.batch_algebra import plan_batches, total_optimizer_steps
from rl_vlm.config.load import check_trainable
from rl_vlm.config.schema import RunConfig
from rl_vlm.data import Rows, load_rows
from rl_vlm.engine import Engine
from rl_vlm.errors import ConfigError, RLVLMError, RolloutError, TrainingError
from rl_vlm.evaluation import Evaluator
from rl_vlm.generation.sampling import sampling_of
from rl_vlm.loading import (
    Reference,
    initial_checkpoint,
    load_policy,
    load_reference,
    load_weights,
    why_not_shared,
)  # fmt: skip
from rl_vlm.losses import (
    Denominators,
    LossInputs,
    LossMetrics,
    count_denominators,
    policy_loss,
    top_entropy_threshold,
    trained_completions,
)  # fmt: skip
from rl_vlm.metrics import StepMetrics, add_reward_metrics
from rl_vlm.policy import Policy
from rl_vlm.prefetch import Prefetcher, PromptSource
from rl_vlm.progress import ProgressBar
from rl_vlm.prompts import PromptBuilder, drop_long_prompts, load_processor
from rl_vlm.report.curve import draw_curve
from rl_vlm.resume import Progress, restore_run, save_run
from rl_vlm.reward import RewardSuite
from rl_vlm.rollout_engines import training_engine
from rl_vlm.run_directory import RunDirectory
from rl_vlm.sampler import PromptSampler
from rl_vlm.types import MicroBatch, RolloutRequest, ScoredGroup, TokenScores, TrainerState, length_mask, pad_rows
from rl_vlm.vision import VisionEncoder, spare_sample
from rl_vlm.weight_sync import PolicyWeights
from rl_vlm.window import LogprobField, Window, keep, kept

Sharing = Literal["auto", "shared", "dense"]

MAX_NONFINITE_STEPS = 3
NUM_CHECKED_GROUPS = 2
MAX_CHECKED_TOKENS = 64

logger = logging.getLogger(__name__)


def train(config: RunConfig) -> dict[str, Any]:
    """Run a training job, or go on with one, and return its summary. Raises RLVLMError for what a user can mend."""
    check_trainable(config)
    trainer = Trainer(config)
    try:
        return trainer.run()
    finally:
        trainer.close()


class Trainer:
    """One rank of a GRPO run. `step` is the algorithm; the rest prepares, records and restores it."""

    def __init__(self, config: RunConfig) -> None:
        train = config.train
        self.config = config
        self.engine = Engine(train.output_dir, config.log)
        self.plan = plan_batches(config, self.engine.world_size)
        self.directory = RunDirectory(Path(train.output_dir))
        resumed = checkpoint.find(train.resume_from_checkpoint, self.directory.path)
        self.directory.refuse_another_run(config, resumed)
        checkpoint.seed_random_generators(train.seed)

        rows = load_rows(config.data, "train")
        self.rewards = RewardSuite(config.rewards)
        self.rewards.check_columns(rows.sample(0).columns)
        initial = initial_checkpoint(config, self.engine)
        self.processor = load_processor(initial, config.model, config.data)
        self.policy = load_policy(config, initial, resumed).to(self.engine.device)
        self.reference = load_reference(config, initial, self.policy, resumed)
        builder = PromptBuilder(self.processor, config.data)
        self.encoders = [scorer.vision for scorer in (self.policy, self.reference) if scorer]
        if self.engine.world_size > 1:
            spare = builder.build(spare_sample())
            for vision in self.encoders:
                vision.spare = spare
        row_indices, dropped = usable_rows(rows, builder, config.data.max_prompt_length)
        self.total_steps = total_optimizer_steps(config, self.plan, len(row_indices))
        self.engine.prepare(self.policy.train(), train, self.total_steps)
        self.weights = PolicyWeights(self.policy, config.rollout.lora_sync)
        self.generator = training_engine(config, initial, self.weights, builder, self.engine)
        self.sync_is_due = True  # nothing has been sent
        self.generator_checked = config.rollout.engine == "hf"  # which samples from the policy itself
        try:
            self.set_up_steps(PromptSource(rows, row_indices, builder), resumed)
            self.engine.together(lambda: self.prepare_directory(resumed, dropped))
        except BaseException:
            self.generator.close()
            raise

    def set_up_steps(self, source: PromptSource, resumed: Path | None) -> None:
        """What draws, collects and evaluates; a resumed run is brought to where it was."""
        config = self.config
        self.sampler = PromptSampler(
            len(source.row_indices),
            self.plan.prompts_per_step,
            config.train.seed,
            config.data.shuffle_dataset,
            self.engine.rank,
            self.engine.world_size,
        )
        self.prefetcher = Prefetcher(source, self.sampler, self.plan.steps_per_window, config.data)
        self.collector = Collector(
            config,
            self.plan,
            self.engine,
            self.directory,
            self.sampler,
            self.prefetcher,
            self.generator,
            self.rewards,
        )
        self.evaluator = None
        if config.data.eval_dataset_name:
            self.evaluator = Evaluator(config, self.engine, source.builder, self.generator, self.rewards)
        self.sharing: Sharing = self.usable_sharing()
        by_cache = self.policy.family.hybrid  # which needs no rows, and takes no gradients
        self.scoring_sharing: Sharing = config.memory.prefix_sharing if by_cache else self.sharing
        self.progress = Progress()
        self.window: Window | None = None
        if resumed:
            restore_run(self, resumed)

    def prepare_directory(self, resumed: Path | None, dropped: Sequence[dict[str, Any]]) -> None:
        """Last of the preparations, since it may delete an earlier run."""
        window, next_window = self.window, self.progress.global_step
        if self.collector.ready:
            next_window += (window.updates_left if window else 0) + 1
        elif window and window.updates_done == 0:
            next_window += 1
        if self.engine.is_main:
            self.directory.prepare(self.config, checkpoint.step_of(resumed) if resumed else None, next_window, dropped)

    def step(self) -> StepMetrics:
        """One optimizer step: the algorithm."""
        metrics = StepMetrics()
        self.start_counting()
        with metrics.stage("step"):
            window = self.current_window(metrics)
            groups = window.step_groups()
            lags = [self.progress.policy_version - group.group.policy_version for group in groups]
            metrics.add_mean("sampling/policy_version_lag", sum(lags), len(lags))
            denominators = self.denominators(groups)
            batches = self.micro_batches(groups, self.sharing)
            with metrics.stage("training"):
                threshold = self.entropy_threshold(batches)
                vision_calls = self.vision_calls(batches, self.policy.vision)
                loss = torch.zeros((), device=self.engine.device)
                for i, batch in enumerate(batches):
                    with self.engine.accumulating(last=i == len(batches) - 1):
                        scores = self.engine.wrapped(batch, vision_calls[i])
                        batch_loss, sums = self.loss(batch, scores, denominators, threshold)
                        self.engine.backward(batch_loss)
                    loss += batch_loss.detach()
                    metrics.add_sums(sums)
                    self.remember_logprobs(batch, scores)
                self.update(loss, batches, metrics)
            window.updates_done += 1
        self.add_metrics(groups, metrics)
        return metrics

    def start_counting(self) -> None:
        """Forget what was counted, and kept of images, by an evaluation, a check, or an earlier step."""
        self.policy.counters.clear()
        for vision in self.encoders:
            vision.features.clear()

    def current_window(self, metrics: StepMetrics) -> Window:
        """The window in training, or a new one with the log-probs that its later updates need."""
        if self.window is None or self.window.is_spent:
            self.window = self.collector.take_ahead(metrics)
        if self.window is None or self.window.updates_done == 0:
            self.sync_generator(self.config.rollout.weight_sync_steps, metrics)
            self.window = self.window or self.collector.collect(self.state, metrics)
            if not self.generator_checked:
                self.check_generator(self.window.groups)
            self.collect_ahead(self.window.updates_left)
            with metrics.stage("old_logprobs"):
                self.score(self.window.later_groups(), self.policy, "old_logprobs")
            if self.reference is not None:
                with metrics.stage("ref_logprobs"):
                    self.score(self.window.groups, self.reference, "ref_logprobs")
        return self.window

    def collect_ahead(self, num_updates: int) -> None:
        """With `max_staleness`, sample the window that training will reach after these updates."""
        next_step = self.progress.global_step + num_updates
        if self.config.rollout.max_staleness and not self.collector.ready and next_step < self.total_steps:
            self.collector.collect_ahead(replace(self.state, global_step=next_step))

    @torch.no_grad()
    def check_generator(self, groups: Sequence[ScoredGroup]) -> None:
        """Before the first step: raises RolloutError if an engine has other weights than the policy.

        By short completions to the window's first prompts, which are of the weights of now, as the window may not be.
        """
        self.generator_checked = True
        rollout = self.config.rollout
        length = min(rollout.max_completion_length, MAX_CHECKED_TOKENS)
        sampling = sampling_of(self.config, rollout.num_generations, rollout.temperature)
        requests = [RolloutRequest(f"check/{g.group.group_id}", g.group.prompt) for g in groups[:NUM_CHECKED_GROUPS]]
        sampled = self.engine.together(
            lambda: self.generator.generate(requests, replace(sampling, max_completion_length=length))
        )
        fresh = [replace(scored, group=group) for scored, group in zip(groups, sampled, strict=False)]
        self.policy.eval()
        gaps = []
        for batch in self.cut(fresh, self.scoring_sharing):
            mask = length_mask([len(c.token_ids) for c in batch.completions], self.engine.device)
            logprobs_NT = pad_rows([c.generator_logprobs for c in batch.completions]).to(self.engine.device)
            gaps.append((self.policy(batch).logprobs_NT - logprobs_NT)[mask].abs())
        self.policy.train()
        self.start_counting()
        self.engine.together(lambda: check_gap(torch.cat(gaps), self.config.vllm.vllm_max_logp_difference))

    def sync_generator(self, max_updates_behind: int, metrics: StepMetrics) -> None:
        """Send the generator the policy's weights if it is this many updates behind.

        Also behind a checkpoint, since a run that is resumed from it must send them.
        """
        version = self.progress.policy_version
        if not self.sync_is_due and version - self.generator.policy_version < max_updates_behind:
            return
        self.sync_is_due = False
        with metrics.stage("weight_sync"):
            num_bytes = self.engine.together(lambda: self.generator.sync(self.weights, version))
        metrics.add_sum("weight_sync/bytes", num_bytes)

    @property
    def state(self) -> TrainerState:
        return TrainerState(self.progress.global_step, self.total_steps, self.sampler.epoch)

    def denominators(self, groups: Sequence[ScoredGroup]) -> Denominators:
        """What this step's losses are divided by, over all ranks and before any group is skipped."""
        local = count_denominators(groups, self.config.algorithm.mask_truncated_completions)
        return Denominators(*self.engine.sum([local.tokens, local.completions]))

    def micro_batches(self, groups: Sequence[ScoredGroup], sharing: Sharing) -> list[MicroBatch]:
        """The groups that have something to teach, cut to the token budget, equally many on every rank."""
        batches = self.cut([g for g in groups if g.has_variance or self.reference is not None], sharing)
        return pad_with_dummies(batches, self.engine.max([len(batches)])[0], spare=groups[0])

    def cut(self, groups: Sequence[ScoredGroup], sharing: Sharing) -> list[MicroBatch]:
        """Groups, cut to the token budget."""
        return make_micro_batches(
            groups,
            self.config.memory.micro_batch_tokens,
            sharing,
            self.policy.vision.tokens,
            mixes_prompts=not self.policy.family.cross_attends,
        )

    def vision_calls(self, batches: Sequence[MicroBatch], vision: VisionEncoder) -> list[int]:
        """How often the vision tower runs in each micro-batch: as often on every rank."""
        return self.engine.max(vision.count_calls([[s.prompt for s in batch.subgroups] for batch in batches]))

    @torch.no_grad()
    def score(self, groups: Sequence[ScoredGroup], scorer: Policy | Reference, name: LogprobField) -> None:
        """Fill `old_logprobs` or `ref_logprobs` of the groups."""
        if not groups:
            return
        self.policy.eval()
        batches = self.micro_batches(groups, self.scoring_sharing)
        for batch, num_vision_calls in zip(batches, self.vision_calls(batches, scorer.vision), strict=True):
            scores = scorer(batch, num_vision_calls)
            if batch.weight:
                keep(batch, scores.logprobs_NT, name)
        self.policy.train()

    @torch.no_grad()
    def entropy_threshold(self, batches: Sequence[MicroBatch]) -> float | None:
        """The entropy below which tokens of this step do not train; a pass of its own, since it spans all of them."""
        quantile = self.config.algorithm.top_entropy_quantile
        if quantile == 1.0:
            return None
        vision_calls = self.vision_calls(batches, self.policy.vision)
        scores = [self.policy(batch, calls).entropies_NT for batch, calls in zip(batches, vision_calls, strict=True)]
        entropies = [s[self.trained_tokens(b)] for s, b in zip(scores, batches, strict=True) if b.weight]
        gathered = self.engine.gather([torch.cat(entropies).cpu()] if entropies else [])
        return top_entropy_threshold(torch.cat(gathered), quantile) if gathered else None

    def trained_tokens(self, batch: MicroBatch) -> Tensor:
        """Mask of shape (N, T) of the tokens in the loss."""
        mask_truncated = self.config.algorithm.mask_truncated_completions
        trains = torch.cat([trained_completions(s.scored, mask_truncated)[s.members] for s in batch.subgroups])
        return (length_mask([len(c.token_ids) for c in batch.completions]) & trains[:, None]).to(self.engine.device)

    def loss(
        self, batch: MicroBatch, scores: TokenScores, denominators: Denominators, threshold: float | None
    ) -> tuple[Tensor, LossMetrics]:
        """The micro-batch's share of the step's loss, and its metrics."""
        if not batch.weight:
            return 0.0 * scores.logprobs_NT.sum(), {}
        generator_logprobs_NT = None
        if self.config.rollout.is_off_policy:
            generator_logprobs_NT = pad_rows([c.generator_logprobs for c in batch.completions]).to(self.engine.device)
        inputs = LossInputs(
            policy_logprobs_NT=scores.logprobs_NT,
            old_logprobs_NT=kept(batch, "old_logprobs", self.engine.device),
            ref_logprobs_NT=kept(batch, "ref_logprobs", self.engine.device),
            advantages_N=torch.cat([s.scored.advantages_G[s.members] for s in batch.subgroups]).to(self.engine.device),
            mask_NT=self.trained_tokens(batch),
            entropies_NT=scores.entropies_NT,
            entropy_threshold=threshold,
            generator_logprobs_NT=generator_logprobs_NT,
        )
        return policy_loss(inputs, self.config.algorithm, denominators, self.config.rollout.max_completion_length)

    def remember_logprobs(self, batch: MicroBatch, scores: TokenScores) -> None:
        """The first update's own log-probs are the old ones of its groups in later iterations."""
        assert self.window is not None
        if self.window.updates_done == 0 and self.window.outlives_update and batch.weight:
            keep(batch, scores.logprobs_NT.detach(), "old_logprobs")

    def update(self, loss: Tensor, batches: Sequence[MicroBatch], metrics: StepMetrics) -> None:
        """Move the weights, unless no group had variance or something is not finite on any rank."""
        loss_sum = self.engine.sum([loss.item()])[0]
        norm = self.engine.gradient_norm(self.config.train.max_grad_norm) if batches else 0.0
        finite = math.isfinite(loss_sum) and math.isfinite(norm)
        if batches and finite:
            self.engine.update()
            self.progress.policy_version += 1
        self.engine.zero_grad()
        metrics.add_mean("loss", loss_sum, 1)
        metrics.add_mean("grad_norm", norm, 1)
        metrics.add_mean("learning_rate", self.engine.learning_rate, 1)
        metrics.add_mean("skipped_updates/no_variance", float(not batches), 1)
        metrics.add_mean("skipped_updates/nonfinite", float(not finite), 1)
        self.stop_if_nonfinite(finite, batches)
        self.engine.advance_schedule()
        self.move_reference()

    def move_reference(self) -> None:
        """`sync_ref_model`: the reference follows the policy at a distance."""
        algorithm = self.config.algorithm
        due = (self.progress.global_step + 1) % algorithm.ref_model_sync_steps == 0
        if algorithm.sync_ref_model and self.reference is not None and due:
            self.reference.move_towards_policy(algorithm.ref_model_mixup_alpha)

    def stop_if_nonfinite(self, finite: bool, batches: Sequence[MicroBatch]) -> None:
        """Save the batch of a step that was not finite. Raises TrainingError after three such steps in a row."""
        if finite:
            self.progress.nonfinite_in_a_row = 0
            return
        self.progress.nonfinite_in_a_row += 1
        path = self.directory.path / f"nonfinite-step-{self.progress.global_step + 1}-rank-{self.engine.rank}.pt"
        torch.save([subgroup.scored for batch in batches for subgroup in batch.subgroups], path)
        logger.warning("loss or gradient is not finite; the step was skipped and its batch saved to %s", path)
        if self.progress.nonfinite_in_a_row >= MAX_NONFINITE_STEPS:
            raise TrainingError(
                f"{MAX_NONFINITE_STEPS} steps in a row had a loss or gradient that is not finite; the last batch is in "
                f"{path}. The weights are those of the last finite step. A lower learning_rate often helps."
            )

    def add_metrics(self, groups: Sequence[ScoredGroup], metrics: StepMetrics) -> None:
        """Rewards, lengths, and how much the shared prefixes saved."""
        add_reward_metrics(metrics, groups, self.rewards.names)
        for name, value in self.policy.counters.items():
            metrics.add_sum(f"compute/{name}", value)

    # The run around the steps

    def run(self) -> dict[str, Any]:
        """All steps with their records; returns the summary. An error in the data leaves a checkpoint behind."""
        log = self.config.log
        self.engine.start_trackers(log.run_name or self.directory.path.name, self.config.model_dump())
        train = self.config.train
        step, silent = self.progress.global_step, not self.engine.is_main
        with ProgressBar(step, self.total_steps, plain=log.disable_tqdm, silent=silent) as bar:
            if self.evaluator and train.eval_on_start and self.progress.eval_latest is None:
                self.progress.eval_before = self.evaluate()
                self.record({"step": 0, **prefixed(self.progress.eval_before)})
                self.save_if_due(is_last=False)
            while self.progress.global_step < self.total_steps:
                line = self.next_step()
                bar.show(line)
        return self.finish()

    def next_step(self) -> dict[str, Any]:
        """One step with its line in `metrics.jsonl`, its evaluation and its checkpoint."""
        try:
            metrics = self.step()
        except RLVLMError:
            save_run(self)  # of the last complete step: whatever is wrong can be mended and the run resumed
            raise
        train, progress = self.config.train, self.progress
        progress.global_step += 1
        line = {"step": progress.global_step, "epoch": self.sampler.epoch} | metrics.reduce(self.engine.gather)
        line["data_wait_fraction"] = line.get("time/data", 0.0) / line["time/step"]
        progress.train_seconds += line["time/step"]
        is_last = progress.global_step == self.total_steps
        try:
            if self.evaluator and (is_last or is_due(progress.global_step, train.eval_steps)):
                line |= prefixed(self.evaluate())
        except RLVLMError:
            self.record(line)
            save_run(self)
            raise
        self.record(line)
        self.save_if_due(is_last)
        return line

    def save_if_due(self, is_last: bool) -> None:
        """Save every `save_steps`, at the end, and where the evaluation is the best so far."""
        progress = self.progress
        is_periodic = progress.global_step > 0 and is_due(progress.global_step, self.config.train.save_steps)
        if is_last or is_periodic or progress.best_step == progress.global_step:
            save_run(self)

    def evaluate(self) -> dict[str, float]:
        """Metrics on the held-out rows; with `load_best_model_at_end`, notes the best step so far."""
        assert self.evaluator is not None
        progress, train = self.progress, self.config.train
        self.engine.together(self.collector.wait)
        self.sync_generator(1, StepMetrics())
        metrics = progress.eval_latest = self.evaluator.run(self.state).metrics
        if train.load_best_model_at_end:
            name = train.metric_for_best_model.removeprefix("eval_")
            if name not in metrics:
                raise ConfigError(f"train.metric_for_best_model {name} is not among the metrics: {', '.join(metrics)}")
            sign = 1 if train.greater_is_better else -1
            if progress.eval_best is None or sign * metrics[name] > sign * progress.eval_best[name]:
                progress.best_step, progress.eval_best = progress.global_step, metrics
        return metrics

    def record(self, line: dict[str, Any]) -> None:
        if self.engine.is_main:
            self.directory.append_metrics(line)
        if is_due(line["step"], self.config.log.logging_steps):
            self.engine.report({k: v for k, v in line.items() if k != "step"}, line["step"])

    def finish(self) -> dict[str, Any]:
        """Write the summary and the curve; with `load_best_model_at_end`, return to the best weights."""
        progress = self.progress
        summary = {
            "optimizer_steps": progress.global_step,
            "train_seconds": progress.train_seconds,
            "eval_before": progress.eval_before,
            "eval_after": progress.eval_latest,
            "checkpoint": str(checkpoint.checkpoint_path(self.directory.path, progress.global_step)),
        }
        if progress.best_step is not None:
            summary["checkpoint"] = str(checkpoint.checkpoint_path(self.directory.path, progress.best_step))
            load_weights(self.policy, summary["checkpoint"], self.config.model)
            summary["eval_after"] = progress.eval_best
        if self.engine.is_main:
            self.directory.write_summary(summary)
            draw_curve(self.directory.metrics.read(), self.directory.path / "reward.png")
        return summary

    def usable_sharing(self) -> Sharing:
        """`prefix_sharing`, or `dense` with the reason logged where this model cannot share."""
        reason = why_not_shared(self.policy.transformer)
        if reason is None:
            return self.config.memory.prefix_sharing
        logger.warning("prefixes are not shared in training passes: %s", reason)
        return "dense"

    def close(self) -> None:
        self.generator.close()
        self.collector.close()
        self.prefetcher.close()
        self.rewards.close()
        self.engine.close()


def check_gap(differences: Tensor, bound: float) -> None:
    """Raises RolloutError if the mean difference of log-probs between generator and trainer is above the bound."""
    mean, largest = differences.mean().item(), differences.max().item()
    if not mean <= bound:
        raise RolloutError(
            f"Log-probs of the first rollouts differ between generator and trainer by {mean:.3g} in the mean and "
            f"{largest:.3g} at most; vllm.vllm_max_logp_difference allows a mean of {bound:g}. Are model, precision "
            "(model.dtype) and pixel limits the same on both sides? Some difference is normal in bfloat16."
        )


def is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def prefixed(metrics: dict[str, float]) -> dict[str, float]:
    return {f"eval_{name}": value for name, value in metrics.items()}


def usable_rows(rows: Rows, builder: PromptBuilder, limit: int | None) -> tuple[list[int], list[dict[str, Any]]]:
    """Indices of the rows whose prompts are within the limit, and the rows that are dropped."""
    return (list(range(len(rows))), []) if limit is None else drop_long_prompts(rows, builder, limit)
