"""Every part of the GPU benchmark in its small form, on a CPU."""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._inductor.codecache import PyCodeCache
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from benchmarks import gpu
from benchmarks.gpu_parts import attention, correctness, memory, vllm_engine
from benchmarks.gpu_parts.bench import Bench, peak_flops
from benchmarks.gpu_parts.training_pass import kind_of
from rl_vlm.distributed.collectives import Collectives
from rl_vlm.passes.budget import PlannedBudget, TokenBudget
from rl_vlm.stages import Stage
from rl_vlm.types import Progress
from tests.gpu.test_shared_attention import FAMILIES
from tests.helpers.tiers import in_tiers
from tests.unit.model.test_vision import make_encoder

FIGURES = {
    "correctness_1": {"passed"},
    "correctness_2": {"passed"},
    "vllm_lora": {"seconds"},
    "vllm_full": {"seconds"},
    "training_3b": {"ms_per_group", "unique_tokens_per_s"},
    "training_3b_checkpointing": {"ms_per_group", "unique_tokens_per_s"},
    "training_3b_lora": {"ms_per_group", "unique_tokens_per_s"},
    "training_7b": {"ms_per_group", "unique_tokens_per_s"},
    "step_parts": {"part", "way", "ms"},
    "attention": {"forward_ms"},
    "rollouts": {"tokens_per_s", "prefill_share", "decode_step_ms"},
    "digits": {"seconds", "stages"},
    "whole_run": {"speedup", "window_s", "trl_window_s"},
    "memory": {"planned_gib"},
    "memory_expandable": {"planned_gib"},
}
"""What every row of a part has."""
VLLM_STEPS = [
    "start", "first sync", "agreement", "agreement before new weights are sent", "sync of new weights",
    "agreement after the sync", "wake up", "rollout", "sleep", "wake up again", "agreement after sleep",
]  # fmt: skip
CI = {"training_3b", "rollouts"}


@pytest.mark.parametrize("part", in_tiers(gpu.PARTS, (), CI))
def test_a_part_measures_something_on_any_machine(part: str, tmp_path: Path) -> None:
    result = gpu.run_part(part, Bench(torch.device("cpu"), small=True), tmp_path)
    assert json.loads((tmp_path / f"{part}.json").read_text()) == result
    assert result["rows"]
    assert "error" not in result
    for row in result["rows"]:
        assert all(row[name] for name in FIGURES[part]), row
    if part.startswith("training"):
        assert [row["side"] for row in result["rows"]] == ["shared", "dense", *3 * ["shared"], "floor", "trl"]
    if part.startswith("correctness"):
        assert sum(row["failed"] for row in result["rows"]) == 0
    if part.startswith("vllm"):
        assert [row["step"] for row in result["rows"]] == VLLM_STEPS
        gaps = {row["step"]: row["mean_gap"] for row in result["rows"] if "mean_gap" in row}
        assert gaps.keys() == {"agreement", "agreement after the sync", "agreement after sleep"}
        assert max(gaps.values()) < 1e-5
        assert all("no sleep mode" in row["note"] for row in result["rows"] if row["step"] in ("sleep", "wake up"))


