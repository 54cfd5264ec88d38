"""Attention of vision towers that compute all patches in one row, in which a patch attends to its own sequence only.

A sequence is an image, a frame, or a window of one (Qwen2.5-VL). With sdpa, transformers reads the sequences' lengths
from the device in every layer, three times, and calls SDPA once per sequence: 1,760 calls for an image of 4,000
patches. Here, all sequences of one length are one call. Windows are shorter at the borders of an image. They are not
padded, because a mask would rule out the flash kernel: Qwen2.5-VL's windows have 9 lengths at most.

    row       a a a a b b c c c c d d       the sequences a, b, c and d
    sorted    b b d d a a a a c c c c       calls of shape (2 sequences, 2 patches) and (2, 4)

transformers passes the whole row and `cu_seqlens` only to implementations with "flash" in their name.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from rl_vlm.model.family import Family
from rl_vlm.types import to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

BATCHED = "sdpa_in_flash_layout"
"""The name of this attention in transformers."""


@dataclass(frozen=True)
class RowOrder:
    """The patches of a row, sorted by the length of their sequence.

    Example: sequences of 2, 1 and 2 patches:

        row           0  1  2  3  4
                      a  a  b  c  c
        groups        [(1, 1), (2, 2)]     one sequence of 1 patch, two of 2
        sorted_index  [2, 0, 1, 3, 4]
        row_index     [1, 2, 0, 3, 4]
    """

    groups: tuple[tuple[int, int], ...]
    """Number of sequences and their length, shortest first."""
    sorted_index: Int[Tensor, " row"] | None = None
    """Row positions in sorted order. None if the row is sorted."""
    row_index: Int[Tensor, " row"] | None = None
    """Sorted positions in the order of the row. None if the row is sorted."""

    @staticmethod
    def build(lengths: Sequence[int], device: torch.device | str = "cpu") -> RowOrder:
        """Sort the sequences of a row by length."""
        counts = Counter(length for length in lengths if length)
        groups = tuple((counts[length], length) for length in sorted(counts))
        if list(lengths) == sorted(lengths):
            return RowOrder(groups)
        lengths_S = torch.tensor(lengths)
        sorted_index = lengths_S.repeat_interleave(lengths_S).argsort(stable=True)
        device = torch.device(device)
        return RowOrder(groups, to_device(sorted_index, device), to_device(sorted_index.argsort(), device))


_orders = WeakTensorKeyDictionary()
"""The order of each row by its `cu_seqlens`. All layers of a run of the tower get the same tensor."""


def row_order(cu_seqlens: Int[Tensor, " ends"], longest: int, num_patches: int) -> RowOrder:
    """Return the order of a row. If its sequences differ in length, read the lengths from the device, once per run."""
    num_sequences = len(cu_seqlens) - 1
    if num_sequences * longest == num_patches:
        return RowOrder(((num_sequences, longest),))
    if cu_seqlens not in _orders:
        _orders[cu_seqlens] = RowOrder.build(cu_seqlens.diff().tolist(), cu_seqlens.device)
    return _orders[cu_seqlens]


def batched_attention(
    module: nn.Module,
    query: Float[Tensor, "1 heads row dim"],
    key: Float[Tensor, "1 kv_heads row dim"],
    value: Float[Tensor, "1 kv_heads row dim"],
    attention_mask: None,
    *,
    cu_seq_lens_q: Int[Tensor, " ends"],
    max_length_q: int,
    **kwargs: Any,
) -> tuple[Float[Tensor, "1 row heads dim"], None]:
    """Compute attention within each sequence of a row, by transformers' sdpa attention."""
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    order = row_order(cu_seq_lens_q, max_length_q, query.shape[2])
    sizes = [number * length for number, length in order.groups]
    rows = [taken(x[0].transpose(0, 1), order.sorted_index).split(sizes) for x in (query, key, value)]
    outputs = []
    for group, parts in zip(order.groups, zip(*rows, strict=True), strict=True):
        q, k, v = (part.unflatten(0, group).transpose(1, 2) for part in parts)
        output, _ = sdpa_attention_forward(module, q, k, v, attention_mask, **kwargs)
        outputs.append(output.flatten(0, 1))
    return taken(torch.cat(outputs), order.row_index)[None], None


def taken(rows: Tensor, index: Tensor | None) -> Tensor:
    """Take rows by index. None takes them as they are."""
    return rows if index is None else rows.index_select(0, index)


def enable_batched_windows(model: PreTrainedModel, family: Family) -> None:
    """Compute the vision tower's attention by `batched_attention`, if the tower has sdpa and passes `cu_seqlens`."""
    from transformers import AttentionInterface

    tower = model.get_submodule(family.vision_modules[0])
    takes_lengths = any("cu_seqlens" in inspect.signature(part.forward).parameters for part in tower.modules())
    if takes_lengths and model.config.vision_config._attn_implementation == "sdpa":
        AttentionInterface.register(BATCHED, batched_attention)
        model.set_attn_implementation({"vision_config": BATCHED})
