"""A window that is sampled while the one before it is trained on."""

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from rl_vlm.collector import Ready
from rl_vlm.errors import CheckpointError, RolloutError
from rl_vlm.metrics import StepMetrics
from rl_vlm.types import Group, RolloutRequest, Sampling, TrainerState
from tests.unit.test_collector import Directory, Script, make_collector

NOW, NEXT = TrainerState(7, 10, 0.0), TrainerState(8, 10, 0.0)


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


def test_a_window_ahead_is_sampled_in_the_background_and_is_the_next_one() -> None:
    script = Held(a="0 1", b="0 1", c="0 1")
    collector, metrics = make_collector(script, rounds=0), StepMetrics()
    before = collector.sampler.state_dict()
    collector.collect_ahead(NEXT)
    assert script.calls == []  # the caller goes on at once
    assert collector.sampler.state_dict() != before
    script.let_go.set()
    window = collector.take_ahead(metrics)
    assert window is not None
    assert script.threads != [threading.main_thread().name]
    assert [scored.group.group_id for scored in window.groups] == ["8/0/a", "8/0/b", "8/0/c"]
    assert {scored.group.policy_version for scored in window.groups} == {5}
    found = metrics.reduce(list)
    assert (
        found["answers"] == 6 and {"time/ahead/generation", "time/ahead/rewards", "time/rollout_wait"} <= found.keys()
    )
    assert collector.take_ahead(metrics) is None
    collector.close()


def test_a_window_that_is_finished_for_a_checkpoint_is_the_next_one() -> None:
    script = Script(a="0 1", b="0 1", c="0 1")
    collector = make_collector(script, rounds=0)
    collector.collect_ahead(NEXT)
    collector.finish_ahead()
    assert collector.ready is not None and collector.ahead is None
    state = collector.ready.state_dict()
    found = collector.ready = Ready.from_state(state, lambda draw: collector.prefetcher.prompts([draw])[0])
    metrics = StepMetrics()
    assert collector.take_ahead(metrics) is found.window
    assert collector.ready is None and len(script.calls) == 1
    assert [scored.group.group_id for scored in found.window.groups] == ["8/0/a", "8/0/b", "8/0/c"]
    assert metrics.reduce(list)["answers"] == 6
    collector.close()


def test_the_generator_is_free_after_waiting() -> None:
    script = Held(a="0 1", b="0 1", c="0 1")
    collector = make_collector(script, rounds=0)
    collector.wait()  # nothing is on its way
    collector.collect_ahead(NEXT)
    threading.Timer(0.2, script.let_go.set).start()
    collector.wait()
    assert len(script.calls) == 1
    collector.close()


def test_an_error_comes_when_the_window_is_taken_and_takes_the_sampler_back() -> None:
    class Lost(Script):
        def generate(self, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Group]:
            raise RolloutError("no server is left")

    collector = make_collector(Lost(), rounds=0)
    before = collector.sampler.state_dict()
    collector.collect_ahead(NEXT)
    with pytest.raises(RolloutError, match="no server is left"):
        collector.take_ahead(StepMetrics())
    assert collector.sampler.state_dict() == before and collector.ahead is None
    collector.close()


def test_a_window_that_cannot_be_written_down_is_as_if_it_had_not_been_sampled() -> None:
    class FullDisk(Directory):
        def write_completions(self, step: int, rows: Any) -> None:
            raise CheckpointError("no space left")

    collector = make_collector(Script(a="0 1, 1 0", b="0 1, 1 0", c="0 1, 1 0"), rounds=0)
    before, collector.directory = collector.place(), FullDisk()
    collector.collect_ahead(NEXT)
    with pytest.raises(CheckpointError, match="no space left"):
        collector.finish_ahead()
    assert (collector.place(), collector.ahead, collector.ready) == (before, None, None)
    with pytest.raises(CheckpointError, match="no space left"):
        collector.collect(NEXT, StepMetrics())
    assert collector.place() == before
    collector.close()
