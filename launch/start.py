"""The start of a command: its first line, before torch is imported, and the imports that take seconds."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rl_vlm.config.data_sources import Which, data_sources
from rl_vlm.config.schema import RunConfig

logger = logging.getLogger("rl_vlm")


def announce_training(config: RunConfig) -> None:
    """Log the model, the data and the folder of a training run."""
    announce(f"training {config.model.model_name_or_path} on {data_names(config, 'train')}", config)


def announce_evaluation(config: RunConfig, checkpoints: Sequence[str]) -> None:
    """Log the models, the data and the folder of an evaluation."""
    announce(f"evaluating {', '.join(checkpoints)} on {data_names(config, 'eval')}", config)


def data_names(config: RunConfig, which: Which) -> str:
    """Return the names of the training or the held-out data, as in `dataset_name`."""
    return ", ".join(entry.name for entry in data_sources(config.data, which))


def announce(task: str, config: RunConfig) -> None:
    """Log a task and its folder, and the imports that come first."""
    logger.info("%s, into %s; importing torch and transformers first", task, config.train.output_dir)


@contextmanager
def importing() -> Iterator[None]:
    """Import modules in the block without garbage collections meanwhile.

    Torch and transformers make hundreds of thousands of objects that stay until the end. Each collection would visit
    them again, so later ones leave them out, too.
    """
    gc.disable()
    try:
        yield
        gc.freeze()
    finally:
        gc.enable()
