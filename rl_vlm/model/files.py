"""Reads the files of a checkpoint without torch and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rl_vlm.config.function_names import names_function
from rl_vlm.config.schema import ModelConfig
from rl_vlm.errors import ConfigError, ModelError, listed

ADAPTER_CONFIG = "adapter_config.json"
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Keys of a config.json that hold the config of the language model."""
WEIGHTS = ("*.safetensors", "*.bin")

MODEL_TYPES = frozenset(
    """
    aya_vision cohere2_vision deepseek_vl gemma3 gemma4 glm46v glm4v got_ocr2 idefics3 internvl kimi_k25 lfm2_vl llava
    llava_next llava_onevision minicpmv4_6 minicpmv4_7 mistral3 mllama ovis2 paligemma perception_lm qwen2_5_vl
    qwen2_vl qwen3_5 qwen3_5_moe qwen3_vl qwen3_vl_moe smolvlm
    """.split()
)
"""The keys of `FAMILIES`, whose import needs torch."""


def check_checkpoint(directory: Path) -> str | None:
    """Check the configs of a checkpoint. Returns the base model if it is a PEFT adapter, else None.

    Raises ModelError if there is no config, or if the family is not supported.
    """
    if (directory / ADAPTER_CONFIG).is_file():
        return read_json(directory / ADAPTER_CONFIG).get("base_model_name_or_path")
    model_type = read_json(directory / "config.json").get("model_type")
    if model_type not in MODEL_TYPES:
        raise ModelError(
            f"{directory} has model_type {model_type!r}, which is not supported; supported: {listed(MODEL_TYPES)}"
        )
    return None


def check_weights(directory: Path) -> None:
    """Raise ModelError if a directory holds no weights."""
    if not any(path for pattern in WEIGHTS for path in directory.glob(pattern)):
        raise ModelError(f"{directory} holds no weights ({' or '.join(WEIGHTS)})")


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ModelError if the file is missing or holds anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object")
    return content


def context_of(directory: Path) -> int | None:
    """Return the most tokens of a prompt and its completion by the checkpoint's config.json, or None if it has none."""
    config = read_json(directory / "config.json")
    text = next((config[key] for key in TEXT_CONFIGS if isinstance(config.get(key), dict)), config)
    found = text.get("max_position_embeddings")
    return found if isinstance(found, int) else None


def refuse_long_completions(length: int, context: int | None) -> None:
    """Raise ConfigError if completions of this length leave no room for a prompt."""
    if context is not None and length >= context:
        raise ConfigError(
            f"rollout.max_completion_length {length} leaves no room for a prompt: the model takes {context} tokens of "
            "prompt and completion together (max_position_embeddings in its config). Set it lower"
        )


def refuse_unread_revision(model: ModelConfig) -> None:
    """Raise ConfigError if `model_revision` is set for a model that is not on the hub."""
    name, revision = model.model_name_or_path, model.model_revision
    is_checkpoint = Path(name).is_dir() and not (Path(name) / ADAPTER_CONFIG).is_file()  # its base has one
    if revision != "main" and (is_checkpoint or names_function(name)):
        raise ConfigError(
            f"model.model_revision {revision!r} has no effect on {name}, which is not on the hub; leave it out"
        )


def cached_snapshot(name: str, revision: str) -> Path | None:
    """Return the directory of a hub name in the local cache, or None if it is not there.

    Raises ModelError if the name can only be a path, or is no valid hub name.
    """
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelError(f"model.model_name_or_path {name} does not exist; name a checkpoint, a function or a hub name")
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = [try_to_load_from_cache(name, file, revision=revision) for file in ("config.json", ADAPTER_CONFIG)]
    except HFValidationError as error:
        raise ModelError(f"model.model_name_or_path {name} is neither a directory nor a hub name: {error}") from error
    return next((Path(path).parent for path in found if isinstance(path, str)), None)
