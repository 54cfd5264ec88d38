"""Peaks of nested blocks and of stages, on a counter whose bytes the test sets."""

import pytest

from rl_vlm.passes.peaks import Block, Peaks, StagePeaks
from rl_vlm.stages import Stage, Stages


class Held:
    """A counter of given bytes."""

    meaning = "bytes of the test"

    def __init__(self, now: int = 0) -> None:
        self.now = self.most = now

    def hold(self, *sizes: int) -> None:
        for size in sizes:
            self.now = size
            self.most = max(self.most, size)

    def restart(self) -> None:
        self.most = self.now

    def read(self) -> int:
        return self.most


def test_an_outer_block_counts_what_an_inner_one_holds():
    held = Held(1)
    peaks = Peaks(held)
    with peaks.block() as outer:
        held.hold(3, 2)
        with peaks.block() as inner:
            held.hold(9, 4)
        with peaks.block() as quiet:
            pass
        held.hold(5, 3)
    held.hold(100)
    assert (outer, inner, quiet) == (Block(1, 9, 3), Block(2, 9, 4), Block(4, 4, 4))


def test_a_block_apart_is_not_a_part_of_the_blocks_around_it():
    held = Held()
    peaks = Peaks(held)
    with peaks.block() as outer:
        held.hold(5, 1)
        with peaks.block(apart=True) as apart, peaks.block() as inner:
            held.hold(30, 2)
        held.hold(7, 0)
    assert (outer, apart, inner) == (Block(0, 7, 0), Block(1, 30, 2), Block(1, 30, 2))


def test_a_block_that_fails_is_closed():
    held = Held()
    peaks = Peaks(held)
    with peaks.block() as outer:
        with pytest.raises(ValueError), peaks.block(apart=True):
            held.hold(9, 0)
            raise ValueError
        held.hold(4)
    assert outer.peak == 4


def test_stages_are_measured_apart_and_the_largest_of_each_is_kept():
    held = Held()
    measured = StagePeaks(Peaks(held), {Stage.TRAINING, Stage.UPDATE})
    stages = Stages(measured)
    for sizes in ((4, 0), (9, 0), (6, 0)):
        with stages.run(Stage.STEP), stages.run(Stage.TRAINING):
            with stages.passes(Stage.TRAINING):
                held.hold(*sizes)
            with stages.run(Stage.UPDATE):
                held.hold(50, 0)
    assert {stage: block.peak for stage, block in measured.take().items()} == {Stage.UPDATE: 50, Stage.TRAINING: 9}
    assert measured.take() == {}


def test_training_does_not_count_what_its_update_leaves_behind():
    held = Held()
    measured = StagePeaks(Peaks(held))
    stages = Stages(measured)
    with stages.run(Stage.TRAINING):
        with stages.passes(Stage.TRAINING):
            held.hold(9, 3)
        with stages.run(Stage.UPDATE):
            held.hold(50, 20)
    assert measured.take() == {Stage.TRAINING: Block(0, 9, 3), Stage.UPDATE: Block(3, 50, 20)}


def test_the_first_blocks_of_a_stage_are_measured_if_that_is_asked_for():
    held = Held()
    measured = StagePeaks(Peaks(held), num_blocks=2)
    stages = Stages(measured)
    for size in (1, 2, 3):
        with stages.run(Stage.SAVE):
            held.hold(size, 0)
    assert measured.largest == {Stage.SAVE: Block(0, 2, 0)}
