"""What DeepSpeed's engine is asked for, by a stand-in for it, and which part of a moment each rank of ZeRO-3 keeps."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.launch_variables import Launch
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.zero import ZeRO, gather_as

deepspeed: Any = pytest.importorskip("deepspeed")

CONFIG = RunConfig.model_validate(
    {"model": {"model_name_or_path": "m"}, "data": {"dataset_name": "d"}, "rewards": {"reward_funcs": ["exact_match"]}}
)
TEXT = SimpleNamespace(hidden_size=8)


def test_matrices_of_layers_are_sent_in_16_bits() -> None:
    """DeepSpeed asks its own function, which is private, for the dtype of a gather."""
    from deepspeed.runtime.zero.partition_parameters import get_allgather_dtype

    layer = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    model = nn.ModuleDict({"embedding": nn.Embedding(5, 4), "layer": layer})
    gather_as(torch.bfloat16, [layer])
    sent = {name: get_allgather_dtype(weight, weight) for name, weight in model.named_parameters()}
    assert sent == {
        "embedding.weight": torch.float32, "layer.0.weight": torch.bfloat16, "layer.0.bias": torch.float32,
        "layer.1.weight": torch.float32, "layer.1.bias": torch.float32,
    }  # fmt: skip


class Rank(Ranks):
    """One of several ranks, which do not communicate."""

    def __init__(self, rank: int, world_size: int, stage: int) -> None:
        self.of = (rank, world_size)
        self.launch = Launch("deepspeed", deepspeed={"zero_optimization": {"stage": stage}})

    @property
    def rank(self) -> int:
        return self.of[0]

    @property
    def world_size(self) -> int:
        return self.of[1]

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")


class Engine(nn.Module):
    """Adds up gradients, and keeps how it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.is_boundary = True
        self.backwards: list[tuple[bool, bool]] = []
        self.num_steps = 0
        self.norm, self.is_applied = 0.0, True

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        self.is_boundary = is_boundary

    def backward(self, loss: Tensor, scale_wrt_gas: bool = True) -> None:
        self.backwards.append((self.is_boundary, scale_wrt_gas))
        loss.backward()

    def step(self) -> None:
        self.num_steps += 1

    def get_global_grad_norm(self) -> Tensor:
        return torch.tensor(self.norm)

    def was_step_applied(self) -> bool:
        return self.is_applied


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def zero(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> ZeRO:
    """ZeRO-2 on one of three ranks."""
    monkeypatch.setattr(deepspeed, "initialize", lambda **_: (engine, None))
    zero = ZeRO(Rank(1, 3, stage=2), CONFIG)
    policy = SimpleNamespace(transformer=SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: TEXT)))
    zero.prepare(policy, optimizer=None)
    return zero


def test_only_the_last_micro_batch_is_a_boundary(zero: ZeRO, engine: Engine) -> None:
    weight = nn.Parameter(torch.tensor(2.0))
    for last in (False, False, True):
        with zero.accumulating(last):
            zero.backward(weight * 5)
    assert engine.backwards == [(False, False), (False, False), (True, False)]


@pytest.mark.parametrize(("is_share", "gradient"), [(True, 3 * 5.0), (False, 5.0)])
def test_an_average_over_ranks_becomes_a_sum_of_their_shares(zero: ZeRO, is_share: bool, gradient: float) -> None:
    weight = nn.Parameter(torch.tensor(2.0))
    zero.backward(weight * 5, is_share)
    assert weight.grad == gradient


@pytest.mark.parametrize("is_share", [True, False])
@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_not_finite_makes_its_gradients_nan(zero: ZeRO, is_share: bool, fault: float) -> None:
    weight = nn.Parameter(torch.tensor(2.0))
    zero.backward(weight * 5 + fault, is_share)  # a derivative of 5
    assert weight.grad is not None
    assert weight.grad.isnan()


@pytest.mark.parametrize(("norm", "is_applied"), [(2.5, True), (2.5, False), (float("inf"), False)])
def test_deepspeed_says_whether_it_updated(zero: ZeRO, engine: Engine, norm: float, is_applied: bool) -> None:
    engine.norm, engine.is_applied = norm, is_applied
    assert zero.update(loss_is_finite=True) == (norm, is_applied)
    assert engine.num_steps == 1


@pytest.mark.parametrize(
    ("world_size", "size", "parts"),
    [
        (2, 3, [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]),
        (4, 2, [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [0.0, 0.0]]),
        (5, 2, [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [0.0, 0.0], [0.0, 0.0]]),
        (1, 8, [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 0.0]]),
    ],
)
def test_each_rank_keeps_its_part_of_a_moment(
    world_size: int, size: int, parts: list[list[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(deepspeed.utils, "safe_set_local_optimizer_state", lambda *given: kept.append(given))
    parameter = SimpleNamespace(ds_tensor=torch.empty(size))
    for rank in range(world_size):
        zero = ZeRO(Rank(rank, world_size, stage=3), CONFIG)
        zero.load_moment(parameter, "exp_avg", torch.arange(6.0).view(2, 3))
    assert [(target is parameter, name) for target, _, name in kept] == [(True, "exp_avg")] * world_size
    assert [part.tolist() for _, part, _ in kept] == parts


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_with_whole_weights_are_given_whole_moments(stage: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(deepspeed.utils, "safe_set_full_optimizer_state", lambda *given: kept.append(given))
    parameter, value = object(), torch.arange(6.0).view(2, 3)
    ZeRO(Rank(1, 2, stage), CONFIG).load_moment(parameter, "exp_avg_sq", value)
    ((target, found, name),) = kept
    assert target is parameter
    assert name == "exp_avg_sq"
    assert torch.equal(found, value)
