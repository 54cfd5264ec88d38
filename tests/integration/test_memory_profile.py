"""`log.memory_profile` on tiny runs: its files, and that it does not change what is computed."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_vlm.run.run import train
from rl_vlm.tools.instruments import INSTRUMENTS
from tests.helpers.tiny_run import build_checkpoint, completions, make_config, metric_lines, weights
from tests.helpers.two_processes import train_on_two_processes

PHASES = ["load", "generation", "ref_logprobs", "training", "update", "save"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_checkpoint(tmp_path_factory.mktemp("model"))


def report_of(run: Path) -> dict[str, Any]:
    return json.loads((run / "memory_profile.json").read_text())


def assert_same_run(one: Path, other: Path, step: int) -> None:
    assert metric_lines(one) == metric_lines(other)
    assert completions(one) == completions(other)
    ours, theirs = (weights(run / f"checkpoint-{step}") for run in (one, other))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_profiled_run_is_the_same_run(checkpoint: Path, tmp_path: Path):
    settings = {"max_steps": 5, "beta": 0.1}
    train(make_config(checkpoint, tmp_path / "plain", **settings), INSTRUMENTS)
    train(make_config(checkpoint, tmp_path / "profiled", memory_profile=True, **settings), INSTRUMENTS)
    assert_same_run(tmp_path / "profiled", tmp_path / "plain", 5)
    assert not (tmp_path / "plain" / "memory_profile.json").exists()

    report = report_of(tmp_path / "profiled")
    assert (tmp_path / "profiled" / "memory_profile.png").stat().st_size > 10_000
    assert set(report) == {"device", "measured", "phases", "ranks", "layers", "kinds"}
    assert list(report["phases"]) == PHASES
    for phase in report["phases"].values():
        assert phase["measured_bytes"] > 0
        assert phase["predicted_bytes"] == sum(phase["predicted_parts"].values()) > 0
        assert phase["measured_rank"] == phase["least_rank"] == 0
    (rank,) = report["ranks"]
    assert rank["phases"] == {name: phase["measured_bytes"] for name, phase in report["phases"].items()}
    assert rank["largest_micro_batch"]["patches"] > 0
    assert {"model.language_model.layers.0", "model.language_model.layers.1"} <= {x["name"] for x in report["layers"]}
    sizes = [kind["bytes"] for kind in report["kinds"]]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] > 0


def test_a_planned_budget_is_the_same_with_a_profile(checkpoint: Path, tmp_path: Path):
    settings = {"max_steps": 1, "micro_batch_tokens": "auto", "gradient_checkpointing": True}
    train(make_config(checkpoint, tmp_path / "plain", **settings), INSTRUMENTS)
    train(make_config(checkpoint, tmp_path / "profiled", memory_profile=True, **settings), INSTRUMENTS)
    assert_same_run(tmp_path / "profiled", tmp_path / "plain", 1)
    assert report_of(tmp_path / "profiled")["phases"]["training"]["measured_bytes"] > 0


@pytest.mark.slow
def test_two_processes_are_compared(checkpoint: Path, tmp_path: Path):
    config = make_config(checkpoint, tmp_path / "run", max_steps=1, memory_profile=True)
    train_on_two_processes(config, tmp_path / "run.yaml")
    report = report_of(tmp_path / "run")
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    for name, phase in report["phases"].items():
        of_ranks = [rank["phases"][name] for rank in report["ranks"]]
        assert phase["measured_bytes"] == of_ranks[phase["measured_rank"]] == max(of_ranks)
        assert phase["least_bytes"] == of_ranks[phase["least_rank"]] == min(of_ranks) > 0
