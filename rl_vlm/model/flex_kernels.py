"""FlexAttention's kernels: compiled once for all rows, with tiles that fit the shared memory of the card.

PyTorch's own tiles are too large for heads of 256 values on cards with 99 KB per block, such as RTX 3090 and 4090, A10,
L4 and L40S: the backward needs 137,216 bytes there. On an A100 they fit, but the kernel spills most values to memory.
The forward in float32 does so too, for heads of 128. `benchmarks/compiled_kernels.py` compiles them for six cards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.nn.attention.flex_attention import flex_attention

from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import ConfigError, ModelError, shorten

logger = logging.getLogger(__name__)

SMALL_HEAD = 64
"""Values of a head up to which float32 has PyTorch's own tiles. For more, most values of the forward are spilled."""
LARGEST_PLAIN_HEAD = 192
"""Values of a head up to which PyTorch's own tiles fit every card."""
LARGE_HEAD = 256
SMALLEST = 101_376
"""Bytes of shared memory per block of an RTX 3090 and an RTX 4090. For less, no kernels were compiled."""
ROOMY = 160 * 2**10
"""Bytes of shared memory per block from which PyTorch's own tiles fit: an A100 has 166,912, an H100 232,448."""
NO_KERNEL = "No valid triton configs"
"""Text of PyTorch's error if no tiles of a kernel fit the card."""
ALWAYS: dict[str, Any] = {"FORCE_USE_FLEX_ATTENTION": True}
"""Without this option, rows below 128 tokens would take a kernel for decoding. That kernel has no tile for more than
128 query tokens times query heads per key head, and its compilation would fail."""


def kernel_options(head_dim: int, shared_memory: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return FlexAttention's options for heads of `head_dim` values, on a card with this many bytes of shared memory
    per block.

    Options that start with `fwd_` belong to the forward kernel, and with `bwd_` to the backward kernel.
    """
    if dtype == torch.float32:
        return ALWAYS | tiles("fwd", 32) if SMALL_HEAD < head_dim <= LARGEST_PLAIN_HEAD else ALWAYS
    if head_dim <= LARGEST_PLAIN_HEAD:
        return ALWAYS
    if head_dim > LARGE_HEAD:
        return ALWAYS | {"fwd_num_stages": 1} | tiles("fwd", 32)
    if shared_memory < ROOMY:
        return ALWAYS | {"fwd_num_stages": 1, "bwd_num_stages": 1} | tiles("bwd", 32)
    return ALWAYS | {"bwd_num_warps": 8}


def tiles(kernel: str, size: int) -> dict[str, int]:
    """Return the options for square tiles of `size` tokens. The backward has two pairs: for keys and for queries."""
    numbers = ("1", "2") if kernel == "bwd" else ("",)
    return {f"{kernel}_BLOCK_{side}{number}": size for number in numbers for side in "MN"}


def has_kernels(device: torch.device) -> bool:
    """Return whether FlexAttention is compiled for a device. Elsewhere it is slow, and has no gradients."""
    return device.type == "cuda"


@cache
def shared_memory_of(device: torch.device) -> int:
    """Return the bytes of shared memory that a block may have on a CUDA device. On others they do not matter."""
    if device.type != "cuda":
        return ROOMY
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def with_fitting_attention(config: RunConfig, device: torch.device) -> RunConfig:
    """Return the config with `memory.shared_attention: sdpa` if FlexAttention's kernels do not fit the device.

    Raises ConfigError if `flex` is set there.
    """
    has_shared_rows = config.memory.prefix_sharing != "dense" and config.model.attn_implementation == "sdpa"
    if not has_shared_rows or config.memory.shared_attention == "sdpa" or shared_memory_of(device) >= SMALLEST:
        return config
    reason = f"{torch.cuda.get_device_name(device)} has too little shared memory for FlexAttention's kernels"
    if config.memory.shared_attention == "flex":
        raise ConfigError(f"memory.shared_attention: flex cannot be used: {reason}. Set auto or sdpa")
    logger.warning("memory.shared_attention is sdpa: %s", reason)
    return config.model_copy(update={"memory": config.memory.model_copy(update={"shared_attention": "sdpa"})})


@cache
def compiled_flex_attention() -> Callable[..., Any]:
    """Compile FlexAttention once for all lengths. Otherwise each new length would take some 15 s.

    With `fullgraph`, too many recompilations raise an error. Otherwise attention would silently become unfused.
    """
    return torch.compile(flex_attention, dynamic=True, fullgraph=True)


@contextmanager
def naming_compiler_errors(head_dims: Callable[[], Sequence[int]]) -> Iterator[None]:
    """Raise ModelError if a kernel cannot be compiled in the block. A backward kernel is compiled in a backward.

    The message names the card, the values of attention heads, and the settings that need no such kernel. Other errors
    are raised as they are, as is running out of memory while a kernel is compiled.
    """
    try:
        yield
    except (RuntimeError, FailOnRecompileLimitHit) as error:
        if isinstance(inner := getattr(error, "inner_exception", None), torch.OutOfMemoryError):
            raise inner from error
        is_of_compiler = isinstance(error, (TorchDynamoException, FailOnRecompileLimitHit)) or NO_KERNEL in str(error)
        if not is_of_compiler or "out of memory" in str(error):
            raise
        heads = " and ".join(map(str, head_dims()))
        raise ModelError(
            f"A kernel of the language model cannot be compiled on {torch.cuda.get_device_name()}: {shorten(error)}. "
            f"Set memory.shared_attention: sdpa, in place of FlexAttention for heads of {heads} values. If that does "
            "not help, set model.fused: off"
        ) from error


def head_dims_of(model: nn.Module) -> list[int]:
    """Return the numbers of values of a model's attention heads. Layers of Gemma 4 have two sizes."""
    sizes: list[Any] = [getattr(module, "head_dim", None) for module in model.modules()]
    return sorted({size for size in sizes if isinstance(size, int)})
