"""From the groups of an optimizer step to micro-batches under a token budget.

Groups are packed whole where they fit. A longer one is cut into sub-groups, each of which computes the prefix again;
a single completion is never cut. How groups are packed changes neither the loss nor the gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rl_vlm.types import MicroBatch, Prompt, ScoredGroup, SubGroup

SHARING_PAYS = 1.1
"""Least ratio of dense to shared tokens, k(P + R) / (P + kR), for which a packed row is worth its overhead."""


Sharing = Literal["auto", "shared", "dense"]
VisionTokens = Callable[[Prompt], int]
"""What the vision tower's work on a prompt's images costs, in language tokens."""


def make_micro_batches(
    groups: Sequence[ScoredGroup],
    budget: int,
    sharing: Sharing,
    vision_tokens: VisionTokens = lambda prompt: 0,
    mixes_prompts: bool = True,
) -> list[MicroBatch]:
    """Micro-batches of at most `budget` tokens; their union holds every completion that is valid, once.

    Tokens are those that the language model computes, padding included, and `vision_tokens` of each image that the
    vision tower computes. A single completion that is longer than the budget still gets a micro-batch of its own.
    Without `mixes_prompts` every micro-batch holds one prompt.
    """
    by_reason: dict[str | None, list[ScoredGroup]] = {None: []}
    for group in groups:
        if group.valid_G.any():
            by_reason.setdefault(why_dense(group, sharing), []).append(group)
    return [
        MicroBatch(subgroups, shared=reason is None, dense_reason=reason)
        for reason, some in by_reason.items()
        for subgroups in Packer(budget, reason is None, vision_tokens, mixes_prompts).pack(some)
    ]


def why_dense(group: ScoredGroup, sharing: Sharing) -> str | None:
    """Why a group is computed as one padded row per completion, or None where its prefix is shared."""
    if sharing == "auto":
        return None if sharing_ratio(group) >= SHARING_PAYS else "little_to_share"
    return None if sharing == "shared" else "not_shared"


@dataclass(frozen=True)
class Size:
    """What sub-groups cost in a forward. Sizes of disjoint sub-groups add."""

    unique_tokens: int = 0
    num_rows: int = 0
    longest_row: int = 0
    vision_tokens: int = 0

    @staticmethod
    def of(group: ScoredGroup, members: Sequence[int], vision_tokens: int = 0) -> Size:
        prefix = len(group.group.prompt.token_ids)
        lengths = [len(group.group.completions[i].token_ids) for i in members]
        return Size(prefix + sum(lengths), len(lengths), prefix + max(lengths), vision_tokens)

    def __add__(self, other: Size) -> Size:
        return Size(
            self.unique_tokens + other.unique_tokens,
            self.num_rows + other.num_rows,
            max(self.longest_row, other.longest_row),
            self.vision_tokens + other.vision_tokens,
        )

    def tokens(self, shared: bool) -> int:
        """Tokens of one packed row, or of one padded row per completion, and those of vision."""
        return self.vision_tokens + (self.unique_tokens if shared else self.num_rows * self.longest_row)


def sharing_ratio(group: ScoredGroup) -> float:
    """Language tokens of one padded row per completion, divided by those of the shared row."""
    size = Size.of(group, valid_members(group))
    return size.tokens(shared=False) / size.tokens(shared=True)


def valid_members(group: ScoredGroup) -> list[int]:
    """Completions that take part in training."""
    return [i for i, valid in enumerate(group.valid_G.tolist()) if valid]


@dataclass(frozen=True)
class Packer:
    """Fills micro-batches of one layout under a budget."""

    budget: int
    shared: bool
    vision_tokens: VisionTokens
    mixes_prompts: bool

    def pack(self, groups: Sequence[ScoredGroup]) -> Iterator[list[SubGroup]]:
        """Fill micro-batches greedily, longest rows first so that padded rows are alike."""
        current: list[SubGroup] = []
        size = Size()
        by_length = sorted(groups, key=lambda group: Size.of(group, valid_members(group)).longest_row, reverse=True)
        for piece in (piece for group in by_length for piece in self.split(group)):
            piece_size = self.size(piece.scored, piece.members)
            if current and not (self.mixes_prompts and self.fits(size + piece_size)):
                yield current
                current, size = [], Size()
            current.append(piece)
            size = size + piece_size
        if current:
            yield current

    def split(self, group: ScoredGroup) -> list[SubGroup]:
        """The group's valid completions, cut into sub-groups that each fit the budget."""
        members = valid_members(group)
        if self.fits(self.size(group, members)):
            return [SubGroup(group, members)]
        pieces: list[list[int]] = [[]]
        for member in members:
            if pieces[-1] and not self.fits(self.size(group, [*pieces[-1], member])):
                pieces.append([])
            pieces[-1].append(member)
        return [SubGroup(group, piece) for piece in pieces]

    def size(self, group: ScoredGroup, members: Sequence[int]) -> Size:
        return Size.of(group, members, self.vision_tokens(group.group.prompt))

    def fits(self, size: Size) -> bool:
        return size.tokens(self.shared) <= self.budget


def pad_with_dummies(batches: list[MicroBatch], count: int, spare: ScoredGroup) -> list[MicroBatch]:
    """Bring the number of micro-batches to `count` with one-completion dummies of weight 0.

    Under collectives every rank must run equally many forwards. `spare` is any group of this rank: its tokens are
    valid, so that 0 x loss is 0.
    """
    missing = range(count - len(batches))
    return batches + [MicroBatch([SubGroup(spare, [0])], shared=False, weight=0.0) for _ in missing]
