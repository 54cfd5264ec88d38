"""Training on long episodes whose contexts are edited: together, in micro-batches, and every context apart.

    python benchmarks/edited_contexts.py --json result.json

A group of episodes with an image after each turn goes through the policy's log-probs and the backward of a sum of them.
The policy of `rollout.keep_images` and `rollout.edit_every` edits the contexts.

    shared   one row: the prompt once, each image once, all contexts of all episodes
    cut      micro-batches of at most `--micro-batch-tokens`, as a run has: the tower once per image, apart from them
    apart    one row per context, with its own prompt and images, as samples of a trainer that knows nothing of the rest
    whole    one row, in which contexts are not edited

Times are CPU seconds of one thread. Memory is the growth of the resident size at its peak in a fresh process per side.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # run as a script

import torch

from benchmarks.common import (
    alternate,
    command_line,
    environment,
    in_fresh_process,
    markdown_table,
    peak_growth,
    ratio,
)
from benchmarks.counting import counted_flops
from benchmarks.flops import Training, Workload
from benchmarks.report import result_arguments, run_benchmark
from benchmarks.shapes import FIRST_TEXT_TOKEN, LAST_TEXT_TOKEN, SHAPES, make_prompt
from benchmarks.sides import Setup
from rl_vlm.distributed.collectives import Collectives
from rl_vlm.passes.budget import PlannedBudget, TokenBudget
from rl_vlm.passes.micro_batches import make_micro_batches
from rl_vlm.passes.schedule import make_schedule
from rl_vlm.rollout.environments.context_policy import ContextPolicy, read_again
from rl_vlm.types import (
    NO_TOKENS,
    Completion,
    Context,
    Forward,
    MicroBatch,
    Observation,
    Progress,
    ScoredGroup,
    SubGroup,
    Turn,
)

NAMES = ("shared", "cut", "apart", "whole")
WORKLOAD = (
    "num_generations turns keep_images edit_every image_tokens text_tokens turn_tokens observed_image_tokens "
    "observed_text_tokens micro_batch_tokens shape"
).split()


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-generations", type=int, default=4)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--keep-images", type=int, default=3)
    parser.add_argument("--edit-every", type=int, default=5)
    parser.add_argument("--image-tokens", type=int, default=120)
    parser.add_argument("--text-tokens", type=int, default=30)
    parser.add_argument("--turn-tokens", type=int, default=8, help="sampled tokens of a turn")
    parser.add_argument("--observed-image-tokens", type=int, default=72)
    parser.add_argument("--observed-text-tokens", type=int, default=30)
    parser.add_argument("--micro-batch-tokens", type=int, default=1500, help="budget of the side `cut`")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--shape", choices=SHAPES, default="small")
    parser.add_argument("--memory-of", choices=NAMES, help=argparse.SUPPRESS)
    result_arguments(parser)
    return parser.parse_args(arguments)


PER_MEMBER = ("scores_GF", "rewards_G", "advantages_G", "valid_G")
"""Fields of a scored group with an entry for each completion."""


class Episodes:
    """A group of episodes of random tokens, and its training pass by side."""

    def __init__(self, args: argparse.Namespace, directory: Path) -> None:
        torch.set_num_threads(1)
        self.args, self.checkpoint = args, directory / "model"
        work = Workload(args.image_tokens, args.text_tokens, args.turn_tokens, args.num_generations)
        self.setup = Setup.build(SHAPES[args.shape], work, Training(), self.checkpoint)
        self.observed = dataclasses.replace(
            work, image_tokens=args.observed_image_tokens, text_tokens=args.observed_text_tokens
        )
        self.policy = self.setup.policy()
        placeholder = self.policy.transformer.config.image_token_id
        edits, none = ContextPolicy(args.keep_images, args.edit_every), ContextPolicy(args.turns, args.turns)
        self.edited, self.whole = (self.group(policy, placeholder) for policy in (edits, none))

    def group(self, policy: ContextPolicy, placeholder: int) -> ScoredGroup:
        seeds = range(self.args.num_generations)
        completions = [self.episode(policy, placeholder, seed) for seed in seeds]
        group = dataclasses.replace(self.setup.group.group, completions=completions)
        return dataclasses.replace(self.setup.group, group=group)

    def episode(self, policy: ContextPolicy, placeholder: int, seed: int) -> Completion:
        """Return an episode of random turns, with an image after each turn but the last."""
        completion, seen, args = NO_TOKENS, list[Observation](), self.args
        generator = torch.Generator().manual_seed(seed)
        turns = torch.randint(FIRST_TEXT_TOKEN, LAST_TEXT_TOKEN, (args.turns, args.turn_tokens), generator=generator)
        texts: dict[str, Observation] = {}

        def without_image(name: str, token_ids: list[int], turn: Turn) -> Observation:
            return texts[name]

        for number, ids in enumerate(turns[:-1]):
            completion = completion.continued(ids, torch.zeros(len(ids)), "paused", "")
            rendered = make_prompt(self.checkpoint, self.observed, self.setup.shape, 1 + seed * args.turns + number)
            name, token_ids = f"turn {number}", rendered.token_ids
            texts[name] = Observation(name, token_ids[token_ids != placeholder], {}, {})
            seen.append(Observation(name, token_ids, rendered.token_inputs, rendered.mm_inputs, (b"",)))
            is_due = policy.is_due(completion, seen)
            if is_due:
                seen = policy.edit(completion, [Turn("", "")] * len(seen), seen, without_image)
            edited = read_again(completion, seen) if is_due else ()
            completion = dataclasses.replace(completion, pending=seen[-1], edited=edited)
        return completion.continued(turns[-1], torch.zeros(args.turn_tokens), "stop", "")

    def run(self, side: str) -> float:
        """Run a side's forwards and backwards. Return the loss. Gradients stay until the next pass."""
        self.policy.zero_grad(set_to_none=True)
        if side == "cut":
            return self.run_cut()
        group = self.whole if side == "whole" else self.edited
        groups = contexts_apart(group) if side == "apart" else [with_copies(group)]
        total = 0.0
        for each in groups:
            batch = MicroBatch([SubGroup(each, list(range(len(each.group.completions))))], shared=side != "apart")
            loss = -(each.advantages_G[:, None] * self.policy(Forward(batch)).logprobs_NT).sum()
            loss.backward()
            total += loss.item()
        return total

    def run_cut(self) -> float:
        """Run the schedule of micro-batches under the token budget."""
        group, vision, total = with_copies(self.edited), self.policy.vision, 0.0
        self.policy.start_step()
        budget = TokenBudget(Collectives(self.policy.device), Progress(1), vision, PlannedBudget(0))
        batches = make_micro_batches([group], self.args.micro_batch_tokens, "shared", budget.price)
        for work in make_schedule(batches, vision, group):
            members = work.forward.batch.members
            advantages = torch.stack([scored.advantages_G[member] for scored, member, _ in members])
            loss = -(advantages[:, None] * self.policy(work.forward).logprobs_NT).sum()
            loss.backward()
            for tower_backward in work.tower_backwards:
                self.policy(tower_backward).backward()
            total += loss.item()
        return total

    def gradients(self, side: str) -> torch.Tensor:
        self.run(side)
        return torch.cat([p.grad.flatten() for p in self.policy.parameters() if p.grad is not None])


