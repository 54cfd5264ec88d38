"""The bound on a run's bytes that spares small models a memory plan."""

import torch
from torch import nn

from rl_vlm.plan.bound import values_per_token


def test_values_of_matrices_convolutions_and_experts():
    def weights(*shape: int) -> list[nn.Parameter]:
        return [nn.Parameter(torch.empty(shape))]

    assert values_per_token(weights(4, 6), row=0) == 8 * (4 + 6)
    assert values_per_token(weights(4, 6), row=64) == (8 + 2) * (4 + 6)
    assert values_per_token(weights(3, 4, 6), row=0) == 8 * 3 * (4 + 6)  # three experts
    assert values_per_token(weights(5, 3, 2, 2), row=0) == 8 * (5 * 3 * 2 + 5 * 3 * 2)
    assert values_per_token(weights(7), row=0) == 0  # a norm
