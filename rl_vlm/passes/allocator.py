"""Settings of PyTorch's CUDA allocator, which reads them from the environment when a device is first used."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rl_vlm.config.schema import RunConfig

logger = logging.getLogger(__name__)

VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Names of the variable: since PyTorch 2.9, and before."""
EXPANDABLE = "expandable_segments:True"


def configure_allocator(config: RunConfig) -> None:
    """Set `memory.expandable_segments`, unless the user has set the variable. Call it before PyTorch is imported.

    By default a run with vLLM does not set it: vLLM has its own pools, and its servers inherit the environment.
    """
    wanted = config.memory.expandable_segments
    if wanted is None:
        wanted = config.rollout.facts.takes_expandable_segments
    if wanted and not any(name in os.environ for name in VARIABLES):
        os.environ |= dict.fromkeys(VARIABLES, EXPANDABLE)


@contextmanager
def allocator_configured(config: RunConfig) -> Iterator[None]:
    """Configure the allocator for the block only, so that a later run in this process uses its own settings."""
    own = any(name in os.environ for name in VARIABLES)
    configure_allocator(config)
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_initialized():
        logger.info("a CUDA device is in use: its allocator keeps the `memory.expandable_segments` of its first use")
    try:
        yield
    finally:
        if not own:
            for name in VARIABLES:
                os.environ.pop(name, None)
