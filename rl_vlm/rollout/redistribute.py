"""Redistributes the saved states of collectors if a run is resumed on another number of ranks.

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
    """Return one rank's collector state, given the states that another number of ranks saved.

    Each rank gets an equal share of the groups of every optimizer step, and of the groups in flight. Everything else
    is the same on all saved ranks, and comes from the first.
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
    """Return one rank's window state, given the window states of all saved ranks."""
    steps = [[group for part in parts for group in part] for parts in zip(*(s["steps"] for s in states), strict=True)]
    return {**states[0], "steps": [share(step, rank, num_ranks) for step in steps]}


def next_window_share(states: Sequence[Mapping[str, Any]], rank: int, num_ranks: int) -> dict[str, Any]:
    """Return the state of one rank's prefetched window. Each saved rank's metrics go to one present rank."""
    metrics = StepMetrics()
    for state in states[rank::num_ranks]:
        metrics.include(StepMetrics.from_state(state["metrics"]))
    window = window_share([state["window"] for state in states], rank, num_ranks)
    return {"window": window, "metrics": metrics.state_dict()}


def share(items: Sequence[T], rank: int, num_ranks: int) -> list[T]:
    """Return the rank's contiguous part of `items`. Lengths of parts differ by at most one."""
    return list(items[rank * len(items) // num_ranks : (rank + 1) * len(items) // num_ranks])
