"""What a run leaves behind.

output_dir/
    config.yaml                              every setting, resolved
    metrics.jsonl                            one line per optimizer step; step 0 is the evaluation before training
    completions/completions_00000.parquet    one row per completion, one file per generation window
    checkpoint-N/                            see rl_vlm/checkpoint.py
    summary.json, reward.png                 the outcome
    dropped_prompts.jsonl                    rows left out because their prompt was too long
    nonfinite-step-N-rank-R.pt               a batch whose loss or gradient was not finite
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rl_vlm.config.describe import to_yaml
from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import CheckpointError, ConfigError
from rl_vlm.metrics import MetricsLog
from rl_vlm.rollout_log import drop_windows_from, window_path, write_rows

logger = logging.getLogger(__name__)


class RunDirectory:
    """The files of one run; only the main process writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = MetricsLog(path / "metrics.jsonl")

    def refuse_another_run(self, config: RunConfig, resumed: Path | None) -> None:
        """Raises ConfigError rather than mix two runs in one directory, or delete one unasked."""
        if not self.metrics.path.exists():
            return
        if resumed and resumed.parent.resolve() != self.path.resolve():
            raise ConfigError(
                f"train.output_dir {self.path} holds a run of its own, and train.resume_from_checkpoint {resumed} "
                "is another's; choose a new train.output_dir"
            )
        if config.train.resume_from_checkpoint is None and not config.train.overwrite_output_dir:
            raise ConfigError(
                f"train.output_dir {self.path} holds an earlier run; choose another, go on with "
                "train.resume_from_checkpoint=auto, or delete it with train.overwrite_output_dir=true"
            )

    def prepare(self, config: RunConfig, step: int | None, next_window: int, dropped: Sequence[dict[str, Any]]) -> None:
        """Make room for the run, or cut the records back to the checkpoint at `step` that it goes on from.

        `next_window` is the step that the next window will be generated for. Called when nothing can be refused any
        more: what is deleted here is an earlier run, or what this one will write again.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self.metrics.keep_until(-1 if step is None else step)
        drop_windows_from(self.path, next_window)
        for directory in self.path.iterdir():
            match = re.fullmatch(r"(unfinished-)?checkpoint-(\d+)", directory.name)
            if match and (match[1] or step is None or int(match[2]) > step):
                logger.warning("deleting %s, which this run will write again", directory)
                shutil.rmtree(directory)
        for name in ("summary.json", "reward.png", "dropped_prompts.jsonl"):
            (self.path / name).unlink(missing_ok=True)
        if dropped:
            self.write_dropped(dropped)
        (self.path / "config.yaml").write_text(to_yaml(config))

    def append_metrics(self, line: dict[str, Any]) -> None:
        with disk_errors(self.path):
            self.metrics.append(line)

    def write_completions(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        with disk_errors(self.path):
            write_rows(window_path(self.path, step), rows)

    def write_dropped(self, dropped: Sequence[dict[str, Any]]) -> None:
        (self.path / "dropped_prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dropped))

    def write_summary(self, summary: dict[str, Any]) -> None:
        with disk_errors(self.path):
            (self.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raises CheckpointError where a file cannot be written; checkpoints are whole all the same."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"could not write in {path}: {error}; resume from the last checkpoint") from error
