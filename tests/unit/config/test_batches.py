import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_vlm.config.batches import BatchSizes, batch_sizes, settings_that_keep, total_optimizer_steps
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
    plan = batch_sizes(run_config(prompts_per_step=4, steps_per_generation=2, num_iterations=3), world_size=2)
    assert plan == BatchSizes(
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
    plan = batch_sizes(run_config(**train), world_size)
    assert (plan.prompts_per_step, plan.gradient_accumulation_steps, plan.steps_per_window) == (
        prompts,
        accumulation,
        window,
    )


def test_settings_without_a_solution_are_refused_with_the_nearest_valid_values():
    with pytest.raises(ConfigError, match=r"nearest valid: `prompts_per_step` 4 or `prompts_per_step` 6 or 1 process"):
        batch_sizes(run_config(prompts_per_step=5), world_size=2)


sizes = st.integers(1, 24)


def test_steps_of_a_run():
    config = run_config(prompts_per_step=4, steps_per_generation=2, num_iterations=3, num_train_epochs=2.0)
    plan = batch_sizes(config, world_size=1)
    assert total_optimizer_steps(config, plan, num_rows=16) == 4 * 2 * 3
    assert total_optimizer_steps(config, plan, num_rows=17) == 5 * 2 * 3
    limited = run_config(prompts_per_step=4, max_steps=7)
    assert total_optimizer_steps(limited, batch_sizes(limited, 1), num_rows=16) == 7


def test_a_dataset_smaller_than_one_window_is_refused():
    config = run_config(prompts_per_step=4, steps_per_generation=2, max_steps=10)
    with pytest.raises(ConfigError, match=r"7 rows, fewer than the 8 prompts .* or `prompts_per_step` 3$"):
        total_optimizer_steps(config, batch_sizes(config, world_size=1), num_rows=7)
    with pytest.raises(ConfigError, match=r"or `prompts_per_step` 2$"):
        total_optimizer_steps(config, batch_sizes(config, world_size=2), num_rows=7)
    with pytest.raises(ConfigError, match=r"or `steps_per_generation` 1$"):
        total_optimizer_steps(config, batch_sizes(config, world_size=4), num_rows=7)
    with pytest.raises(ConfigError, match=r"or at most 3 processes$"):
        total_optimizer_steps(config, batch_sizes(config, world_size=4), num_rows=3)


@settings(max_examples=200, deadline=None)
@given(
    world_size=st.integers(1, 5),
    share=st.integers(1, 6),
    accumulation=st.integers(1, 4),
    steps=st.integers(1, 4),
    rows=st.integers(1, 80),
    by_device=st.booleans(),
)
def test_a_refused_window_names_one_that_the_rows_fill(world_size, share, accumulation, steps, rows, by_device):
    by_prompts = {"prompts_per_step": share * world_size}
    by_trl = {"per_device_train_batch_size": 2 * share}
    train = {"gradient_accumulation_steps": accumulation, "steps_per_generation": accumulation * steps, "max_steps": 1}
    group = 2 * accumulation
    train |= by_trl if by_device else by_prompts
    config = run_config(group, **train)
    try:
        total_optimizer_steps(config, batch_sizes(config, world_size), rows)
    except ConfigError as error:
        if rows < world_size:
            assert str(error).endswith(f"at most {rows} processes")
            return
        named = re.findall(r"`([a-z_]+)` (\d+)", str(error).partition("use more rows, or ")[2])
        assert named
        smaller = run_config(group, **train | {name: int(value) for name, value in named})
        assert total_optimizer_steps(smaller, batch_sizes(smaller, world_size), rows) == 1


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
    plan = batch_sizes(run_config(group, **train | changes), world_size)
    assert (plan.prompts_per_step, plan.steps_per_window) == (share * world_size, steps)
