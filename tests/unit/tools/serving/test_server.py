"""Bounds of the endpoint's HTTP server: what clients can make it hold, and for how long."""

from __future__ import annotations

import gc
import json
import socket
import struct
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from rl_vlm.config.schema import DataConfig
from rl_vlm.tools.serving import server as module
from rl_vlm.tools.serving.batches import Batches
from rl_vlm.tools.serving.budget import Budget
from rl_vlm.tools.serving.protocol import ChatAnswer, ChatRequest, Choice, count_values
from rl_vlm.tools.serving.server import ChatHandler, ChatServer, Incoming
from rl_vlm.tools.serving.service import ChatService, check_served
from tests.helpers.chat_client import fetch

KEY = "secret"
BODY = json.dumps({"model": "m", "messages": [{"role": "user", "content": "Hello"}]}).encode()


class NoBatches(Batches):
    def __init__(self) -> None: ...

    def close(self) -> None: ...


class Service(ChatService):
    """Answers at once, or once `may_answer` is set."""

    def __init__(self) -> None:
        self.name = "m"
        self.batches = NoBatches()
        self.may_answer = threading.Event()
        self.may_answer.set()
        self.requests: list[float] = []

    def answer(self, request: ChatRequest, end: float, is_gone: Callable[[], bool]) -> ChatAnswer:
        check_served(request, self.name, DataConfig())
        self.requests.append(end)
        self.is_gone = is_gone
        self.may_answer.wait(20)
        return ChatAnswer("m", [Choice("Hi", "stop", 1)], 1)


@pytest.fixture
def service() -> Service:
    return Service()


@pytest.fixture
def server(service: Service) -> Iterator[ChatServer]:
    server = ChatServer("127.0.0.1", 0, KEY)
    server.start(service)
    yield server
    service.may_answer.set()
    server.stop()
    server.server_close()


def connect(server: ChatServer, sent: bytes = b"") -> socket.socket:
    client = socket.create_connection(("127.0.0.1", server.server_port), timeout=10)
    client.sendall(sent)
    return client


