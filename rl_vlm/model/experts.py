"""Routed experts under autocast.

`torch.nn.functional.grouped_mm`, with which transformers computes experts, ignores autocast. Experts that are trained
have float32 weights, and would compute in float32, without tensor cores.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel

GROUPED, AUTOCAST_GROUPED = "grouped_mm", "autocast_grouped_mm"


def enable_autocast_experts(model: PreTrainedModel) -> None:
    """Let routed experts compute in the precision of autocast, as linear layers do."""
    from transformers.integrations.moe import ExpertsInterface

    if model.config.get_text_config()._experts_implementation == GROUPED:
        ExpertsInterface.register(AUTOCAST_GROUPED, experts_forward)
        model.set_experts_implementation({"text_config": AUTOCAST_GROUPED})


def experts_forward(experts: nn.Module, hidden: Tensor, *routing: Tensor) -> Tensor:
    """Return transformers' grouped forward of the experts, with weights in the dtype of autocast."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    device = hidden.device.type
    read: Any = Cast(experts, torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else experts
    return grouped_mm_experts_forward(read, hidden, *routing)


class Cast:
    """A view of a module, with parameters that are cast when they are read. Its gradients have their own dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.module = module
        self.dtype = dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.module, name)
        return value.to(self.dtype) if isinstance(value, nn.Parameter) else value
