"""Configs of well-known models that ship with the package, so that a run can be planned where no hub can be reached.

`model_configs/` has a folder per model with its `config.json`, and with the `preprocessor_config.json` that decides the
tokens of an image. Only the `config.json` of Qwen2.5-VL-7B is copied from a whole public copy of the checkpoint's own
file. The others are put together from partial public sources. All of them give the exact parameter counts that the hub
shows. The configs of Gemma 3 were checked by these counts alone.
"""

from importlib.resources import files
from pathlib import Path

MODEL_CONFIGS = Path(str(files("rl_vlm.plan"))) / "model_configs"

ORGANISATIONS = {"qwen": "Qwen", "gemma": "google"}
"""Owner on the hub, by the beginning of a model's name."""


def packaged_models() -> list[str]:
    """Return the hub names of the models whose configs ship with the package, in lower case."""
    return sorted(_hub_name(folder.name) for folder in MODEL_CONFIGS.iterdir() if folder.is_dir())


def packaged_config(model_name: str) -> Path | None:
    """Return the folder with the config of a hub name such as `Qwen/Qwen2.5-VL-7B-Instruct`, or None if there is none.

    Case is ignored.
    """
    name = model_name.strip().lower()
    return MODEL_CONFIGS / name.partition("/")[2] if name in packaged_models() else None


def _hub_name(folder: str) -> str:
    owner = next(owner for prefix, owner in ORGANISATIONS.items() if folder.startswith(prefix))
    return f"{owner.lower()}/{folder}"
