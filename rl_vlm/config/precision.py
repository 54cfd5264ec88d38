"""`model.dtype` of a run that leaves it out."""

import logging

from rl_vlm.config.schema import RunConfig
from rl_vlm.config.sections import PRECISION

DEFAULTS = {"cuda": "bfloat16"}
"""Compute precision by the type of a device. Others compute in float32."""

logger = logging.getLogger(__name__)


def with_precision(config: RunConfig, device: str) -> RunConfig:
    """Return the config with `model.dtype` set. If it is left out, the type of the device decides, such as `cuda`."""
    if config.model.dtype is not None:
        return config
    if device in DEFAULTS:
        logger.info("model.dtype is not set: %s", PRECISION)
    model = config.model.model_copy(update={"dtype": DEFAULTS.get(device, "float32")})
    return config.model_copy(update={"model": model})
