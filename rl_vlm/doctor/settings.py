"""The checks of a dry run that concern no row: settings, reward functions, output directory, engine, model files."""

from __future__ import annotations

from rl_vlm.config.batches import BatchPlan, plan_batches
from rl_vlm.config.load import check_trainable
from rl_vlm.config.schema import RunConfig
from rl_vlm.doctor.findings import Diagnosis, Finding
from rl_vlm.dry_run import Report, check_around_data, check_rewards
from rl_vlm.reward.suite import RewardSuite

REMEDY = "Change the setting that the message names."


def check_settings(config: RunConfig, diagnosis: Diagnosis) -> tuple[list[RewardSuite], BatchPlan | None]:
    """Check the settings. Returns a suite for each reward function that loads, and the batch if it has a solution."""
    report, plan = Report(), None
    with report.problem():
        check_trainable(config)
    with report.problem():
        plan = plan_batches(config, 1)
    suites = check_rewards(config.rewards, report)
    check_around_data(config, report)
    diagnosis.checked += report.checked
    diagnosis.findings += [Finding("error", "settings", problem, REMEDY) for problem in report.problems]
    return suites, plan
