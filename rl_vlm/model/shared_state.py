"""Layers with a state in the group-shared row: convolutions over past tokens, and the gated delta rule.

A prompt's state after its last token is the initial state of each of its completions, and gradients flow back through
it. transformers' own layers compute their projections over the row. For the rest they call two functions, which are
replaced in transformers' modules. In a shared row the new ones call the stock functions as follows, elsewhere as usual:

    convolution        over all sequences at once, each completion after the last inputs of its prefix
    gated delta rule   over prefixes from an empty state, then over completions from the states of their prefixes

If transformers finds flash-linear-attention and causal-conv1d, the stock functions come from these packages.

The layout of the row is passed to the layers as `seq_idx`, transformers' name for the sequence of each token. So
gradient checkpointing recomputes with the same layout.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_vlm.errors import ModelError
from rl_vlm.model.shared_prefix import RowLayout, active_layout

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

CONVOLUTION, DELTA_RULE = "causal_conv1d_fn", "torch_chunk_gated_delta_rule"
STATE_LAYERS = {"conv": (CONVOLUTION,), "linear_attention": (CONVOLUTION, DELTA_RULE)}
"""Functions in transformers' model files that layers call with their past, by type of layer."""
MAX_CHUNK = 64
"""Largest chunk of the gated delta rule, in tokens."""


class SharedRow:
    """A shared row for the layers of one forward."""

    def __init__(self, layout: RowLayout) -> None:
        self.layout = layout
        self.num_calls = 0
        """Calls of the replaced functions."""
        self.packings: dict[int, Packing] = {}

    def packing(self, num_past: int) -> Packing:
        """Return the packing for layers that see `num_past` inputs before a token. It is built once for all of them."""
        if num_past not in self.packings:
            self.packings[num_past] = Packing.of(self.layout, num_past)
        return self.packings[num_past]


@dataclass(frozen=True)
class Packing:
    """All sequences one after the other, prefixes first. Each sequence follows the last inputs before it.

    Example: the row of `RowLayout`, with two past inputs. A dot means no input, as before a prefix:

        source   . . 0 1 2  . . 6 7  1 2 3 4  1 2 5  6 7 8
    """

    source: Int[Tensor, " packed"]
    """Row positions, 0 where there is no input."""
    is_input: Bool[Tensor, " packed"]
    place: Int[Tensor, " row"]
    """Index in `source` of each token of the row."""
    prefix_bounds: Int[Tensor, " prefix_bounds"]
    """Starts of prefixes in `source`, and their end (`cu_seqlens` of variable-length kernels)."""
    completion_bounds: Int[Tensor, " completion_bounds"]
    """The same for completions, counted from the end of the prefixes."""

    @staticmethod
    def of(layout: RowLayout, num_past: int) -> Packing:
        """Pack a row. Nothing is transferred to the host."""
        num_prefixes, num_completions = len(layout.prefix_index), len(layout.owner_N)
        row, lags = (torch.arange(n, device=layout.owner_N.device) for n in (layout.shape[-1], num_past))
        lengths = torch.cat([layout.prefix_valid.sum(dim=1), layout.completion_valid.sum(dim=1)])
        bounds = F.pad((lengths + num_past).cumsum(0), (1, 0))
        sequence = torch.where(layout.row_part == 0, layout.row_owner, num_prefixes + layout.row_part - 1)
        place = sequence.argsort(stable=True).argsort() + num_past * (sequence + 1)
        place_of_past = bounds[num_prefixes:-1, None] + lags
        past, is_past = last_inputs(layout, num_past)

        source = row.new_zeros(len(row) + num_past * (num_prefixes + num_completions))
        is_input = torch.zeros_like(source, dtype=torch.bool)
        source[place], is_input[place] = row, torch.ones_like(row, dtype=torch.bool)
        source[place_of_past], is_input[place_of_past] = past[layout.owner_N], is_past[layout.owner_N]
        return Packing(
            source, is_input, place, bounds[: num_prefixes + 1], bounds[num_prefixes:] - bounds[num_prefixes]
        )


def last_inputs(layout: RowLayout, number: int) -> tuple[Int[Tensor, "prompts number"], Bool[Tensor, "prompts number"]]:
    """Return the row positions of the last `number` tokens of each prefix, and a mask: False before its start."""
    places = layout.prefix_valid.sum(dim=1, keepdim=True) + torch.arange(-number, 0, device=layout.owner_N.device)
    return layout.prefix_index[:, :1] + places.clamp(min=0), places >= 0


def enable_shared_states(model: PreTrainedModel) -> None:
    """Route the language model's state layers, if it has any, through this module in shared rows."""
    if state_layers(model.config):
        decoder: Any = model.get_decoder()
        route(type(decoder).__module__)
        decoder.register_forward_pre_hook(pass_row, with_kwargs=True)
        decoder.register_forward_hook(check_calls, with_kwargs=True)


def state_layers(config: PreTrainedConfig) -> set[str]:
    """Return the types of layers with a state in the language model, from the model's config."""
    return STATE_LAYERS.keys() & set(getattr(config.get_text_config(), "layer_types", None) or ())


def cannot_share_states(model: PreTrainedModel) -> bool:
    """Return whether the installed transformers computes a state layer of the model with unknown functions."""
    module = sys.modules[type(model.get_decoder()).__module__]
    return any(not hasattr(module, name) for layer in state_layers(model.config) for name in STATE_LAYERS[layer])


