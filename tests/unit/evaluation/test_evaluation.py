import sys
from dataclasses import replace
from io import StringIO
from itertools import combinations
from time import monotonic
from typing import Any

import numpy as np
import pytest
import torch

from rewards.contract import Fault
from rewards.text import answer_text
from rl_vlm.errors import ConfigError, RolloutError
from rl_vlm.evaluation.directory import Chunk
from rl_vlm.evaluation.evaluator import Throughput, check_sampled
from rl_vlm.evaluation.figures import bootstrap_interval, majority_at, pass_at, summarise, summarise_by
from rl_vlm.evaluation.options import checkpoint_names
from rl_vlm.log.completions import answer
from rl_vlm.log.progress_bar import ProgressBar
from rl_vlm.types import NO_TOKENS, Group, Prompt, Sample


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


@pytest.mark.parametrize(
    ("answers", "scores", "expected"),
    [
        ("7 1 7 3".split(), [1.0, 0.0, 1.0, 0.0], {2: 1.0, 4: 1.0}),
        ("1 7 7 1".split(), [0.0, 1.0, 1.0, 0.0], {2: 0.0, 4: 0.0}),  # as frequent: the earliest
        ("3 7 7 7".split(), [0.0, 1.0, 1.0, 1.0], {2: 0.0, 4: 1.0}),
        ("7 7 1 1".split(), [0.5, 1.0, 0.0, 0.0], {2: 0.5, 4: 0.5}),  # the score of the first that gives it
    ],
)
def test_majority_at_k_scores_the_most_frequent_answer(answers, scores, expected):
    assert majority_at({"a": answers}, {"a": scores}, num_generations=4) == expected


def test_majority_at_k_is_the_mean_over_samples_that_have_k_scores():
    answers = {"right": ["7", "7"], "wrong": ["1", "7"], "faulted": ["7"]}
    scores = {"right": [1.0, 1.0], "wrong": [0.0, 1.0], "faulted": [1.0]}
    assert majority_at(answers, scores, num_generations=3) == {2: 0.5}


@pytest.mark.parametrize(
    ("logged", "expected"),
    [({}, "7"), ({"answer": 8}, "8"), ({"accuracy/answer": "9", "answer": "8"}, "9"), ({"accuracy/answer": None}, "7")],
)
def test_an_answer_is_what_the_function_logged_or_what_is_tagged(logged, expected):
    assert answer({"completion": "I think <answer> 7 </answer>", **logged}, "accuracy") == expected


@pytest.mark.parametrize(
    "text",
    [" 7\n", "<answer>7", "<answer>1</answer> no, <answer>7\n</answer>", "<answer><answer>7</answer></answer>",
     "</answer>7<answer>", "<answer>1</answer>7</answer>"],
)  # fmt: skip
def test_answers_are_read_as_built_in_reward_functions_read_them(text):
    assert answer({"completion": text}, "accuracy") == answer_text(text)


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
        "completion": f"completion {index}", "completion_length": 4, "finish_reason": "stop", **changes,
    }  # fmt: skip


def test_summary_leaves_faulted_and_inapplicable_scores_out():
    rows = [
        row("a", 0, 1.0, 2.0),
        row("a", 1, 0.0, 1.0, completion_length=6, finish_reason="length"),
        row("b", 0, None, None),
        row("b", 1, 1.0, 3.0, completion_length=6),
    ]
    found = summarise(rows, {"accuracy": 1.0}, num_generations=2)
    low, high = found.pop("rewards/accuracy/ci_low"), found.pop("rewards/accuracy/ci_high")
    assert 0.5 <= low < high <= 1.0
    assert found == {
        "num_samples": 2.0,
        "num_completions": 4.0,
        "reward": 2.0,
        "rewards/accuracy/mean": pytest.approx(2 / 3),
        "rewards/accuracy/pass@1": 0.75,
        "rewards/accuracy/pass@2": 1.0,
        "rewards/accuracy/majority@2": 1.0,
        "completions/mean_length": 5.0,
        "completions/clipped_ratio": 0.25,
    }


def test_function_without_any_score_has_no_figures():
    found = summarise([row("a", 0, None, None)], {"accuracy": 1.0}, num_generations=1)
    assert found == {
        "num_samples": 1.0, "num_completions": 1.0, "completions/mean_length": 4.0, "completions/clipped_ratio": 0.0,
    }  # fmt: skip


def test_served_completions_may_have_no_lengths():
    found = summarise([row("a", 0, 1.0, 1.0, completion_length=None)], {"accuracy": 1.0}, num_generations=1)
    assert "completions/mean_length" not in found
    assert found["rewards/accuracy/mean"] == 1.0


def test_figures_by_the_values_of_a_column():
    rows = [
        row("a", 0, 1.0, 1.0, **{"data/source": "charts"}),
        row("b", 0, 0.0, 0.0, **{"data/source": "scans"}),
        row("c", 0, 1.0, 1.0, **{"data/source": "scans"}),
        row("d", 0, 0.5, 0.5, **{"data/source": None}),
        row("e", 0, 1.0, 1.0),
    ]
    found = summarise_by(rows, "source", {"accuracy": 1.0}, num_generations=1)
    means = {value: (metrics["num_samples"], metrics["rewards/accuracy/mean"]) for value, metrics in found.items()}
    assert means == {"None": (2.0, 0.75), "charts": (1.0, 1.0), "scans": (2.0, 0.5)}
    assert found["scans"] == summarise(rows[1:3], {"accuracy": 1.0}, num_generations=1)


def test_checkpoints_are_named_by_what_tells_them_apart():
    assert checkpoint_names(["runs/a/checkpoint-2", "runs/a/checkpoint-10/", "org/model"]) == {
        "checkpoint-2": "runs/a/checkpoint-2", "checkpoint-10": "runs/a/checkpoint-10/", "model": "org/model",
    }  # fmt: skip
    assert list(checkpoint_names(["runs/a/checkpoint-2", "runs/b/checkpoint-2"])) == [
        "runs_a_checkpoint-2", "runs_b_checkpoint-2",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="names a checkpoint twice: "):
        checkpoint_names(["model", "model/"])


def test_the_bar_shows_prompts_and_throughput(monkeypatch):
    terminal = StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setattr(sys, "stderr", terminal)
    with ProgressBar(1, 4, "prompt") as bar:
        throughput = Throughput(start=monotonic() - 2.0)
        bar.show(3, throughput.add(Chunk([row("a", 0, 1.0, 1.0), row("b", 0, 1.0, 1.0)], {})))
    last = terminal.getvalue().split("\r")[-1]
    assert "3/4" in last
    assert "completions/s=1.0, tokens/s=4.0" in last


def test_an_evaluation_ends_if_the_last_server_is_lost() -> None:
    prompt = Prompt(Sample("s", [], [], {}, ""), torch.tensor([1]), {}, {})

    def group(fault: Fault) -> Group:
        return Group("g", prompt, [NO_TOKENS, replace(NO_TOKENS, finish_reason="fault", fault=fault)], 0)

    late = group(Fault("timeout", "no answer"))
    check_sampled([late])
    with pytest.raises(RolloutError, match=r"^http://a does not answer\.$"):
        check_sampled([late, group(Fault("server", "http://a does not answer."))])
