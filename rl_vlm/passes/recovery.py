"""Recovery from running out of memory, at the granularity of micro-batches.

passes ─ a rank runs out ─► all ranks agree ─► free memory, lower the budget ─► the same passes, cut finer

Gradients are dropped before passes are repeated, so they are those of a run that never ran out. If ranks communicate
within the passes, one of them cannot leave alone: the run ends, and resumes under the lower budget.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import OutOfMemory, shorten
from rl_vlm.passes.budget import Budget
from rl_vlm.passes.micro_batches import VisionTokens, batch_tokens
from rl_vlm.stages import NO_ONE, Stage, Stages
from rl_vlm.types import MicroBatch, Progress

T = TypeVar("T")

ALLOCATOR_ERRORS = (
    "DefaultCPUAllocator: ",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDA error: out of memory",
    "CUDA driver error: out of memory",
    "Triton Error [CUDA]: out of memory",
)
"""Texts of errors without a class of their own."""
FOR_ONE_COMPLETION = (
    "Set memory.gradient_checkpointing or model.use_peft to true, set data.max_pixels or rollout.max_completion_length "
    "lower, or share the model between devices: launch/accelerate/zero3.yaml."
)
FOR_THE_UPDATE = (
    "Set model.use_peft to true, or share the optimizer state between devices: launch/accelerate/zero2.yaml or "
    "zero3.yaml. micro_batch_tokens has no effect on it."
)


@dataclass(frozen=True)
class Failure:
    """A micro-batch that ran out of memory on one rank."""

    rank: int
    num_prompts: int
    num_completions: int
    tokens: int
    first: str
    """Its first sample."""
    error: str

    def __str__(self) -> str:
        return (
            f"out of memory with {self.num_completions} completions of {self.num_prompts} prompts, {self.tokens} tokens"
            f", on rank {self.rank} ({self.error})"
        )


class MicroBatchOutOfMemory(Exception):
    """Ends passes whose micro-batch ran out of memory.

    Its cause holds the frames of the passes with their tensors: drop it before they are repeated, as `tried` does.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


