"""The group-shared row: `[prefix][completion]…[completion]` of B prompts in one packed row, each token computed once.

A completion attends to its own prompt's prefix and to itself, by the model's own rule. Two functions registered with
transformers (`AttentionMaskInterface`, `AttentionInterface`) do this for every layer of the language model. The model's
code is not changed:

    attention over prefixes      (B, longest prefix)                       causal, or by the model's rule
    attention over completions   (N, longest completion) x (N, longest prefix + longest completion)   masked

These are two calls of SDPA. On CUDA, one call of FlexAttention over the whole row replaces them: it skips fully masked
blocks and needs no gathered keys. `memory.shared_attention: flash` computes causal layers in 16 bits by `flash_rows`,
and `sdpa` keeps the two calls. If the model applies a soft cap to its attention scores, `softcap` computes it.

The layout of the row is passed to the layers as their `attention_mask`, so gradient checkpointing recomputes with the
same layout. Decoding passes another layout (`group_cache`). Without a layout, the registered functions call
transformers' own sdpa attention, which has no soft cap, or `capped_attention`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from rl_vlm.config.schema import SharedAttention
from rl_vlm.errors import ModelError
from rl_vlm.model.block_masks import make_block_mask
from rl_vlm.model.compilation import allow_graphs
from rl_vlm.model.flash_rows import FlashRow, fits_flash, flash_attention, has_flash
from rl_vlm.model.flex_kernels import (
    compiled_flex_attention,
    has_kernels,
    kernel_options,
    naming_compiler_errors,
    shared_memory_of,
)
from rl_vlm.model.softcap import capped_attention, score_cap
from rl_vlm.types import to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NAMES: dict[SharedAttention, str] = {
    "auto": "group_shared", "flex": "group_shared_by_flex", "flash": "group_shared_by_flash",
    "sdpa": "group_shared_in_two_calls",
}  # fmt: skip
"""Names of this attention in transformers. Without CUDA all are two calls, and `sdpa` expands heads as on CUDA."""

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""An attention rule in transformers' form: (batch, head, query position, key position) -> whether to attend."""


class AttentionLayout(ABC):
    """The keys that each query of a forward attends to. Layers get it as their attention mask."""

    ndim = 4

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int, int, int]:
        """Return the shape of the mask: (batch, head, query, key)."""

    @abstractmethod
    def with_masks(self, mask_function: MaskFunction, setting: SharedAttention = "auto") -> AttentionLayout:
        """Return this layout with masks for layers of one type. Their rule on token positions is `mask_function`."""

    @abstractmethod
    def attend(
        self,
        query: Float[Tensor, "rows heads queries dim"],
        key: Float[Tensor, "rows kv_heads keys dim"],
        value: Float[Tensor, "rows kv_heads keys value_dim"],
        scale: float,
        softcap: float | None,
    ) -> Float[Tensor, "rows queries heads value_dim"]:
        """Compute the attention of one layer, whose masks are set."""

    def __getitem__(self, index: tuple[slice, ...]) -> AttentionLayout:
        """Return this layout for a slice of the mask that keeps all of it (Gemma 4).

        Raises ModelError for other slices.
        """
        if any(part.indices(size) != (0, size, 1) for part, size in zip(index, self.shape, strict=True)):
            raise ModelError(
                f"the model computes a part {index} of an attention mask. Set memory.prefix_sharing: dense"
            )
        return self


