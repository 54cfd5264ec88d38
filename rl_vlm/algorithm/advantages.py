"""Rewards of a group's completions -> advantages (GRPO, https://arxiv.org/abs/2402.03300, section 4.1.2).

P prompts, G completions of a group, F reward functions. Completions with `valid_PG` False are ignored.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

STD_EPSILON = 1e-4


@dataclass(frozen=True)
class Advantages:
    """Advantages of the completions of P groups."""

    advantages_PG: Float[Tensor, "prompts group"]
    """0 for invalid completions and in groups without variance."""
    has_variance_P: Bool[Tensor, " prompts"]
    """False if all advantages of the group are 0, as with equal rewards: it has no policy gradient."""
    turns: list[list[Tensor]] | None = None
    """For each group and completion, the advantages of its turns, if turns have their own."""


def total_rewards(
    scores_PGF: Float[Tensor, "prompts group functions"],
    weights_F: Float[Tensor, " functions"],
    valid_PG: Bool[Tensor, "prompts group"],
) -> Float[Tensor, "prompts group"]:
    """Compute the weighted sum over reward functions; NaN for invalid completions.

    If a function does not apply to a completion (NaN), replace its score by its mean over the group's valid
    completions. This changes neither the completion's advantage nor the group's baseline. TRL counts such a score as 0.
    """
    scores = scores_PGF.double().masked_fill(~valid_PG[:, :, None], torch.nan)
    sibling_means = scores.nanmean(dim=1, keepdim=True).nan_to_num(0.0)
    totals = (torch.where(scores.isnan(), sibling_means, scores) * weights_F).sum(dim=-1)
    return totals.masked_fill(~valid_PG, torch.nan).to(scores_PGF.dtype)


def reward_std(rewards: Float[Tensor, "*groups rewards"]) -> Float[Tensor, "*groups"]:
    """Compute the standard deviation (n - 1) over the last axis, without NaN; 0 if fewer than two rewards are left."""
    count = (~rewards.isnan()).sum(dim=-1)
    squares = (rewards - rewards.nanmean(dim=-1, keepdim=True)).square().nansum(dim=-1)
    return (squares / (count - 1).clamp(min=1)).sqrt()


def compute_advantages(
    rewards_PG: Float[Tensor, "prompts group"],
    valid_PG: Bool[Tensor, "prompts group"],
    scale_rewards: Literal["group", "batch", "none"],
    batch_std: float | None = None,
    rounding: float = 0.0,
) -> Advantages:
    """Subtract the group's mean reward, and divide by the standard deviation + 1e-4 that `scale_rewards` selects.

    `batch_std` is required for "batch": `reward_std` of all valid rewards of the generation batch over all ranks.
    Rewards that differ by at most `rounding` are equal. Raises ValueError if `batch_std` is missing.
    """
    rewards = rewards_PG.masked_fill(~valid_PG, torch.nan)
    spread_P = rewards.nan_to_num(-torch.inf).amax(dim=1) - rewards.nan_to_num(torch.inf).amin(dim=1)
    has_variance_P = spread_P > rounding

    advantages = rewards - rewards.nanmean(dim=1, keepdim=True)
    if scale_rewards == "group":
        advantages = advantages / (reward_std(rewards)[:, None] + STD_EPSILON)
    elif scale_rewards == "batch":
        if batch_std is None:
            raise ValueError("scale_rewards 'batch' needs batch_std, the standard deviation over the generation batch")
        advantages = advantages / (batch_std + STD_EPSILON)
    learns_PG = valid_PG & has_variance_P[:, None]
    return Advantages(advantages.masked_fill(~learns_PG, 0.0), has_variance_P)
