"""How a transfer by NCCL ends, with something else in the place of NCCL."""

from collections.abc import Iterator
from threading import Event, Thread
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_vlm.errors import RolloutError
from rl_vlm.rollout.vllm.client import ServerLost, VLLMClient
from rl_vlm.rollout.vllm.nccl import Control, NCCLSender

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
