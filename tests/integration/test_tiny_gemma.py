"""Tiny models of families with masks, layers or image inputs of their own: Gemma, Cohere, Mllama, hybrids, others."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from rl_vlm.errors import DataError
from rl_vlm.tiny.build import build_tiny
from rl_vlm.tiny.cohere import COHERE
from rl_vlm.tiny.deepseek import DEEPSEEK
from rl_vlm.tiny.gemma import GEMMA
from rl_vlm.tiny.hybrid import HYBRID
from rl_vlm.tiny.mllama import MLLAMA
from rl_vlm.tiny.ocr import OCR
from rl_vlm.types import Prompt
from tests.integration.builders import make_prompt, noise_image

FAMILIES = {**GEMMA, **COHERE, **DEEPSEEK, **OCR, **MLLAMA, **HYBRID}
SIZES = {"one": [(32, 24)], "two": [(40, 20), (24, 64)]}
NEEDS_AN_IMAGE = {"paligemma", "paligemma2", "got_ocr2"}
SLIDING_AND_FULL = {"sliding_attention", "full_attention"}
LAYER_TYPES = {
    "gemma3": SLIDING_AND_FULL,
    "gemma4": SLIDING_AND_FULL,
    "gemma4_bidirectional": SLIDING_AND_FULL,
    "gemma4_moe": SLIDING_AND_FULL,
    "paligemma2": SLIDING_AND_FULL,
    "aya_vision": SLIDING_AND_FULL,
    "cohere2_vision": SLIDING_AND_FULL,
    "qwen3_5": {"linear_attention", "full_attention"},
    "qwen3_5_moe": {"linear_attention", "full_attention"},
    "minicpmv4_6": {"linear_attention", "full_attention"},
    "minicpmv4_7": {"linear_attention", "full_attention"},
    "lfm2_vl": {"conv", "full_attention"},
}


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny(family, tmp_path_factory.mktemp(family))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return AutoModelForImageTextToText.from_pretrained(checkpoint, dtype=torch.float32).eval()


def noise(sizes: Sequence[tuple[int, int]], seed: int = 0) -> list[Image.Image]:
    return [noise_image(width, height, seed + i) for i, (width, height) in enumerate(sizes)]


def model_inputs(prompt: Prompt) -> dict[str, Tensor]:
    rows = {"input_ids": prompt.token_ids, "attention_mask": torch.ones_like(prompt.token_ids), **prompt.token_inputs}
    return {name: row[None] for name, row in rows.items()} | prompt.mm_inputs


@torch.no_grad()
def last_logits(model: Any, prompt: Prompt) -> Tensor:
    return model(**model_inputs(prompt)).logits[0, -1]


def test_a_checkpoint_is_small_and_survives_another_save(model: Any, checkpoint: Path, tmp_path: Path):
    assert model.num_parameters() < 700_000
    model.save_pretrained(tmp_path)
    AutoProcessor.from_pretrained(checkpoint).save_pretrained(tmp_path)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    images = noise(SIZES["one"])
    expected, found = (last_logits(m, make_prompt(p, images)) for m, p in ((model, checkpoint), (again, tmp_path)))
    assert torch.equal(found, expected)


def test_special_tokens_stay_whole_after_loading(family: str, checkpoint: Path):
    tokenizer = AutoProcessor.from_pretrained(checkpoint).tokenizer
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *FAMILIES[family].special_tokens]
    assert tokenizer("".join(tokens), add_special_tokens=False)["input_ids"] == list(range(len(tokens)))


def test_each_type_of_layer_occurs_and_no_window_is_as_long_as_a_prompt(family: str, model: Any, checkpoint: Path):
    text = model.config.get_text_config()
    assert set(getattr(text, "layer_types", None) or ["full_attention"]) == LAYER_TYPES.get(family, {"full_attention"})
    if "sliding_attention" in LAYER_TYPES.get(family, ()):
        assert text.sliding_window < len(make_prompt(checkpoint, noise(SIZES["one"])).token_ids)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_one_and_two_images_have_a_forward_and_generate(model: Any, checkpoint: Path, sizes: list):
    """The models raise where features and placeholder tokens differ in number."""
    prompt, other = (make_prompt(checkpoint, noise(sizes, seed)) for seed in (0, 10))
    assert torch.equal(prompt.token_ids, other.token_ids)
    assert (prompt.token_ids == model.config.image_token_id).any()
    assert (last_logits(model, prompt) - last_logits(model, other)).abs().max() > 1e-3
    inputs = model_inputs(prompt)
    tokens = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert tokens.shape == (1, len(prompt.token_ids) + 4)


def test_the_last_of_two_images_counts(model: Any, checkpoint: Path):
    first, second = noise(SIZES["two"])
    prompts = [make_prompt(checkpoint, [first, x]) for x in (second, noise_image(*second.size, seed=20))]
    logits = [last_logits(model, prompt) for prompt in prompts]
    assert (logits[0] - logits[1]).abs().max() > 1e-3


def test_text_alone_is_a_prompt_or_is_refused(family: str, model: Any, checkpoint: Path):
    if family in NEEDS_AN_IMAGE:
        with pytest.raises(DataError, match="the model's processor refuses it"):
            make_prompt(checkpoint, [])
    else:
        prompt = make_prompt(checkpoint, [])
        tokens = model.generate(**model_inputs(prompt), max_new_tokens=4, min_new_tokens=4, do_sample=False)
        assert tokens.shape == (1, len(prompt.token_ids) + 4)


def test_a_text_that_holds_the_placeholder_is_refused(model: Any, checkpoint: Path):
    token = AutoProcessor.from_pretrained(checkpoint).tokenizer.convert_ids_to_tokens(model.config.image_token_id)
    with pytest.raises(DataError, match="the text holds"):
        make_prompt(checkpoint, noise(SIZES["one"]), text=f"What is {token}?")


def test_a_prompt_keeps_no_labels(checkpoint: Path):
    prompt = make_prompt(checkpoint, noise(SIZES["one"]))
    assert "labels" not in prompt.token_inputs | prompt.mm_inputs
