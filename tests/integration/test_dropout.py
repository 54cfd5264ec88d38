"""Dropout of a checkpoint is off: training passes compute what rollouts and the model's own eval mode compute."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.model.loading import INITIAL_ADAPTER, load_policy
from rl_vlm.model.policy import Policy
from rl_vlm.model.reference import add_initial_adapter, load_reference
from rl_vlm.model.saving import PolicyFiles
from rl_vlm.run.run import train
from rl_vlm.types import Forward, ScoredGroup
from tests.helpers.builders import make_groups, make_policy, noise_image, whole
from tests.helpers.family_parity import shares
from tests.helpers.stock import stock_logprobs
from tests.helpers.tiers import FEW_FAMILIES, families_in_tiers
from tests.helpers.tiny_run import build_checkpoint, make_config, metric_lines
from tests.tiny.build import TINY_FAMILIES, build_tiny

RATES = ("attention_dropout", "dropout", "hidden_dropout_prob", "projection_dropout")
"""Names that some families give their dropout rates."""
TIMM_RATES = {"proj_drop_rate": 0.5, "drop_path_rate": 0.5}
"""Arguments of towers from timm."""
NO_DROPOUT = {"ernie4_5_vl_moe"}
"""Families without any rate."""
SHAPES = [([noise_image(32, 24, seed=1)], [5, 3])]


def add_dropout(checkpoint: Path) -> Path:
    """Set the dropout rates of the language model and the vision tower to 0.5, under all names."""
    path = checkpoint / "config.json"
    config = json.loads(path.read_text())
    for part in (config["text_config"], config["vision_config"]):
        part |= dict.fromkeys(RATES, 0.5)
    if "model_args" in config["vision_config"]:
        config["vision_config"]["model_args"] |= TIMM_RATES
    path.write_text(json.dumps(config))
    return checkpoint


def own_logprobs(model: Any, policy: Policy, groups: list[ScoredGroup]) -> list[Tensor]:
    return [
        stock_logprobs(model, policy.family, group.group.prompt, completion)
        for group in groups
        for completion in group.group.completions
    ]


def largest_gap(rows: Any, expected: list[Tensor]) -> float:
    return max((row[: len(e)] - e).abs().max().item() for row, e in zip(rows, expected, strict=True))


@torch.no_grad()
@pytest.mark.parametrize("family", families_in_tiers(TINY_FAMILIES, FEW_FAMILIES))
def test_every_family_trains_without_dropout(family: str, tmp_path: Path) -> None:
    checkpoint = add_dropout(build_tiny(family, tmp_path))
    model = AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32)
    policy, groups = make_policy(checkpoint), make_groups(checkpoint, SHAPES)
    assert policy.training
    expected = own_logprobs(model.eval(), policy, groups)
    has_dropout = largest_gap(own_logprobs(model.train(), policy, groups), expected) > 5e-4
    assert has_dropout == (family not in NO_DROPOUT)
    state = torch.get_rng_state()
    assert largest_gap(policy(Forward(whole(groups, shared=False))).logprobs_NT, expected) <= 1e-5
    assert largest_gap(policy(Forward(whole(groups, shares(policy)))).logprobs_NT, expected) <= 1e-5
    assert torch.equal(torch.get_rng_state(), state)  # no layer draws a random number


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with the one rate that the language model of Qwen2.5-VL has."""
    checkpoint = build_checkpoint(tmp_path_factory.mktemp("qwen"))
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"]["attention_dropout"] = 0.5
    (checkpoint / "config.json").write_text(json.dumps(config))
    return checkpoint


@pytest.mark.parametrize("settings", [{}, {"freeze_vision_tower": True}, {"gradient_checkpointing": True}])
def test_nothing_is_clipped_while_the_weights_stay_the_same(settings: dict[str, Any], qwen: Path, tmp_path: Path):
    train(make_config(qwen, tmp_path, learning_rate=0.0, num_iterations=2, max_steps=2, epsilon=0.02, **settings))
    assert [line["clip_ratio/region_mean"] for line in metric_lines(tmp_path)] == [0.0, 0.0]


def test_the_log_names_what_was_switched_off(qwen: Path, caplog: pytest.LogCaptureFixture):
    make_policy(qwen)
    (record,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert record.getMessage().partition(": ")[2] == (
        "model.language_model.layers.*.self_attn.attention_dropout was 0.5, "
        "Qwen2_5_VLTextConfig.attention_dropout was 0.5"
    )


def test_checkpoints_of_the_run_describe_the_model_that_was_trained(qwen: Path, tmp_path: Path, caplog):
    from transformers import AutoProcessor

    PolicyFiles(make_policy(qwen), AutoProcessor.from_pretrained(qwen), Ranks()).write(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["text_config"]["attention_dropout"] == 0.0
    caplog.clear()
    make_policy(tmp_path)
    assert "dropout" not in caplog.text


@pytest.fixture
def adapter(tiny_checkpoint: Path, tmp_path: Path) -> Iterator[Path]:
    """An adapter that was trained elsewhere, with dropout."""
    from peft import LoraConfig, get_peft_model

    base = AutoModelForImageTextToText.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    model = get_peft_model(base, LoraConfig(r=4, lora_dropout=0.5, target_modules=["q_proj"], init_lora_weights=False))
    model.save_pretrained(str(tmp_path / "adapter"))
    yield tmp_path / "adapter"


@torch.no_grad()
def test_an_adapter_and_its_copy_as_reference_have_no_dropout(adapter: Path, tiny_checkpoint: Path):
    from peft import PeftModel

    config = RunConfig.model_validate({"model": {"model_name_or_path": str(adapter)}, "algorithm": {"beta": 0.1}})
    policy = load_policy(config, str(adapter)).train()
    policy.banned_token_ids = []
    add_initial_adapter(config, str(adapter), policy)
    reference = load_reference(config, str(adapter), policy, resumed=None)
    policy.train()
    assert reference is not None and INITIAL_ADAPTER in policy.model.peft_config
    base = AutoModelForImageTextToText.from_pretrained(tiny_checkpoint, dtype=torch.float32)
    model: Any = PeftModel.from_pretrained(base, str(adapter))
    groups = make_groups(tiny_checkpoint, SHAPES)
    expected = own_logprobs(model.eval(), policy, groups)
    assert largest_gap(own_logprobs(model.train(), policy, groups), expected) > 1e-3
    batch = whole(groups, shared=True)
    assert largest_gap(policy(Forward(batch)).logprobs_NT, expected) <= 1e-5
    assert largest_gap(reference(Forward(batch)).logprobs_NT, expected) <= 1e-5
