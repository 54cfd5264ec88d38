"""Recorded changes of the token budget, on literal steps."""

from rl_vlm.passes.budget import Budget
from rl_vlm.passes.changes import BudgetChange, BudgetReason
from rl_vlm.stages import Stage
from rl_vlm.types import Progress


def recorded(step: int, tokens: int, reason: BudgetReason = "out_of_memory") -> BudgetChange:
    return BudgetChange(step, "training", tokens, "auto", reason, "")


def budgets(budget: Budget, num_steps: int) -> list[int]:
    """Take steps, and return the budget of each."""
    found = []
    for _ in range(num_steps):
        budget.replay(Stage.TRAINING)
        found.append(budget.tokens)
        budget.progress.global_step += 1
    return found


def make_budget(*changes: BudgetChange) -> Budget:
    budget = Budget(Progress(9, micro_batch_tokens=100), "auto", lambda change: None)
    budget.to_replay = changes
    return budget


def test_changes_are_replayed_at_their_steps():
    budget = make_budget(recorded(2, 80), recorded(4, 90, "calibration"), recorded(5, 40))
    assert budgets(budget, 6) == [100, 80, 80, 90, 40, 40]
    assert budget.progress.measured.is_used


def test_of_two_ranks_that_ran_out_the_smaller_budget_is_replayed():
    assert budgets(make_budget(recorded(1, 30), recorded(1, 50)), 1) == [30]


def test_a_budget_that_was_lowered_since_is_not_raised():
    budget = make_budget(recorded(2, 80), recorded(3, 90, "calibration"), recorded(4, 30))
    budget.change(40, Stage.TRAINING, "out_of_memory", "", is_writer=False)
    assert budgets(budget, 4) == [40, 40, 40, 30]
