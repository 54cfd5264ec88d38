"""Reward functions in the form of those that other systems publish, on rows of their data: none is called broken."""

import json
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from rl_vlm.config.schema import DataConfig, RewardsConfig, RewardSpec
from rl_vlm.data.samples import load_rows
from rl_vlm.reward.function import image_grid
from rl_vlm.reward.made_up import made_up_group, state_outside
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.tools.checks.diagnosis import collect
from rl_vlm.tools.checks.golds import check_golds
from rl_vlm.tools.checks.rewards.findings import examine_functions
from rl_vlm.tools.checks.rows import Split, inspect_rows, usable_rows

FOLDER = Path(__file__).parents[3] / "data" / "public_rewards"
NUM_ROWS = 8
TEXTS = ["a red cup", "The dog", "12", "3.5", "B", "two", "left of it", "Paris"]
MATHS = ["12", r"\frac{1}{2}", "3.5", r"2\sqrt{3}", "-7", "40", r"\frac{3}{4}", "100"]
NUMBERS = ["18", "3", "70000", "540", "20", "64", "-260", "16.5"]
BOXES = [[13 * i, 9 * i, 13 * i + 12, 9 * i + 8] for i in range(NUM_ROWS)]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def of_trl(gold: str) -> dict[str, Any]:
    return {"prompt": [user("What is x?")], "solution": gold}


def of_vlm_r1(gold: str) -> dict[str, Any]:
    turns = [{"from": "human", "value": "Which one?"}, {"from": "gpt", "value": gold}]
    return {"conversations": turns, "accu_reward_method": "default"}


def of_easyr1(gold: str) -> dict[str, Any]:
    return {"problem": "What is x?", "answer": gold}


def of_verl(gold: str) -> dict[str, Any]:
    return {
        "data_source": "openai/gsm8k", "prompt": [user("How many?")], "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": gold},
        "extra_info": {"split": "train", "answer": f"It is so many.\n#### {gold}"},
    }  # fmt: skip


def of_ms_swift(gold: str) -> dict[str, Any]:
    return {"messages": [user("What is x?")], "solution": gold}


def fenced(box: list[int]) -> str:
    return f"<answer>```json\n{json.dumps([{'bbox_2d': box, 'label': 'cup'}])}\n```</answer>"


PUBLIC: dict[str, tuple[str | dict[str, Any], Callable[[str], dict[str, Any]], list[str]]] = {
    "TRL, accuracy": ("trl.py:accuracy_reward", of_trl, [f"${gold}$" for gold in MATHS[:4]]),
    "TRL, format": ("trl.py:think_format_reward", of_trl, MATHS),
    "VLM-R1, format": ("vlm_r1.py:format_reward", of_vlm_r1, TEXTS),
    "VLM-R1, boxes": ("vlm_r1.py:iou_reward", of_vlm_r1, [f"<answer>{box}</answer>" for box in BOXES]),
    "VLM-R1, accuracy": ("vlm_r1.py:accuracy_reward", of_vlm_r1, [f"<answer> {text} </answer>" for text in TEXTS]),
    "VLM-R1, accuracy by a method, without its column": (
        "vlm_r1_jsonl.py:accuracy_reward", lambda gold: of_vlm_r1(gold) | {"accu_reward_method": None},
        [f"<answer> {text} </answer>" for text in TEXTS],
    ),
    "VLM-R1, boxes as JSON": ("vlm_r1.py:detection_reward", of_vlm_r1, [fenced(box) for box in BOXES]),
    "EasyR1, maths": ("easyr1_math.py:compute_score", of_easyr1, MATHS),
    "EasyR1, R1-V": ("easyr1_r1v.py:compute_score", of_easyr1, TEXTS),
    "verl, GSM8K": ("verl_gsm8k.py:compute_score", of_verl, NUMBERS),
    "verl, GSM8K, last number": (
        {"function": "verl_gsm8k.py:compute_score", "kwargs": {"method": "flexible"}}, of_verl, NUMBERS,
    ),
    "verl, Geometry3K": ("verl_geo3k.py:compute_score", of_verl, MATHS),
    "verl, DAPO": ("verl_dapo.py:compute_score", of_verl, MATHS),
    "ms-swift, accuracy": ("ms_swift.py:MathAccuracy", of_ms_swift, [rf"\boxed{{{gold}}}" for gold in MATHS[:4]]),
    "ms-swift, format": ("ms_swift.py:Format", of_ms_swift, MATHS),
    "ms-swift, format, by its registered name": ("ms_swift.py:mine_format", of_ms_swift, MATHS),
}  # fmt: skip
"""Functions, one with two settings: its name and settings, a row of its system's data, and gold answers."""


