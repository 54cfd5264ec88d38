"""Runs that are resumed with other settings, data or models: each difference is applied, or refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rl_vlm.config.schema import RunConfig
from rl_vlm.data.fingerprint import data_fingerprint
from rl_vlm.data.samples import load_rows
from rl_vlm.errors import CheckpointError
from rl_vlm.model.fingerprint import model_fingerprint
from rl_vlm.run.run import Run, train
from tests.helpers import tiny_run
from tests.helpers.builders import sharp_checkpoint
from tests.helpers.tiny_run import make_config, metric_lines

WITHIN_WINDOW = {"gradient_accumulation_steps": 1, "steps_per_generation": 2}


def changed(checkpoint: str | Path, output_dir: Path, **settings: Any) -> RunConfig:
    return make_config(checkpoint, output_dir, max_steps=4, resume_from_checkpoint="auto", **settings)


def test_optimizer_settings_apply_from_the_resumed_step_on(tiny_checkpoint, tmp_path, caplog):
    train(make_config(tiny_checkpoint, tmp_path, max_steps=2, learning_rate=1e-3))
    settings = {"learning_rate": 4e-3, "weight_decay": 0.1, "adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-6}
    run = Run(changed(tiny_checkpoint, tmp_path, **settings))
    matrices, vectors = run.trainer.optimizer.torch_optimizer.param_groups
    for group in (matrices, vectors):
        assert (group["betas"], group["eps"], group["lr"]) == ((0.8, 0.9), 1e-6, 2e-3)  # half of the steps are left
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    run.run()
    run.close()
    # linear to 0: 1e-3 x (2/2, 1/2) in the first run of 2 steps, 4e-3 x (2/4, 1/4) in the longer one
    assert [line["learning_rate"] for line in metric_lines(tmp_path)] == pytest.approx([1e-3, 5e-4, 2e-3, 1e-3])
    assert "train.learning_rate 0.001 -> 0.004" in caplog.text and "train.max_steps 2 -> 4" in caplog.text


@pytest.mark.parametrize(
    ("began", "change"),
    [
        ({}, {"use_peft": True}),
        ({"use_peft": True, "lora_r": 4}, {"use_peft": True, "lora_r": 8}),
        ({"use_peft": True}, {"use_peft": True, "load_in_4bit": True}),
        ({}, {"freeze_vision_tower": True}),
        ({}, {"optim": "adafactor"}),
        ({}, {"seed": 1}),
        ({}, {"shuffle_dataset": False}),
        ({"beta": 0.1}, {"beta": 0.1, "sync_ref_model": True}),
        (WITHIN_WINDOW, WITHIN_WINDOW | {"reward_funcs": [tiny_run.CONSTANT]}),
        (WITHIN_WINDOW, WITHIN_WINDOW | {"beta": 0.1}),
        (WITHIN_WINDOW, WITHIN_WINDOW | {"temperature": 0.5}),
        (WITHIN_WINDOW, WITHIN_WINDOW | {"prompt_template": "{prompt} Be brief."}),
    ],
)
def test_settings_that_cannot_change_are_named(began, change, tiny_checkpoint, tmp_path):
    train(make_config(tiny_checkpoint, tmp_path, max_steps=1, **began))
    files = sorted(path.name for path in tmp_path.rglob("*"))
    (leaf,) = change.keys() - began.keys() or [name for name in change if change[name] != began.get(name)]
    with pytest.raises(CheckpointError, match=rf"checkpoint-1 cannot be resumed with changed settings:\n`\w+\.{leaf}`"):
        train(changed(tiny_checkpoint, tmp_path, **change))
    assert sorted(path.name for path in tmp_path.rglob("*")) == files


OWN_LOSS = "def loss(ratio_NK, inputs, algorithm):\n    return -ratio_NK * inputs.advantages_NK, {}\n"


def test_another_source_of_the_loss_applies_from_the_resumed_step_on(tiny_checkpoint, tmp_path, caplog):
    """Also within a window: completions do not depend on the loss."""
    path, run = tmp_path / "my.py", tmp_path / "run"
    path.write_text(OWN_LOSS)
    settings = {"loss_type": f"{path}:loss", **WITHIN_WINDOW}
    train(make_config(tiny_checkpoint, run, max_steps=1, **settings))
    path.write_text(f"# a comment\n{OWN_LOSS}")
    train(make_config(tiny_checkpoint, run, max_steps=2, resume_from_checkpoint="auto", **settings))
    assert "with the source" not in caplog.text
    path.write_text(OWN_LOSS.replace("-ratio_NK", "-2 * ratio_NK"))
    train(make_config(tiny_checkpoint, run, max_steps=3, resume_from_checkpoint="auto", **settings))
    assert f"resumed with a changed setting: algorithm.loss_type '{path}:loss' with the source " in caplog.text
    assert [line["step"] for line in metric_lines(run)] == [1, 2, 3]


@pytest.mark.parametrize(
    "change", [{"beta": 0.1}, {"reward_funcs": [tiny_run.CONSTANT]}, {"temperature": 0.5, "num_generations": 2}]
)
def test_settings_of_windows_can_change_between_windows(change, tiny_checkpoint, tmp_path):
    train(make_config(tiny_checkpoint, tmp_path, max_steps=1))
    train(changed(tiny_checkpoint, tmp_path, **change))
    lines = metric_lines(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert ("kl" in lines[-1]) == ("beta" in change)


def test_another_base_model_is_refused(tiny_checkpoint, tmp_path):
    shutil.copytree(tiny_checkpoint, tmp_path / "first")
    train(make_config(tmp_path / "first", tmp_path / "run", max_steps=1, beta=0.1))
    shutil.move(tmp_path / "first", tmp_path / "moved")
    train(changed(tmp_path / "moved", tmp_path / "run", beta=0.1))
    other = sharp_checkpoint("qwen2_5_vl", tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"checkpoint-4 cannot be resumed: the initial model has changed"):
        train(changed(other, tmp_path / "run", beta=0.1))


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    for i, row in enumerate(rows):
        row["image"].save(path.parent / f"{i}.png")
    path.write_text("".join(json.dumps(row | {"image": f"{i}.png"}) + "\n" for i, row in enumerate(rows)))
    return path


def test_other_rows_are_refused_and_the_same_rows_elsewhere_are_not(tiny_checkpoint, tmp_path):
    data = write_rows(tmp_path / "rows.jsonl", tiny_run.rows())
    train(make_config(tiny_checkpoint, tmp_path / "run", max_steps=1, dataset_name=str(data)))
    moved = data.rename(tmp_path / "moved.jsonl")
    train(changed(tiny_checkpoint, tmp_path / "run", dataset_name=str(moved)))
    lines = moved.read_text().splitlines(keepends=True)
    moved.write_text("".join([*lines[:5], lines[5].replace('"5"', '"6"'), *lines[6:]]))
    with pytest.raises(CheckpointError, match=r"the training data has changed .*\(12 rows, \w+, now 12 rows, \w+\)"):
        train(changed(tiny_checkpoint, tmp_path / "run", dataset_name=str(moved)))


def test_fingerprints_of_data_follow_the_rows_in_use(tmp_path):
    path = write_rows(tmp_path / "rows.jsonl", tiny_run.rows())
    rows = load_rows(make_config("none", tmp_path, dataset_name=str(path)).data, "train")
    everything = data_fingerprint(rows, range(12))
    assert everything == data_fingerprint(rows, range(12))
    assert data_fingerprint(rows, range(11)) != everything
    path.write_text(path.read_text().replace("3.png", "4.png"))
    assert data_fingerprint(load_rows(rows.config, "train"), range(12)) != everything


def test_a_fingerprint_sees_a_weight_that_differs(tiny_checkpoint, tmp_path):
    copy = shutil.copytree(tiny_checkpoint, tmp_path / "copy")
    model = make_config("none", tmp_path).model
    assert model_fingerprint(str(copy), model) == model_fingerprint(str(tiny_checkpoint), model)
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert model_fingerprint(str(copy), model) != model_fingerprint(str(tiny_checkpoint), model)


@pytest.mark.parametrize("damage", ["{not json", '{"no": "step"}', "[1]", "\\xff\\xfe"])
def test_a_damaged_line_of_metrics_is_left_out(damage, tiny_checkpoint, tmp_path, caplog):
    train(make_config(tiny_checkpoint, tmp_path, max_steps=2))
    path = tmp_path / "metrics.jsonl"
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + damage.encode("latin-1").decode("unicode_escape").encode("latin-1") + b"\n" + second)
    train(changed(tiny_checkpoint, tmp_path))
    assert [line["step"] for line in metric_lines(tmp_path)] == [1, 2, 3, 4]
    assert "metrics.jsonl, line 2 is damaged" in caplog.text


def test_a_copy_under_another_name_can_be_resumed(tiny_checkpoint, tmp_path):
    train(make_config(tiny_checkpoint, tmp_path, max_steps=2))
    good = shutil.copytree(tmp_path / "checkpoint-1", tmp_path / "checkpoint-1-good")
    train(make_config(tiny_checkpoint, tmp_path, max_steps=3, resume_from_checkpoint=str(good)))
    assert [line["step"] for line in metric_lines(tmp_path)] == [1, 2, 3]
    assert torch.load(tmp_path / "checkpoint-3" / "rank_0.pt", weights_only=True)
