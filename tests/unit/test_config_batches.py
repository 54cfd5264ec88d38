import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_vlm.config.batches import BatchPlan, plan_batches, settings_that_keep, total_optimizer_steps
from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import ConfigError


def run_config(num_generations: int = 8, num_iterations: int = 1, **train: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "model": {"model_name_or_path": "tiny"},
            "rollout": {"num_generations": num_generations},
            "algorithm": {"num_iterations": num_iterations},
            "train": train,
        }
    )


def test_prompts_per_step_alone_is_enough():
    plan = plan_batches(run_config(prompts_per_step=4, steps_per_generation=2, num_iterations=3), world_size=2)
    assert plan == BatchPlan(
        prompts_per_step=4,
        num_generations=8,
        world_size=2,
        gradient_accumulation_steps=1,
        steps_per_window=2,
        num_iterations=3,
    )
    assert plan.completions_per_step == 32
    assert plan.prompts_per_window == 8
    assert plan.prompts_per_rank_step == 2


@pytest.mark.parametrize(
    ("train", "world_size", "prompts", "accumulation", "window"),
    [
        ({}, 1, 1, 1, 1),  # TRL's default: 8 completions per device
        ({}, 4, 4, 1, 1),
        ({"per_device_train_batch_size": 4, "gradient_accumulation_steps": 6}, 2, 6, 6, 1),
        ({"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 8}, 1, 1, 4, 2),
        ({"prompts_per_step": 6, "per_device_train_batch_size": 4}, 2, 6, 6, 1),
        ({"prompts_per_step": 6, "gradient_accumulation_steps": 3, "steps_per_generation": 6}, 2, 6, 3, 2),
        ({"prompts_per_step": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}, 1, 1, 4, 1),
    ],
)
def test_what_is_not_given_is_derived(train, world_size, prompts, accumulation, window):
    plan = plan_batches(run_config(**train), world_size)
    assert (plan.prompts_per_step, plan.gradient_accumulation_steps, plan.steps_per_window) == (
        prompts,
        accumulation,
        window,
    )


@pytest.mark.parametrize(
    ("train", "world_size", "expected"),
    [
        ({"prompts_per_step": 5}, 2, "`prompts_per_step` 5 .* 2 processes; nearest valid: 4 or 6"),
        ({"prompts_per_step": 1}, 4, "nearest valid: 4$"),
        ({"steps_per_generation": 5, "gradient_accumulation_steps": 2}, 1, "nearest valid: 4 or 6$"),
        (
            {"per_device_train_batch_size": 6},
            1,
            "`per_device_train_batch_size` 8, or `gradient_accumulation_steps` 4, or `num_generations` 6",
        ),
        (
            {"per_device_train_batch_size": 10, "gradient_accumulation_steps": 2},
            1,
            "`per_device_train_batch_size` 8 or 12, or `gradient_accumulation_steps` 4, or `num_generations` 5 or 10",
        ),
        (
            {"per_device_train_batch_size": 1},
            1,
            "`per_device_train_batch_size` 8, or `gradient_accumulation_steps` 8; or give `prompts_per_step` alone$",
        ),
        ({"prompts_per_step": 2, "per_device_train_batch_size": 6}, 1, "16 completions .*; nearest valid: 4 or 8$"),
        ({"prompts_per_step": 2, "gradient_accumulation_steps": 32}, 1, "16 completions .*; nearest valid: 16$"),
        (
            {"prompts_per_step": 2, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 4},
            1,
            "makes 16 completions .* = 32; make that product 16, or leave both out",
        ),
    ],
)
def test_no_solution_names_the_nearest_valid_values(train, world_size, expected):
    with pytest.raises(ConfigError, match=expected):
        plan_batches(run_config(**train), world_size)


sizes = st.integers(1, 24)


@settings(max_examples=300, deadline=None)
@given(
    group=sizes,
    world_size=st.integers(1, 5),
    prompts=st.none() | sizes,
    per_device=st.none() | sizes,
    accumulation=st.none() | sizes,
    micro_steps=st.none() | sizes,
)
def test_a_plan_satisfies_the_algebra_or_says_how_to(group, world_size, prompts, per_device, accumulation, micro_steps):
    train = {
        "prompts_per_step": prompts,
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": micro_steps,
    }
    try:
        plan = plan_batches(run_config(group, **train), world_size)
    except ConfigError as error:
        for name, value in re.findall(r"(`[a-z_]+`) (\d+)", str(error).partition("nearest valid: ")[2]):
            if name != "`num_generations`":
                mended = {**train, name.strip("`"): int(value), "steps_per_generation": None}
                plan_batches(run_config(group, **mended), world_size)
        return
    assert plan.prompts_per_rank_step * world_size == plan.prompts_per_step
    assert prompts in (None, plan.prompts_per_step)
    assert accumulation in (None, plan.gradient_accumulation_steps)
    assert plan.steps_per_window * plan.gradient_accumulation_steps == (micro_steps or plan.gradient_accumulation_steps)
    if per_device is not None:
        assert per_device * plan.gradient_accumulation_steps * world_size == plan.completions_per_step


def test_steps_of_a_run():
    config = run_config(prompts_per_step=4, steps_per_generation=2, num_iterations=3, num_train_epochs=2.0)
    plan = plan_batches(config, world_size=1)
    assert total_optimizer_steps(config, plan, num_rows=16) == 4 * 2 * 3
    assert total_optimizer_steps(config, plan, num_rows=17) == 5 * 2 * 3
    limited = run_config(prompts_per_step=4, max_steps=7)
    assert total_optimizer_steps(limited, plan_batches(limited, 1), num_rows=16) == 7


def test_a_dataset_smaller_than_one_window_is_refused():
    config = run_config(prompts_per_step=4, steps_per_generation=2, max_steps=10)
    with pytest.raises(ConfigError, match=r"7 rows, fewer than the 8 prompts .* `prompts_per_step` of at most 3$"):
        total_optimizer_steps(config, plan_batches(config, world_size=1), num_rows=7)
    with pytest.raises(ConfigError, match=r"at most 2$"):
        total_optimizer_steps(config, plan_batches(config, world_size=2), num_rows=7)
    with pytest.raises(ConfigError, match="fewer processes"):
        total_optimizer_steps(config, plan_batches(config, world_size=4), num_rows=7)


@pytest.mark.parametrize(
    ("train", "world_size", "prompts", "steps", "expected"),
    [
        ({"per_device_train_batch_size": 8}, 2, 8, 1, {"gradient_accumulation_steps": 4}),
        ({}, 4, 8, 1, {"gradient_accumulation_steps": 2}),  # TRL's default: 8 completions per device
        (
            {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "steps_per_generation": 4},
            1, 4, 2, {"gradient_accumulation_steps": 4, "steps_per_generation": 8},
        ),
        (
            {"per_device_train_batch_size": 32, "gradient_accumulation_steps": 1},
            4, 8, 1, {"per_device_train_batch_size": 16},
        ),
        ({"prompts_per_step": 4}, 2, 8, 1, {"prompts_per_step": 8}),
        (
            {"prompts_per_step": 8, "per_device_train_batch_size": 8, "steps_per_generation": 16},
            2, 8, 2, {"gradient_accumulation_steps": 4, "steps_per_generation": 8},
        ),
        ({"prompts_per_step": 8}, 3, 8, 1, {}),  # three processes cannot share eight prompts
    ],
)  # fmt: skip
def test_settings_that_keep_a_batch_on_another_number_of_processes(train, world_size, prompts, steps, expected):
    assert settings_that_keep(prompts, steps, run_config(**train), world_size) == expected


@settings(max_examples=300, deadline=None)
@given(
    group=sizes,
    world_size=st.integers(1, 5),
    share=st.integers(1, 6),
    steps=st.integers(1, 4),
    prompts=st.none() | sizes,
    per_device=st.none() | sizes,
    accumulation=st.none() | sizes,
    micro_steps=st.none() | sizes,
)
def test_those_settings_do_keep_it(group, world_size, share, steps, prompts, per_device, accumulation, micro_steps):
    train = {
        "prompts_per_step": prompts,
        "per_device_train_batch_size": per_device,
        "gradient_accumulation_steps": accumulation,
        "steps_per_generation": micro_steps,
    }
    changes = settings_that_keep(share * world_size, steps, run_config(group, **train), world_size)
    plan = plan_batches(run_config(group, **train | changes), world_size)
    assert (plan.prompts_per_step, plan.steps_per_window) == (share * world_size, steps)
