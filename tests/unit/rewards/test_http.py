"""Requests against a small server: what comes back, what is refused, and how long it may take."""

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl

import pytest

from rewards import http


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        status, _, seconds = path.strip("/").partition("/")
        self.send_response(int(status))
        for name, value in parse_qsl(query):
            self.send_header(name, value)
        self.send_header("Retry-After", "7")
        self.send_header("Location", "/200")
        self.end_headers()
        self.wfile.write(b"half")
        time.sleep(float(seconds or 0))
        with suppress(ConnectionError):  # the client has read enough
            self.wfile.write(b" and half")

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def get(address: str, timeout: float = 5.0, largest: int = 100) -> bytes:
    return asyncio.run(http.send("GET", address, "token", None, timeout, largest))


def test_the_content_of_an_answer(url: str):
    assert get(f"{url}/200") == b"half and half"


@pytest.mark.parametrize(
    ("status", "may_help"),
    [(302, False), (401, False), (404, False), (408, True), (409, True), (425, True), (429, True), (500, True)],
)
def test_what_is_no_success_is_refused(url: str, status: int, may_help: bool):
    with pytest.raises(http.RequestError, match=f"answers with status {status}: half and half") as refusal:
        get(f"{url}/{status}")
    error = refusal.value
    assert (error.status, error.detail, error.retry_after) == (status, "half and half", 7.0)
    assert error.may_help == may_help


UNREADABLE = pytest.mark.parametrize(
    ("header", "largest", "problem"),
    [
        ("Content-Encoding=br", 100, "the encoding 'br', which was not asked for"),
        ("Content-Encoding=deflate", 100, "the encoding 'deflate', which was not asked for"),
        ("Content-Encoding=gzip", 100, "damaged gzip"),
        ("", 12, "answers with more than"),
        ("Content-Length=99", 100, "cannot be reached: peer closed connection"),
    ],
    ids=["brotli", "deflate", "damaged gzip", "too large", "cut"],
)


@UNREADABLE
def test_a_success_whose_body_cannot_be_read_is_refused(url: str, header: str, largest: int, problem: str):
    with pytest.raises(http.RequestError, match=problem) as refusal:
        get(f"{url}/200?{header}", largest=largest)
    assert refusal.value.status is None


@UNREADABLE
@pytest.mark.parametrize(("status", "may_help"), [(404, False), (503, True)])
def test_a_body_that_cannot_be_read_does_not_hide_the_status(
    url: str, status: int, may_help: bool, header: str, largest: int, problem: str
):
    with pytest.raises(http.RequestError, match=f"answers with status {status}$") as refusal:
        get(f"{url}/{status}?{header}", largest=largest)
    error = refusal.value
    assert (error.status, error.detail, error.retry_after, error.may_help) == (status, "", 7.0, may_help)


def test_a_slow_body_counts_as_well(url: str):
    with pytest.raises(http.RequestError, match=r"timed out after 0\.3 s"):
        get(f"{url}/200/2", timeout=0.3)


@pytest.mark.parametrize(
    ("address", "reason"), [("http://127.0.0.1:9/", "Connection refused"), ("http://host:8000x/", "Invalid port")]
)
def test_an_address_that_is_none(address: str, reason: str):
    with pytest.raises(http.RequestError, match=reason):
        get(address)


def test_retry_after():
    later = format_datetime(datetime.now(UTC) + timedelta(seconds=90), usegmt=True)
    assert 80 < (http.retry_after(later) or 0) <= 90
    assert [http.retry_after(header) for header in ("3", "", "soon", "٣", "-1")] == [3.0, None, None, None, None]
    assert http.retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0


def test_pauses_double_up_to_a_bound_or_are_those_that_the_server_asks_for(monkeypatch):
    asked, pauses = iter([None] * 6 + [7.0, 0.0, 999.0]), []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    async def fail(*arguments: object) -> bytes:
        raise http.RequestError("answers with status 429", retry_after=next(asked, None))

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(http, "send", fail)
    with pytest.raises(http.RequestError):
        asyncio.run(http.post("http://host", "", {}, 1.0, retries=20, longest_pause=120.0))
    assert pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 7.0, 0.0, *[120.0] * 12]
