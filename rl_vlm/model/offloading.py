"""Keeps activations of a forward in host memory until its backward pass needs them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.weak import WeakTensorKeyDictionary

MIN_BYTES = 2**16
"""Smaller tensors stay on the device."""


class InHostMemory(NamedTuple):
    """A tensor that was moved. If it came from a GPU, it is in pinned memory."""

    values: Tensor
    device: torch.device
    version: int
    """Number of in-place changes to the tensor at that time."""


class ActivationOffloading(saved_tensors_hooks):
    """A context for forwards. Saved tensors move to host memory, and back one by one in the backward pass.

    Unlike `torch.autograd.graph.save_on_cpu` it leaves weights where they are. If several layers save the same tensor,
    such as position embeddings, it is copied once. With gradient checkpointing the inputs of layers are moved.
    """

    def __init__(self, device: torch.device) -> None:
        """Move tensors of `device`."""
        self.device = device
        self.moved = WeakTensorKeyDictionary()
        super().__init__(self.pack, self.unpack)

    def pack(self, tensor: Tensor) -> Tensor | InHostMemory:
        """Copy an activation to host memory."""
        if tensor.nbytes < MIN_BYTES or tensor.device != self.device or is_weight(tensor):
            return tensor
        found = self.moved.get(tensor)
        if found is None or found.version != tensor._version:
            pinned = self.device.type == "cuda"
            values = torch.empty_like(tensor, device="cpu", pin_memory=pinned, requires_grad=False)
            values.copy_(tensor.detach(), non_blocking=pinned)
            found = self.moved[tensor] = InHostMemory(values, tensor.device, tensor._version)
        return found

    def unpack(self, packed: Tensor | InHostMemory) -> Tensor:
        """Copy an activation back to its device."""
        return packed if isinstance(packed, Tensor) else packed.values.to(packed.device, non_blocking=True)


def is_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is a weight or a view of one."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)
