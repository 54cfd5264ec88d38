"""Dynamic sampling in runs of the tiny model."""

from pathlib import Path

import pytest

from rl_vlm.run.run import train
from tests.helpers import tiny_run
from tests.helpers.tiny_run import completions, make_config, metric_lines

EVEN = f"{__name__}:even"


def even(completion_ids: list[list[int]], **_: object) -> list[float]:
    """Two completions of one prompt get the same reward half of the time."""
    return [float(sum(ids) % 2 == 0) for ids in completion_ids]


def run(checkpoint: Path, output_dir: Path, rounds: int) -> dict[str, float]:
    """The metrics of one step on all rows."""
    train(
        make_config(
            checkpoint, output_dir, reward_funcs=[EVEN], num_generations=2, prompts_per_step=tiny_run.NUM_ROWS,
            max_resampling_rounds=rounds, max_steps=1,
        )
    )  # fmt: skip
    (line,) = metric_lines(output_dir)
    return line


def test_recovered_groups_are_trained_on(tiny_checkpoint, tmp_path):
    plain, resampled = run(tiny_checkpoint, tmp_path / "plain", 0), run(tiny_checkpoint, tmp_path / "resampled", 2)
    num_constant = plain["frac_reward_zero_std"] * tiny_run.NUM_ROWS
    num_left = resampled["frac_reward_zero_std"] * tiny_run.NUM_ROWS
    recovered = resampled["resampling/groups_recovered"]
    assert recovered == pytest.approx(num_constant - num_left) and recovered > 0
    assert resampled["resampling/rounds"] <= 2
    assert 2 * num_constant <= resampled["resampling/completions"] <= 2 * 2 * num_constant

    (before,), (after,) = (completions(tmp_path / name).values() for name in ("plain", "resampled"))
    assert len(before) == len(after) == 2 * tiny_run.NUM_ROWS
    groups = [(old, new) for old, new in zip(before, after, strict=True) if old["group_id"] != new["group_id"]]
    assert len(groups) == 2 * recovered
    assert all(new["group_id"].startswith(f"{old['group_id']}/resample-") for old, new in groups)
    assert all(new["advantage"] != 0 for _, new in groups)
    assert [old["completion"] for old, _ in groups] != [new["completion"] for _, new in groups]


def test_rounds_end_where_nothing_varies(tiny_checkpoint, tmp_path):
    config = make_config(
        tiny_checkpoint, tmp_path, reward_funcs=[tiny_run.CONSTANT], max_resampling_rounds=3, max_steps=1
    )
    train(config)
    (line,) = metric_lines(tmp_path)
    assert line["resampling/rounds"] == 3
    assert line["resampling/completions"] == 3 * 2 * 4
    assert line["resampling/groups_recovered"] == 0
    assert line["skipped_updates/no_variance"] == 1
