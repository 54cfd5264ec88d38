"""`rl-vlm eval`: evaluates one model, or several on the same data, and writes the files."""

from __future__ import annotations

import gc
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rl_vlm.config.data_sources import data_sources
from rl_vlm.config.describe import to_yaml
from rl_vlm.config.function_names import is_live_name
from rl_vlm.config.load import check_evaluable
from rl_vlm.config.named_files import local_file
from rl_vlm.config.precision import with_precision
from rl_vlm.config.schema import RolloutConfig, RunConfig
from rl_vlm.config.secrets import starred
from rl_vlm.data.check import UsableRows, warn_of_dropped
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.distributed.installation import check_installation
from rl_vlm.distributed.launch_variables import check_evaluation_launch
from rl_vlm.distributed.ranks import Ranks, joined
from rl_vlm.evaluation.difficulty import write_selected_rows
from rl_vlm.evaluation.directory import EvaluationDirectory
from rl_vlm.evaluation.evaluator import (
    Evaluation,
    Evaluator,
    check_rewarded,
    completions_per_chunk,
    evaluation_sampling,
)
from rl_vlm.evaluation.figures import summarise_by
from rl_vlm.evaluation.options import (
    NO_OPTIONS,
    EvaluationOptions,
    SuccessRange,
    check_by,
    checkpoint_names,
    kept_range,
)
from rl_vlm.evaluation.paired import paired_changes
from rl_vlm.log.directory import COMPARISON, CONFIG, DIFFERENCES, DROPPED, EVALUATED, REPORT, SUMMARY
from rl_vlm.log.files import disk_errors, lock_directory, unwritable, write_file
from rl_vlm.log.messages import loading_line, rows_to_evaluate_line
from rl_vlm.log.starts import add_proof, append_start
from rl_vlm.model.loading import base_of, initial_checkpoint
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.rollout.build import evaluation_engine, prompt_builder
from rl_vlm.rollout.environments.build import build_trajectories, checked_turns, load_functions
from rl_vlm.rollout.environments.contract import Toolbox
from rl_vlm.rollout.environments.loading import load_toolbox
from rl_vlm.rollout.proving import EngineCheck
from rl_vlm.rollout.scoring import checked_rows, choose_forms
from rl_vlm.types import TrainerState

logger = logging.getLogger(__name__)

Summary = dict[str, Any]


def compare_checkpoints(
    config: RunConfig, checkpoints: Sequence[str], options: EvaluationOptions = NO_OPTIONS
) -> dict[str, Summary]:
    """Evaluate each checkpoint as the config's model, and return summaries by name. If several, each has a folder."""
    configs = {}
    for name, checkpoint in checkpoint_names(checkpoints).items():
        model = config.model.model_copy(update={"model_name_or_path": checkpoint})
        configs[name] = config.model_copy(update={"model": model})
    return evaluate_models(configs, options)


def evaluate_models(configs: Mapping[str, RunConfig], options: EvaluationOptions) -> dict[str, Summary]:
    """Run one evaluation per name. Finished chunks are kept until all evaluations are complete.

    Raises RewardError if reward functions failed and an evaluation has no reward, after its files are written.
    """
    config = next(iter(configs.values()))
    check_evaluable(config)
    root = Path(config.train.output_dir).absolute() / "evaluation"  # a function may change the working directory
    with joined(config.train) as ranks, ExitStack() as opened:
        with ranks.agree():
            if config.evaluation.endpoint_url is None:  # else nothing is computed here
                check_installation(config)
                configs = {name: with_precision(each, ranks.device.type) for name, each in configs.items()}
            check_evaluation_launch(ranks.launch, next(iter(configs.values())).model.precision)
            if ranks.is_main:
                opened.enter_context(lock_directory(root))
        return evaluate_in(root, configs, options, ranks)


