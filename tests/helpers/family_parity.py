"""How closely each family's shared and dense paths agree with each other and with the family's own forward.

python -m tests.helpers.family_parity        measures every family and writes the table of docs/families.md
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import reduce
from operator import or_
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import torch
from PIL import Image
from torch import Tensor

from rl_vlm.model.loading import why_not_shared
from rl_vlm.model.policy import Policy
from rl_vlm.types import Context, Forward, MicroBatch, Observation, ScoredGroup
from tests.helpers.builders import (
    BYTE_TOKENS,
    gradient_error,
    make_groups,
    make_observation,
    make_policy,
    make_prompt,
    make_trajectories,
    noise_image,
    processor_of,
    sharp_checkpoint,
    take_gradients,
    whole,
)
from tests.helpers.stock import own_attention, stock_logprobs
from tests.tiny.build import TINY_FAMILIES

TABLE_BEGINS, TABLE_ENDS = "<!-- table: begin -->", "<!-- table: end -->"


@dataclass(frozen=True)
class Scores:
    """Log-probs of every completion token, one behind the other, and gradients of a random weighting of them."""

    logprobs: Tensor
    gradients: dict[str, Tensor]


def weighted_sum(logprobs: Tensor) -> Tensor:
    weights = torch.randn(logprobs.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return (weights.to(logprobs) * logprobs).sum()


def scores(policy: Policy, groups: Sequence[ScoredGroup], shared: bool) -> Scores:
    """Of all groups in one micro-batch, through our code."""
    batch: MicroBatch = whole(groups, shared)
    rows = policy(Forward(batch)).logprobs_NT
    logprobs = torch.cat([row[: len(c.token_ids)] for row, c in zip(rows, batch.completions, strict=True)])
    weighted_sum(logprobs).backward()
    return Scores(logprobs.detach(), take_gradients(policy))


def stock_scores(policy: Policy, groups: Sequence[ScoredGroup]) -> Scores:
    """Of the family's own forward on one unpadded row at a time, which chooses its positions and masks itself."""
    with own_attention(policy.transformer):  # also where checkpointing computes layers again
        logprobs = torch.cat(
            [
                stock_logprobs(policy.transformer, policy.family, group.group.prompt, completion)
                for group in groups
                for completion in group.group.completions
            ]
        )
        weighted_sum(logprobs).backward()
    return Scores(logprobs.detach(), take_gradients(policy))


@dataclass(frozen=True)
class Parity:
    """Largest differences of log-probs, and of gradients by the measure of `gradient_error`."""

    logprobs: float
    gradients: float

    @staticmethod
    def of(ours: Scores, expected: Scores) -> Parity:
        difference = (ours.logprobs - expected.logprobs).abs().max().item()
        return Parity(difference, gradient_error(ours.gradients, expected.gradients))

    def __or__(self, other: Parity) -> Parity:
        """The larger of each."""
        return Parity(max(self.logprobs, other.logprobs), max(self.gradients, other.gradients))

    @property
    def worst(self) -> float:
        return max(self.logprobs, self.gradients)


FP32_ROUNDING = {
    "gemma4": 1e-4,
    "gemma4_bidirectional": 5e-5,
    "gemma4_moe": 5e-5,
}
"""Where rounding in fp32 moves gradients by more than 1e-5: Gemma 4 does not scale its attention logits. In fp64 it is
as exact as the others. In turns, gradients of its own forward in fp32 are 1.7e-4 from those in fp64."""

ONE_IMAGE = [noise_image(32, 24, seed=1)]
TWO_IMAGES = [noise_image(48, 16, seed=2), noise_image(16, 64, seed=3)]
OTHER_IMAGE = [noise_image(64, 48, seed=4)]

CASES: dict[str, list[tuple[list[Image.Image], list[int]]]] = {
    "one image": [(ONE_IMAGE, [5, 1, 9, 3])],
    "two images": [(TWO_IMAGES, [5, 1, 9, 3])],
    "no image": [([], [5, 1, 9, 3])],
    "several prompts": [(ONE_IMAGE, [1, 9, 4]), (OTHER_IMAGE, [3]), (ONE_IMAGE, [2, 7])],
    "with and without images": [(ONE_IMAGE, [1, 9, 4]), ([], [6, 2]), (OTHER_IMAGE, [3])],
}
"""Images and completion lengths of each group of a micro-batch."""

TEXT_TURNS, IMAGE_TURNS = "turns of text", "turns with images"
"""Cases of trajectories: the observations between turns are text, or have images too."""

WITHOUT_TURNS = {"paligemma", "paligemma2", "got_ocr2"}
NEED_AN_IMAGE = WITHOUT_TURNS | {"pp_chart2table", "deepseek_ocr2"}
NOT_THIS = {
    **{(family, case): "its processor takes no prompt without an image"
       for family in NEED_AN_IMAGE for case in ("no image", "with and without images")},
    **{(family, IMAGE_TURNS): "its prompts have no turns" for family in WITHOUT_TURNS},
    ("minimax_m3_vl", IMAGE_TURNS): "its tower lets all images of a call see each other",
    ("mllama", IMAGE_TURNS): "text before an image attends to it through cross-attention",
    ("perception_lm", "two images"): "its processor takes images of equal tile counts only",
    ("mllama", "several prompts"): "text before an image attends to all images of a forward: one prompt each",
    ("mllama", "with and without images"): "text before an image attends to all images of a forward: one prompt each",
}  # fmt: skip
"""What a family cannot do, and why."""


DENSE_ALONE = {"llama4", "minimax_m3_vl", "qwen4_exp"}
"""Families with layers that select tokens by their places in the row, so that prefixes are not shared."""


def shares(policy: Policy) -> bool:
    """Whether the policy's rows can share prefixes."""
    return why_not_shared(policy.transformer) is None


