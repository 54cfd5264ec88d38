"""Rollouts of one group: `HFEngine`, which prefills each prompt once, against `generate(num_return_sequences=G)`.

    python benchmarks/rollout.py --num-generations 8 --completion-tokens 32 --json result.json
    python benchmarks/rollout.py --decode        # steps of 8, 64 and 256 completions, beside their matrix products

Both sides sample at temperature 1 from the same weights in one process, alternating, and never stop early. Prefill is a
rollout of one token; its work is the FLOPs that torch counts in it.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

import torch

from benchmarks.common import alternate, environment, markdown_table, ratio
from benchmarks.counting import counted_flops
from benchmarks.decode_steps import decode_table
from benchmarks.flops import Training, Workload
from benchmarks.report import finish, result_arguments
from benchmarks.shapes import SHAPES
from benchmarks.sides import Setup
from rl_vlm.model.loading import load_policy
from rl_vlm.rollout.hf import HFEngine
from rl_vlm.types import Prompt, RolloutRequest, Sampling

SIDES = ("ours", "generate")


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-generations", type=int, default=8)
    parser.add_argument("--image-tokens", type=int, default=1000)
    parser.add_argument("--text-tokens", type=int, default=40)
    parser.add_argument("--completion-tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--decode", action="store_true", help="time decode steps against a floor")
    result_arguments(parser)
    return parser.parse_args(arguments)


def own_rollout(setup: Setup) -> Callable[[int], None]:
    """Return a function that generates a group of so many tokens per completion, with nothing cached for its prompt."""
    from transformers import AutoTokenizer

    policy = load_policy(setup.config, str(setup.checkpoint)).eval()
    engine = HFEngine.for_policy(policy, AutoTokenizer.from_pretrained(setup.checkpoint), max_num_seqs=256)
    engine.stop_token_ids = []

    def run(num_tokens: int) -> None:
        sampling = Sampling(setup.work.num_generations, num_tokens, temperature=1.0, seed=0)
        (group,) = engine.generate([RolloutRequest("group", setup.new_group().group.prompt)], sampling)
        assert [len(c.token_ids) for c in group.completions] == [num_tokens] * setup.work.num_generations

    return run


def generate_rollout(setup: Setup) -> Callable[[int], None]:
    """Return a function that does the same by the model's own `generate`."""
    from transformers import AutoModelForImageTextToText

    model: Any = AutoModelForImageTextToText.from_pretrained(setup.checkpoint, attn_implementation="sdpa").eval()
    prompt = setup.group.group.prompt
    inputs = generate_inputs(prompt)

    def run(num_tokens: int) -> None:
        output = model.generate(
            **inputs,
            do_sample=True,
            top_k=0,
            num_return_sequences=setup.work.num_generations,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
        )
        assert output.shape == (setup.work.num_generations, len(prompt.token_ids) + num_tokens)

    return run


def generate_inputs(prompt: Prompt) -> dict[str, torch.Tensor]:
    """Return the tensors that `model.generate` takes for a prompt."""
    return {
        "input_ids": prompt.token_ids[None],
        "attention_mask": torch.ones_like(prompt.token_ids)[None],
        **{name: values[None] for name, values in prompt.token_inputs.items()},
        **prompt.mm_inputs,
    }


def measure(args: argparse.Namespace) -> dict[str, Any]:
    work = Workload(args.image_tokens, args.text_tokens, args.completion_tokens, args.num_generations)
    with tempfile.TemporaryDirectory() as directory:
        setup = Setup.build(SHAPES[args.shape], work, Training(), Path(directory))
        sides = {"ours": own_rollout(setup), "generate": generate_rollout(setup)}
    flops = {name: counted_flops(lambda run=run: run(1)) for name, run in sides.items()}  # warms up as well
    tokens = {"prefill": 1, "rollout": work.completion_tokens}
    seconds = {
        stage: alternate({name: lambda run=run, n=n: run(n) for name, run in sides.items()}, args.repeats)
        for stage, n in tokens.items()
    }
    return {
        "benchmark": "rollout",
        "workload": {name: getattr(args, name) for name in WORKLOAD},
        "prefill_work_vs_generate": flops["generate"] / flops["ours"],
        "prefill_speedup": ratio(seconds["prefill"], "generate", "ours"),
        "rollout_speedup": ratio(seconds["rollout"], "generate", "ours"),
        "seconds": seconds,
        "prefill_flops": flops,
        **environment(),
    }


WORKLOAD = "num_generations image_tokens text_tokens completion_tokens shape".split()


def table(result: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{result['prefill_flops'][name] / 1e12:.3g}",
            *(f"{median(result['seconds'][stage][name]):.2f}" for stage in ("prefill", "rollout")),
        ]
        for name in SIDES
    ]
    rows.append(
        ["ratio", *(f"{result[k]:.2f}" for k in ("prefill_work_vs_generate", "prefill_speedup", "rollout_speedup"))]
    )
    return markdown_table(["side", "prefill TFLOP", "prefill s", "whole rollout s"], rows)


def main() -> None:
    args = parse()
    if args.decode:
        print(decode_table(args.shape, args.image_tokens, args.completion_tokens, args.repeats))
        return
    measured = measure(args)
    finish(measured, table(measured), args)


if __name__ == "__main__":
    main()
