"""Options of FlexAttention's kernels. Which tiles fit was found by compiling the kernels for each card with ptxas."""

from typing import Any

import pytest
import torch
from torch._dynamo.exc import TorchDynamoException

from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import ConfigError, ModelError
from rl_vlm.model import flex_kernels
from rl_vlm.model.flex_kernels import kernel_options, naming_compiler_errors, shared_memory_of, with_fitting_attention

TESLA_T4, RTX_4090, A100, H100 = 65_536, 101_376, 166_912, 232_448
"""Bytes of shared memory per block."""
CUDA = torch.device("cuda")
TILES_OF_32 = {"bwd_BLOCK_M1": 32, "bwd_BLOCK_N1": 32, "bwd_BLOCK_M2": 32, "bwd_BLOCK_N2": 32}


@pytest.mark.parametrize(
    ("head_dim", "shared_memory", "expected"),
    [
        (64, RTX_4090, {}),
        (128, RTX_4090, {}),
        (192, H100, {}),
        (256, H100, {"bwd_num_warps": 8}),
        (256, A100, {"bwd_num_warps": 8}),
        (256, RTX_4090, {"fwd_num_stages": 1, "bwd_num_stages": 1, **TILES_OF_32}),
        (512, H100, {"fwd_num_stages": 1, "fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32}),
        (512, RTX_4090, {"fwd_num_stages": 1, "fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32}),
    ],
)
def test_options_by_head_and_card(head_dim: int, shared_memory: int, expected: dict[str, Any]) -> None:
    assert kernel_options(head_dim, shared_memory, torch.bfloat16) == {"FORCE_USE_FLEX_ATTENTION": True, **expected}


@pytest.mark.parametrize(
    ("head_dim", "expected"), [(64, {}), (128, {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32}), (256, {}), (512, {})]
)
def test_tiles_of_the_forward_are_small_in_float32(head_dim: int, expected: dict[str, Any]) -> None:
    assert kernel_options(head_dim, A100, torch.float32) == {"FORCE_USE_FLEX_ATTENTION": True, **expected}


def test_a_cpu_has_room() -> None:
    shared_memory = shared_memory_of(torch.device("cpu"))
    assert kernel_options(256, shared_memory, torch.bfloat16) == kernel_options(256, H100, torch.bfloat16)


@pytest.mark.parametrize(
    ("memory", "shared_memory", "expected"),
    [
        ({}, RTX_4090, "auto"),
        ({"shared_attention": "flex"}, H100, "flex"),
        ({}, TESLA_T4, "sdpa"),
        ({"shared_attention": "sdpa"}, H100, "sdpa"),
        ({"prefix_sharing": "dense"}, TESLA_T4, "auto"),
    ],
)
def test_a_card_without_room_takes_sdpa(
    monkeypatch: pytest.MonkeyPatch, memory: dict[str, Any], shared_memory: int, expected: str
) -> None:
    on_card(monkeypatch, shared_memory)
    assert with_fitting_attention(config(**memory), CUDA).memory.shared_attention == expected


def test_flex_is_refused_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    on_card(monkeypatch, TESLA_T4)
    with pytest.raises(ConfigError, match="flex cannot be used: Tesla T4 has too little shared memory"):
        with_fitting_attention(config(shared_attention="flex"), CUDA)


def test_a_backward_without_a_fitting_kernel_names_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A10")
    message = r"on NVIDIA A10: No valid triton configs.*shared_attention: sdpa, .* heads of 256 and 512 values"
    with pytest.raises(ModelError, match=message), naming_compiler_errors(lambda: [256, 512]):
        raise RuntimeError("No valid triton configs. OutOfResources: out of resource: shared memory, Required: 114688")


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("shape mismatch"),
        torch.OutOfMemoryError("CUDA out of memory."),
        TorchDynamoException("RuntimeError: Triton Error [CUDA]: out of memory"),
    ],
)
def test_other_errors_stay_as_they_are(error: RuntimeError) -> None:
    with pytest.raises(type(error)) as raised, naming_compiler_errors(lambda: [256]):
        raise error
    assert raised.value is error


def on_card(monkeypatch: pytest.MonkeyPatch, shared_memory: int) -> None:
    monkeypatch.setattr(flex_kernels, "shared_memory_of", lambda device: shared_memory)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")


def config(**memory: Any) -> RunConfig:
    return RunConfig.model_validate({"model": {"model_name_or_path": "m"}, "memory": memory})
