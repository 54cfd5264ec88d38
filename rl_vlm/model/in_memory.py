"""Models and processors that a Python session holds: they are written as a checkpoint, and the run loads that.

They are functions `f(directory, seed)` that write a checkpoint, so settings name them like any other function.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from rl_vlm.errors import ConfigError, ModelError

NOT_OF_PROCESSOR = (
    "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "adapter_config.json", "*.py",
)  # fmt: skip
"""Files of a checkpoint that its processor does not write."""


class HeldModel:
    """A transformers model in memory, and its processor. It is let go of when it has been written."""

    def __init__(self, model: Any, processor: Any = None) -> None:
        """Without a processor, the one of the checkpoint that the model was loaded from is used.

        Raises ConfigError if the model is a PEFT model, or if there is no processor.
        """
        if hasattr(model, "peft_config"):
            raise ConfigError(
                f"model is a {type(model).__name__} in memory: give its base model, and peft_config for a new "
                "adapter. Or write it with save_pretrained, and give the directory"
            )
        self.origin = model.config.name_or_path
        if processor is None and not self.origin:
            raise ConfigError(f"model is a {type(model).__name__} that was not loaded from a checkpoint: give its "
                              "processor as processing_class")  # fmt: skip
        self.model, self.processor = model, processor
        self.digest = digest_of_weights(model) + (digest_of_processor(processor) if processor else self.origin)

    def __call__(self, directory: Path, seed: int) -> None:
        """Write the model and its processor. Raise ModelError if it was written before."""
        from transformers import AutoProcessor

        if self.model is None:
            raise ModelError("the model in memory was written by an earlier call and deleted since: make a new trainer")
        self.model.save_pretrained(directory)
        (self.processor or AutoProcessor.from_pretrained(self.origin)).save_pretrained(directory)
        self.model = self.processor = None


class HeldProcessor:
    """A processor in memory, for the model of a directory or of the hub."""

    def __init__(self, processor: Any, source: str) -> None:
        self.processor, self.source = processor, source
        self.digest = digest_of_processor(processor)

    def __call__(self, directory: Path, seed: int) -> None:
        """Link the files of the model, and write the processor to the same directory."""
        from huggingface_hub import snapshot_download

        source = Path(self.source) if Path(self.source).is_dir() else Path(snapshot_download(self.source))
        directory.mkdir(parents=True)
        for path in (path for pattern in NOT_OF_PROCESSOR for path in source.glob(pattern)):
            (directory / path.name).symlink_to(path.resolve())
        self.processor.save_pretrained(directory)


def written_by(model: Any, processor: Any) -> Callable[[Path, int], None]:
    """Return a function that writes these objects as a checkpoint.

    One of them may be left out: `model` may be the name of a checkpoint, and `processor` may be None.
    Raises ConfigError if the objects cannot be used.
    """
    if processor is not None and not hasattr(processor, "image_processor"):
        raise ConfigError(f"processing_class is a {type(processor).__name__} without an image processor: give the "
                          "processor of a vision-language model, as AutoProcessor loads it")  # fmt: skip
    if hasattr(model, "state_dict"):
        if not hasattr(model, "save_pretrained"):
            raise ConfigError(f"model is a {type(model).__name__}, which has no save_pretrained: give a model of "
                              "transformers, a hub name or a directory")  # fmt: skip
        return HeldModel(model, processor)
    if not isinstance(model, str | os.PathLike):
        raise ConfigError("processing_class is for a model that is an object, a hub name or a directory: leave it out")
    return HeldProcessor(processor, os.fspath(model))


def refuse_second_copy(model: Any, bytes_per_weight: int, num_copies: int) -> None:
    """Raise ConfigError if host memory cannot hold the caller's model and the copies that the run loads."""
    needed = sum(weight.numel() for weight in model.parameters()) * bytes_per_weight * num_copies
    free = free_host_memory()
    if needed > free:
        raise ConfigError(
            f"model is a {type(model).__name__} in memory, and stays there: to load it again, the run needs "
            f"{needed / 2**30:.1f} GiB of host memory, and {free / 2**30:.1f} GiB are free. Write it and its processor "
            "with save_pretrained, delete it, and give the directory"
        )


def free_host_memory() -> int:
    """Return the free bytes of the host."""
    import psutil

    return psutil.virtual_memory().available


def digest_of_weights(model: Any) -> str:
    """Return a SHA-256 of a model's config and weights."""
    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, tensor in model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().reshape(-1).cpu().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


def digest_of_processor(processor: Any) -> str:
    """Return a SHA-256 of the files that a processor writes."""
    digest = hashlib.sha256()
    with tempfile.TemporaryDirectory() as directory:
        processor.save_pretrained(directory)
        for path in sorted(path for path in Path(directory).rglob("*") if path.is_file()):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()
