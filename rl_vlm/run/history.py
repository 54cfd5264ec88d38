"""Measurements of a run so far: its time, its evaluations and its best step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rl_vlm.config.schema import TrainConfig
from rl_vlm.errors import ConfigError


@dataclass
class Record:
    """Measurements that checkpoints hold, so that a resumed run continues them."""

    train_seconds: float = 0.0
    eval_before: dict[str, float] | None = None
    eval_latest: dict[str, float] | None = None
    best_step: int | None = None
    eval_best: dict[str, float] | None = None
    unevaluated: dict[str, Any] | None = None
    """Metrics of the last step, if its evaluation is due and not complete."""

    def add_seconds(self, seconds: float) -> None:
        """Add the seconds that a step took."""
        self.train_seconds += seconds

    @contextmanager
    def evaluating(self, line: dict[str, Any]) -> Iterator[None]:
        """Keep the metrics of a step until the block, which evaluates it, is complete."""
        self.unevaluated = line
        yield
        self.unevaluated = None

    def note_evaluation(self, metrics: dict[str, float], step: int, train: TrainConfig) -> None:
        """Note an evaluation, which is the one before training if `step` is 0.

        With `load_best_model_at_end`, also note the step if it is the best so far. Raises ConfigError if the deciding
        metric does not exist.
        """
        self.eval_latest = metrics
        if step == 0:
            self.eval_before = metrics
        if not train.load_best_model_at_end:
            return
        name = train.metric_for_best_model.removeprefix("eval_")
        if name not in metrics:
            raise ConfigError(f"train.metric_for_best_model {name} is not among the metrics: {', '.join(metrics)}")
        sign = 1 if train.greater_is_better else -1
        if self.eval_best is None or sign * metrics[name] > sign * self.eval_best[name]:
            self.best_step, self.eval_best = step, metrics
