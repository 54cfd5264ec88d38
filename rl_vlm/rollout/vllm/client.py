"""A client for the HTTP API of one vLLM server."""

from __future__ import annotations

import json
import logging
import time
from typing import Any

from rewards import http
from rl_vlm.distributed.signals import stop
from rl_vlm.errors import RolloutError, shorten
from rl_vlm.rollout.waiting import run, watched

HEALTH_SECONDS = 30.0
"""Seconds within which a server must answer a health check."""
WATCH_SECONDS = 15.0
"""Seconds between health checks during a request."""
BYTES_PER_TOKEN = 2**10
"""Maximum bytes of a token in an answer: its id, text, bytes and log-prob."""
TOKEN = "RL_VLM_SERVER_TOKEN"
"""Environment variable with the token that trainer and servers share."""

logger = logging.getLogger(__name__)


class ServerLost(RolloutError):
    """The server cannot be reached, does not answer in time, or has an internal error."""


class VLLMClient:
    """Calls one server. Raises ServerLost if another server may succeed, RolloutError if none would.

    An answer may take minutes. Health checks run meanwhile, so that a server that hangs is noticed sooner.
    """

    def __init__(self, url: str, token: str, timeout: float) -> None:
        """`timeout` is the limit for a whole answer, in seconds."""
        self.url = url.rstrip("/")
        self.token = token
        self.timeout = timeout

    def get(self, path: str) -> Any:
        """Send a GET request and return the answer. See `send`."""
        return self.send("GET", path)

    def post(self, path: str, body: dict[str, Any] | None = None, num_tokens: int = 0) -> Any:
        """Send a POST request and return the answer. See `send`."""
        return self.send("POST", path, body or {}, num_tokens)

    def send(self, method: str, path: str, body: dict[str, Any] | None = None, num_tokens: int = 0) -> Any:
        """Send a request and return the answer: parsed JSON, text if it is not JSON, or None if it is empty.

        `num_tokens` is the largest number of tokens in the answer, which limits its bytes.
        """
        request = self.content(method, path, self.timeout, body, num_tokens)
        content = run(watched(request, self.answer_health_check, WATCH_SECONDS))
        try:
            return json.loads(content) if content else None
        except ValueError:
            return content.decode(errors="replace")

    def check_health(self, seconds: float | None = None) -> None:
        """Raise ServerLost if the server does not answer a health check within `seconds`, or `HEALTH_SECONDS`."""
        run(self.answer_health_check(seconds))

    def is_healthy(self, seconds: float | None = None) -> bool:
        """Return whether the server answers a health check. See `check_health`."""
        try:
            self.check_health(seconds)
        except ServerLost:
            return False
        return True

    async def answer_health_check(self, seconds: float | None = None) -> None:
        """Send a health check and await the answer. Raises ServerLost if it does not come in time."""
        await self.content("GET", "/health", min(self.timeout, HEALTH_SECONDS if seconds is None else seconds))

    def wait_until_up(self, seconds: float) -> None:
        """Wait for a server that somebody else starts. Counts as progress, and a stop of the run ends it.

        Raises ServerLost if the server is not healthy within this time.
        """
        deadline = time.monotonic() + seconds
        try:
            return self.check_health()
        except ServerLost as error:
            logger.warning("%s It has %g s to start (vllm.vllm_server_timeout).", error, seconds)
        while time.monotonic() < deadline:
            stop.check()
            time.sleep(min(1.0, seconds))
            if self.is_healthy():
                return None
        raise ServerLost(f"The vLLM server {self.url} is not up after {seconds:g} s (vllm.vllm_server_timeout).")

    async def content(self, method: str, path: str, timeout: float, body: Any = None, num_tokens: int = 0) -> bytes:
        """Send a request and return the answer's content. `timeout` is in seconds."""
        largest = http.LARGEST_BODY + BYTES_PER_TOKEN * num_tokens
        try:
            url = f"{self.url}{path}"
            return await http.send(method, url, self.token, body, timeout, largest, use_proxies=False)
        except http.RequestError as error:
            if error.status is None:
                raise ServerLost(f"The vLLM server {self.url} does not answer ({error.detail or error}).") from None
            if error.status == 401:
                raise RolloutError(
                    f"The vLLM server {self.url} refuses the token: set {TOKEN} to the server's value."
                ) from None
            kind = ServerLost if error.status >= 500 else RolloutError
            message = f"The vLLM server {self.url} answers {error.status} to {path}: {shorten(error.detail, 500)}"
            raise kind(message) from None
