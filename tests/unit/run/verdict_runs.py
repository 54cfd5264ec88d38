"""Runs of known outcome, whose metrics and completions are in `tests/data/verdicts`.

python -m tests.unit.run.verdict_runs FOLDER [NAME …]    # train those that FOLDER lacks, and record all (an hour)
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rl_vlm.config.load import load_config
from rl_vlm.log.completions import function_columns, held_out_path, window_paths
from rl_vlm.log.metrics import (
    BEST_OF_GROUP,
    DISTINCT_ANSWERS,
    FAULTED,
    ITERATION,
    NUM_GROUPS,
    WITHOUT_VARIANCE,
    is_score,
)
from rl_vlm.run.run import train
from tests.helpers import verdict_tasks
from tests.helpers.verdict_tasks import FAMILY, TASK

RECORDS = Path(__file__).parents[2] / "data" / "verdicts"
TASKS = verdict_tasks.__name__
DIGITS = 4
"""Significant digits of a recorded metric."""


@dataclass(frozen=True)
class KnownRun:
    """A run, what became of it, and how that is known."""

    outcome: str
    because: str
    task: str = "digit"
    family: str = "qwen2_5_vl"
    starts_from: str | None = None
    """Another run whose last checkpoint it starts from."""
    has_windows: bool = False
    """Whether the completions of training are recorded, as an older run without metrics of groups needs them."""
    settings: dict[str, Any] = field(default_factory=dict)


LONGER = {"train.prompts_per_step": 96, "train.max_steps": 112, "train.eval_steps": 20, "rollout.max_num_seqs": 1536}
"""The settings of configs/digits.yaml."""
PATH = "tests/helpers/verdict_tasks.py"
UP = "The held-out reward rises by more than 0.1."


def healthy(task: str = "digit", family: str = "qwen2_5_vl", seed: int = 0, **settings: Any) -> KnownRun:
    """Return a run that learned. Settings have `__` in place of the dot."""
    given = {name.replace("__", "."): value for name, value in settings.items()}
    return KnownRun("learned", UP, task, family, settings={"train.seed": seed} | given)


RUNS: dict[str, KnownRun] = {
    "digits_0": KnownRun("learned", UP, settings=LONGER),
    "digits_1": healthy(seed=1, train__max_steps=100),
    "digits_2": healthy(seed=2),
    "digits_3": healthy(seed=3),
    "digits_4": healthy(seed=10),
    "digits_cold": healthy(seed=11, rollout__temperature=0.8),
    "digits_dr_grpo": healthy(seed=8, algorithm__loss_type="dr_grpo"),
    "digits_g8": healthy(seed=7, rollout__num_generations=8, train__prompts_per_step=64),
    "digits_gspo": healthy(seed=6, algorithm__importance_sampling_level="sequence"),
    "digits_qwen3": healthy(family="qwen3_vl"),
    "qwen3_5": healthy(family="qwen3_5"),
    "internvl_digits": healthy(family="internvl", data__min_pixels="null"),
    "smolvlm_digits": healthy(family="smolvlm", data__min_pixels="null"),
    "gemma3_large": healthy("large", "gemma3", data__min_pixels="null"),
    "paligemma_large": healthy("large", "paligemma", data__min_pixels="null"),
    "glm4v_large": healthy("large", "glm4v", data__min_pixels="null"),
    "internvl_large": healthy("large", "internvl", seed=12, data__min_pixels="null"),
    "qwen3_5_large": healthy("large", "qwen3_5", seed=13),
    "large_0": healthy("large"),
    "large_1": healthy("large", "qwen3_vl", seed=3),
    "large_long": healthy("large", seed=4, train__max_steps=140),
    "qwen3_large_kl": healthy("large", "qwen3_vl", seed=9, algorithm__beta=0.05),
    "quadrant_2": healthy("quadrant", "qwen3_vl", seed=2, algorithm__beta=0.05),
    "half": healthy(
        seed=2, train__max_steps=28, train__prompts_per_step=64, train__lr_scheduler_type="constant"
    ),
    "unchanged_lr": KnownRun(
        "unchanged", "The learning rate is 1e-7.",
        settings={"train.learning_rate": 1e-7, "train.lr_scheduler_type": "constant", "train.max_steps": 24,
                  "train.prompts_per_step": 48, "train.eval_steps": 20},
    ),
    "unchanged_noise": KnownRun(
        "unchanged", "The reward is random.",
        settings={"rewards.reward_funcs": [f"{PATH}:noise"], "train.max_steps": 40},
    ),
    "quadrant_0": KnownRun(
        "unchanged", "The held-out reward stays at 0.44, and half of the groups still differ.", "quadrant"
    ),
    "quadrant_1": KnownRun(
        "unchanged", "As the one above.", "quadrant", "qwen3_vl", settings={"train.seed": 1}
    ),
    "worse_0": KnownRun(
        "worse", "Training calls the next digit right.", "wrong", starts_from="half",
        settings={"train.max_steps": 40},
    ),
    "worse_1": KnownRun(
        "worse", "As the one above.", "wrong", starts_from="half",
        settings={"train.max_steps": 40, "train.seed": 5},
    ),
    "constant": KnownRun(
        "rewards constant", "Every completion gets half a point.",
        settings={"rewards.reward_funcs": [f"{PATH}:constant"], "train.max_steps": 12, "train.prompts_per_step": 48},
    ),
    "faulty": KnownRun(
        "rewards faulty", "The function returns NaN for a third of the completions.",
        settings={"rewards.reward_funcs": [f"{PATH}:faulty"], "train.max_steps": 16},
    ),
    "short": KnownRun(
        "too short to tell", "There are two steps.",
        settings={"train.max_steps": 2, "train.learning_rate": 1e-5},
    ),
    "no_exploration": KnownRun(
        "collapsed", "Every completion names one quadrant.", "quadrant", "qwen3_vl",
        has_windows=True,
        settings={"train.lr_scheduler_type": "constant", "train.learning_rate": 1e-3, "algorithm.num_iterations": 1,
                  "algorithm.epsilon_high": 0.2, "rollout.num_generations": 8, "train.max_steps": 120,
                  "train.eval_steps": 20},
    ),
    "learning_rate": KnownRun(
        "collapsed", "All completions are empty of answers, by a learning rate of 0.01.",
        settings=LONGER | {"train.learning_rate": 1e-2, "train.lr_scheduler_type": "constant", "train.max_steps": 80},
    ),
    "hacked": KnownRun(
        "collapsed", "Every completion is the answer 1, which gets half a point for any image.",
        settings=LONGER | {"rewards.reward_funcs": [f"{PATH}:pays_one"], "train.max_steps": 80},
    ),
    "llava_onevision_large": KnownRun(
        "collapsed", "The held-out reward stays at that of one answer, and answers are equal.", "large",
        "llava_onevision", settings={"data.min_pixels": "null"},
    ),
    "lfm2_large": KnownRun(
        "collapsed", "As the one above.", "large", "lfm2_vl", settings={"data.min_pixels": "null"}
    ),
    "quadrant_3": KnownRun(
        "collapsed", "Every completion names one quadrant.", "quadrant", "internvl",
        settings={"data.min_pixels": "null", "train.max_steps": 80},
    ),
    "parity": KnownRun(
        "collapsed", "The held-out reward stays at 0.69, that of a constant answer, and answers are equal.", "parity",
        settings={"train.prompts_per_step": 48, "train.eval_steps": 20},
    ),
}  # fmt: skip


def settings_of(run: KnownRun, name: str, folder: Path) -> list[str]:
    """Return the settings of a run that differ from those of configs/digits.yaml."""
    start = f"{TASKS}:starting_model" if run.starts_from is None else newest_checkpoint(folder / run.starts_from)
    common = {
        "model.model_name_or_path": start, "data.dataset_name": f"{TASKS}:train_rows",
        "data.eval_dataset_name": f"{TASKS}:held_out_rows", "train.output_dir": folder / name,
        "train.save_steps": 0, "train.eval_steps": 0, "train.max_steps": 60, "train.prompts_per_step": 32,
        "rollout.max_num_seqs": 512, "log.report": False, "log.disable_tqdm": True,
    }  # fmt: skip
    return [
        f"{setting}={json.dumps(v) if isinstance(v, list) else v}" for setting, v in (common | run.settings).items()
    ]


def newest_checkpoint(folder: Path) -> Path:
    return max(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))


def train_known(name: str, folder: Path) -> None:
    """Train a run of the table, unless `folder` has it."""
    run = RUNS[name]
    if (folder / name / "summary.json").is_file():
        return
    if run.starts_from is not None:
        train_known(run.starts_from, folder)
    os.environ |= {TASK: run.task, FAMILY: run.family}
    train(load_config("configs/digits.yaml", settings_of(run, name, folder)))


def record(name: str, folder: Path) -> None:
    """Write what the verdict reads of a run, and the texts of its completions, to `RECORDS`."""
    target = RECORDS / name
    shutil.rmtree(target, ignore_errors=True)
    (target / "completions").mkdir(parents=True)
    lines = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    kept = [{key: rounded(value) for key, value in line.items() if is_recorded(key)} for line in lines]
    (target / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    evaluated = [line["step"] for line in lines if "eval_num_samples" in line]
    for step in {evaluated[0], evaluated[-1]}:
        copy_columns(held_out_path(folder / name, step), target / "completions", ("sample_id", "completion_index"))
    for path in window_paths(folder / name) if RUNS[name].has_windows else []:
        copy_columns(path, target / "completions")


def is_recorded(metric: str) -> bool:
    """Return whether the verdict, or a test of it, reads a metric."""
    names = "step reward reward_std eval_num_samples eval_reward".split()
    names += [BEST_OF_GROUP, DISTINCT_ANSWERS, FAULTED, ITERATION, NUM_GROUPS, WITHOUT_VARIANCE]
    return metric in names or is_score(metric)


def rounded(value: float) -> float:
    return value if isinstance(value, int) else float(f"{value:.{DIGITS}g}")


def copy_columns(path: Path, target: Path, more: tuple[str, ...] = ()) -> None:
    """Copy a completions file with a few of its columns."""
    from pyarrow.parquet import read_schema, read_table, write_table

    functions = function_columns(read_schema(path).names)
    columns = ["step", "group_id", *more, "completion", *functions, "reward"]
    write_table(read_table(path, columns=columns), target / path.name, compression="zstd")


def main() -> None:
    folder, *names = sys.argv[1:]
    for name in names or RUNS:
        train_known(name, Path(folder).absolute())
        record(name, Path(folder).absolute())


if __name__ == "__main__":
    main()
