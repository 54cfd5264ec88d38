"""One vLLM server's HTTP API, as far as a trainer needs it."""

from __future__ import annotations

import http.client
import json
import logging
import select
import time
from contextlib import closing, suppress
from typing import Any
from urllib.parse import urlsplit

from rl_vlm.errors import RolloutError

LONGEST_MESSAGE = 500
HEALTH_SECONDS = 30.0
"""That a server may take to say that it is well."""
WATCH_SECONDS = 15.0
"""Between such questions, while another answer is awaited."""
TOKEN = "RL_VLM_SERVER_TOKEN"
"""Environment variable with the token that trainer and servers share."""

logger = logging.getLogger(__name__)


class ServerLost(RolloutError):
    """A server that cannot be reached, does not answer in time, or has failed inside."""


class VLLMClient:
    """Every call answers, or raises: ServerLost where another server may do better, RolloutError where none would.

    An answer may rightly take minutes. A server that hangs is noticed sooner: its health is asked for meanwhile.
    """

    def __init__(self, url: str, token: str, timeout: float) -> None:
        """`timeout` is in seconds, for a whole answer."""
        self.url = url.rstrip("/")
        self.token = token
        self.timeout = timeout

    def get(self, path: str) -> Any:
        return self.send("GET", path)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        return self.send("POST", path, json.dumps(body or {}).encode())

    def check_health(self) -> None:
        """Raises ServerLost unless the server says within seconds that it is well."""
        try:
            with closing(self.connect(min(self.timeout, HEALTH_SECONDS))) as connection:
                connection.request("GET", "/health")
                self.read(connection, "/health")
        except (OSError, http.client.HTTPException) as error:
            raise self.lost(error) from None

    def wait_until_up(self, seconds: float) -> None:
        """For a server that somebody else starts. Raises ServerLost if it is not well within this time."""
        deadline = time.monotonic() + seconds
        try:
            return self.check_health()
        except ServerLost as error:
            logger.warning("%s It has %g s to start (vllm.vllm_server_timeout).", error, seconds)
        while time.monotonic() < deadline:
            time.sleep(min(1.0, seconds))
            with suppress(ServerLost):
                return self.check_health()
        raise ServerLost(f"The vLLM server {self.url} is not up after {seconds:g} s (vllm.vllm_server_timeout).")

    def send(self, method: str, path: str, body: bytes | None = None) -> Any:
        """The answer's JSON, or None where it is empty."""
        headers = {"Authorization": f"Bearer {self.token}", "Content-Type": "application/json"}
        try:
            with closing(self.connect(HEALTH_SECONDS)) as connection:
                connection.request(method, f"{urlsplit(self.url).path}{path}", body, headers)
                self.await_answer(connection)
                content = self.read(connection, path)
        except (OSError, http.client.HTTPException) as error:
            raise self.lost(error) from None
        try:
            return json.loads(content) if content else None
        except ValueError:  # a line of text
            return content.decode(errors="replace")

    def connect(self, seconds: float) -> http.client.HTTPConnection:
        """A new connection, which waits for this long at a time."""
        address = urlsplit(self.url)
        kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
        return kind(address.netloc, timeout=seconds)

    def await_answer(self, connection: http.client.HTTPConnection) -> None:
        """Returns when the answer begins; until then the server must be well."""
        begins, deadline = select.poll(), time.monotonic() + self.timeout
        begins.register(connection.sock, select.POLLIN)
        while not begins.poll(1000 * min(WATCH_SECONDS, self.timeout)):
            if time.monotonic() > deadline:
                raise TimeoutError(f"timed out after {self.timeout:g} s")
            self.check_health()

    def read(self, connection: http.client.HTTPConnection, path: str) -> bytes:
        """The answer's content. Raises what a status that is no success means."""
        with connection.getresponse() as response:
            content = response.read()
        if response.status < 400:
            return content
        if response.status == 401:
            raise RolloutError(f"The vLLM server {self.url} refuses the token: set {TOKEN} to its own.")
        kind = ServerLost if response.status >= 500 else RolloutError
        message = content.decode(errors="replace")[:LONGEST_MESSAGE]
        raise kind(f"The vLLM server {self.url} answers {response.status} to {path}: {message}")

    def lost(self, error: Exception) -> ServerLost:
        return ServerLost(f"The vLLM server {self.url} does not answer ({error or type(error).__name__}).")
