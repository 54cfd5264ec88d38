"""The trackers of `log.report_to`: TensorBoard, Weights & Biases and others, through accelerate."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from rl_vlm.config.schema import LogConfig
from rl_vlm.errors import ConfigError, text_of

logger = logging.getLogger(__name__)


class Trackers:
    """Sends settings and metrics to trackers; does nothing if `report_to` is empty."""

    def __init__(self, log: LogConfig, output_dir: str) -> None:
        """Select the trackers of `log.report_to`. Raises ConfigError if the package of one is not installed."""
        from accelerate import Accelerator
        from accelerate.tracking import get_available_trackers

        names: list[Any] = [*log.report_to]
        installed = [str(tracker) for tracker in get_available_trackers()]
        if not set(names) <= set(installed):
            raise ConfigError(f"log.report_to: {names} are asked for, and the packages of {installed} are installed")
        self.accelerator: Any = Accelerator(
            cpu=not torch.accelerator.is_available(), log_with=names or None, project_dir=output_dir
        )

    def start(self, run_name: str, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """Open the trackers and send them the settings as `section.leaf`: numbers unchanged, all else as text."""
        flat = {f"{section}.{leaf}": value for section, leaves in settings.items() for leaf, value in leaves.items()}
        plain = {name: value if isinstance(value, int | float) else str(value) for name, value in flat.items()}
        self.accelerator.init_trackers(run_name, config=plain)

    def report(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of a step. An error of a tracker is logged, and does not end the run."""
        try:
            self.accelerator.log(metrics, step=step)
        except Exception as error:
            logger.warning("the metrics of step %d were not sent to all trackers: %s", step, text_of(error))

    def close(self) -> None:
        """Flush and close the trackers."""
        for tracker in self.accelerator.trackers:
            tracker.finish()