def with_copies(group: ScoredGroup) -> ScoredGroup:
    """Return the group with copies of its prompt and observations, without cached features and positions.

    An observation that stands in several contexts has one copy.
    """
    old = dict.fromkeys(each for completion in group.group.completions for each in completion.observations)
    new = {each: dataclasses.replace(each) for each in old}

    def copied(context: Context) -> Context:
        return Context(tuple(part if isinstance(part, int) else new[part] for part in context.parts))

    completions = [dataclasses.replace(c, contexts=tuple(map(copied, c.contexts))) for c in group.group.completions]
    whole = dataclasses.replace(group.group, prompt=dataclasses.replace(group.group.prompt), completions=completions)
    return dataclasses.replace(group, group=whole)


def contexts_apart(group: ScoredGroup) -> list[ScoredGroup]:
    """Return a group for each context of each completion, with its own prompt and observations."""
    found = []
    for member, completion in enumerate(group.group.completions):
        sampled = completion.token_ids.split([context.num_sampled for context in completion.contexts])
        for context, ids in zip(completion.contexts, sampled, strict=True):
            only = dataclasses.replace(completion, token_ids=ids, generator_logprobs=ids / 1.0, contexts=(context,))
            one = dataclasses.replace(group.group, completions=[only])
            values = {name: value[member : member + 1] for name, value in vars(group).items() if name in PER_MEMBER}
            found.append(with_copies(dataclasses.replace(group, group=one, **values)))
    return found


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Measure everything that the table and the JSON contain."""
    with tempfile.TemporaryDirectory() as temporary:
        episodes = Episodes(args, Path(temporary))
        shared, cut, apart = (episodes.gradients(side) for side in NAMES[:3])
        flops = {name: counted_flops(lambda name=name: episodes.run(name)) for name in NAMES}
        sides = {name: lambda name=name: episodes.run(name) for name in NAMES}
        seconds = alternate(sides, args.repeats, time.process_time)
        completion = episodes.edited.group.completions[0]
    memory = {
        name: in_fresh_process("edited_contexts.py", [*command_line(args, WORKLOAD), "--memory-of", name])
        for name in NAMES
    }
    return {
        "benchmark": "edited_contexts",
        "workload": {name: getattr(args, name) for name in WORKLOAD},
        "contexts": len(completion.contexts),
        "longest_context": max(completion.path_lengths),
        "whole_context": episodes.whole.group.completions[0].num_tokens,
        "flops": flops,
        "seconds": seconds,
        "speedup_vs": {name: ratio(seconds, name, "shared") for name in NAMES[1:]},
        "peak_memory_bytes": memory,
        "gradient_difference": max(float((side - apart).norm() / apart.norm()) for side in (shared, cut)),
        **environment(),
    }


def measure_memory(args: argparse.Namespace) -> int:
    """Measure the bytes of one side's first pass: activations, gradients, and memory of its kernels."""
    with tempfile.TemporaryDirectory() as temporary:
        episodes = Episodes(args, Path(temporary))
        return peak_growth(lambda: episodes.run(args.memory_of))


def table(result: dict[str, Any]) -> str:
    """Format one line per side."""
    flops, memory = result["flops"], result["peak_memory_bytes"]
    rows = [
        [name, f"{flops[name] / 1e12:.3g}", f"{flops[name] / flops['shared']:.2f}",
         f"{median(result['seconds'][name]):.1f}", f"{memory[name] / 2**20:.0f}"]
        for name in NAMES
    ]  # fmt: skip
    head = ["side", "TFLOP", "of shared", "CPU seconds", "peak MiB"]
    contexts = (
        f"{result['contexts']} contexts of up to {result['longest_context']} tokens after the prompt; one that is not "
        f"edited has {result['whole_context']}. Gradients of shared and cut differ from those of apart by at most "
        f"{result['gradient_difference']:.1e}."
    )
    return "\n".join([markdown_table(head, rows), "", contexts])


def main() -> None:
    run_benchmark(parse(), measure, measure_memory, table)


if __name__ == "__main__":
    main()
