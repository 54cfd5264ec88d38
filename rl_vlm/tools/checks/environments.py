"""Checks of tools and environments. A run without tools imports no torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_vlm.reward.suite import RewardSuite
from rl_vlm.tools.checks.diagnosis import DATA, Checking, Note, attempt, calling
from rl_vlm.tools.checks.settings import rewards
from rl_vlm.tools.checks.table import Subject

if TYPE_CHECKING:
    from rl_vlm.data.samples import Rows
    from rl_vlm.rollout.environments.contract import Toolbox


def toolbox(subject: Subject) -> Checking[Toolbox | None]:
    """Load the tools and environments, with the rewards of the latter. Return None if the run has none."""
    config = subject.config
    if not config.rollout.has_tools:
        return None
    from rl_vlm.rollout.environments.contract import load_toolbox

    found = load_toolbox(config.rollout)
    names = [*found.functions, *(f"{kind.name}.{tool}" for kind in found.kinds.values() for tool in kind.tools)]
    yield Note(f"tools {', '.join(names) or 'none'}")
    if len(subject.value(rewards) or ()) == len(config.rewards.specs):
        with RewardSuite(config.rewards, found.rewarding) as suite:
            if subject.kind == "train":
                suite.check_weights()
    return found


def named_environments(subject: Subject, rows: Rows) -> Checking[None]:
    """Check that rows name their environments."""
    if found := subject.value(toolbox):
        yield from attempt(calling(found.check_rows, rows), DATA)
