"""A training run: takes steps, evaluates, saves and restores.

Run.__init__    build.py: all parts ─ restore them from a checkpoint
Run.run         evaluate ─ step ─ step … evaluate ─ save … ─► summary
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from rl_vlm.checkpoint import store
from rl_vlm.checkpoint.random_states import random_states, restore_random_states
from rl_vlm.checkpoint.writer import CheckpointFiles, CheckpointWriter, Files
from rl_vlm.config.load import check_trainable
from rl_vlm.config.schema import RunConfig
from rl_vlm.data.check import warn_of_dropped
from rl_vlm.distributed.launcher import note_short_grace
from rl_vlm.distributed.optimizer_files import OptimizerFiles, load_optimizer
from rl_vlm.distributed.signals import stop
from rl_vlm.errors import CheckpointError, RLVLMError, TrainingError, text_of
from rl_vlm.evaluation.evaluator import check_rewarded
from rl_vlm.log.completions import rollout_table, window_before
from rl_vlm.log.curve import draw_curve
from rl_vlm.log.directory import DROPPED
from rl_vlm.log.files import check_held, disk_errors, unwritable
from rl_vlm.log.messages import Hints, held_out_line
from rl_vlm.log.metrics import seconds_of, totals
from rl_vlm.log.progress_bar import ProgressBar, training_figures
from rl_vlm.log.starts import add_proof, append_start, last_proof
from rl_vlm.model.loading import load_weights
from rl_vlm.model.saving import PolicyFiles
from rl_vlm.passes.changes import BudgetChange, read_changes, write_changes
from rl_vlm.run.build import build_parts
from rl_vlm.run.evidence import read_evidence, with_groups
from rl_vlm.run.history import Record
from rl_vlm.run.instrument import MakeInstrument
from rl_vlm.run.outcome import CollapseWarning
from rl_vlm.run.resume import SavedRun, state_files
from rl_vlm.run.verdict import Evidence, judge
from rl_vlm.stages import Stage

logger = logging.getLogger(__name__)


def train(config: RunConfig, instruments: Sequence[MakeInstrument] = ()) -> dict[str, Any]:
    """Run a training job, or resume one, and return its summary. `instruments` observe it.

    Raises RLVLMError for errors that a user can fix, and Stopped after a signal, if the caller has opened `handled`.
    """
    check_trainable(config)
    run = Run(config, instruments)
    note_short_grace(config.train.stop_grace_seconds)
    with stop.deferred(config.train.stop_grace_seconds), closing(run), run.ranks.failures_shared():
        return run.run()


class Run:
    """One rank of a training run, around its `Trainer`."""

    def __init__(self, config: RunConfig, instruments: Sequence[MakeInstrument] = ()) -> None:
        """Build all parts, and restore their states if the run is resumed."""
        self.record = Record()
        with ExitStack() as opened:
            parts = self.parts = build_parts(config, opened, instruments)
            config = self.config = parts.config
            self.ranks, self.directory, self.trackers = parts.ranks, parts.directory, parts.trackers
            self.trainer, self.evaluator, self.rewards = parts.trainer, parts.evaluator, parts.rewards
            self.collector, self.progress = parts.collector, self.trainer.progress
            self.budget = parts.budget
            if parts.saved:
                self.restore(parts.saved)
                step, last = self.progress.global_step, self.progress.max_steps
                logger.info("resuming from %s (step %d of %d)", parts.saved.path.name, step, last)
                self.go_on_as_proven(parts.saved)
            budget_changes = self.replayed_changes(parts.saved)
            with self.ranks.agree(), unwritable(self.directory.path):
                self.prepare_directory(parts.saved, budget_changes)
            self.writer = CheckpointWriter(self.directory.path, self.ranks, config.train.async_save)
            opened.callback(self.writer.close)
            self.tracked_window: Path | None = None
            self.opened = opened.pop_all()

    def go_on_as_proven(self, saved: SavedRun) -> None:
        """Use the way of computing rows and features that the last start's proof has allowed, if there was a proof."""
        proofs = self.ranks.gather([last_proof(saved.path.parent) if self.ranks.is_main else None])
        proof = next(filter(None, proofs), {})
        if (way := proof.get("fallback")) is not None:
            logger.warning("rows are computed with %s, as before", way)
            self.trainer.passes.use(way)
        if (joined := proof.get("joins_images")) is not None:
            self.trainer.passes.join_images(joined)

    def replayed_changes(self, saved: SavedRun | None) -> list[BudgetChange]:
        """Let the run replay the budget changes after its checkpoint. Return these and the earlier changes.

        A run that failed before its first checkpoint is repeated under the budget that it has recorded.
        """
        if self.config.train.resume_from_checkpoint is None:
            return []
        step = self.progress.global_step
        recorded = read_changes(saved.path.parent if saved else self.directory.path)
        changes = [change for change in recorded if change.step <= step or change.setting == self.budget.setting]
        self.budget.replay([change for change in changes if change.step > step])
        return changes

    def prepare_directory(self, saved: SavedRun | None, budget_changes: Sequence[BudgetChange]) -> None:
        """Prepare the run directory. Call this last, since it may delete an earlier run."""
        if self.ranks.is_main:
            step, last_line = (saved.step, saved.last_line) if saved else (None, -1)
            next_window = self.collector.step_of_next_generation(self.progress.global_step)
            held_out = self.evaluator.usable.dropped if self.evaluator else []
            dropped = [*self.parts.data.usable.dropped, *held_out]
            self.directory.prepare(self.config, step, last_line, next_window, dropped)
            write_changes(self.directory.path, budget_changes)
            append_start(self.directory.path, self.ranks.world_size, is_first=saved is None)
            warn_of_dropped(dropped, self.directory.path / DROPPED)

    def run(self) -> dict[str, Any]:
        """Take all steps and return the summary. If a step or an evaluation fails, the last complete step is saved."""
        try:
            self.take_all_steps()
        except Exception:
            self.end_instruments()
            raise
        return self.finish()

    def take_all_steps(self) -> None:
        """Take the remaining steps, unless an instrument asks to stop.

        Before the first and after each, evaluate, save and report if that is due.
        """
        log, train, progress, hints = self.config.log, self.config.train, self.progress, Hints()
        collapse = CollapseWarning(self.earlier_steps() if self.ranks.is_main else None)
        self.trackers.start(log.run_name or self.directory.path.name, self.config.model_dump())
        silent = not self.ranks.is_main
        for instrument in self.parts.instruments:
            instrument.begin(progress)
        with ProgressBar(progress.global_step, progress.max_steps, "step", log.disable_tqdm, silent) as bar:
            if self.evaluator and train.eval_on_start and self.record.eval_latest is None:
                self.write_metrics({"step": 0, **prefixed(self.evaluate())})
                self.save_if_due(is_last=False)
            if self.record.unevaluated:
                self.finish_step(self.record.unevaluated)
            while progress.global_step < progress.max_steps:
                line = self.next_step()
                bar.show(line["step"], training_figures(line))
                if self.ranks.is_main:
                    hints.give(line)
                    collapse.give(line)
                if self.is_stopped_by_instruments():
                    return

    def is_stopped_by_instruments(self) -> bool:
        """Tell instruments of a step. If one of them asks to stop before the last step, save, and return True."""
        step, last = self.progress.global_step, self.progress.max_steps
        with self.saved_on_failure():
            for instrument in self.parts.instruments:
                instrument.after_step(is_last=step == last)
            asked = any(self.ranks.gather([any(instrument.asks_to_stop() for instrument in self.parts.instruments)]))
        if not asked or step == last:
            return False
        if self.ranks.is_main:
            logger.warning("the run was asked to stop, and ends after step %d of %d", step, last)
        self.save()
        return True

    def next_step(self) -> dict[str, Any]:
        """Take one step, with its evaluation and checkpoint if they are due. Return its line in `metrics.jsonl`."""
        step = self.progress.global_step + 1
        with self.saved_on_failure(), self.ranks.agree():
            stop.check()
        check = self.trainer.start_check
        is_checked = check.is_due
        try:
            with self.saved_on_failure(), self.collector.undo_on_failure():
                metrics = self.trainer.step()
        finally:
            self.write_nonfinite(step)
            if is_checked and check.proof.checks and self.ranks.is_main:
                add_proof(self.directory.path, check.proof.state())
        line = {"step": step, "epoch": self.collector.loader.epoch} | metrics.reduce(self.ranks.gather)
        line["data_wait_fraction"] = line.get(seconds_of(Stage.DATA), 0.0) / line[seconds_of(Stage.STEP)]
        line[seconds_of(Stage.SAVE)] = self.writer.take_seconds()
        self.record.add_seconds(line[seconds_of(Stage.STEP)])
        return self.finish_step(line)

    def finish_step(self, line: dict[str, Any]) -> dict[str, Any]:
        """Evaluate and save if due after a step, and write its line of metrics."""
        step = line["step"]
        is_last = step == self.progress.max_steps
        if self.evaluator and (is_last or is_due(step, self.config.train.eval_steps)):
            with self.record.evaluating(line), self.saved_on_failure():
                try:
                    line = line | prefixed(self.evaluate())
                except Exception:
                    self.write_metrics(line)  # a resumed run writes it again, with the evaluation
                    raise
        self.write_metrics(line)
        self.writer.continue_if_ready()
        self.save_if_due(is_last)
        return line

    @contextmanager
    def saved_on_failure(self) -> Iterator[None]:
        """Run a block. If it fails, save the last complete step, or log why that is not possible."""
        try:
            yield
        except Exception as error:
            if problem := self.problem_of_saving(error):
                logger.error(
                    "the last complete step, %d, is not saved: %s; complete checkpoints in %s: %s",
                    self.progress.global_step, problem, self.directory.path, store.names(self.directory.path),
                )  # fmt: skip
            raise

    def problem_of_saving(self, error: Exception) -> str | None:
        """Save the last complete step after `error`. Return why that is not possible, or None if it is saved."""
        if self.ranks.world_size > 1 and not getattr(error, "on_all_ranks", False):
            return "the error came on one rank, and others cannot join"
        try:
            self.writer.finish()
            if self.progress.global_step == 0:
                return "no step is complete"
            if self.trainer.is_updating:
                return "the error came within the update of the weights"
            self.save()
            self.writer.finish()
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
        for instrument in self.parts.instruments:
            instrument.after_line(line)
        if is_due(line["step"], self.config.log.logging_steps):
            self.trackers.report({k: v for k, v in line.items() if k != "step"}, line["step"])
            if self.ranks.is_main and self.config.log.report_to and self.config.log.log_completions:
                self.report_rollouts(line["step"])

    def report_rollouts(self, step: int) -> None:
        """Send some rollouts of a step's window to the trackers, once."""
        window = window_before(self.directory.path, step)
        if window is not None and window != self.tracked_window:
            self.trackers.report_rollouts(rollout_table(window, step, self.rewards.names), step)
            self.tracked_window = window

    def end_instruments(self) -> None:
        for instrument in self.parts.instruments:
            instrument.end()

    def evaluate(self) -> dict[str, float]:
        """Evaluate on the held-out rows. With `load_best_model_at_end`, note the best step so far.

        Raises RewardError if no completion has a reward because reward functions failed.
        """
        assert self.evaluator is not None
        self.collector.free_engine(self.progress)
        states = random_states()
        try:
            state = self.collector.state_at(self.progress)
            evaluation = self.evaluator.run(state, show_progress=self.ranks.is_main)
            self.collector.log.write_held_out(self.progress.global_step, evaluation.rows)
            metrics = evaluation.metrics
            with self.ranks.agree():
                check_rewarded(metrics)
                self.record.note_evaluation(metrics, self.progress.global_step, self.config.train)
            logger.info(held_out_line(self.progress.global_step, metrics))
        except BaseException:
            restore_random_states(states)
            raise
        finally:
            self.collector.sleep_engine()
        for instrument in self.parts.instruments:
            instrument.after_evaluation(self.progress.global_step, prefixed(metrics))
        return metrics

    def save_if_due(self, is_last: bool) -> None:
        """Save every `save_steps`, at the end, and if the evaluation is the best so far."""
        step = self.progress.global_step
        is_periodic = step > 0 and is_due(step, self.config.train.save_steps)
        if is_last or is_periodic or self.record.best_step == step:
            self.save()

    def save(self) -> None:
        """Finish the previous checkpoint, and begin to write one of the last complete step.

        Raises CheckpointError on every rank if either cannot be written.

        A prefetched window is completed first, because a resumed run does not have the weights that generate it.
        Older checkpoints are not deleted while steps are skipped because they are not finite.
        """
        self.writer.finish()
        self.collector.sleep_engine()  # which is awake if generation was interrupted
        with self.ranks.agree():
            check_held(self.directory.path)
            self.refuse_nonfinite_weights()
        try:
            self.collector.finish_prefetch()
        except RLVLMError as error:
            logger.warning("the next window could not be generated, and will be generated again: %s", text_of(error))
        own_state = {
            "random": random_states(),
            "collector": self.collector.state_dict(),
            "reward_forms": self.rewards.forms,
        }
        states = self.ranks.gather([own_state])
        self.progress.mark_saved()
        best = self.record.best_step  # the best step that this checkpoint knows
        done = partial(self.checkpoint_done, self.progress.global_step, best)
        with self.trainer.stages.run(Stage.SAVE):
            self.writer.write(self.progress.global_step, lambda: self.checkpoint_files(states), done)

    def checkpoint_done(self, step: int, best_step: int | None) -> None:
        """Delete older checkpoints, and tell instruments that the one of `step` is complete."""
        with self.ranks.agree():
            if self.ranks.is_main:
                self.prune_checkpoints(best_step)
        for instrument in self.parts.instruments:
            instrument.after_save(store.checkpoint_path(self.directory.path, step))

    def prune_checkpoints(self, best_step: int | None) -> None:
        """Delete old checkpoints beyond `save_total_limit`, except the best one."""
        path = self.directory.path
        if not self.progress.nonfinite_in_a_row:
            keep = None if best_step is None else store.checkpoint_path(path, best_step)
            store.prune(path, self.config.train.save_total_limit, keep)

    def refuse_nonfinite_weights(self) -> None:
        """Raise TrainingError if a trained weight is not finite."""
        if names := self.trainer.policy.nonfinite_weights():
            raise TrainingError(
                f"{len(names)} weights have values that are not finite after step {self.progress.global_step}, such as "
                f"{names[0]}: nothing is saved. Resume from an earlier checkpoint "
                f"({store.names(self.directory.path)}) with a lower learning_rate."
            )

    def checkpoint_files(self, states: Sequence[dict[str, Any]]) -> CheckpointFiles:
        """Copy this rank's share of a checkpoint to host memory. `states` has a state per rank."""
        trainer, data, in_parts = self.trainer, self.parts.data, self.parts.strategy.is_sharded
        parts: list[tuple[str, Files]] = [
            ("", PolicyFiles(trainer.policy, data.processor, self.ranks, in_parts)),
            ("", OptimizerFiles(trainer.optimizer, self.ranks)),
        ]
        if self.config.algorithm.sync_ref_model and trainer.reference and trainer.reference.frozen:
            parts.append(("reference", PolicyFiles(trainer.reference.frozen, data.processor, self.ranks, in_parts)))
        if not self.ranks.is_main:
            return CheckpointFiles(parts, {})
        own = state_files(
            self.config, self.progress, self.budget, self.record, data.fingerprints, self.parts.sources, states
        )
        return CheckpointFiles(parts, own)

    def restore(self, saved: SavedRun) -> None:
        """Restore a checkpoint, which may be within a generation window. The models are loaded already.

        Raises CheckpointError if paused completions do not fit the settings.
        """
        self.progress.restore(saved.state["progress"])
        if "memory.micro_batch_tokens" not in saved.changes:
            self.budget.load_state_dict(saved.state["budget"])
        self.record = Record(**saved.state["record"])
        load_optimizer(self.trainer.optimizer, saved.path)
        self.trainer.optimizer.set_step(saved.step)
        try:
            self.collector.load_state_dict(saved.own_state["collector"], self.progress)
        except CheckpointError as error:
            raise CheckpointError(f"{saved.path} cannot be resumed: {error}") from error
        if saved.own_state["random"] is not None:
            restore_random_states(saved.own_state["random"])

    def finish(self) -> dict[str, Any]:
        """Write the summary and the curve. With `load_best_model_at_end`, load the best weights."""
        self.writer.finish()
        record, last = self.record, self.progress.global_step
        summary = {
            "optimizer_steps": last,
            "train_seconds": record.train_seconds,
            "eval_before": record.eval_before,
            "eval_after": record.eval_latest,
            "checkpoint": str(store.checkpoint_path(self.directory.path, last)),
        }
        if record.best_step is not None:
            summary["checkpoint"] = str(store.checkpoint_path(self.directory.path, record.best_step))
            with self.ranks.agree():
                if self.ranks.is_main:
                    store.check(Path(summary["checkpoint"]))
            empty = self.parts.strategy.loads_empty
            load_weights(self.trainer.policy, summary["checkpoint"], self.config.model, empty, self.ranks)
            summary["eval_after"] = record.eval_best
        if self.ranks.is_main:
            lines = self.directory.metrics.read()
            result_step = last if record.best_step is None else record.best_step
            summary |= totals(lines) | {"verdict": judge(self.evidence(lines, result_step)).as_json()}
            self.directory.write_summary(summary)
            with disk_errors(self.directory.path):
                draw_curve(lines, self.directory.path / "reward.png")
        for instrument in self.parts.instruments:
            instrument.complete()
        self.end_instruments()
        return summary

    def earlier_steps(self) -> Evidence:
        """Read the metrics of earlier starts, without the completions of evaluations."""
        lines = with_groups(self.directory.path, self.directory.metrics.read(), self.rewards.decisive)
        return Evidence(lines, num_generations=self.config.rollout.num_generations)

    def evidence(self, lines: list[dict[str, Any]], result_step: int) -> Evidence:
        """Read the evidence for a verdict. `result_step` is the step of the model that the run ends with."""
        num_generations = self.config.rollout.num_generations
        return read_evidence(self.directory.path, lines, result_step, self.rewards.decisive, num_generations)

    def close(self) -> None:
        """Close the engine, the workers, the trackers and the process group, and unlock the directory."""
        self.opened.close()


def is_due(step: int, interval: int) -> bool:
    return interval > 0 and step % interval == 0


def prefixed(metrics: dict[str, float]) -> dict[str, float]:
    return {f"eval_{name}": value for name, value in metrics.items()}
