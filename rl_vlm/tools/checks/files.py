"""Checks of the output directory and of the model's files. This module imports no torch."""

from __future__ import annotations

import json
import os
from pathlib import Path

from rl_vlm.checkpoint.store import directories
from rl_vlm.config.changes import changed_settings, refused_changes
from rl_vlm.config.function_names import names_function
from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import CheckpointError, ConfigError, Finding, ModelError
from rl_vlm.functions import load_function
from rl_vlm.log.files import refuse_earlier_run
from rl_vlm.model.files import (
    check_checkpoint,
    check_weights,
    context_of,
    has_row,
    local_directory,
    moving_code,
    refuse_long_completions,
    refuse_unread_revision,
)
from rl_vlm.plan.packaged import packaged_config
from rl_vlm.tools.checks.diagnosis import Checking, Note, attempt
from rl_vlm.tools.checks.table import Subject


def output_directory(subject: Subject) -> Checking[None]:
    """Check that files can be written to the output directory. For a training run, also check its present content."""
    path = Path(subject.config.train.output_dir)
    existing = next(place for place in (path, *path.absolute().parents) if place.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        what = "is not a directory" if not existing.is_dir() else "cannot be written to"
        raise ConfigError(f"train.output_dir {path}: {existing} {what}; choose another directory")
    if subject.kind == "train":
        refuse_earlier_run(path, subject.config.train)
        check_resumed(subject.config)
    yield Note(f"output directory {path}")


def check_resumed(config: RunConfig) -> None:
    """Raise CheckpointError if the checkpoint to resume cannot be read, or if a setting has changed that must not."""
    setting = config.train.resume_from_checkpoint
    found = directories(Path(config.train.output_dir)) if setting == "auto" else [Path(setting)] if setting else []
    if not found:
        return
    newest = found[-1]
    if not newest.is_dir():
        raise CheckpointError(f"train.resume_from_checkpoint {newest} is not a directory")
    try:
        saved = json.loads((newest / "trainer_state.json").read_text())["settings"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"train.resume_from_checkpoint {newest} is not a checkpoint of a run: {error!r}"
        ) from error
    refused = refused_changes(changed_settings(saved, config), False, config.train.load_best_model_at_end)
    if refused:
        raise CheckpointError(f"{newest} cannot be resumed with changed settings: {'; '.join(refused)}")


def model_files(subject: Subject) -> Checking[str | None]:
    """Check the files of the model, or of each model to evaluate.

    Return the first name that is not on this machine, "" if all are, or None if files have errors.
    """
    names, missing = subject.checkpoints or [subject.config.model.model_name_or_path], []
    if subject.is_served:
        url = subject.config.evaluation.endpoint_url
        yield Note(f"model {', '.join(names)}, which {url} serves", is_checked=False)
        return names[0]
    for name in names:
        missing.append((yield from attempt(model_source(subject, name))))
    return next((each for each in missing if each != ""), "")


def model_source(subject: Subject, name: str) -> Checking[str]:
    """Check a function that writes a model, or the files of a checkpoint. Return the name if it is not here, or ""."""
    settings = subject.config.model.model_copy(update={"model_name_or_path": name})
    refuse_unread_revision(settings)
    if warning := moving_code(settings):
        yield Finding("warning", "code of the hub", warning)
    if not names_function(name):
        return (yield from checkpoint_files(subject, name))
    load_function(name)
    yield Note(f"model: the function {name} loads")
    yield from subject.left_out(f"model that {name} writes")
    return ""


def checkpoint_files(subject: Subject, name: str) -> Checking[str]:
    """Check a directory, or a hub name if its config is in the local cache. Check an adapter's base, too."""
    if Path(name).is_file():
        raise ModelError(f"model.model_name_or_path {name} is a file; name the directory of a checkpoint")
    directory = local_directory(name, subject.config.model.model_revision)
    if directory is None:
        if packaged := packaged_config(name):
            check_context(subject, packaged)
        yield from subject.left_out(f"model {name}, which is neither a directory here nor in the cache of the hub")
        return name
    base = check_checkpoint(directory)
    if directory == Path(name):
        check_weights(directory)
    if base is None:
        check_context(subject, directory)
        if not has_row(directory):
            yield from subject.left_out(
                f"model {name}, whose type has no row: the first step proves it or ends the run"
            )
    yield Note(f"model {name}: its config")
    return "" if base is None else (yield from checkpoint_files(subject, base))


def check_context(subject: Subject, directory: Path) -> None:
    """Raise ConfigError if a run's completions leave no room for a prompt in the context of the model."""
    if subject.kind != "serve":
        refuse_long_completions(subject.config.rollout.max_completion_length, context_of(directory))
