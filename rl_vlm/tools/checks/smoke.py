"""Train for two steps of the run, on a few of its rows, in a temporary directory, and look at the scores."""

from __future__ import annotations

import copy
import gc
import logging
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import chdir, suppress
from pathlib import Path
from typing import Any

from rl_vlm.config.schema import RewardsConfig, RunConfig
from rl_vlm.data.check import UsableRows
from rl_vlm.data.images import image_path
from rl_vlm.data.layouts import with_media
from rl_vlm.data.samples import Part
from rl_vlm.data.tables import IMAGE_COLUMNS, VIDEO_COLUMNS, TableRow, is_filled
from rl_vlm.data.video.values import absolute_video
from rl_vlm.errors import DataError, Finding, RLVLMError, Stopped, shorten, text_of
from rl_vlm.functions import live
from rl_vlm.log.completions import window_paths
from rl_vlm.log.starts import read_starts
from rl_vlm.passes.proof import JOINED
from rl_vlm.reward.function import Reward, random_states_kept
from rl_vlm.reward.golds import (
    columns_to_write,
    gold_columns,
    gold_completions,
    golds_of,
    score_texts,
    why_not_scored,
)
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.run.run import train
from rl_vlm.tools.checks.diagnosis import Checking, Note
from rl_vlm.tools.checks.model import prompts, size
from rl_vlm.tools.checks.settings import batches, rewards
from rl_vlm.tools.checks.table import Subject

NUM_LARGEST = 2
NUM_ROWS = 8
LENGTH = 16
"""Maximum number of tokens in a completion."""
GROUP = 4
"""Maximum number of completions per prompt."""
LOOK_AT_IT = (
    "Look at what the function reads in a completion. `rl-vlm rewards check` scores gold answers and cheats with it, "
    "and with --completions N longer completions of the model."
)
NUM_PROMPTS = 2
"""Minimum number of prompts per step. A step has more if rows differ in their numbers of images."""
UNPROVEN = (
    "The run is correct but slower. Try memory.shared_attention: sdpa, or another version of torch. docs/proof.md "
    "describes the proof."
)
REMEDY = "Change the setting or the data that the message names. The run would end with the same error."
PACKAGE = logging.getLogger("rl_vlm")
logger = logging.getLogger(__name__)

TRAINING_ROWS = "python:training_rows#doctor"
HELD_OUT_ROWS = "python:held_out_rows#doctor"
"""Names of the functions that return the rows of the two steps."""


def spread(completions: list[Any]) -> list[float]:
    """Return rewards that differ in every group, so that both steps have a gradient."""
    return [float(i % 2) for i in range(len(completions))]


def two_steps(subject: Subject) -> Checking[None]:
    """Take two steps of the run, unless earlier checks say that the run would not start."""
    found, config = subject.value(prompts), subject.elsewhere
    if found is None or not subject.value(size):
        return
    gc.collect()
    if config.vllm.vllm_server_base_url:
        reason = "its servers, which others may use, would get new weights"
    elif subject.value(batches) is None or len(subject.value(rewards) or ()) < len(config.rewards.specs):
        reason = "the settings or reward functions have errors"
    else:
        yield from run_two_steps(config, found.checkpoint, found.train, found.held_out)
        return
    yield Note(f"two steps of the run: {reason}", is_checked=False)


def run_two_steps(config: RunConfig, initial: str, trained: UsableRows, held_out: UsableRows | None) -> Checking[None]:
    """Train for two steps. Yield a finding if an error ends them. `config` has a temporary `output_dir`."""
    chosen, others = few_rows(trained), few_rows(held_out) if held_out else {}
    first = first_step_rows(trained, list(chosen))
    rows = [chosen[row] for row in dict.fromkeys([*first, *chosen])]
    logger.info("taking two steps of the run on %d rows", len(rows))
    with live({TRAINING_ROWS: lambda: rows, HELD_OUT_ROWS: lambda: list(others.values())}):
        error = error_of_training(smoke_config(config, initial, held_out is not None, max(len(first), NUM_PROMPTS)))
    run = Path(config.train.output_dir) / "two_steps"
    yield from proof_lines(run)
    if error is not None:
        yield Finding("error", "two steps of the run", error, REMEDY)
        return
    yield Note(f"two steps of the run on {len(rows)} rows, and a checkpoint")
    yield from check_constant_rewards(config.rewards, trained, trained.indices[:NUM_ROWS], run)


