import json
import socket
import time

import huggingface_hub.constants
import pytest
import torch
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText

from rl_vlm.errors import ConfigError
from rl_vlm.plan import packaged
from rl_vlm.plan.packaged import config_source, packaged_config, packaged_models

PARAMETERS = {
    "Qwen/Qwen2.5-VL-3B-Instruct": 3_754_622_976,
    "Qwen/Qwen2.5-VL-7B-Instruct": 8_292_166_656,
    "Qwen/Qwen2.5-VL-32B-Instruct": 33_452_718_336,
    "Qwen/Qwen2.5-VL-72B-Instruct": 73_410_777_344,
    "Qwen/Qwen3-VL-2B-Instruct": 2_127_532_032,
    "Qwen/Qwen3-VL-4B-Instruct": 4_437_815_808,
    "Qwen/Qwen3-VL-8B-Instruct": 8_767_123_696,
    "Qwen/Qwen3-VL-32B-Instruct": 33_357_390_064,
    "Qwen/Qwen3-VL-30B-A3B-Instruct": 31_070_754_032,
    "google/gemma-3-4b-it": 4_300_079_472,
    "google/gemma-3-12b-it": 12_187_325_040,
    "google/gemma-3-27b-it": 27_432_406_640,
}
"""Parameters of each checkpoint as the hub counts them."""


def test_every_packaged_model_is_checked():
    assert packaged_models() == sorted(name.lower() for name in PARAMETERS)


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_a_packaged_config_has_the_parameters_of_the_checkpoint(name, count):
    folder = packaged_config(name)
    assert folder is not None
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(AutoConfig.from_pretrained(folder))
    assert sum(parameter.numel() for parameter in model.parameters()) == count


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", 391),  # 644 x 476 pixels: 23 x 17 tokens of 28 x 28
        ("Qwen/Qwen3-VL-8B-Instruct", 300),  # 640 x 480 pixels: 20 x 15 tokens of 32 x 32
    ],
)
def test_the_tokens_of_an_image_of_640_by_480(name, tokens):
    processor = AutoImageProcessor.from_pretrained(packaged_config(name))
    assert processor.get_number_of_image_patches(480, 640, {}) == 4 * tokens


def test_an_image_of_gemma_has_256_tokens():
    folder = packaged_config("google/gemma-3-4b-it")
    assert folder is not None
    assert json.loads((folder / "preprocessor_config.json").read_text())["image_seq_length"] == 256
    assert AutoImageProcessor.from_pretrained(folder).size == {"height": 896, "width": 896}


def test_names_are_hub_names_in_any_case():
    assert packaged_config("qwen/qwen2.5-vl-7b-instruct") == packaged_config("Qwen/Qwen2.5-VL-7B-Instruct")
    for other in (
        "Qwen2.5-VL-7B-Instruct",
        "Qwen/Qwen2.5-VL-9B",
        "me/qwen2.5-vl-7b-instruct",
        "runs/x/checkpoint-20",
        "",
    ):
        assert packaged_config(other) is None


def test_a_model_that_only_a_silent_hub_has_is_given_up_soon(monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections and never answers
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
        began = time.perf_counter()
        with pytest.raises(
            ConfigError, match=r"hub cannot be reached from here. Copy the checkpoint's config.json and"
        ):
            config_source("someone/unknown-model", "main")
        assert time.perf_counter() - began < 3


def test_a_model_that_the_hub_may_have_is_looked_up_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packaged, "hub_answers", lambda: True)
    assert config_source("someone/unknown-model", "main") == "someone/unknown-model"
