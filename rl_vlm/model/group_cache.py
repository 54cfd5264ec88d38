"""Decoding with one copy of a prompt's keys and values for all completions of its group.

    cache of a layer   prompts      (B, longest prompt)   once per prompt, left-padded
                       completions  (N, own tokens)       in a buffer with room for more tokens

    attention          all queries of a prompt's completions to its keys     (output, log-sum-exp)
                       the queries of each completion to its own keys        (output, log-sum-exp)

The two join to the attention over all keys, exactly (Hydragen, arXiv:2402.05099, section 3.1). A copy of the prompt's
keys for each completion, as in transformers, would be read and written anew with each token.

Layers with a state or with cross-attention keep transformers' cache.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_vlm.config.schema import SharedAttention
from rl_vlm.errors import ModelError
from rl_vlm.model.shared_prefix import AttentionLayout, MaskFunction, ranges
from rl_vlm.model.softcap import chunk_scores, chunk_size, weighted_values
from rl_vlm.types import to_device

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedConfig
    from transformers.cache_utils import DynamicLayer
else:
    DynamicLayer = object

ROOM = 128
"""Tokens that a buffer has room for when it is made. Then it is copied to one with room for as many more."""


class GroupCacheLayer(DynamicLayer):
    """Keys and values of one layer, for B prompts and for the tokens of N completions.

    `keys` and `values` belong to completions. Before the first token they belong to prompts.

    If the layer attends to a window of tokens, keys outside of it are left out.
    """

    def __init__(self, prompts: DynamicLayer) -> None:
        """Take the prefilled cache of B prompts. It is not copied."""
        super().__init__()
        assert prompts.keys is not None and prompts.values is not None
        self.of_prompts = self.keys, self.values = prompts.keys, prompts.values
        self.prompt_length = prompts.get_seq_length()
        self.is_sliding = prompts.is_sliding
        self.window: int | None = getattr(prompts, "sliding_window", None)
        self.num_tokens = 0
        self.start = self.stop = 0
        """Range of kept tokens in the buffers."""
        self.buffers: tuple[Tensor, Tensor] | None = None
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append (N, kv_heads, new tokens, dim), and return views of the completions' own keys and values."""
        num_new = key_states.shape[-2]
        self.num_tokens += num_new
        buffers = self.buffers_for(key_states, value_states)
        for buffer, states in zip(buffers, (key_states, value_states), strict=True):
            buffer[:, :, self.stop : self.stop + num_new] = states
        self.stop += num_new
        if self.window is not None:
            self.start = max(self.start, self.stop - (self.window - 1 + num_new))
        self.keys, self.values = (buffer[:, :, self.start : self.stop] for buffer in buffers)
        return self.keys, self.values

    def buffers_for(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return buffers with room for new keys and values. Make larger ones if no room is left.

        All keys and values have the dtype of new values. Under autocast, keys and prefilled values may be in float32.
        """
        num_new = key_states.shape[-2]
        if self.buffers is None or self.stop + num_new > self.buffers[0].shape[-2]:
            length = self.stop - self.start
            made = [
                value_states.new_empty(*states.shape[:2], length + num_new + ROOM, states.shape[-1])
                for states in (key_states, value_states)
            ]
            for buffer, kept in zip(made, self.buffers or (), strict=False):
                buffer[:, :, :length] = kept[:, :, self.start : self.stop]
            self.buffers = made[0], made[1]
            self.of_prompts = self.of_prompts[0].to(made[0].dtype), self.of_prompts[1].to(made[0].dtype)
            self.start, self.stop = 0, length
        return self.buffers

    def visible_prompts(self, num_new: int) -> tuple[Tensor, Tensor]:
        """Return the keys and values of prompts, without those outside of the window of all `num_new` last tokens."""
        if self.window is None:
            return self.of_prompts
        keys, values = self.of_prompts
        hidden = max(0, keys.shape[-2] - max(0, self.window - 1 + num_new - self.num_tokens))
        return keys[:, :, hidden:], values[:, :, hidden:]

    def keep(self, rows: Int[Tensor, " rows"], prompts: Int[Tensor, " prompts"] | None) -> None:
        """Keep some completions and prompts, by their indices. None keeps all prompts."""
        if self.buffers is not None:
            keys, values = (buffer[rows, :, self.start : self.stop] for buffer in self.buffers)
            self.buffers, self.start, self.stop = (keys, values), 0, keys.shape[-2]
            self.keys, self.values = keys, values
        if prompts is not None:
            keys, values = self.of_prompts
            self.of_prompts = keys[prompts], values[prompts]

    def get_seq_length(self) -> int:
        return self.prompt_length + self.num_tokens

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0


@cache
def layer_class() -> Any:
    """Return `GroupCacheLayer` as a subclass of transformers' layer, which is not imported with this file."""
    from transformers.cache_utils import DynamicLayer

    return type("GroupCacheLayer", (GroupCacheLayer, DynamicLayer), {})


@dataclass(frozen=True)
class RowGroups:
    """The prompts of N rows, each a completion. Rows of one prompt follow each other, in the order of prompts."""

    owners: Int[Tensor, " rows"]
    """Index of each row's prompt, on the CPU. Every prompt has a row."""
    prompt_valid: Bool[Tensor, "prompts prompt"] | None
    """False at left padding. None without padding."""
    slots: Int[Tensor, "prompts group"]
    """Rows of each prompt, 0 at padding."""
    places: Int[Tensor, " rows"] | None
    """Index of each row in the flattened `slots`. None if all prompts have equally many rows."""

    @staticmethod
    def of(owners: Sequence[int] | Tensor, prompt_valid: Tensor | None, device: torch.device) -> RowGroups:
        owners = torch.as_tensor(owners)
        counts = torch.bincount(owners)
        slots, valid = ranges(counts.cumsum(0) - counts, counts)
        places = None if valid.all() else to_device(valid.flatten().nonzero()[:, 0], device)
        return RowGroups(owners, prompt_valid, to_device(slots, device), places)

    def keep(self, rows: Int[Tensor, " kept"]) -> tuple[RowGroups, Int[Tensor, " prompts"] | None]:
        """Return the groups of some rows, and the indices of their prompts, or None if they are all prompts."""
        kept, owners = self.owners[rows.cpu()].unique(return_inverse=True)
        prompts = None if len(kept) == len(self.slots) else to_device(kept, rows.device)
        valid = self.prompt_valid if self.prompt_valid is None or prompts is None else self.prompt_valid[prompts]
        return RowGroups.of(owners, valid, rows.device), prompts

    def by_prompt(self, values: Float[Tensor, "rows ..."]) -> Float[Tensor, "prompts group ..."]:
        """Arrange rows by their prompts. A prompt with fewer rows than others gets copies of row 0."""
        return values[self.slots] if self.places is not None else values.unflatten(0, self.slots.shape)

    def by_row(self, values: Float[Tensor, "prompts group ..."]) -> Float[Tensor, "rows ..."]:
        """Undo `by_prompt`."""
        return values.flatten(0, 1) if self.places is None else values.flatten(0, 1)[self.places]


@dataclass(frozen=True)
class GroupLayout(AttentionLayout):
    """Attention of the last `num_new` tokens of N completions to B prompts and to their own tokens."""

    groups: RowGroups
    layers: list[GroupCacheLayer]
    num_new: int
    num_keys: int
    """Tokens of a padded prompt and of a completion, with the new ones."""
    prompt_mask: Bool[Tensor, "#prompts 1 #queries prompt"] | None = None
    """True where a query attends to a token of a prompt. None if it attends to all."""
    own_mask: Bool[Tensor, "#rows 1 queries keys"] | None = None
    """The same for the completions' own tokens. The last `num_new` of them are queries."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return len(self.groups.owners), 1, self.num_new, self.num_keys

    def with_masks(self, mask_function: MaskFunction, setting: SharedAttention = "auto") -> GroupLayout:
        """Return this layout with masks. In a causal layer, a single new token attends to all others."""
        from transformers.masking_utils import causal_mask_function

        valid = None if self.groups.prompt_valid is None else self.groups.prompt_valid[:, None, None]
        if mask_function is causal_mask_function and self.num_new == 1:
            return replace(self, prompt_mask=valid)
        first_rows = self.groups.slots[:, :1, None, None]
        keys = torch.arange(self.num_keys, device=first_rows.device)
        queries = keys[-self.num_new :]
        allowed = mask_function(first_rows, first_rows.new_zeros(()), queries[None, None, :, None], keys)
        allowed = allowed.expand(-1, 1, len(queries), len(keys))
        prompt_length = self.layers[0].prompt_length
        of_prompts, own = allowed[..., :prompt_length], allowed[..., prompt_length:]
        if len(own) > 1:
            own = own[to_device(self.groups.owners, own.device)]
        if mask_function is causal_mask_function:
            return replace(self, prompt_mask=valid, own_mask=own)
        return replace(self, prompt_mask=of_prompts if valid is None else of_prompts & valid, own_mask=own)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float, softcap: float | None
    ) -> Float[Tensor, "rows queries heads value_dim"]:
        layer = self.layer_of(key)
        prompt_keys, prompt_values = layer.visible_prompts(self.num_new)
        heads_per_key = query.unflatten(1, (key.shape[1], -1)).to(value.dtype)  # (rows, kv_heads, heads, queries, dim)
        output, lse = part(heads_per_key, key, value, self.own_mask, scale, softcap)
        if prompt_keys.shape[-2]:
            by_prompt = self.groups.by_prompt(heads_per_key).transpose(1, 2)
            some = part(by_prompt.flatten(2, 3), prompt_keys, prompt_values, self.prompt_mask, scale, softcap)
            of_prompts, lse_of_prompts = (
                self.groups.by_row(x.unflatten(2, by_prompt.shape[2:4]).transpose(1, 2)) for x in some
            )
            weight = torch.sigmoid(lse_of_prompts - lse)[..., None]
            output = torch.lerp(output.to(lse.dtype), of_prompts.to(lse.dtype), weight).to(value.dtype)
        return output.flatten(1, 2).transpose(1, 2)

    def layer_of(self, key: Tensor) -> GroupCacheLayer:
        """Return the layer with these keys. Raises ModelError if the model does not attend to the keys of its cache."""
        for layer in self.layers:
            if layer.keys is key:
                return layer
        raise ModelError(
            "the installed transformers attends to keys that are not those of its cache. Set memory.prefix_sharing: "
            "dense, or another rollout.engine"
        )


def part(
    query: Float[Tensor, "rows kv_heads heads queries dim"],
    key: Float[Tensor, "rows kv_heads keys dim"],
    value: Float[Tensor, "rows kv_heads keys value_dim"],
    mask: Bool[Tensor, "#rows 1 #queries all_keys"] | None,
    scale: float,
    softcap: float | None,
) -> tuple[Float[Tensor, "rows kv_heads heads queries value_dim"], Float[Tensor, "rows kv_heads heads queries"]]:
    """Compute attention over a part of the keys: the output, and the log-sum-exps of scores.

    `mask` may have more keys. Its last ones belong to `key`.
    """
    num_kv_heads, heads, queries = query.shape[1:4]
    if mask is not None:
        mask = mask[..., mask.shape[-1] - key.shape[-2] :]
        mask = mask if len(mask) == 1 else mask.repeat_interleave(num_kv_heads, dim=0)
    query, key, value = query.flatten(0, 1), key.flatten(0, 1)[:, None], value.flatten(0, 1)[:, None]
    if queries == 1:  # one product of all heads with the keys
        query = query.transpose(1, 2)
    output, lse = attention_with_lse(query, key, value, mask, scale, softcap)
    shape = (-1, num_kv_heads, heads, queries)
    return output.reshape(*shape, output.shape[-1]), lse.reshape(shape)


def attention_with_lse(
    query: Float[Tensor, "rows heads queries dim"],
    key: Float[Tensor, "rows 1 keys dim"],
    value: Float[Tensor, "rows 1 keys value_dim"],
    mask: Bool[Tensor, "#rows 1 #queries keys"] | None,
    scale: float,
    softcap: float | None,
) -> tuple[Float[Tensor, "rows heads queries value_dim"], Float[Tensor, "rows heads queries"]]:
    """Compute attention, and the log-sum-exps of its scores in float32, with PyTorch's fused kernel if there is one.

    All heads have the same keys. A query whose mask is all False gets a log-sum-exp of about -1e38.
    """
    heads, queries, num_keys = query.shape[1], query.shape[2], key.shape[2]
    on_cpu, has_kernel = query.device.type == "cpu", query.is_cuda and key.shape[-1] % 8 == 0
    if softcap is not None or key.shape[-1] != value.shape[-1] or not (on_cpu or has_kernel):
        return plain_attention_with_lse(query, key, value, mask, scale, softcap)
    key, value = key.expand(-1, heads, -1, -1), value.expand(-1, heads, -1, -1)
    added = None if mask is None else bias(mask, query.dtype)
    if on_cpu:
        fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return fused(query, key, value, attn_mask=added, scale=scale)
    if added is not None:  # rows of the kernel's bias begin at multiples of 16 values
        aligned = F.pad(added, (0, -num_keys % 16))[..., :num_keys]
        added = aligned.expand(len(query), heads, queries, -1)
    fused = torch.ops.aten._scaled_dot_product_efficient_attention
    output, lse, *_ = fused(query, key, value, added, compute_log_sumexp=True, scale=scale)
    return output, lse[..., :queries]  # padded to multiples of 32 queries


def bias(mask: Bool[Tensor, "*shape"], dtype: torch.dtype) -> Float[Tensor, "*shape"]:
    """Return numbers to add to scores: 0 where `mask` is True, and otherwise the lowest number."""
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, torch.finfo(dtype).min)


def plain_attention_with_lse(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Compute `attention_with_lse` from the scores of some queries at a time."""
    if mask is None:
        mask = torch.ones(1, 1, 1, key.shape[2], dtype=torch.bool, device=query.device)
    mask = mask.expand(-1, -1, query.shape[2], -1)
    at_once = chunk_size(query, key)
    found = []
    for some, allowed in zip(query.split(at_once, dim=2), mask.split(at_once, dim=2), strict=True):
        scores = chunk_scores(some, allowed, key, scale, softcap)
        lse = scores.logsumexp(-1)
        found.append((weighted_values((scores - lse[..., None]).exp(), value), lse.flatten(1, 2)))
    outputs, lses = zip(*found, strict=True)
    return torch.cat(outputs, dim=2), torch.cat(lses, dim=2)


def group_layers(prefilled: Cache, config: PreTrainedConfig) -> set[int]:
    """Return the indices of a prefilled cache's layers that can be `GroupCacheLayer`.

    It is empty if any layer of self-attention cannot.
    """
    from transformers.cache_utils import CacheLayerMixin, DynamicLayer, DynamicSlidingWindowLayer

    crossing = getattr(config.get_text_config(), "cross_attention_layers", None) or ()
    layers = enumerate(prefilled.layers)
    found = {i for i, layer in layers if i not in crossing and isinstance(layer, CacheLayerMixin)}
    plain = {i for i in found if type(prefilled.layers[i]) in (DynamicLayer, DynamicSlidingWindowLayer)}
    return plain if plain == found and not caches_latents(config) else set()


def caches_latents(config: PreTrainedConfig) -> bool:
    """Return whether layers cache latents, from which they compute keys and values for each token (DeepSeek-V3)."""
    return getattr(config.get_text_config(), "kv_lora_rank", None) is not None


def keep_positions(cache: Cache, rows: Int[Tensor, " rows"]) -> None:
    """Keep the positions of some rows, if the model puts positions (axes, rows, tokens) into its cache (Qwen4-Exp)."""
    positions: Tensor | None = getattr(cache, "position_ids", None)
    if positions is not None:
        vars(cache)["position_ids"] = positions[:, rows]


def expanded_cache(prefilled: Cache, rows: Int[Tensor, " rows"], prompts: Tensor, grouped: set[int]) -> Cache:
    """Build a cache for completions from a cache of prompts, which stays as it is.

    Layers in `grouped` take the prompts `prompts` once. Others take the prompt `rows[n]` for completion n.
    """
    expanded = copy.copy(prefilled)
    keep_positions(expanded, rows)
    expanded.layers = []
    for i, layer in enumerate(prefilled.layers):
        if i in grouped:
            made = layer_class()(layer)
            made.keep(rows, None if len(prompts) == len(made.of_prompts[0]) else prompts)
        else:
            made = copy.deepcopy(layer)
            made.reorder_cache(cast(Any, rows))
        expanded.layers.append(made)
    return expanded
