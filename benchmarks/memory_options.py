"""Peak memory and time of a step under each option that saves memory, beside a run without it.

    python benchmarks/memory_options.py --write        write the table to docs/memory.md, behind its marker
    python benchmarks/memory_options.py --shape toy    a tiny model, to check the benchmark itself

Each case is a process of its own: it loads the model, takes a step, which makes the optimizer's state, and measures the
growth of the anonymous resident memory at its peak in the second step.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

from benchmarks.common import ROOT, in_fresh_process, markdown_table
from benchmarks.flops import Workload
from benchmarks.resident import Resident
from benchmarks.shapes import SHAPES, build_checkpoint, make_group, make_prompt, micro_batch
from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.ddp import DDP
from rl_vlm.distributed.optimizer import Optimizer
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.model.loading import load_policy
from rl_vlm.types import Forward

WORK = Workload(image_tokens=256, text_tokens=40, completion_tokens=64, num_generations=4)
PAGE = ROOT / "docs" / "memory.md"
BEGINS, ENDS = "<!-- memory_options -->", "<!-- end -->"
CASES: dict[str, dict[str, dict[str, Any]]] = {
    "none": {},
    "`optim: adamw_8bit`": {"train": {"optim": "adamw_8bit"}},
    "`optim: adafactor`": {"train": {"optim": "adafactor"}},
    "`freeze_vision_tower`": {"model": {"freeze_vision_tower": True}},
    "`trainable_modules: language_model`": {"model": {"trainable_modules": "language_model"}},
    "`trainable_modules: projector`": {"model": {"trainable_modules": "projector"}},
    "`use_peft`, `lora_r: 16`": {"model": {"use_peft": True}},
    "`gradient_checkpointing: vision_tower`": {"memory": {"gradient_checkpointing": "vision_tower"}},
    "`gradient_checkpointing: language_model`": {"memory": {"gradient_checkpointing": "language_model"}},
    "`gradient_checkpointing: true`": {"memory": {"gradient_checkpointing": True}},
}
"""Settings of each row, by section."""


def measure_case(case: dict[str, Any]) -> dict[str, float]:
    """Take two steps and return the peak in bytes and the seconds of the second."""
    config = RunConfig.model_validate(
        {**case["settings"], "model": {"model_name_or_path": case["checkpoint"], **case["settings"].get("model", {})}}
    )
    prompt = make_prompt(Path(case["checkpoint"]), WORK, SHAPES[case["shape"]])
    batch = micro_batch([make_group(prompt, WORK)], shared=True)
    resident = Resident()
    policy = load_policy(config, case["checkpoint"]).train()
    strategy = DDP(Ranks(), config.train.max_grad_norm)
    strategy.place(policy)
    optimizer = Optimizer(strategy, policy, config.train, num_steps=10)
    seconds = 0.0
    for name in ("first", "second"):
        start = time.process_time()
        with resident.stage(name):
            policy.start_step()
            strategy.backward(-optimizer.policy(Forward(batch)).logprobs_NT.mean())
            assert strategy.update(loss_is_finite=True)[1]
            strategy.clear_gradients()
        seconds = time.process_time() - start
    return {"peak": resident.peaks["second"]["anonymous"], "seconds": seconds}


def table(cases: dict[str, dict[str, float]]) -> str:
    """Return Markdown: megabytes and times relative to the run without options."""
    plain = cases["none"]
    rows = [
        [
            name,
            f"{case['peak'] / 1e6:,.0f}",
            f"{1 - case['peak'] / plain['peak']:.0%}",
            f"{case['seconds'] / plain['seconds']:.2f}",
        ]
        for name, case in cases.items()
    ]
    return markdown_table(["option", "peak, MB", "saved", "CPU time of a step"], rows)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="quarter")
    parser.add_argument("--write", action="store_true", help="write the table to docs/memory.md")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.case:
        return print(json.dumps(measure_case(json.loads(args.case))))
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = build_checkpoint(SHAPES[args.shape], Path(directory) / "model")
        found = {}
        for name, settings in CASES.items():
            case = {"checkpoint": str(checkpoint), "shape": args.shape, "settings": settings}
            found[name] = in_fresh_process("memory_options.py", ["--case", json.dumps(case)])
    print(table(found))
    if args.write:
        before, rest = PAGE.read_text().split(BEGINS)
        PAGE.write_text(f"{before}{BEGINS}\n{table(found)}\n{ENDS}{rest.split(ENDS, 1)[1]}")


if __name__ == "__main__":
    main()
