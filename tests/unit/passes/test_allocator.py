"""The allocator's variable, which the user's own value and vLLM's pools come before."""

import logging
import os

import pytest

from rl_vlm.config.schema import RunConfig
from rl_vlm.passes.allocator import VARIABLES, allocator_configured, configure_allocator


@pytest.mark.parametrize(
    ("engine", "setting", "own", "expected"),
    [
        ("hf", None, None, "expandable_segments:True"),
        ("hf", False, None, None),
        ("hf", True, "max_split_size_mb:64", "max_split_size_mb:64"),
        ("vllm", None, None, None),
        ("vllm_server", None, None, None),
        ("vllm", True, None, "expandable_segments:True"),
    ],
)
def test_what_the_allocator_is_told(
    engine: str, setting: bool | None, own: str | None, expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {} if own is None else {"PYTORCH_CUDA_ALLOC_CONF": own})
    memory, rollout = {"expandable_segments": setting}, {"engine": engine}
    configure_allocator(
        RunConfig.model_validate({"model": {"model_name_or_path": "m"}, "memory": memory, "rollout": rollout})
    )
    assert os.environ.get("PYTORCH_CUDA_ALLOC_CONF") == expected
    assert own is not None or set(os.environ) == (set(VARIABLES) if expected else set())


def test_a_device_in_use_keeps_its_allocator(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    caplog.set_level(logging.INFO)
    with allocator_configured(RunConfig.model_validate({"model": {"model_name_or_path": "m"}})):
        assert set(os.environ) == set(VARIABLES)
    assert os.environ == {}
    assert "its allocator keeps the `memory.expandable_segments` of its first use" in caplog.text
