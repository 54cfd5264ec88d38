"""Estimated times of a step with 8 prompts of 100 + 4 x 190 tokens, on an A100's peak."""

from dataclasses import replace
from typing import Any

import pytest

from rl_vlm.config.schema import RunConfig
from rl_vlm.plan.build import plan_memory
from rl_vlm.plan.hardware import GIB, Hardware
from rl_vlm.plan.speed import step_seconds
from tests.helpers.planned_model import hardware, planned_model, run_config

TOKENS = 8 * (100 + 4 * 190)
NUM = GIB // 4


ONE = hardware(80)


def seconds(config: RunConfig, machines: Hardware = ONE, **weights: Any) -> float:
    model = planned_model(config)
    model = replace(model, weights=replace(model.weights, **weights))
    return step_seconds(config, machines, plan_memory(config, machines, model), model)


@pytest.mark.parametrize(
    ("model", "weights", "products"),
    [
        ({}, {}, 3 * NUM),
        ({}, {"num_active": NUM // 10}, 3 * (NUM // 10)),  # experts
        ({"use_peft": True}, {"num_active": NUM + NUM // 64}, 2 * (NUM + NUM // 64) + NUM // 64),
    ],
)
def test_a_token_has_two_operations_per_weight_and_product(model: dict, weights: dict, products: int):
    trained = NUM // 64 if model else NUM
    update = 28 * trained / 2e12
    expected = 2 * products * TOKENS / (0.4 * 312e12)
    assert seconds(run_config(model=model), **weights) - update == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("sharding", "copies"),
    [
        ("zero2", 0),
        ("zero1_offload", 1 + 1),  # gradients after the last micro-batch, and updated weights
        ("zero2_offload", 2 + 1),  # gradients of both
        ("zero3_offload_optimizer", 2 + 1),
        ("zero3_offload_param", 2 * 2),  # weights for the forward and the backward
        ("zero3_offload", 2 + 1 + 2 * 2),
    ],
)
def test_copies_to_and_from_host_memory(sharding: str, copies: int):
    run = run_config(memory={"micro_batch_tokens": TOKENS // 2 + 32})  # an image takes 32 tokens
    extra = seconds(run, hardware(80, sharding=sharding)) - seconds(run)
    assert extra == pytest.approx(copies * GIB / 25e9, rel=1e-6, abs=1e-9)


def test_a_slow_network_is_waited_for():
    run = run_config(memory={"micro_batch_tokens": TOKENS})
    # Over 64 GB/s to the other card: weights twice and gradients, or gradients twice. 4 prompts take 0.04 s.
    update = 28 * NUM / 2e12
    sent = 2 * (GIB + GIB // 16) + GIB  # layers in the compute precision, and what is outside of them
    found = seconds(run, hardware(80, gpus=2, sharding="zero3"), layers_cast=GIB)
    assert found == pytest.approx(sent / 64e9 + update / 2, rel=1e-6)
    assert seconds(run, hardware(80, gpus=2)) == pytest.approx(
        max(2 * GIB / 64e9, 6 * NUM * TOKENS / 2 / (0.4 * 312e12)) + update, rel=1e-6
    )
