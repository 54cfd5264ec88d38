from itertools import chain, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_vlm.data.sampler import Draw, PromptSampler
from rl_vlm.errors import CheckpointError


def test_steps_and_ranks_without_shuffling():
    ranks = [PromptSampler(5, 4, seed=0, shuffle=False, rank=rank, world_size=2) for rank in range(2)]
    first = [sampler.next_step() for sampler in ranks]
    second = [sampler.next_step() for sampler in ranks]
    assert first == [[(0, 0), (0, 1)], [(0, 2), (0, 3)]]
    assert second == [[(0, 4), (1, 0)], [(1, 1), (1, 2)]]
    assert ranks[0].epoch == 8 / 5


def test_order_depends_on_seed_and_epoch():
    def epochs(seed: int) -> list[list[Draw]]:
        sampler = PromptSampler(8, 8, seed)
        return [sampler.next_step() for _ in range(2)]

    assert epochs(1) == epochs(1)
    assert epochs(1) != epochs(2)
    first, second = epochs(1)
    assert [draw.row for draw in first] != [draw.row for draw in second] != list(range(8))


sizes = {"num_rows": st.integers(1, 40), "share": st.integers(1, 6), "seed": st.integers(0, 2**32 - 1)}


@given(**sizes, world_size=st.sampled_from([1, 2, 4]))
def test_every_row_once_per_epoch_for_any_number_of_ranks(num_rows: int, share: int, seed: int, world_size: int):
    per_step = 4 * share
    ranks = [PromptSampler(num_rows, per_step, seed, rank=rank, world_size=world_size) for rank in range(world_size)]
    single = PromptSampler(num_rows, per_step, seed)
    drawn = []
    for _ in range(3 * num_rows // per_step + 1):
        parts = [sampler.next_step() for sampler in ranks]
        assert len({len(part) for part in parts}) == 1
        assert list(chain(*parts)) == single.next_step()
        drawn += chain(*parts)
    for epoch in range(len(drawn) // num_rows):
        rows = [draw.row for draw in drawn if draw.epoch == epoch]
        assert sorted(rows) == list(range(num_rows))
    assert all(0 <= after.epoch - before.epoch <= 1 for before, after in pairwise(drawn))


@given(**sizes, before=st.integers(0, 5))
def test_a_restored_sampler_goes_on_where_it_stopped(num_rows: int, share: int, seed: int, before: int):
    sampler, restored = PromptSampler(num_rows, share, seed), PromptSampler(num_rows, share, seed)
    for _ in range(before):
        sampler.next_step()
    restored.load_state_dict(sampler.state_dict())
    assert restored.next_step() == sampler.next_step()


@pytest.mark.parametrize("changed", [{"num_rows": 6}, {"seed": 1}, {"shuffle": False}])
def test_another_stream_is_refused(changed: dict):
    settings: dict[str, Any] = {"num_rows": 5, "prompts_per_step": 2, "seed": 0}
    state = PromptSampler(**settings).state_dict()
    other = PromptSampler(**settings | changed)
    with pytest.raises(CheckpointError, match=next(iter(changed))):
        other.load_state_dict(state)


def test_a_step_must_divide_among_the_ranks():
    with pytest.raises(ValueError, match="not a multiple of 4"):
        PromptSampler(10, 6, seed=0, world_size=4)
