"""A small server of OpenAI's chat completions on loopback, which answers with a tiny model through `HFEngine`."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from rl_vlm.config.schema import DataConfig, RunConfig
from rl_vlm.data.prompts import PromptBuilder, load_processor
from rl_vlm.model.loading import load_policy
from rl_vlm.rollout.hf import HFEngine
from rl_vlm.types import RolloutRequest, Sample, Sampling


class ChatServer(ThreadingHTTPServer):
    """Serves one checkpoint under the name `tiny`."""

    daemon_threads = True

    def __init__(self, checkpoint: Path) -> None:
        super().__init__(("127.0.0.1", 0), ChatHandler)
        config = RunConfig.model_validate({"model": {"model_name_or_path": str(checkpoint)}})
        processor = load_processor(str(checkpoint), config.model, DataConfig())
        self.builder = PromptBuilder(processor, DataConfig())
        self.engine = HFEngine.for_policy(load_policy(config, str(checkpoint)), processor.tokenizer, max_num_seqs=8)
        self.lock = threading.Lock()
        self.key = ""
        self.statuses: list[int] = []
        """Of the next answers; 200 when there are no more."""
        self.bodies: list[dict[str, Any]] = []
        """Every request body that was answered."""
        self.num_at_once = self.most_at_once = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        sampling = Sampling(1, body["max_tokens"], body["temperature"], seed=body["seed"], top_p=body["top_p"])
        request = RolloutRequest("request", self.builder.build(to_sample(body["messages"])))
        with self.lock:
            self.bodies.append(body)
            (group,) = self.engine.generate([request], sampling)
        (completion,) = group.completions
        message = {"role": "assistant", "content": completion.text}
        return {
            "object": "chat.completion",
            "choices": [{"index": 0, "message": message, "finish_reason": completion.finish_reason}],
            "usage": {"completion_tokens": len(completion.token_ids)},
        }


class ChatHandler(BaseHTTPRequestHandler):
    server: ChatServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            status = self.server.statuses.pop(0) if self.server.statuses else 200
            self.server.num_at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.num_at_once)
        authorization = self.headers.get("Authorization", "")
        if self.server.key and authorization != f"Bearer {self.server.key}":
            status, answer = 401, {"error": {"message": f"wrong key: {authorization}"}}
        elif self.path != "/v1/chat/completions" or body["model"] != "tiny":
            status, answer = 404, {"error": {"message": f"no {body['model']} at {self.path}"}}
        elif status != 200:
            answer = {"error": {"message": "out of order"}}
        else:
            answer = self.server.answer(body)
        with self.server.lock:
            self.server.num_at_once -= 1
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing on standard error."""


def to_sample(messages: list[dict[str, Any]]) -> Sample:
    """Messages of the API as a sample with decoded images."""
    images: list[Image.Image] = []

    def block(part: dict[str, Any]) -> dict[str, Any]:
        if part["type"] == "text":
            return part
        encoded = part["image_url"]["url"].removeprefix("data:image/png;base64,")
        images.append(Image.open(BytesIO(base64.b64decode(encoded))))
        return {"type": "image"}

    def blocks(content: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [{"type": "text", "text": content}] if isinstance(content, str) else [block(part) for part in content]

    rendered = [{"role": message["role"], "content": blocks(message["content"])} for message in messages]
    return Sample("served", rendered, images, {}, rendered)


@contextmanager
def serving(checkpoint: Path) -> Iterator[ChatServer]:
    """The server, running in a thread."""
    server = ChatServer(checkpoint)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
