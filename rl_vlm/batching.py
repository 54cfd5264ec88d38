"""From the groups of an optimizer step to micro-batches under a token budget.

Groups are packed whole where they fit. A longer one is cut into sub-groups, each of which computes the prefix again;
a single completion is never cut. How groups are packed changes neither the loss nor the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from rl_vlm.types import MicroBatch, ScoredGroup, SubGroup

SHARING_PAYS = 1.1
"""Least ratio of dense to shared tokens, k(P + R) / (P + kR), for which a packed row is worth its overhead."""


def make_micro_batches(
    groups: Sequence[ScoredGroup], budget: int, sharing: Literal["auto", "shared", "dense"]
) -> list[MicroBatch]:
    """Micro-batches of at most `budget` language tokens; their union holds every completion that is valid, once.

    A single completion that is longer than the budget still gets a micro-batch of its own.
    """

    def is_shared(group: ScoredGroup) -> bool:
        return sharing == "shared" or (sharing == "auto" and sharing_ratio(group) >= SHARING_PAYS)

    groups = [group for group in groups if group.valid_G.any()]
    return [
        MicroBatch(subgroups, shared)
        for shared in (True, False)
        for subgroups in pack([group for group in groups if is_shared(group) == shared], budget, shared)
    ]


@dataclass(frozen=True)
class Size:
    """What sub-groups cost in a forward, in language tokens. Sizes of disjoint sub-groups add."""

    unique_tokens: int = 0
    num_rows: int = 0
    longest_row: int = 0

    @staticmethod
    def of(group: ScoredGroup, members: Sequence[int]) -> Size:
        prefix = len(group.group.prompt.token_ids)
        lengths = [len(group.group.completions[i].token_ids) for i in members]
        return Size(prefix + sum(lengths), len(lengths), prefix + max(lengths))

    def __add__(self, other: Size) -> Size:
        return Size(
            self.unique_tokens + other.unique_tokens,
            self.num_rows + other.num_rows,
            max(self.longest_row, other.longest_row),
        )

    def tokens(self, shared: bool) -> int:
        """Tokens of one packed row, or of one padded row per completion."""
        return self.unique_tokens if shared else self.num_rows * self.longest_row


def sharing_ratio(group: ScoredGroup) -> float:
    """Tokens of one padded row per completion, divided by tokens of the shared row."""
    size = Size.of(group, valid_members(group))
    return size.tokens(shared=False) / size.tokens(shared=True)


def valid_members(group: ScoredGroup) -> list[int]:
    """Completions that take part in training."""
    return [i for i, valid in enumerate(group.valid_G.tolist()) if valid]


def pack(groups: Sequence[ScoredGroup], budget: int, shared: bool) -> Iterator[list[SubGroup]]:
    """Fill micro-batches greedily, longest rows first so that padded rows are alike."""
    current: list[SubGroup] = []
    size = Size()
    by_length = sorted(groups, key=lambda group: Size.of(group, valid_members(group)).longest_row, reverse=True)
    for piece in (piece for group in by_length for piece in split(group, budget, shared)):
        piece_size = Size.of(piece.scored, piece.members)
        if current and (size + piece_size).tokens(shared) > budget:
            yield current
            current, size = [], Size()
        current.append(piece)
        size = size + piece_size
    if current:
        yield current


def split(group: ScoredGroup, budget: int, shared: bool) -> list[SubGroup]:
    """The group's valid completions, cut into sub-groups that each fit the budget."""
    members = valid_members(group)
    if Size.of(group, members).tokens(shared) <= budget:
        return [SubGroup(group, members)]
    pieces: list[list[int]] = [[]]
    for member in members:
        if pieces[-1] and Size.of(group, [*pieces[-1], member]).tokens(shared) > budget:
            pieces.append([])
        pieces[-1].append(member)
    return [SubGroup(group, piece) for piece in pieces]


def pad_with_dummies(batches: list[MicroBatch], count: int, spare: ScoredGroup) -> list[MicroBatch]:
    """Bring the number of micro-batches to `count` with one-completion dummies of weight 0.

    Under collectives every rank must run equally many forwards. `spare` is any group of this rank: its tokens are
    valid, so that 0 x loss is 0.
    """
    missing = range(count - len(batches))
    return batches + [MicroBatch([SubGroup(spare, [0])], shared=False, weight=0.0) for _ in missing]
