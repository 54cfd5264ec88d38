"""Compare the ranks of a launch before anything is loaded. Every rank sends a report to rank 0."""

from __future__ import annotations

import json
import os
import platform
import secrets
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from hashlib import blake2b
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from rl_vlm.config.changes import flat_settings
from rl_vlm.config.named_files import local_file
from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.installation import installed_versions
from rl_vlm.distributed.launch_variables import read_launch
from rl_vlm.distributed.launcher import check_variables
from rl_vlm.distributed.meeting_point import connect
from rl_vlm.errors import ConfigError, Finding, LaunchError, Severity, shorten
from rl_vlm.tools.checks.diagnosis import Checking, Note
from rl_vlm.tools.checks.machine import existing, unreachable_servers
from rl_vlm.tools.checks.table import Subject

LIMIT = timedelta(seconds=60)
"""Time limit for the report of a rank. Launchers on other machines may start later."""
LARGEST_OFFSET = 1.0
"""Clocks may differ by this many seconds without a finding."""
HASHED = 2**20
"""Number of bytes that are hashed at the beginning and at the end of a file."""
MOST_FILES = 1000
CONNECT_SECONDS = 5.0

Facts = dict[str, dict[str, Any]]
"""Values that must be equal on all ranks, by kind and name."""
KINDS: dict[str, tuple[Severity, str]] = {
    "settings": ("error", "Start every machine with the same config file, overrides and options of the launcher."),
    "packages": ("error", "Install the same versions on every machine."),
    "files": ("error", "Copy the files of one machine to the others, or put them on a file system that all share."),
    "device": ("warning", "Use the same kind of GPU on every machine, or plan for the smallest."),
}
"""Severity and remedy of a difference, by its kind."""
CLOCK = "Set the clocks of the machines by NTP: times in logs and of files cannot be compared."
SHARED = "Put train.output_dir on a file system that all machines share: every rank writes a part of a checkpoint."
SILENT = "Start the command on every machine. Look for an error of this rank above, and for a firewall."
NETWORK = (
    "Open the ports of the machines to each other, or choose the interface: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME."
)


class Exchange:
    """Messages between ranks, through the launcher's store."""

    def __init__(self) -> None:
        """Join the store. Raises LaunchError if the launch variables do not fit together."""
        check_variables()
        self.rank, self.world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.store = connect("doctor", LIMIT)

    def put(self, key: str, value: Any) -> None:
        """Leave a message. `value` must be JSON-serializable."""
        self.store.set(key, json.dumps(value))

    def take(self, key: str) -> Any:
        """Wait for a message and return it. Raises TimeoutError if there is none after `LIMIT`."""
        try:
            self.store.wait([key], LIMIT)
            return json.loads(self.store.get(key))
        except RuntimeError as error:  # torch's store raises several subclasses of it
            raise TimeoutError(f"no message {key} within {LIMIT.seconds} s") from error


class Compared(NamedTuple):
    """The messages between ranks after they were compared."""

    exchange: Exchange
    differ: bool
    """Whether a difference is an error."""


def compared(subject: Subject) -> Checking[Compared]:
    """Compare all ranks with rank 0, before anything is loaded."""
    exchange, differ = Exchange(), False
    for found in compare_ranks(subject.config, exchange):
        yield found
        differ = differ or (isinstance(found, Finding) and found.severity == "error")
    return Compared(exchange, differ)


def compare_ranks(config: RunConfig, exchange: Exchange) -> Checking[None]:
    """Compare all ranks with rank 0. Every rank yields the same findings."""
    with listening() as port:
        report = {"who": f"{socket.gethostname()}, process {os.getpid()}", "facts": facts_of(config)}
        report["servers"] = [finding.what for finding in unreachable_servers(config)]
        exchange.put(f"address/{exchange.rank}", [own_address(), port])
        report["unreachable"] = unreachable_neighbour(exchange)
        with shared_probe(config, exchange) as report["sees_output_dir"]:
            report["offset"] = clock_offset(exchange)
            exchange.put(f"report/{exchange.rank}", report)
            if exchange.rank == 0:
                exchange.put("findings", [vars(finding) for finding in judged(exchange, report)])
            for finding in exchange.take("findings"):
                yield Finding(**finding | {"rows": ()})  # JSON has no tuples
            end_together(exchange, "told")
    compared = ", ".join(f"{len(report['facts'][kind])} {kind}" for kind in KINDS)
    yield Note(f"{exchange.world_size} ranks: {compared}; clocks, the output directory, and connections between ranks")


