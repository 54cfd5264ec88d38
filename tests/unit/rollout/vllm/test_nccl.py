"""How a transfer by NCCL ends, with something else in the place of NCCL."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from threading import Event, Thread
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_vlm.errors import RolloutError
from rl_vlm.rollout.vllm.client import ServerLost, VLLMClient
from rl_vlm.rollout.vllm.nccl import Control, NCCLSender, source_of

URL = "http://server:8000"


class Server(VLLMClient):
    """Answers every request, or fails in the way that it is told to."""

    def __init__(self) -> None:
        super().__init__(URL, "token", timeout=1.0)
        self.error: RolloutError | None = None

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        if self.error:
            raise self.error


class Transfer:
    """vLLM's sending side, whose NCCL waits for the server, if need be for ever."""

    def __init__(self, sender: "Sender") -> None:
        self.sender = sender
        self.control = Control(sender.client, sender.outcome.put)
        self.sent: list[list[str]] = []
        self.aborted = Event()

    def send_weights(self) -> None:
        if self.sender.nccl_error:
            raise RuntimeError(self.sender.nccl_error)
        request = Thread(target=self.request)
        request.start()
        request.join()
        if self.sender.server.error:
            self.aborted.wait()
        self.sent.append([name for name, _ in self.sender.weights()])

    def request(self) -> None:
        try:
            self.control.update_weights({})
        except RolloutError:
            """vLLM looks at it when NCCL is done."""

    def shutdown(self) -> None:
        self.aborted.set()


class Sender(NCCLSender):
    def __init__(self) -> None:
        self.server = Server()
        super().__init__(self.server)
        self.num_connections = 0
        self.nccl_error = ""

    def connect(self) -> Transfer:
        self.num_connections += 1
        return Transfer(self)


def weights(*names: str) -> Iterator[tuple[str, Tensor]]:
    return ((name, torch.ones(2)) for name in names)


def test_each_transfer_sends_the_weights_of_its_time_over_one_connection():
    sender = Sender()
    sender.send(lambda: weights("a", "b"))
    sender.send(lambda: weights("c"))
    assert (sender.engine.sent, sender.num_connections) == ([["a", "b"], ["c"]], 1)


@pytest.mark.parametrize("error", [ServerLost(f"The vLLM server {URL} does not answer."), RolloutError(f"{URL}: 400")])
def test_nccl_that_waits_for_ever_is_aborted_when_the_request_fails(error: RolloutError):
    sender = Sender()
    sender.send(lambda: weights("a"))
    sender.server.error = error
    with pytest.raises(type(error), match=URL):
        sender.send(lambda: weights("a"))
    assert sender.engine.aborted.is_set()


def test_an_error_of_nccl_names_the_server():
    sender = Sender()
    sender.nccl_error = "NCCL error: remote process exited"
    with pytest.raises(ServerLost, match=rf"{URL} cannot be sent weights \(NCCL error: remote process exited\)"):
        sender.send(lambda: weights("a"))


def test_other_errors_come_out_as_they_are():
    sender = Sender()

    def broken() -> Iterator[tuple[str, Tensor]]:
        raise KeyError("lm_head.weight")

    with pytest.raises(KeyError, match="lm_head"):
        sender.send(broken)


class Broadcasts:
    """Takes the place of NCCL's communicator, and keeps the tensors that are broadcast."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []

    def broadcast(self, tensor: Tensor, src: int, stream: Any) -> None:
        self.tensors.append(tensor.clone())


class Requests(Server):
    """Keeps the requests."""

    def __init__(self) -> None:
        super().__init__()
        self.requests: list[tuple[str, Any]] = []

    def post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        self.requests.append((path, body))


@pytest.fixture
def no_gpu_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(Tensor, "cuda", lambda self: self)


@pytest.mark.ci
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm")
def test_the_sending_side_of_the_installed_vllm_announces_and_broadcasts_the_weights(no_gpu_needed: None):
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerWeightTransferEngine

    current = {"a": torch.tensor([[1.0, 2.0]]), "b": torch.tensor([3, 4, 5], dtype=torch.bfloat16)}
    server, broadcasts = Requests(), Broadcasts()
    control, source = Control(server, failed=print), source_of(lambda: iter(current.items()))
    engine: Any = NCCLTrainerWeightTransferEngine(client=control, source=source, packed=False)
    engine.model_update_group = broadcasts
    engine.send_weights()
    current["a"] = torch.tensor([[7.0, 8.0]])
    engine.send_weights()
    assert [tensor.tolist() for tensor in broadcasts.tensors] == [[[1, 2]], [3, 4, 5], [[7, 8]], [3, 4, 5]]
    assert [path for path, _ in server.requests] == 2 * [
        "/start_weight_update", "/update_weights", "/finish_weight_update"
    ]  # fmt: skip
    assert server.requests[1][1] == {
        "update_info": {"names": ["a", "b"], "dtype_names": ["float32", "bfloat16"], "shapes": [[1, 2], [3]]}
    }


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]


class SourceOf33:
    """Has the rules of vLLM 0.33's `WeightSource`, which is not installed here. They are copied from its source."""

    def __init_subclass__(cls) -> None:
        if not isinstance(cls.__dict__.get("metadata"), cached_property):
            raise TypeError(f"{cls.__name__}.metadata must be a functools.cached_property")

    @property
    def metadata(self) -> list[ParamMeta]:
        raise NotImplementedError

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        raise NotImplementedError


def test_the_source_follows_the_rules_of_vllm_0_33(monkeypatch: pytest.MonkeyPatch, no_gpu_needed: None):
    base: Any = ModuleType("base")
    base.ParamMeta, base.WeightSource = ParamMeta, SourceOf33
    monkeypatch.setitem(sys.modules, "vllm.distributed.weight_transfer.base", base)
    current = {"a": torch.tensor([[1.0, 2.0]])}
    source = source_of(lambda: iter(current.items()))
    assert source.metadata == [ParamMeta("a", torch.float32, (1, 2))]
    assert source.metadata is source.metadata
    current["a"] = torch.tensor([[7.0, 8.0]])
    assert [(name, weight.tolist()) for name, weight in source.iter_full()] == [("a", [[7, 8]])]
