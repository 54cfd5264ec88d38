"""`starts.jsonl`: a line per start of a run or an evaluation, with the command, the machine and versions."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import yaml

from rl_vlm.config import yaml_text
from rl_vlm.config.secrets import starred, without_secrets
from rl_vlm.log.files import atomic_write

STARTS = "starts.jsonl"
LAUNCHERS = {
    "accelerate": "accelerate", "torchrun": "torchrun", "deepspeed": "deepspeed",
    "accelerate.commands.launch": "accelerate launch", "torch.distributed.run": "torchrun",
}  # fmt: skip
"""Commands of launchers, by script or module."""
PACKAGES = """
    rl-vlm torch torchvision transformers accelerate peft datasets pillow numpy vllm deepspeed bitsandbytes trl
""".split()

EMPTY: dict[str, Any] = {
    "command": "",
    "folder": "",
    "started": "",
    "processes": 1,
    "device": "",
    "platform": "",
    "python": "",
    "packages": {},
    "proof": {},
    "proofs": {},
}
"""Default entries of a line, since lines of other versions may have fewer entries."""


def describe_start(num_processes: int) -> dict[str, Any]:
    """Describe this start: the command, time and folder, the device, and versions of the platform and packages.

    If there are several processes, give their launcher's command.
    """
    return {
        "command": launcher_command() if num_processes > 1 else command_line(sys.argv),
        "folder": os.getcwd(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "processes": num_processes,
        "device": device_name(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := installed_version(name))},
    }


def command_line(arguments: list[str]) -> str:
    """Return the command as a user can type it: installed scripts without folder, modules of `launch` by name.

    Secrets are starred out.
    """
    script = Path(arguments[0])
    program = [script.name]
    if script.name == "ipykernel_launcher.py":
        return "(from a notebook)"
    if script.suffix == ".py":
        program = (
            ["python", "-m", f"launch.{script.stem}"] if script.parent.name == "launch" else ["python", str(script)]
        )
    return shlex.join([*program, *map(without_secrets_in, arguments[1:])])


def launcher_command() -> str:
    """Return the command of the launcher that started this process, such as torchrun or `accelerate launch`.

    If there is no launcher, or its command cannot be read, return this process's own command.
    """
    try:
        arguments = Path(f"/proc/{os.getppid()}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        arguments = []
    for i, argument in enumerate(arguments):
        if launcher := LAUNCHERS.get(Path(argument).name):
            return f"{launcher} {shlex.join(map(without_secrets_in, arguments[i + 1 :]))}"
    return command_line(sys.argv)


def without_secrets_in(argument: str) -> str:
    """Replace secrets in an argument of a command by `***`: values of secret settings, and text like a secret."""
    key, equals, text = argument.partition("=")
    try:
        value = yaml_text.parse(text) if equals else None
    except yaml.YAMLError:
        value = None
    if (public := starred(value, key.rpartition(".")[2].lstrip("-"))) != value:
        return f"{key}={yaml_text.one_line(public)}"
    return without_secrets(argument)


def installed_version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def device_name() -> str:
    """Return the name of the accelerator, or the number of CPU cores."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    if torch.accelerator.is_available():
        return str(torch.accelerator.current_accelerator())
    return f"{os.cpu_count()} CPU cores ({platform.machine()})"


def append_start(folder: Path, num_processes: int, is_first: bool) -> None:
    """Append a line about this start to the file in `folder`. If `is_first`, replace an earlier file."""
    with (folder / STARTS).open("w" if is_first else "a") as file:
        file.write(json.dumps(describe_start(num_processes)) + "\n")


def add_proof(folder: Path, proof: dict[str, Any], name: str | None = None) -> None:
    """Add the results of a start's proof to its line.

    `name` is the model's, if a start evaluates several.
    """
    *earlier, last = (folder / STARTS).read_text().split("\n")[:-1]
    start = EMPTY | json.loads(last)
    added = {"proof": proof} if name is None else {"proofs": start["proofs"] | {name: proof}}
    lines = [*earlier, json.dumps(start | added)]
    with atomic_write(folder / STARTS) as file:
        file.write_text("".join(f"{line}\n" for line in lines))


def last_proof(folder: Path) -> dict[str, Any] | None:
    """Return the results of the last proof of a start, or None if there was none."""
    proofs = [start["proof"] for start in read_starts(folder) if start["proof"]]
    return proofs[-1] if proofs else None


def read_starts(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of the file in `folder`, if there is one."""
    path = folder / STARTS
    return [EMPTY | json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.is_file() else []
