"""Moves groups of an optimizer step between ranks until all ranks train on about equally many tokens.

All ranks draw the same number of rows, but images and completions differ in size, so that some ranks would finish first
and wait. A group moves without pixels: the rank that receives it builds them again (`rollout/states.py`).

Two ranks, with the tokens of each group:

    generated   rank 0: 90 80 20      rank 1: 30 20        190 and 50 tokens
    trained     rank 0: 90 20         rank 1: 80 30 20     110 and 130 tokens: one group has moved
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rl_vlm.algorithm.objective import contributes
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.model.loading import why_not_shared
from rl_vlm.model.policy import Policy
from rl_vlm.passes.micro_batches import VisionTokens, training_tokens
from rl_vlm.rollout.states import Builder
from rl_vlm.rollout.window import DrawnGroup, Window
from rl_vlm.types import ScoredGroup, Sharing

EVEN_ENOUGH = 1.05
"""Groups stay on their ranks if the fullest rank then has at most this many times the tokens of a deal from scratch."""

GroupCost = Callable[[ScoredGroup], int]
"""The tokens that training on a group computes; 0 if it does not contribute to the gradient."""

Costs = Sequence[Sequence[int]]
"""The cost of each group, by rank."""


def cost_of_groups(policy: Policy, price: VisionTokens, wanted: Sharing, has_reference: bool) -> GroupCost:
    """Return the function that computes a group's cost for this policy. `price` is the cost of a prompt's images."""
    sharing: Sharing = "dense" if why_not_shared(policy.transformer) else wanted

    def cost(group: ScoredGroup) -> int:
        is_trained = contributes(group, has_reference, policy.trains_on)
        return training_tokens(group, sharing, price) if is_trained else 0

    return cost


def balance(window: Window, ranks: Ranks, cost: GroupCost, builder: Builder) -> Window:
    """Exchange groups between ranks, and return the window with the groups that this rank trains on.

    All ranks must call this. `builder` makes the prompts of the groups that arrive. If it raises an RLVLMError on one
    rank, all ranks raise it.
    """
    costs = ranks.gather([[[cost(group.scored) for group in step] for step in window.steps]])
    owners = [deal([steps[s] for steps in costs]) for s in range(len(window.steps))]
    own = {(s, ranks.rank, i): group for s, step in enumerate(window.steps) for i, group in enumerate(step)}
    leaving = [(place, group.state_dict()) for place, group in own.items() if owner_of(owners, place) != ranks.rank]
    moved = dict(ranks.gather(leaving))
    with ranks.agree():
        arrived = {
            place: DrawnGroup.from_state(state, builder)
            for place, state in moved.items()
            if owner_of(owners, place) == ranks.rank
        }
    kept = {place: group for place, group in own.items() if place not in moved}
    trained = sorted((kept | arrived).items(), key=lambda item: item[0])
    steps = [[group for place, group in trained if place[0] == s] for s in range(len(window.steps))]
    return replace(window, steps=steps)


def owner_of(owners: Sequence[Sequence[Sequence[int]]], place: tuple[int, int, int]) -> int:
    """Return the rank that trains on the group at `place`: (step, rank that has the group, index on that rank)."""
    step, rank, i = place
    return owners[step][rank][i]


def deal(costs: Costs) -> list[list[int]]:
    """Return the rank that trains on each group of one optimizer step.

    `costs` and the result list the groups by the rank that has them. A deal from scratch sets a limit: `EVEN_ENOUGH`
    times the tokens of its fullest rank. Each rank keeps its groups up to the limit, and the others are dealt. If a
    rank still exceeds the limit, the deal from scratch is taken. Every rank must have a group, and has one after the
    deal. The deal depends on `costs` alone, so all ranks compute the same one.
    """
    dealt, lowest = deal_surplus(costs, limit=0.0)
    mostly_kept, highest = deal_surplus(costs, limit=EVEN_ENOUGH * lowest)
    return mostly_kept if highest <= EVEN_ENOUGH * lowest else dealt


def deal_surplus(costs: Costs, limit: float) -> tuple[list[list[int]], int]:
    """Let each rank keep its groups, longest first, up to `limit` tokens, and deal the others to the emptiest ranks.

    The others are dealt longest first. Ties go to the rank with the fewest groups, then to the rank that has the group.
    Groups that cost nothing are kept. Returns the rank of each group, and the tokens of the fullest rank.
    """
    owners = [[rank] * len(own) for rank, own in enumerate(costs)]
    loads, sizes = [0] * len(costs), [0] * len(costs)
    longest_first = sorted((-cost, rank, i) for rank, own in enumerate(costs) for i, cost in enumerate(own))
    surplus = []
    for cost, rank, i in ((-negative, rank, i) for negative, rank, i in longest_first):
        if loads[rank] + cost > limit:
            surplus.append((cost, rank, i))
            continue
        loads[rank], sizes[rank] = loads[rank] + cost, sizes[rank] + 1
    for cost, home, i in surplus:
        rank = min(range(len(costs)), key=lambda r: (loads[r], sizes[r], r != home, r))
        owners[home][i] = rank
        loads[rank], sizes[rank] = loads[rank] + cost, sizes[rank] + 1
    return owners, max(loads)
