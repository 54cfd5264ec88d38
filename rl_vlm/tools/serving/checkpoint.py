"""Find the checkpoint that `rl-vlm chat` serves, and the settings of its run, if there is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_vlm.checkpoint.store import MANIFEST, check_sizes
from rl_vlm.config.changes import flat_settings
from rl_vlm.config.engines import ENGINES
from rl_vlm.config.load import config_with, load_config
from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import ConfigError, ModelError
from rl_vlm.log.directory import CONFIG, checkpoint_of_run
from rl_vlm.model.files import ADAPTER_CONFIG, refuse_unread_revision, warn_of_moving_code

MODEL = "model.trust_remote_code model.dtype model.attn_implementation model.verify".split()
REVISION = ["model.model_revision"]
PROCESSOR = "data.min_pixels data.max_pixels data.max_image_pixels data.chat_template_kwargs".split()
GENERATION = "rollout.max_completion_length rollout.max_num_seqs memory.expandable_segments".split()
VLLM = """
    vllm.vllm_model_impl vllm.vllm_model_runner vllm.vllm_gpu_memory_utilization vllm.vllm_max_model_length
    vllm.vllm_enforce_eager
""".split()
SERVED = [*MODEL, *REVISION, *PROCESSOR, *GENERATION, *VLLM]
"""The settings that serving reads, by full name."""

UNREAD = {"rewards.reward_funcs": None, "rewards.reward_weights": None}
"""Settings to ignore in a run's config.yaml. They may refer to secrets, which the file does not contain."""


@dataclass(frozen=True)
class Served:
    """A checkpoint with the settings to serve it."""

    checkpoint: str
    config: RunConfig
    sources: dict[str, str]
    """Source of each setting of `SERVED`. Defaults have no entry."""


def find_served(name: str, engine: str, overrides: Sequence[str]) -> Served:
    """Find the checkpoint that `name` means, with the settings of its run and `overrides`.

    Raises CheckpointError if a run has no complete checkpoint, ModelError if a directory holds no model, and
    ConfigError if an override has no effect.
    """
    checkpoint, record = find_checkpoint(name)
    source = str(record or checkpoint)
    recorded = {} if record is None else recorded_settings(load_config(record, fixed=UNREAD), checkpoint, engine)
    given = recorded | {"model.model_name_or_path": checkpoint, "rollout.engine": engine}
    before, config = config_with(given, source, []), config_with(given, source, overrides)
    changed = [name for name, value in flat_settings(config).items() if value != flat_settings(before)[name]]
    if unread := [name for name in changed if name not in SERVED]:
        raise ConfigError(
            f"{', '.join(unread)}: no effect on `rl-vlm chat`, which reads {', '.join(SERVED)}; the engine is --engine"
        )
    refuse_unread_revision(config.model)
    warn_of_moving_code(config.model)
    sources = dict.fromkeys(set(SERVED) & recorded.keys(), source) | dict.fromkeys(changed, "the command line")
    return Served(checkpoint, config, sources)


def find_checkpoint(name: str) -> tuple[str, Path | None]:
    """Return the checkpoint that `name` means, and the config.yaml of its run, if it has one.

    `name` is a run's directory, a checkpoint of a run, a directory with a model or an adapter, or a name on the hub.
    For a run's directory, return the checkpoint in its summary, which is the best one with `load_best_model_at_end`. If
    there is no summary yet, return the newest.
    """
    path = Path(name)
    if not path.is_dir():
        return name, None
    if (path / MANIFEST).is_file() and (path.parent / CONFIG).is_file():
        check_sizes(path)
        return name, path.parent / CONFIG
    if (path / "config.json").is_file() or (path / ADAPTER_CONFIG).is_file():
        return name, None
    if not (path / CONFIG).is_file():
        raise ModelError(f"{name} holds no model (config.json), no adapter ({ADAPTER_CONFIG}) and no run ({CONFIG})")
    chosen = checkpoint_of_run(path)
    check_sizes(chosen)
    return str(chosen), path / CONFIG


def recorded_settings(run: RunConfig, checkpoint: str, engine: str) -> dict[str, Any]:
    """Return a run's model settings, and the settings of `SERVED` that the engine reads, by full name."""
    recorded = flat_settings(run)
    is_adapter = (Path(checkpoint) / ADAPTER_CONFIG).is_file()
    of_others = [name for name in VLLM if name.removeprefix("vllm.") not in ENGINES[engine].reads]
    unread = {"model.model_name_or_path", *([] if is_adapter else REVISION), *of_others}
    read = {name for name in recorded if name.startswith("model.")} | set(SERVED)
    return {name: value for name, value in recorded.items() if name in read - unread}
