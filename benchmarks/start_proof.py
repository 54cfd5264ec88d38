"""What the proof before the first step costs: of the digits, of a model of 400 million parameters, and of 7B by count.

    python benchmarks/start_proof.py            ten minutes of one core
    python benchmarks/start_proof.py --docs     put the table in docs/benchmarks.md

Times are CPU seconds, which other programs change less than seconds of the clock. The model of 400 million parameters
has random weights, and its FLOPs are also counted by torch. Those of 7B are arithmetic alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

import torch

from benchmarks.common import ROOT, environment, markdown_table
from benchmarks.counting import counted_flops
from benchmarks.flops import (
    FORWARD_ONLY,
    FROZEN,
    Passes,
    Training,
    Workload,
    causal_pairs,
    head_flops,
    language_flops,
    shared_flops,
    shared_row,
    vision_flops,
)
from benchmarks.report import fill, measured_on
from benchmarks.shapes import SHAPES, make_group, make_prompt, model_config, random_policy, write_config
from benchmarks.training_phase import trainer_of
from rl_vlm.config.load import load_config
from rl_vlm.config.schema import RunConfig
from rl_vlm.passes.checked_groups import CheckedSize
from rl_vlm.run.instrument import Instrument
from rl_vlm.run.run import train
from rl_vlm.stages import Stage

PAGE = ROOT / "docs" / "benchmarks.md"
SIZE = CheckedSize()
CHECKED = Workload(image_tokens=256, completion_tokens=SIZE.tokens, num_generations=SIZE.completions)
"""Two groups of this size are checked. Most runs have more image tokens or fewer."""
STEP = Workload(image_tokens=256)
"""A group of a step: 8 completions of 200 tokens."""
GROUPS_OF_STEP = 32
DIGITS = "configs/digits.yaml"
BENCHMARK, LARGE = "400m", "7b"
"""Shapes of `benchmarks/shapes.py`."""


@dataclass
class CheckTime(Instrument):
    """Measures the stage of checks."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, stage: Stage) -> Iterator[None]:
        """Measure the CPU time of the proof, which is the first check of a run with `hf`."""
        start = time.process_time()
        yield
        self.seconds.setdefault(stage, time.process_time() - start)


def seconds_of_digits() -> dict[str, float]:
    """Train the digits for a step, and return the CPU seconds of its stages."""
    timer = CheckTime()
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"output_dir={folder}/run", "max_steps=1", "eval_steps=0", "eval_dataset_name=null"]
        train(load_config(ROOT / DIGITS, overrides), [lambda observed: timer])
    return timer.seconds


def proof_of_shape(shape: str) -> dict[str, float]:
    """Prove two groups of a model with random weights. Return CPU seconds, and FLOPs as torch counts them."""
    with tempfile.TemporaryDirectory() as folder:
        write_config(SHAPES[shape], Path(folder))
        values = {"model": {"model_name_or_path": folder}, "memory": {"micro_batch_tokens": 8192}}
        config = RunConfig.model_validate(values)
        policy = random_policy(config, folder, torch.device("cpu"))
        prompts = [make_prompt(Path(folder), replace(CHECKED, text_tokens=40 + i), SHAPES[shape], i) for i in range(2)]
        groups = [make_group(prompt, CHECKED, seed=i) for i, prompt in enumerate(prompts)]
        trainer = trainer_of(config, policy.train())
        start = time.process_time()
        flops = counted_flops(lambda: trainer.start_check.run(groups))
        seconds = time.process_time() - start
    assert all(check.holds for check in trainer.start_check.proof.checks)
    return {"parameters": sum(p.numel() for p in policy.parameters()), "seconds": seconds, "flops": flops}


def proof_flops(config: Any, work: Workload) -> float:
    """Compute the FLOPs of a proof on two groups with an image each, if no weight of the tower is frozen.

    Dense rows run three times with a gradient of embeddings and once without, shared rows once with it and five times
    without, and the model's own forward two times, with the image of each row.
    """
    text, count = config.text_config, work.num_generations
    row = work.prompt_tokens + work.completion_tokens
    shared = shared_row(work)

    def language(tokens: float, pairs: float, passes: Passes) -> float:
        scored = count * work.completion_tokens
        return language_flops(text, tokens, pairs, passes) + head_flops(text, scored, passes.linear)

    dense, image = (count * row, count * causal_pairs(row)), vision_flops(config.vision_config, work.image_grid)
    computed = 3 * language(*dense, FROZEN) + language(*dense, FORWARD_ONLY) + 4 * image
    computed += language(shared.tokens, shared.pairs, FROZEN) + 5 * language(shared.tokens, shared.pairs, FORWARD_ONLY)
    computed += 6 * image
    own = 2 * (language(*dense, FORWARD_ONLY) + count * image)
    return 2 * (computed + own)


def share_of_step(config: Any) -> float:
    """Compute the FLOPs of a proof, relative to those of the passes of one full-parameter step of 32 groups."""
    return proof_flops(config, CHECKED) / (GROUPS_OF_STEP * shared_flops(config, STEP, Training()).total)


def measure() -> dict[str, Any]:
    """Measure the digits and the model of 400 million parameters, and compute 7B."""
    digits = seconds_of_digits()
    shape = proof_of_shape(BENCHMARK)
    configs = {name: model_config(SHAPES[name]) for name in (BENCHMARK, LARGE)}
    computed = {name: proof_flops(config, CHECKED) for name, config in configs.items()}
    shares = {name: share_of_step(config) for name, config in configs.items()}
    return {"digits": digits, "shape": shape, "computed": computed, "shares": shares, **environment()}


def table(measured: dict[str, Any]) -> str:
    """Return the table of the page."""
    digits, shape, computed, shares = (measured[name] for name in ("digits", "shape", "computed", "shares"))
    rows = [
        ["digits", f"{digits[Stage.CHECK]:.2f}", f"{digits[Stage.STEP]:.2f}", "", ""],
        [
            f"{shape['parameters'] / 1e6:.0f} million", f"{shape['seconds']:.0f}", "",
            f"{computed[BENCHMARK] / 1e12:.1f}, counted {shape['flops'] / 1e12:.1f}", f"{shares[BENCHMARK]:.3f}",
        ],
        ["Qwen2.5-VL-7B", "", "", f"{computed[LARGE] / 1e12:.0f}", f"{shares[LARGE]:.3f}"],
    ]  # fmt: skip
    head = ["model", "CPU seconds", "of the first step", "TFLOP", "of a step's training passes"]
    return markdown_table(head, rows)


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true", help="put the table in docs/benchmarks.md")
    return parser.parse_args(arguments)


def main() -> None:
    args = parse()
    measured = measure()
    found = f"{table(measured)}\n\n{measured_on([measured])}"
    print(found)
    if args.docs:
        PAGE.write_text(fill(PAGE.read_text(), "start_proof", found))


if __name__ == "__main__":
    main()
