"""A training run: builds the parts, loops over steps, evaluates, saves and restores.

Run.__init__    rows, rewards, policy, reference, optimizer, engine, collector ─► Trainer
Run.run         evaluate ─ step ─ step … evaluate ─ save … ─► summary
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from rl_vlm import checkpoint
from rl_vlm.config.batches import plan_batches, total_optimizer_steps
from rl_vlm.config.load import check_trainable
from rl_vlm.config.schema import RunConfig
from rl_vlm.data.check import UsableRows, fitting_rows, warn_of_dropped
from rl_vlm.data.fingerprint import data_fingerprint
from rl_vlm.data.loader import PromptLoader, PromptSource
from rl_vlm.data.prompts import PromptBuilder, load_processor
from rl_vlm.data.sampler import PromptSampler
from rl_vlm.distributed.optimizer import Optimizer
from rl_vlm.distributed.optimizer_files import OptimizerFiles, load_optimizer
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.strategy import select_strategy
from rl_vlm.distributed.trackers import Trackers
from rl_vlm.errors import CheckpointError, TrainingError, text_of
from rl_vlm.evaluation import Evaluator, check_rewarded
from rl_vlm.log.completions import CompletionsLog
from rl_vlm.log.curve import draw_curve
from rl_vlm.log.directory import DROPPED, RunDirectory
from rl_vlm.log.files import lock_directory
from rl_vlm.log.messages import Hints, batch_line, loading_line, parameters_line, rows_line
from rl_vlm.log.metrics import totals
from rl_vlm.log.progress_bar import ProgressBar, training_figures
from rl_vlm.log.record import Record
from rl_vlm.model.fingerprint import model_fingerprint
from rl_vlm.model.loading import initial_checkpoint, load_policy, longest_prompt
from rl_vlm.model.policy import Policy
from rl_vlm.model.reference import Reference, add_initial_adapter, load_reference
from rl_vlm.model.saving import PolicyFiles
from rl_vlm.model.sharding import refuse_initialisation, refuse_unshardable
from rl_vlm.model.vision import idle_sample
from rl_vlm.resume import SavedRun, write_states
from rl_vlm.reward import RewardSuite
from rl_vlm.rollout.build import training_engine
from rl_vlm.rollout.collector import Collector
from rl_vlm.rollout.engine import SyncedEngine
from rl_vlm.rollout.scoring import checked_rows, choose_forms
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


class Run:
    """One rank of a training run, around its `Trainer`."""

    def __init__(self, config: RunConfig) -> None:
        """Build all parts, and restore their states if the run is resumed."""
        train = config.train
        self.config = config
        self.ranks = Ranks()
        self.strategy = select_strategy(self.ranks, config)
        self.plan = plan_batches(config, self.ranks.world_size)
        self.directory = RunDirectory(Path(train.output_dir).absolute())  # a function may change the working directory
        self.record = Record()
        with ExitStack() as opened:
            opened.callback(self.ranks.close)
            saved = self.open_directory(opened)
            self.trackers = Trackers(config.log, train.output_dir)
            opened.callback(self.trackers.close)
            checkpoint.seed_random_generators(train.seed)
            self.rewards = opened.enter_context(RewardSuite(config.rewards))
            initial, builder, usable = self.load_data(saved)
            policy, reference = self.load_models(initial, saved, builder)
            self.progress = Progress(total_optimizer_steps(config, self.plan, len(usable)))
            logger.info(batch_line(self.plan, self.progress.max_steps))
            optimizer = Optimizer(self.strategy, policy.train(), train, self.progress.max_steps)
            weights = PolicyWeights(policy, config.rollout.lora_sync)
            engine = training_engine(config, initial, weights, builder, self.ranks)
            gathered = self.strategy.gathered if config.rollout.engine == "hf" else nullcontext
            engine = SyncedEngine(engine, weights, self.ranks, gathered)
            self.collector = self.build_collector(PromptSource(usable.rows, usable.indices, builder), engine)
            opened.callback(self.collector.close)
            self.evaluator = self.build_evaluator(builder, engine)
            self.trainer = Trainer(config, self.ranks, policy, reference, optimizer, self.collector, self.progress)
            if saved:
                self.restore(saved)
                step, last = self.progress.global_step, self.progress.max_steps
                logger.info("resuming from %s (step %d of %d)", saved.path.name, step, last)
            with self.ranks.agree():
                self.prepare_directory(saved, usable.dropped)
            self.opened = opened.pop_all()

    def open_directory(self, opened: ExitStack) -> SavedRun | None:
        """Lock the run directory until `opened` closes, and read the checkpoint to resume from, if any."""
        resumed = None
        with self.ranks.agree():
            if self.ranks.is_main:
                opened.enter_context(lock_directory(self.directory.path))
                resumed = checkpoint.find(self.config.train.resume_from_checkpoint, self.directory.path)
                self.directory.refuse_another_run(self.config, resumed)
        resumed = self.ranks.gather([resumed])[0]
        with self.ranks.agree():
            return resumed and SavedRun.load(resumed, self.config, self.ranks.rank, self.ranks.world_size)

    def load_data(self, saved: SavedRun | None) -> tuple[str, PromptBuilder, UsableRows]:
        """Load and check the training rows. Returns the initial checkpoint and the builder of prompts as well."""
        config = self.config
        logger.info("loading the training data %s", config.data.dataset_name)
        usable = checked_rows(config, "train", self.rewards, self.ranks)
        initial = initial_checkpoint(config, self.ranks)
        self.processor = load_processor(initial, config.model, config.data)
        builder = PromptBuilder(self.processor, config.data, longest_prompt(config, initial))
        usable = fitting_rows(usable, builder, config.data.max_prompt_length)
        self.check_fingerprints(saved, usable, initial)
        if saved is None or "rewards.reward_funcs" in saved.changes:
            choose_forms(self.rewards, usable, self.ranks)
        else:
            self.rewards.use_forms(saved.own_state["reward_forms"])
        logger.info(rows_line(len(usable), len(usable.dropped)))
        return initial, builder, usable

    def check_fingerprints(self, saved: SavedRun | None, usable: UsableRows, initial: str) -> None:
        """Compute the fingerprints of data and model, and compare them with those of the checkpoint, if any."""
        self.fingerprints: dict[str, str] = {}
        with self.ranks.agree():
            if self.ranks.is_main:
                self.fingerprints = {
                    "training data": data_fingerprint(usable.rows, usable.indices),
                    "initial model": model_fingerprint(initial, self.config.model),
                }
                if saved:
                    saved.check_fingerprints(self.fingerprints)

    def load_models(
        self, initial: str, saved: SavedRun | None, builder: PromptBuilder
    ) -> tuple[Policy, Reference | None]:
        """Load the policy and, if the KL term needs one, the reference."""
        resumed = saved.path if saved else None
        needs_idle_runs = self.ranks.world_size > 1 or self.strategy.needs_all_gradients
        idle_prompt = builder.build(idle_sample()) if needs_idle_runs else None
        logger.info(loading_line(self.config, self.ranks.device))
        empty = self.strategy.loads_empty
        if self.strategy.equal_calls:
            refuse_initialisation(self.config.model, self.strategy.name)
        policy = load_policy(self.config, initial, resumed, idle_prompt, empty=empty)
        if self.strategy.equal_calls:
            refuse_unshardable(policy, self.strategy.name)
        add_initial_adapter(self.config, initial, policy)
        logger.info(parameters_line(policy))
        self.strategy.place(policy)
        reference = load_reference(self.config, initial, policy, resumed, empty)
        if reference is not None and reference.frozen is not None:
            self.strategy.place_frozen(reference.frozen)
        return policy, reference

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

    def prepare_directory(self, saved: SavedRun | None, dropped: Sequence[dict[str, Any]]) -> None:
        """Prepare the run directory. Called last, since it may delete an earlier run."""
        if self.ranks.is_main:
            step, last_line = (saved.step, saved.last_line) if saved else (None, -1)
            next_window = self.collector.step_of_next_generation(self.progress.global_step)
            dropped = [*dropped, *(self.evaluator.usable.dropped if self.evaluator else [])]
            self.directory.prepare(self.config, step, last_line, next_window, dropped)
            warn_of_dropped(dropped, self.directory.path / DROPPED)

    def run(self) -> dict[str, Any]:
        """Take all steps and return the summary. If a step or an evaluation fails, the last complete step is saved."""
        log, train, progress, hints = self.config.log, self.config.train, self.progress, Hints()
        self.trackers.start(log.run_name or self.directory.path.name, self.config.model_dump())
        silent = not self.ranks.is_main
        with ProgressBar(progress.global_step, progress.max_steps, "step", log.disable_tqdm, silent) as bar:
            if self.evaluator and train.eval_on_start and self.record.eval_latest is None:
                self.record.eval_before = self.evaluate()
                self.write_metrics({"step": 0, **prefixed(self.record.eval_before)})
                self.save_if_due(is_last=False)
            if self.record.unevaluated:
                self.finish_step(self.record.unevaluated)
            while progress.global_step < progress.max_steps:
                line = self.next_step()
                bar.show(line["step"], training_figures(line))
                if self.ranks.is_main:
                    hints.give(line)
        return self.finish()

    def next_step(self) -> dict[str, Any]:
        """Take one step with its evaluation and its checkpoint. Returns its line in `metrics.jsonl`."""
        step = self.progress.global_step + 1
        try:
            with self.saved_on_failure(), self.collector.undo_on_failure():
                metrics = self.trainer.step()
        finally:
            self.write_nonfinite(step)
        line = {"step": step, "epoch": self.collector.loader.epoch} | metrics.reduce(self.ranks.gather)
        line["data_wait_fraction"] = line.get("time/data", 0.0) / line["time/step"]
        self.record.train_seconds += line["time/step"]
        return self.finish_step(line)

    def finish_step(self, line: dict[str, Any]) -> dict[str, Any]:
        """Evaluate and save if that is due after a step, and write its line of metrics."""
        step = line["step"]
        is_last = step == self.progress.max_steps
        if self.evaluator and (is_last or is_due(step, self.config.train.eval_steps)):
            self.record.unevaluated = line
            with self.saved_on_failure():
                try:
                    line = line | prefixed(self.evaluate())
                except Exception:
                    self.write_metrics(line)  # a resumed run writes it again, with the evaluation
                    raise
            self.record.unevaluated = None
        self.write_metrics(line)
        self.save_if_due(is_last)
        return line

    @contextmanager
    def saved_on_failure(self) -> Iterator[None]:
        """Run a block, and if it fails save the last complete step, or say why that is not possible."""
        try:
            yield
        except Exception as error:
            if problem := self.problem_of_saving(error):
                logger.error(
                    "the last complete step, %d, is not saved: %s; complete checkpoints in %s: %s",
                    self.progress.global_step, problem, self.directory.path, checkpoint.names(self.directory.path),
                )  # fmt: skip
            raise

    def problem_of_saving(self, error: Exception) -> str | None:
        """Save the last complete step after `error`. Returns why it cannot be saved, or None if it is."""
        if self.progress.global_step == 0:
            return "no step is complete"
        if self.trainer.is_updating:
            return "the error came within the update of the weights"
        if self.ranks.world_size > 1 and not getattr(error, "on_all_ranks", False):
            return "the error came on one rank, and others cannot join"
        try:
            self.save()
        except Exception as failure:
            return text_of(failure)
        return None

    def write_nonfinite(self, step: int) -> None:
        """Write the groups of a step if its loss or gradient was not finite."""
        if groups := self.trainer.nonfinite_groups:
            self.directory.write_nonfinite(groups, step, self.ranks.rank)

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
        states = checkpoint.random_states()
        try:
            state = self.collector.state_at(self.progress)
            with self.collector.engine.awake():
                metrics = self.evaluator.run(state, show_progress=self.ranks.is_main).metrics
            with self.ranks.agree():
                check_rewarded(metrics)
                self.record.note_evaluation(metrics, self.progress.global_step, self.config.train)
        except BaseException:
            checkpoint.restore_random_states(states)
            raise
        return metrics

    def save_if_due(self, is_last: bool) -> None:
        """Save every `save_steps`, at the end, and if the evaluation is the best so far."""
        step = self.progress.global_step
        is_periodic = step > 0 and is_due(step, self.config.train.save_steps)
        if is_last or is_periodic or self.record.best_step == step:
            self.save()

    def save(self) -> None:
        """Write a checkpoint of the last complete step. Raises CheckpointError on every rank if that fails.

        A prefetched window is completed first: a resumed run does not have the weights that it is sampled from.
        Older checkpoints are not deleted while steps are skipped because they are not finite.
        """
        with self.ranks.agree():
            self.refuse_nonfinite_weights()
        try:
            self.collector.finish_prefetch()
        except Exception as error:
            logger.warning("the next window could not be generated, and will be generated again: %s", text_of(error))
        own_state = {
            "random": checkpoint.random_states(),
            "collector": self.collector.state_dict(),
            "reward_forms": self.rewards.forms,
        }
        states, path, best = self.ranks.gather([own_state]), self.directory.path, self.record.best_step
        self.progress.saved_version = self.progress.policy_version
        checkpoint.write(path, self.progress.global_step, self.checkpoint_files(states), self.ranks)
        with self.ranks.agree():
            if self.ranks.is_main and not self.progress.nonfinite_in_a_row:
                keep = None if best is None else checkpoint.checkpoint_path(path, best)
                checkpoint.prune(path, self.config.train.save_total_limit, keep)

    def refuse_nonfinite_weights(self) -> None:
        """Raise TrainingError if a trained weight is not finite."""
        if names := self.trainer.policy.nonfinite_weights():
            raise TrainingError(
                f"{len(names)} weights have values that are not finite after step {self.progress.global_step}, such as "
                f"{names[0]}: nothing is saved. Resume from an earlier checkpoint "
                f"({checkpoint.names(self.directory.path)}) with a lower learning_rate."
            )

    def checkpoint_files(self, states: Sequence[dict[str, Any]]) -> Callable[[Path], None]:
        """Gather this rank's share of a checkpoint's files. Returns the function that writes it.

        `states` are those of all ranks.
        """
        reference = self.trainer.reference
        policy_files = PolicyFiles(self.trainer.policy, self.processor, self.ranks)
        optimizer_files = OptimizerFiles(self.trainer.optimizer, self.ranks)
        reference_files = None
        if self.config.algorithm.sync_ref_model and reference and reference.frozen:
            reference_files = PolicyFiles(reference.frozen, self.processor, self.ranks)

        def write_files(directory: Path) -> None:
            policy_files.write(directory)
            optimizer_files.write(directory)
            if reference_files:
                reference_files.write(directory / "reference")
            if self.ranks.is_main:
                write_states(directory, self.config, self.progress, self.record, self.fingerprints, states)

        return write_files

    def restore(self, saved: SavedRun) -> None:
        """Restore a checkpoint, which can be within a generation window. The policy's weights are loaded already.

        Raises CheckpointError if paused completions do not fit the settings.
        """
        vars(self.progress).update(saved.state["progress"], max_steps=self.progress.max_steps)
        self.record = Record(**saved.state["record"])
        load_optimizer(self.trainer.optimizer, saved.path)
        self.trainer.optimizer.set_step(saved.step)
        try:
            self.collector.load_state_dict(saved.own_state["collector"], self.progress)
        except CheckpointError as error:
            raise CheckpointError(f"{saved.path} cannot be resumed: {error}") from error
        checkpoint.restore_random_states(saved.own_state["random"])

    def finish(self) -> dict[str, Any]:
        """Write the summary and the curve. With `load_best_model_at_end`, the summary names the best checkpoint."""
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
            summary["eval_after"] = record.eval_best
        if self.ranks.is_main:
            lines = self.directory.metrics.read()
            summary |= totals(lines)
            self.directory.write_summary(summary)
            draw_curve(lines, self.directory.path / "reward.png")
        return summary

    def close(self) -> None:
        """Close the engine, the workers, the trackers and the process group, and unlock the directory."""
        self.opened.close()


def is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def prefixed(metrics: dict[str, float]) -> dict[str, float]:
    return {f"eval_{name}": value for name, value in metrics.items()}
