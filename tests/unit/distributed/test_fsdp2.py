"""FSDP2 on two ranks against torch on one process: gradients, updates and optimizer state."""

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.fsdp2 import FSDP2
from rl_vlm.distributed.launch_variables import Launch
from rl_vlm.distributed.ranks import Ranks
from tests.helpers.threaded_ranks import on_ranks

NUM_RANKS = 2
MAX_NORM = 0.5
CONFIG = RunConfig.model_validate({"model": {"model_name_or_path": "m"}, "train": {"max_grad_norm": MAX_NORM}})
INPUTS = {(rank, i): torch.tensor([[1.0 + rank, 0.5, -0.3 * i]]) for rank in range(NUM_RANKS) for i in range(2)}
"""Each rank's two micro-batches."""


class Layers(nn.Module):
    """Two layers of 3 x 3 weights, which two ranks do not divide, and a weight outside of layers."""

    _no_split_modules = ("Linear",)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return (x * self.scale).sum()


class Policy(nn.Module):
    """The layers, or an adapter's wrapper around them."""

    compute_dtype = torch.float32

    def __init__(self, has_adapter: bool = False) -> None:
        super().__init__()
        self.transformer = Layers()
        self.model = nn.Sequential(self.transformer) if has_adapter else self.transformer
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.linspace(-1, 0.5, parameter.numel()).view_as(parameter))

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def make_adamw(policy: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(policy.parameters(), lr=0.1, eps=0.1)


def prepared(ranks: Ranks, has_adapter: bool = False) -> tuple[Policy, FSDP2]:
    """A sharded policy with its optimizer. Only rank 0 has the weights at first."""
    fsdp2, policy = FSDP2(ranks, CONFIG), Policy(has_adapter)
    fsdp2.place(policy.to("meta") if fsdp2.loads_empty else policy)
    fsdp2.prepare(policy, make_adamw(policy))
    return policy, fsdp2


def add_gradients(policy: Policy, fsdp2: FSDP2, is_share: bool = True) -> list[bool]:
    """Run two micro-batches. Returns whether all weights have a gradient, reduced to shards, after each."""
    are_reduced = []
    for i in range(2):
        with fsdp2.accumulating(last=i == 1):
            fsdp2.backward(policy(INPUTS[fsdp2.ranks.rank, i]), is_share)
        are_reduced.append(all(parameter.grad is not None for parameter in policy.parameters()))
    return are_reduced


def policy_of_one_process() -> Policy:
    """A policy with the sum of the gradients of all ranks' micro-batches."""
    policy = Policy()
    for x in INPUTS.values():
        policy(x).backward()
    return policy


def wholes(tensors: Iterable[Any]) -> list[Tensor]:
    return [tensor.full_tensor() for tensor in tensors]


@pytest.mark.parametrize("has_adapter", [False, True])
@pytest.mark.parametrize(("is_share", "factor"), [(True, 1), (False, 1 / NUM_RANKS)])
def test_gradients_are_added_up_over_micro_batches_and_ranks(has_adapter: bool, is_share: bool, factor: float) -> None:
    def on_rank(ranks: Ranks) -> tuple[list[bool], list[Tensor]]:
        policy, fsdp2 = prepared(ranks, has_adapter)
        are_reduced = add_gradients(policy, fsdp2, is_share)
        return are_reduced, wholes(parameter.grad for parameter in policy.parameters())

    for are_reduced, gradients in on_ranks(NUM_RANKS, on_rank, Launch("fsdp2")):
        assert are_reduced == [not has_adapter, True]  # those of an adapter once, at the end
        expected = [factor * gradient_of(parameter) for parameter in policy_of_one_process().parameters()]
        torch.testing.assert_close(gradients, expected)


def test_an_update_is_that_of_one_process() -> None:
    def on_rank(ranks: Ranks) -> tuple[float, bool, list[Tensor], list[dict[str, Tensor]]]:
        policy, fsdp2 = prepared(ranks)
        add_gradients(policy, fsdp2)
        fsdp2.reserve_update()
        norm, is_updated = fsdp2.update(loss_is_finite=True)
        states = [fsdp2.optimizer_state(parameter) for parameter in policy.parameters()]
        return norm, is_updated, wholes(policy.parameters()), states

    policy = policy_of_one_process()
    adamw = make_adamw(policy)
    expected_norm = torch.cat([gradient_of(parameter).flatten() for parameter in policy.parameters()]).norm().item()
    assert expected_norm > MAX_NORM
    nn.utils.clip_grad_norm_(policy.parameters(), MAX_NORM)
    adamw.step()
    for norm, is_updated, weights, states in on_ranks(NUM_RANKS, on_rank, Launch("fsdp2")):
        assert is_updated
        assert norm == pytest.approx(expected_norm)
        torch.testing.assert_close(weights, [parameter.detach() for parameter in policy.parameters()])
        torch.testing.assert_close(states, [adamw.state[parameter] for parameter in policy.parameters()])


def test_each_rank_keeps_its_part_of_an_optimizer_state() -> None:
    """Each has the whole state, so none is sent another rank's: here they differ, to see that."""
    rows = torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0]])

    def on_rank(ranks: Ranks) -> dict[str, Tensor]:
        policy, fsdp2 = prepared(ranks)
        parameter: Any = policy.transformer.layers[0].weight
        given = {"step": torch.tensor(3.0), "exp_avg": rows + 10 * ranks.rank}
        fsdp2.load_optimizer_state({parameter: given})
        fsdp2.optimizer.state[parameter]["step"] += 1  # as an update does
        assert given["step"] == 3
        assert fsdp2.optimizer.state[parameter]["exp_avg"].placements == parameter.placements
        return fsdp2.optimizer_state(parameter)

    for state in on_ranks(NUM_RANKS, on_rank, Launch("fsdp2")):
        assert state["step"] == 4
        assert state["exp_avg"].tolist() == [*rows[:2].tolist(), [16.0, 17.0, 18.0]]


def gradient_of(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad
