"""Budgets from measured peaks, on literal bytes."""

from typing import Any

import pytest
import torch

from rl_vlm.distributed.ranks import Ranks
from rl_vlm.passes.budget import PlannedBudget, TokenBudget
from rl_vlm.passes.calibration import MicroBatchPeaks
from rl_vlm.passes.changes import BudgetChange
from rl_vlm.passes.peaks import Peaks
from rl_vlm.passes.recovery import Recovery
from rl_vlm.passes.schedule import Round
from rl_vlm.plan.tracing.groups import make_group
from rl_vlm.stages import Stage, Stages
from rl_vlm.types import Forward, MicroBatch, Progress, Prompt, Sample, SubGroup
from tests.unit.model.test_vision import make_encoder

PROMPT = Prompt(Sample("s", [], [], {}, []), torch.ones(1, dtype=torch.int64), {}, {})
OF_ENGINE = 5000
PLANNED = PlannedBudget(50, available=1000, fixed=100.0, peak=700, most_tokens=80)


class OtherRank(Ranks):
    """Rank 0 of two; the other one measures the same in each step."""

    def __init__(self, found: list[tuple[int, float]]) -> None:
        super().__init__()
        self.found = found

    def gather(self, values: list[Any]) -> list[Any]:
        return [*values, self.found]


class Ledger:
    """Memory of passes that hold `start` bytes, leave gradients behind, and take 10 bytes per token.

    It counts OF_ENGINE bytes more, of another's tensors.
    """

    meaning = "given bytes"

    def __init__(self, start: int, gradients: int, bytes_per_token: int = 10) -> None:
        self.now = self.most = start
        self.start, self.gradients, self.bytes_per_token = start, gradients, bytes_per_token
        self.num_restarts = 0

    def restart(self) -> None:
        self.most = self.now
        self.num_restarts += 1

    def read(self) -> int:
        return self.most + OF_ENGINE

    def run(self, tokens: int) -> None:
        """Run a micro-batch. Gradients are made as its activations are freed."""
        self.most = max(self.most, self.now + 100 + self.bytes_per_token * tokens)
        self.now = self.start + self.gradients


def calibrated(
    memory: Ledger, batches: list[int], planned: PlannedBudget = PLANNED, budget: int = 50, others: Any = ()
) -> BudgetChange:
    """Take four steps of micro-batches with these numbers of tokens, and return the change of the budget."""
    written: list[BudgetChange] = []
    progress = Progress(9)
    ranks = OtherRank(others) if others else Ranks()
    budgets = TokenBudget(ranks, progress, make_encoder(frozen=True), planned, "auto", written.append)
    budgets.load_state_dict(budgets.state_dict() | {"tokens": budget})
    peaks = MicroBatchPeaks(Peaks(memory), OF_ENGINE)
    budgets.correct_by(peaks)
    recovery = Recovery(ranks, budgets, Stages(peaks))

    def passes() -> None:
        memory.now = memory.start  # gradients of the last step are dropped
        for tokens in batches:
            group = make_group(PROMPT, 1, tokens - 1)
            with recovery.running(Round(Forward(MicroBatch([SubGroup(group, [0])], shared=True)))):
                memory.run(tokens)

    for _ in range(4):
        assert not written
        recovery.repeat(Stage.OLD_LOGPROBS, passes, lambda: None, together=False)
        recovery.repeat(Stage.TRAINING, passes, lambda: None, together=False)
        progress.global_step += 1
    (change,) = written
    assert (change.step, change.stage, change.reason) == (4, "training", "calibration")
    assert budgets.tokens == change.micro_batch_tokens
    return change


def test_the_budget_fills_what_is_available():
    # 300 bytes with gradients, and 100 that are fixed: (1000 - 300 - 100) / 10 = 60 tokens.
    assert calibrated(Ledger(100, 200), [50, 40]).micro_batch_tokens == 60


def test_the_training_passes_of_three_steps_are_measured_and_no_others():
    memory = Ledger(100, 200)
    calibrated(memory, [50, 40])
    assert memory.num_restarts == 3 * 2 * 2  # before and after each of two micro-batches


def test_a_larger_peak_than_planned_lowers_the_budget():
    # (1000 - 300 - 100) / 20 = 30 tokens.
    assert calibrated(Ledger(100, 200, bytes_per_token=20), [40, 50]).micro_batch_tokens == 30


def test_the_budget_stays_below_the_largest_of_auto():
    # (1000 - 100 - 100) / 4 = 200 tokens.
    assert calibrated(Ledger(0, 100, bytes_per_token=4), [50, 50]).micro_batch_tokens == 80


@pytest.mark.parametrize("batches", [[24, 24], [50, 24], [50], []])
def test_small_micro_batches_change_nothing(batches: list[int]):
    """The first one is not measured either: it has no gradients beside it."""
    assert calibrated(Ledger(100, 200), batches).micro_batch_tokens == 50


def test_a_budget_that_was_lowered_is_not_raised():
    assert calibrated(Ledger(100, 200), [40, 40], budget=40).micro_batch_tokens == 40


@pytest.mark.parametrize(
    ("other", "tokens"),
    [
        ((300, 12.0), 50),  # (1000 - 300 - 100) / 12
        ((400, 5.0), 50),  # (1000 - 400 - 100) / 10
        ((200, 5.0), 60),
    ],
)
def test_ranks_take_the_largest_figures(other: tuple[int, float], tokens: int):
    assert calibrated(Ledger(100, 200), [50, 50], others=[other]).micro_batch_tokens == tokens


def test_a_rank_that_measures_nothing_takes_the_figures_of_others():
    assert calibrated(Ledger(100, 200), [24], others=[(300, 10.0)]).micro_batch_tokens == 60


def test_nothing_that_fits_leaves_single_completions():
    assert calibrated(Ledger(900, 50), [50, 50]).micro_batch_tokens == 1
