"""Made-up run directories, with the files that a report reads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from rl_vlm.config import yaml_text
from rl_vlm.log.completions import window_path, write_rows
from rl_vlm.log.files import METRICS
from rl_vlm.log.metrics import MetricsLog
from rl_vlm.run.evidence import read_evidence
from rl_vlm.run.verdict import Evidence

SETTINGS: dict[str, Any] = {"rewards": {"reward_funcs": ["exact_match"]}, "train": {"max_steps": 2}}
REWARDS = {0: [[0.0, 0.0], [0.0, 1.0]], 1: [[1.0, 1.0], [1.0, 0.0]]}
"""By step: two prompts of two completions."""


def completion_row(
    step: int, prompt: int, index: int, score: float | None, more: Mapping[str, Any] = {}
) -> dict[str, Any]:
    """A row of a completions file; `more` replaces columns."""
    row: dict[str, Any] = {
        "step": step, "group_id": f"{step}/0/row-{prompt}", "sample_id": f"row-{prompt}", "completion_index": index,
        "policy_version": step, "prompt": f"user: <image> Question {prompt}", "completion": f"answer {index}",
        "finish_reason": "stop", "prompt_length": 7, "completion_length": 3, "image_sizes": [[40, 20]],
        "model_image_sizes": [[80, 40]], "exact_match": score, "reward": score, "advantage": 0.5, "fault": None,
        "data/solution": "7", "data/data_source": f"source-{prompt}", "images": [f"images/{prompt}.jpg"],
    }  # fmt: skip
    return row | dict(more)


def write_run(folder: Path, settings: dict[str, Any] = SETTINGS, more: Mapping[str, Any] = {}) -> Path:
    """Write a run of two windows; `more` replaces columns of all of its completions."""
    (folder / "completions" / "images").mkdir(parents=True)
    for step, groups in REWARDS.items():
        rows = [
            completion_row(step, p, i, reward, more) for p, group in enumerate(groups) for i, reward in enumerate(group)
        ]
        write_rows(window_path(folder, step), rows)
    for prompt in range(2):
        Image.new("RGB", (40, 20), (200, 60 * prompt, 0)).save(folder / "completions" / "images" / f"{prompt}.jpg")
    held_out = {
        "eval_num_samples": 4.0,
        "eval_rewards/exact_match/ci_low": 0.0,
        "eval_rewards/exact_match/ci_high": 0.5,
    }
    lines = [
        {"step": 0, **held_out, "eval_rewards/exact_match/mean": 0.1},
        {"step": 1, "reward": 0.25, "time/step": 2.0, "time/training": 1.5, "reward_faults/exact_match/nan": 1.0},
        {"step": 2, "reward": 0.75, "time/step": 2.0, **held_out, "eval_rewards/exact_match/mean": 0.9},
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.yaml").write_text(yaml_text.dump(settings))
    dropped = [{"data": "rows.jsonl", "sample_id": f"row-{i}", "reason": "its prompt is too long"} for i in (7, 8, 9)]
    (folder / "dropped_prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in dropped))
    (folder / "summary.json").write_text('{"optimizer_steps": 2}')
    return folder


def evidence_in(folder: Path, **options: Any) -> Evidence:
    """The evidence of all steps of a run."""
    return read_evidence(folder, MetricsLog(folder / METRICS).read(), **options)
