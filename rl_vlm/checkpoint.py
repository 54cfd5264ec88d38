"""Checkpoints that are complete or absent: written to another directory, flushed to disk, then renamed.

checkpoint-40/
    model.safetensors, config.json, … or adapter_model.safetensors, …     as `save_pretrained` writes them
    trainer_state.json      step, versions of the weights, evaluations
    optimizer.pt            optimizer and learning-rate schedule
    rank_0.pt               random states, position in the data and generation windows of each rank
    manifest.json           every file with its size; a checkpoint without one is ignored
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rl_vlm.errors import CheckpointError

MANIFEST = "manifest.json"


def checkpoint_path(output_dir: Path, step: int) -> Path:
    return output_dir / f"checkpoint-{step}"


def begin(output_dir: Path, step: int) -> Path:
    """Create an empty directory for the files of a checkpoint."""
    unfinished = output_dir / f"unfinished-checkpoint-{step}"
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    return unfinished


def commit(unfinished: Path) -> Path:
    """Turn the directory of `begin` into a checkpoint: write the manifest, flush every file, rename."""
    files = sorted(path for path in unfinished.rglob("*") if path.is_file())
    manifest = {str(path.relative_to(unfinished)): path.stat().st_size for path in files}
    (unfinished / MANIFEST).write_text(json.dumps(manifest, indent=1))
    for path in [*files, unfinished / MANIFEST, unfinished]:
        flush(path)
    final = unfinished.with_name(unfinished.name.removeprefix("unfinished-"))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(unfinished, final)
    flush(final.parent)
    return final


def flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write(output_dir: Path, step: int, write_files: Callable[[Path], None]) -> Path:
    """Write a checkpoint unless that step has a complete one. Only one process may call this.

    Raises CheckpointError if writing fails, for instance on a full disk; earlier checkpoints are kept.
    """
    if is_complete(checkpoint_path(output_dir, step)):
        return checkpoint_path(output_dir, step)
    unfinished = begin(output_dir, step)
    try:
        write_files(unfinished)
        return commit(unfinished)
    except Exception as error:  # a full disk is an OSError, a RuntimeError of torch, or safetensors' own
        shutil.rmtree(unfinished, ignore_errors=True)
        free = shutil.disk_usage(output_dir).free // 2**20
        raise CheckpointError(
            f"could not write checkpoint-{step} in {output_dir} ({error}; {free} MiB free); "
            f"complete checkpoints: {', '.join(p.name for p in complete(output_dir)) or 'there is none'}"
        ) from error


def is_complete(checkpoint: Path) -> bool:
    """Return whether every file of the manifest exists with its size."""
    try:
        sizes = json.loads((checkpoint / MANIFEST).read_text())
    except (OSError, ValueError):
        return False
    return all((checkpoint / name).is_file() and (checkpoint / name).stat().st_size == n for name, n in sizes.items())


def complete(output_dir: Path) -> list[Path]:
    """Return all complete checkpoints, oldest step first."""
    found = [path for path in output_dir.glob("checkpoint-*") if is_complete(path)]
    return sorted(found, key=step_of)


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("checkpoint-"))


def find(setting: str | None, output_dir: Path) -> Path | None:
    """Return the checkpoint that `resume_from_checkpoint` names, if any. Raises CheckpointError if it is incomplete."""
    if setting is None:
        return None
    if setting == "auto":
        found = complete(output_dir)
        return found[-1] if found else None
    if not is_complete(Path(setting)):
        names = ", ".join(path.name for path in complete(output_dir)) or "none"
        raise CheckpointError(f"{setting} is not a complete checkpoint; complete ones in {output_dir}: {names}")
    return Path(setting)


def prune(output_dir: Path, limit: int | None, keep: Path | None) -> None:
    """Delete the oldest checkpoints beyond `limit`, never `keep` (the best one) or the newest."""
    found = complete(output_dir)
    surplus = len(found) - limit if limit else 0
    for path in [p for p in found[:-1] if p != keep][: max(surplus, 0)]:
        shutil.rmtree(path)


def seed_random_generators(seed: int) -> None:
    """Seed the global generators, which initialise adapters and which reward functions may use."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_states() -> dict[str, Any]:
    """Return global generator states, in types that `torch.load(weights_only=True)` reads; sampling has its own."""
    name, keys, *position = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), *position),
        "torch": torch.get_rng_state(),
    }


def restore_random_states(states: dict[str, Any]) -> None:
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
