"""Launch two ranks hundreds of times, forked from a process that has imported everything.

    campaign ──fork──► launcher, which has the ranks' store ──fork──► rank 0, rank 1

Two ranks on two cores take half a minute to import what a run needs, and a run of six tiny steps takes four seconds.
The launcher does what torchrun does: it waits for its ranks, and if one fails it sends the other SIGTERM, and SIGKILL
after a while.
"""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.context import ForkProcess
from pathlib import Path

from rl_vlm.distributed.watch import is_alive
from tests.helpers.ending import MARK, none_is_left

FORK = multiprocessing.get_context("fork")
POLL_SECONDS = 0.1
"""As torchrun's."""
NUM_RANKS = 2


def preload(modules: Path) -> None:
    """Import what a run had imported at its end."""
    for name in modules.read_text().split("\n"):
        with suppress(Exception):  # modules that only others can import
            importlib.import_module(name)


@dataclass
class Launched:
    """A launcher with its two ranks, which write to `log`."""

    process: ForkProcess
    log: Path

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def ranks(self) -> list[int]:
        """Return the process ids of the ranks, for which this waits."""
        return self.read("pids", lambda: self.process.is_alive())

    def statuses(self) -> list[int]:
        """Return the exit statuses of the ranks after the launcher's end; negative numbers are signals."""
        return self.read("statuses", lambda: False)

    def read(self, name: str, may_come: Callable[[], bool]) -> list[int]:
        path = self.log.with_suffix(f".{name}")
        while not path.exists() and may_come():
            time.sleep(0.005)
        return json.loads(path.read_text()) if path.exists() else []

    def wait(self, seconds: float) -> int | None:
        """Wait for the launcher and return its exit status, or None if it still runs."""
        self.process.join(seconds)
        return self.process.exitcode

    def none_is_left(self, seconds: float = 10.0) -> bool:
        """Wait until no process of this launch is left, and return whether that is so.

        Forked processes show the environment of the campaign, but have the launcher's session.
        """
        return none_is_left(str(self.log), seconds, session=self.pid)

    def kill_all(self) -> None:
        """Kill the launcher and its ranks at once."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.process.join()


def launch(config: Path, environment: Mapping[str, str], ends_others: bool = True) -> Launched:
    """Start a launcher of `rl-vlm train CONFIG` on two ranks. The log lies beside the config.

    Without `ends_others` the ranks must notice by themselves that another one is lost.
    """
    log = config.with_suffix(".log")
    for suffix in (".pids", ".statuses", ".log"):
        log.with_suffix(suffix).unlink(missing_ok=True)
    process = FORK.Process(target=be_launcher, args=(config, log, {**environment, MARK: str(log)}, ends_others))
    process.start()
    return Launched(process, log)


def be_launcher(config: Path, log: Path, environment: Mapping[str, str], ends_others: bool) -> None:
    """Fork the ranks, keep their store, and wait for them, in a session of its own."""
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {**environment, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    os.environ |= {"WORLD_SIZE": str(NUM_RANKS), "LOCAL_WORLD_SIZE": str(NUM_RANKS)}
    os.environ |= {"TORCHELASTIC_RUN_ID": "chaos", "TORCHELASTIC_RESTART_COUNT": "0"}
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True"}
    ranks = [FORK.Process(target=be_rank, args=(rank, config)) for rank in range(NUM_RANKS)]
    for process in ranks:
        process.start()
    store = TCPStore("127.0.0.1", port, None, True, wait_for_workers=False)  # behind the forks: it has threads
    write(log.with_suffix(".pids"), [process.pid for process in ranks])
    wait_for_ranks(ranks, ends_others)
    write(log.with_suffix(".statuses"), [process.exitcode for process in ranks])
    del store
    sys.exit(any(process.exitcode for process in ranks))


def write(path: Path, values: list[int | None]) -> None:
    """Write the values so that a reader sees all or none."""
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(json.dumps(values))
    unfinished.rename(path)


def wait_for_ranks(ranks: list[ForkProcess], ends_others: bool) -> None:
    """Wait for the ranks. If one fails, end the other."""
    limit = float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "30"))
    ended = None
    while any(process.is_alive() for process in ranks):
        time.sleep(POLL_SECONDS)
        if ended is None and ends_others and any(process.exitcode for process in ranks):
            ended = time.monotonic()
            for process in ranks:
                process.terminate()
        if ended is not None and time.monotonic() - ended > limit:
            for process in ranks:
                process.kill()


def be_rank(rank: int, config: Path) -> None:
    """Be one rank: what `python -m launch.train CONFIG` does."""
    from launch import cli

    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"}
    cli.end_process_after(lambda: train_and_note(config))


def train_and_note(config: Path) -> int:
    """Train, and write down which modules that took."""
    from launch import cli

    status = cli.run("train", [str(config)])
    if not status and os.environ["RANK"] == "0":
        config.with_suffix(".modules").write_text("\n".join(sys.modules))
    return status


def wait_until_dead(pid: int, seconds: float) -> float:
    """Wait until a process has ended, and return the seconds that it took. Raises TimeoutError."""
    begin = time.monotonic()
    while is_alive(pid):
        if time.monotonic() - begin > seconds:
            raise TimeoutError(f"process {pid} has not ended within {seconds:g} s")
        time.sleep(0.01)
    return time.monotonic() - begin
