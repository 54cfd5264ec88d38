import pytest
from torch import nn

from rl_vlm.config.batches import BatchSizes
from rl_vlm.config.schema import RunConfig
from rl_vlm.log.messages import (
    Hints,
    batch_line,
    loading_line,
    parameters_line,
    rows_line,
    rows_to_evaluate_line,
    short_count,
)

CLIPPED, NO_SPREAD = "completions/clipped_ratio", "frac_reward_zero_std"


def test_what_a_run_loads():
    config = RunConfig.model_validate({"model": {"model_name_or_path": "Qwen/Qwen2.5-VL-7B", "dtype": "bfloat16"}})
    assert loading_line(config, "cuda:0") == "loading the model Qwen/Qwen2.5-VL-7B (bfloat16, cuda:0)"
    model = nn.Sequential(nn.Linear(100, 9), nn.Linear(9, 1))
    model[0].requires_grad_(False)
    assert parameters_line(model) == "919 parameters, 10 of them trained"
    assert rows_line(1437, 0) == "1437 rows of training data"
    assert rows_line(12, 3) == "12 rows of training data; 3 more are left out"
    assert rows_to_evaluate_line(5, 0) == "5 held-out rows"
    assert rows_to_evaluate_line(5, 2) == "5 held-out rows, 2 of them finished by an earlier command"


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0"), (999, "999"), (40_350, "40.4K"), (7_300_000, "7.3M"), (8_292_000_000, "8.29B")]
)
def test_counts(number, text):
    assert short_count(number) == text


def test_the_batch_in_one_line():
    plan = BatchSizes(
        prompts_per_step=16, num_generations=8, world_size=1, gradient_accumulation_steps=1, steps_per_window=1,
        num_iterations=1,
    )  # fmt: skip
    assert batch_line(plan, 112) == "112 steps of 16 prompts × 8 completions, on one process"
    several = BatchSizes(16, 8, world_size=4, gradient_accumulation_steps=1, steps_per_window=2, num_iterations=3)
    assert batch_line(several, 60) == (
        "60 steps of 16 prompts × 8 completions, sampled for 6 steps at once, on 4 processes"
    )


@pytest.mark.parametrize(
    ("metric", "settings"),
    [
        (CLIPPED, ["max_completion_length", "mask_truncated_completions"]),
        (NO_SPREAD, ["num_generations", "temperature", "max_resampling_rounds", "--keep"]),
    ],
)
def test_a_hint_is_given_once_and_names_settings(metric, settings, caplog):
    hints = Hints()
    for step, value in enumerate([0.5, 0.75, 0.9], start=1):
        hints.give({"step": step, metric: value})
    (record,) = caplog.records
    assert record.getMessage().startswith("step 2: 75% of the ")
    assert all(setting in record.getMessage() for setting in settings)


def test_each_kind_of_hint_is_given(caplog):
    hints = Hints()
    hints.give({"step": 1, CLIPPED: 0.6})
    hints.give({"step": 2, CLIPPED: 0.6, NO_SPREAD: 1.0})
    assert [record.getMessage()[:11] for record in caplog.records] == ["step 1: 60%", "step 2: 100"]
