"""From the groups of an optimizer step to micro-batches under a token budget.

Groups are packed whole where they fit. A longer one is cut into sub-groups, each of which computes the prefix again;
a single completion is never cut. How groups are packed changes neither the loss nor the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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


def sharing_ratio(group: ScoredGroup) -> float:
    """Tokens of one padded row per completion, divided by tokens of the shared row."""
    members = valid_members(group)
    return cost([SubGroup(group, members)], shared=False) / cost([SubGroup(group, members)], shared=True)


def valid_members(group: ScoredGroup) -> list[int]:
    """Completions that take part in training."""
    return [i for i, valid in enumerate(group.valid_G.tolist()) if valid]


def pack(groups: Sequence[ScoredGroup], budget: int, shared: bool) -> Iterator[list[SubGroup]]:
    """Fill micro-batches greedily, longest rows first so that padded rows are alike."""
    current: list[SubGroup] = []
    for group in sorted(groups, key=row_length, reverse=True):
        for piece in split(group, budget, shared):
            if current and cost([*current, piece], shared) > budget:
                yield current
                current = []
            current.append(piece)
    if current:
        yield current


def split(group: ScoredGroup, budget: int, shared: bool) -> list[SubGroup]:
    """The group's valid completions, cut into sub-groups that each fit the budget."""
    pieces: list[list[int]] = [[]]
    for member in valid_members(group):
        if pieces[-1] and cost([SubGroup(group, [*pieces[-1], member])], shared) > budget:
            pieces.append([])
        pieces[-1].append(member)
    return [SubGroup(group, members) for members in pieces if members]


def row_length(group: ScoredGroup) -> int:
    """Tokens of the group's longest padded row."""
    return len(group.group.prompt.token_ids) + max(len(c.token_ids) for c in group.group.completions)


def cost(subgroups: Sequence[SubGroup], shared: bool) -> int:
    """Language tokens that a forward over the sub-groups holds."""
    prefixes = [len(s.prompt.token_ids) for s in subgroups]
    completions = [[len(c.token_ids) for c in s.completions] for s in subgroups]
    if shared:
        return sum(prefixes) + sum(map(sum, completions))
    rows = [prefix + length for prefix, lengths in zip(prefixes, completions, strict=True) for length in lengths]
    return len(rows) * max(rows)


def pad_with_dummies(batches: list[MicroBatch], count: int, spare: ScoredGroup) -> list[MicroBatch]:
    """Bring the number of micro-batches to `count` with one-completion dummies of weight 0.

    Under collectives every rank must run equally many forwards. `spare` is any group of this rank: its tokens are
    valid, so that 0 x loss is 0.
    """
    missing = range(count - len(batches))
    return batches + [MicroBatch([SubGroup(spare, [0])], shared=False, weight=0.0) for _ in missing]
