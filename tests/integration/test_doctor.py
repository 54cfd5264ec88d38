"""The doctor finds what is planted and nothing else: in rows, in the model, and in the two steps of the run."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

from launch import cli
from rl_vlm.config.schema import RunConfig
from rl_vlm.passes.proof import OTHER_PROMPTS
from rl_vlm.plan.weights import count_weights
from rl_vlm.run.run import train
from rl_vlm.tools.checks.diagnosis import Diagnosis
from rl_vlm.tools.checks.machine import checkpoint_bytes
from rl_vlm.tools.checks.table import examine
from tests.helpers import tiny_run
from tests.helpers.builders import sharp_checkpoint
from tests.helpers.flex_on_cpu import mask_off_by_a_block, use_flex_attention
from tests.integration.planted_rows import KINDS, MAX_PIXELS, MAX_TOKENS, REWARD, write_planted

LEARNABLE = f"{__name__}:readable"


def readable(completions: list[str], solution: list[str]) -> list[float]:
    """1.0 for a completion that holds the solution."""
    return [float(gold in text) for text, gold in zip(completions, solution, strict=True)]


def strict(completions: list[str], label: list[str]) -> list[float]:
    return [float(gold.strip() in text) for text, gold in zip(completions, label, strict=True)]


def broken(completions: list[str]) -> list[float]:
    raise OSError("the service is down")


def planted_config(folder: Path, checkpoint: Path, **settings: Any) -> RunConfig:
    given = {
        "dataset_name": str(folder / "train.jsonl"), "eval_dataset_name": str(folder / "test.jsonl"),
        "reward_funcs": [REWARD, "format_tags"], "max_image_pixels": MAX_PIXELS, "max_prompt_length": MAX_TOKENS,
    }  # fmt: skip
    return tiny_run.make_config(checkpoint, folder / "run", **given, **settings)


def rows_found(diagnosis: Diagnosis) -> dict[int, str]:
    """Kind by row of the training data; a row that is found twice has both."""
    kinds: dict[int, str] = {}
    for found in diagnosis.findings:
        assert found.data is not None and found.data.endswith("train.jsonl") and found.row is not None, found
        kinds[found.row] = "; ".join(filter(None, [kinds.get(found.row), found.kind]))
    return kinds


def found(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    return [(finding.severity, finding.kind) for finding in diagnosis.findings]


@pytest.mark.parametrize("num_rows, num_each", [(200, 2), pytest.param(10_000, 20, marks=pytest.mark.slow)])
def test_planted_faults_and_nothing_else(num_rows: int, num_each: int, tiny_checkpoint: Path, tmp_path: Path):
    planted = write_planted(tmp_path, num_rows, num_each)
    diagnosis = examine(planted_config(tmp_path, tiny_checkpoint), with_model=False, decode=True)
    assert rows_found(diagnosis) == planted
    assert sorted(planted.values()) == sorted(KINDS * num_each)
    assert all(finding.remedy and f"row {finding.row}" in finding.what for finding in diagnosis.findings)
    assert diagnosis.status == 2


def test_without_decoding_only_equal_files_are_duplicates(tiny_checkpoint: Path, tmp_path: Path):
    planted = write_planted(tmp_path, 200, 2)
    diagnosis = examine(planted_config(tmp_path, tiny_checkpoint), with_model=False)
    missed = planted.keys() - rows_found(diagnosis).keys()
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    assert [json.loads(lines[row])["image"][-4:] for row in missed] == [".bmp"]


def test_rows_to_drop_are_warnings(tiny_checkpoint: Path, tmp_path: Path):
    write_planted(tmp_path, 200, 2)
    diagnosis = examine(planted_config(tmp_path, tiny_checkpoint, on_bad_row="drop"), with_model=False)
    assert {severity for severity, _ in found(diagnosis)} == {"warning"}
    assert diagnosis.status == 1


def config_of_run(checkpoint: Path, output_dir: Path, **settings: Any) -> RunConfig:
    return tiny_run.make_config(
        checkpoint, output_dir, **{"reward_funcs": [LEARNABLE], "eval_dataset_name": tiny_run.HELD_OUT_ROWS} | settings
    )


def test_a_sound_run_is_clean_and_leaves_nothing(tiny_checkpoint: Path, tmp_path: Path):
    diagnosis = examine(config_of_run(tiny_checkpoint, tmp_path / "run"))
    assert (diagnosis.findings, diagnosis.status) == ([], 0)
    (not_checked,) = diagnosis.not_checked
    assert not_checked.startswith(f"before the first step: {OTHER_PROMPTS} ")
    assert "two steps of the run on 8 rows, and a checkpoint" in diagnosis.checked
    proven = [line for line in diagnosis.checked if line.startswith("before the first step: ")]
    assert len(proven) == 7 and "own forward differ in log-probs by" in proven[1]
    assert list(tmp_path.iterdir()) == []


def blinded(checkpoint: Path, directory: Path) -> Path:
    """A copy of the checkpoint whose projector gives zeros for every image."""
    directory.mkdir()
    for path in checkpoint.iterdir():
        (directory / path.name).write_bytes(path.read_bytes())
    weights = load_file(directory / "model.safetensors")
    last = [name for name in weights if "merger.mlp.2" in name]
    assert len(last) == 2
    weights |= {name: torch.zeros_like(weights[name]) for name in last}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_a_model_that_ignores_pixels_is_found(tiny_checkpoint: Path, tmp_path: Path):
    diagnosis = examine(config_of_run(blinded(tiny_checkpoint, tmp_path / "blind"), tmp_path / "run"))
    assert found(diagnosis) == [("error", "pixels that do not reach the model")] * 4
    assert [finding.row for finding in diagnosis.findings] == [0, 1, 2, 3]


def test_a_mixture_with_equal_ids_and_unlike_columns(tiny_checkpoint: Path, tmp_path: Path):
    """The two steps have rows of each source, ids that differ and every column, as the run does."""
    Image.new("RGB", (32, 32)).save(tmp_path / "0.png")
    for name, column in (("a", "solution"), ("b", "label")):
        rows = [{"id": str(i), "prompt": f"{i} of {name}?", "image": "0.png", column: str(i)} for i in range(12)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    names = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    rewards = [
        {"function": "exact_match", "applies_to": {"data_source": names[0]}},
        {"function": f"{__name__}:strict", "applies_to": {"data_source": names[1]}},
    ]
    settings = {"dataset_name": names, "reward_funcs": rewards, "eval_dataset_name": None}
    diagnosis = examine(tiny_run.make_config(tiny_checkpoint, tmp_path / "run", **settings))
    assert [f for f in diagnosis.findings if f.severity == "error"] == []
    assert any(line.startswith("two steps of the run on") for line in diagnosis.checked)


def test_a_run_that_cannot_take_a_step_is_found(tiny_checkpoint: Path, tmp_path: Path):
    diagnosis = examine(config_of_run(tiny_checkpoint, tmp_path / "run", reward_funcs=[f"{__name__}:broken"]))
    (finding,) = diagnosis.findings
    assert (finding.severity, finding.kind) == ("error", "two steps of the run")
    assert "because reward functions failed: broken/exception 5" in finding.what


def test_a_slower_way_is_a_warning_with_both_numbers(tmp_path: Path, monkeypatch):
    checkpoint = sharp_checkpoint("qwen2_5_vl", tmp_path / "model")
    use_flex_attention(monkeypatch, mask_off_by_a_block)
    diagnosis = examine(config_of_run(checkpoint, tmp_path / "run", prefix_sharing="auto"))
    (finding,) = diagnosis.findings
    assert (finding.severity, finding.kind) == ("warning", "rows that are not proven")
    assert re.search(r"differ in log-probs by \S+ \(bound 1.0e-05\)", finding.what)
    assert finding.what.endswith("The run goes on with dense rows, which is slower")


def test_prompts_beyond_the_token_budget(tiny_checkpoint: Path, tmp_path: Path):
    diagnosis = examine(config_of_run(tiny_checkpoint, tmp_path / "run", micro_batch_tokens=8))
    kinds = found(diagnosis)
    assert kinds[:-1] == [("error", "prompt beyond the token budget")] * tiny_run.NUM_ROWS
    assert kinds[-1] == ("error", "two steps of the run")


def test_a_model_too_large_for_the_machine_is_not_loaded(tiny_checkpoint: Path, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("rl_vlm.tools.checks.model.free_bytes", lambda: 1000)
    diagnosis = examine(config_of_run(tiny_checkpoint, tmp_path / "run"))
    assert diagnosis.findings == []
    (note,) = diagnosis.not_checked
    assert note.startswith("pixels, token budget and two steps: the model is too large for this machine")


def test_the_size_of_a_checkpoint_is_that_of_its_files(tiny_checkpoint: Path, tmp_path: Path):
    config = config_of_run(tiny_checkpoint, tmp_path / "run", max_steps=1, reward_funcs=[tiny_run.TOKEN_SUM])
    train(config)
    written = tmp_path / "run" / "checkpoint-1"
    size = sum(path.stat().st_size for path in written.rglob("*.safetensors"))
    assert checkpoint_bytes(config, count_weights(config, str(tiny_checkpoint))) == pytest.approx(size, rel=0.02)


def test_a_full_disk(tiny_checkpoint: Path, tmp_path: Path, monkeypatch):
    config = config_of_run(tiny_checkpoint, tmp_path / "run", max_steps=4, save_steps=1)
    one = checkpoint_bytes(config, count_weights(config, str(tiny_checkpoint)))
    kinds = {}
    for free in (one - 1, one, 4 * one - 1, 4 * one):
        monkeypatch.setattr("rl_vlm.tools.checks.machine.free_bytes", lambda path, free=free: free)
        kinds[free] = found(examine(config, with_model=False))
    error, warning = [("error", "disk space")], [("warning", "disk space")]
    assert list(kinds.values()) == [error, warning, warning, []]


def test_the_command(tiny_checkpoint: Path, tmp_path: Path, capsys):
    config = tmp_path / "run.yaml"
    config.write_text(
        f"model: {{model_name_or_path: {tiny_checkpoint}}}\ndata: {{dataset_name: '{tiny_run.ROWS}'}}\n"
        f"rewards: {{reward_funcs: '{LEARNABLE}'}}\ntrain: {{prompts_per_step: 2, output_dir: {tmp_path / 'run'}}}\n"
    )
    arguments = ["doctor", str(config), "--no-model", "--json", str(tmp_path / "found.json")]
    assert cli.main(arguments) == 0
    assert capsys.readouterr().out.endswith("\nnothing found\n")
    assert cli.main([*arguments, "max_prompt_length=20"]) == 2
    assert "\nerror: no prompt fits\n" in capsys.readouterr().out
    content = json.loads((tmp_path / "found.json").read_text())
    assert content["status"] == 2
    assert content["findings"][0].keys() == {"severity", "kind", "what", "remedy", "data", "row"}


def test_the_quickstart_is_clean(capsys):
    assert cli.main(["doctor", "configs/digits.yaml"]) == 0
    assert capsys.readouterr().out.endswith("\nnothing found\n")
