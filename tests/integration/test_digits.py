"""The main job as users run it: `configs/digits.yaml` learns, and only from what its rewards say of its images."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
from PIL import Image

from examples.digits.digits import held_out_rows, teach_format, train_rows
from launch import cli
from rl_vlm.tiny.build import build_tiny
from tests.tiny.hybrid import HYBRID

ACCURACY = "rewards/exact_match/mean"


def run(config: str, output_dir: Path, *overrides: str) -> dict:
    assert cli.run("train", [config, f"output_dir={output_dir}", *overrides]) == 0
    return json.loads((output_dir / "summary.json").read_text())


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory) -> Path:
    output_dir = tmp_path_factory.mktemp("runs") / "digits"
    run("configs/digits.yaml", output_dir, "disable_tqdm=true")
    return output_dir


def test_the_quickstart_learns_to_read_digits(quickstart):
    summary = json.loads((quickstart / "summary.json").read_text())
    assert summary["eval_before"][ACCURACY] <= 0.15
    assert summary["eval_after"][ACCURACY] >= 0.90
    assert summary["optimizer_steps"] == 112
    verdict, change = summary["verdict"], summary["verdict"]["changes"][0]
    assert (verdict["outcome"], verdict["is_evaluated"], verdict["lacks"]) == ("learned", True, [])
    assert (change["name"], change["split"], change["num"], change["low"] > 0.7) == ("reward", "held-out", 450, True)
    ends = (summary["eval_before"]["reward"], summary["eval_after"]["reward"])
    assert (change["before"], change["after"]) == pytest.approx(ends)


def test_no_held_out_image_is_trained_on(quickstart):
    held_out = {row["id"] for row in held_out_rows()}
    files = sorted((quickstart / "completions").glob("completions_*.parquet"))
    trained = {sample_id for file in files for sample_id in pyarrow.parquet.read_table(file)["sample_id"].to_pylist()}
    assert len(files) == 28 and len(trained) > 1000
    assert not trained & held_out


def test_prefixes_were_shared(quickstart):
    lines = [json.loads(line) for line in (quickstart / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["step"] > 0]
    assert [line["step"] for line in steps] == list(range(1, 113))
    assert all(line["compute/shared_forwards"] > 0 and "compute/dense_forwards" not in line for line in steps)
    assert sum(line["compute/dense_tokens"] for line in steps) > 3 * sum(
        line["compute/computed_tokens"] for line in steps
    )


def test_evaluating_the_checkpoint_repeats_the_reported_accuracy(quickstart, tmp_path):
    summary = json.loads((quickstart / "summary.json").read_text())
    model = f"model_name_or_path={summary['checkpoint']}"
    assert cli.run("eval", ["configs/digits.yaml", model, f"output_dir={tmp_path}", "disable_tqdm=true"]) == 0
    evaluated = json.loads((tmp_path / "evaluation" / "summary.json").read_text())
    assert evaluated == summary["eval_after"]


@pytest.mark.slow
def test_lora_takes_a_half_trained_model_on(quickstart, tmp_path):
    model = f"model_name_or_path={quickstart / 'checkpoint-20'}"
    summary = run("configs/digits_lora.yaml", tmp_path / "lora", model, "disable_tqdm=true")
    assert 0.4 <= summary["eval_before"][ACCURACY] <= 0.7
    assert summary["eval_after"][ACCURACY] >= 0.85


def permuted_answers() -> list[dict]:
    """The training rows with the gold answers of other rows."""
    rows = train_rows()
    order = np.random.default_rng(0).permutation(len(rows))
    return [{**row, "solution": rows[other]["solution"]} for row, other in zip(rows, order, strict=True)]


def shuffled_pixels() -> list[dict]:
    """The training rows with every pixel taken from the same place of another image, a different one for each pixel."""
    rows = train_rows()
    pixels = np.stack([np.asarray(row["image"]) for row in rows]).reshape(len(rows), -1)
    pixels = np.random.default_rng(0).permuted(pixels, axis=0).reshape(len(rows), 8, 8)
    return [{**row, "image": Image.fromarray(image)} for row, image in zip(rows, pixels, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("rows", ["permuted_answers", "shuffled_pixels"])
def test_nothing_is_learned_where_images_say_nothing(rows, tmp_path):
    dataset = f"dataset_name=tests.integration.test_digits:{rows}"
    summary = run("configs/digits.yaml", tmp_path / rows, dataset, "disable_tqdm=true")
    assert summary["eval_after"][ACCURACY] <= 0.2


def hybrid_config(tokenizer: Any, hidden_size: int) -> Any:
    """Return a config whose heads have 64 values, the fewest that vLLM computes on CPUs."""
    built: Any = HYBRID["qwen3_5"].config(tokenizer, hidden_size)
    built.text_config.linear_key_head_dim = built.text_config.linear_value_head_dim = 64
    return built


def starting_model(directory: Path, seed: int) -> None:
    """Write a tiny Qwen3.5, whose layers carry a state, that answers `<answer>d</answer>` with a random digit."""
    build_tiny(
        "qwen3_5", directory, families={"qwen3_5": replace(HYBRID["qwen3_5"], config=hybrid_config)}, hidden_size=128,
        whole_tokens=("<answer>", "</answer>"), initializer_range=0.1, seed=seed,
    )  # fmt: skip
    teach_format(directory, seed)


@pytest.mark.slow
@pytest.mark.parametrize("engine", [(), ("rollout.engine=vllm", "dtype=bfloat16")], ids=["hf", "vllm"])
def test_layers_with_a_state_learn_from_shared_rows(engine: tuple[str, ...], tmp_path):
    """vLLM computes linear attention on CPUs in bfloat16 only."""
    if engine and find_spec("vllm") is None:
        pytest.skip("needs vllm")
    model = "model_name_or_path=tests.integration.test_digits:starting_model"
    summary = run("configs/digits.yaml", tmp_path, model, "disable_tqdm=true", *engine)
    assert summary["eval_before"][ACCURACY] <= 0.15
    assert summary["eval_after"][ACCURACY] >= 0.90
    steps = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()][1:]
    assert all(line["compute/shared_forwards"] > 0 and "compute/dense_forwards" not in line for line in steps)
