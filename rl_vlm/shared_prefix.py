"""The group-shared row: `[prefixes of B prompts][N completions]` in one packed row, each token computed once.

A completion attends, causally, to its own prompt's prefix and to itself. One function registered with transformers'
`AttentionInterface` does this for every layer of the language model; the model itself is not patched:

    attention over prefixes      (B, longest prefix)                       causal
    attention over completions   (N, longest completion) x (N, longest prefix + longest completion)   masked

The layout of the row travels to the layers as their `attention_mask`, so gradient checkpointing recomputes with the
same layout. Outside of `shared_row` the registered function is transformers' own sdpa attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class RowLayout:
    """Where prefixes and completions lie in a packed row; index tensors point into the row, 0 where padded.

    Example: prefixes of 3 and 2 tokens, completions of 2 and 1 tokens behind the first and 1 behind the second, in a
    row of 9 tokens: `prefix_index = [[0, 1, 2], [3, 4, 0]]`, `query_index = [[5, 6], [7, 0], [8, 0]]` and
    `key_index = [[0, 1, 2, 5, 6], [0, 1, 2, 7, 0], [3, 4, 0, 8, 0]]`. The hidden states at `predictor_index = [2, 5, 6,
    2, 7, 4, 8]` predict the completions' tokens: the prefix's last state the first one, its own states the others.
    """

    prefix_index: Int[Tensor, "prompts prefix"]
    query_index: Int[Tensor, "completions tokens"]
    key_index: Int[Tensor, "completions keys"]
    key_mask: Bool[Tensor, "completions 1 tokens keys"]
    output_index: Int[Tensor, " row"]
    """For each token of the row, its place among the outputs of both attentions, flattened and concatenated."""
    predictor_index: Int[Tensor, " predictors"]
    """For each completion, the row positions of its prefix's last token and of its own tokens."""

    @staticmethod
    def build(
        prefix_lengths: Sequence[int],
        completion_lengths: Sequence[int],
        prompt_of_completion: Sequence[int],
        device: torch.device | str = "cpu",
    ) -> RowLayout:
        """Lay out B prefixes and then N completions; completion n continues prefix `prompt_of_completion[n]`."""
        prefix_P = torch.tensor(prefix_lengths, device=device)
        length_N = torch.tensor(completion_lengths, device=device)
        owner_N = torch.tensor(prompt_of_completion, device=device)
        ends = torch.cat([prefix_P, length_N]).cumsum(0)
        starts = F.pad(ends[:-1], (1, 0))

        prefix_index, prefix_valid = _ranges(starts[: len(prefix_P)], prefix_P)
        query_index, query_valid = _ranges(starts[len(prefix_P) :], length_N)
        key_index = torch.cat([prefix_index[owner_N], query_index], dim=1)

        tokens = query_index.shape[1]
        to_prefix = prefix_valid[owner_N][:, None, :].expand(-1, tokens, -1)
        to_itself = torch.ones(tokens, tokens, dtype=torch.bool, device=device).tril().expand(len(owner_N), -1, -1)
        key_mask = torch.cat([to_prefix, to_itself], dim=2)[:, None]

        output_index = torch.cat([prefix_valid.flatten(), query_valid.flatten()]).nonzero()[:, 0]
        last_of_prefix = (starts[: len(prefix_P)] + prefix_P - 1)[owner_N]
        predictor_index = torch.cat([last_of_prefix[:, None], query_index], dim=1)[
            F.pad(query_valid, (1, 0), value=True)
        ]
        return RowLayout(prefix_index, query_index, key_index, key_mask, output_index, predictor_index)


def _ranges(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Index ranges `start … start + length - 1` as one padded matrix, and where it is not padding."""
    offsets = torch.arange(int(lengths.max()), device=starts.device)
    valid = offsets < lengths[:, None]
    return torch.where(valid, starts[:, None] + offsets, 0), valid


_active_layout: ContextVar[RowLayout | None] = ContextVar("active_layout", default=None)


@contextmanager
def shared_row(layout: RowLayout | None) -> Iterator[None]:
    """Forwards inside see one packed row of this layout; None leaves the stock attention."""
    token = _active_layout.set(layout)
    try:
        yield
    finally:
        _active_layout.reset(token)


def enable_shared_rows(model: PreTrainedModel) -> None:
    """Route the language model's attention through this module, with transformers' sdpa for all other forwards."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def mask(*args: Any, **kwargs: Any) -> RowLayout | Tensor | None:
        return _active_layout.get() or sdpa_mask(*args, **kwargs)

    def attention(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        if isinstance(attention_mask, RowLayout):
            return shared_attention(query[0], key[0], value[0], attention_mask, kwargs["scaling"])[None], None
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionMaskInterface.register("group_shared", mask)
    AttentionInterface.register("group_shared", attention)
    model.set_attn_implementation({"text_config": "group_shared"})


def shared_attention(
    query: Float[Tensor, "heads row dim"],
    key: Float[Tensor, "kv_heads row dim"],
    value: Float[Tensor, "kv_heads row dim"],
    layout: RowLayout,
    scale: float,
) -> Float[Tensor, "row heads dim"]:
    """Attention of a packed row: each prefix to itself, each completion to its prefix and itself."""
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))

    def attend(queries: Tensor, keys: Tensor, **mask: Any) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query[queries], key[keys], value[keys]))
        out = F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=True, **mask)
        return out.transpose(1, 2).flatten(0, 1)

    outputs = [attend(layout.prefix_index, layout.prefix_index, is_causal=True)]
    if layout.query_index.numel():
        outputs.append(attend(layout.query_index, layout.key_index, attn_mask=layout.key_mask))
    return torch.cat(outputs)[layout.output_index]
