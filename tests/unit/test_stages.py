"""Stages: listeners hear of them in order, and a listener that fails or a block that fails leaves none open."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from rl_vlm.distributed.sign_of_life import SignOfLife, seconds_without_sign
from rl_vlm.log.metrics import StepMetrics
from rl_vlm.stages import Listener, Stage, Stages


class Diary(Listener):
    """Writes down what it hears."""

    def __init__(self, name: str, lines: list[str]) -> None:
        self.name = name
        self.lines = lines

    @contextmanager
    def noted(self, what: object) -> Iterator[None]:
        self.lines.append(f"{self.name} > {what}")
        try:
            yield
        finally:
            self.lines.append(f"{self.name} < {what}")

    def stage(self, stage: Stage) -> AbstractContextManager[None]:
        return self.noted(stage)

    def passes(self, stage: Stage) -> AbstractContextManager[None]:
        return self.noted(f"passes of {stage}")

    def work(self, work: object) -> AbstractContextManager[None]:
        return self.noted(work)


def test_listeners_hear_of_nested_blocks_in_order():
    lines: list[str] = []
    stages = Stages(Diary("a", lines), Diary("b", lines))
    with stages.run(Stage.TRAINING), stages.passes(Stage.TRAINING), stages.work("micro-batch"):
        lines.append("-")
    assert lines == [
        "a > training", "b > training", "a > passes of training", "b > passes of training",
        "a > micro-batch", "b > micro-batch", "-", "b < micro-batch", "a < micro-batch",
        "b < passes of training", "a < passes of training", "b < training", "a < training",
    ]  # fmt: skip


def test_a_block_that_fails_leaves_no_stage_open():
    lines: list[str] = []
    with pytest.raises(ValueError, match="of the block"), Stages(Diary("a", lines)).run(Stage.UPDATE):
        raise ValueError("of the block")
    assert lines == ["a > update", "a < update"]


def test_a_listener_overrides_what_it_needs():
    class Items(Listener):
        def work(self, work: object) -> AbstractContextManager[None]:
            return Diary("a", lines).noted(work)

    lines: list[str] = []
    stages = Stages(Items())
    with stages.run(Stage.SAVE), stages.passes(Stage.SAVE), stages.work("micro-batch"):
        lines.append("-")
    assert lines == ["a > micro-batch", "-", "a < micro-batch"]


def test_metrics_announce_the_stages_that_they_time():
    lines: list[str] = []
    metrics = StepMetrics(Stages(Diary("a", lines)))
    with metrics.stage(Stage.STEP), metrics.stage(Stage.DATA):
        pass
    assert lines == ["a > step", "a > data", "a < data", "a < step"]
    assert list(metrics.seconds) == ["data", "step"]


@pytest.mark.parametrize("event", [lambda stages: stages.run(Stage.DATA), lambda stages: stages.work(None)])
def test_stages_and_work_are_signs_of_life(event, monkeypatch):
    now = 100.0
    monkeypatch.setattr("rl_vlm.distributed.sign_of_life.time.monotonic", lambda: now)
    stages = Stages(SignOfLife())
    with event(stages):
        now = 130.0
        assert seconds_without_sign() == 30.0
