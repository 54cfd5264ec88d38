"""Turns dropout off and fixes batch norms, so that rollouts and training passes give the same log-probs."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from typing import Any

from torch import nn

logger = logging.getLogger(__name__)


def disable_dropout(model: nn.Module) -> None:
    """Set every dropout rate of a model and of its configs to 0, and log the rates that were above 0.

    A rate is a number with `drop` in its name, such as `attention_dropout` and `drop_path_rate`, or the `p` or `prob`
    of a module with `drop` in its class name. The model saves these configs, so a checkpoint of this run describes the
    model that was trained.
    """
    found: dict[str, float] = {}
    for place, owner in rate_owners(model):
        for name in rate_names(owner):
            found[f"{place}.{name}"] = getattr(owner, name)
            setattr(owner, name, 0.0)
    if found:
        rates = ", ".join(f"{name} was {rate:g}" for name, rate in found.items())
        logger.warning("dropout is off, in training as in rollouts: %s", rates)


class FixedStatistics(nn.Module):
    """A batch norm that keeps the statistics of its checkpoint, in training too (FastVLM).

    Otherwise an image's features would depend on the other images of its micro-batch.
    """

    def train(self, mode: bool = True) -> FixedStatistics:
        return super().train(False)


def fix_statistics(model: nn.Module) -> None:
    """Let every batch norm of a model use the statistics of its checkpoint."""
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and not isinstance(module, FixedStatistics):
            module.__class__ = type(type(module).__name__, (FixedStatistics, type(module)), {})
            module.eval()


def rate_owners(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield all modules and configs with their names. Layer indices are written as `*`."""
    configs: dict[int, Any] = {}
    for path, module in model.named_modules():
        yield re.sub(r"\.\d+(?=\.|$)", ".*", path), module
        adapters = getattr(module, "peft_config", {})
        for config in (getattr(module, "config", None), *(adapters.values() if isinstance(adapters, dict) else ())):
            collect_configs(config, configs)
    for config in configs.values():
        yield type(config).__name__, config


def collect_configs(config: Any, found: dict[int, Any]) -> None:
    """Add a config and the configs of its parts to `found`, by identity."""
    if not hasattr(config, "to_dict") or id(config) in found:
        return
    found[id(config)] = config
    for part in vars(config).values():
        collect_configs(part, found)


def rate_names(owner: Any) -> list[str]:
    """Return the names of a module's or config's dropout rates above 0."""
    is_dropout = "drop" in type(owner).__name__.lower()
    return [
        name
        for name, value in vars(owner).items()
        if isinstance(value, float) and value > 0 and ("drop" in name or (is_dropout and name in ("p", "prob")))
    ]
