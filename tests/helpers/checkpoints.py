"""Checkpoints of made-up files."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rl_vlm.checkpoint.writer import CheckpointWriter
from rl_vlm.distributed.ranks import Ranks

RESUMED = ("model.safetensors", "trainer_state.json", "optimizer/state.safetensors", "rank_0.pt")
"""Files without which no run resumes."""


@dataclass
class MadeUpFiles:
    """Files that a function writes, and empty ones of `RESUMED` unless others write these."""

    function: Callable[[Path], None]
    num_bytes: int = 0
    is_whole: bool = True

    def write(self, directory: Path) -> None:
        self.function(directory)
        if self.is_whole:
            (directory / "optimizer").mkdir()
            for name in RESUMED:
                (directory / name).touch()


class SlowFiles(MadeUpFiles):
    """A file whose writing begins when `may_go` is set."""

    def __init__(self, is_whole: bool = True) -> None:
        self.may_go = threading.Event()
        super().__init__(self.write_later, is_whole=is_whole)

    def write_later(self, directory: Path) -> None:
        assert self.may_go.wait(20)
        (directory / "model.bin").write_text("weights")


def write_checkpoint(output_dir: Path, step: int, write: Callable[[Path], None], ranks: Ranks | None = None) -> None:
    """Write a checkpoint, and wait for it."""
    writer = CheckpointWriter(output_dir, ranks or Ranks(), in_background=False)
    writer.write(step, lambda: MadeUpFiles(write), lambda: None)
    writer.close()
