"""FLOPs as torch counts them while a pass runs, to check the arithmetic of `flops.py`."""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode


def counted_flops(run: Callable[[], Any]) -> float:
    """Count the FLOPs of matrix products, convolutions and attention in `run` by torch's own formulas.

    torch has no formula for the attention kernel of CPUs, and none for a product that is added in place. Here causal
    attention counts the pairs that see each other, and masked attention counts all pairs. A backward counts twice its
    forward, without the kernel's recomputation of scores. torch counts gradients of grouped convolutions as if
    these had one group.
    """
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        run()
    return float(counter.get_total_flops())


def _added_product(total: Any, left: Any, right: Any, **_: Any) -> int:
    return 2 * prod(left) * right[1]


def _attention(query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, **_: Any) -> float:
    batch, heads, queries, dim = query
    keys = key[2]
    pairs = queries * (queries + 1) / 2 if is_causal else queries * keys
    return 2 * batch * heads * pairs * (dim + value[3])


def _attention_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, logsumexp: Any, dropout_p: float, is_causal: bool, **_: Any
) -> float:
    return 2 * _attention(query, key, value, dropout_p, is_causal)


def _convolution_backward(grad: Any, inputs: Any, weight: Any, *_: Any, out_shape: Any = None, **__: Any) -> float:
    """Count a forward for each of the gradients of inputs and weight that is computed."""
    num_gradients = sum(shape is not None for shape in out_shape[:2])
    return num_gradients * 2 * prod(grad) * prod(weight[1:])


FORMULAS: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.aten.convolution_backward: _convolution_backward,
    torch.ops.aten.addmm_: _added_product,
}
"""Formulas for operators, as functions of the arguments' shapes."""
