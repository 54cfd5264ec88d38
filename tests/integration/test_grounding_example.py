"""`configs/grounding.yaml` learns where objects are, by reward alone, from their images and questions."""

import json
from pathlib import Path
from typing import Any

import pytest

from examples.grounding.scenes import held_out_rows
from launch import cli

IOU = "rewards/iou/mean"
SHUFFLED = "eval_dataset_name=tests.integration.test_grounding_example:"


def shuffled_images() -> list[dict[str, Any]]:
    """Return the held-out rows, each with the image of the next one."""
    return moved("image")


def shuffled_questions() -> list[dict[str, Any]]:
    """Return the held-out rows, each with the question of the next one."""
    return moved("prompt")


def moved(column: str) -> list[dict[str, Any]]:
    """Return the held-out rows with the values of one column moved by one row."""
    rows = held_out_rows()
    return [{**row, column: other[column]} for row, other in zip(rows, rows[1:] + rows[:1], strict=True)]


def run(output_dir: Path, *overrides: str) -> dict:
    settings = [f"output_dir={output_dir}", "disable_tqdm=true", *overrides]
    assert cli.run("train", ["configs/grounding.yaml", *settings]) == 0
    return json.loads((output_dir / "summary.json").read_text())


def evaluated(model: Path | str, output_dir: Path, *overrides: str) -> dict:
    settings = [f"model_name_or_path={model}", f"output_dir={output_dir}", "disable_tqdm=true", *overrides]
    assert cli.run("eval", ["configs/grounding.yaml", *settings]) == 0
    return json.loads((output_dir / "evaluation" / "summary.json").read_text())


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of four steps."""
    output_dir = tmp_path_factory.mktemp("runs") / "grounding"
    run(output_dir, "max_steps=4", "eval_steps=0", "save_steps=0")
    return output_dir


def test_a_run_starts_from_answers_of_the_right_form_and_shares_prefixes(started: Path):
    steps = [json.loads(line) for line in (started / "metrics.jsonl").read_text().splitlines()][1:]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all(line["compute/shared_forwards"] > 0 and "compute/dense_forwards" not in line for line in steps)
    assert steps[0]["rewards/iou/mean"] > 0.03
    assert steps[0]["completions/mean_length"] == pytest.approx(6, abs=0.2)


@pytest.mark.parametrize("sampling", [(), ("eval_temperature=1", "num_generations_eval=8")], ids=["greedy", "sampled"])
def test_the_starting_model_knows_nothing_of_where_objects_are(
    started: Path, tmp_path: Path, sampling: tuple[str, ...]
):
    model = started / "initial_model"
    own = evaluated(model, tmp_path / "own", *sampling)[IOU]
    others = evaluated(model, tmp_path / "others", f"{SHUFFLED}shuffled_images", *sampling)[IOU]
    assert own < 0.15
    assert own == pytest.approx(others, abs=0.02)


@pytest.mark.slow
def test_boxes_tighten_and_answer_the_question(tmp_path: Path):
    summary = run(tmp_path / "run")
    assert summary["eval_before"][IOU] < 0.15
    assert summary["eval_after"][IOU] >= 0.6
    for control in ("shuffled_images", "shuffled_questions"):
        assert evaluated(summary["checkpoint"], tmp_path / control, SHUFFLED + control)[IOU] < 0.35
