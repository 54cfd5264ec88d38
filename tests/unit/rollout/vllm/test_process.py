"""Starting servers, as far as it needs no vLLM."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rl_vlm.config.schema import VLLMConfig
from rl_vlm.distributed import sign_of_life
from rl_vlm.distributed.signals import stop
from rl_vlm.errors import ConfigError, RolloutError, Stopped
from rl_vlm.rollout.vllm import process as vllm_process
from rl_vlm.rollout.vllm.client import VLLMClient
from rl_vlm.rollout.vllm.process import (
    ServerProcess,
    flags,
    free_port,
    server_environment,
    start_servers,
    wait_until_healthy,
)
from rl_vlm.tools.serving.server import ChatServer

HOST = "127.0.0.1"


def test_a_port_that_is_taken_is_named():
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        assert free_port(HOST) != port
        with pytest.raises(RolloutError, match=rf"No server can listen on port {port} of {HOST}: .*in use"):
            free_port(HOST, port)
    assert free_port(HOST, port) == port


@pytest.mark.parametrize(("host", "port"), [(HOST, 65536), ("x" * 300, 0), ("a..b", 0), ("::1", 0)])
def test_an_address_that_cannot_be_is_named(host, port):
    with pytest.raises(RolloutError, match=rf"No server can listen on port {port} of .*Choose another"):
        free_port(host, port)
    with pytest.raises(ConfigError, match=rf"port {port} of .* cannot be used .* choose another --port or --host"):
        ChatServer(host, port)


def test_servers_get_their_devices_and_ports_in_turn(monkeypatch):
    started = []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(vllm_process, "find_spec", lambda name: name)
    monkeypatch.setattr(
        ServerProcess,
        "__init__",
        lambda self, arguments, environment, log, host, port: started.append(
            (arguments, environment["RL_VLM_SERVER_TOKEN"], log, host, environment.get("CUDA_VISIBLE_DEVICES"), port)
        ),
    )
    settings = VLLMConfig(vllm_num_servers=2, vllm_server_devices=["6", "7"])
    start_servers({"model": "m"}, settings, "token", Path("logs"), HOST, 8000)
    start_servers({"model": "m"}, VLLMConfig(), "token", Path("logs"), HOST)
    logs = [Path("logs/0.log"), Path("logs/1.log")]
    assert started == [
        ({"model": "m"}, "token", logs[0], HOST, "6", 8000),
        ({"model": "m"}, "token", logs[1], HOST, "7", 8001),
        ({"model": "m"}, "token", logs[0], HOST, None, None),
    ]


def test_vllm_is_missed_by_name(monkeypatch):
    monkeypatch.setattr(vllm_process, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"need the package vllm: set up GPUs with `make gpu`"):
        start_servers({}, VLLMConfig(), "token", Path("logs"), HOST)


def test_options_of_a_server():
    arguments = {"model": "m", "enforce_eager": True, "trust_remote_code": False, "limit_mm_per_prompt": {"video": 0}}
    words = ["--model", "m", "--enforce-eager", "--no-trust-remote-code", "--limit-mm-per-prompt", '{"video": 0}']
    assert flags(arguments) == words


def test_a_server_is_no_rank_of_the_trainer_and_keeps_to_this_machine(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    found = server_environment(VLLMConfig(), "secret", "5")
    assert "RANK" not in found
    assert found["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert (found["RL_VLM_SERVER_TOKEN"], found["CUDA_VISIBLE_DEVICES"]) == ("secret", "5")
    assert (found["VLLM_HOST_IP"], found["VLLM_LOOPBACK_IP"]) == (HOST, HOST)


def test_vllm_waits_for_its_own_engine_as_long_as_the_run_waits_for_the_server(monkeypatch):
    settings = VLLMConfig(vllm_server_timeout=99.5)
    assert server_environment(settings, "", None)["VLLM_ENGINE_READY_TIMEOUT_S"] == "100"
    monkeypatch.setenv("VLLM_ENGINE_READY_TIMEOUT_S", "7")
    assert server_environment(settings, "", None)["VLLM_ENGINE_READY_TIMEOUT_S"] == "7"


class Starting(ServerProcess):
    """A process in the place of a vLLM server that starts."""

    def __init__(self, program: str, log: Path) -> None:
        self.url, self.log = f"http://{HOST}:{free_port(HOST)}", log
        self.log.write_text(f"log of {program}")
        self.process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)


@pytest.fixture
def starting(tmp_path: Path) -> Iterator[Starting]:
    server = Starting("import time; time.sleep(60)", tmp_path / "0.log")
    yield server
    server.stop()


def client_of(server: ServerProcess) -> VLLMClient:
    return VLLMClient(server.url, "token", 1.0)


def test_a_server_that_dies_is_noticed_while_another_one_starts(starting: Starting, tmp_path: Path):
    dying = Starting("raise SystemExit(3)", tmp_path / "1.log")
    start = time.monotonic()
    with pytest.raises(RolloutError, match=rf"(?s)server {dying.url} ended with status 3.*log of raise SystemExit"):
        wait_until_healthy([starting, dying], [client_of(starting), client_of(dying)], timeout=600.0)
    assert time.monotonic() - start < 30


def test_a_server_that_takes_too_long_shows_its_log(starting: Starting):
    with pytest.raises(RolloutError, match=r"(?s)did not answer within 0.1 s \(vllm.vllm_server_timeout\).*log of"):
        wait_until_healthy([starting], [client_of(starting)], timeout=0.1)


def test_the_wait_for_a_server_is_progress_and_ends_with_the_run(starting: Starting, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sign_of_life, "_last_mark", time.monotonic() - 1000)
    with pytest.raises(RolloutError, match="did not answer"):
        wait_until_healthy([starting], [client_of(starting)], timeout=0.1)
    assert sign_of_life.seconds_without_sign() < 500
    monkeypatch.setattr(stop, "signum", 15)
    with pytest.raises(Stopped):
        wait_until_healthy([starting], [client_of(starting)], timeout=600.0)


@pytest.mark.parametrize(("runner", "value"), [("auto", None), ("v1", "0"), ("v2", "1")])
def test_servers_get_their_model_runner(runner, value, monkeypatch):
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    environment = server_environment(VLLMConfig(vllm_model_runner=runner), "", None)
    assert environment.get("VLLM_USE_V2_MODEL_RUNNER") == value
