"""Activations extrapolated in depth, against a trace of the whole model."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from rl_vlm.config.schema import RunConfig
from rl_vlm.plan.tracing.activations import trace_activations, trace_shallow
from rl_vlm.plan.tracing.depth import Depth, Extrapolation, with_depth
from rl_vlm.plan.tracing.groups import PromptSize, make_prompt
from tests.tiny.build import build_tiny

WHOLE = Depth(language=6, vision=5)


def deep_config(family: str, directory: Path) -> Any:
    """A tiny model's config with more layers, and a vocabulary that fills a chunk of the LM head."""
    config = AutoConfig.from_pretrained(build_tiny(family, directory))
    config.get_text_config().vocab_size = 200_000
    return with_depth(config, WHOLE)


@pytest.mark.parametrize(
    ("family", "period", "checkpointing"),
    [
        ("qwen2_5_vl", 1, True),
        pytest.param("qwen3_vl", 1, False, marks=pytest.mark.slow),
        pytest.param("gemma3", 2, False, marks=pytest.mark.slow),
    ],
)
def test_extrapolated_activations_are_those_of_the_whole_model(
    family: str, period: int, checkpointing: bool, tmp_path: Path
):
    model_config = deep_config(family, tmp_path)
    depths = Extrapolation.of(model_config)
    assert depths.whole == WHOLE
    assert depths.more_language.language - depths.shallow.language == period
    config = RunConfig.model_validate(
        {
            "model": {"model_name_or_path": str(tmp_path)},
            "rollout": {"num_generations": 4, "max_completion_length": 32},
            "memory": {"gradient_checkpointing": checkpointing},
        }
    )
    prompt = make_prompt(model_config, PromptSize(image_pixels=32 * 32, text_tokens=20))
    extrapolated = trace_activations(config, model_config, prompt, on_gpu=False)
    whole = trace_shallow(config, model_config, prompt)
    assert whole.per_token > 0
    kept_by_layers = {"layers_per_token": 0.0, "layers_per_patch": 0.0}  # which one trace does not tell
    assert asdict(extrapolated) | kept_by_layers == pytest.approx(asdict(whole), rel=0.01)
    one = trace_shallow(config, with_depth(model_config, Depth(1, 1)), prompt)
    assert extrapolated.layers_per_token == pytest.approx(whole.per_token - one.per_token, rel=0.01)


@pytest.mark.parametrize("checkpointing", [pytest.param(True, marks=pytest.mark.slow), False])
def test_a_patch_has_the_same_price_in_small_and_large_images(checkpointing: bool, tmp_path: Path):
    """Copies of a trained tower's weights in bfloat16 are held once, whatever the images."""
    model_config = with_depth(AutoConfig.from_pretrained(build_tiny("qwen2_5_vl", tmp_path)), Depth(2, 2))
    config = RunConfig.model_validate(
        {
            "model": {"model_name_or_path": str(tmp_path), "dtype": "bfloat16"},
            "rollout": {"num_generations": 4, "max_completion_length": 32},
            "memory": {"gradient_checkpointing": checkpointing},
        }
    )
    prompts = [make_prompt(model_config, PromptSize(side**2, text_tokens=20)) for side in (56, 224)]
    small, large = (trace_shallow(config, model_config, prompt) for prompt in prompts)
    assert small.per_patch == pytest.approx(large.per_patch, rel=0.01)
    assert small.vision_per_patch == pytest.approx(large.vision_per_patch, rel=0.05)
