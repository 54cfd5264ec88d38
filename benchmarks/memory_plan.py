"""Peak memory of training steps: predicted on fake tensors, against measured in a fresh process.

    python benchmarks/memory_plan.py --json result.json

Each configuration takes two optimizer steps of its own groups. The measurement is the growth of the resident size from
before the model is made to its peak in the steps. No number of the prediction comes from a measurement.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

from benchmarks.common import environment, in_fresh_process, markdown_table
from benchmarks.flops import Workload
from benchmarks.report import finish, result_arguments
from benchmarks.shapes import SHAPES, build_checkpoint, make_group, make_prompt
from rl_vlm.config.schema import RunConfig
from rl_vlm.types import ScoredGroup

NUM_STEPS = 2
TOYS = {"qwen3_vl": "toy_qwen3_vl"}
LORA = {"use_peft": True, "lora_r": 16, "freeze_vision_tower": True}

CASES: dict[str, dict[str, Any]] = {
    "full, G 8": {},
    "full, G 2": {"G": 2},
    "full, G 16, completions of 100": {"G": 16, "completion": 100},
    "full, checkpointing": {"memory": {"gradient_checkpointing": True}},
    "full, small image": {"image": 100},
    "full, large image, checkpointing": {"image": 2000, "memory": {"gradient_checkpointing": True}},
    "full, group cut in micro-batches of 1,500": {"memory": {"micro_batch_tokens": 1500}},
    "full, beta": {"beta": 0.04},
    "LoRA": {"model": LORA},
    "LoRA, checkpointing, beta": {"model": LORA, "memory": {"gradient_checkpointing": True}, "beta": 0.04},
    "LoRA, G 16": {"model": LORA, "G": 16},
    "bfloat16, checkpointing": {"model": {"dtype": "bfloat16"}, "memory": {"gradient_checkpointing": True}},
    "400M, LoRA": {"shape": "medium", "model": LORA, "image": 300},
    "400M, full, checkpointing": {"shape": "medium", "image": 300, "memory": {"gradient_checkpointing": True}},
    "Qwen3-VL, full": {"shape": "qwen3_vl"},
    "Qwen3-VL, LoRA, checkpointing": {
        "shape": "qwen3_vl", "model": LORA, "memory": {"gradient_checkpointing": True}, "G": 4,
    },
}  # fmt: skip
"""What differs from full fine-tuning of the small model: G = 8, 1,000 image and 40 text tokens, completions of 200."""


def run_config(case: dict[str, Any], checkpoint: Path) -> RunConfig:
    work = workload(case)
    return RunConfig.model_validate(
        {
            "model": {"model_name_or_path": str(checkpoint), **case.get("model", {})},
            "algorithm": {"beta": case.get("beta", 0.0)},
            "rollout": {"num_generations": work.num_generations, "max_completion_length": work.completion_tokens},
            "memory": {"micro_batch_tokens": 16384, **case.get("memory", {})},
            "train": case.get("train", {}),
        }
    )


def workload(case: dict[str, Any]) -> Workload:
    return Workload(case.get("image", 1000), 40, case.get("completion", 200), case.get("G", 8))


def groups_of(case: dict[str, Any], checkpoint: Path) -> list[ScoredGroup]:
    shape = SHAPES[case.get("shape", "small")]
    return [make_group(make_prompt(checkpoint, workload(case), shape), workload(case))]


def predict(case: dict[str, Any], checkpoint: Path) -> dict[str, Any]:
    """Predict the peak of the steps, in bytes, and note the seconds that it takes."""
    from rl_vlm.plan.trace import trace_steps

    groups, start = groups_of(case, checkpoint), time.perf_counter()
    traces = trace_steps(run_config(case, checkpoint), str(checkpoint), groups, NUM_STEPS)
    return {"peak": max(trace.peak for trace in traces), "seconds": time.perf_counter() - start}


def measure(case: dict[str, Any], checkpoint: Path) -> int:
    """Take the steps, and return by how many bytes the resident size grew."""
    from benchmarks.resident import Resident

    toy = case | {"shape": TOYS.get(case.get("shape", "small"), "toy"), "image": 4, "completion": 4}
    directory = build_checkpoint(SHAPES[toy["shape"]], checkpoint / "toy")
    take_steps(toy, directory, groups_of(toy, directory))  # imports modules, and starts libraries
    groups = groups_of(case, checkpoint)
    resident = Resident()
    with resident.stage("steps"):
        take_steps(case, checkpoint, groups)
    return resident.peaks["steps"]["anonymous"]


def take_steps(case: dict[str, Any], checkpoint: Path, groups: Sequence[ScoredGroup]) -> None:
    """Load the models of a case and take its steps."""
    from rl_vlm.model.loading import load_policy
    from rl_vlm.model.reference import load_reference
    from rl_vlm.plan.live import LiveBytes
    from rl_vlm.plan.trace import TracedTrainer

    config = run_config(case, checkpoint)
    policy = load_policy(config, str(checkpoint))
    reference = load_reference(config, str(checkpoint), policy, resumed=None)
    for model in [policy, *([reference.frozen] if reference and reference.frozen else [])]:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # else the file of the checkpoint backs it
    trainer = TracedTrainer(config, policy, reference, groups, NUM_STEPS, LiveBytes())
    for _ in range(NUM_STEPS):
        trainer.step()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    result_arguments(parser)
    return parser.parse_args(arguments)


def compare(name: str) -> dict[str, Any]:
    """Predict and measure a case, each on the same checkpoint."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = build_checkpoint(SHAPES[case.get("shape", "small")], Path(directory))
        predicted = predict(case, checkpoint)
        measured = in_fresh_process("memory_plan.py", ["--measure", directory, "--cases", name])
    return {"case": name, "predicted": predicted["peak"], "measured": measured, "seconds": predicted["seconds"]}


def table(rows: Sequence[dict[str, Any]]) -> str:
    errors = [row["predicted"] / row["measured"] - 1 for row in rows]
    lines = [
        [row["case"], f"{row['predicted'] / 2**20:,.0f}", f"{row['measured'] / 2**20:,.0f}", f"{error:+.1%}"]
        for row, error in zip(rows, errors, strict=True)
    ]
    text = markdown_table(["configuration", "predicted, MiB", "measured, MiB", "error"], lines)
    return text + f"\n\nMedian of absolute errors: {median(map(abs, errors)):.1%}"


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    if args.measure:
        print(measure(CASES[args.cases[0]], args.measure))
        return
    rows = []
    for name in args.cases:
        rows.append(compare(name))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    finish({"benchmark": "memory_plan", "rows": rows, **environment()}, table(rows), args)


if __name__ == "__main__":
    main()
