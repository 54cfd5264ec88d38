"""What an evaluation leaves behind, and how it goes on after it was killed.

evaluation/
    completions.parquet     one row per completion, in order of the data
    summary.json            the figures
    kept.parquet            the rows of the data whose success rate was asked for (`--keep`)
    images/                 images that the data holds as pixels, each once; others are named where they lie
    unfinished/             settings.json and a file per finished chunk; deleted when the command is through
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl_vlm.files import written_whole
from rl_vlm.rollout_log import write_rows
from rl_vlm.sources import IMAGE_COLUMNS, Row

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chunk:
    """Some rows of the data, evaluated."""

    rows: list[dict[str, Any]]
    """One per completion."""
    fault_counts: dict[str, int]
    """As in `RewardTable`."""


class EvaluationDirectory:
    """The files of one model's evaluation. Ranks write chunks and images; the main process does the rest."""

    def __init__(self, path: Path, image_folder: Path) -> None:
        """`image_folder` may be shared with the evaluations of other models."""
        self.path = path
        self.image_folder = image_folder
        self.unfinished = path / "unfinished"

    def resume(self, settings: Mapping[str, Any]) -> list[Chunk]:
        """The chunks that an evaluation with equal settings has finished; those of any other are deleted."""
        file, wanted = self.unfinished / "settings.json", plain(settings)
        if file.exists():
            found = json.loads(file.read_text())
            differing = [name for name in wanted | found if wanted.get(name) != found.get(name)]
            if not differing:
                return [Chunk(**json.loads(path.read_text())) for path in sorted(self.unfinished.glob("row_*.json"))]
            logger.warning("%s is of another %s: starting anew", self.unfinished, ", ".join(differing))
        shutil.rmtree(self.unfinished, ignore_errors=True)
        self.unfinished.mkdir(parents=True)
        write_whole(file, json.dumps(wanted, indent=2).encode())
        return []

    def keep(self, chunk: Chunk) -> Chunk:
        """Write a chunk, and return it as `resume` would read it."""
        text = json.dumps(vars(chunk), default=str)
        write_whole(self.unfinished / f"row_{chunk.rows[0]['row']:09d}.json", text.encode())
        return Chunk(**json.loads(text))

    def image_references(self, row: Row, images: Sequence[Image], folder: Path) -> list[str]:
        """Where the images of a row lie: a path as the data gives it, in `folder`, else the file that is written here,
        relative to `path`."""
        values = [value for name in IMAGE_COLUMNS for value in as_list(row.get(name))]
        return [
            str(folder / given) if (given := given_path(value)) else os.path.relpath(self.write_image(image), self.path)
            for value, image in zip(values, images, strict=True)
        ]

    def write_image(self, image: Image) -> Path:
        """The PNG that is named by the image's pixels."""
        digest = hashlib.sha256(f"{image.mode}{image.size}".encode() + image.tobytes()).hexdigest()
        path = self.image_folder / f"{digest[:32]}.png"
        if not path.exists():
            self.image_folder.mkdir(parents=True, exist_ok=True)
            with written_whole(path) as unfinished:
                image.save(unfinished, format="PNG")
        return path

    def write(self, summary: Mapping[str, Any], rows: Sequence[dict[str, Any]]) -> None:
        """The outcome."""
        write_rows(self.path / "completions.parquet", rows)
        write_whole(self.path / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())

    def forget_unfinished(self) -> None:
        """Delete what `resume` would read: the next evaluation here is a new one."""
        shutil.rmtree(self.unfinished, ignore_errors=True)


def plain(value: Any) -> Any:
    """The value as it comes back from JSON."""
    return json.loads(json.dumps(value, default=str))


def write_whole(path: Path, content: bytes) -> None:
    """Write a file whole or not at all."""
    with written_whole(path) as unfinished:
        unfinished.write_bytes(content)


def as_list(value: Any) -> list[Any]:
    if value is None:
        return []
    return value if isinstance(value, list) else [value]


def given_path(value: Any) -> str | Path | None:
    """The path of an image in a row, unless the row holds the image itself."""
    if isinstance(value, dict) and value.get("bytes") is None:
        value = value.get("path")
    return value if isinstance(value, str | Path) else None
