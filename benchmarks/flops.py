"""Floating point operations of one training pass over a group, from a Qwen2.5-VL or Qwen3.5 config: plain arithmetic.

A matrix product of (m, k) and (k, n) counts 2 m k n. Norms, activations, rotations, softmax and the convolutions before
linear attention are left out. Causal attention counts the pairs of tokens that see each other, which is also what the
CPU kernels compute, block by block.

    part        forward once per                    backward, in forwards
    vision      image patch                         2 if trained; 1 (attention 2) if gradients only pass through
    language    token of the row(s)                 2; with LoRA 1 for frozen matrices, 2 for attention and adapters
    head        scored token                        2 (LoRA 1), and 1 for logits, which chunked heads recompute

Checkpointing adds one forward of every layer that has a backward.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isqrt
from typing import Any


@dataclass(frozen=True)
class Workload:
    """One group: a prompt of an image or video and text, and equally long completions.

    With observed tokens a completion has two turns, and an observation of its own image and text between them.
    """

    image_tokens: int = 1000
    text_tokens: int = 40
    completion_tokens: int = 200
    """Sampled tokens of a completion, of all turns."""
    num_generations: int = 8
    observed_image_tokens: int = 0
    observed_text_tokens: int = 0
    num_frames: int = 0
    """Frames of a video in place of the image, an even number. Two frames become one grid of tokens."""

    @property
    def num_grids(self) -> int:
        """Return the number of grids of tokens that the image tokens are in."""
        return self.num_frames // 2 or 1

    @property
    def prompt_tokens(self) -> int:
        return self.image_tokens + self.text_tokens

    @property
    def path_tokens(self) -> int:
        """Return the tokens after the prompt of one completion, sampled and observed."""
        return self.completion_tokens + self.observed_image_tokens + self.observed_text_tokens

    @property
    def unique_tokens(self) -> int:
        """Return the tokens of the prompt and of all completions."""
        return self.prompt_tokens + self.num_generations * self.path_tokens

    @property
    def token_ratio(self) -> float:
        """rho = k (P + R) / (P + k R): language tokens of one row per completion over those of the shared row."""
        return self.num_generations * (self.prompt_tokens + self.path_tokens) / self.unique_tokens

    @property
    def image_grid(self) -> tuple[int, int]:
        """Rows and columns of a grid of tokens, as square as their number allows."""
        return square_grid(self.image_tokens // self.num_grids)

    @property
    def observation(self) -> Workload:
        """Return the workload whose prompt is an observation."""
        shown = {"image_tokens": self.observed_image_tokens, "text_tokens": self.observed_text_tokens}
        return replace(self, num_frames=0, **shown)


def square_grid(tokens: int) -> tuple[int, int]:
    """Return rows and columns of an image of so many tokens."""
    rows = next(n for n in range(isqrt(tokens), 0, -1) if tokens % n == 0)
    return rows, tokens // rows


SWEEPS: dict[str, tuple[int, ...]] = {
    "num_generations": (1, 2, 4, 8, 16, 32, 64),
    "image_tokens": (100, 300, 1000, 2000),
    "completion_tokens": (50, 200, 800),
}
"""Values of one field of `Workload` in benchmarks/scaling.py; the other fields keep their defaults."""


@dataclass(frozen=True)
class Training:
    """What is trained and how; `lora_r` above 0 means adapters on a frozen model with a frozen vision tower."""

    lora_r: int = 0
    gradient_checkpointing: bool = False
    beta: float = 0.0


@dataclass(frozen=True)
class Passes:
    """How often each kind of product is computed in one training pass, in forwards."""

    linear: int
    attention: int
    adapter: int = 0


FULL, LORA, FROZEN, FORWARD_ONLY = Passes(3, 3), Passes(2, 3, 3), Passes(2, 3), Passes(1, 1)
"""FROZEN: nothing is trained, but gradients pass through."""


def plus_forward(passes: Passes) -> Passes:
    """Add one forward of everything, for recomputation."""
    return Passes(passes.linear + 1, passes.attention + 1, passes.adapter and passes.adapter + 1)


@dataclass(frozen=True)
class Flops:
    """FLOPs by part of the model."""

    vision: float
    language: float
    head: float

    @property
    def total(self) -> float:
        return self.vision + self.language + self.head

    def __add__(self, other: Flops) -> Flops:
        return Flops(self.vision + other.vision, self.language + other.language, self.head + other.head)


def causal_pairs(tokens: int) -> float:
    return tokens * (tokens + 1) / 2


def vision_flops(vision: Any, grid: tuple[int, int], passes: Passes = FORWARD_ONLY) -> float:
    """Compute the FLOPs of the vision tower and merger on one image of `grid` image tokens."""
    merge, hidden = vision.spatial_merge_size, vision.hidden_size
    height, width = (side * merge for side in grid)
    patches = height * width
    has_windows = hasattr(vision, "window_size")  # Qwen2.5's tower, whose MLP also has a gate
    pairs = window_attention_pairs(vision, height, width) if has_windows else vision.depth * patches**2

    merged = hidden * merge**2
    patch_embed = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2 * hidden
    block = 4 * hidden**2 + (3 if has_windows else 2) * hidden * vision.intermediate_size
    merger = (merged**2 + merged * vision.out_hidden_size) / merge**2
    linear = 2 * patches * (patch_embed + vision.depth * block + merger)
    return passes.linear * linear + passes.attention * 4 * pairs * hidden


def window_attention_pairs(vision: Any, height: int, width: int) -> int:
    """Count the pairs of patches that see each other in blocks with windows and in those of full attention."""
    window = vision.window_size // vision.patch_size
    window_pairs = _sum_of_squares(height, window) * _sum_of_squares(width, window)
    num_full = len(vision.fullatt_block_indexes)
    return num_full * (height * width) ** 2 + (vision.depth - num_full) * window_pairs


def _sum_of_squares(side: int, window: int) -> int:
    """Sum the squared lengths of the windows along one side of the image."""
    return side // window * window**2 + (side % window) ** 2


def language_flops(text: Any, tokens: float, pairs: float, passes: Passes = FORWARD_ONLY, lora_r: int = 0) -> float:
    """Compute the FLOPs of the decoder layers on `tokens` tokens, of which `pairs` pairs see each other."""

    def layers(number: int, matrices: Sequence[tuple[int, int]], attention: float) -> float:
        shapes = [*matrices, *[(text.hidden_size, text.intermediate_size)] * 3]
        linear = 2 * tokens * sum(m * n for m, n in shapes)
        adapter = 2 * tokens * sum(lora_r * (m + n) for m, n in shapes)
        return number * (passes.linear * linear + passes.adapter * adapter + passes.attention * attention)

    num_linear = sum(kind == "linear_attention" for kind in getattr(text, "layer_types", None) or ())
    full = layers(
        text.num_hidden_layers - num_linear, attention_matrices(text, num_linear > 0), 4 * pairs * text.hidden_size
    )
    if not num_linear:
        return full
    return full + layers(num_linear, linear_attention_matrices(text), tokens * delta_rule_flops(text))


def attention_matrices(text: Any, has_gate: bool) -> list[tuple[int, int]]:
    """Return the shapes of a layer's projections; Qwen3.5 computes a gate of the output with its queries."""
    hidden, kv = text.hidden_size, text.num_key_value_heads * (text.hidden_size // text.num_attention_heads)
    return [(hidden, 2 * hidden if has_gate else hidden), (hidden, kv), (hidden, kv), (hidden, hidden)]


def linear_attention_matrices(text: Any) -> list[tuple[int, int]]:
    """Return the shapes of a layer's projections: queries, keys and values; three kinds of gates; the output."""
    hidden, heads = text.hidden_size, text.linear_num_value_heads
    keys, values = text.linear_num_key_heads * text.linear_key_head_dim, heads * text.linear_value_head_dim
    return [(hidden, 2 * keys + values), (hidden, values), (hidden, heads), (hidden, heads), (values, hidden)]


def delta_rule_flops(text: Any, chunk: int = 64) -> float:
    """Compute the FLOPs per token of the gated delta rule, in chunks of tokens (arXiv:2412.06464, section 3.3).

    Within a chunk: products of keys with keys and queries, two triangular systems, and a sum of values. With the state:
    two reads and an update.
    """
    key, value = text.linear_key_head_dim, text.linear_value_head_dim
    return text.linear_num_value_heads * (chunk * (4 * key + (key + value) + 2 * value) + 3 * 2 * key * value)


def head_flops(text: Any, tokens: float, passes: int = 1) -> float:
    return passes * 2 * tokens * text.hidden_size * text.vocab_size


def dense_flops(config: Any, work: Workload, training: Training, vision_once: bool = False) -> Flops:
    """Compute the FLOPs of one row `[prompt][completion]` per completion.

    With `vision_once`, as in this project, the prompt's image is encoded once, and observed tokens are not scored.
    """
    count, row = work.num_generations, work.prompt_tokens + work.path_tokens
    scored = work.completion_tokens if vision_once else work.path_tokens
    rows = RowFlops(count * row, count * causal_pairs(row), count * scored)
    if vision_once:
        return _pass_flops(config, work, training, rows)
    passed_through = training.gradient_checkpointing
    return _pass_flops(
        config, work, training, rows, num_images=count, passed_through=passed_through, recomputes_last=True
    )


def shared_flops(config: Any, work: Workload, training: Training) -> Flops:
    """Compute the FLOPs of each token and each image once."""
    return _pass_flops(config, work, training, shared_row(work))


def unique_flops(config: Any, work: Workload, training: Training) -> Flops:
    """Compute the FLOPs that the shared pass needs, without recomputation: those of a model FLOPs utilization (MFU)."""
    return _pass_flops(config, work, replace(training, gradient_checkpointing=False), shared_row(work), head_again=0)


def floor_flops(config: Any, work: Workload, training: Training) -> Flops:
    """Compute the FLOPs of a row of P tokens and k rows of R tokens that do not see it, with logits computed once."""
    prefix, completion, count = work.prompt_tokens, work.completion_tokens, work.num_generations
    pairs = causal_pairs(prefix) + count * causal_pairs(completion)
    rows = RowFlops(work.unique_tokens, pairs, count * completion)
    return _pass_flops(config, work, training, rows, head_again=0)


def rollout_flops(config: Any, work: Workload, num_prefills: int) -> float:
    """Compute the FLOPs of a group's rollout, in which the prompt and its image are computed `num_prefills` times."""
    text, prefix, count = config.text_config, work.prompt_tokens, work.num_generations
    steps = work.completion_tokens - 1  # the prefill gives the first token
    prefill = tower_flops(config.vision_config, replace(work, observed_image_tokens=0), 1) + head_flops(text, 1)
    prefill += language_flops(text, prefix, causal_pairs(prefix))
    pairs = count * (steps * prefix + causal_pairs(steps))
    decode = language_flops(text, count * steps, pairs) + head_flops(text, count * steps)
    return num_prefills * prefill + decode


def flop_ceiling(config: Any, work: Workload, training: Training, vision_once: bool = False) -> float:
    """Compute the speed-up of the shared over the dense pass at equal FLOPs per second."""
    return dense_flops(config, work, training, vision_once).total / shared_flops(config, work, training).total


@dataclass(frozen=True)
class RowFlops:
    """Sizes of the language model's rows that determine its FLOPs."""

    tokens: int
    pairs: float
    """Pairs of tokens that see each other."""
    scored: int


def shared_row(work: Workload) -> RowFlops:
    """Return the sizes of the row in which each token is once, and completions see their prompt and themselves."""
    prefix, path, count = work.prompt_tokens, work.path_tokens, work.num_generations
    pairs = causal_pairs(prefix) + count * (path * prefix + causal_pairs(path))
    return RowFlops(work.unique_tokens, pairs, count * work.completion_tokens)


def _pass_flops(
    config: Any,
    work: Workload,
    training: Training,
    rows: RowFlops,
    num_images: int = 1,
    passed_through: bool = False,
    head_again: int = 1,
    recomputes_last: bool = False,
) -> Flops:
    """Compute the FLOPs of forward, backward and, if `beta` > 0, the reference's forward.

    `recomputes_last`: with LoRA, gradient checkpointing recomputes the last layer too, which this project keeps.
    `passed_through`: a frozen tower is recomputed and back-propagated too, and runs again for the reference.
    """
    text, lora_r = config.text_config, training.lora_r
    again = plus_forward if training.gradient_checkpointing else lambda passes: passes
    vision = (again(FROZEN) if passed_through else FORWARD_ONLY) if lora_r else again(FULL)
    flops = Flops(
        tower_flops(config.vision_config, work, num_images, vision),
        language_flops(text, rows.tokens, rows.pairs, again(LORA if lora_r else FULL), lora_r),
        head_flops(text, rows.scored, (2 if lora_r else 3) + head_again),
    )
    if lora_r and training.gradient_checkpointing and not recomputes_last:
        kept = language_flops(last_layer(text), rows.tokens, rows.pairs, Passes(1, 1, 1), lora_r)
        flops += Flops(0.0, -kept, 0.0)
    if training.beta > 0:
        runs_tower = passed_through or not lora_r
        flops += Flops(
            tower_flops(config.vision_config, work, num_images) if runs_tower else 0.0,
            language_flops(text, rows.tokens, rows.pairs),
            head_flops(text, rows.scored),
        )
    return flops


def tower_flops(vision: Any, work: Workload, num_images: int, passes: Passes = FORWARD_ONLY) -> float:
    """Compute the FLOPs of the prompt's image or video, encoded `num_images` times, and of each observation's image."""
    flops = num_images * work.num_grids * vision_flops(vision, work.image_grid, passes)
    if work.observed_image_tokens:
        flops += work.num_generations * vision_flops(vision, work.observation.image_grid, passes)
    return flops


def last_layer(text: Any) -> Any:
    """Return the config of a language model that has only the last layer."""
    one = copy.copy(text)
    one.layer_types = (getattr(text, "layer_types", None) or [])[-1:]
    one.num_hidden_layers = 1
    return one
