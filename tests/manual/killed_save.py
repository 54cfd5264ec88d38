"""A training run of which one rank is killed within a save: `-m tests.manual.killed_save CONFIG RANK POINT SAVES`.

The first SAVES saves of the process are complete, and the next one ends at POINT on rank RANK.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from launch import cli
from rl_vlm.checkpoint import store
from rl_vlm.checkpoint.writer import CheckpointFiles, CheckpointWriter
from rl_vlm.distributed.optimizer_files import OptimizerFiles
from rl_vlm.model.saving import PolicyFiles

POINTS: dict[str, tuple[Any, str]] = {
    "directory": (store, "begin"),
    "model": (PolicyFiles, "write"),
    "optimizer": (OptimizerFiles, "write"),
    "states": (CheckpointFiles, "write"),
    "digests": (store, "digests"),
    "flush": (store, "flush"),
    "commit": (store, "commit"),
}
"""The function after whose call, or in whose middle, a rank is killed."""
ON_ALL_RANKS = ("model", "optimizer")


def kill_at(rank: int, point: str, saves: int) -> None:
    """Kill this process, if it is the rank, at a point of its save after `saves` complete ones."""
    begun: list[None] = []
    write, (owner, name) = CheckpointWriter.write, POINTS[point]
    function: Callable[..., Any] = getattr(owner, name)

    def counted_write(writer: CheckpointWriter, *arguments: Any) -> None:
        writer.finish()
        begun.append(None)
        write(writer, *arguments)

    def killed(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        if len(begun) > saves and os.environ["RANK"] == str(rank):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    patched: Any = CheckpointWriter
    patched.write = counted_write
    setattr(owner, name, killed)


def main() -> int:
    config, rank, point, saves = sys.argv[1:]
    kill_at(int(rank), point, int(saves))
    return cli.run("train", [config])


if __name__ == "__main__":
    cli.end_process_after(main)
