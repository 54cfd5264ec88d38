"""`--dry-run`: show the resolved settings, the checks, and all problems at once."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rl_vlm.config.batches import batch_sizes
from rl_vlm.config.describe import describe
from rl_vlm.config.load import check_evaluable, check_trainable
from rl_vlm.config.schema import RunConfig
from rl_vlm.evaluation.options import EvaluationOptions
from rl_vlm.tools.checks.diagnosis import Diagnosis
from rl_vlm.tools.checks.dry_run import check_evaluation, check_serving, check_training
from rl_vlm.tools.checks.report import comments


def dry_run_training(config: RunConfig) -> tuple[str, list[str]]:
    """Return the text that describes a training run, and its problems."""
    settings, plan = Diagnosis(), None
    with settings.noting():
        check_trainable(config)
    with settings.noting():
        plan = batch_sizes(config, world_size())
    found = check_training(config, plan)
    return describe(config, plan) + comments(found), settings.texts("error") + found.texts("error")


def dry_run_evaluation(
    config: RunConfig, checkpoints: Sequence[str], options: EvaluationOptions
) -> tuple[str, list[str]]:
    """Return the text that describes an evaluation, and its problems."""
    settings = Diagnosis()
    with settings.noting():
        check_evaluable(config)
    found = check_evaluation(config, checkpoints, options)
    return describe(config) + comments(found), settings.texts("error") + found.texts("error")


def dry_run_serving(config: RunConfig) -> tuple[str, list[str]]:
    """Return the text that describes servers, and their problems."""
    found = check_serving(config)
    return describe(config) + comments(found), found.texts("error")


def world_size() -> int:
    """Return the number of processes that the launcher started."""
    return int(os.environ.get("WORLD_SIZE", "1"))
