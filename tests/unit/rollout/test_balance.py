"""Groups dealt to ranks: which rank trains on which, by their tokens; and windows after the groups have moved."""

from concurrent.futures import ThreadPoolExecutor
from itertools import chain, product
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_vlm.data.sampler import Draw
from rl_vlm.errors import DataError
from rl_vlm.passes.micro_batches import training_tokens
from rl_vlm.rollout.balance import EVEN_ENOUGH, balance, deal, deal_surplus
from rl_vlm.rollout.window import Window
from rl_vlm.types import Prompt, Sample, ScoredGroup
from tests.helpers.builders import Rebuilder
from tests.unit.passes.test_micro_batches import make_group
from tests.unit.rollout.test_collector import RankOfTwo


@pytest.mark.parametrize(
    ("costs", "owners"),
    [
        ([[90, 80, 20], [30, 20]], [[0, 1, 0], [1, 1]]),  # from 190 and 50 to 110 and 130
        ([[10, 10], [10, 10]], [[0, 0], [1, 1]]),  # even already
        ([[100, 98], [100, 90]], [[0, 0], [1, 1]]),  # 198 and 190; the most even deal has 198 as well
        ([[5, 5, 5, 5], [0, 0, 0, 0]], [[0, 0, 1, 1], [1, 1, 1, 1]]),
        ([[7], [0]], [[0], [1]]),  # a single group cannot be shared
        ([[0, 0], [0, 0]], [[0, 0], [1, 1]]),
    ],
)
def test_who_trains_on_which_group(costs: list[list[int]], owners: list[list[int]]) -> None:
    assert deal(costs) == owners


def test_groups_are_dealt_from_scratch_where_keeping_them_is_less_even() -> None:
    # From scratch 8 | 7, then 8 | 7 6, 8 5 | 7 6, and a 4 to each: 17 and 17. With at most 1.05 × 17 kept, rank 0 keeps
    # 8 and 7, and 6 makes 19 on rank 1.
    assert deal([[8, 7, 6], [5, 4, 4]]) == [[0, 1, 1], [0, 1, 0]]
    # From scratch 6 | 6 | 1 1. With at most 6.3 kept, every rank keeps its first group, and the other 6 makes a 7.
    assert deal([[6, 6], [1], [1]]) == [[0, 1], [2], [2]]


def test_groups_are_kept_as_far_as_that_is_even_enough() -> None:
    # From scratch 6 | 6, 6 5 | 6 4, 6 5 | 6 4 4: 11 and 14. With at most 14.7 kept, rank 0 keeps 6 and 6.
    assert deal([[6, 6, 5, 4, 4], [0]]) == [[0, 0, 1, 1, 1], [1]]
    assert deal([[3, 3], [2, 2], [0]]) == [[0, 2], [1, 1], [2]]


def test_of_ranks_with_equally_many_tokens_the_one_with_fewest_groups_gets_the_next() -> None:
    # 4 | 2 2: the group of one token leaves rank 1, which has two groups.
    assert deal_surplus([[4], [2, 2, 1]], limit=0.0) == ([[0], [1, 1, 0]], 5)


def loads(costs: list[list[int]], owners: list[list[int]]) -> list[int]:
    """The tokens of each rank."""
    flat = list(zip(chain(*owners), chain(*costs), strict=True))
    return [sum(cost for owner, cost in flat if owner == rank) for rank in range(len(costs))]


def lists(num_ranks: int, num_groups: int) -> st.SearchStrategy[list[list[int]]]:
    """Costs of up to so many groups on each of up to so many ranks."""
    return st.lists(st.lists(st.integers(0, 60), min_size=1, max_size=num_groups), min_size=1, max_size=num_ranks)


@given(lists(num_ranks=5, num_groups=6))
def test_every_rank_has_a_group_and_none_moves_in_vain(costs: list[list[int]]) -> None:
    owners = deal(costs)
    assert set(chain(*owners)) == set(range(len(costs)))
    stays = owners == [[rank] * len(own) for rank, own in enumerate(costs)]
    assert stays or max(loads(costs, owners)) < max(map(sum, costs))


@given(lists(num_ranks=3, num_groups=2))
def test_the_fullest_rank_is_close_to_that_of_the_best_deal(costs: list[list[int]]) -> None:
    num_groups = len(list(chain(*costs)))
    flat = [list(chain(*costs)), *([[]] * (len(costs) - 1))]
    best = min(max(loads(flat, [list(owners)])) for owners in product(range(len(costs)), repeat=num_groups))
    assert max(loads(costs, deal(costs))) <= EVEN_ENOUGH * 4 / 3 * best + 1e-9  # Graham's bound, from scratch


