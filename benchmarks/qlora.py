"""Memory of QLoRA beside LoRA: weights, loading, and one forward and backward of a group.

    python benchmarks/qlora.py                  a model of 416 million parameters
    python benchmarks/qlora.py --shape toy      a tiny one, to check the benchmark itself

Each variant runs in a fresh process on CPU. `--docs` puts the table in docs/memory.md.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from benchmarks.common import ROOT, environment, in_fresh_process, markdown_table
from benchmarks.flops import Workload
from benchmarks.report import fill, measured_on
from benchmarks.resident import Resident, storage_bytes
from benchmarks.shapes import SHAPES, build_checkpoint, make_group, make_prompt, micro_batch
from rl_vlm.config.schema import RunConfig
from rl_vlm.model.loading import load_policy
from rl_vlm.types import Forward

PAGE = ROOT / "docs" / "memory.md"
WORK = Workload(image_tokens=16, text_tokens=24, completion_tokens=32, num_generations=4)
"""A small group, beside which weights and dequantized weights show."""
VARIANTS: dict[str, dict[str, Any]] = {
    "LoRA, float32": {"dtype": "float32"},
    "QLoRA, float32": {"dtype": "float32", "load_in_4bit": True},
    "LoRA, bfloat16": {"dtype": "bfloat16"},
    "QLoRA, bfloat16": {"dtype": "bfloat16", "load_in_4bit": True},
    "QLoRA, bfloat16, nested": {"dtype": "bfloat16", "load_in_4bit": True, "use_bnb_nested_quant": True},
}


@dataclass(frozen=True)
class Measured:
    """Bytes of one variant."""

    weights: int
    load_peak: int
    """Growth of the anonymous resident memory at its peak, while the policy is loaded."""
    step_peak: int
    """The same for a forward and backward, from after loading."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="medium")
    parser.add_argument("--docs", action="store_true", help="put the table in docs/memory.md")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    parser.add_argument("--checkpoint", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def measure(shape: str, checkpoint: Path, variant: str) -> Measured:
    """Load the policy in this process, and run a forward and backward."""
    model = {"model_name_or_path": str(checkpoint), "use_peft": True, "freeze_vision_tower": True, **VARIANTS[variant]}
    config = RunConfig.model_validate({"model": model, "memory": {"gradient_checkpointing": True}})
    batch = micro_batch([make_group(make_prompt(checkpoint, WORK, SHAPES[shape]), WORK)], shared=True)
    resident = Resident()
    with resident.stage("load"):
        policy = load_policy(config, str(checkpoint)).train()
    with resident.stage("step"):
        policy(Forward(batch)).logprobs_NT.sum().backward()
    return Measured(
        weights=storage_bytes(tensors_of(policy)),
        load_peak=resident.peaks["load"]["anonymous"],
        step_peak=resident.peaks["step"]["anonymous"] - resident.after["load"],
    )


def tensors_of(policy: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters, and the scales of those in 4 bits."""
    for parameter in policy.parameters():
        yield parameter
        state: Any = getattr(parameter, "quant_state", None)
        if state is not None:
            yield from (state.absmax, state.code)
        if state is not None and state.nested:
            yield from (state.state2.absmax, state.state2.code)


def table(found: dict[str, Measured]) -> str:
    head = ["", "weights", "peak of loading", "peak of forward and backward, beside the weights"]
    rows = [
        [name, *(f"{size / 2**20:.0f} MiB" for size in (m.weights, m.load_peak, m.step_peak))]
        for name, m in found.items()
    ]
    return markdown_table(head, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    if args.variant:
        print(json.dumps(vars(measure(args.shape, args.checkpoint, args.variant))))
        return
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = build_checkpoint(SHAPES[args.shape], Path(directory))
        AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.bfloat16).save_pretrained(checkpoint)
        given = ["--shape", args.shape, "--checkpoint", str(checkpoint), "--variant"]
        found = {name: Measured(**in_fresh_process("qlora.py", [*given, name])) for name in VARIANTS}
    print(table(found))
    if args.docs:
        text = f"{table(found)}\n\n{measured_on([environment()])}"
        PAGE.write_text(fill(PAGE.read_text(), "qlora", text))


if __name__ == "__main__":
    main()
