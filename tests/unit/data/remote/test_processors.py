"""Prompts for models whose code comes with the checkpoint, on literals."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from PIL import Image

from rl_vlm.config.schema import DataConfig, ModelConfig
from rl_vlm.data.prompts import PromptBuilder, load_processor
from rl_vlm.data.remote.internvl import Tiles
from rl_vlm.errors import ConfigError, DataError
from rl_vlm.types import Sample
from tests.helpers.remote_code.build import build_remote


@pytest.fixture(scope="module", params=["internvl_chat", "minicpmv"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def checkpoint(kind: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_remote(kind, tmp_path_factory.mktemp(kind) / kind)


def settings(checkpoint: Path) -> ModelConfig:
    return ModelConfig(model_name_or_path=str(checkpoint), trust_remote_code=True)


def builder_of(checkpoint: Path) -> PromptBuilder:
    return PromptBuilder(load_processor(str(checkpoint), settings(checkpoint), DataConfig()), DataConfig())


def sample_of(text: str, *images: Image.Image) -> Sample:
    content: list[dict[str, Any]] = [*({"type": "image"} for _ in images), {"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    return Sample("s", messages, list(images), {}, messages)


SQUARE, WIDE = Image.new("RGB", (16, 16), "red"), Image.new("RGB", (50, 16), "blue")
UNK = "<unk>" * 4
EXPECTED = {
    # four tokens per tile: 4 x 4 patches, halved in both directions; three tiles side by side and a thumbnail
    "internvl_chat": {
        "one": ("<img>" + "<IMG_CONTEXT>" * 4 + "</img>\n", (1, 3, 16, 16)),
        "two": ("".join(f"<img>{'<IMG_CONTEXT>' * n}</img>\n" for n in (4, 16)), (5, 3, 16, 16)),
    },
    "minicpmv": {
        "one": (f"<image>{UNK}</image>\n", (1, 3, 4, 64)),
        "two": (f"<image>{UNK}</image>\n<image>{UNK}</image>" + f"<slice>{UNK}</slice>" * 2 + "\n", (4, 3, 4, 64)),
    },
}


def test_prompts_hold_a_placeholder_per_feature(kind: str, checkpoint: Path) -> None:
    builder = builder_of(checkpoint)
    for name, images in (("one", [SQUARE]), ("two", [SQUARE, WIDE])):
        prompt = builder.build(sample_of("Which digit?", *images))
        text, shape = EXPECTED[kind][name]
        assert builder.processor.tokenizer.decode(prompt.token_ids) == (
            f"<|im_start|>user\n{text}Which digit?<|im_end|>\n<|im_start|>assistant\n"
        )
        assert prompt.mm_inputs["pixel_values"].shape == shape and not prompt.token_inputs
    without = builder.build(sample_of("Which digit?"))
    assert without.mm_inputs == {}


def test_slices_keep_their_sizes(tmp_path: Path) -> None:
    builder = builder_of(build_remote("minicpmv", tmp_path / "minicpmv"))
    found = builder.build(sample_of("?", WIDE)).mm_inputs
    assert found["tgt_sizes"].tolist() == [[4, 4], [4, 2], [4, 2]]
    assert not found["pixel_values"][1:, :, :, 32:].any()  # padding behind the shorter ones
    assert found["pixel_values"][1, 2, :, :32].unique().tolist() == [1.0]  # blue


def test_texts_with_placeholders_and_limits_of_pixels_are_refused(kind: str, checkpoint: Path) -> None:
    builder, token = builder_of(checkpoint), {"internvl_chat": "<IMG_CONTEXT>", "minicpmv": "<unk>"}[kind]
    with pytest.raises(DataError, match="which the model reads as a place for pixels"):
        builder.build(sample_of(f"What is {token}?", SQUARE))
    with pytest.raises(
        ConfigError, match=r"data.max_pixels has no effect on .*, whose code chooses the size of images"
    ):
        load_processor(str(checkpoint), settings(checkpoint), DataConfig(max_pixels=400))


def test_processors_are_written_and_read_again(checkpoint: Path, kind: str, tmp_path: Path) -> None:
    """In an adapter's directory too, which has no config of a model."""
    builder, sample = builder_of(checkpoint), sample_of("Which digit?", WIDE)
    builder.processor.save_pretrained(tmp_path)
    (tmp_path / "adapter_config.json").write_text(f'{{"base_model_name_or_path": "{checkpoint}"}}')
    assert builder_of(tmp_path).build(sample).token_ids.tolist() == builder.build(sample).token_ids.tolist()


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((448, 448), (1, 1)), ((896, 448), (2, 1)), ((300, 1000), (1, 3)), ((1344, 896), (3, 2)),
        ((2000, 2000), (2, 2)), ((400, 410), (1, 1)), ((4000, 400), (6, 1)),
    ],
)  # fmt: skip
def test_the_grid_of_tiles_has_the_ratio_of_the_image(size: tuple[int, int], expected: tuple[int, int]) -> None:
    config = SimpleNamespace(
        force_image_size=448, vision_config=SimpleNamespace(image_size=448, patch_size=14), min_dynamic_patch=1,
        max_dynamic_patch=6, use_thumbnail=True, downsample_ratio=0.5,
    )  # fmt: skip
    tiles = Tiles(config)
    assert tiles.tokens_per_tile == 256
    assert tiles.grid(*size) == expected
    num = expected[0] * expected[1]
    assert len(tiles(Image.new("RGB", size))) == num + (num > 1)
