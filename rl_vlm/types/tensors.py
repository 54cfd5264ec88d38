"""Ragged tensors, and tensors between host and device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Bool, Float
from torch import Tensor


def pad_rows(rows: Sequence[Tensor]) -> Tensor:
    """Stack N vectors of lengths up to T into (N, T), right-padded with 0."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def pad_split(values: Float[Tensor, " tokens"], lengths: Sequence[int]) -> Float[Tensor, "completions longest"]:
    """Split a vector into N rows of these lengths, right-padded with 0.

    One operator scatters all rows. If there were one operator per row, the backward of each would copy the gradient of
    all rows. The result is not a view of another tensor, since FSDP2 warns of modules that return views.
    """
    mask = length_mask(lengths)
    rows, columns = to_device(mask.nonzero(), values.device).unbind(1)
    return values.new_zeros(mask.shape).index_put((rows, columns), values)


def length_mask(lengths: Sequence[int], device: torch.device | None = None) -> Bool[Tensor, "completions tokens"]:
    """Build the (N, max length) mask of N completions, True at real tokens."""
    ends = torch.tensor(list(lengths), device=device)
    return torch.arange(int(ends.max()), device=device)[None, :] < ends[:, None]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device. The host does not wait for a GPU, since the copy is from pinned memory."""
    if device.type != "cpu" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to pinned host memory without waiting for its device. Call `synchronize` before reading it."""
    return tensor.to("cpu", non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait until the device has completed its work."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()
