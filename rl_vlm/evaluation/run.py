"""`rl-vlm eval`: one model, or several on the same data, from the settings to the files."""

from __future__ import annotations

import gc
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rl_vlm.config.load import check_evaluable
from rl_vlm.config.schema import RewardSpec, RunConfig
from rl_vlm.data import Rows, load_rows
from rl_vlm.engine import Engine
from rl_vlm.errors import ConfigError
from rl_vlm.evaluation.directory import EvaluationDirectory, write_whole
from rl_vlm.evaluation.evaluator import Evaluation, Evaluator, evaluation_sampling, is_plain
from rl_vlm.evaluation.figures import summarise_by
from rl_vlm.evaluation.kept import KeptRange, kept_range, write_kept
from rl_vlm.loading import initial_checkpoint
from rl_vlm.reward import RewardSuite
from rl_vlm.rollout_engines import evaluation_engine, prompt_builder
from rl_vlm.types import TrainerState

Summary = dict[str, Any]


@dataclass(frozen=True)
class EvaluationOptions:
    """What one call asks for beside the settings."""

    by: Sequence[str] = ()
    """Columns of the data by whose values the figures are repeated."""
    keep: tuple[float, float] | None = None
    """Success rates of prompts that are written to a dataset."""
    keep_by: str | None = None
    """Reward function that decides what a success is. Default: the one with the largest weight."""


def evaluate_run(config: RunConfig, options: EvaluationOptions = EvaluationOptions()) -> Summary:
    """Evaluate the config's model, write `output_dir/evaluation/`, and return what `summary.json` has."""
    (summary,) = evaluate_models({"": config}, options).values()
    return summary


def compare_checkpoints(
    config: RunConfig, checkpoints: Sequence[str], options: EvaluationOptions = EvaluationOptions()
) -> dict[str, Summary]:
    """Evaluate each checkpoint in place of the config's model; summaries by name, which is its folder's if several."""
    configs = {}
    for name, checkpoint in checkpoint_names(checkpoints).items():
        model = config.model.model_copy(update={"model_name_or_path": checkpoint})
        configs[name] = config.model_copy(update={"model": model})
    return evaluate_models(configs, options)


def checkpoint_names(checkpoints: Sequence[str]) -> dict[str, str]:
    """Checkpoints by the last part of their path, or by all of it where last parts are the same.

    Raises ConfigError for a checkpoint that is named twice.
    """
    lasts = [Path(checkpoint).name for checkpoint in checkpoints]
    names = lasts if len(set(lasts)) == len(lasts) else [str(Path(checkpoint)) for checkpoint in checkpoints]
    named = {re.sub(r"[^\w.-]+", "_", name): checkpoint for name, checkpoint in zip(names, checkpoints, strict=True)}
    if len(named) < len(checkpoints):
        raise ConfigError(f"--checkpoint: {', '.join(checkpoints)}: a checkpoint is named twice; leave one out")
    return named


def evaluate_models(configs: Mapping[str, RunConfig], options: EvaluationOptions) -> dict[str, Summary]:
    """One evaluation per name. What is finished of each is kept until all are."""
    config = next(iter(configs.values()))
    check_evaluable(config)
    engine = Engine(config.train.output_dir, config.log)
    root = Path(config.train.output_dir) / "evaluation"
    folders = {name: root / name if len(configs) > 1 else root for name in configs}
    directories = {name: EvaluationDirectory(folder, root / "images") for name, folder in folders.items()}
    rows = load_rows(config.data, "eval")
    summaries = {}
    with RewardSuite(config.rewards) as rewards:
        kept = check_options(options, rows, rewards, config.rollout.num_generations_eval)
        for name, config in configs.items():
            model = EvaluatedModel(config, engine, rows, rewards, directories[name])
            summaries[name] = model.evaluate(options.by, kept)
            gc.collect()  # before the next model is loaded
    if engine.is_main:
        if len(summaries) > 1:
            write_whole(root / "comparison.json", (json.dumps(summaries, indent=2) + "\n").encode())
        for directory in directories.values():
            directory.forget_unfinished()
    engine.close()
    return summaries


