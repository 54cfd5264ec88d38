"""Runs a model without its LM head, whether or not transformers has a module for the rest of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def run_body(model: PreTrainedModel, **inputs: Any) -> tuple[Tensor, Any]:
    """Run one forward. Return the last hidden states (rows, tokens, hidden), and the whole output.

    Some models have no module that holds all but the LM head (Qwen-Omni). Then the head is called on no tokens.
    """
    body: Any = model.base_model
    if body is not model:
        output = body(**inputs)
        return output.last_hidden_state, output
    head: Any = model.get_output_embeddings()
    found: list[Tensor] = []

    def take(module: nn.Module, arguments: tuple[Tensor]) -> tuple[Tensor]:
        found.append(arguments[0])
        return (arguments[0][:, :0],)

    handle = head.register_forward_pre_hook(take)
    try:
        output = body(**inputs)
    finally:
        handle.remove()
    (hidden,) = found
    return hidden, output
