"""Activations in host memory: on a CPU they are copied within it, and results must not change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from rl_vlm.errors import ConfigError
from rl_vlm.model import offloading
from rl_vlm.model.offloading import ActivationOffloading, InHostMemory
from rl_vlm.run.run import train
from tests.helpers.builders import gradient_error, make_policy
from tests.helpers.family_parity import case_groups, scores
from tests.helpers.tiny_run import make_config


@pytest.mark.parametrize("checkpointing", [False, True])
def test_offloaded_activations_give_the_same_gradients(
    checkpointing: bool, tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloading, "MIN_BYTES", 0)
    moved: list[InHostMemory] = []
    pack = ActivationOffloading.pack

    def record(self: ActivationOffloading, tensor: torch.Tensor) -> torch.Tensor | InHostMemory:
        packed = pack(self, tensor)
        moved.extend([packed] if isinstance(packed, InHostMemory) else [])
        return packed

    monkeypatch.setattr(ActivationOffloading, "pack", record)
    groups = case_groups(tiny_checkpoint, "several prompts")
    plain = scores(make_policy(tiny_checkpoint, checkpointing), groups, shared=True)
    assert not moved
    found = scores(make_policy(tiny_checkpoint, checkpointing, activation_offloading=True), groups, shared=True)
    assert moved
    assert torch.equal(found.logprobs, plain.logprobs)
    assert gradient_error(found.gradients, plain.gradients) <= 1e-6


def test_weights_stay_and_what_is_saved_twice_is_copied_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "MIN_BYTES", 0)
    first, second = nn.Linear(3, 4, bias=False), nn.Linear(3, 4, bias=False)
    x = torch.ones(2, 3, requires_grad=True)
    context = ActivationOffloading(x.device)
    with context:
        one, other = first(x), second(x)
        (one * other).sum().backward()
    assert sorted(tuple(t.values.shape) for t in context.moved.values()) == [(2, 3), (2, 4), (2, 4)]


def test_a_tensor_that_changes_in_place_is_copied_again() -> None:
    context = ActivationOffloading(torch.device("cpu"))
    tensor = torch.zeros(2**15)
    before = context.pack(tensor)
    assert isinstance(before, InHostMemory) and context.pack(tensor) is before
    tensor.add_(1)
    after = context.pack(tensor)
    assert (context.unpack(before).sum(), context.unpack(after).sum()) == (0, 2**15)


def test_a_run_on_a_cpu_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"activation_offloading has no effect without a GPU; leave it out"):
        train(make_config(tiny_checkpoint, tmp_path, activation_offloading=True))