@cache
def route(module_name: str) -> None:
    """Replace the functions in one of transformers' modules, for all its models in this process."""
    module = sys.modules[module_name]
    for name, over_row in ((CONVOLUTION, convolve_row), (DELTA_RULE, delta_rule_of_row)):
        if hasattr(module, name):
            setattr(module, name, routed(getattr(module, name), over_row))


def routed(stock: Callable[..., Any], over_row: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `over_row` in a shared row, and otherwise `stock`. It is never compiled."""

    @torch.compiler.disable
    @wraps(stock)
    def function(*args: Any, **kwargs: Any) -> Any:
        if not isinstance(kwargs.get("seq_idx"), SharedRow):
            return stock(*args, **kwargs)
        row = kwargs.pop("seq_idx")
        row.num_calls += 1
        return over_row(stock, row, *args, **kwargs)

    return function


def pass_row(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Add the active shared row to the language model's arguments, which it passes to its layers."""
    layout = active_layout.get()
    return args, kwargs | {"seq_idx": SharedRow(layout)} if isinstance(layout, RowLayout) else kwargs


def check_calls(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Raise ModelError if a layer has not received the shared row: its state would leak along the row."""
    row = kwargs.get("seq_idx")
    if isinstance(row, SharedRow):
        expected = sum(len(STATE_LAYERS.get(kind, ())) for kind in module.config.layer_types)
        if row.num_calls != expected:
            raise ModelError(
                f"the installed transformers computes the states of {module.config.model_type} in a new way: "
                f"{row.num_calls} of {expected} calls knew the shared row. Set memory.prefix_sharing: dense"
            )


def convolve_row(
    stock: Callable[..., Tensor],
    row: SharedRow,
    inputs: Float[Tensor, "1 channels row"],
    weight: Float[Tensor, "channels width"],
    *args: Any,
    **kwargs: Any,
) -> Float[Tensor, "1 channels row"]:
    """Convolve all sequences at once, each completion after the last inputs of its prefix."""
    packing = row.packing(weight.shape[-1] - 1)
    packed = inputs[0].T[packing.source] * packing.is_input[:, None]
    return stock(packed.T[None], weight, *args, **kwargs)[0].T[packing.place].T[None]


def delta_rule_of_row(
    stock: Callable[..., tuple[Tensor, Tensor]],
    row: SharedRow,
    query: Float[Tensor, "1 row key_heads dim"],
    key: Float[Tensor, "1 row key_heads dim"],
    value: Float[Tensor, "1 row heads value_dim"],
    g: Float[Tensor, "1 row heads"],
    beta: Float[Tensor, "1 row heads"],
    **kwargs: Any,
) -> tuple[Float[Tensor, "1 row heads value_dim"], None]:
    """Apply the rule to each prefix, and to each completion from the final state of its prefix."""
    inputs = [x[0] for x in (query, key, value, g, beta)]
    parts_of = packed_parts if has_variable_lengths() else padded_parts
    prefixes, completions, place = parts_of(row, inputs)
    outputs, states = stock(*prefixes.tensors, **kwargs | prefixes.options | {"output_final_state": True})
    found = [outputs]
    if row.layout.completion_index.numel():
        states = states[row.layout.owner_N]
        outputs, _ = stock(*completions.tensors, **kwargs | completions.options | {"initial_state": states})
        found.append(outputs)
    return torch.cat([output.flatten(0, 1) for output in found])[place][None], None


class Segments(NamedTuple):
    """Prefixes or completions as arguments of the gated delta rule."""

    tensors: Sequence[Tensor]
    """Query, key and value."""
    options: dict[str, Any]


def padded_parts(row: SharedRow, inputs: Sequence[Tensor]) -> tuple[Segments, Segments, Int[Tensor, " row"]]:
    """Pad sequences. Return prefixes, completions, and the index of each row token in the outputs of both."""
    layout = row.layout

    def part(index: Tensor, valid: Tensor) -> Segments:
        *tensors, g, beta = (x[index] for x in inputs)
        # Without decay and update, padding does not change the state.
        gates = {"g": g * valid[..., None], "beta": beta * valid[..., None]}
        return Segments(tensors, gates | {"chunk_size": chunk_size(index.shape[1])})

    prefixes = part(layout.prefix_index, layout.prefix_valid)
    return prefixes, part(layout.completion_index, layout.completion_valid), layout.output_index


def packed_parts(row: SharedRow, inputs: Sequence[Tensor]) -> tuple[Segments, Segments, Int[Tensor, " row"]]:
    """Concatenate sequences without padding. Return the same as `padded_parts`."""
    packing, end = row.packing(0), row.layout.num_prefix_tokens
    packed = [x[packing.source][None] for x in inputs]

    def part(tokens: slice, bounds: Tensor) -> Segments:
        *tensors, g, beta = (x[:, tokens] for x in packed)
        return Segments(tensors, {"g": g, "beta": beta, "cu_seqlens": bounds})

    prefixes = part(slice(0, end), packing.prefix_bounds)
    return prefixes, part(slice(end, None), packing.completion_bounds), packing.place


@cache
def has_variable_lengths() -> bool:
    """Return whether transformers computes the rule with flash-linear-attention, which takes any sequence lengths."""
    try:
        return hasattr(import_module("fla.ops.gated_delta_rule"), "chunk_gated_delta_rule")
    except Exception:  # transformers then uses its own torch code
        return False


def chunk_size(tokens: int) -> int:
    """Return the smallest chunk size that splits `tokens` into as few chunks as `MAX_CHUNK` does.

    transformers' torch code pads to whole chunks, by default of 64 tokens. For short completions, padding would be most
    of the work.
    """
    tokens = max(1, tokens)
    return -(-tokens // -(-tokens // MAX_CHUNK))
