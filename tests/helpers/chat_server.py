"""The server of `rl-vlm chat` with a tiny model, which records requests and fails if a test wants it to."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from rl_vlm.tools.serving.build import chat_service
from rl_vlm.tools.serving.checkpoint import find_served
from rl_vlm.tools.serving.protocol import APIError
from rl_vlm.tools.serving.server import ChatHandler, ChatServer


class RecordingServer(ChatServer):
    """Serves one checkpoint under the name `tiny`."""

    def __init__(self, checkpoint: Path, *overrides: str, engine: str = "hf") -> None:
        super().__init__("127.0.0.1", 0)
        self.RequestHandlerClass = RecordingHandler
        self.statuses: list[int] = []
        """Of the next answers; the endpoint's own when there are no more."""
        self.bodies: list[dict[str, Any]] = []
        """Every request body for this model that was not failed."""
        self.num_at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.start(chat_service(find_served(str(checkpoint), engine, overrides), "tiny"))
        threading.Thread(target=self.service.batches.run, daemon=True).start()

    def count_open(self, change: int) -> None:
        """Count a request until its answer is sent: a client that has its answer may send the next one at once."""
        with self.lock:
            self.num_at_once += change
            self.most_at_once = max(self.most_at_once, self.num_at_once)

    def end(self) -> None:
        """Stop, and free the port and the model."""
        self.stop()
        self.server_close()
        self.service.batches.engine.close()


class RecordingHandler(ChatHandler):
    server: RecordingServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def respond(self, answer: Any) -> None:
        self.server.count_open(1)
        super().respond(answer)

    def write(self, status: int, content: bytes, kind: str) -> None:
        self.server.count_open(-1)
        super().write(status, content, kind)

    def body(self, length: int) -> bytes:
        content = super().body(length)
        status = self.server.statuses.pop(0) if self.server.statuses else 200
        if status != 200:
            raise APIError(status, "out of order")
        sent = json.loads(content)
        if self.path == "/v1/chat/completions" and sent.get("model") == "tiny":
            self.server.bodies.append(sent)
        return content

    def check_key(self) -> None:
        """Repeat a wrong key, as some servers do."""
        try:
            super().check_key()
        except APIError:
            raise APIError(401, f"wrong key: {self.headers.get('Authorization', '')}") from None
