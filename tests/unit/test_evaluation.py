from itertools import combinations
from typing import Any

import numpy as np
import pytest

from rl_vlm.evaluation import bootstrap_interval, pass_at, summarise


def pass_at_by_definition(scores: list[float], k: int) -> float:
    """Share of the k-subsets of completions that hold one that passes."""
    subsets = list(combinations(scores, k))
    return sum(any(score >= 1 for score in subset) for subset in subsets) / len(subsets)


@pytest.mark.parametrize("num_passing", range(9))
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(num_passing):
    scores = [1.0] * num_passing + [0.9] * (8 - num_passing)
    found = pass_at({"row": scores}, num_generations=8)
    assert list(found) == [1, 2, 4, 8]
    assert found == pytest.approx({k: pass_at_by_definition(scores, k) for k in found}, abs=1e-12)


def test_pass_at_k_is_the_mean_over_samples_that_have_k_scores():
    by_sample = {"always": [1.0, 1.0, 1.0], "never": [0.0, 0.0, 0.0], "faulted": [1.0]}
    assert pass_at(by_sample, num_generations=3) == {1: pytest.approx(2 / 3), 2: 0.5}


def test_bootstrap_interval_of_a_constant_is_a_point():
    assert bootstrap_interval([0.5] * 10) == (0.5, 0.5)


def test_bootstrap_interval_has_the_width_of_the_normal_approximation():
    values = [0.0, 1.0] * 200
    low, high = bootstrap_interval(values)
    assert low < 0.5 < high
    assert high - low == pytest.approx(2 * 1.96 * np.std(values) / 20, rel=0.1)


def row(sample: str, index: int, accuracy: float | None, reward: float | None, **changes: Any) -> dict[str, Any]:
    return {
        "sample_id": sample, "completion_index": index, "accuracy": accuracy, "reward": reward,
        "completion_length": 4, "finish_reason": "stop", **changes,
    }  # fmt: skip


def test_summary_leaves_faulted_and_inapplicable_scores_out():
    rows = [
        row("a", 0, 1.0, 2.0),
        row("a", 1, 0.0, 1.0, completion_length=6, finish_reason="length"),
        row("b", 0, None, None),
        row("b", 1, 1.0, 3.0, completion_length=6),
    ]
    found = summarise(rows, ["accuracy"], num_generations=2)
    low, high = found.pop("rewards/accuracy/ci_low"), found.pop("rewards/accuracy/ci_high")
    assert 0.5 <= low < high <= 1.0
    assert found == {
        "num_samples": 2.0,
        "num_completions": 4.0,
        "reward": 2.0,
        "rewards/accuracy/mean": pytest.approx(2 / 3),
        "rewards/accuracy/pass@1": 0.75,
        "rewards/accuracy/pass@2": 1.0,
        "completions/mean_length": 5.0,
        "completions/clipped_ratio": 0.25,
    }


def test_function_without_any_score_has_no_figures():
    found = summarise([row("a", 0, None, None)], ["accuracy"], num_generations=1)
    assert found == {
        "num_samples": 1.0, "num_completions": 1.0, "completions/mean_length": 4.0, "completions/clipped_ratio": 0.0,
    }  # fmt: skip