def end_together(exchange: Exchange, name: str) -> None:
    """Tell rank 0 that this rank is done. Rank 0 waits for the others, since the store and its files end with it.

    `name` tells this end from other ends of the launch.
    """
    exchange.put(f"{name}/{exchange.rank}", True)
    for rank in range(1, exchange.world_size) if exchange.rank == 0 else ():
        with suppress(TimeoutError):
            exchange.store.wait([f"{name}/{rank}"], timedelta(seconds=CONNECT_SECONDS))


def judged(exchange: Exchange, own: Mapping[str, Any]) -> Iterator[Finding]:
    """Compare the reports of all ranks with rank 0's own report."""
    yield from broken_connections("rank 0", own)
    for rank in range(1, exchange.world_size):
        try:
            yield from differences(rank, exchange.take(f"report/{rank}"), own)
        except TimeoutError:
            what = f"rank {rank} has not reported within {LIMIT.seconds} s"
            yield Finding("error", "silent rank", what, SILENT)


def differences(rank: int, report: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding for each difference between the report of a rank and rank 0's own report."""
    who = f"rank {rank} ({report['who']})"
    for kind, (severity, remedy) in KINDS.items():
        for name, what in unequal(report["facts"][kind], own["facts"][kind]):
            yield Finding(severity, f"{kind} that differ from rank 0's", f"{who}: {name}: {what}", remedy)
    offset, error = report["offset"]
    if abs(offset) > LARGEST_OFFSET + error:
        yield Finding("warning", "clock", f"{who}: its clock is {offset:+.1f} s from rank 0's", CLOCK)
    if not report["sees_output_dir"]:
        what = f"{who}: it does not see the files that rank 0 writes to train.output_dir"
        yield Finding("error", "output directory", what, SHARED)
    yield from broken_connections(who, report)


def broken_connections(who: str, report: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield a finding if a rank cannot reach the next rank, and for each server that it cannot reach."""
    if report["unreachable"]:
        yield Finding("error", "network", f"{who}: {report['unreachable']}", NETWORK)
    for what in report["servers"]:
        yield Finding("error", "server", f"{who}: {what}", NETWORK)


def unequal(found: Mapping[str, Any], expected: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield each name whose values differ, with a text that shows both values."""
    for name in sorted(found.keys() | expected.keys()):
        here, there = (str(facts.get(name, "missing")) for facts in (found, expected))
        if here != there:
            equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(here, there, strict=False)))
            start = max(0, equal - 20) if max(len(here), len(there)) > 80 else 0
            here, there = ("…" * bool(start) + shorten(text[start:], 80) for text in (here, there))
            yield name, f"{here} instead of {there}"


def facts_of(config: RunConfig) -> Facts:
    """Collect the values that must be equal on all ranks. Load neither model nor data."""
    import torch

    packages = {"python": platform.python_version(), **installed_versions(), "rl-vlm's source": own_source()}
    cuda = torch.cuda.is_available()
    device = (
        {"GPU": f"{torch.cuda.get_device_name()}, {torch.cuda.device_count()} of them"} if cuda else {"GPU": "none"}
    )
    settings = flat_settings(config) | launch_facts()
    return {"settings": settings, "packages": packages, "files": named_files(config), "device": device}


