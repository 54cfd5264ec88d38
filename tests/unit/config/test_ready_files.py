"""Image tokens and batches of the ready files, against arithmetic by hand with the published settings of the models."""

from pathlib import Path
from typing import Any

import pytest
import transformers
from PIL import Image
from transformers import AutoImageProcessor, AutoProcessor

from rl_vlm.config.batches import batch_sizes
from rl_vlm.config.load import load_config
from rl_vlm.config.schema import DataConfig, RunConfig
from rl_vlm.data.images import pixel_limits
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.plan.packaged import packaged_config
from rl_vlm.types import Sample
from tests.helpers.dry_runs import CONFIGS, ROOT, TINY, num_processes
from tests.tiny.build import TINY_FAMILIES, build_tiny

BATCHES = {
    # file: processes, prompts per step × G = completions, prompts on each process, prompts of a window
    "internvl3_2b": (1, 16, 8, 128, 16, 16),
    "minicpm_v_4_6_lora": (1, 8, 8, 64, 8, 8),
    "qwen2_5_vl_32b_full": (16, 64, 8, 512, 4, 64),
    "qwen2_5_vl_3b_lora": (1, 8, 8, 64, 8, 8),
    "qwen2_5_vl_3b_lora_grounding": (1, 8, 8, 64, 8, 8),
    "qwen2_5_vl_72b_full": (256, 256, 8, 2048, 1, 256),
    "qwen2_5_vl_72b_lora": (16, 64, 8, 512, 4, 64),
    "qwen2_5_vl_7b_full": (8, 128, 5, 640, 16, 512),  # EasyR1: global batch 128, rollout batch 512, n 5
    "qwen2_5_vl_7b_lora": (6, 6, 4, 24, 1, 6),  # 4 completions per device × 6 = 6 groups of 4
    "qwen2_5_vl_7b_qlora": (1, 8, 8, 64, 8, 8),
    "qwen3_vl_30b_a3b_lora": (8, 64, 8, 512, 8, 64),
    "qwen3_vl_4b_lora_counting": (1, 16, 8, 128, 16, 16),
}

QWEN2_5, QWEN3, INTERNVL, MINICPM = "qwen2_5_vl", "qwen3_vl", "internvl", "minicpmv4_6"
TOKENS = [
    # file, family, image, tokens
    # Qwen2.5-VL: one token per 28 × 28 pixels (patches of 14, merged 2 × 2), sides rounded to multiples of 28
    ("qwen2_5_vl_3b_lora_grounding", QWEN2_5, (640, 480), 23 * 17),  # 22.9 × 17.1, below 401,408 pixels
    # above them both sides are divided by sqrt(1280 · 960 / 401,408) = 1.750, to 731.6 × 548.7, and rounded down
    ("qwen2_5_vl_3b_lora_grounding", QWEN2_5, (1280, 960), 26 * 19),
    ("qwen2_5_vl_7b_lora", QWEN2_5, (1280, 960), 26 * 19),
    ("qwen2_5_vl_7b_full", QWEN2_5, (640, 480), 23 * 17),
    ("qwen2_5_vl_7b_full", QWEN2_5, (1280, 960), 42 * 31),  # ÷ sqrt(1280 · 960 / 1,048,576) = 1.083: 1182.4 × 886.8
    # below 262,144 pixels sides are multiplied by sqrt(262,144 / (320 · 240)) = 1.848, to 591.2 × 443.4, and rounded up
    ("qwen2_5_vl_7b_full", QWEN2_5, (320, 240), 22 * 16),
    # Qwen3-VL: one token per 32 × 32 pixels (patches of 16, merged 2 × 2)
    ("qwen3_vl_4b_lora_counting", QWEN3, (480, 320), 15 * 10),
    ("qwen3_vl_4b_lora_counting", QWEN3, (640, 480), 18 * 13),  # ÷ sqrt(640 · 480 / 262,144) = 1.083: 591.2 × 443.4
    ("qwen3_vl_4b_lora_counting", QWEN3, (1280, 960), 18 * 13),
    ("qwen3_vl_30b_a3b_lora", QWEN3, (640, 480), 20 * 15),
    ("qwen3_vl_30b_a3b_lora", QWEN3, (1280, 960), 26 * 19),  # ÷ sqrt(1280 · 960 / 524,288) = 1.531: 836.1 × 627.1
    # InternVL3: tiles of 448 × 448 pixels in the aspect ratio nearest to the image's, at most 12, and a thumbnail if
    # there are several; a tile has (448 / 14)² / 4 = 256 tokens
    ("internvl3_2b", INTERNVL, (448, 448), 256),
    ("internvl3_2b", INTERNVL, (640, 480), (4 * 3 + 1) * 256),
    ("internvl3_2b", INTERNVL, (1280, 960), (4 * 3 + 1) * 256),
    # MiniCPM-V 4.6: about 448² pixels, sides in multiples of 56; a token per 56 × 56 pixels. Larger images are cut into
    # ceil(pixels / 448²) slices, one more or one less, in the ratio nearest to the image's, beside the whole image
    ("minicpm_v_4_6_lora", MINICPM, (480, 320), 10 * 7),  # 153,600 < 448²: enlarged to 547 × 365
    ("minicpm_v_4_6_lora", MINICPM, (640, 480), 9 * 7 + 2 * (7 * 10)),  # 516 × 387; 2 × 1 slices of 320 × 480
    ("minicpm_v_4_6_lora", MINICPM, (1280, 960), 9 * 7 + 6 * (8 * 8)),  # 516 × 387; 3 × 2 slices of 427 × 480
]

PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    INTERNVL: ("GotOcr2ImageProcessor", {"size": {"height": 448, "width": 448}, "min_patches": 1, "max_patches": 12}),
    MINICPM: ("MiniCPMV4_6ImageProcessor", {"max_slice_nums": 9, "scale_resolution": 448, "patch_size": 14}),
}
"""Image processors of models whose files do not ship with the package."""


def ready(name: str) -> RunConfig:
    return load_config(ROOT / f"configs/{name}.yaml")


def test_every_ready_file_is_here():
    names = {path.stem for path in CONFIGS} - TINY
    assert names == BATCHES.keys()
    not_listed = {"qwen2_5_vl_3b_lora", "qwen2_5_vl_7b_qlora"} | {
        name for name in names if "32b" in name or "72b" in name
    }
    assert names - {name for name, *_ in TOKENS} == not_listed
    limits = {(ready(name).data.min_pixels, ready(name).data.max_pixels) for name in not_listed}
    assert limits == {(None, 401408)}  # as in qwen2_5_vl_7b_lora


@pytest.mark.parametrize("name", BATCHES)
def test_batches(name: str):
    processes, prompts, generations, completions, share, window = BATCHES[name]
    assert num_processes(ROOT / f"configs/{name}.yaml") == processes
    plan = batch_sizes(ready(name), processes)
    assert (plan.prompts_per_step, plan.num_generations, plan.completions_per_step) == (
        prompts,
        generations,
        completions,
    )
    assert (plan.prompts_per_rank_step, plan.prompts_per_window) == (share, window)
    assert plan.per_device_train_batch_size * plan.gradient_accumulation_steps * processes == completions


@pytest.mark.parametrize(("name", "family", "size", "tokens"), TOKENS)
def test_image_tokens(name: str, family: str, size: tuple[int, int], tokens: int, tmp_path: Path):
    if family not in TINY_FAMILIES:
        pytest.skip(f"the installed transformers has no {family}")
    config = ready(name)
    processor: Any = AutoProcessor.from_pretrained(build_tiny(family, tmp_path))
    processor.image_processor = image_processor(config, family)
    if family == INTERNVL:
        processor.image_seq_length = 256
    sample = Sample("s", [{"role": "user", "content": [{"type": "image"}]}], [Image.new("RGB", size)], {}, [])
    prompt = PromptBuilder(processor, DataConfig()).build(sample)
    assert int((prompt.token_ids == processor.image_token_id).sum()) == tokens
    assert config.data.max_prompt_length is not None
    assert tokens < config.data.max_prompt_length


def image_processor(config: RunConfig, family: str) -> Any:
    """The model's own image processor, with the pixel limits of the file."""
    if family in PUBLISHED:
        kind, settings = PUBLISHED[family]
        return getattr(transformers, kind)(**settings, **pixel_limits(config.data))
    folder = packaged_config(config.model.model_name_or_path)
    assert folder is not None
    return AutoImageProcessor.from_pretrained(folder, **pixel_limits(config.data))
