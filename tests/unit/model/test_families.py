"""Which families the installed transformers has, and which take videos."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from rl_vlm.errors import ConfigError, ModelError
from rl_vlm.model import family
from rl_vlm.model.families import FAMILIES, family_of, video_format
from rl_vlm.types import Prompt, Sample


def config(model_type: str) -> Any:
    return SimpleNamespace(model_type=model_type)


@pytest.mark.parametrize("model_type", ["mllama", "minicpmv4_6", "minicpmv4_7"])
def test_a_family_that_this_version_of_transformers_gets_wrong_is_refused(
    model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(family, "version", lambda package: "5.18.2")
    with pytest.raises(ModelError, match=f"{model_type} needs transformers 5.19, found 5.18.2"):
        family_of(config(model_type))
    assert family_of(config("qwen2_5_vl")).is_available
    monkeypatch.setattr(family, "version", lambda package: "5.19.0")
    assert family_of(config(model_type)).is_available


def test_a_model_gets_videos_by_its_own_input_or_as_images() -> None:
    native = {
        "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v", "glm4v_moe", "glm46v",
        "internvl", "minicpmv4_6", "minicpmv4_7", "gemma4", "gemma4_unified", "perception_lm", "llava_onevision",
        "kimi_k25", "smolvlm", "exaone4_5", "glm_ocr", "qwen4_exp",
    }  # fmt: skip
    types = [*FAMILIES, "a_type_without_a_row"]
    assert {name for name in types if video_format(config(name)) == "native"} == native
    assert {name for name in types if video_format(config(name), "frames") == "native"} == set()
    assert video_format(config("glm46v"), "native") == "native"


def test_a_model_whose_older_versions_take_no_videos_gets_them_as_images(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, expected in (("5.17.0", "frames"), ("5.18.0", "native")):
        monkeypatch.setattr(family, "version", lambda package, found=version: found)
        assert video_format(config("llava_onevision")) == expected
        assert family_of(config("llava_onevision")).is_available


@pytest.mark.parametrize("model_type", ["llava", "a_type_without_a_row"])
def test_a_native_format_that_a_model_lacks_is_refused(model_type: str) -> None:
    message = rf"data.video_format: native .* {model_type} is used without one. Use auto or frames, .*qwen2_5_vl"
    with pytest.raises(ConfigError, match=message):
        video_format(config(model_type), "native")


@pytest.mark.parametrize(("model_type", "image", "video", "both"), [
    ("qwen2_5_vl", True, True, True), ("glm4v", True, True, False), ("gemma4", True, False, False),
    ("kimi_k25", True, False, False),
])  # fmt: skip
def test_the_own_forward_of_some_models_takes_no_such_videos(
    model_type: str, image: bool, video: bool, both: bool
) -> None:
    pixels, frames = {"pixel_values": torch.zeros(1)}, {"pixel_values_videos": torch.zeros(1)}
    inputs = (pixels, frames, pixels | frames)
    prompts = [Prompt(Sample("s", [], [], {}, ""), torch.zeros(1).long(), {}, each) for each in inputs]
    assert [FAMILIES[model_type].own_forward_takes(prompt) for prompt in prompts] == [image, video, both]


@pytest.mark.parametrize(
    ("model_type", "placeholders"),
    [
        ("qwen2_vl", [151655, 151656]), ("qwen2_5_vl", [151655, 151656]), ("qwen3_vl", [151655, 151656]),
        ("qwen3_5", [248056, 248057]), ("glm4v", [151343, 151344]), ("glm4v_moe", [151363, 151364]),
    ],
)  # fmt: skip
def test_placeholders_of_images_and_of_videos_are_never_sampled(model_type: str, placeholders: list[int]) -> None:
    """Those of published checkpoints."""
    config: Any = AutoConfig.for_model(model_type)
    assert (config.image_token_id, config.video_token_id) == tuple(placeholders)
    assert FAMILIES[model_type].banned_token_ids(config) == placeholders


def test_a_placeholder_without_a_logit_is_not_banned() -> None:
    """Kimi's token of videos is the first one after the published vocabulary."""
    config: Any = AutoConfig.for_model("kimi_k25", text_config={"vocab_size": 163840})
    assert config.video_token_id == 163840
    assert FAMILIES["kimi_k25"].banned_token_ids(config) == [config.image_token_id]
    assert FAMILIES["mllama"].banned_token_ids(AutoConfig.for_model("mllama")) == []
