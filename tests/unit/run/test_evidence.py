"""Evidence for a verdict, read from files that are written by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from rl_vlm.log.completions import write_rows
from tests.helpers.run_directory import evidence_in

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
    write_lines(tmp_path, {"step": 0, **EVALUATED}, {"step": 1, "reward_best_of_group": 1.0, **EVALUATED})
    write_held_out(tmp_path, 0, row("a", 0, 0.0), row("a", 1, 1.0), row("b", 0, 0.25), row("c", 0, None))
    write_held_out(tmp_path, 1, row("b", 0, 0.75), row("a", 0, 1.0), row("a", 1, None), row("c", 0, 1.0))
    evidence = evidence_in(tmp_path)
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
    assert evidence_in(tmp_path, result_step=8).held_out["reward"] == ([0.0], [1.0])
    assert evidence_in(tmp_path, result_step=None).held_out["reward"] == ([0.0], [0.5])


@pytest.mark.parametrize(
    ("steps", "files", "lack"),
    [
        ((), (), "There are no held-out data"),
        ((8,), (8,), "There is one evaluation, after step 8"),
        ((0, 8), (), "The completions of two evaluations cannot be read ([Errno 2]"),
        ((0, 8), (0,), "The completions of two evaluations cannot be read ([Errno 2]"),
    ],
)
def test_what_is_not_there_is_said(tmp_path: Path, steps: tuple[int, ...], files: tuple[int, ...], lack: str):
    write_lines(tmp_path, {"step": 1, "reward_best_of_group": 1.0}, *({"step": step, **EVALUATED} for step in steps))
    for step in files:
        write_held_out(tmp_path, step, row("a", 0, 0.0))
    evidence = evidence_in(tmp_path)
    assert evidence.held_out == {} and evidence.num_evaluations == len(steps)
    assert evidence.lacks[0].startswith(lack)


def test_a_damaged_file_is_named(tmp_path: Path):
    write_lines(tmp_path, *({"step": step, "reward_best_of_group": 1.0, **EVALUATED} for step in (0, 1)))
    write_held_out(tmp_path, 0, row("a", 0, 0.0))
    (tmp_path / "completions" / "held_out_00001.parquet").write_bytes(b"PAR1 damaged")
    evidence = evidence_in(tmp_path)
    assert evidence.held_out == {} and evidence.lacks[0].startswith(
        "The completions of two evaluations cannot be read ("
    )


def test_old_runs_get_the_figures_of_groups_from_their_completions(tmp_path: Path):
    """Two windows of two steps each; the second group of the first window has three answers, one of them logged."""
    write_lines(tmp_path, *({"step": step, "reward": 0.5} for step in range(5)))
    first = [
        row("a", 0, 0.0, "<answer>x</answer>"), row("a", 1, 0.5, "why <answer>x </answer>"),
        row("b", 0, 1.0, "y"), row("b", 1, None, "z", fault="judge: timeout"),
        row("b", 2, 0.0, "y", **{"exact/answer": "w"}),
    ]  # fmt: skip
    second = [row("c", 0, 0.25, "x"), row("c", 1, 0.25, "x")]
    write_rows(tmp_path / "completions" / "completions_00000.parquet", first)
    write_rows(tmp_path / "completions" / "completions_00002.parquet", [{**each, "step": 2} for each in second])
    names = (
        "reward_best_of_group", "completions/distinct_answers", "completions/num_groups", "frac_reward_faults",
        "sampling/iteration",
    )  # fmt: skip
    assert [tuple(map(line.get, names)) for line in evidence_in(tmp_path, decisive="exact").lines] == [
        (None, None, None, None, None), (0.75, 2.0, 2, 0.2, None), (None, None, None, None, 1),
        (0.25, 1.0, 1, 0.0, None), (None, None, None, None, 1),
    ]  # fmt: skip


def test_lines_of_an_older_start_are_filled_beside_newer_ones(tmp_path: Path):
    write_lines(tmp_path, {"step": 1, "reward": 0.5}, {"step": 2, "reward": 0.5, "reward_best_of_group": 1.0})
    write_rows(tmp_path / "completions" / "completions_00000.parquet", [row("a", 0, 0.25, "x")])
    write_rows(tmp_path / "completions" / "completions_00001.parquet", [{**row("b", 0, 0.5, "x"), "step": 1}])
    evidence = evidence_in(tmp_path)
    assert [line["reward_best_of_group"] for line in evidence.lines] == [0.25, 1.0]
    assert evidence.lacks == ["There are no held-out data. Training data are judged."]


@pytest.mark.parametrize(
    ("line", "lack"),
    [
        (
            {"step": 1},
            "The completions of the first step are not logged (log.log_completions), so a collapse cannot be",
        ),
        ({"step": 4, "reward_best_of_group": 1.0}, "Steps before 4 are in another directory, so a collapse cannot be"),
        (
            {"step": 1, "reward_best_of_group": 1.0, "resampling/rounds": 1.0},
            "Groups without variance were replaced (rollout.max_resampling_rounds).",
        ),
    ],
)
def test_missing_figures_of_groups_are_named(tmp_path: Path, line: dict[str, Any], lack: str):
    write_lines(tmp_path, line)
    assert evidence_in(tmp_path).lacks[0].startswith(lack)
