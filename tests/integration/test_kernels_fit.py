"""FlexAttention's kernels fit the cards, as Inductor lowers them and ptxas compiles them without a card."""

from functools import cache

import pytest

from benchmarks.compiled_kernels import Cell, Kernel, measure_apart

pytestmark = pytest.mark.slow

SHARED_MEMORY = {
    "a100": 163 * 1024,
    "3090": 99 * 1024,
    "4090": 99 * 1024,
    "h100": 227 * 1024,
    "b200": 227 * 1024,
    "5090": 99 * 1024,
}
"""Bytes per block: "Maximum amount of shared memory per thread block" in the CUDA programming guide, for the compute
capabilities 8.0, 8.6, 8.9, 9.0, 10.0 and 12.0."""
CELLS = [
    *(Cell(card, head_dim) for card in SHARED_MEMORY for head_dim in (64, 128, 256, 512)),
    *(Cell(card, 256, softcap=50.0) for card in ("a100", "4090")),  # PaliGemma 2
    *(Cell(card, 128, dtype="float32") for card in ("a100", "4090")),
]
TOO_LARGE = Cell("3090", 256, has_own_tiles=False)


@cache
def kernels(card: str) -> dict[Cell, dict[str, Kernel]]:
    """Compile the kernels of all cells of a card in one process."""
    return measure_apart([cell for cell in [*CELLS, TOO_LARGE] if cell.card == card])


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell.card}-{cell.head_dim}-{cell.dtype}-{cell.softcap}")
def test_kernels_fit(cell: Cell) -> None:
    found = kernels(cell.card)[cell]
    assert set(found) == {"forward", "backward"}
    assert max(kernel.first_shared_memory for kernel in found.values()) <= SHARED_MEMORY[cell.card]


def test_pytorchs_tiles_for_heads_of_256_do_not_fit_an_rtx_3090() -> None:
    assert kernels("3090")[TOO_LARGE]["backward"].shared_memory > SHARED_MEMORY["3090"]
