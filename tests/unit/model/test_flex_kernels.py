"""Options of FlexAttention's kernels. Which tiles fit was found by compiling the kernels for each card with ptxas."""

from typing import Any

import pytest
import torch

from rl_vlm.model import flex_kernels
from rl_vlm.model.flex_kernels import has_room_for_kernels, kernel_options, shared_memory_of

RTX_4090, A100, H100 = 101_376, 166_912, 232_448
"""Bytes of shared memory per block."""
TILES_OF_32 = {"bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 32, "bwd_BLOCK_M2": 32, "bwd_BLOCK_N2": 32}
TILES_OF_16 = {"bwd_BLOCK_M1": 16, "bwd_BLOCK_N1": 16, "bwd_BLOCK_M2": 16, "bwd_BLOCK_N2": 16}


@pytest.mark.parametrize(
    ("head_dim", "shared_memory", "expected"),
    [
        (64, RTX_4090, {}),
        (128, RTX_4090, {}),
        (192, H100, {}),
        (256, H100, {"bwd_num_warps": 8}),
        (256, A100, {"bwd_num_warps": 8}),
        (256, RTX_4090, {"fwd_num_stages": 1, "bwd_num_stages": 1, **TILES_OF_32}),
        (512, H100, {"fwd_num_stages": 1, "fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, **TILES_OF_16}),
        (512, RTX_4090, {"fwd_num_stages": 1, "fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, **TILES_OF_16}),
    ],
)
def test_tiles_of_large_heads_fit_the_card(head_dim: int, shared_memory: int, expected: dict[str, Any]) -> None:
    assert kernel_options(head_dim, shared_memory) == {"FORCE_USE_FLEX_ATTENTION": True, **expected}


def test_a_cpu_has_room() -> None:
    assert kernel_options(256, shared_memory_of(torch.device("cpu"))) == kernel_options(256, H100)


@pytest.mark.parametrize(("shared_memory", "has_room"), [(RTX_4090, True), (H100, True), (65_536, False)])
def test_older_cards_have_no_room(monkeypatch: pytest.MonkeyPatch, shared_memory: int, has_room: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(flex_kernels, "shared_memory_of", lambda device: shared_memory)
    assert has_room_for_kernels() == has_room
