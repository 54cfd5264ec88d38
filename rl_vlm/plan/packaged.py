"""Configs of well-known models that ship with the package, so that a run can be planned where no hub can be reached.

`model_configs/` has a folder per model with its `config.json`, and with the `preprocessor_config.json` that decides the
tokens of an image. Only the `config.json` of Qwen2.5-VL-7B is copied from a whole public copy of the checkpoint's own
file. The others are put together from partial public sources. All of them give the exact parameter counts that the hub
shows. The configs of Gemma 3 were checked by these counts alone.
"""

from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from threading import Thread

from rl_vlm.errors import ConfigError, ModelError
from rl_vlm.model.files import cached_snapshot

MODEL_CONFIGS = Path(str(files("rl_vlm.plan"))) / "model_configs"

ORGANISATIONS = {"qwen": "Qwen", "gemma": "google"}
"""Owner on the hub, by the beginning of a model's name."""

HUB_SECONDS = 2.0
"""Seconds within which the hub must answer."""


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


def config_source(name: str, revision: str) -> str:
    """Return a directory with the config of the model `name`, or the name itself if only the hub has it.

    A local directory comes first, then a packaged config, then the local cache of the hub. Raises ConfigError if the
    name can only be a path, or if the hub is needed and does not answer.
    """
    if Path(name).is_dir():
        return name
    try:
        found = packaged_config(name) or cached_snapshot(name, revision)
    except ModelError as error:
        raise ConfigError(not_found(name, "it is no name on the hub")) from error
    if found is None and not hub_answers():
        raise ConfigError(not_found(name, "the hub cannot be reached from here"))
    return name if found is None else str(found)


def hub_answers() -> bool:
    """Return whether the hub answers within `HUB_SECONDS`. The lookup of its address counts, too."""
    from huggingface_hub import constants
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    answers: list[object] = []

    def ask() -> None:
        with suppress(Exception):
            answers.append(get_session().head(constants.ENDPOINT, timeout=HUB_SECONDS))

    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(HUB_SECONDS)
    return bool(answers)


def not_found(name: str, reason: str) -> str:
    """Return the message about a model whose config is not found, with a solution."""
    return (
        f"model.model_name_or_path {name!r} is no directory with a config.json, and {reason}. Copy the checkpoint's "
        "config.json and preprocessor_config.json into a directory, and name it: a plan needs no weights. Models that "
        f"can be planned without one: {', '.join(packaged_models())}"
    )
