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
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rl_vlm import checkpoint
from rl_vlm.config.describe import to_yaml
from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import ConfigError
from rl_vlm.metrics import MetricsLog
from rl_vlm.rollout_log import drop_windows_from, window_path, write_rows


class RunDirectory:
    """The files of one run; only the main process writes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = MetricsLog(path / "metrics.jsonl")

    def prepare(self, config: RunConfig, resumed: Path | None) -> None:
        """Make room for the run, or cut the records back to the checkpoint that it goes on from.

        Raises ConfigError rather than mix two runs in one directory.
        """
        if resumed is None and config.train.resume_from_checkpoint is None and self.metrics.path.exists():
            if not config.train.overwrite_output_dir:
                raise ConfigError(
                    f"train.output_dir {self.path} holds an earlier run; choose another, go on with "
                    "train.resume_from_checkpoint=auto, or delete it with train.overwrite_output_dir=true"
                )
            shutil.rmtree(self.path)
        self.path.mkdir(parents=True, exist_ok=True)
        step = checkpoint.step_of(resumed) if resumed else -1
        self.metrics.keep_until(step)
        drop_windows_from(self.path, max(step, 0))
        for later in self.path.glob("*checkpoint-*"):
            if later.name.startswith("unfinished-") or checkpoint.step_of(later) > step:
                shutil.rmtree(later)
        (self.path / "config.yaml").write_text(to_yaml(config))

    def write_completions(self, step: int, rows: Sequence[dict[str, Any]]) -> None:
        write_rows(window_path(self.path, step), rows)

    def write_dropped(self, dropped: Sequence[dict[str, Any]]) -> None:
        (self.path / "dropped_prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in dropped))

    def write_summary(self, summary: dict[str, Any]) -> None:
        (self.path / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
