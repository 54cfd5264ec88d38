"""Kernels, bytes and FLOPs of small computations, counted by hand."""

import pytest
import torch
from torch import Tensor

from benchmarks.kernel_counts import CountedGraphs, Kernel, PlainKernels, Work, host_reads
from rl_vlm.plan.tracing.fake import fake_tensors

FLOAT = 4
"""Bytes of a float32."""


def test_a_product_reads_and_writes_its_operands():
    with fake_tensors():
        left, right = torch.empty(2, 3), torch.empty(4, 3)
        with PlainKernels() as counted:
            torch.mm(left, right.T)
    assert counted.work.kernels == [Kernel("product", 2 * 2 * 3 * 4, FLOAT * (6 + 12 + 8))]


def test_plain_operators_are_kernels_and_views_are_not():
    with fake_tensors():
        x, row = torch.empty(5, 6), torch.empty(6)
        with PlainKernels() as counted:
            y = x.view(6, 5).T + row.expand(5, 6)
            y.mul_(2)
            y.copy_(x)
            y.index_select(0, torch.arange(2))
    moved = [kernel.bytes / FLOAT for kernel in counted.work.kernels if kernel.bytes > 16]
    assert moved == [30 + 6 + 30, 30 + 30, 30 + 30, 2 * 12]
    assert {kernel.kind for kernel in counted.work.kernels} == {"elementwise"}


def test_kernels_of_weights_alone():
    with fake_tensors():
        weight, x = torch.empty(3, 7), torch.empty(5, 7)
        with PlainKernels([weight]) as counted:
            weight.bfloat16()
            weight.T.contiguous()
            x.bfloat16()
    assert [kernel.kind for kernel in counted.work.kernels] == ["weights", "weights", "elementwise"]


def test_attention_is_a_kind_of_its_own():
    with fake_tensors():
        query = torch.empty(1, 2, 5, 8)
        with PlainKernels() as counted:
            torch.nn.functional.scaled_dot_product_attention(query, query, query)
    (kernel,) = counted.work.of("attention")
    assert kernel.flops == 2 * 2 * 5 * 5 * (8 + 8)


def test_operators_of_a_fused_function_are_one_kernel():
    def change_(x: Tensor, y: Tensor) -> None:
        x.add_(y).mul_(2)

    with fake_tensors():
        x, y = torch.empty(4, 5), torch.empty(5)
        with PlainKernels() as counted:
            counted.fused(torch.sum)(x)
            counted.fused(change_)(x, y)
    assert [kernel.bytes / FLOAT for kernel in counted.work.kernels] == [20 + 1, 20 + 5 + 20]


def test_reads_of_the_host():
    work = Work()
    values = torch.arange(4)
    with fake_tensors(), host_reads(work):
        x = values + 0
        assert x.tolist() == [0, 1, 2, 3]
        assert not bool(x[0] > 0)
        x[x > 1].add(1)
    assert work.reads == 3


@pytest.fixture
def graphs() -> CountedGraphs:
    torch._dynamo.reset()
    return CountedGraphs()


def test_operators_between_products_are_one_kernel(graphs: CountedGraphs):
    def function(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
        low = (x.sin() * 2) @ weight
        return (low + residual).softmax(-1)

    torch.compile(function, backend=graphs.backend)(torch.ones(5, 6), torch.ones(6, 7), torch.ones(5, 7))
    product, *others = graphs.work.kernels
    assert product == Kernel("product", 2 * 5 * 6 * 7, FLOAT * (30 + 42 + 35))
    assert others == [Kernel("elementwise", 0, FLOAT * (30 + 30)), Kernel("elementwise", 0, FLOAT * (35 + 35 + 35))]


def test_a_group_does_not_reach_around_a_product(graphs: CountedGraphs):
    """The sum needs the product, which needs the first operator: a kernel of both could not run."""

    def function(x: Tensor, weight: Tensor) -> Tensor:
        y = x.sin()
        return y @ weight + y

    torch.compile(function, backend=graphs.backend)(torch.ones(5, 6), torch.ones(6, 6))
    assert [kernel.bytes / FLOAT for kernel in graphs.work.of("elementwise")] == [30 + 30, 30 + 30 + 30]


def test_graphs_of_the_backward_count_when_they_run(graphs: CountedGraphs):
    x, weight = torch.ones(5, 6), torch.ones(6, 7, requires_grad=True)
    compiled = torch.compile(lambda x, weight: (x @ weight).sin(), backend=graphs.backend)
    for _ in range(2):
        compiled(x, weight).sum().backward()
    assert len(graphs.work.of("product")) == 4
    assert sum(kernel.flops for kernel in graphs.work.kernels) == 4 * 2 * 5 * 6 * 7
