"""Waiting for a server: as long as it is well, and no longer."""

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rl_vlm.errors import RolloutError
from rl_vlm.rollout.vllm import client as vllm_client
from rl_vlm.rollout.vllm.client import ServerLost, VLLMClient


class Server(ThreadingHTTPServer):
    """Answers as it is told to; what hangs does so until the test is over."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.status, self.body, self.seconds = 200, b"{}", 0.0
        self.is_well = True
        self.over = threading.Event()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that has given up takes no answer."""

    def client(self, timeout: float) -> VLLMClient:
        return VLLMClient(f"http://127.0.0.1:{self.server_port}", "token", timeout)


class Handler(BaseHTTPRequestHandler):
    server: Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        if self.path != "/health":
            self.server.over.wait(self.server.seconds)
        elif not self.server.is_well:
            self.server.over.wait()
        self.send_response(self.server.status)
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(vllm_client, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(vllm_client, "HEALTH_SECONDS", 0.3)
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server
        server.over.set()
        server.shutdown()


def test_a_slow_answer_is_awaited(server):
    server.seconds, server.body = 0.8, b'{"weights": 3}'
    assert server.client(timeout=20.0).get("/weight_info") == {"weights": 3}


def test_a_server_that_hangs_is_lost_long_before_its_time_is_up(server):
    server.seconds, server.is_well = 20.0, False
    begin = time.monotonic()
    with pytest.raises(ServerLost, match=rf"{server.client(20.0).url} does not answer \(timed out after 0.3 s\)"):
        server.client(timeout=20.0).get("/weight_info")
    assert time.monotonic() - begin < 5


def test_a_healthy_server_has_its_time_and_no_more(server):
    server.seconds = 20.0
    with pytest.raises(ServerLost, match=r"does not answer \(timed out after 0.5 s\)"):
        server.client(timeout=0.5).get("/weight_info")


@pytest.mark.parametrize(
    ("status", "kind", "message"),
    [
        (400, RolloutError, "answers 400 to /v1/models: no such adapter"),
        (401, RolloutError, r"refuses the token: set RL_VLM_SERVER_TOKEN to the server's value\."),
        (500, ServerLost, "answers 500 to /v1/models: no such adapter"),
    ],
)
def test_what_a_refusal_means(status, kind, message, server, monkeypatch):
    monkeypatch.setattr(vllm_client, "WATCH_SECONDS", 60.0)  # else a health check may be refused first
    server.status, server.body = status, b"no such adapter"
    with pytest.raises(RolloutError, match=message) as refusal:
        server.client(timeout=5.0).get("/v1/models")
    assert type(refusal.value) is kind


def test_a_server_that_starts_late_is_awaited(server, caplog):
    server.status = 503
    threading.Timer(0.5, setattr, (server, "status", 200)).start()
    server.client(timeout=5.0).wait_until_up(20.0)
    (message,) = caplog.messages
    assert "answers 503 to /health" in message and message.endswith("It has 20 s to start (vllm.vllm_server_timeout).")


def test_a_server_that_does_not_start_is_lost(server):
    server.status = 503
    client = server.client(timeout=5.0)
    with pytest.raises(ServerLost, match=rf"{client.url} is not up after 0.2 s \(vllm.vllm_server_timeout\)"):
        client.wait_until_up(0.2)


def test_answers_without_json(server):
    server.body = b""
    assert server.client(timeout=5.0).get("/reset") is None
    server.body = b"Success: adapter loaded."
    assert server.client(timeout=5.0).get("/load") == "Success: adapter loaded."


def test_the_bytes_of_an_answer_are_bounded_by_its_tokens(server, monkeypatch):
    monkeypatch.setattr(vllm_client.http, "LARGEST_BODY", 1000)
    monkeypatch.setattr(vllm_client, "WATCH_SECONDS", 10.0)
    server.body = b"x" * (1000 + 1024)
    client = server.client(10.0)
    assert len(client.send("GET", "/weight_info", num_tokens=1)) == 2024
    server.body += b"x"
    with pytest.raises(ServerLost, match="answers with more than 0 MiB"):
        client.send("GET", "/weight_info", num_tokens=1)