@dataclass(frozen=True)
class RowLayout(AttentionLayout):
    """Positions of prefixes and completions in a packed row. Index tensors hold row positions, 0 at padding.

    Example: prefixes of 3 and 2 tokens, completions of 2 and 1 tokens after the first and 1 after the second:

        row                0  1  2  3  4  5  6  7  8
                           p  p  p  a  a  b  q  q  c
        prefix_index       [[0, 1, 2], [6, 7, 0]]
        completion_index   [[3, 4], [5, 0], [8, 0]]
        predictor_index    [2, 3, 4,   2, 5,   7, 8]

    The hidden states at `predictor_index` predict the completions' tokens. The prefix's last state predicts the first
    token, the completion's own states predict the others.
    """

    prefix_index: Int[Tensor, "prompts prefix"]
    prefix_valid: Bool[Tensor, "prompts prefix"]
    completion_index: Int[Tensor, "completions tokens"]
    completion_valid: Bool[Tensor, "completions tokens"]
    owner_N: Int[Tensor, " completions"]
    """Index of each completion's prompt."""
    logical_index: Int[Tensor, "completions tokens"]
    """Row positions of completions as if each directly followed its prefix."""
    output_index: Int[Tensor, " row"]
    """For each token of the row, its index in the outputs of both attentions, flattened and concatenated."""
    predictor_index: Int[Tensor, " predictors"]
    """Row positions of the last token of the prefix and of the completion's own tokens, for each completion."""
    row_owner: Int[Tensor, " row"]
    """Index of each token's prompt."""
    row_part: Int[Tensor, " row"]
    """0 for prefix tokens, 1 + the index of the completion for completion tokens."""
    row_logical: Int[Tensor, " row"]
    """`logical_index` for completion tokens, the row position for prefix tokens."""
    num_prefix_tokens: int
    """Sum over all prefixes."""
    sections: Sequence[Sequence[int]]
    """The number of tokens of each prefix, and then of each of its completions."""
    masks: RowMasks | BlockMask | FlashRow | None = None
    """Attention masks for the layers of one type. They are set on the layout that these layers get."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (1, 1, len(self.output_index), len(self.output_index))

    @staticmethod
    def build(
        prefix_lengths: Sequence[int],
        completion_lengths: Sequence[Sequence[int]],
        device: torch.device | str = "cpu",
        predicted: Sequence[Tensor] | None = None,
    ) -> RowLayout:
        """Lay out B prefixes, each followed by its completions.

        `predicted` has a mask for each completion, over its prefix's last token and its own tokens: True if the next
        token is scored. By default all are.
        """
        sections = [[prefix, *lengths] for prefix, lengths in zip(prefix_lengths, completion_lengths, strict=True)]
        lengths = torch.tensor([length for section in sections for length in section])
        starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)[:-1]])
        is_prefix = torch.tensor([i == 0 for section in sections for i in range(len(section))])
        owner_N = torch.arange(len(sections)).repeat_interleave(torch.tensor([len(c) for c in completion_lengths]))

        prefix_index, prefix_valid = ranges(starts[is_prefix], lengths[is_prefix])
        completion_index, completion_valid = ranges(starts[~is_prefix], lengths[~is_prefix])
        prefix_ends = (starts + lengths)[is_prefix][owner_N]
        logical_index, _ = ranges(prefix_ends, lengths[~is_prefix])

        row_index = torch.cat([prefix_index[prefix_valid], completion_index[completion_valid]])
        places = torch.cat([prefix_valid.flatten(), completion_valid.flatten()]).nonzero()[:, 0]
        output_index = torch.empty_like(row_index).scatter_(0, row_index, places)
        predictors = torch.cat([prefix_ends[:, None] - 1, completion_index], dim=1)
        is_predictor = F.pad(completion_valid, (1, 0), value=True)
        if predicted is not None:
            is_predictor[is_predictor.clone()] = torch.cat(list(predicted))
        predictor_index = predictors[is_predictor]

        def along_row(of_prefixes: Tensor, of_completions: Tensor) -> Tensor:
            """Arrange values of prefix tokens and completion tokens in the order of the row."""
            parts = of_prefixes.expand_as(prefix_index), of_completions.expand_as(completion_index)
            return torch.cat([part.flatten() for part in parts])[output_index]

        prompts, completions = torch.arange(len(sections)), torch.arange(len(owner_N))

        def sent(tensor: Tensor) -> Tensor:
            return to_device(tensor, torch.device(device))

        return RowLayout(
            sent(prefix_index),
            sent(prefix_valid),
            sent(completion_index),
            sent(completion_valid),
            sent(owner_N),
            sent(logical_index),
            sent(output_index),
            sent(predictor_index),
            row_owner=sent(along_row(prompts[:, None], owner_N[:, None])),
            row_part=sent(along_row(torch.zeros_like(prompts)[:, None], 1 + completions[:, None])),
            row_logical=sent(along_row(prefix_index, logical_index)),
            num_prefix_tokens=int(lengths[is_prefix].sum()),
            sections=sections,
        )

    def with_masks(self, mask_function: MaskFunction, setting: SharedAttention = "auto") -> RowLayout:
        """Return this layout with masks for layers of one type. Their rule on token positions is `mask_function`.

        On CUDA these are masks for FlexAttention, unless `setting` is sdpa. If it is flash, causal layers have the
        sequences of the row in place of masks.

        Within a prefix and within a completion, the rule is evaluated at positions of the row, so it can look up the
        kind of a token (image or text) there. From a completion to its prefix, the query's position is the logical one,
        where the completion directly follows its prefix. No image spans both, so the kind of the query has no effect.
        """
        from transformers.masking_utils import causal_mask_function

        device = self.owner_N.device
        if setting == "flash" and mask_function is causal_mask_function and has_flash(device):
            return replace(self, masks=FlashRow.build(self.sections, device))
        if setting != "sdpa" and has_kernels(device):
            return replace(self, masks=self.block_mask(mask_function))
        return replace(self, masks=replace(self.dense_masks(mask_function), expands_heads=setting == "sdpa"))

    @cached_property
    def causal_blocks(self) -> BlockMask:
        """The mask of causal layers for FlexAttention, if FlashAttention does not compute their heads."""
        from transformers import masking_utils

        rule: Any = masking_utils.causal_mask_function
        return self.block_mask(rule)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None
    ) -> Float[Tensor, "1 row heads value_dim"]:
        return shared_attention(query[0], key[0], value[0], self, scale, softcap)[None]

    def dense_masks(self, mask_function: MaskFunction) -> RowMasks:
        """Build masks for SDPA: prefixes attend to themselves, completions to their prefix and themselves."""
        from transformers.masking_utils import causal_mask_function

        zero = self.owner_N.new_zeros(())

        def allowed(queries: Tensor, keys: Tensor, keys_valid: Tensor) -> Tensor:
            rule = mask_function(zero, zero, queries[:, None, :, None], keys[:, None, None, :])
            return rule & keys_valid[:, None, None, :]

        to_prefix = allowed(self.logical_index, self.prefix_index[self.owner_N], self.prefix_valid[self.owner_N])
        to_itself = allowed(self.completion_index, self.completion_index, self.completion_valid)
        # padded queries attend to something, since a softmax over nothing is NaN
        completion = torch.cat([to_prefix, to_itself], dim=-1) | ~self.completion_valid[:, None, :, None]
        if mask_function is causal_mask_function:
            return RowMasks(None, completion)
        within_prefix = allowed(self.prefix_index, self.prefix_index, self.prefix_valid)
        return RowMasks(within_prefix | ~self.prefix_valid[:, None, :, None], completion)

    def block_mask(self, mask_function: MaskFunction) -> BlockMask:
        """Build the mask for FlexAttention: which blocks of the row attend to which."""
        owner, part, logical = self.row_owner, self.row_part, self.row_logical
        return make_block_mask(
            lambda b, h, q, k: (
                (owner[q] == owner[k])
                & ((part[k] == 0) | (part[q] == part[k]))
                & mask_function(b, h, torch.where(part[q] == part[k], q, logical[q]), k)
            ),
            len(owner), owner.device,
        )  # fmt: skip


@dataclass(frozen=True)
class RowMasks:
    """Masks, True where a query attends to a key. A completion's keys are its padded prefix, then its own tokens."""

    prefix: Bool[Tensor, "prompts 1 prefix prefix"] | None
    """None if prefixes are causal."""
    completion: Bool[Tensor, "completions 1 tokens keys"]
    expands_heads: bool = False
    """Whether keys and values are copied for each query head. On CUDA, SDPA's fast kernels take no groups of heads."""


