"""`--dry-run`: the resolved settings, what was checked, and all problems at once."""

from __future__ import annotations

import os
from collections.abc import Sequence

from rl_vlm.config.batches import plan_batches
from rl_vlm.config.describe import describe
from rl_vlm.config.load import check_evaluable, check_trainable
from rl_vlm.config.schema import RunConfig
from rl_vlm.evaluation.options import EvaluationOptions
from rl_vlm.tools.checks.dry_run import Report, check_evaluation, check_serving, check_training


def dry_run_training(config: RunConfig) -> tuple[str, list[str]]:
    """Return the text that describes a training run, and its problems."""
    settings, plan = Report(), None
    with settings.problem():
        check_trainable(config)
    with settings.problem():
        plan = plan_batches(config, world_size())
    report = check_training(config, plan)
    return describe(config, plan) + _comments(report), settings.problems + report.problems


def dry_run_evaluation(
    config: RunConfig, checkpoints: Sequence[str], options: EvaluationOptions
) -> tuple[str, list[str]]:
    """Return the text that describes an evaluation, and its problems."""
    settings = Report()
    with settings.problem():
        check_evaluable(config)
    report = check_evaluation(config, checkpoints, options)
    return describe(config) + _comments(report), settings.problems + report.problems


def dry_run_serving(config: RunConfig) -> tuple[str, list[str]]:
    """Return the text that describes servers, and their problems."""
    report = check_serving(config)
    return describe(config) + _comments(report), report.problems


def world_size() -> int:
    """Return the number of processes that the launcher started."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def _comments(report: Report) -> str:
    parts = {"Checked": report.checked, "Not checked": report.not_checked, "Warning": report.warnings}
    return "".join(f"# {part}: {line}.\n" for part, lines in parts.items() for line in lines)
