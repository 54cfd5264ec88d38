"""The start of a command: its first line, before torch is imported, and the imports that take seconds."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rl_vlm.config.data_names import Which
from rl_vlm.config.data_sources import data_sources
from rl_vlm.config.schema import RunConfig

logger = logging.getLogger("rl_vlm")


def announce(config: RunConfig, which: Which, models: Sequence[str]) -> None:
    """Log the models, data and folder of a training run or an evaluation, and the imports that come first."""
    task = {"train": "training", "eval": "evaluating"}[which]
    data = ", ".join(entry.name for entry in data_sources(config.data, which))
    folder = config.train.output_dir
    logger.info("%s %s on %s, into %s; importing torch and transformers first", task, ", ".join(models), data, folder)


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
