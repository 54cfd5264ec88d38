"""The endpoint's HTTP server: routes, the API key, and answers as JSON or server-sent events.

Every thread has one connection, and every connection one request. A request is bounded before memory is used for it:

connection: MAX_CONNECTIONS ─ head: MAX_HEAD, READ_SECONDS ─ key ─ body: MAX_BODIES, READ_SECONDS
                            ─ JSON: MAX_VALUES ─ images, text: `ChatService` ─ answer: REQUEST_SECONDS
"""

from __future__ import annotations

import hmac
import io
import json
import logging
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rl_vlm.errors import ConfigError, DataError
from rl_vlm.tools.serving.batches import Stopping
from rl_vlm.tools.serving.budget import Budget, NotInTime
from rl_vlm.tools.serving.protocol import APIError, count_values, read_request
from rl_vlm.tools.serving.service import ChatService

logger = logging.getLogger(__name__)

JSON = "application/json"
API_KEY = "RL_VLM_API_KEY"
"""Environment variable of the key that requests must have, if it is set."""
MAX_CONNECTIONS = 512
"""Connections at once. Others wait in the system's queue."""
MAX_HEAD = 2**16
"""Bytes of the head of a request."""
MAX_BODIES = 256 * 2**20
"""Bytes of the bodies of all requests at once, and of the largest body."""
MAX_VALUES = 2**17
"""Values in the JSON of all requests at once, and of one request. A value takes up to 2 kB while it is checked."""
READ_SECONDS = 60.0
"""Seconds for a client to send the head of its request, again to send the body, and again to receive the answer."""
REQUEST_SECONDS = 3600.0
"""Seconds from a request's connection to its answer."""
DISCARD_SECONDS = 5.0
"""Seconds in which a client can send the rest of a refused request."""
CLOSE_SECONDS = 5.0
"""Seconds to wait at the end until refused requests are answered."""


