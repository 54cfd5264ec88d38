"""Requests to `rl-vlm chat` as bytes over HTTP, and directories of runs for it to serve."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from PIL import Image

from rl_vlm.checkpoint import store
from rl_vlm.config.describe import to_yaml
from rl_vlm.data.images import image_urls
from rl_vlm.types import Sample
from tests.helpers.tiny_run import make_config


def data_url(image: Image.Image) -> str:
    (url,) = image_urls(Sample("s", [], [image], {}, ""))
    return url


def question(*images: Image.Image, text: str = "Which digit is this?") -> list[dict[str, Any]]:
    parts = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def fetch(url: str, body: bytes | None = None, authorization: str = "") -> tuple[int, str]:
    """The status and the content of an answer, to a POST if there is a body."""
    headers = {"Authorization": authorization} if authorization else {}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=180) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def chat(base_url: str, messages: list[dict[str, Any]], **body: Any) -> dict[str, Any]:
    """The answer to a request that succeeds, greedy unless `body` says otherwise."""
    sent = {"model": "tiny", "messages": messages, "temperature": 0, "max_tokens": 8} | body
    status, content = fetch(f"{base_url}/chat/completions", json.dumps(sent).encode())
    assert status == 200, content
    return json.loads(content)


def write_run(model: Path, output_dir: Path, **settings: Any) -> Path:
    """A run's directory with config.yaml and checkpoint-4, which holds `model`."""
    unfinished = store.unfinished_path(output_dir, 4)
    store.begin(unfinished)
    shutil.copytree(model, unfinished, dirs_exist_ok=True)
    store.commit(unfinished, store.file_names(unfinished))
    (output_dir / "config.yaml").write_text(to_yaml(make_config(model, output_dir, **settings)))
    return output_dir
