"""The files of a run.

output_dir/
    config.yaml                              every setting, resolved
    metrics.jsonl                            one line per optimizer step; step 0 is the evaluation before training
    micro_batch_tokens.jsonl                 one line per change of the token budget, see rl_vlm/passes/changes.py
    completions/completions_00000.parquet    one row per completion, one file per generation window
    completions/held_out_00000.parquet       the same, one file per evaluation within the run
    completions/images/                      small copies of the images of some prompts, for the report
    starts.jsonl                             one line per start: the command, versions, the device
    report.html                              everything above, to look at; see rl_vlm/tools/report/
    checkpoint-N/                            see rl_vlm/checkpoint/store.py
    summary.json, reward.png                 the outcome
    memory_profile.json, memory_profile.png  with `memory_profile`, see rl_vlm/tools/profile/text.py
    dropped_prompts.jsonl                    rows left out, each with the reason
    nonfinite-step-N-rank-R.pt               a batch whose loss or gradient was not finite
    run.lock                                 held by the process that writes here
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rl_vlm.checkpoint import store
from rl_vlm.config.describe import to_yaml
from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import CheckpointError, ConfigError
from rl_vlm.log.completions import FOLDER, drop_after
from rl_vlm.log.files import BUDGET, LOCK, METRICS, disk_errors, refuse_earlier_run
from rl_vlm.log.metrics import MetricsLog
from rl_vlm.log.starts import STARTS
from rl_vlm.model.files import read_json
from rl_vlm.types import ScoredGroup

if TYPE_CHECKING:
    from rl_vlm.data.check import DroppedRow

logger = logging.getLogger(__name__)

CONFIG = "config.yaml"
SUMMARY = "summary.json"
EVALUATED, COMPARISON = "completions.parquet", "comparison.json"
"""Results of one evaluation, and of several."""
DIFFERENCES = "differences"
"""Key of a summary in `comparison.json`: the changes of its scores from the first model."""
REPORT = "report.html"
DROPPED = "dropped_prompts.jsonl"
MEMORY_PROFILE = ("memory_profile.json", "memory_profile.png")
MADE_ANEW = (SUMMARY, REPORT, "reward.png", *MEMORY_PROFILE, DROPPED)
"""Files of an earlier start that a run deletes."""
FILES = (*MADE_ANEW, METRICS, BUDGET, CONFIG, STARTS)
CHECKPOINT = re.compile(r"(unfinished-)?checkpoint-(\d+)")


class RunDirectory:
    """The files of one run. The main process writes all but non-finite batches."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metrics = MetricsLog(path / METRICS)

    @property
    def is_visible(self) -> bool:
        """Return whether this process sees the files of the main process, which has locked the directory."""
        return (self.path / LOCK).is_file()

    def refuse_wrong_kinds(self) -> None:
        """Raise ConfigError if a directory has the name of a run's file, or a file the name of a run's directory."""
        for path in self.path.iterdir():
            is_directory = path.name == FOLDER or CHECKPOINT.fullmatch(path.name) is not None
            if (is_directory or path.name in FILES) and path.is_dir() != is_directory:
                found, expected = ("file", "directory") if is_directory else ("directory", "file")
                raise ConfigError(
                    f"train.output_dir: {path} is a {found}, but a run writes a {expected} there: move it away, or "
                    "choose another train.output_dir"
                )

    def refuse_another_run(self, config: RunConfig, resumed: Path | None) -> None:
        """Raise ConfigError if the directory holds a run that is neither resumed nor overwritten."""
        if not self.metrics.path.exists():
            return
        if resumed and resumed.parent.resolve() != self.path.resolve():
            raise ConfigError(
                f"train.output_dir {self.path} holds another run than train.resume_from_checkpoint {resumed}: choose a "
                "new train.output_dir"
            )
        refuse_earlier_run(self.path, config.train)

    def prepare(
        self,
        config: RunConfig,
        step: int | None,
        last_line: int,
        next_window: int,
        dropped: Sequence[DroppedRow],
    ) -> None:
        """Delete an earlier run, or the records after the checkpoint at `step` from which the run resumes.

        `last_line` is the last step whose metrics are kept. `next_window` is the step for which the next window will be
        generated. Call this after all checks of the settings, since it deletes files.
        """
        self.metrics.truncate_after(last_line)
        drop_after(self.path, step, next_window)
        for directory in self.path.iterdir():
            match = CHECKPOINT.fullmatch(directory.name)
            if match and (match[1] or step is None or int(match[2]) > step):
                logger.warning("deleting %s, which this run will write again", directory)
                shutil.rmtree(directory)
        for name in MADE_ANEW:
            (self.path / name).unlink(missing_ok=True)
        if dropped:
            write_dropped(self.path / DROPPED, dropped)
        (self.path / CONFIG).write_text(to_yaml(config))

    def append_metrics(self, line: dict[str, Any]) -> None:
        with disk_errors(self.path):
            self.metrics.append(line)

    def write_nonfinite(self, groups: Sequence[ScoredGroup], step: int, rank: int) -> None:
        """Write the groups of a step with a non-finite loss or gradient. If the disk is full, only log that."""
        path = self.path / f"nonfinite-step-{step}-rank-{rank}.pt"
        try:
            torch.save(list(groups), path)
            outcome = f"its batch is in {path}"
        except (OSError, RuntimeError) as error:  # torch's own error for a full disk
            outcome = f"its batch could not be written: {error}"
        logger.warning("loss or gradient is not finite; step %d was skipped, and %s", step, outcome)

    def write_summary(self, summary: dict[str, Any]) -> None:
        with disk_errors(self.path):
            (self.path / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n")


def checkpoint_of_run(run: Path) -> Path:
    """Return the checkpoint that the run's summary names, or the newest complete one if there is no summary yet.

    Raises CheckpointError if there is none. A run that was moved keeps its checkpoints.
    """
    if (run / SUMMARY).is_file():
        return run / Path(read_json(run / SUMMARY)["checkpoint"]).name
    found = store.complete(run)
    if not found:
        raise CheckpointError(f"{run} has no complete checkpoint yet; train.save_steps sets when it writes one")
    return found[-1]


def write_dropped(path: Path, dropped: Sequence[DroppedRow]) -> None:
    """Write a line for each row that was left out."""
    path.write_text("".join(json.dumps(each.record) + "\n" for each in dropped), encoding="utf-8")