def case_groups(checkpoint: Path, case: str, dtype: torch.dtype = torch.float32) -> list[ScoredGroup]:
    groups = make_groups(checkpoint, CASES[case]) if case in CASES else trajectories(checkpoint, case == IMAGE_TURNS)
    rendered = [each for group in groups for each in whole([group], shared=True).rendered]
    for inputs in (each.mm_inputs for each in rendered):
        inputs |= {name: value.to(dtype) for name, value in inputs.items() if value.is_floating_point()}
    return groups


def trajectories(checkpoint: Path, with_images: bool) -> list[ScoredGroup]:
    """Groups whose completions have one turn, several turns, and several contexts.

    The second context of one holds the first's image again, and its first turn as text.
    """
    first = make_prompt(checkpoint, ONE_IMAGE)
    text = observed_text(6, seed=7)
    if not with_images:
        two = [Context((2, text, 3))], [Context((4, observed_text(1, seed=8), 1, observed_text(3, seed=9), 2))]
        edited = [Context((3, text, 2)), Context((observed_text(9, seed=6), 4))]
        return [make_trajectories(first, [[Context((5,))], *two, edited])]
    other = (24, 32) if needs_equal_tile_counts(checkpoint) else (24, 48)
    same_size = make_observation(checkpoint, [noise_image(32, 24, seed=5)], "Look.")
    other_size = make_observation(checkpoint, [noise_image(*other, seed=6)], "And here.")
    one_turn, seen = [Context((5,))], [Context((3, same_size, 4))]
    edited = [Context((2, same_size, 3)), Context((observed_text(4, seed=9), same_size, text, 2))]
    groups = [make_trajectories(first, [one_turn, seen, [Context((4, text, 1, other_size, 2))], edited])]
    second = make_prompt(checkpoint, [noise_image(*other, seed=8)], "Which one?")
    return [*groups, make_trajectories(second, [[Context((1, other_size, 3))], one_turn], seed=1)]


def needs_equal_tile_counts(checkpoint: Path) -> bool:
    """Whether the inputs of several images can be joined only if they have equally many tiles."""
    return type(processor_of(checkpoint)).__name__ in ("PerceptionLMProcessor", "LlavaOnevisionProcessor")


def observed_text(length: int, seed: int) -> Observation:
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(BYTE_TOKENS.start, BYTE_TOKENS.stop, (length,), generator=generator)
    return Observation(f"text {seed}", token_ids, {}, {})


def cases(family: str) -> list[str]:
    return [case for case in (*CASES, TEXT_TURNS, IMAGE_TURNS) if (family, case) not in NOT_THIS]


@contextmanager
def everything_in_fp64() -> Iterator[None]:
    """Models compute norms, rotary angles and softmaxes in fp32 whatever their weights; inside, fp32 means fp64."""
    patch = mock.patch.object
    double = torch.float64
    with patch(torch, "float32", double), patch(torch, "float", double), patch(Tensor, "float", Tensor.double):
        yield


@contextmanager
def in_fp64(policy: Policy) -> Iterator[Policy]:
    """The policy with fp64 weights, and everything in fp64. Its weights stay so."""
    policy.transformer.set_experts_implementation("eager")  # the usual kernel knows no fp64
    policy.compute_dtype = torch.float64
    with everything_in_fp64():
        yield policy.double()


@dataclass(frozen=True)
class Measured:
    """One family's row of the table; None where the family does not run so."""

    dense: Parity
    dense_fp64: Parity
    shared: Parity | None
    shared_fp64: Parity | None


def measure(checkpoint: Path, names: Sequence[str]) -> Measured:
    """The worst over the cases, with every weight trained."""
    policy = make_policy(checkpoint)
    dense, shared = compare(policy, checkpoint, names, torch.float32)
    with in_fp64(policy):
        dense_fp64, shared_fp64 = compare(policy, checkpoint, names, torch.float64)
    return Measured(dense, dense_fp64, shared, shared_fp64)


def compare(policy: Policy, checkpoint: Path, names: Sequence[str], dtype: torch.dtype) -> tuple[Parity, Parity | None]:
    """Dense rows against the model's own forward, and the shared row against dense rows."""
    dense, shared = [], []
    for case in names:
        groups = case_groups(checkpoint, case, dtype)
        by_row = scores(policy, groups, shared=False)
        dense.append(Parity.of(by_row, stock_scores(policy, groups)))
        if shares(policy):
            shared.append(Parity.of(scores(policy, groups, shared=True), by_row))
    return reduce(or_, dense), reduce(or_, shared) if shared else None


def table(rows: dict[str, Measured]) -> str:
    """Markdown."""

    def cell(parity: Parity | None) -> str:
        return "–" if parity is None else f"{parity.logprobs:.0e} / {parity.gradients:.0e}"

    head = [
        "| family | shared against dense | in fp64 | dense against the model's own forward | in fp64 |",
        "|---|---|---|---|---|",
    ]
    lines = [
        f"| {name} | {cell(m.shared)} | {cell(m.shared_fp64)} | {cell(m.dense)} | {cell(m.dense_fp64)} |"
        for name, m in rows.items()
    ]
    return "\n".join([*head, *lines])


def main() -> None:
    page = Path("docs/families.md")
    with TemporaryDirectory() as directory:
        rows = {
            family: measure(sharp_checkpoint(family, Path(directory) / family), cases(family))
            for family in TINY_FAMILIES
        }
    before, rest = page.read_text().split(TABLE_BEGINS)
    after = rest.split(TABLE_ENDS)[1]
    page.write_text(f"{before}{TABLE_BEGINS}\n\n{table(rows)}\n\n{TABLE_ENDS}{after}")


if __name__ == "__main__":
    main()