def evaluate_in(
    root: Path, configs: Mapping[str, RunConfig], options: EvaluationOptions, ranks: Ranks
) -> dict[str, Summary]:
    """Run the evaluations in the directory `root`, with a folder for each if there are several."""
    config = next(iter(configs.values()))
    folders = {name: root / name if len(configs) > 1 else root for name in configs}
    directories = {name: EvaluationDirectory(folder, root / "images") for name, folder in folders.items()}
    summaries = {}
    with ranks.agree(), unwritable(root):
        if ranks.is_main:
            for name in (CONFIG, REPORT, COMPARISON, SUMMARY, EVALUATED):  # from other settings
                (root / name).unlink(missing_ok=True)
            append_start(root, ranks.world_size, is_first=True)
            for name, folder in folders.items():
                folder.mkdir(parents=True, exist_ok=True)
                write_file(folder / CONFIG, to_yaml(configs[name]).encode())
    with ranks.agree():
        toolbox, rewards = load_functions(config)
    with closing(toolbox), rewards:
        usable = checked_rows(config, "eval", rewards, ranks)
        check_by(options, usable.rows)
        kept = kept_range(options, rewards, config.rollout.num_generations_eval)
        choose_forms(rewards, usable, ranks)
        for name, config in configs.items():
            if summaries:  # the environments of a model are closed after it
                toolbox = load_toolbox(config.rollout)
            proven = partial(add_proof, root, name=name if len(configs) > 1 else None)
            model = EvaluatedModel(config, ranks, usable, rewards, directories[name], toolbox, proven)
            summaries[name] = model.evaluate(options.by, kept)
            if ranks.is_main and "reward" not in summaries[name]:
                directories[name].delete_unfinished()  # another call scores them again
            check_rewarded(summaries[name])
            gc.collect()  # free memory before the next model is loaded
    if ranks.is_main:
        if len(summaries) > 1:
            summaries = with_differences(summaries, folders)
            with disk_errors(root):
                write_file(root / COMPARISON, (json.dumps(summaries, indent=2) + "\n").encode())
        for directory in directories.values():
            directory.delete_unfinished()
    return summaries


def with_differences(summaries: Mapping[str, Summary], folders: Mapping[str, Path]) -> dict[str, Summary]:
    """Add to each summary but the first the changes of its scores from the first model, paired by row."""
    first, *others = summaries
    changes = {name: paired_changes(folders[first] / EVALUATED, folders[name] / EVALUATED) for name in others}
    compared = {name: summaries[name] | {DIFFERENCES: [asdict(change) for change in changes[name]]} for name in others}
    return {first: summaries[first], **compared}


