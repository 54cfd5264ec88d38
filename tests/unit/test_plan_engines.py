"""What engines hold, against the theory and the measurements of docs/benchmarks.md#sharding."""

from dataclasses import replace

import pytest

from rl_vlm.distributed.environment import Launch
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import ConfigError
from rl_vlm.plan.auto import engine_of
from rl_vlm.plan.engines import ENGINES, state_bytes, zero_engine
from rl_vlm.plan.weights import Weights

P = 1000
"""Trained weights in float32, of 10 layers; 4P bytes are the unit of the tables."""
UNIT = 4 * P
WEIGHTS = Weights(
    num=P, num_active=P, num_trained=P, trained_bytes=UNIT, frozen_bytes=0, reference_bytes=UNIT, layer_bytes=320,
    rest_bytes=800, layer_trained=80, largest_trained=50, matrix_rows_and_columns=120,
    trains_vision=True, num_vision=0, dequantized_bytes=0,
)  # fmt: skip


def held(engine: str, num_ranks: int) -> float:
    """Weights, gradients and optimizer state, in units of the weights."""
    parts = ENGINES[engine]
    bytes_held = (
        parts.weights(WEIGHTS, num_ranks)
        + parts.gradients(WEIGHTS, num_ranks)
        + parts.optimizer_state(WEIGHTS, num_ranks, "adamw_torch")
    )
    return bytes_held / UNIT


@pytest.mark.parametrize(
    ("engine", "sums"),
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
def test_held_by_each_process(engine, sums):
    assert [held(engine, num_ranks) for num_ranks in (1, 2, 4)] == sums


def test_the_reference_is_sharded_where_weights_are():
    found = {name: engine.reference(WEIGHTS, 2) / UNIT for name, engine in ENGINES.items()}
    assert found == {
        "ddp": 1.0, "zero1": 1.0, "zero1_offload": 1.0, "zero2": 1.0, "zero2_offload": 1.0, "zero3": 0.5,
        "zero3_offload_optimizer": 0.5, "zero3_offload_param": 0.0, "zero3_offload": 0.0, "fsdp2": 0.5,
    }  # fmt: skip


def test_gathered_in_a_pass():
    found = {name: engine.gathered(WEIGHTS, 2) for name, engine in ENGINES.items()}
    gradients = 4 * 80  # of a layer, before they are reduced
    all_weights = UNIT + 320 + gradients  # fewer than DeepSpeed's billion, so that all are kept
    assert found == {
        "ddp": 0, "zero1": 0, "zero1_offload": 0, "zero2": gradients + UNIT // 2, "zero2_offload": gradients,
        "fsdp2": 800 + 2 * 320 + gradients, "zero3": all_weights, "zero3_offload_optimizer": all_weights,
        "zero3_offload_param": all_weights,
        "zero3_offload": all_weights,
    }  # fmt: skip


def test_one_rank_gathers_what_is_in_host_memory():
    found = {name for name, engine in ENGINES.items() if engine.gathered(WEIGHTS, 1) == UNIT + 320}
    assert found == {"zero3_offload_param", "zero3_offload"}
    assert all(engine.gathered(WEIGHTS, 1) == 0 for name, engine in ENGINES.items() if name not in found)


def test_the_largest_gradient_waits_to_be_reduced():
    with_large_head = replace(WEIGHTS, largest_trained=200)  # a layer has 80
    assert ENGINES["zero2_offload"].gathered(with_large_head, 2) == 4 * 200


def test_buffers_of_gradients_that_are_sent():
    found = {name: engine.buffers(WEIGHTS, 2, 30) for name, engine in ENGINES.items()}
    bucket = 4 * 30 * 30  # the width squared, as in launch/accelerate/zero3.yaml
    assert found == {
        "ddp": 16 * 2**20, "zero1": bucket, "zero1_offload": bucket + 4 * 50, "zero2": bucket,
        "zero2_offload": bucket + 4 * 50, "zero3": bucket,
        "zero3_offload_optimizer": bucket, "zero3_offload_param": bucket, "zero3_offload": bucket, "fsdp2": 0,
    }  # fmt: skip
    assert ENGINES["ddp"].buffers(WEIGHTS, 1, 30) == 0


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
def test_the_engine_of_a_deepspeed_config(zero, name):
    assert zero_engine(zero).name == name


def test_the_bucket_of_a_deepspeed_config():
    found = [
        zero_engine({"stage": 3} | size) for size in ({}, {"reduce_bucket_size": "auto"}, {"reduce_bucket_size": 7e6})
    ]
    assert [engine.buffers(WEIGHTS, 2, 30) for engine in found] == [4 * 500_000_000, 4 * 900, 4 * 7_000_000]


def test_weights_in_host_memory_need_stage_3():
    with pytest.raises(ConfigError, match=r"stage 2 with offload_param .* use stage 3"):
        zero_engine({"stage": 2, "offload_param": CPU})


def test_state_of_each_optimizer():
    assert state_bytes(WEIGHTS, "adamw_torch") == 8 * P
    assert state_bytes(WEIGHTS, "adamw_8bit") == 2 * P + 31  # 31.25: two float32 per block of 256
    assert state_bytes(WEIGHTS, "adafactor") == 4 * 120


def test_temporary_tensors_of_an_update():
    # DeepSpeed makes its gradients one tensor. The kernels of AdamW need nothing.
    names = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
    assert [ENGINES[name].update(WEIGHTS, 2, "adamw_torch") / UNIT for name in names] == [0.0, 0.0, 0.5, 0.5, 0.5]
    assert ENGINES["ddp"].update(WEIGHTS, 1, "adamw_8bit") == 0
    assert ENGINES["ddp"].update(WEIGHTS, 1, "adafactor") == 3 * 4 * 50
    assert ENGINES["zero3_offload"].update(WEIGHTS, 2, "adamw_torch") == 0


def test_a_run_is_planned_with_the_engine_that_is_launched():
    ranks = Ranks()
    found = []
    for launch in (Launch("ddp"), Launch("fsdp2"), Launch("deepspeed", deepspeed={"zero_optimization": {"stage": 1}})):
        ranks.launch = launch
        found.append(engine_of(ranks).name)
    assert found == ["ddp", "fsdp2", "zero1"]
