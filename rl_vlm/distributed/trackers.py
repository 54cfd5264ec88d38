"""The trackers of `log.report_to`: TensorBoard, Weights & Biases and others, through accelerate."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from rl_vlm.config.schema import LogConfig
from rl_vlm.config.secrets import starred
from rl_vlm.errors import ConfigError, text_of

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RolloutTable:
    """Rollouts, each with the path of an image or None."""

    columns: list[str]
    """Names of the values in a row. The first value is the image."""
    rows: list[list[Any]]


class Trackers:
    """Sends settings and metrics to trackers; does nothing if `report_to` is empty."""

    def __init__(self, log: LogConfig, output_dir: str) -> None:
        """Select the trackers of `log.report_to`. Raise ConfigError if a tracker's package is not installed."""
        from accelerate import Accelerator
        from accelerate.tracking import get_available_trackers

        names: list[Any] = [*log.report_to]
        installed = [str(tracker) for tracker in get_available_trackers()]
        if not set(names) <= set(installed):
            raise ConfigError(
                f"log.report_to is {names}, but only the packages of {installed} are installed: install the others, or "
                "leave them out"
            )
        self.accelerator: Any = Accelerator(
            cpu=not torch.accelerator.is_available(), log_with=names or None, project_dir=output_dir
        )

    def start(self, run_name: str, settings: Mapping[str, Mapping[str, Any]]) -> None:
        """Open the trackers and send the settings as `section.leaf`. Numbers stay numbers, all else becomes text.

        Secrets are starred out.
        """
        public = starred(settings)
        flat = {f"{section}.{leaf}": value for section, leaves in public.items() for leaf, value in leaves.items()}
        plain = {name: value if isinstance(value, int | float) else str(value) for name, value in flat.items()}
        self.accelerator.init_trackers(run_name, config=plain)

    def report(self, metrics: Mapping[str, float], step: int) -> None:
        """Send the metrics of a step. An error of a tracker is logged, and does not end the run."""
        try:
            self.accelerator.log(metrics, step=step)
        except Exception as error:
            logger.warning("the metrics of step %d were not sent to all trackers: %s", step, text_of(error))

    def report_rollouts(self, table: RolloutTable, step: int) -> None:
        """Send rollouts to the trackers that take tables or images. Only the main process calls this.

        An error of a tracker is logged, and does not end the run.
        """
        for tracker in self.accelerator.trackers:
            try:
                if send := SENDERS.get(tracker.name):
                    send(tracker, table, step)
            except Exception as error:
                logger.warning("rollouts of step %d were not sent to %s: %s", step, tracker.name, text_of(error))

    def close(self) -> None:
        """Flush and close the trackers."""
        for tracker in self.accelerator.trackers:
            tracker.finish()


def send_table(tracker: Any, table: RolloutTable, step: int) -> None:
    """Send a table with images. The packages wandb and trackio have the same classes."""
    package: Any = import_module(tracker.name)
    data = [[package.Image(str(path)) if path else None, *values] for path, *values in table.rows]
    tracker.log({"rollouts": package.Table(columns=table.columns, data=data)}, step=step)


def send_to_tensorboard(tracker: Any, table: RolloutTable, step: int) -> None:
    """Send the values as text with the names of the images, and each image once."""
    import numpy
    from PIL import Image

    paths: dict[Path, None] = dict.fromkeys(path for path, *_ in table.rows if path)
    names = {path: f"rollouts/{i}" for i, path in enumerate(paths)}
    rows = [[names.get(path), *values] for path, *values in table.rows]
    lines = [[str(value).replace("|", "\\|").replace("\n", "<br>") for value in row] for row in rows]
    header = [table.columns, ["---"] * len(table.columns)]
    tracker.writer.add_text("rollouts", "\n".join(f"| {' | '.join(line)} |" for line in [*header, *lines]), step)
    for path, name in names.items():
        with Image.open(path) as image:
            tracker.writer.add_image(name, numpy.asarray(image), step, dataformats="HWC")


SENDERS: dict[str, Callable[[Any, RolloutTable, int], None]] = {
    "wandb": send_table, "trackio": send_table, "tensorboard": send_to_tensorboard,
}  # fmt: skip
"""Functions that send rollouts, by the name of the tracker."""
