"""What servers are sent, and what becomes of a sync when they are lost, without vLLM."""

import base64
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from rl_vlm.errors import RolloutError
from rl_vlm.model.families import TokenRules
from rl_vlm.rollout.vllm.client import ServerLost, VLLMClient
from rl_vlm.rollout.vllm.servers import VLLMServers, parts_of
from rl_vlm.rollout.vllm.videos import SentVideos
from rl_vlm.types import Prompt, RolloutRequest, Sample, Sampling, Video


class Server(VLLMClient):
    """Takes one adapter at a time, unless it is dead."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(f"http://{name}", "token", 1.0)
        self.folder, self.is_dead, self.version = folder, False, "-1"
        self.asked: Any = None
        self.models = ["base"]

    def get(self, path: str) -> Any:
        return {
            "/rl_vlm/setup": {"max_model_len": 64, "weight_transfer": "rl_vlm"},
            "/v1/models": {"data": [{"id": name} for name in self.models]},
            "/weight_info": {"weight_version": self.version},
            "/metrics": None,
        }[path]

    def post(self, path: str, body: dict[str, Any] | None = None, num_tokens: int = 0) -> Any:
        if self.is_dead:
            raise ServerLost(f"The vLLM server {self.url} does not answer.")
        if path == "/inference/v1/generate":
            self.asked, self.num_tokens = body, num_tokens
            raise RolloutError("asked")
        assert (self.folder / "adapter").exists()
        body = body or {}
        if path == "/v1/load_lora_adapter":
            assert body == {"lora_name": "policy", "lora_path": str(self.folder)} and self.models == ["base"]
            self.models.append("policy")
        if path == "/v1/unload_lora_adapter":
            self.models.remove(body["lora_name"])
        self.version = body.get("new_version", self.version)
        return {"success": True}


class Adapter:
    sends_adapter = True
    is_sharded = False

    def save_adapter(self, directory: Path) -> int:
        directory.mkdir()
        return (directory / "adapter").write_bytes(b"1234")

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("the adapter is sent")

    def join_gathering(self) -> None:
        raise AssertionError("this process sends")


class Renderer:
    processor = SimpleNamespace(tokenizer=None)

    def unexpanded_ids(self, sample: object) -> list[int]:
        return []


def test_weights_go_to_the_servers_that_live_and_are_deleted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    folder = tmp_path / "weight_sync"
    first, second = Server("a", folder), Server("b", folder)
    engine = VLLMServers([first, second], TokenRules([], []), Renderer(), folder, sends_weights=True, expected={})
    assert engine.sync(Adapter(), 1) == 8  # to each of them
    assert (first.version, second.version) == ("1", "1")

    second.is_dead = True
    assert engine.sync(Adapter(), 2) == 8
    assert (first.version, second.version, engine.live) == ("2", "1", [first])
    assert "http://b does not answer. The run continues without it; servers left: 1." in caplog.text

    first.is_dead = True
    with pytest.raises(RolloutError, match=r"http://a does not answer. No server is left"):
        engine.sync(Adapter(), 3)
    assert not folder.exists()


def test_a_rows_own_file_goes_to_a_server_as_it_is(tmp_path: Path):
    folder = tmp_path / "weight_sync"
    server = Server("a", folder)
    engine = VLLMServers([server], TokenRules([], []), Renderer(), folder, sends_weights=True, expected={})
    image = Image.new("RGB", (2, 2))
    sample = Sample("s", [], [image, image], {}, "", {1: jpeg(image)})
    request = RolloutRequest("g", Prompt(sample, torch.zeros(3, dtype=torch.int64), {}, {}))
    with pytest.raises(RolloutError, match="asked"):
        engine.generate([request], Sampling(2, 8, 1.0, seed=0))
    assert server.num_tokens == 64 + 2 * 8, "a prompt, and two completions"
    made, own = server.asked["content_parts"]
    assert made["url"].startswith("data:image/png;base64,iVBOR")
    assert own == {"type": "image_url", "url": f"data:image/jpeg;base64,{base64.b64encode(jpeg(image)).decode()}"}


def test_each_video_goes_to_a_server_with_its_own_times(tmp_path: Path):
    folder = tmp_path / "weight_sync"
    server = Server("a", folder)
    engine = VLLMServers([server], TokenRules([], []), Renderer(), folder, sends_weights=True, expected={})
    noise = np.random.default_rng(0).integers(256, size=(2, 3, 2, 4, 3), dtype=np.uint8)
    slow, fast = (Video(noise[i], (0, 5 + i, 9), 10.0 * (i + 1), 20, 2.0) for i in range(2))
    sample = Sample("s", [], [Image.new("RGB", (2, 2))], {}, "", videos=[slow, fast])
    request = RolloutRequest("g", Prompt(sample, torch.zeros(3, dtype=torch.int64), {}, {}))
    with pytest.raises(RolloutError, match="asked"):
        engine.generate([request], Sampling(2, 8, 1.0, seed=0))
    image, *videos = server.asked["content_parts"]
    assert [part["type"] for part in (image, *videos)] == ["image_url", "video_url", "video_url"]
    files = [base64.b64decode(part["url"].removeprefix("data:video/npz;base64,"), validate=True) for part in videos]
    for i, file in enumerate(files):
        frames, metadata = SentVideos.load_bytes(file, num_frames=32)
        assert np.array_equal(frames, noise[i])
        assert metadata == {
            "total_num_frames": 20, "fps": 10.0 * (i + 1), "frames_indices": [0, 5 + i, 9], "duration": 2.0,
            "height": 2, "width": 4, "do_sample_frames": False,
        }  # fmt: skip
        assert [type(metadata[name]) for name in ("fps", "total_num_frames", "do_sample_frames")] == [float, int, bool]


def jpeg(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "JPEG")
    return file.getvalue()


def test_weights_are_written_in_parts_of_a_limited_size():
    weights = [("a", torch.zeros(2)), ("b", torch.zeros(3)), ("c", torch.zeros(9)), ("d", torch.zeros(1))]
    assert [list(part) for part in parts_of(weights, max_bytes=20)] == [["a", "b"], ["c"], ["d"]]
    assert list(parts_of([], max_bytes=20)) == []
