"""A tiny Qwen3.5, whose layers carry a state, for the digits task.

rl-vlm train configs/digits.yaml model_name_or_path=tests.helpers.digits_hybrid:starting_model
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from examples.digits.digits import teach_format
from rl_vlm.tiny.build import build_tiny
from tests.tiny.hybrid import HYBRID

FAMILY = HYBRID["qwen3_5"]


def config(tokenizer: Any, hidden_size: int) -> PreTrainedConfig:
    """Return a config whose heads have 64 values, the fewest that vLLM computes on CPUs."""
    built: Any = FAMILY.config(tokenizer, hidden_size)
    built.text_config.linear_key_head_dim = built.text_config.linear_value_head_dim = 64
    return built


def starting_model(directory: Path, seed: int) -> None:
    """Write a model that answers `<answer>d</answer>` with a random digit."""
    build_tiny(
        "qwen3_5", directory, families={"qwen3_5": replace(FAMILY, config=config)}, hidden_size=128,
        whole_tokens=("<answer>", "</answer>"), initializer_range=0.1, seed=seed,
    )  # fmt: skip
    teach_format(directory, seed)
