"""Where a training step makes the host wait for the device, found without a GPU. Run in a process of its own.

The step runs on fake tensors on a device that does not exist: a backend that torch is told of, in place of CUDA, since
autograd asks CUDA's driver for its streams. torch has it for the whole process. A mode of operators lists those that
synchronise on CUDA, by the place in the code that calls them.
"""

from __future__ import annotations

import itertools
import json
import re
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rl_vlm.config.schema import RunConfig, SharedAttention
from rl_vlm.distributed.collectives import Collectives
from rl_vlm.model.shared_prefix import MaskFunction, RowLayout
from rl_vlm.plan.tracing import step
from rl_vlm.plan.tracing.fake import fake_tensors
from rl_vlm.plan.tracing.gpu_attention import attention_as_on_gpu
from rl_vlm.stages import Listener, Stage
from rl_vlm.types import ScoredGroup
from tests.helpers.builders import make_groups, noise_image


class Backend(backend_registration._DummyBackendModule):
    """What torch asks of a backend."""

    def device_count(self) -> int:
        return 1

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]


aten = torch.ops.aten
torch._C._ensureCUDADeviceGuardSet()  # autograd asks every backend for its devices
backend_registration._setup_privateuseone_for_python_backend("traced", backend_module=Backend())
DEVICE = torch.device("traced:0")
MASKS = (torch.bool, torch.uint8)
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._unsafe_index}
READING = {
    aten._local_scalar_dense, aten.nonzero, aten.masked_select, aten.masked_scatter_backward, aten.equal,
    aten.unique_consecutive, aten._unique2, aten.unique_dim, aten.bincount,
}  # fmt: skip
"""Operators whose result, or its shape, the host reads from the device."""
FRAME = re.compile(r'  File "(?P<path>.*)", line \d+, in (?P<function>.*)')
"""The first line of a frame in a formatted traceback."""


