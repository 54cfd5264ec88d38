"""Sums of gradients over ranks, and updates whose gradients are missing, or not finite on some rank, by hand."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rl_vlm.distributed.gradients import clip_and_update, clip_gradients, reserve_update, sum_gradients
from rl_vlm.distributed.ranks import Ranks
from tests.helpers.threaded_ranks import on_ranks


def make_adamw() -> tuple[nn.Parameter, nn.Parameter, torch.optim.AdamW]:
    used, idle = nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.tensor([2.0]))
    return used, idle, torch.optim.AdamW([used, idle], lr=0.1, betas=(0.5, 0.5), eps=0.0, weight_decay=0.0)


def test_a_missing_gradient_is_a_gradient_of_0() -> None:
    used, idle, adamw = make_adamw()
    for step in range(2):
        used.grad = torch.tensor([1.0])
        idle.grad = torch.tensor([1.0]) if step == 0 else None
        reserve_update(adamw)
        norm, is_updated = clip_and_update(Ranks(), adamw, max_norm=0.0, loss_is_finite=True)
        assert is_updated
        assert norm == pytest.approx([2**0.5, 1.0][step])
    assert used.item() == pytest.approx(2 - 0.1 - 0.1)
    assert idle.item() == pytest.approx(2 - 0.1 - 0.1 * 3**-0.5)  # both moments are 1/3 after correction


@pytest.mark.parametrize(
    ("gradient", "loss_is_finite", "others"), [(float("nan"), True, 0.0), (1.0, False, 0.0), (1.0, True, 1.0)]
)
def test_no_weight_changes_if_anything_is_not_finite(
    gradient: float, loss_is_finite: bool, others: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ranks, "sum", lambda _, values: [value + others for value in values])
    used, idle, adamw = make_adamw()
    used.grad = torch.tensor([gradient])
    reserve_update(adamw)
    assert not clip_and_update(Ranks(), adamw, 1.0, loss_is_finite)[1]
    assert [used.item(), idle.item()] == [2.0, 2.0]


def test_every_gradient_is_added_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [(2,), (2,), (1,), (6,), (3,), (), (2, 2)]
    sent = [[], []]

    def all_reduce(ranks: Ranks, tensor: Tensor) -> None:
        sent[ranks.rank].append(tensor.numel())
        torch.distributed.all_reduce(tensor)

    def on_rank(ranks: Ranks) -> list[Tensor]:
        gradients = [torch.full(size, 10.0**ranks.rank * i) for i, size in enumerate(sizes)]
        gradients[-1] = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T * 10**ranks.rank  # not contiguous
        sum_gradients(gradients, torch.empty(4), ranks)
        return gradients

    monkeypatch.setattr(Ranks, "all_reduce", all_reduce)
    expected = [torch.full(size, 11.0 * i) for i, size in enumerate(sizes)]
    expected[-1] = torch.tensor([[11.0, 33.0], [22.0, 44.0]])
    for gradients in on_ranks(2, on_rank):
        torch.testing.assert_close(gradients, expected)
    # The first two fill the bucket. The one of 6 does not fit in, and the one before it is sent first.
    assert sent == [[4, 1, 6, 4, 4]] * 2


@pytest.mark.parametrize("is_partial", [False, True])
def test_the_norm_of_shards_is_that_of_the_whole(is_partial: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch may return it as a DTensor whose parts are yet to be reduced."""
    if is_partial:
        monkeypatch.setattr(nn.utils, "clip_grad_norm_", lambda parameters, _: parameters[0].grad.norm())

    def on_rank(ranks: Ranks) -> float:
        mesh: Any = init_device_mesh("cpu", (ranks.world_size,))
        weight = nn.Parameter(distribute_tensor(torch.zeros(3), mesh, [Shard(0)], src_data_rank=None))
        weight.grad = distribute_tensor(torch.tensor([3.0, 4.0, 12.0]), mesh, [Shard(0)], src_data_rank=None)
        return clip_gradients([weight], max_norm=1.0)

    assert on_ranks(2, on_rank) == [13.0, 13.0]
