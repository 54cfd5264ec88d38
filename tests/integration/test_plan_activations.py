"""Activations extrapolated in depth, against a trace of the whole model."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from rl_vlm.config.schema import RunConfig
from rl_vlm.plan.activations import trace_activations, trace_shallow
from rl_vlm.plan.depth import Depth, Extrapolation, with_depth
from rl_vlm.plan.groups import PromptSize
from tests.tiny.build import build_tiny

pytestmark = pytest.mark.ci

PROMPT = PromptSize(image_pixels=32 * 32, text_tokens=20)


def deep_config(family: str, directory: Path) -> Any:
    """A tiny model's config with 6 language and 5 vision layers, and a vocabulary that fills a chunk of the LM head."""
    config = AutoConfig.from_pretrained(build_tiny(family, directory))
    text = config.get_text_config()
    text.vocab_size = 200_000
    if family == "gemma3":
        text.layer_types = ["sliding_attention", "full_attention"] * 3
    return with_depth(config, Depth(language=6, vision=5))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("family", "period"), [("qwen2_5_vl", 1), ("qwen3_vl", 1), ("gemma3", 2)])
def test_extrapolated_and_whole(family: str, period: int, checkpointing: bool, tmp_path: Path):
    model_config = deep_config(family, tmp_path)
    depths = Extrapolation.of(model_config)
    assert depths.more_language.language - depths.shallow.language == period
    assert depths.more_language.language < depths.whole.language == 6
    config = RunConfig.model_validate(
        {
            "model": {"model_name_or_path": str(tmp_path)},
            "rollout": {"num_generations": 4, "max_completion_length": 32},
            "memory": {"gradient_checkpointing": checkpointing},
        }
    )
    extrapolated = asdict(trace_activations(config, model_config, PROMPT, on_gpu=False))
    whole = asdict(trace_shallow(config, model_config, PROMPT))
    assert whole["per_token"] > 0
    assert extrapolated == pytest.approx(whole, rel=0.01)