@pytest.fixture
def stub_part(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a part of two rows, the first of which takes long, and the second fails."""

    def measure(bench: Bench) -> Iterator[dict[str, Any]]:
        for index in bench.in_time({"long": 0, "failing": 1}):
            if index == 1:
                raise RuntimeError("no second row")
            time.sleep(0.2)
            yield {"row": index}

    monkeypatch.setitem(sys.modules, "benchmarks.gpu_parts.stub", SimpleNamespace(HEAD=("row",), measure=measure))
    monkeypatch.setitem(gpu.PARTS, "stub", ("stub", {}))


@pytest.mark.usefixtures("stub_part")
def test_an_error_leaves_the_rows_before_it(tmp_path: Path) -> None:
    result = gpu.run_part("stub", Bench(torch.device("cpu"), small=True), tmp_path)
    assert json.loads((tmp_path / "stub.json").read_text()) == result
    assert (result["rows"], result["error"], result["left_out"]) == ([{"row": 0}], "RuntimeError('no second row')", [])


@pytest.mark.usefixtures("stub_part")
def test_rows_after_the_deadline_are_named(tmp_path: Path) -> None:
    bench = Bench(torch.device("cpu"), small=True, deadline=time.monotonic() + 0.1)
    result = gpu.run_part("stub", bench, tmp_path)
    assert (result["rows"], result["left_out"]) == ([{"row": 0}], ["failing"])
    assert result["seconds"] >= 0.2
    assert "error" not in result
    assert "left out for lack of time: failing" in gpu.report("stub", result)


def test_parts_run_after_those_that_die_or_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    row = json.dumps({"head": ["row"], "rows": [{"row": "one"}]})
    scripts = {
        "attention": "import os; os.abort()",
        "digits": f"import pathlib, time; pathlib.Path('digits.json').write_text('{row}'); time.sleep(60)",
        "memory": f"import pathlib; pathlib.Path('memory.json').write_text('{row}')",
    }
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu, "GRACE_S", 2.0)
    monkeypatch.setattr(gpu, "command", lambda name, *_: [sys.executable, "-c", scripts[name]])
    with pytest.raises(SystemExit, match="failed: attention, digits"):
        gpu.main([*scripts, "--seconds", "0", "--json", str(tmp_path)])
    found = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in scripts}
    errors = [result.get("error") for result in found.values()]
    assert errors == ["its process ended with status -6", "its process was ended after 2 s", None]
    assert found["digits"]["rows"] == found["memory"]["rows"] == [{"row": "one"}]
    assert capsys.readouterr().out.count("| one |") == 2


def test_a_part_in_its_own_process(tmp_path: Path) -> None:
    gpu.main(["attention", "--device", "cpu", "--small", "--seconds", "0", "--json", str(tmp_path)])
    result = json.loads((tmp_path / "attention.json").read_text())
    assert (result["rows"], result["left_out"]) == ([], ["heads of toy", "random lengths, heads of toy"])


def test_a_part_sees_its_allocator_and_no_gpu_on_a_cpu() -> None:
    args = gpu.parse(["--device", "cpu"])
    of_runs, fixed = gpu.variables("attention", args), gpu.variables("memory", args)
    assert of_runs["CUDA_VISIBLE_DEVICES"] == ""
    assert of_runs["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert fixed["PYTORCH_ALLOC_CONF"] == fixed["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:False"


def test_the_largest_budget_that_fits_is_found_by_bisection(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Collectives(torch.device("cpu"))
    budget = TokenBudget(ranks, Progress(max_steps=1), make_encoder(), PlannedBudget(0))
    trainer: Any = SimpleNamespace(passes=SimpleNamespace(recovery=SimpleNamespace(budget=budget)))

    def accumulate(*_: Any) -> None:
        if budget.tokens > 11500:
            budget.lower(Stage.TRAINING, budget.tokens // 2, "", is_writer=False)

    monkeypatch.setattr(memory, "accumulate", accumulate)
    assert memory.largest_fitting(trainer, [], fitting=8000, failing=16000) == 11000
    assert budget.tokens == 11000


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        gpu.parse(["training"])
    assert "no such part: training; there are correctness_1, correctness_2" in capsys.readouterr().err


def test_each_family_has_tests_of_its_own() -> None:
    families = [family for half in correctness.FAMILIES.values() for family in half]
    assert sorted(families) == sorted(FAMILIES)
    assert correctness.only("qwen3_vl") == "qwen3_vl and not qwen3_vl_moe"
    assert correctness.only("glm4v") == "glm4v"


TESTS = """
import time
def test_passes(): pass
def test_fails(): assert False
def test_hangs(): time.sleep(300)
"""


@pytest.mark.slow
def test_outcomes_before_a_time_limit_are_kept(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "test_some.py"
    path.write_text(TESTS)
    selected = [str(path), f"--rootdir={tmp_path}", "-p", "no:cacheprovider"]
    found = correctness.run_tests([*selected, "-k", "not hangs"], time.monotonic() + 300)
    assert (found["passed"], found["failed"], found["note"]) == (1, 1, None)
    assert "assert False" in capfd.readouterr().err
    found = correctness.run_tests([*selected, "-k", "hangs or passes"], time.monotonic() + 60)
    assert (found["passed"], found["failed"], found["note"]) == (1, 0, "ended at the time limit")
    found = correctness.run_tests([*selected, "-k", "nothing"], time.monotonic() + 300)
    assert (found["passed"], found["note"]) == (0, "pytest ended with status 5")


def test_kernels_are_those_that_were_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers of the A100's backward with heads of 256 dimensions."""
    kernel = object.__new__(CachingAutotuner)
    monkeypatch.setattr(kernel, "launchers", [SimpleNamespace(n_regs=32, n_spills=11832, shared=137216)], raising=False)
    module = SimpleNamespace(triton_0=kernel, triton_1=kernel, other=3)
    monkeypatch.setattr(PyCodeCache, "modules", [module])
    assert attention.kernels() == "32 registers, 11832 spilled, 137216 bytes shared"
    monkeypatch.setattr(PyCodeCache, "modules", [])
    assert attention.kernels() is None


def test_vllm_is_left_out_where_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "find_spec", lambda name: None)
    rows = list(vllm_engine.measure(Bench(torch.device("cpu"), small=True), lora_r=0))
    assert rows == [{"step": "start", "note": "vLLM is not installed"}]


@pytest.mark.parametrize(
    ("name", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 NVL", 835),
        ("NVIDIA H100 PCIe", 756),
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
