"""Models that have no module for all but the LM head."""

from typing import Any

import torch
from torch import Tensor, nn

from rl_vlm.model.body import run_body


class Whole(nn.Module):
    """Doubles its inputs, and then applies the head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 5, bias=False)

    @property
    def base_model(self) -> nn.Module:
        return self

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(self, values: Tensor) -> dict[str, Tensor]:
        return {"logits": self.head(2 * values), "cache": values}


def test_the_head_gets_no_tokens_and_its_input_is_returned() -> None:
    model: Any = Whole()
    values = torch.tensor([[[1.0], [2], [3]]], requires_grad=True)
    hidden, output = run_body(model, values=values)
    assert hidden.flatten().tolist() == [2, 4, 6]
    assert output["logits"].shape == (1, 0, 5)
    assert output["cache"] is values
    hidden.sum().backward()
    assert values.grad is not None
    assert values.grad.flatten().tolist() == [2, 2, 2]
    assert model(values)["logits"].shape == (1, 3, 5)