@pytest.mark.parametrize("name", PUBLIC)
@pytest.mark.ci
def test_a_correct_public_function_has_no_finding(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    function, row, golds = PUBLIC[name]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row(gold)) for gold in golds))
    data, rewards = DataConfig(dataset_name=str(path)), RewardsConfig.model_validate({"reward_funcs": [function]})
    functions, _, found = examine_functions(data, rewards, 100)
    assert [(finding.kind, finding.what) for finding in found.findings if finding.kind != "slow"] == []
    assert max(functions[0].numbers()) == 1.0

    rows = load_rows(data, "train")
    facts = list(inspect_rows(rows))
    with RewardSuite(rewards) as suite:
        diagnosis = collect(check_golds(Split(usable_rows(rows, facts), facts), suite.functions))
    assert [(finding.kind, finding.what) for finding in diagnosis.findings] == []
    assert diagnosis.not_checked == []


def boxes_of_vlm_r1(folder: Path) -> DataConfig:
    """Write rows with images of 56 x 28 pixels, and with a box in them."""
    Image.new("RGB", (56, 28)).save(folder / "scene.png")
    golds = [[0, 0, 10 + i, 20] for i in range(NUM_ROWS)]
    rows = [{"image": "scene.png"} | of_vlm_r1(f"<answer>{gold}</answer>") for gold in golds]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return DataConfig(dataset_name=str(folder / "rows.jsonl"))


def test_boxes_of_vlm_r1_are_scaled_from_the_image_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(FOLDER)
    data = boxes_of_vlm_r1(tmp_path)
    rewards = RewardsConfig(reward_funcs=["vlm_r1_module.py:Qwen2VLModule.iou_reward"])
    sample = load_rows(data, "train")[0]
    assert sample.image_files == [str(tmp_path / "scene.png")]
    group = made_up_group(sample, ["<answer>[0, 0, 20, 40]</answer>", "<answer>[0, 0, 10, 20]</answer>", "none"])
    with RewardSuite(rewards) as suite:
        (function,) = suite.functions
        assert (function.system, function.form) == ("VLM-R1", "messages")
        seen = replace(group.prompt, image_sizes=[(112, 56)])  # twice as large
        table = suite.score([replace(group, prompt=seen)], state_outside())
        assert table.scores_PGF.flatten().tolist() == [1.0, 0.25, 0.0]
        odd = replace(group.prompt, image_sizes=[(61, 115)])  # no multiple of 14: 61 / 14 * 14 is 60 in floats
        assert image_grid(odd) == [1, Fraction(115, 14), Fraction(61, 14)]
        assert image_grid(seen) == [1, 4, 8]
    functions, _, found = examine_functions(data, rewards, 100)
    assert [finding.kind for finding in found.findings] == []
    assert [(measured.name, measured.num_rows) for measured in functions] == [("iou_reward", NUM_ROWS)]


@pytest.mark.parametrize("timeout", [None, 60.0], ids=["here", "in a worker"])
def test_the_method_of_vlm_r1_is_the_rows_or_the_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, timeout: float | None
) -> None:
    monkeypatch.chdir(FOLDER)
    texts = ["<answer>B</answer>", "<answer>(B) it is</answer>"]
    scores = []
    for given, kwargs in (({}, {}), ({"accu_reward_method": "mcq"}, {}), ({}, {"accu_reward_method": "mcq"})):
        path = tmp_path / "rows.jsonl"
        path.write_text(json.dumps({"prompt": "Which?", "solution": "<answer>B</answer>", **given}))
        rows = load_rows(DataConfig(dataset_name=str(path)), "train")
        spec = RewardSpec(function="vlm_r1_jsonl.py:accuracy_reward", kwargs=kwargs, timeout=timeout)
        with RewardSuite(RewardsConfig(reward_funcs=[spec])) as suite:
            table = suite.score([made_up_group(rows[0], texts)], state_outside())
        scores.append(table.scores_PGF.flatten().tolist())
    assert scores == [[1.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