class ChatServer(ThreadingHTTPServer):
    """Serves one model with a thread per connection."""

    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, host: str, port: int, key: str = "") -> None:
        """Reserve `port`; 0 takes any free port. Connections are refused until `start`.

        If `key` is not empty, requests must have it as a bearer token. Raises ConfigError if the port cannot be used.
        """
        super().__init__((host, port), ChatHandler, bind_and_activate=False)
        try:
            self.server_bind()
        except (OSError, OverflowError, UnicodeError) as error:
            self.server_close()
            raise ConfigError(
                f"port {port} of {host} cannot be used ({error}); choose another --port or --host"
            ) from error
        self.key = key
        self.thread = threading.Thread(target=self.serve_forever, name="endpoint", daemon=True)
        self.connections = Budget(MAX_CONNECTIONS)
        self.body_bytes = Budget(MAX_BODIES)
        self.values = Budget(MAX_VALUES)

    @property
    def url(self) -> str:
        """Return the base URL of clients."""
        host = str(self.server_address[0])
        return f"http://{f'[{host}]' if ':' in host else host}:{self.server_port}/v1"

    def get_request(self) -> Any:
        """Accept a connection. Raises OSError if there are too many, so that the server tries again."""
        if not self.connections.take(1, 0.1):
            raise BlockingIOError
        try:
            return super().get_request()
        except OSError:
            self.connections.give(1)
            raise

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that `get_request` has accepted."""
        super().shutdown_request(request)
        self.connections.give(1)

    def start(self, service: ChatService) -> None:
        """Accept connections, in threads."""
        self.service = service
        self.server_activate()
        self.thread.start()

    def stop(self) -> None:
        """Refuse new requests, and answer the waiting ones with status 503."""
        self.service.batches.close()
        self.shutdown()
        self.connections.take(self.connections.total, CLOSE_SECONDS)


class Incoming(io.RawIOBase):
    """Bytes from a client, up to a number and a deadline that pauses of the client do not extend."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.allow(MAX_HEAD, READ_SECONDS)

    def allow(self, num_bytes: int, seconds: float) -> None:
        """Let the client send `num_bytes` within `seconds` from now on."""
        self.num_left = num_bytes
        self.end = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Wait for bytes. Raises TimeoutError after the end, and ConnectionError after the last allowed byte."""
        seconds = self.end - time.monotonic()
        if seconds <= 0:
            raise TimeoutError
        if self.num_left == 0:
            raise ConnectionError("it has sent too much")
        self.connection.settimeout(seconds)
        num = self.connection.recv_into(buffer, min(len(buffer), self.num_left))
        self.num_left -= num
        return num


class ChatHandler(BaseHTTPRequestHandler):
    """One connection, which is closed after its request."""

    server: ChatServer  # pyright: ignore[reportIncompatibleVariableOverride]
    protocol_version = "HTTP/1.1"

    def setup(self) -> None:
        super().setup()
        self.end = time.monotonic() + REQUEST_SECONDS
        self.incoming = Incoming(self.connection)
        self.rfile = io.BufferedReader(self.incoming)
        self.expects_continue = False

    def handle(self) -> None:
        """Read the request and answer it. If the client goes, or if its head is too long, close the connection."""
        try:
            super().handle()
        except OSError as error:
            logger.info("a client has gone: %s", error)

    def handle_expect_100(self) -> bool:
        """Let `body` ask for the body, so that the key is checked first."""
        self.expects_continue = True
        return True

    def do_GET(self) -> None:
        self.respond(self.get)

    def do_POST(self) -> None:
        self.respond(self.post)

    def get(self) -> None:
        """Answer /health, which needs no key, and /v1/models."""
        if self.path == "/health":
            return self.send(200, {"status": "ok"})
        self.check_key()
        if self.path != "/v1/models":
            raise self.unknown_route()
        model = {"id": self.server.service.name, "object": "model", "created": 0, "owned_by": "rl-vlm"}
        self.send(200, {"object": "list", "data": [model]})

    def post(self) -> None:
        """Answer /v1/chat/completions."""
        self.check_key()
        if self.path != "/v1/chat/completions":
            raise self.unknown_route()
        self.write(200, *self.completion(self.body_length()))

    def completion(self, length: int) -> tuple[bytes, str]:
        """Read the body and return the answer with its type. The request is not held while the answer is sent."""
        with self.server.body_bytes.held(length, self.end - time.monotonic()):
            content = self.body(length)
            num_values = count_values(content)
            if num_values > self.server.values.total:
                found = f"the body has {num_values} commas and opening brackets"
                raise APIError(413, f"{found}, and the endpoint takes at most {MAX_VALUES}")
            with self.server.values.held(num_values, self.end - time.monotonic()):
                request = read_request(content)
                del content  # the request has the same texts
                answer = self.server.service.answer(request, self.end, self.is_gone)
        if request.stream:
            events = answer.events(request.stream_options.include_usage)
            content = "".join(f"data: {event}\n\n" for event in events)
            return content.encode(), "text/event-stream; charset=utf-8"
        return json.dumps(answer.body()).encode(), JSON

    def respond(self, answer: Any) -> None:
        """Call `answer`. If it raises an error, send the error in OpenAI's form."""
        self.close_connection = True
        refusal = self.refusal(answer)
        if refusal:
            self.send(*refusal)
            self.discard()

    def refusal(self, answer: Any) -> tuple[int, dict[str, Any]] | None:
        """Call `answer`, and return the status and the body of its error.

        The error itself holds the request, through the frames of its traceback. Therefore it ends with this function,
        and no variable refers to it.
        """
        try:
            answer()
        except (ConnectionError, TimeoutError):
            pass  # the client has gone, or has stopped sending
        except Exception as error:
            return api_error(error).answer
        return None

    def discard(self) -> None:
        """Read the rest of the request and keep none of it: a client that still sends would not read the answer."""
        self.incoming.allow(sys.maxsize, DISCARD_SECONDS)
        try:
            self.connection.shutdown(socket.SHUT_WR)
            while self.rfile.read1(2**16):
                pass
        except OSError as error:
            logger.info("the client of %s has gone: %s", self.path, error)

    def is_gone(self) -> bool:
        """Return whether the client has closed its side of the connection."""
        self.connection.settimeout(0.0)
        try:
            return not self.connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def check_key(self) -> None:
        """Raise APIError unless the request has the key, if there is one. Compares in constant time."""
        given = self.headers.get("Authorization", "").encode()
        if self.server.key and not hmac.compare_digest(given, f"Bearer {self.server.key}".encode()):
            raise APIError(
                401, f"give the key in {API_KEY} as a header, Authorization: Bearer …", code="invalid_api_key"
            )

    def body_length(self) -> int:
        """Return the bytes of the body. Raises APIError if they are not given, or are more than `MAX_BODIES`."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal():
            raise APIError(411, "the request has no Content-Length")
        if len(length) > 18 or int(length) > MAX_BODIES:
            raise APIError(413, f"the body has {length} bytes, and the endpoint takes at most {MAX_BODIES}")
        return int(length)

    def body(self, length: int) -> bytes:
        """Read the body. Raises ConnectionError if the client ends it early, TimeoutError if it takes too long."""
        self.incoming.allow(length, READ_SECONDS)
        if self.expects_continue:
            super().handle_expect_100()
        content = self.rfile.read(length)
        if len(content) < length:
            raise ConnectionError
        return content

    def unknown_route(self) -> APIError:
        return APIError(
            404, f"there is no {self.command} {self.path}; there are POST /v1/chat/completions, GET /v1/models and "
            "GET /health", code="unknown_url",
        )  # fmt: skip

    def send(self, status: int, body: dict[str, Any]) -> None:
        self.write(status, json.dumps(body).encode(), JSON)

    def write(self, status: int, content: bytes, kind: str) -> None:
        """Send one whole answer."""
        try:
            self.connection.settimeout(READ_SECONDS)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(content)
        except OSError as error:
            logger.info("the client of %s has gone: %s", self.path, error)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing for each request."""


def api_error(error: Exception) -> APIError:
    """Convert an exception to the error that the client gets. Unexpected exceptions are logged as well."""
    if isinstance(error, APIError):
        return error
    if isinstance(error, Stopping):
        return APIError(503, "the endpoint is stopping", code="unavailable")
    if isinstance(error, NotInTime):
        return APIError(503, f"the endpoint is busy: no answer within {REQUEST_SECONDS:.0f} s", code="unavailable")
    if isinstance(error, DataError):
        return APIError(400, str(error), "messages")
    logger.error("a request failed", exc_info=error)
    return APIError(500, f"{type(error).__name__}: {error}")
