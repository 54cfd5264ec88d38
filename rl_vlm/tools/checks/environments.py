"""Checks of tools and environments. A run without tools imports no torch here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rl_vlm.reward.suite import RewardSuite
from rl_vlm.tools.checks.diagnosis import DATA, SETTING, Checking, Note, attempt, attempt_call, calling
from rl_vlm.tools.checks.settings import batches, rewards
from rl_vlm.tools.checks.table import Subject

if TYPE_CHECKING:
    from rl_vlm.data.samples import Rows
    from rl_vlm.rollout.environments.contract import Toolbox


def toolbox(subject: Subject) -> Checking[Toolbox | None]:
    """Load the tools and environments, with the rewards of the latter. Return None if the run has none."""
    config = subject.config
    if not config.rollout.has_tools:
        return None
    from rl_vlm.rollout.environments.loading import load_toolbox

    found = load_toolbox(config.rollout)
    names = [*found.functions, *(f"{kind.name}.{tool}" for kind in found.kinds.values() for tool in kind.tools)]
    yield Note(f"tools {', '.join(names) or 'none'}")
    yield from subject.left_out("how the chat template writes tools and observations; `rl-vlm doctor` tries it")
    if len(subject.value(rewards) or ()) == len(config.rewards.specs):
        yield from all_rewards(subject, found)
    return found


def all_rewards(subject: Subject, box: Toolbox) -> Checking[None]:
    """Check reward functions and environments together: their names, that a run has a reward, and their number."""
    suite = yield from attempt_call(SETTING, RewardSuite, subject.config.rewards, box.rewarding)
    if suite is None:
        return
    with suite:
        if subject.kind == "train":
            yield from attempt_call(SETTING, suite.check_weights)
        if suite.reads_environments:
            yield from attempt(enough_environments(subject))


def enough_environments(subject: Subject) -> Checking[None]:
    """Check that there are as many environments as completions that are scored together."""
    from rl_vlm.evaluation.evaluator import completions_per_chunk
    from rl_vlm.rollout.environments.build import check_num_environments
    from rl_vlm.run.build import num_scored_at_once

    config, sizes = subject.config, subject.value(batches)
    if subject.kind == "eval":
        number = completions_per_chunk(config)
    elif sizes is not None:
        number = num_scored_at_once(config, sizes)
    else:
        return
    yield from calling(check_num_environments, config.rollout.max_environments, True, number)


def named_environments(subject: Subject, rows: Rows) -> Checking[None]:
    """Check that rows name their environments."""
    if found := subject.value(toolbox):
        yield from attempt_call(DATA, found.check_rows, rows)
