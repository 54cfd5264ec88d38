"""The table of FlexAttention's kernels, without compiling any."""

import pytest

from benchmarks.absent_card import CARDS
from benchmarks.compiled_kernels import Cell, Kernel, cells, kept, table
from benchmarks.cuda_source import kernels_of
from benchmarks.report import PAGE

SMALL = Kernel(54_272, 255, 224, warps=4, stages=3, first_shared_memory=54_272)


def test_a_kernel_that_does_not_fit_is_marked():
    again = Kernel(114_688, 255, 0, warps=4, stages=1, first_shared_memory=137_216)
    lines = table({Cell("3090", 256, has_own_tiles=False): {"forward": SMALL, "backward": again}}).splitlines()
    assert lines[2] == (
        "| RTX 3090 | 256, bfloat16 | PyTorch's | 54,272; 255; 224 "
        "| **137,216 and then 114,688: does not fit**; 255; 0 |"
    )


def test_cells_are_measured_twice_if_the_options_choose_tiles():
    assert [cell for cell in cells("h100") if cell.head_dim in {128, 256}] == [
        Cell("h100", 128),
        Cell("h100", 256, has_own_tiles=False),
        Cell("h100", 256),
    ]


def test_kernels_are_found_in_the_lowered_graph():
    source = (
        "async_compile = AsyncCompile()\nfused = async_compile.triton('fused', '''\nx = 1\n''', device_str='cuda')\n"
    )
    assert kernels_of(source) == {"fused": "\nx = 1\n"}


@pytest.mark.parametrize("card", CARDS)
def test_the_page_has_kernels_that_fit(card: str):
    own = {cell: kernels for cell, kernels in kept().items() if cell.card == card and cell.has_own_tiles}
    assert set(own) == {cell for cell in cells(card) if cell.has_own_tiles}
    assert all(
        kernel.first_shared_memory <= CARDS[card].shared_memory
        for kernels in own.values()
        for kernel in kernels.values()
    )
    assert table(kept()) in PAGE.read_text()
