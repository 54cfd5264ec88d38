"""`rl-vlm rewards check --completions`: what training would see of the initial model."""

from pathlib import Path
from typing import Any

import pytest

from rl_vlm.tools.checks.rewards.sampled import sample_completions
from tests.helpers.tiny_run import build_checkpoint, constant, make_config, token_sum


@pytest.mark.parametrize(("reward", "share"), [(constant, 1.0), (token_sum, 0.0)])
def test_groups_without_spread(reward, share: float, tmp_path: Path) -> None:
    checkpoint = build_checkpoint(tmp_path / "model")
    name = f"{reward.__module__}:{reward.__name__}"
    config = make_config(checkpoint, tmp_path / "run", reward_funcs=[name])
    found = sample_completions(config, num_rows=3)
    assert (found.groups, found.completions) == (3, 3 * config.rollout.num_generations)
    assert found.groups_without_spread == share
    assert [finding.kind for finding in found.findings()] == (["no spread"] if share else [])
    assert not (tmp_path / "run").exists()


class Halves:
    """Every completion has the reward 1. A step has more of it if its text is longer."""

    def reset(self, **columns: Any) -> None: ...

    def step(self, text: str) -> tuple[str, float, bool, dict[str, Any]]:
        return "Go on.", len(text) / 100, False, {}

    def get_reward(self) -> float:
        return 1.0


@pytest.mark.parametrize(("credit", "share"), [("none", 1.0), ("return", 0.0), ("gigpo", 0.0)])
def test_groups_of_equal_rewards_have_spread_if_turns_differ(credit: str, share: float, tmp_path: Path) -> None:
    """All second turns begin alike, and their returns are 1 minus the reward of the first step."""
    checkpoint = build_checkpoint(tmp_path / "model")
    settings = {"environment": f"{__name__}:Halves", "environment_protocol": "steps", "max_turns": 2}
    settings |= {"turn_advantages": credit, "reward_funcs": [], "max_completion_length": 400}
    found = sample_completions(make_config(checkpoint, tmp_path / "run", **settings), num_rows=2)
    assert (found.groups, found.reward, found.groups_without_spread) == (2, 1.0, share)
