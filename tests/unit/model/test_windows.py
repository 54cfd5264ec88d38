"""Towers that compute images or windows in one row, against transformers' own split of the row."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

from rl_vlm.model.families import FAMILIES
from rl_vlm.model.windows import RowOrder, enable_batched_windows, row_order
from rl_vlm.types import Prompt, concatenate_images
from tests.helpers.builders import make_policy, make_prompt, noise_image
from tests.helpers.tiers import short_test_of_families
from tests.tiny.build import TINY_FAMILIES, build_tiny

WHOLE, BORDERS = (64, 64), (48, 40)
"""Widths and heights. Of Qwen2.5-VL's windows of 32 pixels, one has four whole ones, the other four unlike ones."""
UNLIKE = (WHOLE, BORDERS, WHOLE)

SPLIT_AND_BATCHED = {
    "qwen2_vl": (6, 4), "qwen2_5_vl": (15, 6), "qwen3_vl": (12, 8), "qwen3_vl_moe": (12, 8), "glm4v": (3, 2),
    "glm46v": (3, 2), "kimi_k25": (3, 2), "qwen3_5": (3, 2), "qwen3_5_moe": (3, 2), "minicpmv4_6": (250, 5),
    "minicpmv4_7": (250, 5), "glm4v_moe": (3, 2), "glm_ocr": (3, 2), "exaone4_5": (15, 6), "video_llama_3": (3, 2),
    "paddleocr_vl": (3, 2), "hunyuan_vl": (3, 2), "qwen2_5_omni_thinker": (15, 6), "qwen3_omni_moe_thinker": (9, 6),
    "ernie4_5_vl_moe": (3, 2), "qwen4_exp": (3, 2),
}  # fmt: skip
"""Calls of SDPA for three images of two sizes in the tiny towers of 1, 2 or 4 layers: transformers' and ours."""

DEEP = [
    ([WHOLE], (26, 29), (8, 7)),
    ([BORDERS], (26, 29), (26, 8)),
    (UNLIKE, (78, 31), (28, 11)),
]
"""Images; calls of SDPA and reads of values by the host, in a tower of three layers with windows and one without, all
of them computed twice. For example 78 = 2 x (3 layers x 12 windows + 3 images), 28 = 2 x (3 x 4 lengths + 2 sizes), and
31 = 2 x 4 layers x 3 + 7 that transformers reads before the layers. We read two maxima and the lengths of two rows."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts the calls of SDPA, and the reads of tensors by the host, also those of recomputed layers."""
    count: Counter[str] = Counter()

    def watch(owner: Any, name: str, kind: str) -> None:
        function = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            count[kind] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    watch(nn.functional, "scaled_dot_product_attention", "sdpa")
    watch(Tensor, "tolist", "reads")
    watch(Tensor, "item", "reads")
    return count


class Tower:
    """A tiny model whose tower is transformers' own until `batch` is called."""

    def __init__(self, family: str, directory: Path, depth: int | None = None) -> None:
        self.checkpoint, self.family = build_tiny(family, directory), FAMILIES[family]
        self.model: Any = AutoModelForImageTextToText.from_pretrained(self.checkpoint, dtype=torch.float32)
        if depth is not None:
            self.model.config.vision_config.depth = depth
            self.model = AutoModelForImageTextToText.from_config(self.model.config)

    def batch(self) -> None:
        enable_batched_windows(self.model, self.family)

    def prompt(self, sizes: Sequence[tuple[int, int]]) -> Prompt:
        return make_prompt(self.checkpoint, [noise_image(*size, seed=i) for i, size in enumerate(sizes)])

    def run(self, prompt: Prompt) -> tuple[Tensor, dict[str, Tensor]]:
        """Return features, and gradients of a weighted sum of them."""
        self.model.zero_grad()
        inputs = concatenate_images([prompt], torch.device("cpu"))
        features = torch.cat(list(self.model.base_model.get_image_features(**inputs, return_dict=True).pooler_output))
        (features * torch.linspace(-1, 1, features.numel()).view_as(features)).sum().backward()
        gradients = {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}
        return features.detach(), gradients


def compare(
    tower: Tower, images: Sequence[tuple[int, int]], calls: Counter[str]
) -> tuple[tuple[int, int], tuple[int, int]]:
    """Compare transformers' way with batches. Return the calls of SDPA and the reads of each."""
    prompt = tower.prompt(images)
    calls.clear()
    features, gradients = tower.run(prompt)
    split = calls["sdpa"], calls["reads"]
    tower.batch()
    calls.clear()
    ours, our_gradients = tower.run(prompt)
    assert len(gradients) > 10
    torch.testing.assert_close(ours, features, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(our_gradients, gradients, rtol=1e-6, atol=1e-6)
    return split, (calls["sdpa"], calls["reads"])


@pytest.mark.parametrize("family", short_test_of_families(SPLIT_AND_BATCHED.keys() & TINY_FAMILIES))
def test_every_tower_of_this_kind_is_computed_in_batches(family: str, tmp_path: Path, calls: Counter[str]) -> None:
    (split, _), (batched, _) = compare(Tower(family, tmp_path), UNLIKE, calls)
    assert (split, batched) == SPLIT_AND_BATCHED[family]


@pytest.mark.parametrize(("images", "split", "batched"), DEEP)
def test_lengths_are_read_once_for_all_layers(images, split, batched, tmp_path: Path, calls: Counter[str]) -> None:
    tower = Tower("qwen2_5_vl", tmp_path, depth=4)
    tower.model.train().gradient_checkpointing_enable({"use_reentrant": False})
    assert compare(tower, images, calls) == (split, batched)


def test_a_row_is_sorted_by_the_length_of_its_sequences() -> None:
    order = RowOrder.build([2, 1, 0, 2])
    assert order.groups == ((1, 1), (2, 2))
    assert order.sorted_index is not None
    assert order.row_index is not None
    assert order.sorted_index.tolist() == [2, 0, 1, 3, 4]
    assert order.row_index.tolist() == [1, 2, 0, 3, 4]
    assert RowOrder.build([1, 2, 2]) == RowOrder(((1, 1), (2, 2)))


def test_equal_lengths_are_known_without_reading_them() -> None:
    assert row_order(torch.empty(4, dtype=torch.int32, device="meta"), longest=8, num_patches=24) == RowOrder(((3, 8),))


@pytest.mark.parametrize(
    ("family", "attention", "expected"),
    [
        ("qwen2_5_vl", "sdpa", "sdpa_in_flash_layout"),
        ("qwen2_5_vl", "eager", "eager"),
        ("internvl", "sdpa", "sdpa"),  # a batch of tiles
    ],
)
def test_a_policy_has_it_with_sdpa(family: str, attention: str, expected: str, tmp_path: Path) -> None:
    policy = make_policy(build_tiny(family, tmp_path), attn_implementation=attention)
    assert policy.transformer.config.vision_config._attn_implementation == expected
