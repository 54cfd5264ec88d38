"""Peak memory of training steps: predicted on fake tensors, against measured in a fresh process.

    python benchmarks/memory_plan.py
    python benchmarks/memory_plan.py --docs                 put the table in docs/memory.md
    python benchmarks/memory_plan.py --docs --cases LoRA    measure a case again, and keep the others

Each configuration takes two optimizer steps of its own groups. The measurement is the growth of the resident size from
before the model is made to its peak in the steps. No number of the prediction comes from a measurement.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

from benchmarks.common import ROOT, environment, in_fresh_process, markdown_table
from benchmarks.flops import Workload
from benchmarks.report import RESULTS, fill, measured_on
from benchmarks.shapes import SHAPES, build_checkpoint, make_group, make_prompt
from rl_vlm.config.schema import RunConfig
from rl_vlm.types import ScoredGroup

NUM_STEPS = 2
DEFAULT_SHAPE = "six_layers"
RESULT = RESULTS / "memory_plan.json"
PAGE = ROOT / "docs" / "memory.md"
TOYS = {"qwen3_vl": "toy_qwen3_vl"}
LORA = {"use_peft": True, "lora_r": 16, "freeze_vision_tower": True}

CHECKPOINTING = {"gradient_checkpointing": True}
MEDIUM = {"shape": "medium", "image": 300, "completion": 100, "G": 4}

CASES: dict[str, dict[str, Any]] = {
    "full, G 8": {},
    "full, G 2": {"G": 2},
    "full, G 16, completions of 100": {"G": 16, "completion": 100},
    "full, checkpointing": {"memory": CHECKPOINTING},
    "full, small image": {"image": 100},
    "full, large image, checkpointing": {"image": 2000, "memory": CHECKPOINTING},
    "full, group cut in micro-batches of 1,500": {"memory": {"micro_batch_tokens": 1500}},
    "full, beta": {"beta": 0.04},
    "full, Adafactor": {"train": {"optim": "adafactor"}},
    "full, 8-bit AdamW, small image, G 2": {"train": {"optim": "adamw_8bit"}, "image": 100, "G": 2},
    "bfloat16, checkpointing": {"model": {"dtype": "bfloat16"}, "memory": CHECKPOINTING},
    "LoRA": {"model": LORA},
    "LoRA, checkpointing, beta": {"model": LORA, "memory": CHECKPOINTING, "beta": 0.04},
    "LoRA, G 16": {"model": LORA, "G": 16},
    "400M, LoRA, G 4": {**MEDIUM, "model": LORA},
    "400M, full, checkpointing, G 4": {**MEDIUM, "memory": CHECKPOINTING},
    "Qwen3-VL, full": {"shape": "qwen3_vl"},
    "Qwen3-VL, LoRA, checkpointing, G 4": {"shape": "qwen3_vl", "model": LORA, "memory": CHECKPOINTING, "G": 4},
}
"""What differs from full fine-tuning of a Qwen2.5-VL of 56 million parameters with AdamW: G = 8, 1,000 image and 40
text tokens, completions of 200."""


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
    shape = SHAPES[case.get("shape", DEFAULT_SHAPE)]
    return [make_group(make_prompt(checkpoint, workload(case), shape), workload(case))]


def predict(case: dict[str, Any], checkpoint: Path) -> int:
    """Predict the peak of the steps, in bytes."""
    from rl_vlm.plan.tracing.step import trace_steps

    traces = trace_steps(run_config(case, checkpoint), str(checkpoint), groups_of(case, checkpoint), NUM_STEPS)
    return max(block.peak for trace in traces for block in trace.values())


def measure(case: dict[str, Any], checkpoint: Path) -> int:
    """Take the steps, and return by how many bytes the resident size grew."""
    from benchmarks.resident import Resident

    toy = case | {"shape": TOYS.get(case.get("shape", DEFAULT_SHAPE), "toy"), "image": 4, "completion": 4}
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
    from rl_vlm.plan.tracing.live import LiveBytes
    from rl_vlm.plan.tracing.step import TracedSteps

    config = run_config(case, checkpoint)
    policy = load_policy(config, str(checkpoint))
    reference = load_reference(config, str(checkpoint), policy, resumed=None)
    for model in [policy, *([reference.frozen] if reference and reference.frozen else [])]:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()  # else the file of the checkpoint backs it
    assert config.memory.micro_batch_tokens != "auto"
    tokens = config.memory.micro_batch_tokens
    steps = TracedSteps(config, policy, reference, groups, NUM_STEPS, LiveBytes(), tokens)
    for _ in range(NUM_STEPS):
        steps.take()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--docs", action="store_true", help="put the table in docs/memory.md")
    return parser.parse_args(arguments)


def compare(name: str) -> dict[str, int]:
    """Predict and measure a case, each on the same checkpoint."""
    case = CASES[name]
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = build_checkpoint(SHAPES[case.get("shape", DEFAULT_SHAPE)], Path(directory))
        predicted = predict(case, checkpoint)
        measured = in_fresh_process("memory_plan.py", ["--measure", directory, "--cases", name])
    return {"predicted": predicted, "measured": measured}


def table(cases: Mapping[str, dict[str, int]]) -> str:
    errors = {name: case["predicted"] / case["measured"] - 1 for name, case in cases.items()}
    rows = [
        [name, f"{case['predicted'] / 2**20:,.0f}", f"{case['measured'] / 2**20:,.0f}", f"{errors[name]:+.1%}"]
        for name, case in cases.items()
    ]
    text = markdown_table(["configuration", "predicted, MiB", "measured, MiB", "error"], rows)
    absolute = [abs(error) for error in errors.values()]
    return f"{text}\n\nAbsolute errors: median {median(absolute):.1%}, largest {max(absolute):.1%}."


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    if args.measure:
        print(measure(CASES[args.cases[0]], args.measure))
        return
    found = {}
    for name in args.cases:
        found[name] = compare(name)
        print(name, json.dumps(found[name]), file=sys.stderr, flush=True)
        if args.docs:
            keep(name, found[name])
    print(table(found))


def keep(name: str, case: dict[str, int]) -> None:
    """Add a case to docs/benchmarks/memory_plan.json, and put the table of its cases in docs/memory.md."""
    kept = json.loads(RESULT.read_text())["cases"] if RESULT.exists() else {}
    cases = {each: case if each == name else kept[each] for each in CASES if each in {*kept, name}}
    result = {"benchmark": "memory_plan", "cases": cases, **environment()}
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(fill(PAGE.read_text(), "memory_plan", f"{table(cases)}\n\n{measured_on([result])}"))


if __name__ == "__main__":
    main()
