"""Kernels that a computation starts on a GPU, counted on tensors without memory: FLOPs, bytes, and waits of the host.

A plain operator is a kernel of its own. It reads its inputs and writes its outputs once. Views start none.

Compiled graphs are counted by a rule, in place of Inductor's schedule: a matrix product reads and writes its operands,
and each maximal group of other operators between products reads its inputs and writes its outputs once. This is a lower
bound. Inductor splits groups whose sums go over different dimensions.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal
from unittest import mock

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, shape_wrapper

from benchmarks.counting import FORMULAS

aten = torch.ops.aten
Kind = Literal["product", "attention", "weights", "elementwise"]
"""`weights` are kernels whose tensors all have the shape of a weight: casts, and sums of gradients."""
ATTENTION = {
    aten._scaled_dot_product_flash_attention_for_cpu,
    aten._scaled_dot_product_flash_attention_for_cpu_backward,
}
PRODUCTS = {aten.mm, aten.addmm, aten.addmm_, aten.bmm, aten.baddbmm, aten.convolution, aten.convolution_backward}
FLOPS = {**flop_registry, **{packet: shape_wrapper(formula) for packet, formula in FORMULAS.items()}}
NO_KERNEL = {
    aten._unsafe_view, aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided,
    aten.lift_fresh, aten._local_scalar_dense,
}  # fmt: skip
INDEXING = {aten.gather, aten.index, aten.index_select, aten.embedding}
"""Operators that read as many values as they return."""
INDEXED = {aten.scatter_, aten.index_fill_, aten.index_put_}
"""Operators that write as many values as their last tensor has."""
WRITES_ONLY = {aten.copy_, aten.fill_, aten.zero_}
"""In-place operators that do not read the tensor that they change."""
READS: set[Any] = {
    Tensor.tolist, Tensor.item, Tensor.__int__, Tensor.__index__, Tensor.__float__, Tensor.__bool__, Tensor.nonzero,
    torch.nonzero, torch.equal,
}  # fmt: skip
"""Functions with which the host reads a tensor."""


@dataclass(frozen=True)
class Kernel:
    """One kernel."""

    kind: Kind
    flops: float
    bytes: float


@dataclass
class Work:
    """The kernels of a computation, and how often the host reads a tensor. If it is on a GPU, the host waits for it."""

    kernels: list[Kernel] = field(default_factory=list)
    reads: int = 0

    def of(self, *kinds: Kind) -> list[Kernel]:
        """Return the kernels of these kinds."""
        return [kernel for kernel in self.kernels if kernel.kind in kinds]


class PlainKernels(TorchDispatchMode):
    """Counts the operators that run in it. Enter it within a context of fake tensors."""

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.shapes = shapes_of(weights)
        self.work = Work()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = getattr(func, "_overloadpacket", None)
        if not func.is_view and packet not in NO_KERNEL and isinstance(next(iter(tree_leaves(out)), None), Tensor):
            self.work.kernels.append(plain_kernel(packet, args, kwargs, out, self.shapes))
        return out

    def fused(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function whose operators are one kernel. If it returns nothing, it changes its first argument."""

        def run(*args: Any) -> Any:
            before, self.work.kernels = self.work.kernels, []
            out = function(*args)
            moved = sum(map(num_bytes, [*tensors_in(args), *(tensors_in(out) or [args[0]])]))
            self.work.kernels = [*before, Kernel("elementwise", 0.0, moved)]
            return out

        return run


