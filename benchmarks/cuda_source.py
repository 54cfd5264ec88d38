"""The Triton source that CUDA would run for the attention of a packed row, made on a machine without a card.

`block_attention` is traced on the CPU, forward and backward. The fake tensors of both graphs are moved to CUDA, and
Inductor lowers the graphs for a card. Tensors on CUDA cannot be traced: autograd asks CUDA's driver for a stream.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.aot_autograd import aot_module_simplified
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.graph import GraphLowering
from torch._inductor.virtualized import V
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule
from torch.fx.node import map_aggregate
from torch.nn.attention import flex_attention as flex

from benchmarks.absent_card import DEVICE, Card, standing_in
from rl_vlm.model import shared_prefix

MakeGraph = Callable[[GraphModule, str, bool], Callable[..., Any]]
"""Takes a graph, its source for CUDA, and whether it is the backward. Returns the function that is called instead."""


@contextmanager
def compiled_for(card: Card, make_graph: MakeGraph) -> Iterator[None]:
    """Let `block_attention` on a CPU compile FlexAttention for a card, and run the results of `make_graph`."""

    def compiler(is_backward: bool) -> Any:
        def compile_graph(gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
            return make_boxed_func(make_graph(gm, lower(gm, example_inputs, is_backward, card), is_backward))

        return compile_graph

    def backend(graph: GraphModule, inputs: list[Any]) -> Any:
        return aot_module_simplified(
            graph, inputs, compiler(False), compiler(True), decompositions=select_decomp_table()
        )

    def options_on_cuda(*args: Any, **kwargs: Any) -> Any:
        return options_on_cpu(*args, **kwargs) | {"OUTPUT_LOGSUMEXP": torch.is_grad_enabled()}

    options_on_cpu = flex._apply_kernel_options
    compiled = torch.compile(flex.flex_attention, dynamic=True, fullgraph=True, backend=backend)
    with (
        mock.patch.object(shared_prefix, "flex_attention", compiled),
        mock.patch.object(shared_prefix, "shared_memory_of", lambda device: card.shared_memory),
        mock.patch.object(flex, "_apply_kernel_options", options_on_cuda),
        mock.patch.object(flex, "_validate_device", lambda *tensors: None),  # refuses gradients on a CPU
    ):
        yield


def lower(graph: GraphModule, inputs: Sequence[Any], is_backward: bool, card: Card) -> str:
    """Return the source of a graph for a card: a Python module with Triton kernels and a function `call`."""
    graph = on_cuda(copy.deepcopy(graph))
    moved = [to_cuda(value) for value in inputs]
    mode = next(value.fake_mode for value in moved if isinstance(value, FakeTensor))
    with standing_in(card), V.set_fake_mode(mode), DebugContext():
        lowering = GraphLowering(graph, moved, shape_env=mode.shape_env, is_backward=is_backward)
        with V.set_graph_handler(lowering):
            lowering.run(*moved)
            return lowering.codegen()[0].value


def on_cuda(graph: GraphModule) -> GraphModule:
    """Move the tensors and devices of a graph, and of the graphs in it, to CUDA."""
    for module in graph.modules():
        if isinstance(module, GraphModule):
            for node in module.graph.nodes:
                node.args, node.kwargs = map_aggregate((node.args, node.kwargs), to_cuda)
                node.meta = {"val": map_aggregate(node.meta.get("val"), to_cuda)}
            module.recompile()
    return graph


def to_cuda(value: Any) -> Any:
    """Move a fake tensor or a device from the CPU to CUDA. Return other values as they are."""
    if isinstance(value, torch.device):
        return DEVICE
    if not isinstance(value, FakeTensor):
        return value
    with value.fake_mode:
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=DEVICE)


def kernels_of(source: str) -> dict[str, str]:
    """Return the sources of the Triton kernels of a lowered graph, by name."""
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return {
        ast.literal_eval(call.args[0]): ast.literal_eval(call.args[1])
        for call in calls
        if isinstance(call.func, ast.Attribute) and call.func.attr == "triton"
    }
