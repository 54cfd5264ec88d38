"""What becomes of a sync when servers are lost, without vLLM."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from rl_vlm.errors import RolloutError
from rl_vlm.families import TokenRules
from rl_vlm.generation.vllm_client import ServerLost, VLLMClient
from rl_vlm.generation.vllm_servers import VLLMServers


class Server(VLLMClient):
    """Takes every adapter, unless it is dead."""

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(f"http://{name}", "token", 1.0)
        self.folder, self.is_dead, self.version = folder, False, "-1"

    def get(self, path: str) -> Any:
        setup = {"max_model_len": 64, "weight_transfer": "rl_vlm"}
        return setup if path == "/rl_vlm/setup" else {"weight_version": self.version}

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        if self.is_dead:
            raise ServerLost(f"The vLLM server {self.url} does not answer.")
        assert (self.folder / "adapter").exists()
        self.version = (body or {}).get("new_version", self.version)
        return {"success": True}


class Adapter:
    sends_adapter = True

    def save_adapter(self, directory: Path) -> int:
        return (directory / "adapter").write_bytes(b"1234")

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        raise AssertionError("the adapter is sent")


class Renderer:
    processor = None

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
    assert "http://b does not answer. The run goes on without it; servers left: 1." in caplog.text

    first.is_dead = True
    with pytest.raises(RolloutError, match=r"http://a does not answer. No server is left"):
        engine.sync(Adapter(), 3)
    assert not folder.exists()
