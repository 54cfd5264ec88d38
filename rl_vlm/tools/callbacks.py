"""Callbacks of transformers' Trainer, called by an instrument of a run."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import ConfigError, listed
from rl_vlm.log.terminal import is_first_process
from rl_vlm.model.policy import Policy
from rl_vlm.run.instrument import Instrument, Observed
from rl_vlm.types import Progress

logger = logging.getLogger(__name__)

CALLED = ("on_train_begin", "on_log", "on_step_end", "on_evaluate", "on_save", "on_train_end")
"""Events of a TrainerCallback that are called."""
WISHES = ("should_epoch_stop", "should_save", "should_evaluate", "should_log")
"""Flags of a TrainerControl that have no effect."""
NOT_GIVEN = ("processing_class", "optimizer", "lr_scheduler", "train_dataloader", "eval_dataloader")
"""Keywords of events that are None."""


def usable_callback(callback: Any) -> Any:
    """Return a callback, constructed if it is a class. Log its own events that are never called.

    Raises ConfigError if it is not a TrainerCallback.
    """
    from transformers import TrainerCallback

    made = callback() if isinstance(callback, type) else callback
    if not isinstance(made, TrainerCallback):
        raise ConfigError(f"the callback is a {type(made).__name__}: give a TrainerCallback of transformers")
    events = [name for name in dir(TrainerCallback) if name.startswith("on_") and name not in CALLED]
    own = [name for name in events if getattr(type(made), name) is not getattr(TrainerCallback, name)]
    if own and is_first_process():
        logger.warning(
            "%s has %s, which is not called here; the events that are: %s",
            type(made).__name__, listed(own), ", ".join(CALLED),
        )  # fmt: skip
    return made


def arguments_of(config: RunConfig) -> SimpleNamespace:
    """Return the settings by their names in TRL, for callbacks that read `args`."""
    settings = {name: value for section in config.model_dump().values() for name, value in section.items()}
    has_held_out = config.data.eval_dataset_name is not None and config.train.eval_steps > 0
    strategies = {"eval_strategy": "steps" if has_held_out else "no", "save_strategy": "steps"}
    return SimpleNamespace(**settings, **strategies, logging_strategy="steps")


class Callbacks(Instrument):
    """Calls callbacks on each rank, after each event of the run."""

    def __init__(self, callbacks: Sequence[Any], args: Any, observed: Observed) -> None:
        """`args` is TRL's GRPOConfig, or None if the run has none."""
        from transformers import TrainerControl, TrainerState

        self.callbacks, self.config = callbacks, observed.config
        self.args = arguments_of(observed.config) if args is None else args
        is_first = int(os.environ.get("LOCAL_RANK", "0")) == 0
        self.lines: list[dict[str, Any]] = []
        self.state = TrainerState(
            is_world_process_zero=observed.ranks.is_main, is_local_process_zero=is_first, log_history=self.lines
        )
        self.control = TrainerControl()
        self.ignored: set[str] = set()

    def attach(self, policy: Policy) -> None:
        self.model = policy.model

    def begin(self, progress: Progress) -> None:
        self.state = replace(self.state, global_step=progress.global_step, max_steps=progress.max_steps)
        self.call("on_train_begin")

    def after_evaluation(self, step: int, metrics: dict[str, float]) -> None:
        self.state = replace(self.state, global_step=step)
        self.call("on_evaluate", metrics=dict(metrics))
        name = f"eval_{self.config.train.metric_for_best_model.removeprefix('eval_')}"
        sign, best = 1 if self.config.train.greater_is_better else -1, self.state.best_metric
        if name in metrics and (best is None or sign * metrics[name] > sign * best):
            self.state = replace(self.state, best_metric=metrics[name], best_global_step=step)

    def after_line(self, line: dict[str, Any]) -> None:
        self.state = replace(self.state, global_step=line["step"], epoch=line.get("epoch", 0.0))
        self.lines.append(dict(line))
        logs = {name: value for name, value in line.items() if name != "step"}
        self.call("on_log", logs=logs)

    def after_save(self, checkpoint: Path) -> None:
        self.call("on_save")

    def after_step(self, is_last: bool) -> None:
        self.call("on_step_end")

    def asks_to_stop(self) -> bool:
        return self.control.should_training_stop

    def complete(self) -> None:
        self.call("on_train_end")

    def call(self, event: str, **given: Any) -> None:
        """Call an event of each callback, and log flags that have no effect, once."""
        for callback in self.callbacks:
            function = getattr(callback, event)
            others = dict.fromkeys(NOT_GIVEN)
            returned = function(self.args, self.state, self.control, model=self.model, **others, **given)
            self.control = self.control if returned is None else returned
        asked = {name for name in WISHES if getattr(self.control, name)} - self.ignored
        if asked and self.state.is_world_process_zero:
            logger.warning(
                "a callback sets %s, which has no effect: `save_steps`, `eval_steps` and `logging_steps` decide",
                listed(sorted(asked)),
            )
        self.ignored |= asked
