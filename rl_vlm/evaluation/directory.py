"""The files of an evaluation. A killed evaluation can resume from them.

evaluation/
    completions.parquet     one row per completion, in order of the data
    summary.json            the figures
    config.yaml             every setting; for a comparison, the first checkpoint's settings
    starts.jsonl            the command, versions, the device
    report.html             a report to look at; see rl_vlm/tools/report/
    dropped_prompts.jsonl   the dropped data rows, each with the reason
    kept.parquet            the data rows with a success rate in the range of `--keep`
    images/                 small copies of the images, each once, for the report
    unfinished/             settings.json and a file per finished chunk; deleted when the command is complete
"""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_vlm.data.check import DroppedRow
from rl_vlm.log.completions import write_rows
from rl_vlm.log.directory import DROPPED, write_dropped
from rl_vlm.log.files import disk_errors, write_file
from rl_vlm.log.images import PromptImages

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chunk:
    """Evaluated data rows."""

    rows: list[dict[str, Any]]
    """One row per completion."""
    fault_counts: dict[str, int]
    """Numbers of masked completions, as metrics name them."""
    num_without_variance: int = 0
    """Number of groups that would have no advantage other than 0 in training."""


class EvaluationDirectory:
    """The files of one model's evaluation. Ranks write chunks and images; the main process does the rest."""

    def __init__(self, path: Path, image_folder: Path) -> None:
        """`image_folder` may be shared with the evaluations of other models."""
        self.path = path
        self.images = PromptImages(image_folder, most_per_prompt=None, base=path)
        self.unfinished = path / "unfinished"

    def resume(self, settings: Mapping[str, Any]) -> list[Chunk]:
        """Return the finished chunks of an evaluation with equal settings. Delete chunks of any other evaluation."""
        file, wanted = self.unfinished / "settings.json", plain(settings)
        if file.exists():
            found = json.loads(file.read_text())
            differing = [name for name in wanted | found if wanted.get(name) != found.get(name)]
            if not differing:
                return [Chunk(**json.loads(path.read_text())) for path in sorted(self.unfinished.glob("row_*.json"))]
            logger.warning("%s is of another %s: starting over", self.unfinished, ", ".join(differing))
        shutil.rmtree(self.unfinished, ignore_errors=True)
        with disk_errors(self.path):
            self.unfinished.mkdir(parents=True)
            write_file(file, json.dumps(wanted, indent=2).encode())
        return []

    def write_chunk(self, chunk: Chunk) -> Chunk:
        """Write a chunk, and return it in the form that `resume` would read."""
        text = json.dumps(vars(chunk), default=str)
        with disk_errors(self.path):
            write_file(self.unfinished / f"row_{chunk.rows[0]['row']:09d}.json", text.encode())
        return Chunk(**json.loads(text))

    def write(self, summary: Mapping[str, Any], rows: Sequence[dict[str, Any]], dropped: Sequence[DroppedRow]) -> None:
        """Write the completions, the summary, and the dropped rows, if there are any."""
        with disk_errors(self.path):
            write_rows(self.path / "completions.parquet", rows)
            (self.path / DROPPED).unlink(missing_ok=True)
            if dropped:
                write_dropped(self.path / DROPPED, dropped)
            write_file(self.path / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())

    def discard_unfinished(self, why: str) -> None:
        """Delete the finished chunks of an earlier evaluation, and log a warning if there are any."""
        if num_chunks := len(list(self.unfinished.glob("row_*.json"))):
            logger.warning("%s has %d finished chunks, which are evaluated again: %s", self.unfinished, num_chunks, why)
        self.delete_unfinished()

    def delete_unfinished(self) -> None:
        """Delete the chunks, so that the next evaluation does not resume from them."""
        shutil.rmtree(self.unfinished, ignore_errors=True)


def plain(value: Any) -> Any:
    """Convert the value to JSON and back."""
    return json.loads(json.dumps(value, default=str))
