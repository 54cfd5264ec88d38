"""The names of a run: its stages, and the columns and metrics that it writes. Listeners hear of the stages.

    load ─ step( generation … rewards ─ old_logprobs ─ ref_logprobs ─ training( update ) ) ─ save

A run announces each stage, each attempt of its passes, and each item of work in them. Timing, the sign of life, memory
peaks, the profile and the memory plan listen. The run does not call them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from enum import StrEnum
from typing import Any, Literal


class Stage(StrEnum):
    """A named part of a run. The metric `time/<stage>` holds the seconds of a step's stage."""

    LOAD = "load"
    """Models are loaded, before the first step."""
    STEP = "step"
    """One optimizer step. It includes all stages below but the last."""
    WEIGHT_SYNC = "weight_sync"
    ROLLOUT_WAIT = "rollout_wait"
    """The step waits for a window that is generated ahead."""
    DATA = "data"
    GENERATION = "generation"
    REWARDS = "rewards"
    BALANCE = "balance"
    """Groups are dealt to ranks."""
    CHECK = "check"
    """The log-probs of the rollout engine are compared with the policy's, or shared rows with dense rows."""
    OLD_LOGPROBS = "old_logprobs"
    REF_LOGPROBS = "ref_logprobs"
    TRAINING = "training"
    """Forward and backward passes, with the two stages below."""
    ENTROPY = "entropy"
    """The passes that `top_entropy_quantile` needs."""
    UPDATE = "update"
    SAVE = "save"
    """A checkpoint is written, after the step."""


LogprobStage = Literal[Stage.OLD_LOGPROBS, Stage.REF_LOGPROBS]
"""Stages whose log-probs are stored with the groups, in a field of the same name."""
PARTS_OF_TRAINING = (Stage.ENTROPY, Stage.UPDATE)
"""Stages that `TRAINING` includes, so that its seconds count theirs too."""
AHEAD = "ahead/"
"""Prefix for the stages of a window that is generated during training."""


class Listener:
    """Hears of the stages of a run. Each method returns the context in which a block runs."""

    def stage(self, stage: Stage) -> AbstractContextManager[Any]:
        """Hear of a stage. Stages nest."""
        return nullcontext()

    def passes(self, stage: Stage) -> AbstractContextManager[Any]:
        """Hear of an attempt of a stage's passes, which is repeated if it runs out of memory."""
        return nullcontext()

    def work(self, work: Any) -> AbstractContextManager[Any]:
        """Hear of one item of work of the passes: a micro-batch."""
        return nullcontext()


class Stages:
    """Announces stages to listeners, in their order."""

    def __init__(self, *listeners: Listener) -> None:
        self.listeners = listeners

    def with_listener(self, listener: Listener) -> Stages:
        """Return stages with one more listener, which hears of them before the others."""
        return Stages(listener, *self.listeners)

    def run(self, stage: Stage) -> AbstractContextManager[None]:
        """Run a stage in this context."""
        return self.heard(lambda listener: listener.stage(stage))

    def passes(self, stage: Stage) -> AbstractContextManager[None]:
        """Run an attempt of a stage's passes in this context."""
        return self.heard(lambda listener: listener.passes(stage))

    def work(self, work: Any) -> AbstractContextManager[None]:
        """Run one item of work in this context."""
        return self.heard(lambda listener: listener.work(work))

    @contextmanager
    def heard(self, context: Callable[[Listener], AbstractContextManager[Any]]) -> Iterator[None]:
        """Run a block in the contexts of all listeners."""
        with ExitStack() as opened:
            for listener in self.listeners:
                opened.enter_context(context(listener))
            yield


NO_ONE = Stages()
"""Stages without listeners, for instance of a window that is generated during training."""

COLUMNS = frozenset(
    """
    step group_id sample_id completion_index policy_version prompt completion finish_reason prompt_length
    completion_length image_sizes model_image_sizes reward advantage fault row images turns num_turns environment
    environments observed_length videos video_duration video_frame_times
    """.split()
)
"""Columns of the completions files. Reward functions use other names."""
COLUMN_PREFIX = "data/"
TAKEN_NAME = "the name has a slash, or the run uses it for a column or a count; give it another `name`"
"""The reason why a name is refused, with a solution."""

METRICS = frozenset(
    """
    step epoch loss grad_norm learning_rate entropy kl cispo_clip_ratio reward reward_std reward_best_of_group
    frac_reward_zero_std frac_reward_faults step_tokens data_wait_fraction
    """.split()
)
"""Metrics of a run, together with `METRIC_PREFIXES`. Reward functions use other names."""
METRIC_PREFIXES = tuple(
    """
    balance/ clip_ratio/ completions/ compute/ environment/ eval_ memory/ out_of_memory/ resampling/ reward_faults/
    rewards/ sampling/ skipped_updates/ time/ tools/ weight_sync/
    """.split()
)


def is_column(name: str) -> bool:
    """Return whether a run or an evaluation writes a column of this name."""
    return name in COLUMNS or name.startswith(COLUMN_PREFIX)


def is_taken(name: str) -> bool:
    """Return whether a reward function cannot have this name, since the run writes a column or a count under it."""
    return is_column(name) or is_column(f"{name}/") or name == "all" or "/" in name


def is_metric(name: str) -> bool:
    """Return whether a run writes a metric of this name."""
    return name in METRICS or name.startswith(METRIC_PREFIXES)
