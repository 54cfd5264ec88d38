"""Anything that a reward function may return or raise, and what must hold of the table and the advantages then."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from typing import Any, NoReturn

import numpy as np
import torch
from hypothesis import strategies as st

from rewards.contract import LARGEST_REWARD
from rl_vlm.algorithm.advantages import compute_advantages, total_rewards
from rl_vlm.config.schema import RewardsConfig
from rl_vlm.reward.suite import NOT_APPLICABLE, RewardSuite
from rl_vlm.types import Completion, FaultKey, Group, Prompt, RewardTable, Sample, TrainerState

GROUPS, GROUP_SIZE = 2, 3
COUNT = GROUPS * GROUP_SIZE
STATE = TrainerState(global_step=0, max_steps=1, epoch=0.0)

make: list[Callable[[], Any]] = []
"""What `planted` does at its next call."""


def planted(completions: list[Any]) -> Any:
    """Return or raise what the case says."""
    return make[-1]()


class Hostile:
    """An object whose every method raises."""

    def fail(self, *arguments: Any) -> NoReturn:
        raise RuntimeError("hostile")

    __float__ = __int__ = __len__ = __iter__ = __getitem__ = __repr__ = __str__ = __bool__ = __eq__ = fail  # type: ignore
    __lt__ = __abs__ = item = tolist = fail
    __hash__ = object.__hash__
    ndim = 0


class HostileError(Exception):
    """An exception without a text."""

    def __str__(self) -> str:
        raise RuntimeError("hostile")


def raising(error: BaseException) -> Callable[[], Any]:
    def call() -> NoReturn:
        raise error

    return call


def nested(depth: int) -> list[Any]:
    found: list[Any] = []
    for _ in range(depth):
        found = [found]
    return found


numbers = st.one_of(
    st.floats(width=64),
    st.integers(),
    st.booleans(),
    st.sampled_from([1e6, -1e6, 1e6 + 1, 3e38, 1e300, 5e-324, 10**400, -(10**400), 2**63]),
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.floats(-2, 2).map(np.float32),
    st.floats(-2, 2).map(np.float16),
    st.integers(-5, 5).map(np.int8),
    st.booleans().map(np.bool_),
    st.floats(-2, 2).map(torch.tensor),
    st.floats(-2, 2).map(lambda x: torch.tensor(x, dtype=torch.bfloat16, requires_grad=True)),
    st.floats(-2, 2).map(np.array),
)  # fmt: skip
others = st.one_of(
    st.none(),
    st.text(max_size=20),
    st.binary(max_size=5),
    st.complex_numbers(),
    st.sampled_from([Decimal("0.5"), Fraction(1, 2), Decimal("NaN"), object(), Hostile, math.sin, ..., NotImplemented]),
    st.builds(Hostile),
    st.integers(0, 2000).map(nested),
    st.builds(lambda: torch.zeros(2, 2)),
    st.builds(lambda: torch.zeros(3, device="meta")),
    st.builds(lambda: np.array([None, "a"], dtype=object)),
    st.builds(lambda: (i for i in range(3))),
    st.dictionaries(st.text(max_size=3), st.integers(), max_size=3),
    st.just({1: 2}),
    st.just(set()),
)
elements = st.one_of(numbers, numbers, others)
lists = st.one_of(
    st.lists(elements, min_size=COUNT, max_size=COUNT),
    st.lists(numbers, min_size=COUNT, max_size=COUNT),
    st.lists(elements, max_size=2 * COUNT),
    st.lists(st.floats(-2, 2), min_size=COUNT, max_size=COUNT).map(tuple),
    st.lists(st.floats(width=32), min_size=COUNT, max_size=COUNT).map(np.array),
    st.lists(st.floats(width=32), min_size=COUNT, max_size=COUNT).map(torch.tensor),
)
returned = st.one_of(
    lists,
    lists,
    others,
    numbers,
    st.dictionaries(st.one_of(st.sampled_from(["reward", "iou", "a/b", ""]), st.integers()), lists, max_size=3),
    st.builds(lambda values: {"reward": values, "part": values}, lists),
)
errors = st.sampled_from(
    [
        ValueError("no"), HostileError(), KeyError(Hostile()), SystemExit(3), StopIteration(),
        RecursionError(), MemoryError(), UnicodeDecodeError("utf-8", b"\xff", 0, 1, "bad"),
        OSError(28, "No space left on device"), Exception("x" * 10**6), Exception("\x1b[2J\x1b]0;title\x07\r\n\x9b1m"),
        BaseException("no"), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError(),
    ]
)  # fmt: skip
cases: st.SearchStrategy[Callable[[], Any]] = st.one_of(
    returned.map(lambda value: lambda: value), returned.map(lambda value: lambda: value), errors.map(raising)
)


def make_groups() -> list[Group]:
    """Build groups of made-up completions."""
    completion = Completion(torch.arange(2), torch.zeros(2), "stop", "text")
    return [
        Group(
            f"g{p}", Prompt(Sample(f"s{p}", [], [], {}, "?"), torch.tensor([1]), {}, {}), [completion] * GROUP_SIZE, 0
        )
        for p in range(GROUPS)
    ]


def make_suite() -> RewardSuite:
    return RewardSuite(RewardsConfig(reward_funcs=[f"{__name__}:planted"]))


def check_case(suite: RewardSuite, groups: list[Group], case: Callable[[], Any]) -> str:
    """Score the groups with a function that does what the case says, and check the table. Returns the first fault."""
    make[:] = [case]
    table = suite.score(groups, STATE)
    check_table(table)
    check_plain_numbers(table, case)
    return str(next(iter(table.fault_counts), "no fault"))


def check_table(table: RewardTable) -> None:
    """Check that every completion is valid, faulted and counted, or has no reward and is counted; nothing else."""
    scores_PG, valid_PG, faulted_PG = table.scores_PGF[:, :, 0], table.valid_PG, table.faulted_PG
    assert not (valid_PG & faulted_PG).any()
    assert (scores_PG[valid_PG].isfinite() & (scores_PG[valid_PG].abs() <= LARGEST_REWARD)).all()
    faults = sum(count for name, count in table.fault_counts.items() if str(name) != NOT_APPLICABLE)
    assert faults == int(faulted_PG.sum())
    assert table.fault_counts.get(FaultKey.read(NOT_APPLICABLE), 0) == int((~valid_PG & ~faulted_PG).sum())
    assert bool(table.fault_messages) == bool(table.fault_counts)
    assert all(message.isprintable() and len(message) < 2000 for message in table.fault_messages.values())
    rewards_PG = total_rewards(table.scores_PGF, torch.tensor([1.0]), valid_PG)
    for found in (
        compute_advantages(rewards_PG, valid_PG, "group"),
        compute_advantages(rewards_PG, valid_PG, "none"),
        compute_advantages(rewards_PG, valid_PG, "batch", batch_std=0.5),
    ):
        advantages_PG = found.advantages_PG
        assert advantages_PG.isfinite().all()
        assert (advantages_PG[~valid_PG] == 0).all()


def check_plain_numbers(table: RewardTable, case: Callable[[], Any]) -> None:
    """Check that each plain Python number within bounds, in a list of the right length, is the score as it is."""
    try:
        values = case()
    except BaseException:
        return
    if type(values) not in (list, tuple) or len(values) != COUNT:
        return
    for i, value in enumerate(values):
        if type(value) in (int, float, bool) and abs(value) <= LARGEST_REWARD:
            assert table.valid_PG[i // GROUP_SIZE, i % GROUP_SIZE]
            score = table.scores_PGF[i // GROUP_SIZE, i % GROUP_SIZE, 0].item()
            assert score == float(torch.tensor(float(value)))
