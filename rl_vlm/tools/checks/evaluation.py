"""Checks of the options of an evaluation. This module imports no torch."""

from __future__ import annotations

from rl_vlm.evaluation.options import check_by, checkpoint_names, kept_range
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.tools.checks.diagnosis import SETTING, Checking, Note, attempt_call
from rl_vlm.tools.checks.environments import toolbox
from rl_vlm.tools.checks.first_rows import first_rows
from rl_vlm.tools.checks.settings import rewards
from rl_vlm.tools.checks.table import Subject


def evaluation_options(subject: Subject) -> Checking[None]:
    """Check the options of an evaluation against its rewards and its data."""
    options, config = subject.options, subject.config
    yield from attempt_call(SETTING, checkpoint_names, subject.checkpoints)
    rows = (subject.value(first_rows) or {}).get("eval")
    if rows is not None:
        yield from attempt_call(SETTING, check_by, options, rows)
    elif options.by:
        yield Note(f"--by {', '.join(options.by)}", is_checked=False)
    loaded = subject.value(rewards)
    if loaded and len(loaded) == len(config.rewards.reward_funcs):
        box = subject.value(toolbox)
        kept_range(options, RewardSuite(config.rewards, box and box.rewarding), config.rollout.num_generations_eval)
