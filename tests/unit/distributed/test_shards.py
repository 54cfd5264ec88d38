"""Parts of parameters: DTensors on ranks that are threads, and stand-ins for parameters of ZeRO-3."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.shards import is_shard, local_part, set_whole, whole, whole_shape
from tests.helpers.threaded_ranks import on_ranks

PADDING = -1.0


def zero3_parameter(num_values: int, group: Any) -> Any:
    """This rank's parameter of ZeRO-3 with the values 0, 1, …, which `group` shares in parts of equal size."""
    size = -(-num_values // group.size())
    values = torch.full((size * group.size(),), PADDING)
    values[:num_values] = torch.arange(num_values)
    part = values.split(size)[group.rank()].clone()
    return SimpleNamespace(
        ds_id=0, ds_tensor=part, ds_numel=num_values, ds_shape=(num_values,), ds_process_group=group,
        device=part.device, numel=lambda: 0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("shape", "parts"),
    [
        ((4,), [[0, 1], [2, 3], [4], []]),
        ((2, 2), [[0, 1, 2], [3, 4], [0, 1, 2], [3, 4]]),  # two groups of two ranks
    ],
)
def test_a_part_of_zero3_ends_before_the_padding(shape: tuple[int, ...], parts: list[list[float]]) -> None:
    def on_rank(ranks: Ranks) -> tuple[list[float], float]:
        group = init_device_mesh("cpu", shape).get_group(len(shape) - 1)
        parameter = zero3_parameter(5, group)
        values = local_part(parameter).tolist()
        local_part(parameter).fill_(7.0)
        return values, parameter.ds_tensor.sum().item()

    found = on_ranks(4, on_rank)
    assert [values for values, _ in found] == parts
    size = max(map(len, parts))
    assert [total for _, total in found] == [7.0 * len(part) + PADDING * (size - len(part)) for part in parts]


def test_a_parameter_of_zero3_is_replaced_by_whole_values() -> None:
    def on_rank(ranks: Ranks) -> None:
        parameter = zero3_parameter(5, init_device_mesh("cpu", (ranks.world_size,)).get_group())
        assert whole(parameter).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
        set_whole(parameter, torch.tensor([5.0, 6.0, 7.0, 8.0, 9.0]))
        assert whole(parameter).tolist() == [5.0, 6.0, 7.0, 8.0, 9.0]

    on_ranks(2, on_rank)
    on_ranks(4, on_rank)


def test_a_dtensor_is_replaced_by_whole_values() -> None:
    def on_rank(ranks: Ranks) -> None:
        mesh: Any = init_device_mesh("cpu", (ranks.world_size,))
        parameter = torch.nn.Parameter(distribute_tensor(torch.zeros(3, 2), mesh, [Shard(0)], src_data_rank=None))
        assert is_shard(parameter)
        assert whole_shape(parameter) == (3, 2)
        assert whole(parameter).tolist() == [[0.0, 0.0]] * 3
        set_whole(parameter, torch.arange(6.0).view(3, 2))
        rows = [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
        assert local_part(parameter).tolist() == (rows[:2] if ranks.rank == 0 else rows[2:])
        assert whole(parameter).tolist() == rows
        assert not whole(parameter).requires_grad

    on_ranks(2, on_rank)
