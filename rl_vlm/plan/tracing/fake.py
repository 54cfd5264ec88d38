"""Tensors without memory, on which a training step runs unchanged.

PyTorch's fake tensors have shapes and no values. Code that reads a value (`tolist`, `nonzero`, an index of bools)
fails. Here, fake tensors of integers and bools also have their values on the CPU. Floats have none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.weak import WeakTensorKeyDictionary

from rl_vlm.plan.tracing.live import LiveBytes

aten, prim = torch.ops.aten, torch.ops.prim
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._unsafe_index.Tensor}
ARANGE = {aten.arange.default, aten.arange.start, aten.arange.start_step}
NO_VALUE = 1
"""Result of reading a value that is not known, such as a loss or a gradient's norm. It is finite and not 0."""


@contextmanager
def fake_tensors() -> Iterator[LiveBytes]:
    """Make tensors in this context without memory. Yield the counter of the bytes that they would take."""
    with FakeTensorMode(allow_non_fake_inputs=True), LiveBytes() as live, IntegerValues(live):
        yield live


def make_fake(*modules: nn.Module) -> None:
    """Replace the modules' parameters and buffers by fake ones, which keep their dtype, shape and ties."""
    made: dict[Tensor, Tensor] = {}

    def fake(tensor: Tensor) -> Tensor:
        if tensor not in made:
            # Integers keep their values, unless they are on the meta device.
            known = has_values(tensor.dtype) and not tensor.is_meta
            copy = tensor.detach().clone() if known else torch.empty(tensor.shape, dtype=tensor.dtype)
            made[tensor] = nn.Parameter(copy, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else copy
        return made[tensor]

    for part in (part for module in modules for part in module.modules()):
        own: list[Any] = [part._parameters, part._buffers]
        for tensors in own:
            tensors.update({name: fake(tensor) for name, tensor in tensors.items() if tensor is not None})


class IntegerValues(TorchDispatchMode):
    """Computes the values of integer and bool tensors. Use it within a `FakeTensorMode`."""

    def __init__(self, live: LiveBytes) -> None:
        super().__init__()
        self.live = live
        self.values = WeakTensorKeyDictionary()
        self.fakes = WeakTensorKeyDictionary()
        """Fake copies of real tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is prim.device.default:  # the most frequent operator
            return func(*args)
        flat, spec = tree_flatten((args, kwargs or {}))
        tensors = [x for x in flat if isinstance(x, Tensor)]
        values: list[Any] = [self.value(tensor) for tensor in tensors]
        known = all(value is not None for value in values)
        if func is aten._local_scalar_dense.default:
            return self.read(values[0], tensors[0].dtype)
        if known and func is aten.equal.default:
            with unset_fake_temporarily():
                return torch.equal(*values)
        if known and (tensors or makes_integers(func, spec, flat)):
            computed = self.computed(func, flat, spec, tensors)
            if computed is not NotImplemented:
                return computed
        if func is aten.nonzero.default:
            return self.positions(tensors[0])
        if func in INDEXING:
            flat, spec = tree_flatten(((args[0], self.places(args[1]), *args[2:]), kwargs or {}))
        args, kwargs = tree_unflatten([self.fake(x) if isinstance(x, Tensor) else x for x in flat], spec)
        if func is aten._grouped_mm.default:  # of experts; PyTorch's fake operator accepts bfloat16 only
            return grouped_product(*args[:3])
        return func(*args, **kwargs)

    def value(self, tensor: Tensor) -> Tensor | None:
        """Return the values of an integer tensor, or None if the tensor has no values."""
        if not isinstance(tensor, FakeTensor):
            return tensor if has_values(tensor.dtype) and not tensor.is_meta else None
        return self.values.get(tensor)

    def fake(self, tensor: Tensor) -> Tensor:
        """Return the fake copy of a real tensor. Its memory is not counted, since the real tensor existed before."""
        if isinstance(tensor, FakeTensor):
            return tensor
        if tensor not in self.fakes:
            with self.live.paused():
                if has_values(tensor.dtype):
                    self.fakes[tensor] = self.with_values(tensor, tensor.device)
                else:
                    self.fakes[tensor] = like(tensor, tensor.device)
        return self.fakes[tensor]

    def with_values(self, values: Tensor, device: torch.device) -> Tensor:
        """Return a new fake tensor that has these values."""
        made = like(values, device)
        self.values[made] = values
        return made

    def read(self, value: Tensor | None, dtype: torch.dtype) -> Any:
        """Return the value of a tensor of one element, as `item` does."""
        if value is None:
            return float(NO_VALUE) if dtype.is_floating_point else NO_VALUE
        with unset_fake_temporarily():
            return value.item()

    def places(self, indices: Any) -> list[Any]:
        """Replace bool tensors among the indices by the positions of their True values, whose number is known."""
        made = []
        for index in indices:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                made.append(index)
            else:
                made += self.positions(index).unbind(1)
        return made

    def positions(self, mask: Tensor) -> Tensor:
        """Return the result of `nonzero`. A mask that depends on floats is taken as all True, the most memory."""
        value = self.value(mask)
        with unset_fake_temporarily():
            found = (torch.ones(mask.shape, dtype=torch.bool) if value is None else value).nonzero()
        return self.with_values(found, mask.device)

    def computed(self, func: Any, flat: list[Any], spec: Any, tensors: list[Tensor]) -> Any:
        """Run an operator on values. Returns NotImplemented if that fails, or if a result has no values."""
        device = next((x for x in flat if isinstance(x, torch.device)), tensors[0].device if tensors else None)
        args, kwargs = tree_unflatten([self.real(x) for x in flat], spec)
        kwargs.pop("pin_memory", None)
        try:
            with unset_fake_temporarily():
                out = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):  # the fake operator then raises the same
            return NotImplemented
        if any(isinstance(x, Tensor) and not has_values(x.dtype) for x in tree_flatten(out)[0]):
            return NotImplemented
        changed = {id(self.value(tensor)): tensor for tensor in tensors}  # in-place operators return their argument

        def result(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return changed[id(x)] if id(x) in changed else self.with_values(x, device or x.device)

        return tree_map(result, out)

    def real(self, x: Any) -> Any:
        if isinstance(x, Tensor):
            return self.value(x)
        return torch.device("cpu") if isinstance(x, torch.device) else x


def has_values(dtype: torch.dtype) -> bool:
    return not dtype.is_floating_point and not dtype.is_complex


def makes_integers(func: Any, spec: Any, flat: list[Any]) -> bool:
    """Return whether an operator without tensor arguments makes integers."""
    dtype = next((x for x in flat if isinstance(x, torch.dtype)), None)
    if dtype is None:
        return func in ARANGE and all(isinstance(x, int) for x in flat if isinstance(x, int | float))
    return has_values(dtype)


def grouped_product(left: Tensor, right: Tensor, offsets: Tensor) -> Tensor:
    """Multiply each group of rows with its matrix. If `right` has rows, make the gradient of the matrices."""
    shape = left.shape[0], right.shape[-1]
    return left.new_empty((len(offsets), *shape) if right.ndim == 2 else shape)


def like(tensor: Tensor, device: torch.device) -> Tensor:
    """Make a fake tensor of the same shape, strides and dtype."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
