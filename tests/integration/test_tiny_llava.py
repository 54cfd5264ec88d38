"""Tiny models of the LLaVA, GLM and tiled families: what comes out of `build_tiny` is a whole checkpoint."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from rl_vlm.config.schema import DataConfig
from rl_vlm.errors import DataError
from rl_vlm.prompts import PromptBuilder
from rl_vlm.tiny.build import TINY_FAMILIES, build_tiny
from rl_vlm.tiny.glm import GLM
from rl_vlm.tiny.llava import LLAVA
from rl_vlm.tiny.tiles import TILES
from rl_vlm.types import Prompt
from tests.integration.builders import make_prompt, noise_image

SIZES = {"text": [], "one": [(20, 20)], "two": [(32, 16), (24, 40)]}
ONE_SIZE = {"llava"}
"""Families whose images all become the same number of tokens."""


@pytest.fixture(scope="module", params=[*GLM, *LLAVA, *TILES])
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


def model_inputs(prompt: Prompt) -> dict[str, torch.Tensor]:
    rows = {"input_ids": prompt.token_ids, "attention_mask": torch.ones_like(prompt.token_ids), **prompt.token_inputs}
    return {name: row[None] for name, row in rows.items()} | prompt.mm_inputs


def num_image_tokens(model: Any, prompt: Prompt) -> int:
    return int((prompt.token_ids == model.config.image_token_id).sum())


def test_a_checkpoint_is_small_and_survives_another_save(model: Any, checkpoint: Path, tmp_path: Path):
    assert model.num_parameters() < 700_000
    model.save_pretrained(tmp_path)
    AutoProcessor.from_pretrained(checkpoint).save_pretrained(tmp_path)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    images = noise([(20, 20)])
    with torch.no_grad():
        logits = [m(**model_inputs(make_prompt(p, images))).logits for m, p in ((model, checkpoint), (again, tmp_path))]
    assert torch.equal(*logits)


def test_special_tokens_stay_whole_after_loading(family: str, checkpoint: Path):
    tokenizer = AutoProcessor.from_pretrained(checkpoint).tokenizer
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *TINY_FAMILIES[family].special_tokens]
    assert tokenizer("".join(tokens))["input_ids"] == list(range(len(tokens)))


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_every_number_of_images_has_a_forward_and_generates(model: Any, checkpoint: Path, sizes: list):
    inputs = model_inputs(make_prompt(checkpoint, noise(sizes)))
    tokens = model.generate(**inputs, max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert tokens.shape == (1, inputs["input_ids"].shape[1] + 4)
    if sizes:
        other = model_inputs(make_prompt(checkpoint, noise(sizes, seed=10)))
        assert torch.equal(inputs["input_ids"], other["input_ids"])
        with torch.no_grad():
            change = model(**inputs).logits - model(**other).logits
        assert change[0, -1].abs().max() > 1e-3


def test_images_of_different_sizes_have_different_numbers_of_tokens(family: str, model: Any, checkpoint: Path):
    counts = {num_image_tokens(model, make_prompt(checkpoint, noise([size]))) for size in [(32, 16), (40, 40)]}
    assert len(counts) == (1 if family in ONE_SIZE else 2)
    assert all(4 <= count <= 40 for count in counts)


def test_the_last_of_two_images_counts(model: Any, checkpoint: Path):
    """Each image reaches the model: changing the second alone changes the logits."""
    first, second = noise(SIZES["two"])
    other = noise_image(*second.size, seed=20)
    with torch.no_grad():
        logits = [model(**model_inputs(make_prompt(checkpoint, [first, x]))).logits[0, -1] for x in (second, other)]
    assert (logits[0] - logits[1]).abs().max() > 1e-3


def test_a_text_that_holds_the_placeholder_is_refused(model: Any, checkpoint: Path):
    token = AutoProcessor.from_pretrained(checkpoint).tokenizer.convert_ids_to_tokens(model.config.image_token_id)
    with pytest.raises(DataError, match="the text holds"):
        make_prompt(checkpoint, noise([(20, 20)]), text=f"What is {token}?")


def test_a_template_that_leaves_images_out_is_refused(checkpoint: Path):
    sample = make_prompt(checkpoint, noise([(20, 20)])).sample
    processor = AutoProcessor.from_pretrained(checkpoint)
    processor.chat_template = "{% for m in messages %}{{ m.content[-1].text }}{% endfor %}"
    with pytest.raises(DataError, match="Sample s: "):
        PromptBuilder(processor, DataConfig()).build(sample)
