import json
from typing import Any

import pytest
import torch

from rl_vlm.algorithm.losses import MetricExtreme, MetricSum
from rl_vlm.log.metrics import MetricsLog, StepMetrics, add_reward_metrics, is_score, totals
from rl_vlm.stages import Stage
from rl_vlm.types import Completion, Group, Prompt, Sample, ScoredGroup


def reduce(*ranks: StepMetrics) -> dict[str, float]:
    """As rank 0 sees it."""
    return ranks[0].reduce(lambda mine: [part for rank in ranks for part in rank_parts(rank)])


def rank_parts(metrics: StepMetrics) -> list[Any]:
    parts: list[Any] = []
    metrics.reduce(lambda mine: parts.extend(mine) or mine)
    return parts


def test_means_are_over_all_values_of_all_ranks():
    first, second = StepMetrics(), StepMetrics()
    first.add_values(torch.tensor([1.0, 1.0, 1.0]), mean="reward")
    second.add_values(torch.tensor([5.0, torch.nan]), mean="reward")
    assert reduce(first, second) == {"reward": 2.0}


def test_sums_add_and_times_are_the_slowest_ranks():
    first, second = StepMetrics(), StepMetrics()
    first.add_sum("step_tokens", 3)
    second.add_sum("step_tokens", 4)
    first.seconds["generation"], second.seconds["generation"] = 1.0, 2.5
    assert reduce(first, second) == {"step_tokens": 7.0, "time/generation": 2.5}


def test_spread_is_over_all_values_of_all_ranks():
    first, second = StepMetrics(), StepMetrics()
    first.add_values(torch.tensor([1.0, 3.0]), std="spread", min="least", max="most")
    second.add_values(torch.tensor([5.0, torch.nan]), std="spread", min="least", max="most")
    assert reduce(first, second) == {"spread": 2.0, "least": 1.0, "most": 5.0}


def test_deviation_of_a_single_value_is_0():
    metrics = StepMetrics()
    metrics.add_values(torch.tensor([3.0]), std="spread")
    assert reduce(metrics) == {"spread": 0.0}


def test_statistic_of_nothing_is_left_out():
    metrics = StepMetrics()
    metrics.add_values(torch.tensor([torch.nan]), mean="reward", std="reward_std", min="least")
    metrics.add_loss_metrics([{"kl": MetricSum(torch.tensor(0.0), torch.tensor(0))}])
    assert reduce(metrics) == {}


def test_loss_metrics_of_micro_batches_add_up():
    metrics, none, many = StepMetrics(), torch.tensor(torch.nan), 2**24 + 1  # which float32 rounds
    metrics.add_loss_metrics([
        {"kl": MetricSum(torch.tensor(1.5), torch.tensor(many)), "least": MetricExtreme("min", none)},
        {},
        {"kl": MetricSum(torch.tensor(0.5), torch.tensor(1)), "least": MetricExtreme("min", torch.tensor(-3.0))},
        {"least": MetricExtreme("min", torch.tensor(2.0))},
    ])  # fmt: skip
    assert metrics.means == {"kl": [2.0, many + 1]}
    assert reduce(metrics) == {"kl": 2 / (many + 1), "least": -3.0}


def test_stage_is_timed_also_when_it_fails():
    metrics = StepMetrics()
    try:
        with metrics.stage(Stage.REWARDS):
            raise KeyError
    except KeyError:
        pass
    assert metrics.seconds["rewards"] > 0


def scored_group(rewards: list[float], lengths: list[int], finished: list[bool]) -> ScoredGroup:
    completions = [
        Completion(torch.zeros(n, dtype=torch.int64), torch.zeros(n), "stop" if stop else "length", "")
        for n, stop in zip(lengths, finished, strict=True)
    ]
    prompt = Prompt(Sample("s", [], [], {}, "p"), torch.zeros(10, dtype=torch.int64), {}, {})
    total = torch.tensor(rewards)
    valid = ~total.isnan()
    return ScoredGroup(
        Group("g", prompt, completions, 0), total[:, None], total, torch.zeros(len(rewards)), valid,
        has_variance=len(set(total[valid].tolist())) > 1,
    )  # fmt: skip


def test_reward_metrics_under_trls_names():
    metrics = StepMetrics()
    groups = [
        scored_group([0.0, 2.0, torch.nan], [2, 4, 6], [True, True, False]),
        scored_group([1.0, 1.0, 1.0], [1, 1, 4], [True, True, False]),
    ]
    add_reward_metrics(metrics, groups, ["accuracy"])
    assert reduce(metrics) == {
        "reward": 1.0,  # 5 valid completions
        "reward_std": pytest.approx(0.5**0.5),  # of 0, 2, 1, 1, 1
        "reward_best_of_group": 1.5,  # of 2 and 1
        "completions/num_groups": 2.0,
        "frac_reward_zero_std": 0.5,
        "rewards/accuracy/mean": 1.0,
        "rewards/accuracy/std": pytest.approx(0.5**0.5),
        "completions/mean_length": 3.0,
        "completions/min_length": 1.0,
        "completions/max_length": 6.0,
        "completions/mean_terminated_length": 2.0,
        "completions/min_terminated_length": 1.0,
        "completions/max_terminated_length": 4.0,
        "completions/clipped_ratio": 2 / 6,
        "step_tokens": 18.0 + 2 * 10,
    }


def test_scores_are_the_means_of_reward_functions():
    names = ["reward", "rewards/exact/mean", "rewards/exact/std", "eval_rewards/exact/mean", "eval_reward", "kl"]
    assert [name for name in names if is_score(name)] == ["rewards/exact/mean", "eval_rewards/exact/mean"]


def test_log_keeps_lines_until_a_step_and_drops_a_torn_one(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    for step in range(4):
        log.append({"step": step})
    with log.path.open("a") as file:
        file.write('{"step": 4, "rew')
    assert log.read() == [{"step": step} for step in range(4)]
    log.truncate_after(2)
    log.append({"step": 3, "reward": 0.1})
    assert [json.loads(line) for line in log.path.read_text().splitlines()] == [
        {"step": 0}, {"step": 1}, {"step": 2}, {"step": 3, "reward": 0.1},
    ]  # fmt: skip


def test_log_that_does_not_exist_is_empty(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    assert log.read() == []
    log.truncate_after(-1)
    assert log.path.read_text() == ""


def test_totals_are_over_all_steps():
    lines = [
        {"step": 1, "reward_faults/f/nan": 2.0, "skipped_updates/no_variance": 1.0, "skipped_updates/nonfinite": 0.0},
        {"step": 2, "reward_faults/f/nan": 1.0, "reward_faults/g/inf": 4.0, "skipped_updates/no_variance": 1.0},
        {"step": 3, "reward": 0.5, "eval_reward_faults/f/nan": 9.0},
    ]
    assert totals(lines) == {
        "reward_faults": {"f/nan": 3.0, "g/inf": 4.0}, "skipped_updates": {"no_variance": 2.0, "nonfinite": 0.0}
    }  # fmt: skip