class HostSyncs(TorchDispatchMode, Listener):
    """Counts the operators that make the host wait for the device, by phase and place. Enter it above `fake_tensors`.

    It also raises RuntimeError if an operator gets tensors of host and device, which integers with values would hide.
    """

    def __init__(self) -> None:
        super().__init__()
        self.phase = "step"
        self.clear()
        self.pinned: set[int] = set()
        """Storages in pinned memory; they are kept, so that no address is used again."""
        self.kept: list[Any] = []

    def clear(self) -> None:
        """Forget what was found."""
        self.found: dict[str, Counter[str]] = {"step": Counter(), "micro-batches": Counter()}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._overloadpacket is aten.is_pinned:
            return self.is_pinned(args[0])
        if func._overloadpacket is aten._pin_memory:
            return self.pin(args[0].clone())
        reason = None if func is torch.ops.prim.device.default else self.reason(func, args, kwargs)
        if reason is not None:
            self.note(f"{func._overloadpacket.__name__} {reason}".rstrip())
        pins = kwargs.pop("pin_memory", False)
        out = func(*args, **kwargs)
        goes_to_host = func is aten._to_copy.default and on_device(args[0]) and not on_device(out)
        return self.pin(out) if pins or (goes_to_host and kwargs.get("non_blocking")) else out

    def reason(self, func: Any, args: Any, kwargs: Any) -> str | None:
        """Return what about an operator synchronises, or None."""
        packet, tensors = func._overloadpacket, [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if packet is aten._to_copy:
            target = kwargs.get("device") or args[0].device
            return self.copied(args[0], target.type, kwargs.get("non_blocking", False))
        if packet is aten.copy_:
            non_blocking = args[2] if len(args) > 2 else kwargs.get("non_blocking", False)
            return self.copied(args[1], args[0].device.type, non_blocking, into=args[0])
        if not any(map(on_device, tensors)):
            return None
        if packet in INDEXING:
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype in MASKS for index in indices):
                return "by a mask"
            return "by an index of the host" if on_device(args[0]) and not all(map(on_device, indices)) else None
        if any(tensor.ndim and not on_device(tensor) for tensor in tensors):
            raise RuntimeError(f"{func} with tensors of host and device at {place()}")
        if func is aten.repeat_interleave.Tensor:
            return None if kwargs.get("output_size") else ""
        return "" if packet in READING else None

    def copied(self, source: Tensor, target: str, non_blocking: bool, into: Tensor | None = None) -> str | None:
        """Return what about a copy synchronises, or None."""
        if on_device(source) == (target == DEVICE.type):
            return None
        if on_device(source):
            is_async = non_blocking and (into is None or self.is_pinned(into))  # `to` makes pinned memory itself
            return None if is_async else "to the host"
        return None if non_blocking and self.is_pinned(source) else "to the device"

    def pin(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self.kept.append(storage)
        self.pinned.add(storage._cdata)
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata in self.pinned

    def note(self, operator: str) -> None:
        self.found[self.phase][f"{place()}: {operator}"] += 1

    def passes(self, stage: Stage) -> AbstractContextManager[None]:
        """Count the operators of passes apart."""
        return self.within("micro-batches")

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Count the block's operators in this phase."""
        before, self.phase = self.phase, phase
        try:
            yield
        finally:
            self.phase = before


@dataclass(frozen=True)
class Stream:
    """Stands in for the stream of the device."""

    syncs: HostSyncs

    def synchronize(self) -> None:
        self.syncs.note("synchronize")


def on_device(tensor: Any) -> bool:
    return isinstance(tensor, Tensor) and tensor.device.type == DEVICE.type


def place() -> str:
    """Return the innermost function of the package on the stack, and of transformers within it."""
    theirs = ""
    for path, function in calls():
        theirs = theirs or name_of(path, function, "/transformers/")
        if ours := name_of(path, function, "/rl_vlm/"):
            return f"{ours} > {theirs.rsplit('/')[-1]}" if theirs else ours
    return theirs


def calls() -> list[tuple[str, str]]:
    """Return file and function of the calls on the stack, innermost first.

    Within a backward pass those of the forward operator follow in place of its start, as anomaly detection noted them.
    """
    stack = [(frame.f_code.co_filename, frame.f_code.co_name) for frame, _ in traceback.walk_stack(sys._getframe())]
    node = torch._C._current_autograd_node()
    if node is None:
        return stack
    within = itertools.takewhile(lambda call: call[1] != "_engine_run_backward", stack)
    metadata: Any = node.metadata
    noted = [FRAME.match(line) for line in reversed(metadata["traceback_"])]
    return [*within, *((match["path"], match["function"]) for match in noted if match)]


def name_of(path: str, function: str, folder: str) -> str:
    """Return `file:function` of a call if its file is in this folder, or nothing."""
    _, found, inner = path.rpartition(folder)
    is_comprehension = function.endswith("comp>")  # which is a call of its own before Python 3.12
    return f"{inner}:{function}" if found and not is_comprehension and not inner.startswith("plan/tracing") else ""


def host_syncs(config: RunConfig, checkpoint: str, groups: list[ScoredGroup]) -> dict[str, Any]:
    """Take a step on a device, and count the operators that synchronise in it, by phase and place."""
    policy, reference = step.models_without_storage(config, checkpoint, groups)
    syncs, tokens = HostSyncs(), config.memory.micro_batch_tokens
    assert tokens != "auto"

    def with_masks(layout: RowLayout, mask_function: MaskFunction, setting: SharedAttention = "auto") -> RowLayout:
        layout.block_mask(mask_function)
        return layout

    with (
        fake_tensors() as live,
        attention_as_on_gpu(),
        mock.patch.object(RowLayout, "with_masks", with_masks),
        mock.patch.object(torch.accelerator, "current_stream", lambda device: Stream(syncs)),
        torch.autograd.set_multithreading_enabled(False),  # the modes are of this thread
        torch.autograd.set_detect_anomaly(True, check_nan=False),  # notes where operators of a backward come from
    ):
        with torch.device(DEVICE):
            step.make_models_fake(policy, reference)
        steps = step.TracedSteps(config, policy, reference, groups, 2, live, tokens, Collectives(DEVICE), [syncs])
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` copies to the device by an operator, as with CUDA
        with syncs:
            steps.take()  # makes the optimizer state
            syncs.clear()
            steps.take()
    return syncs.found | {"counters": policy.counters}


def main() -> None:
    """Read cases by name, as JSON: settings, and the size and lengths of each group. Write what each found."""
    found = {}
    for name, case in json.loads(sys.argv[1]).items():
        config = RunConfig.model_validate(case["settings"])
        checkpoint = config.model.model_name_or_path
        shapes = [([noise_image(*size, seed=i)], lengths) for i, (size, lengths) in enumerate(case["groups"])]
        found[name] = host_syncs(config, checkpoint, make_groups(Path(checkpoint), shapes))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
