"""Exported models, loaded by transformers, peft and vLLM: their log-probs are those of the checkpoint's policy."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from rl_vlm.model.loading import load_policy
from rl_vlm.rollout.vllm.arguments import engine_arguments
from rl_vlm.run.run import train
from rl_vlm.tools.export.write import export
from rl_vlm.types import Forward, ScoredGroup
from tests.helpers.builders import make_groups, noise_image, sharp_checkpoint, whole
from tests.helpers.stock import stock_logprobs
from tests.helpers.tiers import in_tiers
from tests.helpers.tiny_run import make_config
from tests.helpers.vllm_parity import Side, generator_logprobs, sampling

LORA: dict[str, Any] = {"use_peft": True, "lora_r": 4}
TOLERANCE = 2e-5


@pytest.fixture(scope="module", params=in_tiers(["qwen2_5_vl", "internvl"], (), {"qwen2_5_vl"}))
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_checkpoint(request.param, tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def lora_run(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(base, tmp_path_factory.mktemp("lora"), **LORA)


def trained(base: Path, output_dir: Path, **settings: Any) -> Path:
    """Train for two steps, of which the first has a checkpoint as well."""
    train(make_config(base, output_dir, max_steps=2, **settings))
    return output_dir


def groups_of(base: Path) -> list[ScoredGroup]:
    return make_groups(base, [([noise_image(32, 24, seed=1)], [5, 3]), ([], [4])])


@torch.no_grad()
def of_policy(base: Path, checkpoint: Path, **settings: Any) -> Tensor:
    """Log-probs by the policy of a checkpoint, without banned tokens."""
    policy = load_policy(make_config(base, checkpoint.parent, **settings), str(base), checkpoint).eval()
    policy.banned_token_ids = []
    groups = groups_of(base)
    rows = policy(Forward(whole(groups, shared=False))).logprobs_NT
    lengths = [len(completion.token_ids) for group in groups for completion in group.group.completions]
    return torch.cat([row[:length] for row, length in zip(rows, lengths, strict=True)])


@torch.no_grad()
def of_library(base: Path, model: Any) -> Tensor:
    """The same by the model's own forward, completion by completion."""
    family = load_policy(make_config(base, base), str(base)).family
    groups = [group.group for group in groups_of(base)]
    rows = [(group.prompt, completion) for group in groups for completion in group.completions]
    return torch.cat([stock_logprobs(model.eval(), family, *row) for row in rows])


