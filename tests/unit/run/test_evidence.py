"""Evidence for a verdict, read from files that are written by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl_vlm.log.completions import write_rows
from rl_vlm.run.evidence import read_evidence

EVALUATED = {"eval_num_samples": 2.0}


def write_lines(folder: Path, *lines: dict[str, Any]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def row(sample: str, index: int, reward: float | None, text: str = "", **more: Any) -> dict[str, Any]:
    return {
        "step": 0, "group_id": sample, "sample_id": sample, "completion_index": index, "completion": text,
        "exact": reward, "format": 1.0, "reward": reward, **more,
    }  # fmt: skip


def write_held_out(folder: Path, step: int, *rows: dict[str, Any]) -> None:
    write_rows(folder / "completions" / f"held_out_{step:05d}.parquet", rows)


def test_rows_of_two_evaluations_are_paired_by_their_samples(tmp_path: Path):
    write_lines(tmp_path, {"step": 0, **EVALUATED}, {"step": 8, "reward_best_of_group": 1.0, **EVALUATED})
    write_held_out(tmp_path, 0, row("a", 0, 0.0), row("a", 1, 1.0), row("b", 0, 0.25), row("c", 0, None))
    write_held_out(tmp_path, 8, row("b", 0, 0.75), row("a", 0, 1.0), row("a", 1, None), row("c", 0, 1.0))
    evidence = read_evidence(tmp_path)
    assert evidence.held_out == {
        "reward": ([0.5, 0.25], [1.0, 0.75]),
        "exact": ([0.5, 0.25], [1.0, 0.75]),
        "format": ([1.0, 1.0, 1.0], [1.0, 1.0, 1.0]),
    }
    assert (evidence.num_evaluations, evidence.lacks) == (2, [])


def test_the_last_pair_is_of_the_model_that_the_run_ends_with(tmp_path: Path):
    write_lines(tmp_path, *({"step": step, "reward_best_of_group": 1.0, **EVALUATED} for step in (0, 8, 16)))
    for step, reward in ((0, 0.0), (8, 1.0), (16, 0.5)):
        write_held_out(tmp_path, step, row("a", 0, reward))
    assert read_evidence(tmp_path, result_step=8).held_out["reward"] == ([0.0], [1.0])
    assert read_evidence(tmp_path, result_step=None).held_out["reward"] == ([0.0], [0.5])


@pytest.mark.parametrize(
    ("steps", "files", "lack"),
    [
        ((), (), "There are no held-out data"),
        ((8,), (8,), "There is one evaluation, after step 8"),
        ((0, 8), (), "The completions of both evaluations are not logged"),
        ((0, 8), (0,), "The completions of both evaluations are not logged"),
    ],
)
def test_what_is_not_there_is_said(tmp_path: Path, steps: tuple[int, ...], files: tuple[int, ...], lack: str):
    write_lines(tmp_path, {"step": 1, "reward_best_of_group": 1.0}, *({"step": step, **EVALUATED} for step in steps))
    for step in files:
        write_held_out(tmp_path, step, row("a", 0, 0.0))
    evidence = read_evidence(tmp_path)
    assert evidence.held_out == {} and evidence.num_evaluations == len(steps)
    assert evidence.lacks[0].startswith(lack)


def test_a_damaged_file_is_like_a_missing_one(tmp_path: Path):
    write_lines(tmp_path, *({"step": step, "reward_best_of_group": 1.0, **EVALUATED} for step in (0, 8)))
    write_held_out(tmp_path, 0, row("a", 0, 0.0))
    (tmp_path / "completions" / "held_out_00008.parquet").write_bytes(b"PAR1 damaged")
    assert read_evidence(tmp_path).held_out == {}


def test_old_runs_get_the_figures_of_groups_from_their_completions(tmp_path: Path):
    """Two windows of two steps each; the second group of the first window has three answers, one of them logged."""
    write_lines(tmp_path, *({"step": step, "reward": 0.5} for step in range(5)))
    first = [
        row("a", 0, 0.0, "<answer>x</answer>"), row("a", 1, 0.5, "why <answer>x </answer>"),
        row("b", 0, 1.0, "y"), row("b", 1, None, "z"), row("b", 2, 0.0, "y", **{"exact/answer": "w"}),
    ]  # fmt: skip
    second = [row("c", 0, 0.25, "x"), row("c", 1, 0.25, "x")]
    write_rows(tmp_path / "completions" / "completions_00000.parquet", first)
    write_rows(tmp_path / "completions" / "completions_00002.parquet", [{**each, "step": 2} for each in second])
    found = [
        (line.get("reward_best_of_group"), line.get("completions/distinct_answers"))
        for line in read_evidence(tmp_path, decisive="exact").lines
    ]
    assert found == [(None, None), (0.75, 2.0), (0.75, 2.0), (0.25, 1.0), (0.25, 1.0)]


def test_without_completions_a_collapse_cannot_be_seen(tmp_path: Path):
    write_lines(tmp_path, {"step": 1, "reward": 0.5})
    assert read_evidence(tmp_path).lacks[0] == (
        "The completions are not logged (log.log_completions), so a collapse cannot be seen."
    )
