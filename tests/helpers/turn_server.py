"""A stand-in for a vLLM server, which can be killed and restarted, and trajectories that are sampled on it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from rl_vlm.rollout.vllm.client import VLLMClient

TOKEN, ADAPTER = "token", "policy"

Write = Callable[[str, int], str]
"""Writes a turn after a text, with a seed."""


class TurnServer:
    """Samples turns that `write` makes of the text so far and the seed. Its weights have vLLM's label at the start."""

    def __init__(self, tokenizer: Any, stop: str, write: Write) -> None:
        self.tokenizer, self.write = tokenizer, write
        self.stop = tokenizer.convert_tokens_to_ids(stop)
        self.lock = threading.Lock()
        self.num_answers = 0
        self.most_answers = 10**9
        """Number of turns after which further requests wait until the server is killed."""
        self.port = 0
        self.start()

    def start(self) -> None:
        """Start, or restart on the same port. Weights that were sent before are forgotten."""
        self.killed = threading.Event()
        self.label, self.models, self.open = "default", ["base"], list[socket.socket]()
        self.http = HTTPServer(("127.0.0.1", self.port), Handler)
        self.http.turns, self.port = self, self.http.server_port
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def kill(self) -> None:
        """Close the port and all connections. No request that waits is answered."""
        self.killed.set()
        self.http.shutdown()
        self.http.server_close()
        for connection in self.open:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    def client(self) -> VLLMClient:
        return VLLMClient(f"http://127.0.0.1:{self.port}", TOKEN, 20.0)

    def get(self, path: str) -> Any:
        return {
            "/health": None,
            "/rl_vlm/setup": {"max_model_len": 10_000, "weight_transfer": "rl_vlm"},
            "/weight_info": {"weight_version": self.label},
            "/v1/models": {"data": [{"id": name} for name in self.models]},
            "/metrics": None,
        }[path]

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        """Return the status and the answer."""
        if path == "/inference/v1/generate":
            return (200, self.sampled(body)) if body["model"] in (None, *self.models) else (404, "no such model")
        if path == "/v1/load_lora_adapter":
            self.models.append(body["lora_name"])
        if path == "/v1/unload_lora_adapter":
            self.models.remove(body["lora_name"])
        self.label = body.get("new_version", self.label)
        return 200, {"success": True}

    def sampled(self, body: dict[str, Any]) -> Any:
        """Sample a turn, or wait until the server is killed."""
        with self.lock:
            self.num_answers += 1
            waits = self.num_answers > self.most_answers
        if waits:
            self.killed.wait(20)
        label, ids, params = self.label, body["token_ids"], body["sampling_params"]
        choices = []
        for seed in range(params["seed"], params["seed"] + params["n"]):
            text = self.write(self.tokenizer.decode(ids), seed)
            turn = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], self.stop][: params["max_tokens"]]
            reason = "stop" if turn[-1] == self.stop else "length"
            logprobs = {"content": [{"logprob": -(1 + seed % 7) / 8} for _ in turn]}
            versions = [{"version": label}]
            choices.append(
                {"token_ids": turn, "finish_reason": reason, "logprobs": logprobs, "weight_versions": versions}
            )
        return {"prompt_token_ids": ids, "choices": choices}


class HTTPServer(ThreadingHTTPServer):
    """The port of a `TurnServer`."""

    daemon_threads = True
    turns: TurnServer

    def handle_error(self, request: object, client_address: object) -> None:
        """A client may have gone."""


class Handler(BaseHTTPRequestHandler):
    server: HTTPServer  # pyright: ignore[reportIncompatibleVariableOverride]

    def setup(self) -> None:
        super().setup()
        self.server.turns.open.append(self.connection)

    def do_GET(self) -> None:
        self.respond(200, self.server.turns.get(self.path))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        turns, killed = self.server.turns, self.server.turns.killed
        status, answer = turns.post(self.path, body)
        if not killed.is_set():
            self.respond(status, answer)

    def respond(self, status: int, answer: Any) -> None:
        content = b"" if answer is None else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""