def proof_lines(run: Path) -> Checking[None]:
    """Yield the checks of a run's proof before its first step. A failed one is a warning if the run went on."""
    for start in read_starts(run):
        proof = start["proof"]
        for check in proof.get("checks", ()):
            text, result = check["check"], check["result"]
            if check.get("of") == JOINED and result == "failed":
                yield Note(f"before the first step: {text}. Each prompt has a run", is_checked=False)
            elif result != "failed":
                yield Note(f"before the first step: {text}", is_checked=result == "holds")
            elif proof["fallback"] is not None:
                what = f"{text}. The run goes on with {proof['fallback']}, which is slower"
                yield Finding("warning", "rows that are not proven", what, UNPROVEN)


def first_step_rows(usable: UsableRows, rows: Sequence[int]) -> list[int]:
    """Return a row for each number of images (none, one, several), and at least `NUM_PROMPTS` rows if there are."""
    firsts: dict[int, int] = {}
    for row in rows:
        with suppress(DataError):  # the run names it
            firsts.setdefault(min(len(usable.rows[row].images), 2), row)
    others = [row for row in rows if row not in firsts.values()]
    return [*firsts.values(), *others[: max(NUM_PROMPTS - len(firsts), 0)]]


def error_of_training(config: RunConfig) -> str | None:
    """Train without log lines. Return the message of the error that ends the training, or None."""
    level = PACKAGE.level
    PACKAGE.setLevel(logging.WARNING)
    try:
        train(config)
    except (Stopped, KeyboardInterrupt):
        raise
    except BaseException as error:  # of any library
        return str(error) if isinstance(error, RLVLMError) else f"{type(error).__name__}: {shorten(text_of(error))}"
    finally:
        PACKAGE.setLevel(level)
    return None


def few_rows(usable: UsableRows) -> dict[int, TableRow]:
    """Return the rows with the largest images and longest texts, the first rows, and the first rows of each source.

    The keys are indices of rows. Every row has all columns of the data, and an id that is unique over all sources.
    """
    rows, indices = usable.rows, usable.indices
    firsts = [bisect_left(indices, part.start) for part in rows.parts]
    of_parts = [row for first in firsts for row in indices[first : first + NUM_LARGEST]]
    chosen = dict.fromkeys([*usable.largest(NUM_LARGEST), *indices[:NUM_ROWS], *of_parts])
    columns = dict.fromkeys(rows.source.columns)
    return {
        row: columns | with_absolute_paths(rows.source[row], rows.part(row)) | {"id": rows.sample_ids[row]}
        for row in chosen
    }


def with_absolute_paths(row: TableRow, part: Part) -> TableRow:
    """Return the row with absolute paths of its images and videos."""

    def absolute(value: Any) -> Any:
        path = image_path(value)
        return value if path is None else str((part.image_folder / path).absolute())

    row = with_media(row)
    filled = {name: row[name] for name in IMAGE_COLUMNS if is_filled(row.get(name))}
    images = {name: [absolute(v) for v in value] if isinstance(value, list) else absolute(value)
              for name, value in filled.items()}  # fmt: skip
    videos = {name: absolute_video(row[name], part.video_folder) for name in VIDEO_COLUMNS if is_filled(row.get(name))}
    return row | images | videos


def smoke_config(config: RunConfig, initial: str, is_evaluated: bool, num_prompts: int = NUM_PROMPTS) -> RunConfig:
    """Return the run's settings, changed to two steps on few rows, with short completions and without trackers.

    The first step trains on the first `num_prompts` rows, and proves all of them.
    """
    values = short_settings(config, Path(config.train.output_dir) / "two_steps", num_prompts)
    values["model"]["model_name_or_path"] = initial
    values["data"] |= {
        "dataset_name": TRAINING_ROWS,
        "eval_dataset_name": HELD_OUT_ROWS if is_evaluated else None,
        "dataset_config": None, "dataset_train_split": "train", "dataset_test_split": "test",
        "columns": {}, "ignore_columns": [], "image_root": None, "video_root": None, "max_prompt_length": None,
        "shuffle_dataset": False,
    }  # fmt: skip
    return RunConfig.model_validate(values)


