"""Rewards of turns -> advantages of turns, by `algorithm.turn_advantages`.

A turn has the reward of its step. The last turn also gets the part of the completion's total reward that no step
accounts for. So the rewards of turns add up to the total, and without steps the last turn has the total. The return of
a turn is its reward plus `turn_discount` times the return of the next turn.

    none     completions ─ normalised over the group ─────────────────────────► all turns of a completion
    return   returns of turns ─ normalised over all turns of the group ───────► each turn
    gigpo    the advantage of `none` + `turn_weight` * (returns of turns ─ normalised over the turns of the group that
             begin with an equal observation), as in GiGPO (https://arxiv.org/abs/2505.10978, equations 3 to 8)

Invalid completions have no turn in any of these sets, and advantages of 0. `scale_rewards: group` divides by the
standard deviation of each set, and `batch` by the one of all returns of the generation batch. The first part of
`gigpo` is scaled as in `none`. A group is without variance if all its advantages are 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rl_vlm.algorithm.advantages import Advantages, compute_advantages
from rl_vlm.config.schema import AlgorithmConfig
from rl_vlm.types import Completion, Group, Rendered

RETURN_ROUNDING = 1e-6
"""Returns of a group are equal if they differ by no more than this part of its largest reward or return."""

BatchStd = Callable[[Tensor], float]
"""Computes `reward_std` of the values of all ranks. NaN is left out. All ranks must call it."""


@dataclass(frozen=True)
class Returns:
    """The returns of the turns of a group."""

    values_T: Float[Tensor, " turns"]
    """Completion after completion; NaN for invalid completions."""
    counts: list[int]
    """Number of turns of each completion."""
    rounding: float
    """Returns that differ by no more are equal."""


@dataclass(frozen=True)
class Scale:
    """Divisor of advantages. See `compute_advantages`."""

    scale_rewards: Literal["group", "batch", "none"]
    batch_std: float | None

    def normalised(self, returns: Returns, turns: Sequence[int]) -> tuple[Tensor, bool]:
        """Return the advantages of some turns among each other, and whether their returns differ."""
        values_T = returns.values_T[list(turns)]
        found = compute_advantages(
            values_T[None], ~values_T.isnan()[None], self.scale_rewards, self.batch_std, returns.rounding
        )
        return found.advantages_PG[0], bool(found.has_variance_P[0])


def advantages_of_groups(
    groups: Sequence[Group],
    rewards_PG: Float[Tensor, "prompts group"],
    valid_PG: Bool[Tensor, "prompts group"],
    algorithm: AlgorithmConfig,
    batch_std: BatchStd | None = None,
) -> Advantages:
    """Compute the advantages of groups by `turn_advantages`, from the total rewards of completions.

    `batch_std` is required if `scale_rewards` is "batch".
    """
    scale = algorithm.scale_rewards

    def std_of(values: Tensor) -> float | None:
        return batch_std(values) if scale == "batch" and batch_std is not None else None

    if algorithm.turn_advantages == "none":
        return compute_advantages(rewards_PG, valid_PG, scale, std_of(rewards_PG))
    returns = [
        returns_of(group, rewards_G, valid_G, algorithm.turn_discount)
        for group, rewards_G, valid_G in zip(groups, rewards_PG, valid_PG, strict=True)
    ]
    of_returns = Scale(scale, std_of(torch.cat([rewards_PG.new_empty(0), *(each.values_T for each in returns)])))
    if algorithm.turn_advantages == "return":
        return of_turns(returns, [of_returns.normalised(each, range(len(each.values_T))) for each in returns])
    whole = compute_advantages(rewards_PG, valid_PG, scale, std_of(rewards_PG))
    found = []
    for p, each in enumerate(returns):
        among_equals_T, differ = over_equal_starts(groups[p], each, of_returns)
        of_whole_T = whole.advantages_PG[p].repeat_interleave(torch.tensor(each.counts))
        found.append((of_whole_T + algorithm.turn_weight * among_equals_T, differ or bool(whole.has_variance_P[p])))
    return of_turns(returns, found)


def returns_of(
    group: Group, rewards_G: Float[Tensor, " group"], valid_G: Bool[Tensor, " group"], discount: float
) -> Returns:
    """Compute the returns of all turns of a group."""
    values: list[float] = []
    for completion, total, is_valid in zip(group.completions, rewards_G.tolist(), valid_G.tolist(), strict=True):
        if is_valid:
            values += discounted(turn_rewards(completion, total), discount)
        else:
            values += [math.nan] * len(completion.turn_lengths)
    values_T = torch.tensor(values, dtype=rewards_G.dtype)
    largest = torch.cat([values_T, rewards_G]).abs().nan_to_num(0.0).max().item()
    return Returns(
        values_T, [len(completion.turn_lengths) for completion in group.completions], RETURN_ROUNDING * largest
    )


def turn_rewards(completion: Completion, total: float) -> list[float]:
    """Return the rewards of turns. The last one also gets the part of the total that no step accounts for."""
    *earlier, last = [turn.reward or 0.0 for turn in completion.turns] or [0.0]
    return [*earlier, last + total - sum(earlier, last)]


def discounted(rewards: Sequence[float], discount: float) -> list[float]:
    """Return the return of each turn: its reward plus `discount` times the return of the next turn."""
    backwards = accumulate(reversed(rewards), lambda later, reward: reward + discount * later)
    return list(backwards)[::-1]


def over_equal_starts(group: Group, returns: Returns, scale: Scale) -> tuple[Tensor, bool]:
    """Return the advantages of turns among those with an equal start, and whether returns differ at any start.

    A turn with a unique start gets 0.
    """
    alike: dict[bytes, list[int]] = {}
    completions = enumerate(group.completions)
    starts = [start for i, completion in completions for start in completion.turn_starts(group.prompt_of(i))]
    for turn, start in enumerate(starts):
        alike.setdefault(start_key(start), []).append(turn)
    advantages_T, any_differ = torch.zeros_like(returns.values_T), False
    for turns in alike.values():
        if len(turns) > 1:
            advantages_T[turns], differ = scale.normalised(returns, turns)
            any_differ |= differ
    return advantages_T, any_differ


def start_key(start: Rendered) -> bytes:
    """Return a digest of the tokens and images that a turn begins with."""
    return blake2b(start.token_ids.numpy().tobytes() + start.digest, digest_size=16).digest()


def of_turns(returns: Sequence[Returns], found: Sequence[tuple[Tensor, bool]]) -> Advantages:
    """Put the advantages of turns together. The advantage of a completion is their mean."""
    turns = [list(values_T.split(each.counts)) for each, (values_T, _) in zip(returns, found, strict=True)]
    means = [torch.stack([values.mean() for values in of_group]) for of_group in turns]
    return Advantages(torch.stack(means), torch.tensor([differ for _, differ in found]), turns)
