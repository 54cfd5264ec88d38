"""A window that is generated while the one before it is trained on."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rl_vlm.errors import CheckpointError, RolloutError
from rl_vlm.log.metrics import StepMetrics
from rl_vlm.rollout.collector import Collector, NextWindow
from rl_vlm.rollout.redistribute import redistributed
from rl_vlm.rollout.window import Window
from rl_vlm.types import Group, Progress, RolloutRequest, Sampling
from tests.unit.rollout.test_collector import Script, make_collector

NOW = Progress(max_steps=10, global_step=7)


class Held(Script):
    """Answers only once it is let go."""

    def __init__(self, **answers: str) -> None:
        super().__init__(**answers)
        self.let_go = threading.Event()
        self.threads: list[str] = []

    def generate(self, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Group]:
        assert self.let_go.wait(timeout=30)
        self.threads.append(threading.current_thread().name)
        return super().generate(requests, sampling)


def in_training(script: Script, folder: Path | None = None) -> Collector:
    """A collector whose window in training has one update left."""
    collector = make_collector(script, rounds=0, folder=folder)
    collector.window = Window([[]], num_iterations=1)
    return collector


def test_a_window_ahead_is_sampled_in_the_background_and_is_the_next_one() -> None:
    script = Held(a="0 1", b="0 1", c="0 1")
    collector, metrics = in_training(script), StepMetrics()
    before = collector.loader.state_dict()
    collector.prefetch(NOW)
    assert script.calls == []  # the caller goes on at once
    assert collector.loader.state_dict() != before
    script.let_go.set()
    window = collector.take_prefetched(metrics)
    assert window is not None
    assert script.threads != [threading.main_thread().name]
    assert [scored.group.group_id for scored in window.groups] == ["8/0/a", "8/0/b", "8/0/c"]
    assert {scored.group.policy_version for scored in window.groups} == {5}
    found = metrics.reduce(list)
    assert (
        found["answers"] == 6 and {"time/ahead/generation", "time/ahead/rewards", "time/rollout_wait"} <= found.keys()
    )
    assert collector.take_prefetched(metrics) is None
    collector.close()


@pytest.mark.parametrize(("max_steps", "num_calls"), [(8, 0), (9, 1)])
def test_nothing_is_generated_for_steps_behind_the_last(max_steps: int, num_calls: int) -> None:
    script = Script(a="0 1", b="0 1", c="0 1")
    collector = in_training(script)
    collector.prefetch(Progress(max_steps=max_steps, global_step=7))
    collector.finish_prefetch()
    assert len(script.calls) == num_calls
    collector.prefetch(Progress(max_steps=max_steps, global_step=7))  # what is complete is not generated again
    collector.finish_prefetch()
    assert len(script.calls) == num_calls
    collector.close()


def test_a_window_that_is_finished_for_a_checkpoint_is_the_next_one() -> None:
    script = Script(a="0 1", b="0 1", c="0 1")
    collector = in_training(script)
    collector.prefetch(NOW)
    collector.finish_prefetch()
    assert collector.next_window is not None and collector.prefetched is None
    state = collector.next_window.state_dict()
    found = collector.next_window = NextWindow.from_state(state, collector.loader.source)
    metrics = StepMetrics()
    assert collector.take_prefetched(metrics) is found.window
    assert collector.next_window is None and len(script.calls) == 1
    assert [scored.group.group_id for scored in found.window.groups] == ["8/0/a", "8/0/b", "8/0/c"]
    assert metrics.reduce(list)["answers"] == 6
    collector.close()


def test_the_generator_is_free_after_waiting() -> None:
    script = Held(a="0 1", b="0 1", c="0 1")
    collector = in_training(script)
    collector.free_engine(NOW)  # nothing is on its way
    collector.prefetch(NOW)
    threading.Timer(0.2, script.let_go.set).start()
    collector.free_engine(NOW)
    assert len(script.calls) == 1
    collector.close()


def test_an_error_comes_when_the_window_is_taken_and_takes_the_sampler_back() -> None:
    class Lost(Script):
        def generate(self, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Group]:
            raise RolloutError("no server is left")

    collector = in_training(Lost())
    before = collector.loader.state_dict()
    collector.prefetch(NOW)
    with pytest.raises(RolloutError, match="no server is left"):
        collector.take_prefetched(StepMetrics())
    assert collector.loader.state_dict() == before and collector.prefetched is None
    collector.close()


def place(collector: Collector) -> tuple[Any, ...]:
    """Where the collector stands: in the data, in the weights that were sent, and in the random numbers."""
    position = collector.position()
    return position["loader"], position["sent_version"], position["random"]["torch"].tolist()


def test_a_window_that_cannot_be_written_down_is_as_if_it_had_not_been_sampled(tmp_path: Path) -> None:
    (tmp_path / "completions").write_text("a file where a directory should be")
    collector = in_training(Script(a="0 1, 1 0", b="0 1, 1 0", c="0 1, 1 0"), folder=tmp_path)
    before = place(collector)
    collector.prefetch(NOW)
    with pytest.raises(CheckpointError, match="could not write in"):
        collector.finish_prefetch()
    assert (place(collector), collector.prefetched, collector.next_window) == (before, None, None)
    collector.window = None
    with pytest.raises(CheckpointError, match="could not write in"):
        collector.current(NOW, StepMetrics())
    assert (collector.window, place(collector)) == (None, before)
    collector.close()


class Received(Script):
    """Notes the versions of the weights that it is sent."""

    def __init__(self, **answers: str) -> None:
        super().__init__(**answers)
        self.versions: list[int] = []

    def sync(self, source: Any, version: int) -> int:
        self.versions.append(version)
        return 100


@pytest.mark.parametrize(
    ("versions", "saved_version", "max_updates_behind", "sent"),
    [
        ([0, 1, 2], 0, 1, [0, 1, 2]),
        ([0, 0, 1], 0, 1, [0, 1]),  # a skipped update sends nothing
        ([0, 1, 2, 3, 4], 0, 2, [0, 2, 4]),
        ([0, 1, 2, 3], 1, 3, [0, 1]),  # at 1 as behind the checkpoint; at 4 it would be 3 behind
    ],
)
def test_weights_are_sent_when_they_are_due(
    versions: list[int], saved_version: int, max_updates_behind: int, sent: list[int]
) -> None:
    script = Received()
    collector, metrics = make_collector(script, rounds=0), StepMetrics()
    for version in versions:
        saved = saved_version if version >= saved_version else 0
        collector.sync(Progress(10, policy_version=version, saved_version=saved), max_updates_behind, metrics)
    assert script.versions == sent
    assert metrics.sums["weight_sync/bytes"] == 100 * len(sent)
    collector.close()


def test_a_collector_continues_from_its_state() -> None:
    answers = {"a": "0 1, 1 0", "b": "0 1, 1 0", "c": "0 1, 1 0"}
    collector = make_collector(Script(**answers), rounds=0)
    window = collector.current(NOW, StepMetrics())
    collector.prefetch(NOW)
    collector.finish_prefetch()
    state = collector.state_dict()

    script = Received()
    resumed = make_collector(script, rounds=0)
    resumed.load_state_dict(state, NOW)
    assert script.versions == [0]  # the engine had the weights of the checkpoint
    again = resumed.current(NOW, StepMetrics())
    assert [g.group.group_id for g in again.groups] == [g.group.group_id for g in window.groups]
    assert [g.advantages_G.tolist() for g in again.groups] == [g.advantages_G.tolist() for g in window.groups]
    again.updates_done = 1
    following = resumed.current(Progress(max_steps=10, global_step=8), StepMetrics())
    assert [g.group.group_id.split("/")[0] for g in following.groups] == ["8", "8", "8"]
    assert resumed.loader.state_dict()["cursor"] == 6
    for each in (collector, resumed):
        each.close()


def test_windows_that_two_ranks_have_saved_are_resumed_on_one() -> None:
    answers, states = {"a": "0 1, 1 0", "b": "0 1, 1 0", "c": "0 1, 1 0"}, []
    for _ in range(2):
        collector = make_collector(Script(**answers), rounds=0)
        collector.current(NOW, StepMetrics())
        collector.prefetch(NOW)
        collector.finish_prefetch()
        states.append(collector.state_dict())
        collector.close()
    alone = make_collector(Script(), rounds=0)
    alone.load_state_dict(redistributed(states, rank=0, num_ranks=1), NOW)
    assert alone.window is not None and alone.next_window is not None
    assert [g.group.group_id for g in alone.window.groups] == ["7/0/a", "7/0/b", "7/0/c"] * 2
    assert [g.group.group_id for g in alone.next_window.window.groups] == ["8/1/a", "8/1/b", "8/1/c"] * 2
    assert alone.next_window.metrics.means["answers"] == [6 + 6, 2]
    alone.close()


def test_weights_are_sent_again_after_a_window_that_could_not_be_made() -> None:
    class Lost(Received):
        def generate(self, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Group]:
            raise RolloutError("no server is left")

    script = Lost()
    collector = make_collector(script, rounds=0)
    for _ in range(2):
        with pytest.raises(RolloutError):
            collector.current(NOW, StepMetrics())
        assert collector.state_dict()["sent_version"] == -1
    assert script.versions == [0, 0]
    collector.close()
