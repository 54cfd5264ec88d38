"""`rl-vlm rewards check --completions`: what training would see of the initial model."""

from pathlib import Path

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
