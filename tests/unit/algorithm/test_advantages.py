import math
from typing import Any

import pytest
import torch
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped

from rl_vlm.algorithm.advantages import compute_advantages, reward_std, total_rewards

NAN = math.nan
F, T = False, True


def advantages(rewards, valid=None, scale_rewards: Any = "none", batch_std=None):
    rewards = torch.tensor(rewards)
    valid = torch.ones_like(rewards, dtype=torch.bool) if valid is None else torch.tensor(valid)
    return compute_advantages(rewards, valid, scale_rewards, batch_std)


def totals(scores, weights, valid=None):
    scores = torch.tensor(scores)
    valid = torch.ones(scores.shape[:2], dtype=torch.bool) if valid is None else torch.tensor(valid)
    return total_rewards(scores, torch.tensor(weights), valid)


def test_total_is_the_weighted_sum_over_functions():
    assert totals([[[1.0, 4.0], [0.0, 2.0]]], [1.0, 0.5]).tolist() == [[3.0, 1.0]]


def test_a_function_that_applies_to_some_siblings_leaves_the_others_advantage_alone():
    # second function: applies to a0 and a1 only, with mean 3
    rewards = totals([[[1.0, 2.0], [1.0, 4.0], [1.0, NAN]]], [1.0, 1.0])
    assert rewards.tolist() == [[3.0, 5.0, 4.0]]
    assert advantages(rewards.tolist()).advantages_PG.tolist() == [[-1.0, 1.0, 0.0]]


def test_a_function_that_applies_to_no_sibling_adds_nothing():
    assert totals([[[1.0, NAN], [2.0, NAN]]], [1.0, 1.0]).tolist() == [[1.0, 2.0]]


def test_an_invalid_sibling_is_out_of_the_mean_that_stands_in_for_a_missing_score():
    rewards = totals([[[2.0], [NAN], [100.0]]], [1.0], valid=[[T, T, F]])
    assert rewards[0, :2].tolist() == [2.0, 2.0]
    assert rewards[0, 2].isnan()


def test_missing_scores_among_equal_ones_make_no_variance():
    # the float32 mean of three times 0.9 is not 0.9
    rewards = totals([[[0.9], [0.9], [0.9], [NAN]]], [1.0])
    assert len(set(rewards[0].tolist())) == 1


def test_baseline_is_the_mean_of_the_group():
    assert advantages([[1.0, 3.0], [10.0, 20.0]]).advantages_PG.tolist() == [[-1.0, 1.0], [-5.0, 5.0]]


def test_group_scale_divides_by_the_sample_standard_deviation_plus_1e_4():
    result = advantages([[0.0, 0.0, 3.0]], scale_rewards="group")
    scale = math.sqrt(3) + 1e-4
    assert result.advantages_PG[0].tolist() == pytest.approx([-1 / scale, -1 / scale, 2 / scale], rel=1e-6)


def test_batch_scale_divides_by_the_given_standard_deviation_plus_1e_4():
    result = advantages([[0.0, 2.0]], scale_rewards="batch", batch_std=0.9999)
    assert result.advantages_PG[0].tolist() == pytest.approx([-1.0, 1.0])
    with pytest.raises(ValueError, match="needs batch_std"):
        advantages([[0.0, 2.0]], scale_rewards="batch")


def test_an_invalid_completion_is_out_of_baseline_and_std_and_gets_0():
    for masked_reward in (NAN, 1000.0):
        result = advantages([[1.0, 3.0, masked_reward]], valid=[[T, T, F]], scale_rewards="group")
        scale = math.sqrt(2) + 1e-4
        assert result.advantages_PG[0].tolist() == pytest.approx([-1 / scale, 1 / scale, 0.0])


def test_groups_with_one_or_no_valid_completion_teach_nothing():
    result = advantages([[5.0, NAN], [NAN, NAN]], valid=[[T, F], [F, F]], scale_rewards="group")
    assert result.advantages_PG.tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert result.has_variance_P.tolist() == [F, F]


def test_zero_variance_means_equal_rewards_and_not_a_small_std():
    # the float32 mean of three times 0.9 is not 0.9; the float32 after 0.1 is 0.1 + 2**-27
    result = advantages([[0.9, 0.9, 0.9], [0.1, 0.1, 0.1 + 2**-27], [0.0, 1.0, 1.0]], scale_rewards="group")
    assert result.has_variance_P.tolist() == [F, T, T]
    assert result.advantages_PG[0].tolist() == [0.0, 0.0, 0.0]


def test_a_different_reward_of_an_invalid_completion_is_no_variance():
    assert advantages([[1.0, 1.0, 7.0]], valid=[[T, T, F]]).has_variance_P.tolist() == [F]


def test_reward_std_is_over_the_values_that_are_not_nan():
    assert reward_std(torch.tensor([0.0, 0.0, NAN, 3.0])).item() == pytest.approx(math.sqrt(3))
    assert reward_std(torch.tensor([4.0, NAN])).item() == 0.0
    assert reward_std(torch.tensor([])).item() == 0.0


def test_shapes_that_would_broadcast_are_refused():
    checked = jaxtyped(typechecker=beartype)(compute_advantages)
    with pytest.raises(TypeCheckError):
        checked(torch.tensor([[1.0, 2.0]]), torch.tensor([[T], [T]]), "none")
    with pytest.raises(TypeCheckError):
        jaxtyped(typechecker=beartype)(total_rewards)(
            torch.zeros(2, 3, 1), torch.ones(4), torch.ones(2, 3, dtype=torch.bool)
        )