def launch_facts() -> dict[str, str]:
    """Return the launcher's request, with one value per key of its sections. If it cannot be read, return the error."""
    try:
        request = vars(read_launch())
    except LaunchError as error:
        return {"launcher's request": str(error)}
    return {
        f"launcher's {name}": str(value) for key, section in request.items() for name, value in leaves(key, section)
    }


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield each value of nested mappings, with its dotted name."""
    if not isinstance(value, Mapping):
        yield name, value
        return
    for key, inner in value.items():
        yield from leaves(f"{name}.{key}", inner)


def own_source() -> str:
    """Return a digest of the source code of this project."""
    specs = filter(None, map(find_spec, ("rl_vlm", "rewards", "launch")))
    folders = [Path(folder) for spec in specs for folder in spec.submodule_search_locations or []]
    files = [path for folder in folders for path in sorted(folder.rglob("*.py"))]
    return blake2b(b"".join(path.read_bytes() for path in files), digest_size=8).hexdigest()


def named_files(config: RunConfig) -> dict[str, str]:
    """Return size and digest of each file that the settings name: data, reward functions, tools and model."""
    entries = [*config.data.entries("train"), *config.data.entries("eval")]
    names = [
        config.model.model_name_or_path,
        *(spec.function for spec in config.rewards.specs),
        *config.rollout.functions,
    ]
    names += [name for entry in entries for name in (entry.name, entry.image_root, entry.video_root)]
    names += [config.data.image_root, config.data.video_root]
    paths = dict.fromkeys(path for name in names if name and (path := local_file(name)))
    return {name: what for path in paths for name, what in described(path).items()}


def described(path: Path) -> dict[str, str]:
    """Return size and digest of a file. For a folder, count its files and describe those with data or weights."""
    if path.is_file():
        return {str(path): digest(path)}
    if not path.is_dir():
        return {str(path): "missing"}
    files = sorted(file for file in path.iterdir() if file.is_file())
    known = [file for file in files if file.suffix in (".json", ".jsonl", ".parquet", ".safetensors", ".bin", ".model")]
    return {str(path): f"{len(files)} files"} | {str(file): digest(file) for file in known[:MOST_FILES]}


def digest(path: Path) -> str:
    """Return the size of a file and a digest of its beginning and end."""
    size = path.stat().st_size
    with path.open("rb") as file:
        content = file.read(HASHED)
        file.seek(max(size - HASHED, len(content)))
        content += file.read(HASHED)
    return f"{size} bytes, {blake2b(content, digest_size=8).hexdigest()}"


@contextmanager
def listening() -> Iterator[int]:
    """Accept connections on every interface. Yield the port."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


def own_address() -> str:
    """Return the address from which this machine reaches the launcher's store."""
    with socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), CONNECT_SECONDS) as made:
        return made.getsockname()[0]


def unreachable_neighbour(exchange: Exchange) -> str | None:
    """Connect to the next rank. Return a message if that fails, else None."""
    other = (exchange.rank + 1) % exchange.world_size
    try:
        address, port = exchange.take(f"address/{other}")
        socket.create_connection((address, port), CONNECT_SECONDS).close()
    except OSError as error:  # TimeoutError is one
        return f"rank {other} cannot be reached: {error}"
    return None


@contextmanager
def shared_probe(config: RunConfig, exchange: Exchange) -> Iterator[bool]:
    """Let rank 0 write a file to `output_dir`, or to its first parent that exists. Yield whether this rank sees it."""
    folder = existing(Path(config.train.output_dir).absolute())
    if exchange.rank != 0:
        yield (folder / exchange.take("probe")).is_file()
        return
    probe = folder / f".rl-vlm-doctor-{secrets.token_hex(8)}"
    try:
        probe.touch()
    except OSError as error:
        raise ConfigError(f"train.output_dir: rank 0 cannot write to {folder}: {error.strerror}") from error
    try:
        exchange.put("probe", probe.name)
        yield True
    finally:
        probe.unlink()


def clock_offset(exchange: Exchange) -> tuple[float, float]:
    """Measure by how many seconds this rank's clock is ahead of rank 0's. Also return the uncertainty in seconds.

    Rank 0 sends its time to one rank after the other. The uncertainty is half of the time between question and answer
    (Cristian's algorithm, 1989).
    """
    if exchange.rank == 0:
        for rank in range(1, exchange.world_size):
            with suppress(TimeoutError):
                exchange.put(f"turn/{rank}", True)
                exchange.take(f"ask/{rank}")
                exchange.put(f"time/{rank}", time.time())
        return 0.0, 0.0
    exchange.take(f"turn/{exchange.rank}")
    before = time.time()
    exchange.put(f"ask/{exchange.rank}", True)
    there = exchange.take(f"time/{exchange.rank}")
    after = time.time()
    return (before + after) / 2 - there, (after - before) / 2
