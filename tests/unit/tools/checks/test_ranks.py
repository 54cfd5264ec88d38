"""Facts that ranks compare."""

import json
from pathlib import Path

import pytest

from rl_vlm.tools.checks.ranks import launch_facts, unequal


def deepspeed_facts(monkeypatch: pytest.MonkeyPatch, file: Path, stage: int) -> dict[str, str]:
    zero = {"stage": stage, "offload_optimizer": {"device": "none"}, "offload_param": {"device": "none"}}
    file.write_text(json.dumps({"zero_optimization": zero, "train_batch_size": "auto"}))
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    return launch_facts()


def test_another_stage_is_a_difference(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here, there = (deepspeed_facts(monkeypatch, tmp_path / "ds.json", stage) for stage in (2, 3))
    assert list(unequal(here, there)) == [("launcher's deepspeed.zero_optimization.stage", "2 instead of 3")]


def test_a_launch_that_cannot_be_read_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "inductor")
    assert "inductor" in launch_facts()["launcher's request"]


def test_values_that_differ_late_are_shown_from_there() -> None:
    long = "a" * 100
    ((name, what),) = unequal({"prompt": f"{long} first"}, {"prompt": f"{long} second"})
    assert name == "prompt"
    assert what == f"…{'a' * 19} first instead of …{'a' * 19} second"
