"""Reads the files of a checkpoint without torch and transformers."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path

from rl_vlm.config.adapters import ADAPTER_CONFIG, is_adapter, read_json
from rl_vlm.config.function_names import names_function
from rl_vlm.config.schema import ModelConfig
from rl_vlm.errors import ConfigError, ModelError, listed

logger = logging.getLogger(__name__)

ADAPTER_WEIGHTS = "adapter_model.safetensors"
TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
"""Keys of a config.json that hold the config of the language model."""
WEIGHTS = ("*.safetensors", "*.bin")
COMMIT = re.compile("[0-9a-f]{40}")

MODEL_TYPES = frozenset(
    """
    aya_vision cohere2_vision deepseek_vl ernie4_5_vl_moe exaone4_5 fast_vlm gemma3 gemma4 gemma4_unified glm46v glm4v
    glm4v_moe glm_ocr got_ocr2 granite4_vision hunyuan_vl idefics3 internvl kimi_k25 lfm2_vl llama4 llava llava_next
    llava_onevision minicpmv4_6 minicpmv4_7 minimax_m3_vl mistral3 mllama ovis2 paddleocr_vl paligemma perception_lm
    qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_omni_moe_thinker qwen3_vl qwen3_vl_moe qwen4_exp
    smolvlm step3p7 video_llama_3
    """.split()
)
"""The keys of `FAMILIES`, whose import needs torch. Other types are proven at the start of a run, or refused."""


def check_checkpoint(directory: Path) -> str | None:
    """Check the configs of a checkpoint. Returns the base model if it is a PEFT adapter, else None.

    Raises ModelError if there is no config, or if the model cannot see images.
    """
    if is_adapter(directory):
        return read_json(directory / ADAPTER_CONFIG).get("base_model_name_or_path")
    config = read_json(directory / "config.json")
    model_type = config.get("model_type")
    if model_type not in MODEL_TYPES and not any("vision" in key or key == "auto_map" for key in config):
        raise ModelError(
            f"{directory} has model_type {model_type!r}, which is not supported: config.json has no part for a vision "
            f"tower. Supported types: {listed(MODEL_TYPES)}, and others of transformers that see images"
        )
    return None


def has_row(directory: Path) -> bool:
    """Return whether the model type of a checkpoint has a row in the table of families."""
    return read_json(directory / "config.json").get("model_type") in MODEL_TYPES


def check_weights(directory: Path) -> None:
    """Raise ModelError if a directory holds no weights."""
    if not any(path for pattern in WEIGHTS for path in directory.glob(pattern)):
        raise ModelError(f"{directory} holds no weights ({' or '.join(WEIGHTS)})")


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
    is_checkpoint = Path(name).is_dir() and not is_adapter(name)  # its base has one
    if revision != "main" and (is_checkpoint or names_function(name)):
        raise ConfigError(
            f"model.model_revision {revision!r} has no effect on {name}, which is not on the hub; leave it out"
        )


def moving_code(model: ModelConfig) -> str | None:
    """Return a warning if a run trusts code of the hub that can change, or None."""
    if not model.trust_remote_code:
        return None
    source = Path(model.model_name_or_path)
    name = read_json(source / ADAPTER_CONFIG).get("base_model_name_or_path", "") if is_adapter(source) else str(source)
    if not isinstance(name, str) or names_function(name):  # loading says what is no name
        return None
    if others := code_elsewhere(name, model.model_revision):
        return (
            f"model.trust_remote_code runs the newest code of {listed(others)}, which the auto_map of {name} names and "
            "which can change. Read the code, copy its files to a local copy of the checkpoint, and name their classes "
            "in auto_map without a repository"
        )
    if Path(name).is_dir() or COMMIT.fullmatch(model.model_revision):
        return None
    return (
        f"model.trust_remote_code runs the code of {name} at the revision {model.model_revision!r}, which can change. "
        "Read the code, and set model.model_revision to the commit that you have read (40 hexadecimal digits)"
    )


def code_elsewhere(name: str, revision: str) -> set[str]:
    """Return other repositories whose code the `auto_map` of a checkpoint names (`owner/repository--file.Class`)."""
    try:
        directory = local_directory(name, revision)
    except ModelError:  # loading says why
        return set()
    if directory is None or not (directory / "config.json").is_file():
        return set()
    named = json.dumps(read_json(directory / "config.json").get("auto_map"))
    return set(re.findall(r'"([^"]+)--', named)) - {name}


def warn_of_moving_code(model: ModelConfig) -> None:
    """Log a warning if a run trusts code of the hub that can change."""
    if warning := moving_code(model):
        logger.warning("%s", warning)


def local_directory(name: str, revision: str) -> Path | None:
    """Return the directory of a checkpoint, given by its path or its hub name, or None if it is not on this machine.

    Raises ModelError if the name is neither a directory nor a hub name.
    """
    return Path(name) if Path(name).is_dir() else cached_snapshot(name, revision)


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
