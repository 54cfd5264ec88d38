"""Requests against a small server: what comes back, what is refused, and how long it may take."""

import asyncio
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rl_vlm.rollout import http


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, _, seconds = self.path.strip("/").partition("/")
        self.send_response(int(status))
        self.send_header("Retry-After", "7")
        self.send_header("Location", "/200")
        self.end_headers()
        self.wfile.write(b"half")
        time.sleep(float(seconds or 0))
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


def get(address: str, timeout: float = 5.0) -> bytes:
    return http.run(http.send("GET", address, "token", timeout=timeout))


def test_the_content_of_an_answer(url: str):
    assert get(f"{url}/200") == b"half and half"


@pytest.mark.parametrize("status", [302, 404, 500])
def test_what_is_no_success_is_refused(url: str, status: int):
    with pytest.raises(http.Refused) as refusal:
        get(f"{url}/{status}")
    assert (refusal.value.status, refusal.value.body, refusal.value.retry_after) == (status, "half and half", 7.0)


def test_a_slow_body_counts_as_well(url: str):
    with pytest.raises(http.Unreachable, match=r"timed out after 0\.3 s"):
        get(f"{url}/200/2", timeout=0.3)


@pytest.mark.parametrize(
    ("address", "reason"), [("http://127.0.0.1:9/", "Connection refused"), ("http://host:8000x/", "Invalid port")]
)
def test_an_address_that_is_none(address: str, reason: str):
    with pytest.raises(http.Unreachable, match=reason):
        get(address)


def test_a_watch_that_fails_ends_the_request():
    cancelled = threading.Event()

    async def request() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    async def watch() -> None:
        raise ValueError("not well")

    with pytest.raises(ValueError, match="not well"):
        http.run(http.watched(request(), watch, seconds=0.01))
    assert cancelled.is_set()
