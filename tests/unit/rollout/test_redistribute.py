"""Collectors' states of some ranks, dealt to another number of them; groups are letters here."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rl_vlm.log.metrics import StepMetrics
from rl_vlm.rollout.redistribute import redistributed
from rl_vlm.run.resume import read_own_state

LOADER = {"cursor": 24, "num_rows": 12, "seed": 0, "shuffle": True}


def window(first: str, second: str) -> dict[str, Any]:
    return {"steps": [list(first), list(second)], "num_iterations": 2, "updates_done": 3}


def state(**parts: Any) -> dict[str, Any]:
    return {"loader": LOADER, "window": None, "next_window": None, "in_flight": [], "sent_version": 7, **parts}


@pytest.mark.parametrize(
    ("num_ranks", "expected"),
    [
        (1, [["abcd", "efgh"]]),
        (2, [["ab", "ef"], ["cd", "gh"]]),
        (4, [["a", "e"], ["b", "f"], ["c", "g"], ["d", "h"]]),
    ],
)
def test_each_rank_has_an_equal_share_of_every_step(num_ranks: int, expected: list[list[str]]) -> None:
    saved = [state(window=window("abc", "ef")), state(window=window("d", "g")), state(window=window("", "h"))]
    found = [redistributed(saved, rank, num_ranks) for rank in range(num_ranks)]
    assert [["".join(step) for step in one["window"]["steps"]] for one in found] == expected
    assert {(one["window"]["num_iterations"], one["window"]["updates_done"]) for one in found} == {(2, 3)}
    assert all(one["loader"] == LOADER and one["sent_version"] == 7 for one in found)
    assert all(one["next_window"] is None and one["in_flight"] == [] for one in found)


def test_groups_in_flight_are_shared() -> None:
    saved = [state(in_flight=list("abc")), state(in_flight=list("def"))]
    assert ["".join(redistributed(saved, rank, 3)["in_flight"]) for rank in range(3)] == ["ab", "cd", "ef"]
    assert redistributed(saved, 0, 3)["window"] is None


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_metrics_of_a_prefetched_window_are_counted_once(num_ranks: int) -> None:
    saved = []
    for rank in range(3):
        metrics = StepMetrics()
        metrics.add_sum("reward_faults/f/nan", rank + 1)
        metrics.add_mean("answers", 10 * rank, 2)
        metrics.add_values(torch.tensor([float(rank)]), max="resampling/rounds")
        saved.append(state(next_window={"window": window("ab", "cd"), "metrics": metrics.state_dict()}))
    found = [redistributed(saved, rank, num_ranks)["next_window"] for rank in range(num_ranks)]
    total = StepMetrics()
    for one in found:
        total.include(StepMetrics.from_state(one["metrics"]))
    reduced = total.reduce(list)
    assert {name: reduced[name] for name in ("reward_faults/f/nan", "answers", "resampling/rounds")} == {
        "reward_faults/f/nan": 1 + 2 + 3, "answers": (0 + 10 + 20) / (2 + 2 + 2), "resampling/rounds": 2.0,
    }  # fmt: skip
    assert "".join(group for one in found for group in one["window"]["steps"][1]) == "cd" * 3


def test_a_rank_that_was_not_saved_has_no_random_states(tmp_path: Path) -> None:
    for rank in range(2):
        own = {"random": f"of rank {rank}", "collector": state(in_flight=["ab", "cd"][rank]), "reward_forms": ["text"]}
        torch.save(own, tmp_path / f"rank_{rank}.pt")
    found = [read_own_state(tmp_path, num_saved=2, rank=rank, num_ranks=4) for rank in range(4)]
    assert [one["random"] for one in found] == ["of rank 0", "of rank 1", None, None]
    assert [one["collector"]["in_flight"] for one in found] == [["a"], ["b"], ["c"], ["d"]]
    assert {tuple(one["reward_forms"]) for one in found} == {("text",)}
    same = read_own_state(tmp_path, num_saved=2, rank=1, num_ranks=2)
    assert (same["random"], same["collector"]["in_flight"]) == ("of rank 1", "cd")
