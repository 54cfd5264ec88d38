"""Updates of weights whose gradients are missing, or not finite on some rank, with values computed by hand."""

import pytest
import torch
from torch import nn

from rl_vlm.distributed.gradients import clip_and_update, reserve_update
from rl_vlm.distributed.ranks import Ranks


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
