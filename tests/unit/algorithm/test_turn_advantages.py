"""Advantages of turns, worked by hand. A trajectory is its observations and the rewards of its turns."""

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from rl_vlm.algorithm.advantages import Advantages
from rl_vlm.algorithm.turn_advantages import advantages_of_groups
from rl_vlm.config.schema import AlgorithmConfig
from rl_vlm.types import Completion, Context, Group, Observation, Prompt, Sample, Turn

NAN = math.nan
F, T = False, True


def observation(text: str, pixel: float = 0.0) -> Observation:
    """A new observation of these bytes, with an image of one pixel."""
    return Observation("o", torch.tensor(list(text.encode())), {}, {"pixel_values": torch.tensor([[pixel]])})


def trajectory(seen: Sequence[Observation | str], rewards: Sequence[float | None], **fields: Any) -> Completion:
    """A completion whose turns have two tokens each, with an observation before each turn but the first."""
    parts: list[int | Observation] = [2]
    for each in seen:
        parts += [observation(each) if isinstance(each, str) else each, 2]
    num = 2 * len(rewards)
    turns = tuple(Turn("", "", reward=reward) for reward in rewards)
    contexts = (Context(tuple(parts)),)
    return Completion(torch.arange(num), torch.zeros(num), "stop", "", contexts=contexts, turns=turns, **fields)


def advantages(
    completions: Sequence[Completion], totals: Sequence[float], valid: Sequence[bool] | None = None, **algorithm: Any
) -> Advantages:
    """Those of one group, unscaled by default."""
    group = Group("g", Prompt(Sample("s", [], [], {}, ""), torch.tensor([1, 2]), {}, {}), list(completions), 0)
    config = AlgorithmConfig.model_validate({"scale_rewards": "none"} | algorithm)
    valid_PG = torch.tensor([valid or [True] * len(completions)])
    return advantages_of_groups([group], torch.tensor([totals]), valid_PG, config)


def lists(found: Advantages) -> list[list[float]]:
    assert found.turns is not None
    return [values.tolist() for values in found.turns[0]]


UNLIKE = [trajectory(["x"], [1.0, 0.0]), trajectory(["y", "z"], [0.0, 0.0, 3.0])]


def test_returns_without_a_discount_are_normalised_over_all_turns_of_the_group():
    """Returns are 1 0 and 3 3 3, of which the mean is 2 and the variance 8 / 4."""
    found = advantages(UNLIKE, [1.0, 3.0], turn_advantages="return")
    assert lists(found) == [[-1.0, -2.0], [1.0, 1.0, 1.0]]
    assert found.advantages_PG.tolist() == [[-1.5, 1.0]]
    scaled = advantages(UNLIKE, [1.0, 3.0], turn_advantages="return", scale_rewards="group")
    std = math.sqrt(2) + 1e-4
    assert lists(scaled) == [pytest.approx([-1 / std, -2 / std]), pytest.approx([1 / std] * 3)]


def test_a_discount_makes_later_rewards_count_less():
    """Returns are 1 0 and 0.75 1.5 3, of which the mean is 1.25."""
    found = advantages(UNLIKE, [1.0, 3.0], turn_advantages="return", turn_discount=0.5)
    assert lists(found) == [[-0.25, -1.25], [-0.5, 0.25, 1.75]]


def test_the_last_turn_gets_what_no_step_accounts_for():
    """The first has steps 1 0 and a total of 2, so rewards 1 1 and returns 2 1. The second has no steps, and 4 4."""
    completions = [trajectory(["x"], [1.0, 0.0]), trajectory(["x"], [None, None])]
    found = advantages(completions, [2.0, 4.0], turn_advantages="return")
    assert lists(found) == [[-0.75, -1.75], [1.25, 1.25]]  # the mean is 11 / 4


def test_a_fault_is_left_out():
    fault = trajectory(["x"], [100.0, 100.0])
    found = advantages([*UNLIKE, fault], [1.0, 3.0, NAN], valid=[T, T, F], turn_advantages="return")
    assert lists(found) == [[-1.0, -2.0], [1.0, 1.0, 1.0], [0.0, 0.0]]
    meeting = [*MEET, fault]
    found = advantages(meeting, [4.0, 1.0, NAN], valid=[T, T, F], turn_advantages="gigpo", turn_discount=0.5)
    assert lists(found) == [*lists(advantages(MEET, [4.0, 1.0], turn_advantages="gigpo", turn_discount=0.5)), [0, 0]]


MEET = [trajectory(["x"], [0.0, 4.0]), trajectory(["y", "x"], [0.0, 0.0, 1.0])]
"""With a discount of 0.5, returns are 2 4 and 0.25 0.5 1. The starts of the turns are: prompt x, and prompt y x."""


def test_turns_that_begin_alike_are_compared():
    """Totals are 4 and 1: 1.5 and -1.5. At the prompt 2 and 0.25: ±0.875. At x 4 and 1: ±1.5. At y one alone: 0."""
    found = advantages(MEET, [4.0, 1.0], turn_advantages="gigpo", turn_discount=0.5, turn_weight=2.0)
    assert lists(found) == [[1.5 + 2 * 0.875, 1.5 + 2 * 1.5], [-1.5 - 2 * 0.875, -1.5, -1.5 - 2 * 1.5]]


