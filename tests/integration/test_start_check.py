"""The check before the first step, on shared rows that are right and on shared rows with one fault each."""

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from rl_vlm.errors import ModelError
from rl_vlm.trainer import Trainer
from rl_vlm.types import ScoredGroup
from tests.helpers.builders import make_groups, make_policy, noise_image, sharp_checkpoint
from tests.helpers.flex_on_cpu import (
    Attend,
    groups_of_heads_swapped,
    half_of_key_gradients,
    mask_off_by_a_block,
    rotary_in_bfloat16,
    scale_left_out,
    soft_cap_dropped,
    use_flex_attention,
)
from tests.helpers.given_groups import make_trainer
from tests.helpers.sharded_runs import Runs
from tests.helpers.tiers import families_in_tiers, in_tiers
from tests.tiny.build import TINY_FAMILIES

FAULTS: dict[Callable[[Attend], Attend], str] = {
    mask_off_by_a_block: "qwen2_5_vl",
    scale_left_out: "qwen2_5_vl",
    groups_of_heads_swapped: "gemma3",  # which has two key heads
    rotary_in_bfloat16: "qwen2_5_vl",
    soft_cap_dropped: "paligemma2",
}
"""Faults, each with a family that it concerns."""

SHOW_IN_BFLOAT16 = [mask_off_by_a_block, scale_left_out, groups_of_heads_swapped]
"""Faults whose effect is above rounding to bfloat16, in tiny models."""


def trainer_of(checkpoint: Path, **settings: Any) -> tuple[Trainer, list[ScoredGroup]]:
    groups = make_groups(
        checkpoint, [([noise_image(64, 48, seed=1)], [200, 31, 90]), ([noise_image(32, 24, seed=2)], [17, 40])]
    )
    return make_trainer(make_policy(checkpoint, **settings), groups), groups


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", families_in_tiers(TINY_FAMILIES))
def test_right_rows_pass(tmp_path: Path, family: str, dtype: str) -> None:
    trainer, groups = trainer_of(sharp_checkpoint(family, tmp_path), dtype=dtype)
    comparisons = trainer.start_check.run(groups)
    assert [each.name for each in comparisons] == ["log-probs", "the norm of a gradient"]
    print(family, dtype, *comparisons)
    assert not trainer.start_check.is_due
    assert all(parameter.grad is None for parameter in trainer.policy.parameters())


@pytest.mark.parametrize("sharding", in_tiers(["ddp", "zero2", "zero3", "fsdp2"], (), {"zero3"}))
def test_a_fault_of_one_rank_ends_all(tiny_checkpoint: Path, tmp_path: Path, sharding: str) -> None:
    settings = {"checkpoint": tiny_checkpoint, "max_steps": 1, "prefix_sharing": "shared"}
    runs = Runs.of(tmp_path, {"wrong-rows": settings}).launch(sharding)
    log = (runs.directory / "log").read_text()
    for rank in range(2):
        assert f"[rank{rank}]: rl_vlm.errors.ModelError: Shared rows and dense rows differ on this CPU in" in log


@pytest.mark.parametrize(
    ("fault", "dtype"),
    [*((fault, "float32") for fault in FAULTS), *((fault, "bfloat16") for fault in SHOW_IN_BFLOAT16)],
)
def test_a_fault_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Attend], Attend], dtype: str
) -> None:
    trainer, groups = trainer_of(sharp_checkpoint(FAULTS[fault], tmp_path), dtype=dtype)
    use_flex_attention(monkeypatch, fault)
    with pytest.raises(ModelError, match=r"differ on this CPU in .*shared_attention: sdpa") as raised:
        trainer.start_check.run(groups)
    print(fault.__name__, dtype, raised.value)


def test_wrong_gradients_of_right_rows_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer, groups = trainer_of(sharp_checkpoint("qwen2_5_vl", tmp_path))
    use_flex_attention(monkeypatch, half_of_key_gradients)
    with pytest.raises(ModelError, match="differ on this CPU in the norm of a gradient by"):
        trainer.start_check.run(groups)


@pytest.mark.parametrize("family", sorted(set(FAULTS.values())))
def test_flex_attention_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    trainer, groups = trainer_of(sharp_checkpoint(family, tmp_path))
    use_flex_attention(monkeypatch)
    assert len(trainer.start_check.run(groups)) == 2


def test_a_check_without_memory_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    trainer, groups = trainer_of(sharp_checkpoint("qwen2_5_vl", tmp_path))
    budget = trainer.recovery.budget.tokens
    monkeypatch.setattr(trainer.policy, "score", mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory.")))
    assert trainer.start_check.run(groups) == []
    assert "shared rows were not compared with dense rows: out of memory with 5 completions" in caplog.text
    assert trainer.recovery.budget.tokens == budget