@given(lists(num_ranks=5, num_groups=6))
def test_groups_that_are_dealt_stay(costs: list[list[int]]) -> None:
    """So a resumed run keeps them on the ranks that they were saved on."""
    owners = deal(costs)
    after: list[list[int]] = [[] for _ in costs]
    for own, ranks in zip(costs, owners, strict=True):
        for cost, owner in zip(own, ranks, strict=True):
            after[owner].append(cost)
    assert deal(after) == [[rank] * len(own) for rank, own in enumerate(after)]


def test_cost_is_what_the_packed_or_padded_rows_hold() -> None:
    group = make_group("a", 10, [2, 3, 5], valid=[True, True, False])

    def cost(sharing: Any) -> int:
        return training_tokens(group, sharing, lambda prompt: 7)

    assert cost("shared") == 7 + 10 + 2 + 3
    assert cost("dense") == 7 + 2 * (10 + 3)
    assert cost("auto") == cost("shared")


def prompt(draw: Draw) -> Prompt:
    return Prompt(Sample(str(draw.row), [], [], {}, ""), torch.zeros(10, dtype=torch.long), {}, {})


def window(rank: int, *steps: str) -> Window:
    """Of groups with one completion each, of these lengths; rank 1 has the rows from 100 on."""
    lengths = [int(length) for step in steps for length in step.split()]
    draws = [Draw(0, 100 * rank + i) for i in range(len(lengths))]
    groups = [make_group(f"{draw.row}", 10, [length]) for draw, length in zip(draws, lengths, strict=True)]
    return Window.of(draws, groups, len(steps), num_iterations=2)


def length(group: ScoredGroup) -> int:
    return len(group.group.completions[0].token_ids)


def on_both(build: Any, *windows: Window) -> list[Any]:
    """What `balance` returns or raises on each of two ranks."""
    barrier, slots = Barrier(2), [None, None]
    ranks = [RankOfTwo(i, barrier, slots) for i in range(2)]
    with ThreadPoolExecutor(2) as threads:
        calls = [
            threads.submit(balance, own, rank, length, Rebuilder(build))
            for own, rank in zip(windows, ranks, strict=True)
        ]
    return [call.exception() or call.result() for call in calls]


def contents(found: Window) -> list[list[tuple[int, int]]]:
    """Row and length of each group, by step."""
    return [[(group.draw.row, length(group.scored)) for group in step] for step in found.steps]


def test_groups_move_with_their_contents_and_within_their_step() -> None:
    first, second = window(0, "90 80 20", "10 10 10"), window(1, "30 20 0", "20 40 40")
    first.groups[1].old_logprobs[0] = torch.tensor([-0.5])
    first.updates_done = second.updates_done = 1
    ours, theirs = on_both(prompt, first, second)
    assert contents(ours) == [[(0, 90), (2, 20)], [(3, 10), (4, 10), (5, 10), (105, 40)]]  # 30 and 100 to 70 and 60
    assert contents(theirs) == [[(1, 80), (100, 30), (101, 20), (102, 0)], [(103, 20), (104, 40)]]
    assert (theirs.updates_done, theirs.num_iterations) == (1, 2)
    moved, kept = theirs.groups[0], theirs.groups[1]
    assert (moved.group.group_id, moved.group.prompt.sample.sample_id) == ("1", "1")
    assert moved.old_logprobs[0].tolist() == [-0.5]
    assert kept is second.groups[0]


def test_even_windows_stay_as_they_are() -> None:
    windows = window(0, "50 20"), window(1, "40 30")
    built: list[Draw] = []
    for found, own in zip(on_both(built.append, *windows), windows, strict=True):
        assert all(ours is theirs for ours, theirs in zip(found.groups, own.groups, strict=True))
    assert built == []


def test_a_row_that_the_new_rank_cannot_read_is_an_error_on_all() -> None:
    def fails(draw: Draw) -> Prompt:
        raise DataError(f"row {draw.row} is gone")

    errors = on_both(fails, window(0, "90 80 20"), window(1, "30 20 0"))
    assert [str(error) for error in errors] == ["row 1 is gone"] * 2
