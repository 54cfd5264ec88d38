"""A server of OpenAI's chat completions on loopback that plays a judge: it replies with what a test tells it."""

from __future__ import annotations

import json
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class JudgeServer(ThreadingHTTPServer):
    """Replies with `reply` to every request."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), JudgeHandler)
        self.lock = threading.Lock()
        self.reply: Any = '{"score": 8}'
        self.seconds = 0.0
        """Of thinking before each answer."""
        self.answers: list[tuple[int, dict[str, str], str | bytes]] = []
        """Status, headers and body of the next answers; replies when there are no more."""
        self.bodies: list[dict[str, Any]] = []
        self.authorizations: list[str] = []
        self.times: list[float] = []
        self.num_at_once = self.most_at_once = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def texts(self) -> list[str]:
        """What the judge was asked, without images."""
        contents = [body["messages"][-1]["content"] for body in self.bodies]
        return [content if isinstance(content, str) else content[-1]["text"] for content in contents]


class JudgeHandler(BaseHTTPRequestHandler):
    server: JudgeServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.bodies.append(body)
            server.authorizations.append(self.headers.get("Authorization", ""))
            server.times.append(time.monotonic())
            server.num_at_once += 1
            server.most_at_once = max(server.most_at_once, server.num_at_once)
            status, headers, answer = server.answers.pop(0) if server.answers else (200, {}, "")
        time.sleep(server.seconds)
        if not answer and self.path == "/v1/chat/completions":
            answer = json.dumps({"choices": [{"message": {"role": "assistant", "content": server.reply}}]})
        with server.lock:
            server.num_at_once -= 1
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(ConnectionError):  # a reply that is too large is not read to its end
            self.wfile.write(answer.encode() if isinstance(answer, str) else answer)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on standard error."""
