"""QLoRA: an adapter over base weights of 4 bits, against transformers, peft and bitsandbytes without our code."""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForImageTextToText, BitsAndBytesConfig

from launch import cli
from rl_vlm.config.describe import to_yaml
from rl_vlm.model.policy import Policy
from rl_vlm.run.run import Run, train
from tests.helpers import tiny_run
from tests.helpers.builders import gradient_error, make_policy, sharp_checkpoint, take_gradients
from tests.helpers.family_parity import case_groups, scores, weighted_sum
from tests.helpers.sharded_runs import Runs, differences
from tests.helpers.stock import stock_logprobs
from tests.helpers.tiny_run import make_config, metric_lines

pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
QLORA: dict[str, Any] = {"use_peft": True, "lora_r": 4, "load_in_4bit": True}
NESTED: dict[str, Any] = {**QLORA, "use_bnb_nested_quant": True, "bnb_4bit_quant_type": "fp4"}
TOWER = ["model.vision_tower", "model.multi_modal_projector"]
SKIPPED = {"qwen2_5_vl": ["model.visual"], "internvl": TOWER, "gemma3": TOWER}


def stock_base(checkpoint: Path, skipped: list[str], nested: bool = False) -> Any:
    """The quantized model as users of transformers load it, in train mode."""
    quantization = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="fp4" if nested else "nf4", bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=torch.float32, llm_int8_skip_modules=[*skipped, "lm_head"],
    )  # fmt: skip
    loaded: Any = AutoModelForImageTextToText.from_pretrained(
        checkpoint, quantization_config=quantization, dtype=torch.float32
    )
    return loaded.train()


@pytest.mark.parametrize("shared", [False, True], ids=["dense", "shared"])
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen2_5_vl", QLORA),
        ("qwen2_5_vl", NESTED),
        ("internvl", QLORA),
        ("gemma3", QLORA),
    ],
)
def test_adapters_gradients_are_those_of_peft(
    family: str, settings: dict[str, Any], shared: bool, tmp_path: Path
) -> None:
    checkpoint = sharp_checkpoint(family, tmp_path / "model")
    policy = make_policy(checkpoint, gradient_checkpointing=True, **settings)
    groups = case_groups(checkpoint, "several prompts")
    ours = scores(policy, groups, shared)

    policy.model.save_pretrained(tmp_path / "adapter")
    base = stock_base(checkpoint, SKIPPED[family], nested=settings is NESTED)
    model: Any = peft.PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    rows = [(group.group.prompt, completion) for group in groups for completion in group.group.completions]
    logprobs = torch.cat([stock_logprobs(model.get_base_model(), policy.family, *row) for row in rows])
    weighted_sum(logprobs).backward()
    assert (ours.logprobs - logprobs).abs().max() <= 2e-5
    gradients = {f"model.{name}": gradient for name, gradient in take_gradients(model).items()}
    assert all(".lora_" in name for name in gradients)
    assert gradient_error(ours.gradients, gradients) <= 1e-4


def test_4_bits_are_another_model(tmp_path: Path) -> None:
    """The comparison above would see a base that is not quantized, or in another way."""
    checkpoint = sharp_checkpoint("qwen2_5_vl", tmp_path)
    groups = case_groups(checkpoint, "several prompts")
    logprobs = [
        scores(make_policy(checkpoint, **settings), groups, shared=False).logprobs
        for settings in ({"use_peft": True, "lora_r": 4}, QLORA, NESTED)
    ]
    assert min((a - b).abs().max() for a, b in pairwise(logprobs)) > 1e-2


def test_a_run_trains_the_adapter_alone(tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also `load_best_model_at_end`; the adapter is then loaded by peft over transformers' quantized model."""
    policies: list[Policy] = []
    bits: list[dict[str, torch.Tensor]] = []
    start = Run.run

    def noted(run: Run) -> Any:
        policies.append(run.trainer.policy)
        bits.append(base_bits(policies[0]))
        return start(run)

    monkeypatch.setattr(Run, "run", noted)
    config = make_config(tiny_checkpoint, tmp_path, **QLORA, max_steps=6, learning_rate=3e-2, beta=0.01)
    train(config)
    lines = metric_lines(tmp_path)
    assert lines[0]["kl"] == 0 and lines[-1]["kl"] > 1e-2
    assert all(math.isfinite(line["loss"]) and line["grad_norm"] > 0 for line in lines)
    assert all(torch.equal(found, bits[0][name]) for name, found in base_bits(policies[0]).items())

    adapter = tmp_path / "checkpoint-6"
    base = stock_base(tiny_checkpoint, ["model.visual"])
    model: Any = peft.PeftModel.from_pretrained(base, adapter).train()
    groups = case_groups(tiny_checkpoint, "one image")
    prompt, completions = groups[0].group.prompt, groups[0].group.completions
    policies[0].banned_token_ids = []
    ours = scores(policies[0].train(), groups, shared=True).logprobs
    with torch.no_grad():
        rows = [stock_logprobs(model.get_base_model(), policies[0].family, prompt, c) for c in completions]
    assert (ours - torch.cat(rows)).abs().max() <= 2e-5


def base_bits(policy: Policy) -> dict[str, torch.Tensor]:
    """A copy of everything in the model that is not trained, the scales of 4-bit weights included."""
    return {name: value.clone() for name, value in policy.transformer.state_dict().items() if ".lora_" not in name}


def test_evaluation_of_an_adapter_is_the_runs_own(tiny_checkpoint: Path, tmp_path: Path) -> None:
    config = make_config(
        tiny_checkpoint, tmp_path / "run", eval_dataset_name=tiny_run.HELD_OUT_ROWS, max_steps=2, **QLORA,
        eval_temperature=1.0, eval_steps=1, load_best_model_at_end=True,
    )  # fmt: skip
    summary = train(config)
    (tmp_path / "run.yaml").write_text(to_yaml(config))
    checkpoint = f"model_name_or_path={summary['checkpoint']}"
    options = ["dataset_name=null", "eval_steps=0", "load_best_model_at_end=false", f"output_dir={tmp_path / 'eval'}"]
    assert cli.main(["eval", str(tmp_path / "run.yaml"), checkpoint, *options]) == 0
    found = json.loads((tmp_path / "eval" / "evaluation" / "summary.json").read_text())
    assert found == summary["eval_after"]


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["ddp", "zero2"])
def test_two_processes_train_as_one(engine: str, tmp_path: Path) -> None:
    checkpoint = sharp_checkpoint("qwen2_5_vl", tmp_path / "model")
    variants = {"qlora": {"checkpoint": checkpoint, "max_steps": 4, "beta": 0.04, **NESTED}}
    one = Runs.of(tmp_path / "one", variants).train()
    found = differences(one["qlora"], Runs.of(tmp_path / "two", variants).launch(engine)["qlora"])
    assert found.losses <= 1e-5
    assert found.gradients <= 1e-5
    assert found.weights <= 1e-3
