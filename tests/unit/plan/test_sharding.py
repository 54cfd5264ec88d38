"""What shardings hold, against the theory and the measurements of docs/benchmarks.md#sharding."""

from dataclasses import replace

import pytest

from rl_vlm.distributed.launch_variables import Launch
from rl_vlm.distributed.shardings import SHARDINGS
from rl_vlm.distributed.zero_config import zero_sharding
from rl_vlm.errors import ConfigError
from rl_vlm.plan.sharding import (
    buffer_bytes,
    gathered_bytes,
    held_gradients,
    held_reference,
    held_state,
    held_weights,
    state_bytes,
    update_bytes,
)
from rl_vlm.plan.weights import Weights

P = 1000
"""Trained weights in float32, of 10 layers; 4P bytes are the unit of the tables."""
UNIT = 4 * P
WEIGHTS = Weights(
    num=P, num_active=P, num_trained=P, trained_bytes=UNIT, frozen_bytes=0, reference_bytes=UNIT, layer_bytes=320,
    layer_cast=160, layers_cast=1600,
    rest_bytes=800, layer_trained=80, largest_trained=50, matrix_rows_and_columns=120,
    trains_vision=True, num_vision=0, is_adapter=False, dequantized_bytes=0,
)  # fmt: skip


def held(name: str, num_ranks: int) -> float:
    """Weights, gradients and optimizer state, in units of the weights."""
    sharding = SHARDINGS[name]
    bytes_held = (
        held_weights(sharding, WEIGHTS, num_ranks)
        + held_gradients(sharding, WEIGHTS, num_ranks)
        + held_state(sharding, WEIGHTS, num_ranks, "adamw_torch")
    )
    return bytes_held / UNIT


@pytest.mark.parametrize(
    ("name", "sums"),
    [  # of the tables' column "theory", on 1, 2 and 4 processes
        ("ddp", [4.0, 4.0, 4.0]),
        ("zero1", [5.0, 3.5, 2.75]),  # weights 1, their copy 1/N, gradients 1, moments 2/N
        ("zero1_offload", [2.0, 2.0, 2.0]),
        ("zero2", [5.0, 3.0, 2.0]),
        ("zero2_offload", [1.0, 1.0, 1.0]),
        ("zero3", [5.0, 2.5, 1.25]),
        ("fsdp2", [4.0, 2.0, 1.0]),
        ("zero3_offload_optimizer", [1.0, 0.5, 0.25]),
        ("zero3_offload_param", [4.0, 2.0, 1.0]),
        ("zero3_offload", [0.0, 0.0, 0.0]),
    ],
)
def test_held_by_each_process(name, sums):
    assert [held(name, num_ranks) for num_ranks in (1, 2, 4)] == sums


def test_the_reference_is_sharded_where_weights_are():
    found = {name: held_reference(sharding, WEIGHTS, 2) / UNIT for name, sharding in SHARDINGS.items()}
    assert found == {
        "ddp": 1.0, "zero1": 1.0, "zero1_offload": 1.0, "zero2": 1.0, "zero2_offload": 1.0, "zero3": 0.5,
        "zero3_offload_optimizer": 0.5, "zero3_offload_param": 0.0, "zero3_offload": 0.0, "fsdp2": 0.5,
    }  # fmt: skip


def test_gathered_in_a_pass():
    found = {name: gathered_bytes(sharding, WEIGHTS, 2) for name, sharding in SHARDINGS.items()}
    gradients = 4 * 80  # of a layer, before they are reduced
    all_weights = UNIT + 320 + gradients  # fewer than DeepSpeed's billion, so that all are kept
    assert found == {
        "ddp": 0, "zero1": 0, "zero1_offload": 0, "zero2": gradients + UNIT // 2, "zero2_offload": gradients,
        "fsdp2": 800 + 2 * 160 + gradients, "zero3": all_weights, "zero3_offload_optimizer": all_weights,
        "zero3_offload_param": all_weights,
        "zero3_offload": all_weights,
    }  # fmt: skip


