"""Block masks in strips are those of PyTorch's `create_block_mask`."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers.masking_utils import bidirectional_mask_function, causal_mask_function, sliding_window_overlay

from rl_vlm.model import block_masks
from rl_vlm.model.block_masks import make_block_mask
from rl_vlm.model.shared_prefix import RowLayout

CPU = torch.device("cpu")
RULES: dict[str, Any] = {
    "causal": causal_mask_function,
    "all": bidirectional_mask_function,
    "window": lambda b, h, q, k: causal_mask_function(b, h, q, k) & sliding_window_overlay(100)(b, h, q, k),
    "looked up": lambda b, h, q, k: KINDS[q] == KINDS[k],
}
KINDS = torch.arange(1000) // 37 % 3


def tables(mask: BlockMask) -> list[Any]:
    """Each block's list of others, in order: of partial and of full blocks, by queries and by keys."""
    found = []
    for name in ("kv", "full_kv", "q", "full_q"):
        counts, indices = getattr(mask, f"{name}_num_blocks"), getattr(mask, f"{name}_indices")
        found.append([i[:n].tolist() for n, i in zip(counts[0, 0].tolist(), indices[0, 0], strict=True)])
    return found


@pytest.mark.parametrize("strip", [1, 2 * 128 * 128, 5 * 128 * 1024, 2**23])
@pytest.mark.parametrize("length", [1, 127, 128, 129, 640, 999])
@pytest.mark.parametrize("rule", RULES)
def test_tables_are_those_of_pytorch(rule: str, length: int, strip: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_masks, "STRIP_ELEMENTS", strip)
    ours = make_block_mask(RULES[rule], length, CPU)
    theirs = create_block_mask(RULES[rule], None, None, length, length, device="cpu")
    assert tables(ours) == tables(theirs)
    assert ours.seq_lengths == theirs.seq_lengths and ours.BLOCK_SIZE == theirs.BLOCK_SIZE


@pytest.mark.parametrize("rule", ["causal", "all", "window"])
def test_tables_of_a_packed_row_are_those_of_its_mask(rule: str) -> None:
    layout = RowLayout.build([300, 20, 411], [[129, 1, 77], [5], []])
    mask = layout.block_mask(RULES[rule])
    dense = torch.zeros(len(layout.row_owner), len(layout.row_owner), dtype=torch.bool)
    index = torch.arange(len(dense))
    zero, rule_of_row = index[0], cast(Any, mask.mask_mod)
    dense |= rule_of_row(zero, zero, index[:, None], index)
    counts = torch.nn.functional.pad(dense, (0, -len(dense) % 128) * 2).unflatten(0, (-1, 128)).unflatten(2, (-1, 128))
    counts = counts.sum((1, 3))
    partial, full, *_ = tables(mask)
    assert [sorted(row) for row in partial] == [
        row.nonzero()[:, 0].tolist() for row in (counts > 0) & (counts < 128**2)
    ]
    assert [sorted(row) for row in full] == [row.nonzero()[:, 0].tolist() for row in counts == 128**2]


class LargestTensor(TorchDispatchMode):
    """Notes the number of elements of the largest tensor that an operator returns."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        sizes = [x.numel() for x in tree_leaves(found) if isinstance(x, Tensor)]
        self.largest = max(self.largest, *sizes, 0)
        return found


def test_no_tensor_is_larger_than_a_strip(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_masks, "STRIP_ELEMENTS", 2**19)
    with LargestTensor() as sizes:
        make_block_mask(RULES["causal"], 4000, CPU)
    assert sizes.largest <= 2**19
    with LargestTensor() as sizes:
        create_block_mask(RULES["causal"], None, None, 4000, 4000, device="cpu")
    assert sizes.largest >= 4000**2