def short_settings(config: RunConfig, output_dir: Path, num_prompts: int) -> dict[str, dict[str, Any]]:
    """Return the run's settings, changed to two steps on its own rows, with short completions and without trackers.

    The first step proves all of its rows, which are of `num_prompts` prompts.
    """
    values: dict[str, dict[str, Any]] = copy.deepcopy(config.model_dump())
    if config.model.verify != "off":
        longest = config.model.verify_length or config.rollout.max_completion_length
        values["model"] |= {"verify": "full", "verify_length": longest}
    values["rewards"]["reward_funcs"].append({"function": f"{__name__}:spread", "name": "doctor_spread"})
    if config.rewards.reward_weights is not None:
        values["rewards"]["reward_weights"].append(1.0)
    values["rollout"]["num_generations"] = min(config.rollout.num_generations, GROUP)
    values["rollout"]["max_completion_length"] = min(config.rollout.max_completion_length, LENGTH)
    values["rollout"]["max_turn_tokens"] = None  # it must be below that
    values["train"] |= {
        "output_dir": str(output_dir), "overwrite_output_dir": False,
        "resume_from_checkpoint": None, "max_steps": 2, "prompts_per_step": num_prompts,
        "per_device_train_batch_size": None, "gradient_accumulation_steps": None, "steps_per_generation": None,
        "save_steps": 0, "eval_steps": 0, "load_best_model_at_end": False,
    }  # fmt: skip
    values["log"] |= {"report_to": [], "disable_tqdm": True, "num_completions_to_print": 0}
    values["log"] |= {"memory_profile": False, "report": False}
    return values


def check_constant_rewards(config: RewardsConfig, usable: UsableRows, rows: Sequence[int], run: Path) -> Checking[None]:
    """Check each function that gave the same score to all completions in the directory of a run.

    It is a finding if the gold answers of `rows` get this score too. Two cases are noted as checked instead: gold
    answers get other scores, or the score is 0 and the function reads no gold answers. The few short completions may
    then simply lack the text that the function looks for.
    """
    with RewardSuite(config) as suite:
        weights = dict(zip(suite.names, suite.weights, strict=True))
        for reward in suite.functions:
            scores = sampled_scores(run, reward.name)
            if len(scores) < 2 or len(set(scores)) > 1:
                continue
            tried = made_up_scores(reward, usable, rows)
            is_constant = set(tried) == set(scores)
            what = f"{reward.name} gives {scores[0]:g} to all {len(scores)} completions that the two steps sampled"
            if is_constant and (scores[0] or gold_columns(usable.rows.columns, [reward])):
                has_others = any(weight for name, weight in weights.items() if name != reward.name)
                yield Finding(
                    "warning" if has_others else "error", "constant reward", f"{what}, and to gold answers", LOOK_AT_IT
                )
            else:
                others = f"; others get {min(tried):g} to {max(tried):g}" if tried else ""
                yield Note(f"scores of a few short completions: {what}{others}")


def sampled_scores(run: Path, name: str) -> list[float]:
    """Return a function's scores from the completions files of a run."""
    import pyarrow.parquet

    tables = [pyarrow.parquet.read_table(path) for path in window_paths(run)]
    columns = [table.column(name).to_pylist() for table in tables if name in table.column_names]
    return [score for column in columns for score in column if score is not None]


def made_up_scores(reward: Reward, usable: UsableRows, rows: Sequence[int]) -> list[float]:
    """Score the gold answers of rows in all forms, and an empty text. Return [] if `why_not_scored` gives a reason."""
    columns = usable.rows.columns
    if why_not_scored(reward, columns) is not None:
        return []
    samples = [usable.rows[row] for row in rows]
    reward.use_form(reward.find_form(samples[0]))
    found = []
    with random_states_kept(), chdir("."):
        for sample in samples:
            texts = ["", *gold_completions(golds_of(sample, columns_to_write(reward, columns))).values()]
            found += score_texts(reward, sample, texts, columns) if reward.applies(sample.columns) else []
    return [score for score in found if isinstance(score, float)]
