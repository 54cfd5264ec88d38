"""What engines hold, against the theory and the measurements of docs/benchmarks.md#sharding."""

import pytest

from rl_vlm.plan.engines import ENGINES, state_bytes
from rl_vlm.plan.weights import Weights

P = 1000
"""Trained weights in float32, of 10 layers; 4P bytes are the unit of the tables."""
UNIT = 4 * P
WEIGHTS = Weights(
    num=P, num_trained=P, trained_bytes=UNIT, frozen_bytes=0, reference_bytes=UNIT, layer_bytes=320, rest_bytes=800,
    layer_trained=80, largest_trained=50, matrix_rows_and_columns=120,
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
        ("zero2", [5.0, 3.0, 2.0]),
        ("zero3", [5.0, 2.5, 1.25]),
        ("fsdp2", [4.0, 2.0, 1.0]),
        ("zero3_offload", [0.0, 0.0, 0.0]),
    ],
)
def test_held_by_each_process(engine, sums):
    assert [held(engine, num_ranks) for num_ranks in (1, 2, 4)] == sums


def test_the_reference_is_sharded_where_weights_are():
    found = {name: engine.reference(WEIGHTS, 2) / UNIT for name, engine in ENGINES.items()}
    assert found == {"ddp": 1.0, "zero2": 1.0, "zero3": 0.5, "fsdp2": 0.5, "zero3_offload": 0.0}


def test_gathered_in_a_pass():
    found = {name: engine.gathered(WEIGHTS, 2) for name, engine in ENGINES.items()}
    gradients = 4 * 80  # of a layer, before they are reduced
    all_weights = UNIT + 320 + gradients  # fewer than DeepSpeed's billion, so that all are kept
    assert found == {
        "ddp": 0, "zero2": gradients, "fsdp2": 800 + 2 * 320 + gradients, "zero3": all_weights,
        "zero3_offload": all_weights,
    }  # fmt: skip
    assert {engine.gathered(WEIGHTS, 1) for engine in ENGINES.values()} == {0}


def test_state_of_each_optimizer():
    assert state_bytes(WEIGHTS, "adamw_torch") == 8 * P
    assert state_bytes(WEIGHTS, "adamw_8bit") == 2 * P + 31  # 31.25: two float32 per block of 256
    assert state_bytes(WEIGHTS, "adafactor") == 4 * 120


def test_temporary_tensors_of_an_update():
    # DeepSpeed makes its gradients one tensor. The kernels of AdamW need nothing.
    assert [ENGINES[name].update(WEIGHTS, 2, "adamw_torch") / UNIT for name in ("ddp", "fsdp2", "zero2", "zero3")] == [
        0.0, 0.0, 0.5, 0.5
    ]  # fmt: skip
    assert ENGINES["ddp"].update(WEIGHTS, 1, "adamw_8bit") == 0
    assert ENGINES["ddp"].update(WEIGHTS, 1, "adafactor") == 3 * 4 * 50
    assert ENGINES["zero3_offload"].update(WEIGHTS, 2, "adamw_torch") == 0
