"""Every part of the GPU benchmark in its small form, on a CPU."""

import json
from pathlib import Path

import pytest
import torch

from benchmarks import gpu
from benchmarks.gpu_parts.bench import Bench, peak_flops
from benchmarks.gpu_parts.training_pass import kind_of

FIGURES = {
    "correctness": {"passed"},
    "training_3b": {"ms_per_group", "unique_tokens_per_s"},
    "training_7b": {"ms_per_group", "unique_tokens_per_s"},
    "attention": {"forward_ms", "first_call_s"},
    "rollouts": {"tokens_per_s", "prefill_share", "decode_step_ms"},
    "digits": {"seconds", "stages"},
    "whole_run": {"speedup", "window_s", "trl_window_s"},
    "memory": {"planned_gib"},
    "memory_expandable": {"planned_gib"},
}
"""What every row of a part has."""


@pytest.mark.ci
@pytest.mark.parametrize("part", gpu.PARTS)
def test_a_part_measures_something_on_any_machine(part: str, tmp_path: Path) -> None:
    result = gpu.run_part(part, Bench(torch.device("cpu"), small=True), tmp_path)
    assert json.loads((tmp_path / f"{part}.json").read_text()) == result
    assert result["rows"]
    for row in result["rows"]:
        assert all(row[name] for name in FIGURES[part]), row
    if part.startswith("training"):
        assert [row["side"] for row in result["rows"]] == ["shared", "dense", *3 * ["shared"], "floor", "trl"]
    if part == "correctness":
        assert sum(row["failed"] for row in result["rows"]) == 0


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.parse(["training"])
    assert "no such part: training; there are correctness, training_3b" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H200", 989),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA GeForce RTX 4090", 165),
        ("NVIDIA B200", 2250),
        ("Some other card", None),
    ],
)
def test_peaks_of_cards_by_the_names_of_cuda(name: str, tflops: int | None) -> None:
    assert peak_flops(name) == (tflops and tflops * 1e12)


@pytest.mark.parametrize(
    ("kernel", "kind"),
    [
        ("triton_tem_fused_flex_attention_0", "attention"),
        ("void flash_fwd_kernel<Flash_fwd_kernel_traits<128>>", "attention"),
        ("nvjet_hsh_128x256_64x4_2x1_v_bz_TNT", "matrix products"),
        ("sm90_xmma_gemm_bf16bf16_bf16f32", "matrix products"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4>", "others"),
    ],
)
def test_kernels_are_told_by_their_names(kernel: str, kind: str) -> None:
    assert kind_of(kernel) == kind
