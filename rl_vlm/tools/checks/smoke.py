"""Train for two steps of the run, on a few of its rows, in a temporary directory."""

from __future__ import annotations

import copy
import logging
from bisect import bisect_left
from pathlib import Path
from typing import Any

from rl_vlm.config.schema import RunConfig
from rl_vlm.data.check import UsableRows
from rl_vlm.data.images import image_path
from rl_vlm.data.tables import IMAGE_COLUMNS, Row, is_filled
from rl_vlm.errors import Finding, RLVLMError, Stopped, shorten, text_of
from rl_vlm.run.run import train
from rl_vlm.tools.checks.constant import check_constant_rewards
from rl_vlm.tools.checks.diagnosis import Diagnosis

NUM_LARGEST = 2
NUM_ROWS = 8
LENGTH = 16
"""Maximum number of tokens in a completion."""
GROUP = 4
"""Maximum number of completions per prompt."""
REMEDY = "Change what the message names: the run would end so, too."
PACKAGE = logging.getLogger("rl_vlm")
logger = logging.getLogger(__name__)

_rows: dict[str, list[Row]] = {"train": [], "eval": []}


def training_rows() -> list[Row]:
    """Return the rows of the two steps."""
    return _rows["train"]


def held_out_rows() -> list[Row]:
    """Return the held-out rows for the evaluations of the two steps."""
    return _rows["eval"]


def spread(completions: list[Any]) -> list[float]:
    """Return rewards that differ in every group, so that both steps have a gradient."""
    return [float(i % 2) for i in range(len(completions))]


def run_two_steps(
    config: RunConfig, initial: str, trained: UsableRows, held_out: UsableRows | None, diagnosis: Diagnosis
) -> None:
    """Train for two steps. Note an error as a finding. `config` has a temporary `output_dir`."""
    _rows["train"] = few_rows(trained)
    _rows["eval"] = few_rows(held_out) if held_out else []
    logger.info("taking two steps of the run on %d rows", len(_rows["train"]))
    level = PACKAGE.level
    PACKAGE.setLevel(logging.WARNING)  # hide the log lines of the run
    try:
        train(smoke_config(config, initial, held_out is not None))
        diagnosis.checked.append(f"two steps of the run on {len(_rows['train'])} rows, and a checkpoint")
        run = Path(config.train.output_dir) / "two_steps"
        check_constant_rewards(config.rewards, trained, trained.indices[:NUM_ROWS], run, diagnosis)
    except (Stopped, KeyboardInterrupt):
        raise
    except BaseException as error:  # of any library
        text = str(error) if isinstance(error, RLVLMError) else f"{type(error).__name__}: {shorten(text_of(error))}"
        diagnosis.findings.append(Finding("error", "two steps of the run", text, REMEDY))
    finally:
        PACKAGE.setLevel(level)
        _rows.update(train=[], eval=[])


def few_rows(usable: UsableRows) -> list[Row]:
    """Return the rows with the largest images and longest texts, the first rows, and the first rows of each source.

    Every row has all columns of the data, and an id that no row of another source has.
    """
    rows, indices = usable.rows, usable.indices
    firsts = [bisect_left(indices, part.start) for part in rows.parts]
    of_parts = [row for first in firsts for row in indices[first : first + NUM_LARGEST]]
    chosen = dict.fromkeys([*usable.largest(NUM_LARGEST), *indices[:NUM_ROWS], *of_parts])
    columns = dict.fromkeys(rows.source.columns)
    return [
        columns | with_absolute_paths(rows.source[row], rows.part(row).image_folder) | {"id": rows.sample_ids[row]}
        for row in chosen
    ]


def with_absolute_paths(row: Row, folder: Path) -> Row:
    """Return the row with absolute paths of its image files."""

    def absolute(value: Any) -> Any:
        path = image_path(value)
        return value if path is None else str((folder / path).absolute())

    filled = {name: row[name] for name in IMAGE_COLUMNS if is_filled(row.get(name))}
    images = {name: [absolute(v) for v in value] if isinstance(value, list) else absolute(value)
              for name, value in filled.items()}  # fmt: skip
    return row | images


def smoke_config(config: RunConfig, initial: str, is_evaluated: bool) -> RunConfig:
    """Return the run's settings, changed to two steps on few rows, with short completions and without trackers."""
    values: dict[str, dict[str, Any]] = copy.deepcopy(config.model_dump())
    values["model"]["model_name_or_path"] = initial
    values["data"] |= {
        "dataset_name": f"{__name__}:training_rows",
        "eval_dataset_name": f"{__name__}:held_out_rows" if is_evaluated else None,
        "dataset_config": None, "dataset_train_split": "train", "dataset_test_split": "test",
        "columns": {}, "ignore_columns": [], "image_root": None, "max_prompt_length": None,
    }  # fmt: skip
    values["rewards"]["reward_funcs"].append({"function": f"{__name__}:spread", "name": "doctor_spread"})
    if config.rewards.reward_weights is not None:
        values["rewards"]["reward_weights"].append(1.0)
    values["rollout"]["num_generations"] = min(config.rollout.num_generations, GROUP)
    values["rollout"]["max_completion_length"] = min(config.rollout.max_completion_length, LENGTH)
    values["train"] |= {
        "output_dir": str(Path(config.train.output_dir) / "two_steps"), "overwrite_output_dir": False,
        "resume_from_checkpoint": None, "max_steps": 2, "prompts_per_step": 2, "per_device_train_batch_size": None,
        "gradient_accumulation_steps": None, "steps_per_generation": None, "save_steps": 0, "eval_steps": 0,
        "load_best_model_at_end": False,
    }  # fmt: skip
    values["log"] |= {"report_to": [], "disable_tqdm": True, "num_completions_to_print": 0}
    values["log"] |= {"memory_profile": False, "report": False}
    return RunConfig.model_validate(values)