def head(length: int, key: str = KEY) -> bytes:
    return (
        f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {key}\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def status(client: socket.socket) -> int:
    """The status of the answer; 0 if the connection is closed without one."""
    with client:
        line = client.makefile().readline()
    return int(line.split()[1]) if line else 0


def post(server: ChatServer, answers: list[int]) -> threading.Thread:
    url = f"{server.url}/chat/completions"
    thread = threading.Thread(target=lambda: answers.append(fetch(url, BODY, f"Bearer {KEY}")[0]))
    thread.start()
    return thread


def wait_until(holds: Any) -> None:
    end = time.monotonic() + 10
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_the_key_is_checked_before_the_body_is_read(server):
    assert status(connect(server, head(10**6, "wrong"))) == 401
    assert server.body_bytes.left == server.body_bytes.total


def test_a_refused_body_is_read_to_its_end_and_not_kept(server):
    piece, num_pieces = b"x" * 2**20, 24
    tracemalloc.start()
    client = connect(server, head(num_pieces * len(piece), "wrong"))
    for _ in range(num_pieces):
        client.sendall(piece)
    assert status(client) == 401
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * 2**20


def with_text(text: str, **body: Any) -> bytes:
    return json.dumps({"model": "m", "messages": [{"role": "user", "content": text}], **body}).encode()


LARGE = "x" * 2**23
BODIES = {
    "taken": (200, with_text(LARGE)),
    "no JSON": (400, with_text(LARGE) + b"}"),
    "unknown parameter": (400, with_text(LARGE, unknown=LARGE)),
    "wrong value": (400, with_text(LARGE, n=LARGE)),
    "wrong model": (404, with_text(LARGE, model="other")),
}


@pytest.mark.parametrize(("expected", "body"), BODIES.values(), ids=BODIES)
def test_no_request_is_held_while_its_answer_is_sent(server, expected, body, monkeypatch):
    held, write, request = [], ChatHandler.write, head(len(body)) + body

    def watched(handler: ChatHandler, *answer: Any) -> None:
        held.append(tracemalloc.get_traced_memory()[0])
        write(handler, *answer)

    monkeypatch.setattr(ChatHandler, "write", watched)
    gc.disable()
    tracemalloc.start()
    try:
        assert status(connect(server, request)) == expected
    finally:
        tracemalloc.stop()
        gc.enable()
    assert held[0] < 2**20


def test_a_head_has_a_bounded_length(server):
    line = b"X: " + b"x" * 60_000 + b"\r\n"
    tracemalloc.start()
    client = connect(server, b"POST /v1/chat/completions HTTP/1.1\r\n")
    with client, suppress(ConnectionError):
        for _ in range(90):
            client.sendall(line)
        client.sendall(b"\r\n")
        assert client.recv(1) == b""
    wait_until(lambda: server.connections.left == server.connections.total)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


def test_a_body_of_too_many_values_is_not_parsed(server, monkeypatch):
    monkeypatch.setattr(module, "read_request", lambda content: pytest.fail("parsed"))
    body = with_text("Hello", metadata=[1] * module.MAX_VALUES)
    assert status(connect(server, head(len(body)) + body)) == 413


def test_requests_share_the_values_of_their_bodies(server, service):
    server.values = Budget(2 * count_values(BODY))
    service.may_answer.clear()
    answers: list[int] = []
    threads = [post(server, answers) for _ in range(3)]
    wait_until(lambda: len(service.requests) == 2)
    time.sleep(0.3)
    assert (len(service.requests), server.values.left) == (2, 0)
    service.may_answer.set()
    for thread in threads:
        thread.join()
    assert (answers, server.values.left) == ([200, 200, 200], server.values.total)


@pytest.mark.parametrize(("digits", "expected"), [("9" * 5000, 413), ("9" * 18, 413)])
def test_a_body_of_any_announced_length_is_refused(server, digits, expected):
    request = f"POST /v1/chat/completions HTTP/1.1\r\nAuthorization: Bearer {KEY}\r\nContent-Length: {digits}\r\n\r\n"
    assert status(connect(server, request.encode())) == expected


@pytest.mark.parametrize(("key", "expected"), [(KEY, [100, 200]), ("wrong", [401])])
def test_the_key_is_checked_before_a_client_is_asked_for_the_body(server, key, expected):
    client = connect(server, head(len(BODY), key).replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"))
    first = int(client.recv(12).split()[1])
    if first == 100:
        assert client.recv(2**16) == b" Continue\r\n\r\n"
        client.sendall(BODY)
    found = [first, status(client)] if first == 100 else [first]
    client.close()
    assert found == expected


def test_a_connection_that_is_reset_is_no_error_of_the_server(server, capsys):
    client = connect(server, b"POST /v1")
    wait_until(lambda: server.connections.left < server.connections.total)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    wait_until(lambda: server.connections.left == server.connections.total)
    assert capsys.readouterr().err == ""


def test_bytes_that_arrive_after_the_end_are_not_read():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"x")
        incoming, buffer = Incoming(ours), bytearray(1)
        incoming.allow(1, 0.0)
        with pytest.raises(TimeoutError):
            incoming.readinto(buffer)
        incoming.allow(1, 5.0)
        assert (incoming.readinto(buffer), buffer) == (1, b"x")


def test_the_rest_of_a_refused_body_is_read_for_a_bounded_time(server, monkeypatch):
    monkeypatch.setattr(module, "DISCARD_SECONDS", 0.3)
    client = connect(server, head(10**6, "wrong"))
    client.recv(2**16)
    wait_until(lambda: server.connections.left == server.connections.total)
    client.close()


def test_bodies_of_all_requests_share_their_bytes(server, service):
    server.body_bytes = Budget(2 * len(BODY))
    service.may_answer.clear()
    answers: list[int] = []
    threads = [post(server, answers) for _ in range(3)]
    wait_until(lambda: len(service.requests) == 2)
    time.sleep(0.3)
    assert (len(service.requests), server.body_bytes.left) == (2, 0)
    service.may_answer.set()
    for thread in threads:
        thread.join()
    assert (answers, server.body_bytes.left) == ([200, 200, 200], server.body_bytes.total)


def test_a_request_that_gets_no_bytes_in_its_time_is_refused(server, monkeypatch):
    monkeypatch.setattr(module, "REQUEST_SECONDS", 0.3)
    assert server.body_bytes.take(server.body_bytes.total, 0.0)
    assert status(connect(server, head(len(BODY)) + BODY)) == 503


@pytest.mark.parametrize("begun", [b"", b"POST /v1/chat", head(10**6)], ids=["nothing", "head", "body"])
def test_a_client_cannot_send_for_longer_by_sending_slowly(server, begun, monkeypatch):
    monkeypatch.setattr(module, "READ_SECONDS", 0.5)
    client = connect(server, begun)
    start = time.monotonic()
    with client, pytest.raises(OSError):
        while time.monotonic() < start + 5:
            time.sleep(0.05)
            client.sendall(b"x")
    assert time.monotonic() - start < 3
    wait_until(lambda: server.body_bytes.left == server.body_bytes.total)


def test_a_body_that_ends_early_is_no_request(server, service):
    client = connect(server, head(len(BODY) + 1) + BODY)
    client.shutdown(socket.SHUT_WR)
    assert (status(client), service.requests) == (0, [])


def test_the_time_of_a_request_begins_with_its_connection(server, service):
    start = time.monotonic()
    client = connect(server)
    time.sleep(0.3)
    client.sendall(head(len(BODY)) + BODY)
    assert status(client) == 200
    assert service.requests[0] == pytest.approx(start + module.REQUEST_SECONDS, abs=0.2)


def test_connections_beyond_the_bound_wait(server, service):
    server.connections = Budget(2)
    idle = [connect(server), connect(server)]
    wait_until(lambda: server.connections.left == 0)
    answers: list[int] = []
    thread = post(server, answers)
    time.sleep(0.5)
    assert service.requests == []
    idle[0].close()
    thread.join()
    assert answers == [200]
    idle[1].close()


def test_the_end_does_not_wait_for_connections_that_ask_nothing(server, monkeypatch):
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.2)
    with connect(server):
        wait_until(lambda: server.connections.left < server.connections.total)
        start = time.monotonic()
        server.stop()
        assert time.monotonic() - start < 3


def test_a_client_that_has_gone_is_noticed(server, service):
    service.may_answer.clear()
    client = connect(server, head(len(BODY)) + BODY)
    wait_until(lambda: service.requests)
    assert not service.is_gone()
    client.close()
    wait_until(service.is_gone)
