"""Reward tables and the groups that they score, in training and evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from rl_vlm.algorithm.advantages import Advantages, total_rewards
from rl_vlm.algorithm.turn_advantages import advantages_of_groups
from rl_vlm.config.schema import AlgorithmConfig, RunConfig
from rl_vlm.data.check import UsableRows, check_rows
from rl_vlm.data.samples import load_rows
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import RewardError
from rl_vlm.log.completions import answer_in
from rl_vlm.reward.golds import answer_columns, gold_given
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.types import FaultKey, Group, RewardTable, ScoredGroup


def checked_rows(config: RunConfig, split: Literal["train", "eval"], rewards: RewardSuite, ranks: Ranks) -> UsableRows:
    """Load and check the training or held-out rows. Raises DataError or RewardError if they cannot be used."""
    rows = load_rows(config.data, split)
    rewards.check_columns(rows.columns)
    golds = answer_columns(rows.columns, rewards.functions)
    return check_rows(rows, rewards.columns, ranks, partial(gold_given, golds))


def choose_forms(rewards: RewardSuite, usable: UsableRows, ranks: Ranks) -> None:
    """Choose the form in which each reward function gets completions. The main process chooses for all ranks."""
    forms = []
    with ranks.agree():
        if ranks.is_main:
            forms = rewards.find_forms(partial(usable.example, rewards.columns))
    rewards.use_forms(ranks.gather(forms))


def weighted_rewards(table: RewardTable, weights: Sequence[float]) -> Float[Tensor, "prompts group"]:
    """Return the weighted sum over reward functions, or NaN for invalid completions. See `total_rewards`."""
    return total_rewards(table.scores_PGF, torch.tensor(weights), table.valid_PG)


def without_variance(
    groups: Sequence[Group], table: RewardTable, weights: Sequence[float], algorithm: AlgorithmConfig
) -> list[int]:
    """Return the indices of the groups whose advantages are all 0. Scaling does not change that."""
    unscaled = algorithm.model_copy(update={"scale_rewards": "none"})
    has_variance_P = advantages_of_groups(
        groups, weighted_rewards(table, weights), table.valid_PG, unscaled
    ).has_variance_P
    return [p for p, varies in enumerate(has_variance_P.tolist()) if not varies]


def score_groups(
    groups: Sequence[Group],
    table: RewardTable,
    rewards_PG: Float[Tensor, "prompts group"],
    advantages: Advantages,
    decisive: str | None = None,
) -> list[ScoredGroup]:
    """Add the scores, rewards and advantages of each group. Count its answers as the function `decisive` reads them."""
    return [
        ScoredGroup(
            group,
            scores_GF=table.scores_PGF[p],
            rewards_G=rewards_PG[p],
            advantages_G=advantages.advantages_PG[p],
            valid_G=table.valid_PG[p],
            has_variance=bool(advantages.has_variance_P[p]),
            num_answers=None if decisive is None else num_answers(group, table, p, decisive),
            turn_advantages=[] if advantages.turns is None else advantages.turns[p],
        )
        for p, group in enumerate(groups)
    ]


def num_answers(group: Group, table: RewardTable, p: int, name: str) -> int:
    """Count the distinct answers of group p to the reward function `name`."""
    column = table.breakdown.get(f"{name}/answer", table.breakdown.get("answer"))
    logged = [None] * len(group.completions) if column is None else column[p]
    return len({answer_in(one.text, given) for one, given in zip(group.completions, logged, strict=True)})


def check_faults(
    table: RewardTable, ranks: Ranks, max_fault_fraction: float, must_not_fail: Sequence[str] = ()
) -> None:
    """Raise RewardError on every rank if no completion of a window has a reward, or too many have a fault.

    A single fault of a function in `must_not_fail` is too many. All ranks must call this, each with the table of its
    groups.
    """
    valid_PG, faulted_PG = table.valid_PG, table.faulted_PG
    num_refused = sum(n for fault, n in table.fault_counts.items() if fault.function in must_not_fail)
    sums = ranks.sum([float(valid_PG.sum()), float(faulted_PG.sum()), float(valid_PG.numel()), float(num_refused)])
    num_valid, num_faulted, num_completions, num_refused = map(int, sums)
    if num_valid and num_faulted <= max_fault_fraction * num_completions and not num_refused:
        return
    messages = ranks.gather(list(table.fault_messages.items()))
    first_of_kind = dict(reversed(messages))
    if num_refused:
        found = f"a reward function with on_error: raise fails on {num_refused} completions of a generation window"
    elif num_valid:
        found = (
            f"{failing(first_of_kind)} fail on {num_faulted} of the {num_completions} completions of a generation "
            f"window, more than rewards.max_fault_fraction {max_fault_fraction:g} allows"
        )
    else:
        found = f"none of the {num_completions} completions of a generation window has a reward"
    faults = "\n".join(reversed(first_of_kind.values()))
    with ranks.agree():
        raise RewardError(
            f"{found}:\n{faults}\nFix the function or the data, and resume with train.resume_from_checkpoint=auto."
        )


def failing(faults: Iterable[FaultKey]) -> str:
    """Say whether reward functions, environments or both have failed."""
    return " and ".join(
        sorted({"environments" if fault.function == "environment" else "reward functions" for fault in faults})
    )


def replace_rows(table: RewardTable, new: RewardTable, rows: Mapping[int, int]) -> None:
    """Replace row p of `table` with row `rows[p]` of `new`, for every p in `rows`.

    Metrics and faults count calls, so they are added up. They include the calls for groups that are dropped.
    """
    for p, i in rows.items():
        table.scores_PGF[p] = new.scores_PGF[i]
        table.valid_PG[p] = new.valid_PG[i]
        table.faulted_PG[p] = new.faulted_PG[i]
        for g in range(table.valid_PG.shape[1]):
            table.faults.pop((p, g), None)
            if (i, g) in new.faults:
                table.faults[p, g] = new.faults[i, g]
    num_groups, group_size = table.valid_PG.shape
    for column in dict.fromkeys([*table.breakdown, *new.breakdown]) if rows else ():
        values = table.breakdown.setdefault(column, [[None] * group_size for _ in range(num_groups)])
        for p, i in rows.items():
            values[p] = new.breakdown[column][i] if column in new.breakdown else [None] * group_size
    for metric, logged in new.metrics.items():
        table.metrics.setdefault(metric, []).extend(logged)
    for fault, count in new.fault_counts.items():
        table.fault_counts[fault] = table.fault_counts.get(fault, 0) + count
    for fault, message in new.fault_messages.items():
        table.fault_messages.setdefault(fault, message)
