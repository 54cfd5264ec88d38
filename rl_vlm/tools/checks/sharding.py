"""Check the settings with the sharding and the processes of a launch. This module imports no torch."""

from __future__ import annotations

import os

from rl_vlm.distributed.launch_variables import check_evaluation_launch, check_precision, is_launched, read_launch
from rl_vlm.distributed.setup import setup_problems
from rl_vlm.tools.checks.diagnosis import Checking, Note, finding_of
from rl_vlm.tools.checks.table import CheckCost, Subject


def sharding(subject: Subject) -> Checking[bool]:
    """Check the launcher's request, if there is a launcher. Return whether a run can start with it."""
    if not is_launched():
        return True
    launch, config = read_launch(), subject.config
    if subject.kind == "eval":
        check_evaluation_launch(launch, config.model.dtype)
        return True
    row, num_ranks = launch.sharding, int(os.environ.get("WORLD_SIZE", "1"))
    problems = setup_problems(config, row, num_ranks)
    problems.call(check_precision, launch.mixed_precision, config.model.dtype)
    if subject.cost > CheckCost.SECONDS:
        problems.call(launch.check)
    for error in problems.errors:
        yield finding_of(error)
    if not problems.errors:
        yield Note(f"sharding {row.name} on {num_ranks} process{'es' * (num_ranks != 1)}")
    return not problems.errors