def test_one_rank_gathers_what_is_in_host_memory():
    found = {name for name, sharding in SHARDINGS.items() if gathered_bytes(sharding, WEIGHTS, 1) == UNIT + 320}
    assert found == {"zero3_offload_param", "zero3_offload"}
    assert all(gathered_bytes(sharding, WEIGHTS, 1) == 0 for name, sharding in SHARDINGS.items() if name not in found)


def test_the_largest_gradient_waits_to_be_reduced():
    with_large_head = replace(WEIGHTS, largest_trained=200)  # a layer has 80
    assert gathered_bytes(SHARDINGS["zero2_offload"], with_large_head, 2) == 4 * 200


def test_buffers_of_gradients_that_are_sent():
    found = {name: buffer_bytes(sharding, WEIGHTS, 2, 30) for name, sharding in SHARDINGS.items()}
    bucket = 4 * 30 * 30  # the width squared, as in launch/accelerate/zero3.yaml
    assert found == {
        "ddp": 16 * 2**20, "zero1": bucket, "zero1_offload": bucket + 4 * 50, "zero2": bucket,
        "zero2_offload": bucket + 4 * 50, "zero3": bucket,
        "zero3_offload_optimizer": bucket, "zero3_offload_param": bucket, "zero3_offload": bucket, "fsdp2": 0,
    }  # fmt: skip
    assert buffer_bytes(SHARDINGS["ddp"], WEIGHTS, 1, 30) == 0


CPU = {"device": "cpu"}


@pytest.mark.parametrize(
    ("zero", "name"),
    [
        ({"stage": 1}, "zero1"),
        ({"stage": 1, "offload_optimizer": CPU}, "zero1_offload"),
        ({"stage": 2}, "zero2"),
        ({"stage": 2, "offload_optimizer": {"device": "none"}}, "zero2"),
        ({"stage": 2, "offload_optimizer": CPU}, "zero2_offload"),
        ({"stage": 3}, "zero3"),
        ({"stage": 3, "offload_optimizer": CPU, "offload_param": None}, "zero3_offload_optimizer"),
        ({"stage": 3, "offload_param": CPU}, "zero3_offload_param"),
        ({"stage": 3, "offload_param": CPU, "offload_optimizer": CPU}, "zero3_offload"),
    ],
)
def test_the_sharding_of_a_deepspeed_config(zero, name):
    assert zero_sharding(zero).name == name


def test_the_bucket_of_a_deepspeed_config():
    found = [
        zero_sharding({"stage": 3} | size) for size in ({}, {"reduce_bucket_size": "auto"}, {"reduce_bucket_size": 7e6})
    ]
    assert [buffer_bytes(sharding, WEIGHTS, 2, 30) for sharding in found] == [4 * 500_000_000, 4 * 900, 4 * 7_000_000]


def test_weights_in_host_memory_need_stage_3():
    with pytest.raises(ConfigError, match=r"stage 2 with offload_param .* use stage 3"):
        zero_sharding({"stage": 2, "offload_param": CPU})


def test_state_of_each_optimizer():
    assert state_bytes(WEIGHTS, "adamw_torch") == 8 * P
    assert state_bytes(WEIGHTS, "adamw_8bit") == 2 * P + 31  # 31.25: two float32 per block of 256
    assert state_bytes(WEIGHTS, "adafactor") == 4 * 120


def test_temporary_tensors_of_an_update():
    # DeepSpeed makes its gradients one tensor. The kernels of AdamW need nothing.
    names = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
    found = [update_bytes(SHARDINGS[name], WEIGHTS, 2, "adamw_torch") / UNIT for name in names]
    assert found == [0.0, 0.0, 0.5, 0.5, 0.5]
    assert update_bytes(SHARDINGS["ddp"], WEIGHTS, 1, "adamw_8bit") == 0
    assert update_bytes(SHARDINGS["ddp"], WEIGHTS, 1, "adafactor") == 3 * 4 * 50
    assert update_bytes(SHARDINGS["zero3_offload"], WEIGHTS, 2, "adamw_torch") == 0


def test_a_run_is_planned_with_the_sharding_that_is_launched():
    zero1 = Launch("deepspeed", deepspeed={"zero_optimization": {"stage": 1}})
    assert [launch.sharding.name for launch in (Launch("ddp"), Launch("fsdp2"), zero1)] == ["ddp", "fsdp2", "zero1"]
