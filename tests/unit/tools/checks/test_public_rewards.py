"""Reward functions in the form of those that other systems publish, on rows of their data: none is called broken."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rl_vlm.config.schema import DataConfig, RewardsConfig
from rl_vlm.data.samples import load_rows
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.tools.checks.diagnosis import collect
from rl_vlm.tools.checks.golds import check_golds
from rl_vlm.tools.checks.rewards.findings import function_findings
from rl_vlm.tools.checks.rewards.measure import measure_functions
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
}  # fmt: skip
"""Thirteen functions, one with two settings: its name and settings, a row of its system's data, and gold answers."""


@pytest.mark.parametrize("name", PUBLIC)
def test_a_correct_public_function_has_no_finding(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FOLDER)
    function, row, golds = PUBLIC[name]
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps(row(gold)) for gold in golds))
    data, rewards = DataConfig(dataset_name=str(path)), RewardsConfig.model_validate({"reward_funcs": [function]})
    functions = measure_functions(data, rewards, 100)
    found = collect(function_findings(functions))
    assert [(finding.kind, finding.what) for finding in found.findings if finding.kind != "slow"] == []
    assert max(functions[0].numbers()) == 1.0

    rows = load_rows(data, "train")
    facts = list(inspect_rows(rows))
    with RewardSuite(rewards) as suite:
        diagnosis = collect(check_golds(Split(usable_rows(rows, facts), facts), suite.functions))
    assert [(finding.kind, finding.what) for finding in diagnosis.findings] == []
    assert diagnosis.not_checked == []
