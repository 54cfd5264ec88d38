"""Activations extrapolated in depth, against a trace of the whole model."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from rl_vlm.config.schema import RunConfig
from rl_vlm.plan.activations import trace_activations, trace_shallow
from rl_vlm.plan.depth import Depth, Extrapolation, with_depth
from rl_vlm.plan.groups import PromptSize, make_prompt
from tests.tiny.build import build_tiny

pytestmark = pytest.mark.ci

WHOLE = Depth(language=6, vision=5)


def deep_config(family: str, directory: Path) -> Any:
    """A tiny model's config with more layers, and a vocabulary that fills a chunk of the LM head."""
    config = AutoConfig.from_pretrained(build_tiny(family, directory))
    config.get_text_config().vocab_size = 200_000
    return with_depth(config, WHOLE)


@pytest.mark.parametrize(
    ("family", "period", "checkpointing"), [("qwen2_5_vl", 1, True), ("qwen3_vl", 1, False), ("gemma3", 2, False)]
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
    extrapolated = asdict(trace_activations(config, model_config, prompt, on_gpu=False))
    whole = asdict(trace_shallow(config, model_config, prompt))
    assert whole["per_token"] > 0
    assert extrapolated == pytest.approx(whole, rel=0.01)
