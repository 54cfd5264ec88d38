"""Recovery from running out of memory, at the granularity of micro-batches.

passes ─ a rank runs out ─► all ranks agree ─► free memory, lower the budget ─► the same passes, cut finer

Gradients are dropped before passes are repeated, so a run that never ran out has the same gradients. If ranks
communicate within the passes, no rank can repeat them alone: the run ends, and resumes under the lower budget.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch

from rl_vlm.distributed.collectives import Collectives
from rl_vlm.errors import OutOfMemory, is_out_of_memory, shorten
from rl_vlm.passes.budget import TokenBudget
from rl_vlm.passes.schedule import Round
from rl_vlm.stages import NO_ONE, Stage, Stages
from rl_vlm.types import MicroBatch, Prompt

T = TypeVar("T")

FOR_ONE_COMPLETION = (
    "Set memory.gradient_checkpointing or model.use_peft to true, set data.max_pixels, data.video_max_pixels, "
    "data.max_frames or rollout.max_completion_length lower, or share the model between devices: "
    "launch/accelerate/zero3.yaml."
)
FOR_THE_UPDATE = (
    "Set model.use_peft to true, or share the optimizer state between devices: launch/accelerate/zero2.yaml or "
    "zero3.yaml. micro_batch_tokens has no effect on it."
)


@dataclass(frozen=True)
class Failure:
    """A micro-batch that ran out of memory, or a batch of completions that are sampled at once."""

    num_prompts: int
    num_completions: int
    tokens: int
    first: str
    """Its first sample."""
    error: str
    rank: int | None = None
    """None if a rank recovers alone."""
    can_split: bool = True
    """Whether there is more than one context of a completion."""

    @classmethod
    def of(
        cls,
        error: RuntimeError,
        prompts: Sequence[Prompt],
        num_completions: int,
        tokens: int,
        rank: int | None = None,
        can_split: bool = True,
    ) -> Failure:
        """Describe the batch of these prompts, which ran out of memory."""
        media = prompts[0].sample.media_text
        first = f"sample {prompts[0].sample.sample_id}{f' with {media}' if media else ''}"
        return cls(len(prompts), num_completions, tokens, first, first_line(error), rank, can_split)

    def __str__(self) -> str:
        where = "" if self.rank is None else f", on rank {self.rank}"
        return (
            f"out of memory with {self.num_completions} completions of {self.num_prompts} prompts, {self.tokens} tokens"
            f"{where} ({self.error})"
        )


class AttemptFailed(Exception):
    """Ends an attempt that ran out of memory.

    Its cause holds the attempt's frames with their tensors. Drop it before the next attempt, as `tried` does.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


@contextmanager
def described(describe: Callable[[RuntimeError], Failure]) -> Iterator[None]:
    """Raise AttemptFailed with a description if the block runs out of memory."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise AttemptFailed(describe(error)) from error


def repeated(
    attempt: Callable[[], T],
    shrink: Callable[[list[Failure]], None],
    undo: Callable[[], None] = lambda: None,
    shared: Callable[[Failure | None], list[Failure]] = lambda failure: [failure] if failure else [],
) -> T:
    """Make an attempt and return its result. Repeat it while it runs out of memory.

    After a failure, `undo` reverts the changes, and `shrink` makes the next attempt smaller or raises OutOfMemory.
    `shared` adds the failures of other ranks.
    """
    while True:
        result, failure = tried(attempt)
        failures = shared(failure)
        if not failures:
            return result  # pyright: ignore[reportReturnType]
        del result
        undo()
        free_memory()
        shrink(failures)


class Recovery:
    """Repeats work that ran out of memory on any rank. All ranks call each method together."""

    def __init__(self, ranks: Collectives, budget: TokenBudget, stages: Stages = NO_ONE) -> None:
        """`stages` announces the passes."""
        self.ranks = ranks
        self.budget = budget
        self.stages = stages
        self.events: Counter[Stage] = Counter()
        """Out-of-memory events of this step by stage, including replayed ones."""

    def start_step(self) -> None:
        """Clear the events of the last step."""
        self.events.clear()

    @contextmanager
    def running(self, work: Round) -> Iterator[None]:
        """Run one round of a schedule in this context. Raise AttemptFailed if it runs out of memory."""
        with described(partial(self.failure, work.forward.batch)), self.stages.work(work):
            yield

    def failure(self, batch: MicroBatch, error: RuntimeError) -> Failure:
        """Describe a failed micro-batch."""
        prompts, completions = [subgroup.prompt for subgroup in batch.subgroups], batch.completions
        can_split = sum(len(completion.path_lengths) for completion in completions) > 1
        tokens = self.budget.tokens_of(batch)
        return Failure.of(error, prompts, len(completions), tokens, self.ranks.rank, can_split)

    def repeat(self, stage: Stage, attempt: Callable[[], T], undo: Callable[[], None], together: bool) -> T:
        """Run passes and return their result. Repeat them under smaller budgets while any rank runs out of memory.

        `undo` reverts their changes. `together` says whether ranks communicate within them. Raises OutOfMemory on every
        rank if a micro-batch cannot be split. If ranks communicate, raises it on the rank that ran out.
        """
        self.events[stage] += self.budget.before(stage)

        def announced() -> T:
            with self.stages.passes(stage):
                return attempt()

        def shared(failure: Failure | None) -> list[Failure]:
            if together and failure is not None:
                self.end(stage, failure)
            return [] if together else self.failures_of_ranks(failure)

        result = repeated(announced, partial(self.lower, stage), undo, shared)
        self.budget.after()
        return result

    def failures_of_ranks(self, failure: Failure | None) -> list[Failure]:
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
        self.budget.lower(stage, tokens, message, is_writer=self.ranks.is_main)
        self.events[stage] += 1

    def end(self, stage: Stage, failure: Failure) -> None:
        """Record the lower budget for the resumed run, and raise OutOfMemory."""
        tokens = self.half_of(failure)
        message = (
            f"{self.describe(stage, failure, tokens)} when the run is resumed with resume_from_checkpoint=auto. It "
            "ends here: ranks that share a model cannot repeat a pass alone."
        )
        self.budget.lower(stage, tokens, message, is_writer=True)
        raise OutOfMemory(message)

    def half_of(self, failure: Failure) -> int:
        """Return half of the failed micro-batch's tokens. Raises OutOfMemory if it cannot be split."""
        if not failure.can_split:
            raise OutOfMemory(
                f"a single completion of {failure.first} does not fit in memory: {failure}. {FOR_ONE_COMPLETION}"
            )
        return max(1, failure.tokens // 2)

    def describe(self, stage: Stage, failure: Failure, tokens: int) -> str:
        step = self.budget.progress.global_step + 1
        return (
            f"step {step}, {stage}: {failure}; {self.budget.planned}. micro_batch_tokens is {tokens} instead of "
            f"{self.budget.tokens}"
        )

    def reserve(self, allocate: Callable[[], None]) -> None:
        """Allocate the memory of an update before it changes a weight. If that fails, free memory and try once more.

        Raises OutOfMemory on every rank if any rank runs out of memory again.
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


def tried(attempt: Callable[[], T]) -> tuple[T | None, Failure | None]:
    """Return the result of an attempt, or the failure that ended it."""
    try:
        return attempt(), None
    except AttemptFailed as error:
        return None, error.failure


def first_line(error: BaseException) -> str:
    return shorten(str(error).partition("\n")[0], 150)


def free_memory() -> None:
    """Free tensors in reference cycles, and the allocator's cache."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
