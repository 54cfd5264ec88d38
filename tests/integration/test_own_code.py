"""Checkpoints whose model and processor are Python files beside the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoProcessor

from rl_vlm.errors import ModelError
from rl_vlm.model.loading import load_policy
from rl_vlm.plan.weights import count_weights
from rl_vlm.run.run import train
from rl_vlm.tools.export.write import export
from tests.helpers.builders import make_prompt, noise_image
from tests.helpers.own_code import FILES, with_own_code
from tests.helpers.resuming import assert_same_run, resumed, train_until
from tests.helpers.stock import model_inputs
from tests.helpers.tiny_run import build_checkpoint, make_config, metric_lines

CODE = {"configuration_own.py", "modeling_own.py", "scale_own.py", "processing_own.py"}


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_own_code(build_checkpoint(tmp_path_factory.mktemp("own")), scale=1.5)


def loaded(directory: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(directory, trust_remote_code=True)


def test_the_code_trains_and_goes_with_checkpoints_and_exports(directory: Path, tmp_path: Path) -> None:
    config = make_config(directory, tmp_path, trust_remote_code=True, max_steps=2)
    train(config)
    checkpoint = tmp_path / "checkpoint-2"
    assert all(line["loss"] is not None for line in metric_lines(tmp_path))
    scales = [load_file(path / "model.safetensors")["model.image_scale"] for path in (directory, checkpoint)]
    assert scales[0].unique().tolist() == [1.5] and not torch.equal(*scales)
    _, exported = export(tmp_path)
    for written in (checkpoint, exported):
        assert {path.name for path in written.glob("*.py")} == CODE == FILES.keys()
        model = loaded(written)
        assert type(model).__name__ == "OwnForConditionalGeneration" and torch.equal(model.model.image_scale, scales[1])
        assert type(AutoProcessor.from_pretrained(written, trust_remote_code=True)).__name__ == "OwnProcessor"


def test_weights_of_the_code_are_counted_without_a_proof(directory: Path, tmp_path: Path) -> None:
    """As the doctor counts them, for the size of checkpoints."""
    counted = count_weights(make_config(directory, tmp_path, trust_remote_code=True), str(directory))
    weights = load_file(directory / "model.safetensors")
    assert counted.num == counted.num_trained == sum(weight.numel() for weight in weights.values())


def test_untrusted_code_is_not_run(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"(?s)trust_remote_code"):
        train(make_config(directory, tmp_path, max_steps=1))


def test_the_features_of_images_are_those_of_the_code(directory: Path, tmp_path: Path) -> None:
    """The policy's features are half as large again as those of transformers' own model."""
    policy = load_policy(make_config(directory, tmp_path, trust_remote_code=True), str(directory))
    plain = load_policy(make_config(path := build_checkpoint(tmp_path / "plain"), tmp_path), str(path))
    prompt = make_prompt(path, [noise_image(16, 16, seed=0)])
    with torch.no_grad():
        own, stock = (each.vision.encode([prompt])[prompt].embeddings for each in (policy, plain))
    assert torch.allclose(own, 1.5 * stock, rtol=1e-5)


def test_a_run_resumes_with_the_code_of_its_checkpoint(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    straight, killed = (
        make_config(directory, tmp_path / name, trust_remote_code=True, max_steps=5, save_steps=1) for name in "ab"
    )
    train(straight)
    train_until(4, killed, monkeypatch)
    train(resumed(killed))
    assert_same_run(tmp_path / "b", tmp_path / "a")


def test_an_adapter_of_the_code_loads_in_peft_and_merged(directory: Path, tmp_path: Path) -> None:
    lora = {"use_peft": True, "lora_r": 4, "lora_target_modules": ["vision_tower", "language_model"]}
    train(make_config(directory, tmp_path, trust_remote_code=True, **lora, max_steps=2))
    adapted = peft.PeftModel.from_pretrained(loaded(directory), tmp_path / "checkpoint-2").eval()
    _, exported = export(tmp_path, merge=True)
    inputs = model_inputs(make_prompt(build_checkpoint(tmp_path / "plain"), [noise_image(16, 16, seed=0)]))
    with torch.no_grad():
        logits = [model(**inputs).logits for model in (adapted, loaded(exported).eval(), loaded(directory).eval())]
    assert torch.allclose(logits[0], logits[1], atol=2e-5)
    assert not torch.allclose(logits[0], logits[2], atol=1e-4)