class HostReads(TorchFunctionMode):
    """Counts calls of functions with which the host reads a tensor."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func is Tensor.__getitem__ and any(
            getattr(i, "dtype", None) == torch.bool for i in tree_leaves(args[1])
        )
        self.work.reads += func in READS or by_mask
        return func(*args, **(kwargs or {}))


@contextmanager
def host_reads(work: Work) -> Iterator[None]:
    """Count the calls in this context by which the host reads a tensor. A list is one read."""

    def tolist(tensor: FakeTensor) -> Any:
        reads = work.reads
        values = read(tensor)
        work.reads = reads + 1
        return values

    read = FakeTensor.tolist
    with mock.patch.object(FakeTensor, "tolist", tolist), HostReads(work):
        yield


def plain_kernel(packet: Any, args: Any, kwargs: Any, out: Any, shapes: set[torch.Size]) -> Kernel:
    """Count an operator by itself."""
    read, made = tensors_in((args, kwargs)), tensors_in(out)
    if packet in INDEXING:
        moved = 2 * num_bytes(made[0])
    elif packet in INDEXED:
        moved = 2 * num_bytes(read[-1])
    else:
        moved = sum(map(num_bytes, read[1:] if packet in WRITES_ONLY else read)) + sum(map(num_bytes, made))
    flops = FLOPS[packet](*args, **kwargs, out_val=out) if packet in FLOPS else 0.0
    return Kernel(kind_of(packet, [*read, *made], shapes), flops, moved)


def kind_of(packet: Any, tensors: Sequence[Tensor], shapes: set[torch.Size]) -> Kind:
    """Return the kind of an operator, or of a group of them, that uses these tensors. `shapes` are those of weights."""
    if packet in PRODUCTS:
        return "product"
    if packet in ATTENTION:
        return "attention"
    sizes = {x.shape for x in tensors if x.numel() > 1}
    return "weights" if sizes and sizes <= shapes else "elementwise"


def shapes_of(weights: Iterable[Tensor]) -> set[torch.Size]:
    """Return the shapes of weights and of their transposes."""
    return {shape for weight in weights for shape in (weight.shape, weight.shape[::-1])}


def tensors_in(values: Any) -> list[Tensor]:
    """Return the different tensors in nested containers."""
    return list({id(x): x for x in tree_leaves(values) if isinstance(x, Tensor)}.values())


def num_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's different values. Expanded dimensions are in memory once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 0)
    return prod(map(int, sizes)) * tensor.element_size()


class CountedGraphs:
    """A backend of `torch.compile` that counts the kernels of graphs each time they run."""

    def __init__(self, weights: Iterable[Tensor] = ()) -> None:
        self.shapes = shapes_of(weights)
        self.work = Work()
        self.backend: Any = aot_autograd(
            fw_compiler=self.compile,
            decompositions=select_decomp_table(),
            partition_fn=min_cut_rematerialization_partition,
        )

    def compile(self, graph: fx.GraphModule, inputs: Any) -> Any:
        """Return a function that runs the graph operator by operator."""

        def run(*values: Any) -> Any:
            recorder = Recorder(graph)
            out = recorder.run(*values)
            self.work.kernels += grouped_kernels(graph, recorder.values, self.shapes)
            return out

        return make_boxed_func(run)


class Recorder(fx.Interpreter):
    """Runs a graph and keeps the value of each node."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph, garbage_collect_values=False)
        self.values: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.values[n] = super().run_node(n)
        return self.values[n]


def grouped_kernels(graph: fx.GraphModule, values: dict[fx.Node, Any], shapes: set[torch.Size]) -> list[Kernel]:
    """Count the products of a graph, whose nodes have these values, and the groups of other operators between them."""
    origin: dict[fx.Node, fx.Node] = {}  # the node whose values a view shows
    depth: dict[fx.Node, int] = {}  # products on the longest way to a node's value
    group_of: dict[fx.Node, list[fx.Node]] = {}
    users: dict[fx.Node, list[fx.Node]] = {}
    products = []
    nodes: Any = graph.graph.nodes
    for node in nodes:
        sources = [origin.get(x) or x for x in node.all_input_nodes]
        if is_view(node):
            origin[node] = sources[0]
            continue
        for source in sources:
            users.setdefault(source, []).append(node)
        if node.op != "call_function" or not tensors_in(values[node]):
            continue
        depth[node] = max((depth.get(x, 0) for x in sources), default=0)
        if packet_of(node) in PRODUCTS:
            products.append(node)
            depth[node] += 1
        else:
            join(node, [group_of[x] for x in sources if x in group_of and depth[x] == depth[node]], group_of)

    def group_kernel(members: list[fx.Node]) -> Kernel:
        inputs = {origin.get(x, x): values[x] for node in members for x in node.all_input_nodes}
        read = [x for node, value in inputs.items() if node not in members for x in tensors_in(value)]
        written = [node for node in members if any(user not in members for user in users.get(node, []))]
        tensors = [*read, *(x for node in written for x in tensors_in(values[node]))]
        return Kernel(kind_of(None, tensors, shapes), 0.0, sum(map(num_bytes, tensors)))

    groups = {id(members): members for members in group_of.values()}.values()
    return [*(product_kernel(node, values, shapes) for node in products), *map(group_kernel, groups)]


def join(node: fx.Node, groups: list[list[fx.Node]], group_of: dict[fx.Node, list[fx.Node]]) -> None:
    """Join a node and groups to one group."""
    members = list(dict.fromkeys([*(x for group in groups for x in group), node]))
    group_of.update(dict.fromkeys(members, members))


def product_kernel(node: fx.Node, values: dict[fx.Node, Any], shapes: set[torch.Size]) -> Kernel:
    """Count a matrix product."""
    args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
    return plain_kernel(packet_of(node), args, kwargs, values[node], shapes)


def packet_of(node: fx.Node) -> Any:
    return getattr(node.target, "_overloadpacket", None)


def is_view(node: fx.Node) -> bool:
    """Return whether a node computes nothing."""
    overload: Any = node.target
    return (
        node.target is operator.getitem
        or packet_of(node) is aten._unsafe_view
        or (packet_of(node) is not None and overload.is_view)
    )