@dataclass(frozen=True)
class EvaluatedModel:
    """One model with the parts that its evaluation needs."""

    config: RunConfig
    ranks: Ranks
    usable: UsableRows
    rewards: RewardSuite
    directory: EvaluationDirectory
    toolbox: Toolbox
    proven: Callable[[dict[str, Any]], None] | None = None
    """Records the state of the model's proof."""

    def evaluate(self, by: Sequence[str], kept: SuccessRange | None) -> Summary:
        """Evaluate the model and write the files. Resume a killed evaluation if it has the same settings."""
        evaluation = self.sample_and_score()
        with self.ranks.agree():
            return self.summarise_and_write(evaluation, by, kept)

    def summarise_and_write(self, evaluation: Evaluation, by: Sequence[str], kept: SuccessRange | None) -> Summary:
        """Summarise on every rank, and write on the main one."""
        solved_from, num_generations = self.rewards.solved_from, self.config.rollout.num_generations_eval
        summary: Summary = dict(evaluation.metrics)
        if by:
            rows = evaluation.rows
            summary["by"] = {column: summarise_by(rows, column, solved_from, num_generations) for column in by}
        if not self.ranks.is_main:
            return summary
        if kept is not None:
            path = self.directory.path / "kept.parquet"
            with disk_errors(path.parent):
                num_kept = write_selected_rows(path, self.usable.rows, evaluation.rows, kept)
            summary["kept"] = asdict(kept) | {"num_samples": num_kept}
        if evaluation.dropped:
            summary["num_dropped"] = len(evaluation.dropped)
            warn_of_dropped(evaluation.dropped, self.directory.path / DROPPED)
        self.directory.write(summary, evaluation.rows, evaluation.dropped)
        return summary

    def sample_and_score(self) -> Evaluation:
        """Load the model, evaluate the rows that are not finished, and free the model."""
        config, ranks = self.config, self.ranks
        served = config.evaluation.endpoint_url is not None
        checkpoint = config.model.model_name_or_path if served else initial_checkpoint(config, ranks)
        settings = what_matters(config, checkpoint, self.usable)
        with ranks.agree():
            if ranks.is_main and has_live_names(config):
                self.directory.discard_unfinished("functions and rows in memory may have changed since")
            finished = self.directory.resume(settings) if ranks.is_main else []
        finished = ranks.gather(finished)
        num_finished = len({row["row"] for chunk in finished for row in chunk.rows})
        logger.info(rows_to_evaluate_line(len(self.usable), num_finished))
        if not served:
            logger.info(loading_line(config, ranks.device))
        builder, trajectories = prompt_builder(config, checkpoint, self.usable.most_videos), None
        if config.rollout.has_tools:
            assert isinstance(builder, PromptBuilder), "settings with tools and an endpoint are refused"
            with ranks.agree():
                keeps = self.rewards.reads_environments
                turns = checked_turns(
                    config, base_of(checkpoint), builder, self.toolbox, self.usable.rows, keeps,
                    completions_per_chunk(config),
                )  # fmt: skip
                trajectories = build_trajectories(config, self.toolbox, turns, keeps, ranks)
            builder = turns.builder
        engine = evaluation_engine(config, checkpoint, builder, ranks)
        check = EngineCheck(config, engine)
        try:
            evaluator = Evaluator(
                config, ranks, builder, engine, self.rewards, self.usable, trajectories=trajectories, check=check
            )  # fmt: skip
            return evaluator.run(TrainerState(0, 0, 0.0), self.directory, finished, show_progress=ranks.is_main)
        finally:
            if ranks.is_main and check.proof.checks and self.proven is not None:
                self.proven(check.proof.state())
            engine.close()
            if trajectories is not None:
                trajectories.close()


def has_live_names(config: RunConfig) -> bool:
    """Return whether a reward function or the rows are objects in memory. A digest does not cover them fully."""
    functions = [*(spec.function for spec in config.rewards.specs), *config.rollout.functions]
    return any(map(is_live_name, [*functions, *(entry.name for entry in config.data.entries("eval"))]))


def what_matters(config: RunConfig, checkpoint: str, usable: UsableRows) -> dict[str, Any]:
    """Return the fingerprint of an evaluation, without secrets.

    An evaluation resumes an earlier one only if their fingerprints are equal.
    """
    files = [file_stamps(entry.name) for entry in data_sources(config.data, "eval")]
    sample_ids = [usable.rows.sample_ids[index] for index in usable.indices]
    return starred(
        {
            "model": config.model.model_dump() | {"files": file_stamps(checkpoint)},
            "data": config.data.model_dump() | {"files": files},
            "samples": hashlib.sha256("\n".join(sample_ids).encode()).hexdigest(),
            "rewards": config.rewards.model_dump()
            | {"files": [file_stamps(spec.function) for spec in config.rewards.specs]},
            "sampling": asdict(evaluation_sampling(config)),
            "engine": config.evaluation.endpoint_url or config.rollout.engine,
            **({"tools": tools_that_matter(config.rollout)} if config.rollout.has_tools else {}),
        }
    )


def tools_that_matter(rollout: RolloutConfig) -> dict[str, Any]:
    """Return the settings of turns, and the files of tools and environments."""
    names = ("tools", "environment", "environment_protocol", "environment_kwargs", "max_turns",
             "max_turn_tokens", "tool_timeout", "tool_errors", "observation_role", "tool_format", "keep_images",
             "edit_every")  # fmt: skip
    files = [file_stamps(name) for name in rollout.functions]
    return rollout.model_dump(include=set(names)) | {"files": files}


def file_stamps(name: str) -> list[tuple[str, int, int]]:
    """Return name, size and modification time of the file that a setting names, or of its directory's files."""
    path = local_file(name)
    files = [] if path is None else sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
