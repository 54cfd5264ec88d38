"""A stand-in of the hub's API on this machine: it takes whole files in commits, and keeps them."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """What the stand-in was sent."""

    def __init__(self) -> None:
        self.url = ""
        self.repositories: dict[str, str | None] = {}
        """Visibility of each repository, as it was sent."""
        self.branches: list[str] = []
        self.tokens: set[str | None] = set()
        self.commits: list[tuple[str, str, dict[str, bytes]]] = []
        """Path of the request, message and files of each commit."""

    def answer(self, path: str, body: bytes) -> dict[str, Any]:
        """Answer a request that is sent with POST."""
        path = path.partition("?")[0]
        if path == "/api/repos/create":
            given = json.loads(body)
            name = f"{given.get('organization') or 'me'}/{given['name']}"
            self.repositories[name] = given.get("visibility")
            return {"url": f"{self.url}/{name}", "name": name, "id": name}
        if path == "/api/validate-yaml":  # the front matter of README.md
            return {"errors": [], "warnings": []}
        if "/preupload/" in path:
            files = json.loads(body)["files"]
            return {"files": [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]}
        if "/branch/" in path:
            self.branches.append(path.rpartition("/")[2])
            return {}
        assert "/commit/" in path, path
        lines = [json.loads(line) for line in body.splitlines()]
        contents = {
            line["value"]["path"]: base64.b64decode(line["value"]["content"]) for line in lines if line["key"] == "file"
        }
        self.commits.append((path, lines[0]["value"]["summary"], contents))
        return {"commitUrl": f"{self.url}/me/model/commit/{'0' * 40}", "commitOid": "0" * 40, "success": True}


@contextmanager
def hub_server() -> Iterator[Hub]:
    """Serve the stand-in inside the block. Its `url` is for the variable HF_ENDPOINT."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            hub.tokens.add(self.headers.get("authorization"))
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = json.dumps(hub.answer(self.path, body)).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def do_GET(self) -> None:
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, format: str, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
