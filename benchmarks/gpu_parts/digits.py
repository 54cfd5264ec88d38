"""The digits quickstart, and its LoRA run from an early checkpoint: held-out accuracy, and seconds by stage."""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT
from benchmarks.gpu_parts.bench import Bench
from rl_vlm.config.load import load_config
from rl_vlm.run.run import train

HEAD = ("run", "accuracy_before", "accuracy_after", "steps", "seconds", "stages")
ACCURACY = "eval_rewards/exact_match/mean"
HALF_TRAINED = 20
"""Step of the checkpoint that LoRA starts from."""
SMALL = [
    "train.max_steps=2", "train.prompts_per_step=4", "train.save_steps=2", "train.eval_steps=0",
    "data.eval_dataset_name=null",
]  # fmt: skip


def measure(bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield a row for each of the two runs."""
    with tempfile.TemporaryDirectory() as directory:
        half_trained = Path(directory) / "digits" / f"checkpoint-{2 if bench.small else HALF_TRAINED}"
        starts = {"digits": [], "digits_lora": [f"model.model_name_or_path={half_trained}"]}
        for name in bench.in_time({name: name for name in starts}):
            output_dir = Path(directory) / name
            options = [*starts[name], *(SMALL if bench.small else []), f"train.output_dir={output_dir}"]
            summary = train(load_config(ROOT / "configs" / f"{name}.yaml", options))
            yield {"run": name} | figures(summary, output_dir)


def figures(summary: dict[str, Any], output_dir: Path) -> dict[str, Any]:
    """Return the held-out accuracy before and after, and the time of all steps by stage."""
    stages: Counter[str] = Counter()
    for line in map(json.loads, (output_dir / "metrics.jsonl").read_text().splitlines()):
        stages.update({key.removeprefix("time/"): value for key, value in line.items() if key.startswith("time/")})
    return {
        "accuracy_before": (summary["eval_before"] or {}).get(ACCURACY),
        "accuracy_after": (summary["eval_after"] or {}).get(ACCURACY),
        "steps": summary["optimizer_steps"],
        "seconds": summary["train_seconds"],
        "stages": ", ".join(f"{stage} {seconds:.1f}" for stage, seconds in stages.most_common()),
    }
