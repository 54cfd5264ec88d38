"""Check the machine of a run: versions of packages, ports, servers, shared memory, and free disk space."""

from __future__ import annotations

import math
import platform
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.installation import VERSION, faults, installed_versions
from rl_vlm.errors import Finding, Problem
from rl_vlm.model.families import FAMILIES
from rl_vlm.plan.hardware import GIB
from rl_vlm.plan.sharding import state_bytes
from rl_vlm.plan.weights import Weights
from rl_vlm.rollout.vllm.process import LOOPBACK, free_port
from rl_vlm.tools.checks.diagnosis import Checking, Note, attempt_call
from rl_vlm.tools.checks.table import Subject

SHOWN = ("torch", "transformers", "accelerate", "peft", "vllm", "deepspeed")
SHARED_MEMORY = Path("/dev/shm")
LEAST_SHARED = GIB
"""With less shared memory, workers and vLLM often fail. Docker gives a container 64 MiB by default."""
NO_PORT = Problem("no free port", "Stop programs that use ports of this machine: no port is free.")


def machine(subject: Subject) -> Checking[None]:
    """Check packages, drivers, ports, servers to join, and shared memory."""
    config, installed = subject.config, installed_versions()
    shown = [f"{name} {installed[name]}" for name in SHOWN if name in installed]
    yield Note(f"versions: {', '.join([f'python {platform.python_version()}', *shown])}")
    yield from faults(config)
    yield from unreachable_servers(config)
    yield from small_shared_memory(config)
    if config.rollout.facts.uses_servers and not config.vllm.vllm_server_base_url:
        ports = yield from attempt_call(NO_PORT, free_ports, config.vllm.vllm_num_servers + 1)
        if ports:
            yield Note(f"ports for servers and for weights: {len(ports)} can be opened on {LOOPBACK}")


def free_ports(count: int) -> set[int]:
    """Return up to `count` different ports that can be opened. Raises an error if there is none."""
    return {free_port(LOOPBACK) for _ in range(count)}


def old_transformers(model_type: str, installed: str) -> Iterator[Finding]:
    """Yield a finding if this version of transformers is too old for the model's family."""
    family = FAMILIES.get(model_type)
    if family is not None and not family.is_available:
        what = f"{model_type} needs transformers {family.since}; {installed} is installed"
        yield Finding("error", VERSION, what, f"pip install 'transformers>={family.since}'")


def unreachable_servers(config: RunConfig) -> Iterator[Finding]:
    """Yield a finding for each server that the run joins and that does not accept connections."""
    for url in config.vllm.vllm_server_base_url if config.rollout.facts.uses_servers else []:
        address = urlsplit(url)
        try:
            port = address.port or (443 if address.scheme == "https" else 80)
            socket.create_connection((address.hostname or "", port), timeout=5).close()
        except (OSError, ValueError) as error:
            what = f"the server {url} cannot be reached: {error}"
            yield Finding("error", "server", what, "Start it with `rl-vlm serve`, or correct its address.")


def small_shared_memory(config: RunConfig) -> Iterator[Finding]:
    """Yield a finding if data workers or vLLM need shared memory and less than `LEAST_SHARED` is free."""
    uses = config.data.dataloader_num_workers > 0 or config.rollout.facts.passes_shared_memory
    if not uses or not SHARED_MEMORY.is_dir() or (free := free_bytes(SHARED_MEMORY)) >= LEAST_SHARED:
        return
    what = f"{SHARED_MEMORY} has {free // 2**20} MiB free, and data workers and vLLM pass tensors through it"
    remedy = "Give the container more (docker run --shm-size=8g, or --ipc=host), or set data.dataloader_num_workers: 0."
    yield Finding("warning", "shared memory", what, remedy)


def check_disk(config: RunConfig, weights: Weights, num_steps: int) -> Checking[None]:
    """Compare the free space for `output_dir` with the size of one checkpoint, and of all that the run keeps."""
    path = Path(config.train.output_dir).absolute()
    free = free_bytes(path)
    one, kept = checkpoint_bytes(config, weights), num_kept(config, num_steps)
    needed = one * kept
    figures = f"{path}: {gib(free)} free; a checkpoint takes {gib(one)}, and {kept} are on disk at once: {gib(needed)}"
    remedy = "Free space, choose another train.output_dir, or set train.save_total_limit or a larger train.save_steps."
    if free >= needed:
        yield Note(f"disk space of {figures}")
    else:
        yield Finding("error" if free < one else "warning", "disk space", figures, remedy)


def free_bytes(path: Path) -> int:
    """Return the free bytes of a path's file system. The path need not exist yet."""
    return shutil.disk_usage(existing(path)).free


def existing(path: Path) -> Path:
    """Return the directory at an absolute path, or the first one above it that exists."""
    return next(place for place in (path, *path.parents) if place.is_dir())


def checkpoint_bytes(config: RunConfig, weights: Weights) -> int:
    """Return the bytes of a checkpoint: model or adapter, optimizer state, and the reference model if it moves."""
    model = weights.trained_bytes if config.model.use_peft else weights.bytes
    reference = weights.reference_bytes if config.algorithm.sync_ref_model else 0
    return model + state_bytes(weights, config.train.optim) + reference


def num_kept(config: RunConfig, num_steps: int) -> int:
    """Return the maximum number of checkpoints on disk. An old one is deleted only after a new one is written."""
    train = config.train
    written = math.ceil(num_steps / train.save_steps) if train.save_steps else 1
    return min(written, train.save_total_limit + 1) if train.save_total_limit else written


def gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