def load(directory: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(directory, dtype="auto")


def far(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().max())


def test_a_fully_trained_model_loads_in_transformers(base: Path, tmp_path: Path):
    run = trained(base, tmp_path / "run")
    exported, directory = export(run)
    assert (exported.form, directory) == ("model", run / "export")
    expected = of_policy(base, run / "checkpoint-2")
    assert far(of_library(base, load(directory)), expected) <= TOLERANCE
    assert far(of_library(base, load(base)), expected) > 0.01

    export(run / "checkpoint-1")  # replaces the one before
    assert far(of_library(base, load(directory)), of_policy(base, run / "checkpoint-1")) <= TOLERANCE
    names = {path.name for path in directory.iterdir()}
    assert {"README.md", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} < names
    assert not [name for name in names if name.startswith(("rank", "trainer", "optimizer", "manifest"))]
    assert not list(run.glob("unfinished*"))


def test_an_adapter_loads_in_peft(base: Path, lora_run: Path, tmp_path: Path):
    exported, directory = export(lora_run, to=tmp_path / "adapter")
    assert exported.form == "adapter"
    expected = of_policy(base, lora_run / "checkpoint-2", **LORA)
    model = peft.PeftModel.from_pretrained(load(base), directory)
    assert far(of_library(base, model.get_base_model()), expected) <= TOLERANCE
    assert far(of_library(base, load(base)), expected) > 0.01
    by_transformers = load(base)
    by_transformers.load_adapter(directory)
    assert far(of_library(base, by_transformers), expected) <= TOLERANCE
    assert json.loads((directory / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)
    assert AutoProcessor.from_pretrained(directory).tokenizer.get_vocab()


def test_a_merged_adapter_loads_in_transformers(base: Path, lora_run: Path, tmp_path: Path):
    exported, directory = export(lora_run, merge=True, to=tmp_path / "merged")
    assert exported.form == "merged"
    expected = of_policy(base, lora_run / "checkpoint-2", **LORA)
    assert far(of_library(base, load(directory)), expected) <= TOLERANCE
    assert not (directory / "adapter_config.json").exists()


def test_adapters_by_part_change_and_load_in_peft_and_merged(base: Path, tmp_path: Path):
    """The head of one family is tied to the embeddings, which the adapter leaves as they are."""
    by_part = {**LORA, "lora_target_modules": ["lm_head", "projector", "vision_tower"]}
    run = trained(base, tmp_path / "run", **by_part)
    stored = load_file(run / "checkpoint-2" / "adapter_model.safetensors")
    assert all(tensor.any() for tensor in stored.values())  # B starts at zero
    of_parts = {name.split(".lora_")[0].removeprefix("base_model.model.") for name in stored}
    first = {"qwen2_5_vl": "model.visual.", "internvl": "model.vision_tower."}[load(base).config.model_type]
    projector = ("model.visual.merger.", "model.multi_modal_projector.")
    numbers = [sum(name.startswith(prefix) for name in of_parts) for prefix in ("lm_head", projector, first)]
    assert numbers in ([1, 2, 12], [1, 2, 6]) and len(of_parts) in (13, 9)

    expected = of_policy(base, run / "checkpoint-2", **by_part)
    assert far(of_library(base, load(base)), expected) > 0.01
    by_peft = peft.PeftModel.from_pretrained(load(base), run / "checkpoint-2")
    assert far(of_library(base, by_peft.get_base_model()), expected) <= TOLERANCE
    _, directory = export(run, merge=True)
    assert far(of_library(base, load(directory)), expected) <= TOLERANCE
    embeddings = [load(path).get_input_embeddings().weight for path in (base, directory)]
    assert torch.equal(*embeddings)


def test_the_precision_is_that_of_the_run_unless_it_is_given(base: Path, tmp_path: Path):
    run = trained(base, tmp_path / "run", **LORA, dtype="bfloat16", save_steps=2)
    for given, expected in ((None, torch.bfloat16), ("float32", torch.float32)):
        _, directory = export(run, merge=True, dtype=given)
        model = load(directory)
        assert {parameter.dtype for parameter in model.parameters()} == {expected}
        config = json.loads((directory / "config.json").read_text())
        parts = [config, config["text_config"], config["vision_config"]]
        assert {part["dtype"] for part in parts} == {str(expected).removeprefix("torch.")}


def test_an_adapter_of_a_base_in_4_bits_is_merged_into_the_unquantized_one(tmp_path: Path):
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes")
    base = sharp_checkpoint("qwen2_5_vl", tmp_path / "base")
    run = trained(base, tmp_path / "run", **LORA, load_in_4bit=True)
    _, directory = export(run, merge=True)
    adapted = peft.PeftModel.from_pretrained(load(base), run / "checkpoint-2").get_base_model()
    assert far(of_library(base, load(directory)), of_library(base, adapted)) <= TOLERANCE
    assert "It was merged into the unquantized base." in " ".join((directory / "README.md").read_text().splitlines())


def test_a_failed_export_leaves_the_earlier_one(lora_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    _, directory = export(lora_run, to=tmp_path / "adapter")
    before = sorted((path.name, path.stat().st_mtime_ns) for path in directory.iterdir())

    def no_card(*_: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr("rl_vlm.tools.export.write.model_card", no_card)
    with pytest.raises(KeyboardInterrupt):
        export(lora_run, merge=True, to=tmp_path / "adapter")
    assert sorted((path.name, path.stat().st_mtime_ns) for path in directory.iterdir()) == before
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


@pytest.fixture(scope="module")
def qwen_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    base = sharp_checkpoint("qwen2_5_vl", tmp_path_factory.mktemp("base"))
    yield base, trained(base, tmp_path_factory.mktemp("run"), **LORA)


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm")
@pytest.mark.parametrize("merge", in_tiers([False, True], (), {True}), ids=["adapter", "merged"])
def test_an_export_loads_in_vllm(qwen_run: tuple[Path, Path], merge: bool, tmp_path: Path):
    from vllm.lora.request import LoRARequest

    from rl_vlm.rollout.vllm.in_process import VLLMEngine

    base, run = qwen_run
    _, directory = export(run, merge, to=tmp_path / "model")
    side = Side.of(run / "checkpoint-2")
    arguments = engine_arguments(side.config, str(directory if merge else base), None if merge else 4)
    engine = VLLMEngine(arguments, side.tokens, side.builder)
    try:
        engine.adapter = None if merge else LoRARequest("exported", 1, str(directory))
        groups = engine.generate(side.requests, sampling(seed=0))
        assert far(generator_logprobs(groups), side.scores(groups).detach()) <= 1e-3
        engine.adapter = None
        without = engine.generate(side.requests, sampling(seed=0))
        assert (far(generator_logprobs(without), side.scores(without).detach()) > 1e-2) == (not merge)
    finally:
        engine.close()
