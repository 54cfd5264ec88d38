"""Peak memory of the training phase against `num_generations` and `prompts_per_step`, under a fixed token budget.

    python benchmarks/batch_memory.py           a model of 6.3 million parameters
    python benchmarks/batch_memory.py --docs    put the table in docs/memory.md
    python benchmarks/batch_memory.py --cases 2x4 64x4    some cases of `num_generations` x `prompts_per_step`

Each case runs in a fresh process on CPU: a step on a small batch, which makes the optimizer's state, and then the step
that is measured. Its groups exist before it, as they do after a rollout. Lengths are such that micro-batches of every
case fill the budget; otherwise some would need less memory, and none more.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

from benchmarks.common import ROOT, environment, in_fresh_process, markdown_table, peak_growth
from benchmarks.flops import Workload
from benchmarks.report import fill, measured_on
from benchmarks.shapes import Shape, build_checkpoint, make_group, make_prompt
from benchmarks.training_phase import make_trainer, train
from rl_vlm.types import ScoredGroup

PAGE = ROOT / "docs" / "memory.md"
SHAPE: Shape = (
    {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
     "intermediate_size": 1024, "vocab_size": 512, "mrope_section": [4, 6, 6]},
    {"depth": 4, "hidden_size": 160, "num_heads": 10, "intermediate_size": 640, "patch_size": 7,
     "window_size": 56, "fullatt_block_indexes": [3]},
)  # fmt: skip
WORK = {
    "frozen": Workload(image_tokens=16, text_tokens=16, completion_tokens=256, num_generations=2),
    "trained": Workload(image_tokens=36, text_tokens=28, completion_tokens=244, num_generations=2),
}
"""By vision tower."""
BUDGETS = {"frozen": 1088, "trained": 1284}
"""Two groups of 2 completions, with their images at 90 tokens each if the tower is trained. Of a group that is cut, 4
completions fit, or exactly 5 without the images. The smallest batch has two micro-batches, with gradients beside the
second. A micro-batch holds tens of megabytes, beside which the fragments of the heap are few."""
CASES = {f"{g}x{prompts}": (g, prompts) for g, prompts in [(2, 4), (8, 4), (64, 4), (2, 64), (64, 64)]}
"""Values of `num_generations` and `prompts_per_step`."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true", help="put the table in docs/memory.md")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--tower", choices=BUDGETS, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def make_groups(checkpoint: Path, tower: str, num_generations: int, num_prompts: int) -> list[ScoredGroup]:
    """Make groups whose prompts have image inputs of their own."""
    work = dataclasses.replace(WORK[tower], num_generations=num_generations)
    prompt = make_prompt(checkpoint, work, SHAPE)
    inputs = [{name: value.clone() for name, value in prompt.mm_inputs.items()} for _ in range(num_prompts)]
    return [make_group(dataclasses.replace(prompt, mm_inputs=own), work, seed) for seed, own in enumerate(inputs)]


def measure(tower: str, num_generations: int, num_prompts: int) -> int:
    """Return by how many bytes the resident memory grows in the training phase of one case."""
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = build_checkpoint(SHAPE, Path(directory))
        model = {"freeze_vision_tower": tower == "frozen"}
        memory = {"micro_batch_tokens": BUDGETS[tower], "prefix_sharing": "shared", "gradient_checkpointing": False}
        trainer = make_trainer(checkpoint, model, memory)
        train(trainer, make_groups(checkpoint, tower, 2, 4))
        groups = make_groups(checkpoint, tower, num_generations, num_prompts)
        return peak_growth(lambda: train(trainer, groups))


def table(found: dict[str, dict[str, int]]) -> str:
    """Return Markdown: MiB, and in brackets the ratio to the first case."""
    cases = list(found["frozen"])

    def cell(tower: str, case: str) -> str:
        return f"{found[tower][case] / 2**20:.1f} MiB ({found[tower][case] / found[tower][cases[0]]:.3f})"

    head = ["`num_generations`", "`prompts_per_step`", *(f"{tower} vision tower" for tower in BUDGETS)]
    return markdown_table(head, [[*CASES[case], *(cell(tower, case) for tower in BUDGETS)] for case in cases])


def main(arguments: Sequence[str] | None = None) -> None:
    args = parse(arguments)
    if args.tower:
        print(json.dumps(measure(args.tower, *CASES[args.cases[0]])))
        return
    found: dict[str, dict[str, int]] = {tower: {} for tower in BUDGETS}
    for tower in BUDGETS:
        for case in args.cases:
            found[tower][case] = in_fresh_process("batch_memory.py", ["--tower", tower, "--cases", case])
            print(tower, case, found[tower][case], file=sys.stderr, flush=True)
    print(table(found))
    if args.docs:
        PAGE.write_text(fill(PAGE.read_text(), "batch_memory", f"{table(found)}\n\n{measured_on([environment()])}"))


if __name__ == "__main__":
    main()
