"""Every combination of the batch settings is solved, or refused with changes after which it is solved."""

from collections.abc import Iterable
from itertools import product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from rl_vlm.config.batch_settings import BatchSettings, Solution, nearest_valid, solve
from rl_vlm.errors import ConfigError


def refused(**given_values: int) -> tuple[str, list[dict[str, int | None]]]:
    """Message and suggested changes for G = 8 on one process, unless `given_values` say otherwise."""
    batch = BatchSettings(**{"num_generations": 8, "world_size": 1} | given_values)
    with pytest.raises(ConfigError) as error:
        solve(batch)
    return str(error.value), nearest_valid(batch)


def test_prompts_that_processes_cannot_share():
    message, changes = refused(prompts_per_step=6, world_size=4)
    assert message == (
        "`prompts_per_step` 6 cannot be shared equally among 4 processes; "
        "nearest valid: `prompts_per_step` 4 or `prompts_per_step` 8 or 3 processes or 6 processes"
    )
    assert changes == [{"prompts_per_step": 4}, {"prompts_per_step": 8}, {"world_size": 3}, {"world_size": 6}]


@pytest.mark.parametrize(
    ("values", "problem", "changes"),
    [
        (  # TRL's default is 8 completions per device
            {"num_generations": 6}, "8 completions .* not whole groups of `num_generations` 6",
            [
                {"per_device_train_batch_size": 6}, {"per_device_train_batch_size": 12},
                {"gradient_accumulation_steps": 3}, {"num_generations": 4}, {"num_generations": 8},
            ],
        ),
        (
            {"per_device_train_batch_size": 1}, "1 × `gradient_accumulation_steps` 1 = 1 completions",
            [{"per_device_train_batch_size": 8}, {"gradient_accumulation_steps": 8}],
        ),
        (
            {"prompts_per_step": 2, "per_device_train_batch_size": 6}, "makes 16 completions .* not a multiple of",
            [
                {"prompts_per_step": 3}, {"per_device_train_batch_size": 4}, {"per_device_train_batch_size": 8},
                {"num_generations": 6}, {"num_generations": 9},
            ],
        ),
        (
            {"prompts_per_step": 2, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4},
            "makes 16 completions .* not `per_device_train_batch_size` 8 × `gradient_accumulation_steps` 4 = 32",
            [
                {"prompts_per_step": 4}, {"per_device_train_batch_size": 4}, {"gradient_accumulation_steps": 2},
                {"num_generations": 16},
            ],
        ),
        (
            {"gradient_accumulation_steps": 2, "steps_per_generation": 5}, "5 is not a whole number of optimizer steps",
            [
                {"gradient_accumulation_steps": 1}, {"gradient_accumulation_steps": 5}, {"steps_per_generation": 4},
                {"steps_per_generation": 6},
            ],
        ),
        (  # no batch on 2 processes has 3 micro-steps per step and 5 per generation
            {"prompts_per_step": 3, "world_size": 2, "gradient_accumulation_steps": 3, "steps_per_generation": 5},
            "3 cannot be shared equally among 2 processes",
            [
                {"steps_per_generation": None, "prompts_per_step": 6}, {"steps_per_generation": None, "world_size": 1},
            ],
        ),
    ],
)  # fmt: skip
def test_a_refusal_names_the_problem_and_the_nearest_valid_values(values, problem, changes):
    with pytest.raises(ConfigError, match=problem):
        solve(BatchSettings(**{"num_generations": 8, "world_size": 1} | values))
    assert refused(**values)[1] == changes


def test_settings_to_leave_out_are_named():
    message, _ = refused(
        prompts_per_step=3, per_device_train_batch_size=7, gradient_accumulation_steps=5, steps_per_generation=3
    )
    assert "without `" in message


def check_solution(batch: BatchSettings, solution: Solution) -> None:
    """The equations of the batch, written out again."""
    group, processes, accumulation = batch.num_generations, batch.world_size, solution.gradient_accumulation_steps
    prompts = solution.prompts_per_step
    assert prompts % processes == 0
    completions = prompts * group // processes
    assert completions > 0
    if batch.prompts_per_step:
        assert prompts == batch.prompts_per_step
    else:
        assert completions == (batch.per_device_train_batch_size or 8) * accumulation
    if batch.per_device_train_batch_size:
        assert prompts * group == batch.per_device_train_batch_size * accumulation * processes
    if batch.gradient_accumulation_steps:
        assert accumulation == batch.gradient_accumulation_steps
        assert completions % accumulation == 0
    assert solution.steps_per_window * accumulation == (batch.steps_per_generation or accumulation)


def check(batch: BatchSettings) -> bool:
    """Check one combination; whether it was solved."""
    try:
        solution = solve(batch)
    except ConfigError:
        changes = nearest_valid(batch)
        assert changes
        for change in changes:
            changed = batch._replace(**change)
            check_solution(changed, solve(changed))
        return False
    check_solution(batch, solution)
    return True


def check_grid(*values: Iterable) -> None:
    """Check all combinations of values, which are in the order of the settings."""
    solved = [check(BatchSettings(*each)) for each in product(*values)]
    assert 0.02 < sum(solved) / len(solved) < 0.5


def test_every_combination_on_a_grid():
    check_grid([2, 4, 6, 7, 12], [1, 2, 3, 8], [None, 1, 4, 6], [None, 3, 8], [None, 2], [None, 3])


@pytest.mark.slow
def test_every_combination():
    check_grid(range(2, 17), range(1, 9), *[[None, *range(1, 7)]] * 4)


def test_without_a_valid_value_near_by_nothing_is_suggested():
    message, changes = refused(prompts_per_step=5, world_size=100_000)
    assert (message, changes) == ("`prompts_per_step` 5 cannot be shared equally among 100000 processes", [])


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 12)] * 2, *[st.none() | st.integers(1, 12)] * 4).map(lambda s: BatchSettings(*s))
)
def test_no_valid_value_is_nearer(sizes: BatchSettings):
    def is_solved(changed: BatchSettings) -> bool:
        try:
            return bool(solve(changed))
        except ConfigError:
            return False

    assume(not is_solved(sizes))
    for change in nearest_valid(sizes):
        (name, value), *left_out = sorted(change.items(), key=lambda item: item[1] is None)
        if value is not None:
            kept = sizes._replace(**dict(left_out))
            old = getattr(kept, name) or {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 1}[name]
            between = range(min(old, value) + 1, max(old, value))
            assert not [v for v in between if is_solved(kept._replace(**{name: v}))]
