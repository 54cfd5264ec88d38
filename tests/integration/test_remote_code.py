"""Models that are reached by an adapter, on stand-ins with the published signatures of their code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from rl_vlm.config.schema import DataConfig, ModelConfig
from rl_vlm.data.prompts import PromptBuilder, load_processor
from rl_vlm.errors import ModelError
from rl_vlm.model.loading import load_policy
from rl_vlm.model.remote.cogvlm import CogVLM
from rl_vlm.passes.proof import OTHER_IMAGES, OWN_FORWARD
from rl_vlm.run.run import train
from rl_vlm.tools.export.write import export
from rl_vlm.types import Prompt
from tests.helpers.builders import noise_image
from tests.helpers.evaluating import evaluate_run
from tests.helpers.remote_code.build import build_remote, created
from tests.helpers.resuming import assert_same_run, resumed, train_until
from tests.helpers.stock import model_inputs
from tests.helpers.tiny_run import COIN, HELD_OUT_ROWS, TOKEN_SUM, make_config
from tests.unit.data.remote.test_processors import sample_of

KINDS = ["internvl_chat", "minicpmv", "cogvlm"]
IMAGES = {"one": [(50, 16)], "several": [(16, 16), (50, 16), (16, 40)], "none": []}
ONE_IMAGE = {"cogvlm"}
"""Kinds whose prompts have one image at most."""
WITHOUT_GRADIENT = {
    "cogvlm": {  # nothing reads what the last layer computes at tokens of an image
        "model.layers.1.self_attn.vision_expert_dense.weight",
        *(f"model.layers.1.mlp.vision_mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    },
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_remote(kind, tmp_path_factory.mktemp(kind) / kind)


def prompts(kind: str, checkpoint: Path) -> dict[str, Prompt]:
    settings = ModelConfig(model_name_or_path=str(checkpoint), trust_remote_code=True)
    builder = PromptBuilder(load_processor(str(checkpoint), settings, DataConfig()), DataConfig())
    images: dict[str, list[Image.Image]] = {
        name: [noise_image(*size, seed=i) for i, size in enumerate(sizes)]
        for name, sizes in IMAGES.items()
        if not (name == "several" and kind in ONE_IMAGE)
    }
    return {name: builder.build(sample_of("Which digit?", *each)) for name, each in images.items()}


def published(checkpoint: Path) -> Any:
    """The model as its own code creates it, without an adapter."""
    model = created(checkpoint)
    model.load_state_dict(load_file(checkpoint / "model.safetensors"))
    return model.eval()


def published_logits(kind: str, model: Any, prompt: Prompt, token: int) -> torch.Tensor:
    """Call the published forward as the published `chat` and training scripts do."""
    ids, pixels = prompt.token_ids[None], prompt.mm_inputs.get("pixel_values")
    if kind == "internvl_chat":
        model.img_context_token_id = token
        if pixels is None:
            return model.language_model(ids).logits
        return model(pixels, ids, image_flags=torch.ones(len(pixels), 1)).logits
    if kind == "cogvlm":
        types = (ids == token).long()
        return model(ids, images=None if pixels is None else [[pixels[0]]], token_type_ids=types).logits
    data: dict[str, Any] = {"input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None]}
    data |= {"pixel_values": [[]], "tgt_sizes": [torch.zeros(0, 2)], "image_bound": [[]]}
    if pixels is not None:
        sizes = prompt.mm_inputs["tgt_sizes"]
        slices = [each[..., : 4 * int(size.prod())] for each, size in zip(pixels, sizes, strict=True)]
        starts = [i for i, each in enumerate(ids[0].tolist()) if each == token][::4]
        data |= {"pixel_values": [slices], "tgt_sizes": [sizes]}
        data["image_bound"] = [torch.tensor([[start, start + 4] for start in starts])]
    return model(data).logits


@torch.no_grad()
def test_an_adapted_model_computes_what_the_published_code_does(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    policy = load_policy(make_config(checkpoint, tmp_path, trust_remote_code=True), str(checkpoint)).eval()
    model, built = published(checkpoint), prompts(kind, checkpoint)
    token = policy.transformer.config.image_token_id
    assert policy.banned_token_ids == [token]
    for prompt in built.values():
        expected = published_logits(kind, model, prompt, token)
        assert torch.allclose(policy.transformer(**model_inputs(prompt)).logits, expected, atol=1e-5)
    with_images = [prompt for prompt in built.values() if prompt.mm_inputs]
    together = policy.vision.encode(with_images)
    for prompt in with_images:
        alone = policy.vision.encode([prompt])[prompt]
        assert torch.allclose(together[prompt].embeddings, alone.embeddings, atol=1e-6)


def test_it_trains_and_its_checkpoint_is_a_published_one(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    config = make_config(checkpoint, tmp_path, trust_remote_code=True, max_steps=2)
    train(config)
    (start,) = map(json.loads, (tmp_path / "starts.jsonl").read_text().splitlines())
    said = [check["check"] for check in start["proof"]["checks"]]
    for name in (OWN_FORWARD, OTHER_IMAGES):
        assert any(line.startswith(f"{name} differ") for line in said)
    assert said[-1] == "trained weights all have a gradient"
    before, after = (load_file(path / "model.safetensors") for path in (checkpoint, tmp_path / "checkpoint-2"))
    assert before.keys() == after.keys()
    assert {name for name in before if torch.equal(before[name], after[name])} == WITHOUT_GRADIENT.get(kind, set())
    _, exported = export(tmp_path)
    for written in (tmp_path / "checkpoint-2", exported):
        assert {path.name for path in written.glob("*.py")} == {path.name for path in checkpoint.glob("*.py")}
        prompt = prompts(kind, written)["one" if kind in ONE_IMAGE else "several"]
        policy = load_policy(make_config(written, tmp_path, trust_remote_code=True), str(written)).eval()
        token = policy.transformer.config.image_token_id
        with torch.no_grad():
            logits = published_logits(kind, published(written), prompt, token)
            assert torch.allclose(policy.transformer(**model_inputs(prompt)).logits, logits, atol=1e-5)


def test_an_adapter_of_it_trains_and_resumes(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    parts = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["projector", "lm_head", "language_model"]}
    train(make_config(checkpoint, tmp_path, trust_remote_code=True, **parts, max_steps=1))
    again = {"resume_from_checkpoint": "auto", "max_steps": 2}
    train(make_config(checkpoint, tmp_path, trust_remote_code=True, **parts, **again))
    stored = load_file(tmp_path / "checkpoint-2" / "adapter_model.safetensors")
    unused = tuple(name.rpartition(".weight")[0] for name in WITHOUT_GRADIENT.get(kind, ()))
    zero = {name for name, tensor in stored.items() if not tensor.any()}
    assert stored and len(zero) == len(unused) and all(any(part in name for part in unused) for name in zero)


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"use_peft": True, "lora_r": 4}], ids=["all", "lora"])
def test_a_killed_run_resumes_exactly_and_is_evaluated(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint = build_remote("cogvlm", tmp_path / "cogvlm")
    given = settings | {"trust_remote_code": True, "max_steps": 3, "reward_funcs": [TOKEN_SUM, COIN]}
    whole, killed = (make_config(checkpoint, tmp_path / name, **given) for name in ("whole", "killed"))
    train(whole)
    train_until(2, killed, monkeypatch)
    train(resumed(killed))
    assert_same_run(tmp_path / "killed", tmp_path / "whole", last=3)
    evaluated = {"model_name_or_path": str(tmp_path / "killed" / "checkpoint-3"), "eval_dataset_name": HELD_OUT_ROWS}
    summary = evaluate_run(make_config(checkpoint, tmp_path / "evaluated", trust_remote_code=True, **evaluated))
    assert summary["num_samples"] == 5


def test_the_proof_finds_positions_that_the_published_code_does_not_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def one_after_the_other(model: Any, input_ids: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        return torch.arange(input_ids.shape[1])[None, None], None

    monkeypatch.setattr(CogVLM, "get_rope_index", one_after_the_other)
    config = make_config(build_remote("cogvlm", tmp_path / "cogvlm"), tmp_path / "run", trust_remote_code=True)
    with pytest.raises(ModelError, match="own forward differ"):
        train(config)
