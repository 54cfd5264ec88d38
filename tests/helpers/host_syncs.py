"""Where a training pass would make the host wait for a GPU, found without one: on fake tensors of a CUDA device.

Autograd's backward needs a real device, so that passes here are forwards. Operators of ours are the same in both.
"""

from __future__ import annotations

import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention.flex_attention import BlockMask
from torch.utils._python_dispatch import TorchDispatchMode

from rl_vlm.distributed.ddp import DDP
from rl_vlm.model import shared_prefix
from rl_vlm.model.features import KeptFeatures
from rl_vlm.model.policy import Policy
from rl_vlm.model.reference import Reference
from rl_vlm.plan.tracing.step import Alone, make_models_fake

PACKAGE = Path(shared_prefix.__file__).parents[1]
DEVICE = torch.device("cuda:0")

aten = torch.ops.aten
READS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.masked_select.default, aten.equal.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
COPIES = {aten._to_copy.default, aten.copy_.default}


class HostSyncs(TorchDispatchMode):
    """Counts operators that make the host wait for the device, by the innermost function of the package."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if waits(func, args, kwargs):
            self.found[place()] += 1
        return func(*args, **kwargs)


def waits(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an operator waits: it reads from the device, or copies from or to it and blocks."""
    if func in READS:
        return any(on_device(x) for x in args if isinstance(x, Tensor))
    if func in INDEXING:
        indices = [index for index in args[1] if index is not None]
        masks = [index for index in indices if index.dtype in (torch.bool, torch.uint8)]
        return on_device(args[0]) and (bool(masks) or not all(map(on_device, indices)))
    if func in COPIES:
        target, source = copied(func, args, kwargs)
        blocks = not kwargs.get("non_blocking", args[2] if len(args) > 2 else False)
        return blocks and is_cuda(target) != is_cuda(source)
    return False


def copied(func: Any, args: Any, kwargs: Any) -> tuple[torch.device, torch.device]:
    """Return the devices that a copy is made to and from."""
    if func is aten.copy_.default:
        return device_of(args[0]), device_of(args[1])
    return torch.device(kwargs.get("device") or device_of(args[0])), device_of(args[0])


def device_of(tensor: Tensor) -> torch.device:
    return tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device


def is_cuda(device: torch.device) -> bool:
    return device.type == "cuda"


def on_device(tensor: Tensor) -> bool:
    return is_cuda(device_of(tensor))


def place() -> str:
    """Return the innermost function of the package on the stack, without the tracing itself."""
    frames = [frame for frame in traceback.extract_stack() if Path(frame.filename).is_relative_to(PACKAGE)]
    inner = [frame for frame in frames if "tracing" not in frame.filename]
    return f"{Path(inner[-1].filename).name}:{inner[-1].name}"


def place_on_fake_gpu(policy: Policy, reference: Reference | None) -> None:
    """Replace the models' weights and buffers by fake ones of a CUDA device."""
    with DEVICE:
        make_models_fake(policy, reference)
    models: list[nn.Module] = [policy, *([reference.frozen] if reference and reference.frozen else [])]
    for module in (module for model in models for module in model.modules()):
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(DEVICE)


def pretend_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give ranks a CUDA device, without backwards, pinned memory and waiting, which need a real one."""
    monkeypatch.setattr(Alone, "device", DEVICE)
    monkeypatch.setattr(DDP, "backward", lambda *args, **kwargs: None)
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor: tensor)
    loss = KeptFeatures.loss
    monkeypatch.setattr(KeptFeatures, "loss", lambda kept, features: loss(with_gradients(kept), features))
    monkeypatch.setattr("rl_vlm.trainer.synchronize", lambda device: None)
    monkeypatch.setattr(shared_prefix, "create_block_mask", made_mask)
    monkeypatch.setattr(shared_prefix, "block_attention", made_attention)


def with_gradients(kept: KeptFeatures) -> KeptFeatures:
    """Give kept features the gradients that backwards would have left."""
    for leaf in kept.leaves.tensors():
        leaf.grad = torch.zeros_like(leaf)
    return kept


def made_mask(rule: Any, batch: None, heads: None, queries: int, keys: int, device: str) -> BlockMask:
    """Evaluate the rule of a mask once, as FlexAttention does for all pairs."""
    zero = torch.zeros((), dtype=torch.int64, device=device)
    rule(zero, zero, torch.arange(queries, device=device)[:, None], torch.arange(keys, device=device)[None])
    return BlockMask.__new__(BlockMask)


def made_attention(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float) -> Tensor:
    return query.transpose(0, 1)