class Recovery:
    """Repeats what ran out of memory on any rank. Each method is called by all ranks together."""

    def __init__(
        self,
        ranks: Ranks,
        budget: Budget,
        vision_tokens: VisionTokens,
        prediction: str = "no memory plan was made",
        stages: Stages = NO_ONE,
    ) -> None:
        """`prediction` is what the memory plan says of forward and backward passes. `stages` announces the passes."""
        self.ranks = ranks
        self.budget = budget
        self.vision_tokens = vision_tokens
        self.prediction = prediction
        self.stages = stages
        self.events: Counter[Stage] = Counter()
        """Number of events of this step by stage, replayed ones included."""

    @classmethod
    def unrecorded(
        cls, ranks: Ranks, progress: Progress, vision_tokens: VisionTokens, stages: Stages = NO_ONE
    ) -> Recovery:
        """Build one for steps without a run directory."""
        budget = Budget(progress, progress.micro_batch_tokens, lambda change: None)
        return cls(ranks, budget, vision_tokens, stages=stages)

    @contextmanager
    def watch(self, batch: MicroBatch) -> Iterator[None]:
        """Run one micro-batch in this context, which raises MicroBatchOutOfMemory if it runs out of memory."""
        try:
            with self.stages.work(batch):
                yield
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise MicroBatchOutOfMemory(self.failure(batch, error)) from error

    def failure(self, batch: MicroBatch, error: RuntimeError) -> Failure:
        """Describe a failed micro-batch."""
        prompts = [subgroup.prompt for subgroup in batch.subgroups]
        images = [f"{image.width}x{image.height}" for image in prompts[0].sample.images]
        with_images = f" with images of {', '.join(images)} pixels" if images else ""
        return Failure(
            self.ranks.rank,
            len(prompts),
            len(batch.completions),
            batch_tokens(batch, self.vision_tokens),
            f"sample {prompts[0].sample.sample_id}{with_images}",
            first_line(error),
        )

    def repeat(self, stage: Stage, passes: Callable[[], T], undo: Callable[[], None], together: bool) -> T:
        """Return the result of `passes`, which are repeated under smaller budgets while any rank runs out of memory.

        `undo` drops what they have changed. `together` says whether ranks communicate within them. Raises OutOfMemory
        if a micro-batch cannot be split, on every rank, or if ranks communicate, on the rank that ran out.
        """
        self.events[stage] += sum(change.reason == "out_of_memory" for change in self.budget.replay(stage))
        while True:
            with self.stages.passes(stage):
                result, failure = tried(passes)
            if together and failure is not None:
                self.end(stage, failure)
            failures = [] if together else self.everyones(failure)
            if not failures:
                return result  # pyright: ignore[reportReturnType]
            del result
            undo()
            free_memory()
            self.lower(stage, failures)

    def everyones(self, failure: Failure | None) -> list[Failure]:
        """Return the failures of all ranks."""
        if not self.ranks.max([int(failure is not None)])[0]:
            return []
        return [found for found in self.ranks.gather([failure]) if found is not None]

    def lower(self, stage: Stage, failures: list[Failure]) -> None:
        """Lower the budget on all ranks to half of the smallest micro-batch that failed."""
        smallest = min(failures, key=lambda failure: failure.tokens)
        with self.ranks.agree():
            tokens = self.half_of(smallest)
        message = f"{self.describe(stage, smallest, tokens)} from now on, and the passes are repeated."
        self.budget.change(tokens, stage, "out_of_memory", message, self.ranks.is_main)
        self.events[stage] += 1

    def end(self, stage: Stage, failure: Failure) -> None:
        """Record the lower budget for the run that is resumed, and raise OutOfMemory."""
        tokens = self.half_of(failure)
        message = (
            f"{self.describe(stage, failure, tokens)} when the run is resumed with resume_from_checkpoint=auto. It "
            "ends here: ranks that share a model cannot repeat a pass alone."
        )
        self.budget.change(tokens, stage, "out_of_memory", message, is_writer=True)
        raise OutOfMemory(message)

    def half_of(self, failure: Failure) -> int:
        """Return half of the failed micro-batch's tokens. Raises OutOfMemory if it cannot be split."""
        if failure.num_completions == 1:
            raise OutOfMemory(
                f"a single completion of {failure.first} does not fit in memory: {failure}. {FOR_ONE_COMPLETION}"
            )
        return max(1, failure.tokens // 2)

    def describe(self, stage: Stage, failure: Failure, tokens: int) -> str:
        step = self.budget.progress.global_step + 1
        return (
            f"step {step}, {stage}: {failure}; {self.prediction}. micro_batch_tokens is {tokens} instead of "
            f"{self.budget.tokens}"
        )

    def reserve(self, allocate: Callable[[], None]) -> None:
        """Allocate what the update needs, before it changes a weight, and once more if that runs out of memory.

        Raises OutOfMemory on every rank if it runs out again on any.
        """
        for _ in range(2):
            error = None
            try:
                allocate()
            except RuntimeError as failure:
                if not is_out_of_memory(failure):
                    raise
                error = f"on rank {self.ranks.rank} ({first_line(failure)})"
            errors = [found for found in self.ranks.gather([error]) if found is not None]
            if not errors:
                return
            free_memory()
            self.events[Stage.UPDATE] += 1
        with self.ranks.agree():
            raise OutOfMemory(
                f"gradients and optimizer state do not fit in memory beside the model: out of memory {errors[0]}, "
                f"before any weight was updated. {FOR_THE_UPDATE}"
            )


def tried(passes: Callable[[], T]) -> tuple[T | None, Failure | None]:
    """Return the result of `passes`, or the failure that ended them."""
    try:
        return passes(), None
    except MicroBatchOutOfMemory as error:
        return None, error.failure


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on a device or in host memory."""
    return isinstance(error, torch.OutOfMemoryError) or any(text in str(error) for text in ALLOCATOR_ERRORS)


def first_line(error: BaseException) -> str:
    return shorten(str(error).partition("\n")[0], 150)


def free_memory() -> None:
    """Free tensors in reference cycles, and what the allocator caches for later."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
