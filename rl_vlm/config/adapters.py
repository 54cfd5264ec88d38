"""Read the files of a PEFT adapter, without torch and transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from rl_vlm.errors import ModelError

T = TypeVar("T")

ADAPTER_CONFIG = "adapter_config.json"


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object. Raises ModelError if the file is missing or holds anything else."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelError(f"{path} holds no JSON object")
    return content


def is_adapter(source: str | Path) -> bool:
    """Return whether a checkpoint directory holds a PEFT adapter."""
    return (Path(source) / ADAPTER_CONFIG).is_file()


def base_of(source: str) -> str:
    """Return the base model that a PEFT adapter names, or `source` itself if it is not an adapter."""
    if not is_adapter(source):
        return source
    return adapter_setting(source, "base_model_name_or_path", str)


def adapter_rank(source: str) -> int | None:
    """Return the rank of a PEFT adapter, or None if the checkpoint is not an adapter."""
    return adapter_setting(source, "r", int) if is_adapter(source) else None


def adapter_setting(source: str, name: str, kind: type[T]) -> T:
    """Return a setting of a PEFT adapter. Raises ModelError if its config has no such setting of this type."""
    path = Path(source) / ADAPTER_CONFIG
    value = read_json(path).get(name)
    if not isinstance(value, kind):
        raise ModelError(f"{path} has the {name} {value!r}: write the adapter again with save_pretrained")
    return value
