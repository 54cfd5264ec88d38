"""The report of real runs: it is written, and changes nothing that is computed."""

from pathlib import Path

import pytest
import torch

from rl_vlm.log.starts import read_starts
from rl_vlm.run.run import train
from rl_vlm.tools.instruments import INSTRUMENTS
from tests.helpers.tiny_run import HELD_OUT_ROWS, completions, make_config, metric_lines, weights


def test_a_run_with_a_report_is_the_run_without_one(tiny_checkpoint: Path, tmp_path: Path):
    for name in ("with", "without"):
        train(make_config(tiny_checkpoint, tmp_path / name, report=name == "with", max_steps=2), INSTRUMENTS)
    run, plain = tmp_path / "with", tmp_path / "without"
    assert "<title>with · rl-vlm</title>" in (run / "report.html").read_text()
    assert not (plain / "report.html").exists()
    assert metric_lines(run) == metric_lines(plain)
    torch.testing.assert_close(weights(run / "checkpoint-2"), weights(plain / "checkpoint-2"), rtol=0, atol=0)
    rows = [row for file in completions(run).values() for row in file]
    with_images = [row for row in rows if row["images"]]
    assert with_images
    assert all((run / "completions" / path).is_file() for row in with_images for path in row["images"])
    assert not (plain / "completions" / "images").exists()


def test_evaluations_within_a_run_keep_their_completions(tiny_checkpoint: Path, tmp_path: Path):
    settings = {"eval_dataset_name": HELD_OUT_ROWS, "eval_steps": 1, "max_steps": 2, "report": True}
    train(make_config(tiny_checkpoint, tmp_path, **settings), INSTRUMENTS)
    found = completions(tmp_path, of="held_out")
    assert list(found) == [f"held_out_{step:05d}.parquet" for step in (0, 1, 2)]
    for step, rows in enumerate(found.values()):
        assert [row["sample_id"] for row in rows] == [f"held-out-{i}" for i in range(5)]
        assert {row["step"] for row in rows} == {step}
        assert all((tmp_path / "completions" / path).is_file() for row in rows for path in row["images"])
    (line,) = (line for line in metric_lines(tmp_path) if line["step"] == 2)
    assert line["eval_reward"] == pytest.approx(sum(row["reward"] for row in rows) / 5)


def test_each_start_is_recorded_and_a_resumed_run_writes_its_report(tiny_checkpoint: Path, tmp_path: Path):
    train(make_config(tiny_checkpoint, tmp_path, report=True, max_steps=1), INSTRUMENTS)
    first = (tmp_path / "report.html").read_text()
    train(make_config(tiny_checkpoint, tmp_path, report=True, max_steps=2, resume_from_checkpoint="auto"), INSTRUMENTS)
    assert len(read_starts(tmp_path)) == 2
    assert (tmp_path / "report.html").read_text() != first


def test_a_report_that_fails_does_not_end_the_run(tiny_checkpoint: Path, tmp_path: Path, monkeypatch, caplog):
    def fail(*_: object) -> None:
        raise MemoryError("too large")

    monkeypatch.setattr("rl_vlm.tools.report.build.build_page", fail)
    train(make_config(tiny_checkpoint, tmp_path, report=True, max_steps=1), INSTRUMENTS)
    assert "too large" in caplog.text
    assert (tmp_path / "summary.json").is_file()


def test_a_run_that_fails_writes_its_report(tiny_checkpoint: Path, tmp_path: Path, monkeypatch):
    def fail(*_: object) -> None:
        raise RuntimeError("the loss is wrong")

    train(make_config(tiny_checkpoint, tmp_path, report=True, max_steps=1), INSTRUMENTS)
    monkeypatch.setattr("rl_vlm.trainer.Trainer.step", fail)
    with pytest.raises(RuntimeError, match="the loss is wrong"):
        train(
            make_config(tiny_checkpoint, tmp_path, report=True, max_steps=2, resume_from_checkpoint="auto"), INSTRUMENTS
        )
    page = (tmp_path / "report.html").read_text()
    assert "1 of 2 steps" in page and "not complete" in page and 'http-equiv="refresh"' not in page
