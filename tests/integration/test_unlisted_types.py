"""Types without a row in the table of families: the proof before the first step decides."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from rl_vlm.errors import ConfigError, ModelError, RLVLMError
from rl_vlm.log.starts import read_starts
from rl_vlm.model import derived, policy
from rl_vlm.model.family import text_positions
from rl_vlm.model.features import ImageFeatures
from rl_vlm.model.layout import ForwardInputs, shared_inputs
from rl_vlm.model.vision import VisionEncoder
from rl_vlm.passes import start_check
from rl_vlm.passes.proof import GRADIENTS, JOINED, OWN_FORWARD, SHARED
from rl_vlm.run.run import train
from rl_vlm.types import Rendered
from tests.helpers.builders import sharp_checkpoint
from tests.helpers.family_parity import cases, measure
from tests.helpers.tiers import in_tiers
from tests.helpers.tiny_run import make_config, metric_lines
from tests.helpers.wrong_rows import see_each_other
from tests.tiny.unlisted import REFUSED, UNLISTED

TRAINED = sorted(UNLISTED.keys() - REFUSED.keys())
HAVE_STATES = {"hybrid", "glm5_next", "inkling_mm_model"}
CI = {"vipllava", "lighton_ocr"}
LAYER = "model.language_model.layers.1"


def lines_of_proof(output_dir: Path) -> list[str]:
    return [each["check"] for each in read_starts(output_dir)[-1]["proof"]["checks"]]


AFTER_FEATURES = {
    "aria": "model.vision_tower.post_layernorm.weight",
    "deepseek_ocr2": "model.vision_tower.query_768_resolution.weight",
    "hybrid": "model.vision_tower.post_layernorm.weight",
    "llava_next_video": "model.vision_tower.encoder.layers.1.self_attn.k_proj.weight",
    "video_llava": "model.image_tower.encoder.layers.1.self_attn.k_proj.weight",
    "vipllava": "model.vision_tower.post_layernorm.weight",
}
"""The first weight of a tower that its features do not depend on: those of later layers, or for larger images."""


@pytest.mark.parametrize("name", in_tiers(TRAINED, {"hybrid", "lighton_ocr"}, CI))
def test_a_proven_type_trains(tmp_path: Path, name: str) -> None:
    checkpoint = sharp_checkpoint(name, tmp_path / "model")
    train(make_config(checkpoint, tmp_path / "run", max_steps=2))
    lines = lines_of_proof(tmp_path / "run")
    assert any(line.startswith(f"{OWN_FORWARD} differ in log-probs by ") for line in lines)
    assert any(line.startswith(f"{SHARED} differ in log-probs by ") for line in lines) == (name not in HAVE_STATES)
    (gradients,) = (line for line in lines if line.startswith(GRADIENTS))
    unused = gradients.partition(", not ")[2].split(", ")[0]
    assert gradients == f"{GRADIENTS} all have a gradient" or unused == AFTER_FEATURES.get(name), gradients
    first, second = metric_lines(tmp_path / "run")
    assert ("compute/shared_forwards" in first) == (name not in HAVE_STATES)
    assert second["grad_norm"] > 0


@pytest.mark.parametrize(
    ("name", "unused"),
    [
        # the bias of a router is a buffer
        ("glm5_next", (f"{LAYER}.self_attn.indexer.", f"{LAYER}.mlp.gate.e_score_correction_bias")),
        ("janus", ("model.vqmodel.", "model.generation_")),
    ],
)
def test_weights_that_no_forward_trains_do_not_decay(tmp_path: Path, name: str, unused: tuple[str, ...]) -> None:
    checkpoint = sharp_checkpoint(name, tmp_path / "model")
    train(make_config(checkpoint, tmp_path / "run", max_steps=1, weight_decay=0.1))
    before, after = (load_file(path / "model.safetensors") for path in (checkpoint, tmp_path / "run" / "checkpoint-1"))
    unchanged = {each for each in before if torch.equal(before[each], after[each])}
    assert unchanged == {each for each in before if each.startswith(unused)}


@pytest.mark.parametrize("name", in_tiers(TRAINED, (), CI))
def test_its_rows_are_those_of_its_own_forward(tmp_path: Path, name: str) -> None:
    """By the measure of families with a row."""
    measured = measure(sharp_checkpoint(name, tmp_path / "model"), cases(name))
    assert measured.dense.logprobs <= 1e-5
    assert measured.dense_fp64.worst <= 1e-9
    if name not in HAVE_STATES:
        assert measured.shared is not None and measured.shared_fp64 is not None
        assert measured.shared.logprobs <= 1e-5
        assert measured.shared_fp64.worst <= 1e-9


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_a_type_that_cannot_be_trained_is_refused(tmp_path: Path, name: str) -> None:
    checkpoint = sharp_checkpoint(name, tmp_path / "model")
    with pytest.raises(RLVLMError, match=REFUSED[name]):
        train(make_config(checkpoint, tmp_path / "run", max_steps=1))


def test_weights_that_learn_nothing_from_images_end_the_run(tmp_path: Path) -> None:
    """Features of Emu3's images are rows of its language model's embeddings. An adapter does not train those."""
    checkpoint = sharp_checkpoint("emu3", tmp_path / "model")
    with pytest.raises(ModelError, match=r"embed_tokens\.weight gets no gradient from features of images"):
        train(make_config(checkpoint, tmp_path / "full", max_steps=1, freeze_vision_tower=True))
    train(make_config(checkpoint, tmp_path / "adapter", max_steps=1, use_peft=True))
    assert f"{GRADIENTS} all have a gradient" in lines_of_proof(tmp_path / "adapter")


def test_a_scale_of_logits_with_another_meaning_ends_the_run(tmp_path: Path) -> None:
    """HyperCLOVA X multiplies logits by a number by which Granite divides them."""
    checkpoint = sharp_checkpoint("hyperclovax_vision_v2", tmp_path / "model")
    config = json.loads((checkpoint / "config.json").read_text())
    config["text_config"]["logits_scaling"] = 0.5
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"own forward differ .* in log-probs by"):
        train(make_config(checkpoint, tmp_path / "run", max_steps=1))


@pytest.fixture(scope="module")
def unlisted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return sharp_checkpoint("lighton_ocr", tmp_path_factory.mktemp("unlisted"))


def test_the_proof_cannot_be_left_out(unlisted: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.verify: off is not possible for model_type 'lighton_ocr'"):
        train(make_config(unlisted, tmp_path, verify="off"))


def test_positions_that_are_not_the_models_end_the_run(
    unlisted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tripled(model: Any, row: Any, images: Any) -> Tensor:
        return 3 * text_positions(model, row, images)

    monkeypatch.setattr(derived, "text_positions", tripled)
    monkeypatch.setattr(derived, "_derived", {})
    with pytest.raises(ModelError, match=r"own forward differ .* in log-probs by"):
        train(make_config(unlisted, tmp_path, max_steps=1))


def test_rows_that_could_not_be_checked_end_the_run(
    unlisted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start_check, "chosen", lambda groups, size: [])
    with pytest.raises(ModelError, match=r"it is not proven here: .* were not checked: a rank has no sampled token"):
        train(make_config(unlisted, tmp_path, max_steps=1))


def test_images_of_several_prompts_share_a_run_of_the_tower_also_after_a_resume(unlisted: Path, tmp_path: Path) -> None:
    """The second start tries nothing again, so that features are those of a run that was not interrupted."""
    settings = {"freeze_vision_tower": True, "save_steps": 1}
    train(make_config(unlisted, tmp_path, max_steps=1, **settings))
    assert any(line.startswith(f"{JOINED} differ in features by ") for line in lines_of_proof(tmp_path))
    train(make_config(unlisted, tmp_path, max_steps=2, resume_from_checkpoint="auto", **settings))
    assert not any(line.startswith(JOINED) for line in lines_of_proof(tmp_path))
    assert [start["proof"]["joins_images"] for start in read_starts(tmp_path)] == [True, True]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tower_that_mixes_images_has_a_run_for_each_prompt(
    unlisted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    """A tenth of the first vector of the first image is added to all others."""

    def mixed(encoder: VisionEncoder, rendered: Sequence[Rendered]) -> dict[Rendered, ImageFeatures]:
        found = run(encoder, rendered)
        first = found[rendered[0]].embeddings.flatten(0, -2)[0]
        return {each: features.map(lambda t: t + 0.1 * first) for each, features in found.items()}

    run = VisionEncoder.run
    monkeypatch.setattr(VisionEncoder, "run", mixed)
    monkeypatch.setattr(start_check.StartCheck, "computed", lambda *_: None)
    monkeypatch.setattr(start_check.StartCheck, "refuse_unproven", lambda *_: None)
    train(make_config(unlisted, tmp_path, max_steps=1, dtype=dtype))
    assert read_starts(tmp_path)[-1]["proof"]["joins_images"] is False


def test_shared_rows_that_cannot_be_computed_become_dense(
    unlisted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> ForwardInputs:
        raise RuntimeError("The size of tensor a (7) must match the size of tensor b (9)")

    monkeypatch.setattr(policy, "shared_inputs", refuse)
    train(make_config(unlisted, tmp_path, max_steps=1))
    proof = read_starts(tmp_path)[-1]["proof"]
    assert proof["fallback"] == "dense rows"
    assert any("shared rows cannot be computed (The size of tensor a (7)" in line for line in lines_of_proof(tmp_path))


def test_shared_rows_that_are_wrong_become_dense(
    unlisted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule of the mask that lets completions see each other stands for a state that nobody knows of."""
    monkeypatch.setattr(policy, "shared_inputs", lambda *arguments: see_each_other(shared_inputs(*arguments)))
    train(make_config(unlisted, tmp_path, max_steps=1))
    assert read_starts(tmp_path)[-1]["proof"]["fallback"] == "dense rows"
    (line,) = metric_lines(tmp_path)
    assert "compute/shared_forwards" not in line and line["compute/dense_forwards"] > 0
