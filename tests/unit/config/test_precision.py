"""The precision of a run that leaves `model.dtype` out."""

import logging

import pytest

from rl_vlm.config.load import config_with
from rl_vlm.config.precision import with_precision
from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import ConfigError


def config(**model: str | None) -> RunConfig:
    return config_with({"model.model_name_or_path": "m", **{f"model.{k}": v for k, v in model.items()}}, "test", [])


@pytest.mark.parametrize(
    ("given", "device", "expected"),
    [
        (None, "cuda", "bfloat16"),
        (None, "cpu", "float32"),
        (None, "mps", "float32"),
        ("float32", "cuda", "float32"),
        ("bfloat16", "cpu", "bfloat16"),
    ],
)
def test_the_device_decides_if_dtype_is_left_out(given: str | None, device: str, expected: str):
    assert with_precision(config(dtype=given), device).model.dtype == expected


def test_a_run_on_cuda_names_its_precision(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.INFO)
    with_precision(config(), "cpu")
    with_precision(config(dtype="bfloat16"), "cuda")
    assert caplog.messages == []
    with_precision(config(), "cuda")
    assert caplog.messages == [
        "model.dtype is not set: a run computes in bfloat16 on CUDA and in float32 elsewhere, and trained weights stay "
        "in float32"
    ]


def test_auto_is_refused():
    with pytest.raises(ConfigError, match=r"`model.dtype` is 'auto': leave it out instead: a run computes in bfloat16"):
        config(dtype="auto")
