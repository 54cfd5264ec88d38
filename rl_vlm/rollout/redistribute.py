"""The states of collectors that were saved on another number of ranks, dealt to the present ones.

Two steps of a window, saved on two ranks and resumed on four:

    saved     rank 0: a b c | e f          rank 1: d | g h
    resumed   rank 0: a | e    rank 1: b | f    rank 2: c | g    rank 3: d | h
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from rl_vlm.log.metrics import StepMetrics

T = TypeVar("T")


def redistributed(states: Sequence[Mapping[str, Any]], rank: int, num_ranks: int) -> dict[str, Any]:
    """Return the state of one rank's collector, given those of all saved ranks, which are another number.

    Each rank gets an equal share of the groups of every optimizer step, and of the groups in flight. What all saved
    ranks have in common is that of the first.
    """
    windows = [state["window"] for state in states]
    coming = [state["next_window"] for state in states]
    in_flight = [group for state in states for group in state["in_flight"]]
    return {
        **states[0],
        "window": windows[0] and window_share(windows, rank, num_ranks),
        "next_window": coming[0] and next_window_share(coming, rank, num_ranks),
        "in_flight": share(in_flight, rank, num_ranks),
    }


def window_share(states: Sequence[Mapping[str, Any]], rank: int, num_ranks: int) -> dict[str, Any]:
    """Return the state of one rank's window, given those of all saved ranks."""
    steps = [[group for part in parts for group in part] for parts in zip(*(s["steps"] for s in states), strict=True)]
    return {**states[0], "steps": [share(step, rank, num_ranks) for step in steps]}


def next_window_share(states: Sequence[Mapping[str, Any]], rank: int, num_ranks: int) -> dict[str, Any]:
    """Return the state of one rank's prefetched window. The metrics of each saved rank go to one present rank."""
    metrics = StepMetrics()
    for state in states[rank::num_ranks]:
        metrics.include(StepMetrics.from_state(state["metrics"]))
    window = window_share([state["window"] for state in states], rank, num_ranks)
    return {"window": window, "metrics": metrics.state_dict()}


def share(items: Sequence[T], rank: int, num_ranks: int) -> list[T]:
    """Return the rank's contiguous part of `items`. Parts are equally long, up to one item."""
    return list(items[rank * len(items) // num_ranks : (rank + 1) * len(items) // num_ranks])