def check_options(
    options: EvaluationOptions, rows: Rows, rewards: RewardSuite, num_generations: int
) -> KeptRange | None:
    """The range of `--keep`. Raises ConfigError or RewardError for what the data or the rewards do not have."""
    columns = rows.sample(0).columns
    rewards.check_columns(columns)
    usable = [name for name, value in columns.items() if is_plain(value)]
    for column in options.by:
        if column not in usable:
            raise ConfigError(
                f"--by {column}: the data's columns of text and numbers are {', '.join(usable) or 'none'}"
            )
    if options.keep is None:
        return None
    return kept_range(*options.keep, options.keep_by, rewards, num_generations)


@dataclass(frozen=True)
class EvaluatedModel:
    """One model with all that its evaluation needs."""

    config: RunConfig
    engine: Engine
    rows: Rows
    rewards: RewardSuite
    directory: EvaluationDirectory

    def evaluate(self, by: Sequence[str], kept: KeptRange | None) -> Summary:
        """Evaluate the model, or go on where an evaluation with the same settings was killed, and write the files."""
        evaluation = self.sample_and_score()
        return self.engine.together(lambda: self.summarise_and_write(evaluation, by, kept))

    def summarise_and_write(self, evaluation: Evaluation, by: Sequence[str], kept: KeptRange | None) -> Summary:
        """Every rank summarises; the main one writes."""
        names, num_generations = self.rewards.names, self.config.rollout.num_generations_eval
        summary: Summary = dict(evaluation.metrics)
        if by:
            summary["by"] = {column: summarise_by(evaluation.rows, column, names, num_generations) for column in by}
        if not self.engine.is_main:
            return summary
        if kept is not None:
            num_kept = write_kept(self.directory.path / "kept.parquet", self.rows, evaluation.rows, kept)
            summary["kept"] = asdict(kept) | {"num_samples": num_kept}
        self.directory.write(summary, evaluation.rows)
        return summary

    def sample_and_score(self) -> Evaluation:
        """The model is loaded here, and freed on return."""
        config, engine = self.config, self.engine
        served = config.evaluation.endpoint_url is not None
        checkpoint = config.model.model_name_or_path if served else initial_checkpoint(config, engine)
        settings = what_matters(config, checkpoint, self.rows)
        finished = engine.gather(engine.together(lambda: self.directory.resume(settings) if engine.is_main else []))
        builder = prompt_builder(config, checkpoint)
        generator = evaluation_engine(config, checkpoint, builder, engine)
        try:
            evaluator = Evaluator(config, engine, builder, generator, self.rewards, self.rows)
            show_progress = engine.is_main and not config.log.disable_tqdm
            return evaluator.run(TrainerState(0, 0, 0.0), self.directory, finished, show_progress)
        finally:
            generator.close()


def what_matters(config: RunConfig, checkpoint: str, rows: Rows) -> dict[str, Any]:
    """What two evaluations must have in common for one to go on with the completions of the other."""
    specs = [RewardSpec(function=s) if isinstance(s, str) else s for s in config.rewards.reward_funcs]
    data = str(config.data.eval_dataset_name)
    return {
        "model": config.model.model_dump() | {"files": file_stamps(checkpoint)},
        "data": config.data.model_dump() | {"files": file_stamps(data)},
        "samples": hashlib.sha256("\n".join(rows.sample_ids).encode()).hexdigest(),
        "rewards": config.rewards.model_dump() | {"files": [file_stamps(s.function.split(":")[0]) for s in specs]},
        "sampling": asdict(evaluation_sampling(config)),
        "engine": config.evaluation.endpoint_url or config.rollout.engine,
    }


def file_stamps(name: str) -> list[tuple[str, int, int]]:
    """Name, size and time of change of a file, or of the files of a directory; nothing for a name that is neither."""
    path = Path(name)
    files = sorted(path.iterdir()) if path.is_dir() else [path] if path.is_file() else []
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
