"""`rl-vlm export`: a checkpoint as a plain model directory, without the state of its run.

export/
    model.safetensors, config.json, …                   a model, as `save_pretrained` writes it
    adapter_model.safetensors, adapter_config.json      or an adapter
    tokenizer.json, processor_config.json, …            the processor of the run
    README.md                                           the model card
    export.json                                         the checkpoint, the form and the version
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from rl_vlm.checkpoint import store
from rl_vlm.config.schema import DataConfig, ModelConfig
from rl_vlm.data.prompts import load_processor
from rl_vlm.errors import CheckpointError, ConfigError, ModelError, shorten
from rl_vlm.log.starts import installed_version
from rl_vlm.model.blocks import persistent_buffers, untied
from rl_vlm.model.files import ADAPTER_CONFIG, ADAPTER_WEIGHTS, read_json
from rl_vlm.model.loading import load_adapter, load_transformer
from rl_vlm.model.lora import adapts_tied_weight, untie_head
from rl_vlm.model.quantization import refuse_quantized
from rl_vlm.tools.export.card import Export, ExportForm, model_card
from rl_vlm.tools.export.source import Source, find_source

MARK = "export.json"
"""A directory with this file is an export. A later export may replace it."""
SMALL_FILES = 64 * 2**20
"""Bytes to reserve for tokenizer, configs and card."""


def export(path: Path, merge: bool = False, to: Path | None = None, dtype: str | None = None) -> tuple[Export, Path]:
    """Write a checkpoint, or the checkpoint of a run, as a model directory. Returns the export and its directory.

    `to` defaults to `export` in the folder of the checkpoint. `dtype` is the type of a model's weights, and defaults to
    the run's `model.dtype`. The directory is complete or absent.

    Raises ConfigError if the options do not fit the checkpoint or the directory holds something else, CheckpointError
    if the checkpoint is damaged or the disk is full, ModelError if the model cannot be loaded.
    """
    source = find_source(path)
    directory = (to or source.checkpoint.absolute().parent / "export").resolve()
    exported = Export(source, form_of(source, merge, dtype), dtype or source.model.precision, directory.name)
    refuse_other_content(directory)
    store.check(source.checkpoint)
    unfinished = directory.with_name(f"unfinished-{directory.name}")
    try:
        with named_errors(directory):
            store.begin(unfinished)
            write_files(unfinished, exported)
            store.put_in_place(unfinished, [unfinished / name for name in store.file_names(unfinished)])
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return exported, directory


def form_of(source: Source, merge: bool, dtype: str | None) -> ExportForm:
    """Return the form of the export. Raises ConfigError for an option that has no effect on this checkpoint."""
    if merge and not source.is_adapter:
        raise ConfigError(f"--merge: {source.checkpoint} is not an adapter and has all weights already; leave it out")
    if source.is_adapter and not merge and dtype:
        raise ConfigError(f"--dtype {dtype}: an adapter stays in float32; leave it out, or add --merge for a model")
    return "merged" if merge else "adapter" if source.is_adapter else "model"


def refuse_other_content(directory: Path) -> None:
    """Raise ConfigError unless the directory is absent, empty or an earlier export."""
    is_free = not directory.exists() or (directory.is_dir() and not any(directory.iterdir()))
    if not is_free and not (directory / MARK).is_file():
        raise ConfigError(
            f"{directory} exists and is not an earlier export (no {MARK}): choose another directory, the "
            "argument `--to` of rl-vlm export"
        )


def write_files(directory: Path, exported: Export) -> None:
    """Write all files of an export to an empty directory."""
    source = exported.source
    write_adapter(directory, source) if exported.form == "adapter" else write_model(directory, exported)
    load_processor(str(source.checkpoint), source.model, DataConfig()).save_pretrained(directory)
    (directory / "README.md").write_text(model_card(exported), encoding="utf-8")
    mark = {
        "checkpoint": source.checkpoint.absolute().name,
        "step": source.step,
        "form": exported.form,
        "rl_vlm": installed_version("rl-vlm"),
    }
    (directory / MARK).write_text(json.dumps(mark, indent=2) + "\n")


def write_adapter(directory: Path, source: Source) -> None:
    """Copy an adapter. Its config gets the base model's path on this machine, or else its name."""
    weights = source.checkpoint / ADAPTER_WEIGHTS
    store.check_space(directory, weights.stat().st_size + SMALL_FILES, "the export")
    shutil.copyfile(weights, directory / ADAPTER_WEIGHTS)
    config = read_json(source.checkpoint / ADAPTER_CONFIG) | {"base_model_name_or_path": source.base}
    if source.model.model_revision != "main":
        config["revision"] = source.model.model_revision
    (directory / ADAPTER_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")


def write_model(directory: Path, exported: Export) -> None:
    """Write all weights of a model, with an adapter merged into them, as `save_pretrained` does."""
    source, dtype = exported.source, getattr(torch, exported.dtype)
    model: Any = load_plain_model(source.checkpoint, source.base if source.is_adapter else None, source.model)
    model.to(dtype)
    for part in model.config.sub_configs:
        getattr(model.config, part).dtype = dtype  # `save_pretrained` changes the dtype of the outer config only
    tensors = [*untied([*model.named_parameters(), *persistent_buffers(model)])]
    num_bytes = sum(tensor.nbytes for _, tensor in tensors)
    store.check_space(directory, num_bytes + SMALL_FILES, "the export")
    model.save_pretrained(directory)


@contextmanager
def named_errors(directory: Path) -> Iterator[None]:
    """Convert disk errors in the block to CheckpointError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"could not write {directory}: {error}; nothing was exported") from error


def load_plain_model(checkpoint: Path, base: str | None, config: ModelConfig) -> Any:
    """Load a checkpoint in float32. If `base` is given, the checkpoint is an adapter and is merged into `base`.

    The base is never loaded in 4 bits. Raises ModelError if it cannot be loaded, or if the merged weights are not
    finite.
    """
    config = config.model_copy(update={"load_in_4bit": False})
    if base is None:
        return load_transformer(str(checkpoint), config)
    try:
        refuse_quantized(base, config)
        model = load_transformer(base, config)
    except OSError as error:
        raise ModelError(f"the base model {base} of {checkpoint} cannot be loaded: {shorten(error)}") from error
    try:
        adapted = load_adapter(model, str(checkpoint), config)
        if adapts_tied_weight(model):
            untie_head(model)
        return adapted.merge_and_unload(safe_merge=True)
    except ValueError as error:  # from safe_merge
        raise ModelError(f"the adapter {checkpoint} cannot be merged into {base}: {shorten(error)}") from error