def test_both_parts_are_divided_by_their_own_standard_deviation():
    """Two values that differ by d have the standard deviation d / √2."""
    found = advantages(MEET, [4.0, 1.0], turn_advantages="gigpo", turn_discount=0.5, scale_rewards="group")
    whole = 1.5 / (3 / math.sqrt(2) + 1e-4)
    prompt, x = 0.875 / (1.75 / math.sqrt(2) + 1e-4), 1.5 / (3 / math.sqrt(2) + 1e-4)
    assert lists(found) == [
        pytest.approx([whole + prompt, whole + x]),
        pytest.approx([-whole - prompt, -whole, -whole - x]),
    ]


def test_batch_scale_is_over_rewards_and_over_returns():
    seen: list[list[float]] = []

    def batch_std(values: torch.Tensor) -> float:
        seen.append(values.flatten().tolist())
        return len(seen) - 1e-4  # 1 of returns, 2 of rewards

    group = Group("g", Prompt(Sample("s", [], [], {}, ""), torch.tensor([1, 2]), {}, {}), MEET, 0)
    config = AlgorithmConfig(scale_rewards="batch", turn_advantages="gigpo", turn_discount=0.5)
    found = advantages_of_groups([group], torch.tensor([[4.0, 1.0]]), torch.tensor([[T, T]]), config, batch_std)
    assert seen == [[2.0, 4.0, 0.25, 0.5, 1.0], [4.0, 1.0]]
    assert lists(found) == [pytest.approx([0.75 + 0.875, 0.75 + 1.5]), pytest.approx([-0.75 - 0.875, -0.75, -2.25])]


def test_a_trajectory_can_come_back_to_an_observation():
    """At x: returns 3 and 1 of the first, and 2 of the second. Their mean is 2."""
    completions = [trajectory(["x", "x"], [0.0, 2.0, 1.0]), trajectory(["x"], [1.0, 2.0])]
    assert lists(advantages(completions, [3.0, 3.0], turn_advantages="gigpo")) == [[0.0, 1.0, -1.0], [0.0, 0.0]]


@pytest.mark.parametrize("other", [observation("y"), observation("x", pixel=1.0)])
def test_observations_are_equal_if_tokens_and_images_are(other):
    completions = [trajectory(["x"], [1.0, 0.0]), trajectory([other], [0.0, 1.0])]
    assert lists(advantages(completions, [1.0, 1.0], turn_advantages="gigpo")) == [[0.0, 0.0], [0.0, 0.0]]
    assert lists(advantages([completions[0], trajectory(["x"], [0.0, 1.0])], [1.0, 1.0], turn_advantages="gigpo")) == [
        [0.0, -0.5], [0.0, 0.5],
    ]  # fmt: skip


def test_completions_that_start_unlike_are_not_compared_at_their_first_turn():
    own = Prompt(Sample("s", [], [], {}, ""), torch.tensor([1, 3]), {}, {})
    completions = [trajectory(["y"], [0.0, 2.0]), trajectory(["z"], [0.0, 0.0], start=own)]
    assert lists(advantages(completions, [2.0, 0.0], turn_advantages="gigpo")) == [[1.0, 1.0], [-1.0, -1.0]]


@pytest.mark.parametrize(
    ("mode", "observed", "varies"),
    [("none", "x", F), ("return", "x", T), ("return", "y", T), ("gigpo", "x", T), ("gigpo", "y", F)],
)
def test_a_group_of_equal_rewards_trains_if_its_turns_differ(mode, observed, varies):
    completions = [trajectory(["x"], [1.0, 0.0]), trajectory([observed], [0.0, 1.0])]
    assert advantages(completions, [1.0, 1.0], turn_advantages=mode).has_variance_P.tolist() == [varies]


@pytest.mark.parametrize("mode", ["return", "gigpo"])
def test_a_group_of_equal_returns_is_without_variance(mode):
    completions = [trajectory(["x"], [None, None]), trajectory(["x"], [None, None])]
    found = advantages(completions, [0.9, 0.9], turn_advantages=mode, scale_rewards="group")
    assert (found.has_variance_P.tolist(), lists(found)) == ([F], [[0.0, 0.0], [0.0, 0.0]])


def test_returns_that_differ_by_rounding_are_equal():
    """Both last turns have a reward of 0.5, as the rest of 0.8 and of 1.2. In float32 they differ by 6e-8."""
    completions = [trajectory(["x"], [0.3, 0.0]), trajectory(["x"], [0.7, 0.0])]
    found = advantages(completions, [0.8, 1.2], turn_advantages="gigpo", scale_rewards="group")
    (_, first), (_, second) = lists(found)
    assert [first, second] == pytest.approx([-0.2 / (0.4 / math.sqrt(2) + 1e-4), 0.2 / (0.4 / math.sqrt(2) + 1e-4)])
    equal = [trajectory(["y"], [0.1, 0.2]), trajectory(["z"], [0.3, 0.0])]
    assert advantages(equal, [0.3, 0.3], turn_advantages="gigpo").has_variance_P.tolist() == [F]


def test_without_advantages_of_turns_there_are_none():
    found = advantages(UNLIKE, [1.0, 3.0])
    assert (found.advantages_PG.tolist(), found.turns) == ([[-1.0, 1.0]], None)
