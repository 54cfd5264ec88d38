"""vLLM servers as processes of this machine: started on free ports, watched until they answer, and stopped."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rl_vlm.config.schema import VLLMConfig
from rl_vlm.distributed.signals import stop
from rl_vlm.errors import ConfigError, RolloutError
from rl_vlm.rollout.vllm.arguments import ENVIRONMENT, model_runner
from rl_vlm.rollout.vllm.client import TOKEN, VLLMClient
from rl_vlm.rollout.vllm.plugin import LIFELINE

LOOPBACK = "127.0.0.1"
STOP_SECONDS = 10
LAST_LINES = 15


class ServerProcess:
    """A vLLM server process. It does not outlive this process."""

    def __init__(
        self, arguments: dict[str, Any], environment: dict[str, str], log: Path, host: str, port: int | None = None
    ) -> None:
        """`arguments` go to vLLM's engine. Returns before the server answers."""
        self.port = free_port(host, port or 0)
        self.url = f"http://{host}:{self.port}"
        self.log = log
        command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry", *flags(arguments)]
        command += ["--host", host, "--port", str(self.port), "--enable-scale-out", "--disable-uvicorn-access-log"]
        command += ["--middleware", "rl_vlm.rollout.vllm.plugin.RequireToken"]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("w") as output:
            self.process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the trainer handles interrupts at the terminal
            )

    def check_running(self) -> None:
        """Raise RolloutError, with the end of the log, if the server has exited."""
        status = self.process.poll()
        if status is not None:
            raise self.failure(f"ended with status {status}")

    def failure(self, found: str) -> RolloutError:
        """Build an error that shows the end of the log."""
        end = "\n".join(self.log.read_text(errors="replace").splitlines()[-LAST_LINES:])
        return RolloutError(f"The vLLM server {self.url} {found}. The end of {self.log}:\n{end}")

    def stop(self) -> None:
        """Stop the server and all processes that it started."""
        if self.process.poll() is None:
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(STOP_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)  # remaining processes of its session
        self.process.wait()


def start_servers(
    arguments: dict[str, Any], settings: VLLMConfig, token: str, logs: Path, host: str, port: int | None = None
) -> list[ServerProcess]:
    """Start the configured servers, on consecutive ports from `port`, or on free ones. Does not wait for them.

    Raises ConfigError if vLLM is not installed, or if the environment chooses another model runner than the settings.
    Raises RolloutError if a port is taken.
    """
    if find_spec("vllm") is None:
        raise ConfigError("vLLM servers need the package vllm: set up GPUs with `make gpu`, or use rollout.engine: hf")
    devices = settings.vllm_server_devices or [None] * settings.vllm_num_servers
    return [
        ServerProcess(
            arguments, server_environment(settings, token, device), logs / f"{i}.log", host, port and port + i
        )
        for i, device in enumerate(devices)
    ]


def wait_until_healthy(servers: Sequence[ServerProcess], clients: Sequence[VLLMClient], timeout: float) -> None:
    """Wait until all servers answer. Counts as progress, and a stop of the run ends it.

    Raises RolloutError, with the end of a log, as soon as a server exits, or after `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    waiting = dict(zip(servers, clients, strict=True))
    while True:
        stop.check()
        for server in servers:
            server.check_running()
        waiting = {server: client for server, client in waiting.items() if not client.is_healthy()}
        if not waiting:
            return
        if time.monotonic() > deadline:
            raise next(iter(waiting)).failure(f"did not answer within {timeout:g} s (vllm.vllm_server_timeout)")
        time.sleep(0.5)


def stop_servers(servers: Sequence[ServerProcess]) -> None:
    """Stop all servers, at the same time."""
    for server in servers:
        server.process.terminate()
    for server in servers:
        server.stop()


def free_port(host: str, port: int = 0) -> int:
    """Return `port` if it is free, or any free port if it is 0. Raises RolloutError if the port is taken."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError, UnicodeError) as error:  # no such port, no such name
            raise RolloutError(f"No server can listen on port {port} of {host}: {error}. Choose another.") from None
        return probe.getsockname()[1]


def flags(arguments: dict[str, Any]) -> list[str]:
    """Convert arguments, by the names of `EngineArgs`, to command-line options of vLLM's server."""
    words = []
    for name, value in arguments.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def server_environment(settings: VLLMConfig, token: str, device: str | None) -> dict[str, str]:
    """Return a server's environment: this process's, without the launcher's variables, plus the plugin's.

    `device` is its CUDA_VISIBLE_DEVICES.
    """
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")
    inherited = {name: value for name, value in os.environ.items() if name not in launcher}
    ours = {
        TOKEN: token,
        LIFELINE: "1",
        "VLLM_PLUGINS": "rl_vlm",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_HOST_IP": LOOPBACK,  # its internal processes check no token, so they stay on loopback
        "VLLM_LOOPBACK_IP": LOOPBACK,
    }
    if device is not None:
        ours["CUDA_VISIBLE_DEVICES"] = device
    own_limit = {"VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(settings.vllm_server_timeout))}  # 600 by default
    return ENVIRONMENT | own_limit | inherited | ours | model_runner(settings.vllm_model_runner)
