"""A training run: builds the parts, loops over steps, evaluates, saves and restores.

Run.__init__    rows, rewards, policy, reference, optimizer, engine, collector ─► Trainer
Run.run         evaluate ─ step ─ step … evaluate ─ save … ─► summary
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from rl_vlm import checkpoint
from rl_vlm.config.batches import plan_batches, total_optimizer_steps
from rl_vlm.config.load import check_trainable
from rl_vlm.config.schema import RunConfig
from rl_vlm.data.loader import PromptLoader, PromptSource
from rl_vlm.data.prompts import PromptBuilder, load_processor, usable_rows
from rl_vlm.data.sampler import PromptSampler
from rl_vlm.data.samples import load_rows
from rl_vlm.distributed.optimizer import Optimizer
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.trackers import Trackers
from rl_vlm.errors import CheckpointError, ConfigError, RLVLMError, TrainingError
from rl_vlm.evaluation import Evaluator, check_rewarded
from rl_vlm.log.completions import CompletionsLog
from rl_vlm.log.curve import draw_curve
from rl_vlm.log.directory import RunDirectory
from rl_vlm.log.metrics import totals
from rl_vlm.log.progress_bar import ProgressBar, training_figures
from rl_vlm.model.loading import initial_checkpoint, load_policy, load_weights, save_policy
from rl_vlm.model.policy import Policy
from rl_vlm.model.reference import Reference, load_reference
from rl_vlm.model.vision import idle_sample
from rl_vlm.reward import RewardSuite
from rl_vlm.rollout.build import training_engine
from rl_vlm.rollout.collector import Collector
from rl_vlm.rollout.engine import SyncedEngine
from rl_vlm.rollout.weights import PolicyWeights
from rl_vlm.trainer import Trainer
from rl_vlm.types import Progress

logger = logging.getLogger(__name__)


def train(config: RunConfig) -> dict[str, Any]:
    """Run a training job, or resume one, and return its summary. Raises RLVLMError for errors that a user can fix."""
    check_trainable(config)
    run = Run(config)
    try:
        return run.run()
    finally:
        run.close()


@dataclass
class Record:
    """Measurements of a run so far; saved in checkpoints."""

    train_seconds: float = 0.0
    eval_before: dict[str, float] | None = None
    eval_latest: dict[str, float] | None = None
    best_step: int | None = None
    eval_best: dict[str, float] | None = None


class Run:
    """One rank of a training run, around its `Trainer`."""

    def __init__(self, config: RunConfig) -> None:
        """Build all parts, and restore their states if the run is resumed."""
        train = config.train
        self.config = config
        self.ranks = Ranks()
        self.trackers = Trackers(config.log, train.output_dir)
        self.plan = plan_batches(config, self.ranks.world_size)
        self.directory = RunDirectory(Path(train.output_dir).absolute())  # a function may change the working directory
        resumed = checkpoint.find(train.resume_from_checkpoint, self.directory.path)
        self.directory.refuse_another_run(config, resumed)
        checkpoint.seed_random_generators(train.seed)

        rows = load_rows(config.data, "train")
        self.rewards = RewardSuite(config.rewards)
        first = rows[0]
        self.rewards.check_columns(first.columns)
        self.rewards.use_forms(self.ranks.gather(self.rewards.find_forms(first) if self.ranks.is_main else []))
        initial = initial_checkpoint(config, self.ranks)
        self.processor = load_processor(initial, config.model, config.data)
        builder = PromptBuilder(self.processor, config.data)
        policy, reference = self.load_models(initial, resumed, builder)
        row_indices, dropped = usable_rows(rows, builder, config.data.max_prompt_length)
        self.progress = Progress(total_optimizer_steps(config, self.plan, len(row_indices)))
        optimizer = Optimizer(self.ranks, policy.train(), train, self.progress.max_steps)
        weights = PolicyWeights(policy, config.rollout.lora_sync)
        engine = SyncedEngine(training_engine(config, initial, weights, builder, self.ranks), weights, self.ranks)
        try:
            self.collector = self.build_collector(PromptSource(rows, row_indices, builder), engine)
            self.evaluator = self.build_evaluator(builder, engine)
            self.trainer = Trainer(config, self.ranks, policy, reference, optimizer, self.collector, self.progress)
            self.record = Record()
            if resumed:
                self.restore(resumed)
            with self.ranks.agree():
                self.prepare_directory(resumed, dropped)
        except BaseException:
            engine.close()
            raise

    def load_models(
        self, initial: str, resumed: Path | None, builder: PromptBuilder
    ) -> tuple[Policy, Reference | None]:
        """Load the policy and, if the KL term needs one, the reference."""
        idle_prompt = builder.build(idle_sample()) if self.ranks.world_size > 1 else None
        policy = load_policy(self.config, initial, resumed, idle_prompt).to(self.ranks.device)
        return policy, load_reference(self.config, initial, policy, resumed)

    def build_collector(self, source: PromptSource, engine: SyncedEngine) -> Collector:
        """Build the collector, with its sampler, loader and log."""
        config, ranks = self.config, self.ranks
        sampler = PromptSampler(
            len(source.row_indices), self.plan.prompts_per_step, config.train.seed, config.data.shuffle_dataset,
            ranks.rank, ranks.world_size,
        )  # fmt: skip
        loader = PromptLoader(source, sampler, self.plan.steps_per_window, config.data)
        log = CompletionsLog(self.directory.path, ranks, config.log)
        return Collector(config, ranks, loader, engine, self.rewards, log)

    def build_evaluator(self, builder: PromptBuilder, engine: SyncedEngine) -> Evaluator | None:
        """Build the evaluator of the held-out rows, if there are any."""
        if self.config.data.eval_dataset_name is None:
            return None
        return Evaluator(self.config, self.ranks, builder, engine.engine, self.rewards)

    def prepare_directory(self, resumed: Path | None, dropped: Sequence[dict[str, Any]]) -> None:
        """Prepare the run directory. Called last, since it may delete an earlier run."""
        if self.ranks.is_main:
            step = checkpoint.step_of(resumed) if resumed else None
            next_window = self.collector.step_of_next_generation(self.progress.global_step)
            self.directory.prepare(self.config, step, next_window, dropped)

    def run(self) -> dict[str, Any]:
        """Take all steps and return the summary. If a step fails with an RLVLMError, a checkpoint is saved."""
        log, train, progress = self.config.log, self.config.train, self.progress
        self.trackers.start(log.run_name or self.directory.path.name, self.config.model_dump())
        silent = not self.ranks.is_main
        with ProgressBar(progress.global_step, progress.max_steps, "step", log.disable_tqdm, silent) as bar:
            if self.evaluator and train.eval_on_start and self.record.eval_latest is None:
                self.record.eval_before = self.evaluate()
                self.write_metrics({"step": 0, **prefixed(self.record.eval_before)})
                self.save_if_due(is_last=False)
            while progress.global_step < progress.max_steps:
                line = self.next_step()
                bar.show(line["step"], training_figures(line))
        return self.finish()

    def next_step(self) -> dict[str, Any]:
        """Take one step with its evaluation and its checkpoint. Returns its line in `metrics.jsonl`."""
        train, progress = self.config.train, self.progress
        step = progress.global_step + 1
        try:
            metrics = self.trainer.step()
        except RLVLMError as error:
            batch = self.write_nonfinite(step)
            self.save()  # of the last complete step: whatever is wrong can be mended and the run resumed
            if batch is not None:
                raise TrainingError(f"{error} The last batch is in {batch}.") from error
            raise
        self.write_nonfinite(step)
        line = {"step": step, "epoch": self.collector.loader.epoch} | metrics.reduce(self.ranks.gather)
        line["data_wait_fraction"] = line.get("time/data", 0.0) / line["time/step"]
        self.record.train_seconds += line["time/step"]
        is_last = step == progress.max_steps
        try:
            if self.evaluator and (is_last or is_due(step, train.eval_steps)):
                line |= prefixed(self.evaluate())
        except RLVLMError:
            self.write_metrics(line)
            self.save()
            raise
        self.write_metrics(line)
        self.save_if_due(is_last)
        return line

    def write_nonfinite(self, step: int) -> Path | None:
        """Write the groups of a step whose loss or gradient was not finite, and return the file; None for others."""
        groups = self.trainer.nonfinite_groups
        if not groups:
            return None
        path = self.directory.write_nonfinite(groups, step, self.ranks.rank)
        logger.warning("loss or gradient is not finite; the step was skipped and its batch saved to %s", path)
        return path

    def write_metrics(self, line: dict[str, Any]) -> None:
        """Write a line of `metrics.jsonl`, and send it to the trackers every `logging_steps`."""
        if self.ranks.is_main:
            self.directory.append_metrics(line)
        if is_due(line["step"], self.config.log.logging_steps):
            self.trackers.report({k: v for k, v in line.items() if k != "step"}, line["step"])

    def evaluate(self) -> dict[str, float]:
        """Evaluate on the held-out rows. With `load_best_model_at_end`, note the best step so far.

        Raises RewardError if no completion has a reward because reward functions failed.
        """
        assert self.evaluator is not None
        self.collector.free_engine(self.progress)
        metrics = self.evaluator.run(self.collector.state_at(self.progress)).metrics
        check_rewarded(metrics)
        self.record.eval_latest = metrics
        if self.config.train.load_best_model_at_end:
            self.note_best(metrics)
        return metrics

    def note_best(self, metrics: dict[str, float]) -> None:
        """Note this step if its evaluation is the best. Raises ConfigError if the deciding metric does not exist."""
        record, train = self.record, self.config.train
        name = train.metric_for_best_model.removeprefix("eval_")
        if name not in metrics:
            raise ConfigError(f"train.metric_for_best_model {name} is not among the metrics: {', '.join(metrics)}")
        sign = 1 if train.greater_is_better else -1
        if record.eval_best is None or sign * metrics[name] > sign * record.eval_best[name]:
            record.best_step, record.eval_best = self.progress.global_step, metrics

    def save_if_due(self, is_last: bool) -> None:
        """Save every `save_steps`, at the end, and if the evaluation is the best so far."""
        step = self.progress.global_step
        is_periodic = step > 0 and is_due(step, self.config.train.save_steps)
        if is_last or is_periodic or self.record.best_step == step:
            self.save()

    def save(self) -> None:
        """Write a checkpoint of the last complete step. Raises CheckpointError on every rank if that fails.

        A prefetched window is completed first: a resumed run does not have the weights that it is sampled from.
        """
        try:
            self.collector.finish_prefetch()
        except RLVLMError as error:
            logger.warning("the next window could not be generated, and will be generated again: %s", error)
        own_state = {"random": checkpoint.random_states(), "collector": self.collector.state_dict()}
        states, path, best = self.ranks.gather([own_state]), self.directory.path, self.record.best_step
        self.progress.saved_version = self.progress.policy_version
        with self.ranks.agree():
            if self.ranks.is_main:
                write_files = partial(self.write_files, states)
                checkpoint.write(path, self.progress.global_step, write_files)
                keep = None if best is None else checkpoint.checkpoint_path(path, best)
                checkpoint.prune(path, self.config.train.save_total_limit, keep)

    def write_files(self, states: Sequence[dict[str, Any]], directory: Path) -> None:
        """Write all files of a checkpoint, with the states of all ranks."""
        policy, reference = self.trainer.policy, self.trainer.reference
        save_policy(policy, self.processor, directory)
        if self.config.algorithm.sync_ref_model and reference and reference.frozen:
            save_policy(reference.frozen, self.processor, directory / "reference")
        state = {"progress": asdict(self.progress), "record": asdict(self.record), "world_size": len(states)}
        (directory / "trainer_state.json").write_text(json.dumps(state, indent=1))
        torch.save(self.trainer.optimizer.state_dict(), directory / "optimizer.pt")
        for rank, own_state in enumerate(states):
            torch.save(own_state, directory / f"rank_{rank}.pt")

    def restore(self, path: Path) -> None:
        """Restore a checkpoint, which can be within a generation window. The policy's weights are loaded already.

        Raises CheckpointError if the number of processes or the data differ, or if settings do not fit.
        """
        state = json.loads((path / "trainer_state.json").read_text())
        if "record" not in state:
            raise CheckpointError(f"{path} was written by an earlier version of rl-vlm; resume it with that one")
        if state["world_size"] != self.ranks.world_size:
            raise CheckpointError(
                f"{path} was written by {state['world_size']} processes and this run has {self.ranks.world_size}; "
                "resume with as many"
            )
        for name, value in state["progress"].items():
            if name != "max_steps":  # which this run's settings decide
                setattr(self.progress, name, value)
        self.record = Record(**state["record"])
        self.trainer.optimizer.load_state_dict(torch.load(path / "optimizer.pt", weights_only=True))
        own_state = torch.load(path / f"rank_{self.ranks.rank}.pt", weights_only=True)
        try:
            self.collector.load_state_dict(own_state["collector"], self.progress)
        except CheckpointError as error:
            raise CheckpointError(f"{path} cannot be resumed: {error}") from error
        checkpoint.restore_random_states(own_state["random"])

    def finish(self) -> dict[str, Any]:
        """Write the summary and the curve. With `load_best_model_at_end`, load the best weights."""
        record, last = self.record, self.progress.global_step
        summary = {
            "optimizer_steps": last,
            "train_seconds": record.train_seconds,
            "eval_before": record.eval_before,
            "eval_after": record.eval_latest,
            "checkpoint": str(checkpoint.checkpoint_path(self.directory.path, last)),
        }
        if record.best_step is not None:
            summary["checkpoint"] = str(checkpoint.checkpoint_path(self.directory.path, record.best_step))
            load_weights(self.trainer.policy, summary["checkpoint"], self.config.model)
            summary["eval_after"] = record.eval_best
        if self.ranks.is_main:
            lines = self.directory.metrics.read()
            summary |= totals(lines)
            self.directory.write_summary(summary)
            draw_curve(lines, self.directory.path / "reward.png")
        return summary

    def close(self) -> None:
        """Close the engine, the workers, the trackers and the process group."""
        self.collector.engine.close()
        self.collector.close()
        self.rewards.close()
        self.trackers.close()
        self.ranks.close()


def is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def prefixed(metrics: dict[str, float]) -> dict[str, float]:
    return {f"eval_{name}": value for name, value in metrics.items()}
