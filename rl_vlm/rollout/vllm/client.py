"""The HTTP API of one vLLM server, as far as a trainer needs it."""

from __future__ import annotations

import json
import logging
import time
from contextlib import suppress
from typing import Any

from rl_vlm.errors import RolloutError, shorten
from rl_vlm.rollout import http

HEALTH_SECONDS = 30.0
"""Time in which a server must answer a health check."""
WATCH_SECONDS = 15.0
"""Time between health checks while another answer is awaited."""
TOKEN = "RL_VLM_SERVER_TOKEN"
"""Environment variable with the token that trainer and servers share."""

logger = logging.getLogger(__name__)


class ServerLost(RolloutError):
    """A server that cannot be reached, does not answer in time, or has failed inside."""


class VLLMClient:
    """Calls one server. Raises ServerLost if another server may do better, RolloutError if none would.

    An answer may take minutes. The server's health is checked meanwhile, so that a server that hangs is noticed sooner.
    """

    def __init__(self, url: str, token: str, timeout: float) -> None:
        """`timeout` is in seconds, for a whole answer."""
        self.url = url.rstrip("/")
        self.token = token
        self.timeout = timeout

    def get(self, path: str) -> Any:
        """Return the answer to a GET request, see `send`."""
        return self.send("GET", path)

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the answer to a POST request, see `send`."""
        return self.send("POST", path, body or {})

    def send(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Return the answer: parsed JSON, text if it is no JSON, or None if it is empty."""
        request = self.content(method, path, self.timeout, body)
        content = http.run(http.watched(request, self.answer_health_check, WATCH_SECONDS))
        try:
            return json.loads(content) if content else None
        except ValueError:
            return content.decode(errors="replace")

    def check_health(self) -> None:
        """Raise ServerLost unless the server answers a health check within seconds."""
        http.run(self.answer_health_check())

    async def answer_health_check(self) -> None:
        """Await the answer to a health check. Raises ServerLost if it does not come within seconds."""
        await self.content("GET", "/health", min(self.timeout, HEALTH_SECONDS))

    def wait_until_up(self, seconds: float) -> None:
        """Wait for a server that somebody else starts. Raises ServerLost if it is not healthy within this time."""
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

    async def content(self, method: str, path: str, timeout: float, body: Any = None) -> bytes:
        """Return an answer's content, which may take `timeout` seconds."""
        try:
            return await http.send(method, f"{self.url}{path}", self.token, body, timeout)
        except http.Unreachable as error:
            raise ServerLost(f"The vLLM server {self.url} does not answer ({error}).") from None
        except http.Refused as error:
            if error.status == 401:
                raise RolloutError(f"The vLLM server {self.url} refuses the token: set {TOKEN} to its own.") from None
            kind = ServerLost if error.status >= 500 else RolloutError
            message = f"The vLLM server {self.url} answers {error.status} to {path}: {shorten(error.body, 500)}"
            raise kind(message) from None
