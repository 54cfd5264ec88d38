"""Find the checkpoint to export, and read its run."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl_vlm.checkpoint import store
from rl_vlm.config.data_names import is_file
from rl_vlm.config.function_names import names_function
from rl_vlm.config.schema import ModelConfig
from rl_vlm.errors import CheckpointError, ConfigError
from rl_vlm.log.directory import checkpoint_of_run
from rl_vlm.log.files import METRICS
from rl_vlm.model.files import ADAPTER_CONFIG, read_json
from rl_vlm.tools.report.read import RunResults, read_run

STATE = "trainer_state.json"


@dataclass(frozen=True)
class Source:
    """A checkpoint and its run."""

    checkpoint: Path
    state: dict[str, Any]
    """Content of `trainer_state.json`."""
    run: RunResults | None
    """The run up to the checkpoint, or None if the checkpoint is not in its run's directory."""

    @property
    def step(self) -> int:
        return self.state["progress"]["global_step"]

    @property
    def max_steps(self) -> int:
        return self.state["progress"]["max_steps"]

    @property
    def is_adapter(self) -> bool:
        return (self.checkpoint / ADAPTER_CONFIG).is_file()

    @property
    def base(self) -> str:
        """Return the adapter's base model, or the model that the run started from.

        If it exists here, return its absolute path. A relative path is looked up from the present folder and from the
        folder that the run was started in. Its last part is looked up in the folder of the checkpoint, since
        `initial_model` moves with its run.
        """
        name = self.setting("model.model_name_or_path")
        if self.is_adapter:
            name = read_json(self.checkpoint / ADAPTER_CONFIG)["base_model_name_or_path"]
        places = [*(folder / name for folder in self.folders), self.checkpoint.absolute().parent / Path(name).name]
        return next((str(place.absolute()) for place in places if place.is_dir()), name)

    @property
    def folders(self) -> list[Path]:
        """Return the folders from which relative paths of the settings may start: the present one and the run's."""
        starts = self.run.starts if self.run else []
        return [Path(), *(Path(start["folder"]) for start in starts[-1:])]

    @property
    def model(self) -> ModelConfig:
        """Return the section `model` of the settings. Settings that this version does not know are ignored."""
        settings = self.state["settings"]
        known = {name: f"model.{name}" for name in ModelConfig.model_fields}
        return ModelConfig.model_validate({leaf: settings[name] for leaf, name in known.items() if name in settings})

    def setting(self, name: str) -> Any:
        """Return a setting of the run by its full name, such as `train.learning_rate`, or None."""
        return self.state["settings"].get(name)

    def is_on_hub(self, name: str) -> bool:
        """Return whether a name must be on the hub.

        It then has the form `name` or `owner/name`, and does not name a file, folder or function here.
        """
        return (
            re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) is not None
            and not (is_file(name) or names_function(name))
            and not any((folder / name).exists() for folder in self.folders)
        )


def find_source(path: Path) -> Source:
    """Find the checkpoint at `path`. If `path` is a run, take the checkpoint in its summary, or else the newest.

    Raises ConfigError if `path` holds neither a run nor a checkpoint, CheckpointError if a checkpoint is not complete.
    """
    if (path / store.MANIFEST).is_file() or re.search(r"checkpoint-\d+$", path.absolute().name):
        found = path
    elif (path / METRICS).is_file() or store.directories(path):
        found = checkpoint_of_run(path)
    else:
        raise ConfigError(
            f"{path} holds neither a run ({METRICS}) nor a checkpoint ({store.MANIFEST}): name the "
            "train.output_dir of a run, or a checkpoint in it"
        )
    state, folder = read_json(complete(found) / STATE), found.absolute().parent
    run = read_run(folder) if (folder / METRICS).is_file() else None
    step = state["progress"]["global_step"]
    return Source(found, state, run and until(run, step))


def complete(found: Path) -> Path:
    """Return the checkpoint if it is complete. Otherwise raise CheckpointError with a list of the run's complete ones.

    Only sizes are checked. `rl_vlm.checkpoint.store.check` compares contents.
    """
    try:
        store.check_sizes(found)
    except CheckpointError as error:
        run = found.absolute().parent
        raise CheckpointError(f"{error}; complete checkpoints in {run}: {store.names(run)}") from error
    return found


def until(run: RunResults, step: int) -> RunResults:
    """Drop metrics and completions after `step` from a run."""
    lines = [line for line in run.lines if line["step"] <= step]
    rows = [row for row in run.rows if row["step"] < step]  # completions of step 0 are trained on in step 1
    return replace(run, lines=lines, rows=rows)
