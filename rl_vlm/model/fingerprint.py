"""A fingerprint of a checkpoint. It lets a resumed run notice that it began with another model."""

from __future__ import annotations

import hashlib
from pathlib import Path

from rl_vlm.config.schema import ModelConfig
from rl_vlm.model.loading import base_of

SUFFIXES = {".json", ".safetensors", ".bin", ".model", ".txt", ".jinja", ".py"}
BLOCK = 2**16
NUM_BLOCKS = 64


def model_fingerprint(initial: str, config: ModelConfig) -> str:
    """Return a digest of the initial checkpoint and, if it is an adapter, of its base model.

    For a local directory, it covers names, sizes and evenly spaced blocks of the files. For a model on the hub, it
    covers the commit.
    """
    digest = hashlib.sha256()
    for source in dict.fromkeys((initial, base_of(initial))):
        digest.update(folder_digest(Path(source)) if Path(source).is_dir() else hub_commit(source, config).encode())
    return digest.hexdigest()[:16]


def folder_digest(folder: Path) -> bytes:
    """Return a digest of the model's files. A large file is read in `NUM_BLOCKS` evenly spaced blocks."""
    digest = hashlib.sha256()
    for path in sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES):
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        step = max(BLOCK, size // NUM_BLOCKS)
        with path.open("rb") as file:
            for start in range(0, size, step):
                file.seek(start)
                digest.update(file.read(BLOCK))
    return digest.digest()


def hub_commit(name: str, config: ModelConfig) -> str:
    """Return the commit of a model in the hub's local cache. The model must have been loaded before."""
    from transformers.utils.hub import cached_file, extract_commit_hash

    path = cached_file(name, "config.json", revision=config.model_revision, local_files_only=True)
    return extract_commit_hash(path, None) or name