def ranges(starts: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Return index ranges `start … start + length - 1` as one padded matrix, and a mask that is False at padding."""
    offsets = torch.arange(int(lengths.max()) if len(lengths) else 0, device=starts.device)
    valid = offsets < lengths[:, None]
    return torch.where(valid, starts[:, None] + offsets, 0), valid


active_layout: ContextVar[AttentionLayout | None] = ContextVar("active_layout", default=None)


@contextmanager
def attention_layout(layout: AttentionLayout | None) -> Iterator[None]:
    """Run the forwards of the block with the attention of this layout. None keeps the stock attention."""
    token = active_layout.set(layout)
    try:
        yield
    finally:
        active_layout.reset(token)


def enable_shared_rows(model: PreTrainedModel, setting: SharedAttention = "auto") -> None:
    """Route the language model's attention through this module."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def mask(*args: Any, **kwargs: Any) -> AttentionLayout | Tensor | None:
        layout = active_layout.get()
        if layout is None:
            return sdpa_mask(*args, **kwargs)
        made = kwargs["attention_mask"]  # PaliGemma makes the mask, and its language model asks again
        return made if isinstance(made, AttentionLayout) else layout.with_masks(kwargs["mask_function"], setting)

    def attention(
        module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        softcap = kwargs.get("softcap")
        if isinstance(attention_mask, AttentionLayout):
            return attention_mask.attend(query, key, value, kwargs["scaling"], softcap), None
        if softcap is not None:
            return capped_attention(query, key, value, attention_mask, kwargs["scaling"], softcap).transpose(1, 2), None
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)

    AttentionMaskInterface.register(NAMES[setting], mask)
    AttentionInterface.register(NAMES[setting], torch.compiler.disable(attention))  # its kernels are compiled apart
    model.set_attn_implementation({"text_config": NAMES[setting]})


def routes_attention(model: PreTrainedModel) -> bool:
    """Return whether `enable_shared_rows` was called for the model."""
    return setting_of(model) is not None


def setting_of(model: PreTrainedModel) -> SharedAttention | None:
    """Return how shared rows of a model are computed on CUDA, or None if `enable_shared_rows` was not called for it."""
    found = model.config.get_text_config()._attn_implementation
    return next((setting for setting, name in NAMES.items() if name == found), None)


def shared_attention(
    query: Float[Tensor, "heads row dim"],
    key: Float[Tensor, "kv_heads row dim"],
    value: Float[Tensor, "kv_heads row value_dim"],
    layout: RowLayout,
    scale: float,
    softcap: float | None = None,
) -> Float[Tensor, "row heads value_dim"]:
    """Compute attention over a packed row: each prefix to itself, each completion to its prefix and itself."""
    masks = layout.masks
    if isinstance(masks, FlashRow):
        if softcap is None and fits_flash(query, key, value):
            return flash_attention(query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), masks, scale)
        masks = layout.causal_blocks
    if not isinstance(masks, RowMasks):
        return block_attention(query, key, value, masks, scale, softcap)
    query, key, value = (x.transpose(0, 1) for x in (query, key, value))

    def attend(queries: Tensor, keys: Tensor, mask: Tensor | None) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (query[queries], key[keys], value[keys]))
        if softcap is None:
            if masks.expands_heads:
                k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
            causal = mask is None
            out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=True)
        else:
            out = capped_attention(q, k, v, mask, scale, softcap)
        return out.transpose(1, 2).flatten(0, 1)

    outputs = [attend(layout.prefix_index, layout.prefix_index, masks.prefix)]
    if layout.completion_index.numel():
        keys = torch.cat([layout.prefix_index[layout.owner_N], layout.completion_index], dim=1)
        outputs.append(attend(layout.completion_index, keys, masks.completion))
    return torch.cat(outputs)[layout.output_index]


def block_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: BlockMask | None, scale: float, softcap: float | None
) -> Tensor:
    """Compute the same attention with one FlexAttention call over the row.

    Raises ModelError if its forward kernel cannot be compiled.
    """
    allow_graphs()
    attend: Any = compiled_flex_attention() if has_kernels(query.device) else flex_attention
    options = kernel_options(query.shape[-1], shared_memory_of(query.device), value.dtype)
    query, key = query.to(value.dtype), key.to(value.dtype)  # rotary angles are fp32 under autocast
    score_mod = None if softcap is None else score_cap(softcap, query.device)
    with naming_compiler_errors(lambda: [query.shape[-1]]):
        row = attend(
            query[None], key[None], value[None], score_mod, mask, scale, enable_gqa=True, kernel_options=options
        )
    return row[0].transpose(0, 1)
