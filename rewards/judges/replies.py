"""Stores replies of judges on disk, so that none is paid for twice, and counts the requests."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any


class ReplyCache:
    """A folder of replies, one file per request. Any number of processes and runs can share it."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, key: str) -> Path:
        """Return the file of the reply to a request."""
        return self.folder / key[:2] / f"{key}.json"

    def get(self, key: str) -> str | None:
        """Return the reply to a request, or None if there is none."""
        try:
            reply = json.loads(self.path(key).read_bytes())["reply"]
        except (FileNotFoundError, ValueError, LookupError, TypeError):
            return None
        return reply if isinstance(reply, str) else None

    def put(self, key: str, reply: str) -> None:
        """Write a reply to a temporary file and rename it, so that no other process reads a part of it."""
        path = self.path(key)
        path.parent.mkdir(exist_ok=True)
        with TemporaryDirectory(suffix=".part", dir=self.folder) as folder:
            written = Path(folder, path.name)
            written.write_text(json.dumps({"reply": reply}))
            written.replace(path)

    def count_call(self) -> int:
        """Count a request, and return the number of requests so far by all processes and runs of the folder.

        The count is the size of the file `calls`. Each process appends a byte, and its offset is then the size for all.
        """
        with open(self.folder / "calls", "ab", buffering=0) as file:
            file.write(b".")
            return file.tell()


def request_key(url: str, body: dict[str, Any]) -> str:
    """Return the hash of a request: the address, and the body with model, messages and settings."""
    return hashlib.sha256(json.dumps([url, body], sort_keys=True).encode()).hexdigest()
