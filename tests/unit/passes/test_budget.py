"""Recorded changes of the token budget, on literal steps."""

import torch

from rl_vlm.distributed.collectives import Collectives
from rl_vlm.passes.budget import PlannedBudget, TokenBudget
from rl_vlm.passes.changes import BudgetChange, BudgetReason
from rl_vlm.stages import Stage
from rl_vlm.types import Progress
from tests.unit.model.test_vision import make_encoder


def recorded(step: int, tokens: int, reason: BudgetReason = "out_of_memory") -> BudgetChange:
    return BudgetChange(step, "training", tokens, "auto", reason, "")


def budgets(budget: TokenBudget, num_steps: int) -> list[int]:
    """Take steps, and return the budget of each."""
    found = []
    for _ in range(num_steps):
        budget.before(Stage.TRAINING)
        found.append(budget.tokens)
        budget.progress.global_step += 1
    return found


def make_budget(*changes: BudgetChange) -> TokenBudget:
    budget = TokenBudget(Collectives(torch.device("cpu")), Progress(9), make_encoder(), PlannedBudget(100))
    budget.replay(changes)
    return budget


def test_changes_are_replayed_at_their_steps():
    budget = make_budget(recorded(2, 80), recorded(4, 90, "calibration"), recorded(5, 40))
    assert budgets(budget, 6) == [100, 80, 80, 90, 40, 40]
    assert budget.measured.is_used


def test_of_two_ranks_that_ran_out_the_smaller_budget_is_replayed():
    assert budgets(make_budget(recorded(1, 30), recorded(1, 50)), 1) == [30]


def test_a_budget_that_was_lowered_since_is_not_raised():
    budget = make_budget(recorded(2, 80), recorded(3, 90, "calibration"), recorded(4, 30))
    budget.lower(Stage.TRAINING, 40, "", is_writer=False)
    assert budgets(budget, 4) == [40, 40, 40, 30]


def test_the_state_holds_what_is_in_force():
    budget = make_budget(recorded(1, 70, "calibration"))
    assert budgets(budget, 1) == [70]
    other = make_budget()
    other.load_state_dict(budget.state_dict())
    assert (other.tokens, other.measured.is_used) == (70, True)
    assert budget.state_dict() == {
        "tokens": 70,
        "patch_price": 0.0,
        "measured": {"steps": 0, "held": 0, "bytes_per_token": 0.0, "is_used": True},
    }


def test_replayed_failures_are_counted_and_corrections_are_not():
    budget = make_budget(recorded(1, 90, "calibration"), recorded(1, 30), recorded(1, 20))
    assert budget.before(Stage.OLD_LOGPROBS) == 0
    assert budget.before(Stage.TRAINING) == 2


def test_a_plan_that_leaves_nothing_is_a_plan():
    assert str(PlannedBudget(8)) == "no memory plan was made"
    assert str(PlannedBudget(8, available=0, peak=2**30)) == (
        "the memory plan has 1.00 GiB for 8 tokens, of 0.00 GiB available"
    )
