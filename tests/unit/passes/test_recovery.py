"""Which errors are out of memory, and what is free when passes are repeated."""

import weakref
from dataclasses import replace

import pytest
import torch

from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import OutOfMemory, is_out_of_memory
from rl_vlm.passes.budget import PlannedBudget, TokenBudget
from rl_vlm.passes.recovery import Failure, Recovery
from rl_vlm.passes.schedule import Round
from rl_vlm.plan.tracing.groups import make_group
from rl_vlm.stages import Stage
from rl_vlm.types import Context, Forward, MicroBatch, Progress, Prompt, Sample, SubGroup
from tests.unit.model.test_vision import make_encoder

PROMPT = Prompt(Sample("s", [], [], {}, []), torch.ones(1, dtype=torch.int64), {}, {})


def make_recovery(tokens: int) -> Recovery:
    ranks = Ranks()
    return Recovery(ranks, TokenBudget(ranks, Progress(1), make_encoder(frozen=True), PlannedBudget(tokens)))


@pytest.mark.parametrize(
    ("message", "expected"),
    [  # as PyTorch, cuDNN and Triton write them
        ("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", True),
        ("CUDA driver error: out of memory", True),
        ("cuDNN error: CUDNN_STATUS_ALLOC_FAILED", True),
        ("Triton Error [CUDA]: out of memory", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`", True),
        ("[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory", True),
        ("CUDA error: an illegal memory access was encountered", False),
        ("Triton Error [CUDA]: an illegal memory access was encountered", False),
    ],
)
def test_errors_of_allocations_are_told_from_others(message: str, expected: bool) -> None:
    assert is_out_of_memory(RuntimeError(message)) == expected


def test_tensors_of_failed_passes_are_free_when_they_are_repeated() -> None:
    recovery = make_recovery(100)
    batch = MicroBatch([SubGroup(make_group(PROMPT, 2, 10), [0, 1])], shared=True)
    kept: list[weakref.ref[torch.Tensor]] = []

    def passes() -> list[bool]:
        if kept:
            return [tensor() is None for tensor in kept]
        with recovery.running(Round(Forward(batch))):
            activations = torch.zeros(4)
            kept.append(weakref.ref(activations))
            raise torch.OutOfMemoryError("Tried to allocate 4 bytes")

    assert recovery.repeat(Stage.TRAINING, passes, lambda: None, together=False) == [True]
    assert recovery.events == {Stage.TRAINING: 1}


@pytest.mark.parametrize("tokens", [[21], [21, 30, 50], [50, 21, 30], [30, 50, 21]])
def test_the_budget_becomes_half_of_the_smallest_micro_batch_that_failed(tokens: list[int]) -> None:
    recovery = make_recovery(1000)
    failures = [Failure(1, 4, num, "sample s", "", rank) for rank, num in enumerate(tokens)]
    recovery.lower(Stage.TRAINING, failures)
    assert recovery.budget.tokens == 10


@pytest.mark.parametrize(("cut", "can_split"), [(None, True), (range(2), True), (range(1, 2), False)])
def test_a_completion_that_runs_out_is_split_until_one_context_is_left(cut: range | None, can_split: bool) -> None:
    group = make_group(PROMPT, 1, 6)
    completion = replace(group.group.completions[0], contexts=(Context((2,)), Context((1,)), Context((3,))))
    group = replace(group, group=replace(group.group, completions=[completion]))
    batch = MicroBatch([SubGroup(group, [0], contexts={} if cut is None else {0: cut})], shared=True)
    recovery = make_recovery(100)
    failure = recovery.failure(batch, RuntimeError("out of memory"))  # of 1 prompt token
    if can_split:
        assert recovery.half_of(failure) == (len(PROMPT.token_ids) + (6 if cut is None else 3)) // 2
    else:
        with pytest.raises(OutOfMemory, match="a single completion of sample"):
            recovery.half_of(failure)
