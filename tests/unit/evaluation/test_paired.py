"""Differences between evaluations of the same rows, on values that are computed by hand."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_vlm.evaluation.paired import paired_change, paired_changes
from rl_vlm.evaluation.run import with_differences
from rl_vlm.log.completions import write_rows


def write_evaluation(folder: Path, exact: Mapping[str, Sequence[float | None]], **more: float) -> Path:
    """Write a completions file with these scores of each sample. The reward is the score of `exact`."""
    rows: list[dict[str, Any]] = [
        {"step": 0, "sample_id": sample, "completion": "", "exact": score, **more, "reward": score}
        for sample, scores in exact.items()
        for score in scores
    ]
    write_rows(folder / "completions.parquet", rows)
    return folder / "completions.parquet"


def test_the_difference_is_paired_by_row_and_not_by_position(tmp_path: Path):
    """Every row gains 0.25, though rows differ by 1: only pairs have an interval without width."""
    scores = {f"row-{i}": [float(i % 2)] for i in range(8)}
    before = write_evaluation(tmp_path / "a", scores)
    after = write_evaluation(tmp_path / "b", {name: [score + 0.25] for name, (score,) in reversed(scores.items())})
    (change,) = paired_changes(before, after)
    assert (change.name, change.before, change.after) == ("reward", 0.5, 0.75)
    assert (change.low, change.high, change.num) == (0.25, 0.25, 8)


def test_a_row_counts_with_the_mean_of_its_completions_and_only_if_both_models_scored_it(tmp_path: Path):
    before = write_evaluation(tmp_path / "a", {"x": [0.0, 1.0], "y": [0.25], "z": [None], "only-a": [0.0]})
    after = write_evaluation(tmp_path / "b", {"only-b": [1.0], "y": [0.75], "z": [1.0], "x": [1.0, None]})
    (change,) = paired_changes(before, after)
    assert (change.before, change.after, change.num) == (0.375, 0.875, 2)


def test_scores_of_several_functions_have_a_difference_each(tmp_path: Path):
    before = write_evaluation(tmp_path / "a", {"x": [0.0]}, format=1.0)
    after = write_evaluation(tmp_path / "b", {"x": [1.0]}, format=0.5)
    found = [(change.name, change.before, change.after) for change in paired_changes(before, after)]
    assert found == [("reward", 0.0, 1.0), ("exact", 0.0, 1.0), ("format", 1.0, 0.5)]


def test_the_interval_is_the_bootstrap_of_the_differences():
    """10 of 40 rows gain 1, so the resampled mean is a binomial number of 40 over 40.

    `scipy.stats.binom(40, 0.25).ppf([0.025, 0.975]) / 40` is 0.125 and 0.4. 1,000 resamples come within a row of it.
    """
    change = paired_change("reward", [0.0] * 20 + [1.0] * 20, [1.0] * 10 + [0.0] * 10 + [1.0] * 20)
    assert (change.before, change.after, change.num) == (0.5, 0.75, 40)
    assert change.low == pytest.approx(0.125, abs=0.026) and change.high == pytest.approx(0.4, abs=0.026)


SPLIT = {"split": "held-out"}


def test_each_model_but_the_first_is_compared_with_the_first(tmp_path: Path):
    for name, score in (("base", 0.0), ("early", 0.5), ("late", 0.25)):
        write_evaluation(tmp_path / name, {"x": [score], "y": [score]})
    folders = {name: tmp_path / name for name in ("base", "early", "late")}
    found = with_differences({name: {"num_samples": 2.0} for name in folders}, folders)
    assert found == {
        "base": {"num_samples": 2.0},
        "early": {"num_samples": 2.0, "differences": [
            {"name": "reward", "before": 0.0, "after": 0.5, "low": 0.5, "high": 0.5, "num": 2, **SPLIT}]},
        "late": {"num_samples": 2.0, "differences": [
            {"name": "reward", "before": 0.0, "after": 0.25, "low": 0.25, "high": 0.25, "num": 2, **SPLIT}]},
    }  # fmt: skip
