"""Tiny models: what comes out of `build_tiny` is a whole checkpoint, whose images count and whose masks show."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from rl_vlm.config.schema import DataConfig
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.errors import DataError
from rl_vlm.types import Prompt
from tests.helpers.builders import make_prompt, noise_image
from tests.helpers.family_parity import NEED_AN_IMAGE
from tests.helpers.stock import generation_inputs, model_inputs
from tests.helpers.tiers import families_in_tiers
from tests.tiny.build import TINY_FAMILIES, build_tiny

SIZES = {"one": [(32, 24)], "two": [(40, 20), (24, 64)]}
ONE_SIZE = {
    "llava", "gemma3", "paligemma", "paligemma2", "cohere2_vision", "deepseek_vl", "got_ocr2", "mllama", "fast_vlm",
}  # fmt: skip
"""Families whose images all become the same number of tokens."""
FEW_OR_MANY_TOKENS = {
    "gemma4": (55, 64),
    "gemma4_bidirectional": (55, 64),
    "gemma4_moe": (55, 64),
    "gemma4_unified": (55, 64),
    "got_ocr2": (256, 256),
    "granite4_vision": (52, 88),
    "minicpmv4_6": (3, 10),
    "minicpmv4_7": (3, 10),
    "mllama": (1, 1),
    "step3p7": (24, 52),
}
"""Bounds for an image where they are not 4 and 40."""
SLIDING_AND_FULL = {"sliding_attention", "full_attention"}
LAYER_TYPES = {
    "gemma3": SLIDING_AND_FULL,
    "gemma4": SLIDING_AND_FULL,
    "gemma4_bidirectional": SLIDING_AND_FULL,
    "gemma4_moe": SLIDING_AND_FULL,
    "paligemma2": SLIDING_AND_FULL,
    "aya_vision": SLIDING_AND_FULL,
    "cohere2_vision": SLIDING_AND_FULL,
    "exaone4_5": SLIDING_AND_FULL,
    "gemma4_unified": SLIDING_AND_FULL,
    "step3p7": SLIDING_AND_FULL,
    "llama4": {"chunked_attention", "full_attention"},
    "minimax_m3_vl": {"minimax_m3_sparse", "full_attention"},
    "qwen4_exp": {"linear_attention", "indexed_attention"},
    "qwen3_5": {"linear_attention", "full_attention"},
    "qwen3_5_moe": {"linear_attention", "full_attention"},
    "minicpmv4_6": {"linear_attention", "full_attention"},
    "minicpmv4_7": {"linear_attention", "full_attention"},
    "lfm2_vl": {"conv", "full_attention"},
}
"""Where full attention is not the only one."""


@pytest.fixture(scope="module", params=families_in_tiers(TINY_FAMILIES))
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


@torch.no_grad()
def logits(model: Any, prompt: Prompt) -> Tensor:
    return model(**model_inputs(prompt)).logits[0]


def assert_generates(model: Any, prompt: Prompt) -> None:
    tokens = model.generate(**generation_inputs(model, prompt), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert tokens.shape == (1, len(prompt.token_ids) + 4)


def test_a_checkpoint_is_small_and_survives_another_save(model: Any, checkpoint: Path, tmp_path: Path):
    assert model.num_parameters() < 1_000_000
    model.save_pretrained(tmp_path)
    AutoProcessor.from_pretrained(checkpoint).save_pretrained(tmp_path)
    again = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    images = noise(SIZES["one"])
    expected, found = (logits(m, make_prompt(p, images)) for m, p in ((model, checkpoint), (again, tmp_path)))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("add_special_tokens", [True, False])
def test_special_tokens_stay_whole_after_loading(family: str, checkpoint: Path, add_special_tokens: bool):
    tokenizer = AutoProcessor.from_pretrained(checkpoint).tokenizer
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *TINY_FAMILIES[family].special_tokens]
    ids = tokenizer("".join(tokens), add_special_tokens=add_special_tokens)["input_ids"]
    assert ids == list(range(len(tokens)))


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
    assert (logits(model, prompt)[-1] - logits(model, other)[-1]).abs().max() > 1e-3
    assert_generates(model, prompt)


def test_images_of_different_sizes_have_different_numbers_of_tokens(family: str, model: Any, checkpoint: Path):
    prompts = [make_prompt(checkpoint, noise([size])) for size in [(32, 16), (40, 40)]]
    counts = {int((prompt.token_ids == model.config.image_token_id).sum()) for prompt in prompts}
    assert len(counts) == (1 if family in ONE_SIZE else 2)
    low, high = FEW_OR_MANY_TOKENS.get(family, (4, 40))
    assert all(low <= count <= high for count in counts)


def test_the_last_of_two_images_counts(model: Any, checkpoint: Path):
    """Each image reaches the model: changing the second alone changes the logits."""
    first, second = noise(SIZES["two"])
    prompts = [make_prompt(checkpoint, [first, x]) for x in (second, noise_image(*second.size, seed=20))]
    ours, others = (logits(model, prompt)[-1] for prompt in prompts)
    assert (ours - others).abs().max() > 1e-3


def test_text_alone_is_a_prompt_or_is_refused(family: str, model: Any, checkpoint: Path):
    if family in NEED_AN_IMAGE:
        with pytest.raises(DataError, match="processor refuses it"):
            make_prompt(checkpoint, [])
    else:
        assert_generates(model, make_prompt(checkpoint, []))


def test_a_text_that_holds_the_placeholder_is_refused(model: Any, checkpoint: Path):
    token = AutoProcessor.from_pretrained(checkpoint).tokenizer.convert_ids_to_tokens(model.config.image_token_id)
    with pytest.raises(DataError, match="the text holds"):
        make_prompt(checkpoint, noise(SIZES["one"]), text=f"What is {token}?")


def test_a_template_that_leaves_images_out_is_refused(checkpoint: Path):
    sample = make_prompt(checkpoint, noise(SIZES["one"])).sample
    processor = AutoProcessor.from_pretrained(checkpoint)
    if not processor.chat_template:
        pytest.skip("it has no template")
    processor.chat_template = "{% for m in messages %}{{ m.content[-1].text }}{% endfor %}"
    with pytest.raises(DataError, match="Sample s: "):
        PromptBuilder(processor, DataConfig()).build(sample)


def test_a_prompt_keeps_no_labels(checkpoint: Path):
    prompt = make_prompt(checkpoint, noise(SIZES["one"]))
    assert "labels" not in prompt.token_inputs | prompt.mm_inputs
