"""Models that are reached by an adapter, on stand-ins with the published signatures of their code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModel

from rl_vlm.config.schema import DataConfig, ModelConfig
from rl_vlm.data.prompts import PromptBuilder, load_processor
from rl_vlm.model.loading import load_policy
from rl_vlm.run.run import train
from rl_vlm.tools.export.write import export
from rl_vlm.types import Prompt
from tests.helpers.builders import noise_image
from tests.helpers.remote_code.build import build_remote
from tests.helpers.stock import model_inputs
from tests.helpers.tiny_run import make_config
from tests.unit.data.remote.test_processors import sample_of

KINDS = {"internvl_chat": "<IMG_CONTEXT>", "minicpmv": "<unk>"}
IMAGES = {"one": [(16, 16)], "several": [(16, 16), (50, 16), (16, 40)], "none": []}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_remote(kind, tmp_path_factory.mktemp(kind) / kind)


def prompts(checkpoint: Path) -> dict[str, Prompt]:
    settings = ModelConfig(model_name_or_path=str(checkpoint), trust_remote_code=True)
    builder = PromptBuilder(load_processor(str(checkpoint), settings, DataConfig()), DataConfig())
    images: dict[str, list[Image.Image]] = {
        name: [noise_image(*size, seed=i) for i, size in enumerate(sizes)] for name, sizes in IMAGES.items()
    }
    return {name: builder.build(sample_of("Which digit?", *each)) for name, each in images.items()}


def published(checkpoint: Path) -> Any:
    """The model as its own code creates it, without an adapter."""
    config = AutoConfig.from_pretrained(checkpoint, trust_remote_code=True)
    model = AutoModel.from_config(config, trust_remote_code=True)
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
    model, built = published(checkpoint), prompts(checkpoint)
    token = policy.transformer.config.image_token_id
    assert policy.banned_token_ids == [token]
    for prompt in built.values():
        expected = published_logits(kind, model, prompt, token)
        assert torch.allclose(policy.transformer(**model_inputs(prompt)).logits, expected, atol=1e-5)
    one, several = (policy.vision.encode([built[name]])[built[name]] for name in ("one", "several"))
    together = policy.vision.encode([built["one"], built["several"]])
    assert torch.allclose(together[built["one"]].embeddings, one.embeddings, atol=1e-6)
    assert torch.allclose(together[built["several"]].embeddings, several.embeddings, atol=1e-6)


@pytest.mark.ci
def test_it_trains_and_its_checkpoint_is_a_published_one(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    config = make_config(checkpoint, tmp_path, trust_remote_code=True, max_steps=2)
    train(config)
    (start,) = map(json.loads, (tmp_path / "starts.jsonl").read_text().splitlines())
    said = [check["check"] for check in start["proof"]["checks"]]
    assert any(line.startswith("dense rows and the model's own forward differ") for line in said)
    assert any(line.startswith("the run's rows and rows with other images differ") for line in said)
    assert said[-1] == "trained weights all have a gradient"
    before, after = (load_file(path / "model.safetensors") for path in (checkpoint, tmp_path / "checkpoint-2"))
    assert before.keys() == after.keys() and not any(torch.equal(before[name], after[name]) for name in before)
    _, exported = export(tmp_path)
    for written in (tmp_path / "checkpoint-2", exported):
        assert {path.name for path in written.glob("*.py")} == {path.name for path in checkpoint.glob("*.py")}
        prompt = prompts(written)["several"]
        policy = load_policy(make_config(written, tmp_path, trust_remote_code=True), str(written)).eval()
        token = policy.transformer.config.image_token_id
        with torch.no_grad():
            logits = published_logits(kind, published(written), prompt, token)
            assert torch.allclose(policy.transformer(**model_inputs(prompt)).logits, logits, atol=1e-5)


@pytest.mark.ci
def test_an_adapter_of_it_trains_and_resumes(kind: str, checkpoint: Path, tmp_path: Path) -> None:
    parts = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["projector", "lm_head", "language_model"]}
    train(make_config(checkpoint, tmp_path, trust_remote_code=True, **parts, max_steps=1))
    again = {"resume_from_checkpoint": "auto", "max_steps": 2}
    train(make_config(checkpoint, tmp_path, trust_remote_code=True, **parts, **again))
    stored = load_file(tmp_path / "checkpoint-2" / "adapter_model.safetensors")
    assert stored and all(tensor.any() for tensor in stored.values())
