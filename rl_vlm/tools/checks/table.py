"""The checks before a run, in order. A command selects them by their cost and by the kind of run.

--dry-run          SECONDS    settings, functions, files and the first rows; imports no torch
doctor --no-model  ROWS       also the machine, every row, gold answers and prompts
doctor             MODEL      also the loaded model, and two steps of the run
doctor --ranks     the same   the kind "ranks": the sharding, and what all ranks check together
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from pkgutil import resolve_name
from tempfile import TemporaryDirectory
from typing import Any, Literal, NamedTuple, TypeVar

from rl_vlm.config.schema import RunConfig
from rl_vlm.errors import Problem
from rl_vlm.evaluation.options import NO_OPTIONS, EvaluationOptions
from rl_vlm.tools.checks.diagnosis import DATA, MODEL, SETTING, Checking, Diagnosis, Note, attempt, collect

T = TypeVar("T")
Purpose = Literal["train", "eval", "serve", "ranks"]
"""Kinds of runs. "ranks" are the processes of a launch, which run their checks together."""


class CheckCost(IntEnum):
    """Costs of checks, in ascending order."""

    SECONDS = 0
    ROWS = 1
    MODEL = 2


@dataclass
class Subject:
    """A run to check, how deeply to check it, and the values that its checks have returned."""

    config: RunConfig
    kind: Purpose = "train"
    cost: CheckCost = CheckCost.SECONDS
    decode: bool = False
    """Whether to compare images by their pixels."""
    checkpoints: Sequence[str] = ()
    options: EvaluationOptions = NO_OPTIONS
    """Models and options of an evaluation."""
    folder: str = ""
    """A temporary directory for checks that write files."""
    values: dict[Callable[..., Any], Any] = field(default_factory=dict, init=False)

    def run_checks(self) -> Checking[None]:
        """Run the selected checks, and keep the values that they return."""
        for check in CHECKS:
            if check.cost <= self.cost <= check.until and self.kind in check.kinds:
                function = resolve_name(f"{__package__}.{check.function}")
                self.values[function] = yield from attempt(function(self), check.problem)

    def value(self, check: Callable[[Subject], Checking[T]]) -> T | None:
        """Return the value of an earlier check. Return None if the check was not selected, or raised an error."""
        return self.values.get(check)

    def left_out(self, what: str) -> Checking[None]:
        """Note that something is not checked, unless checks of a higher cost follow. They say so themselves."""
        if self.cost == CheckCost.SECONDS:
            yield Note(what, is_checked=False)

    @property
    def is_served(self) -> bool:
        """Return whether another server samples for the evaluation."""
        return self.kind == "eval" and self.config.evaluation.endpoint_url is not None

    @property
    def elsewhere(self) -> RunConfig:
        """Return the config with the temporary directory as `output_dir`."""
        return self.config.model_copy(
            update={"train": self.config.train.model_copy(update={"output_dir": self.folder})}
        )


class Check(NamedTuple):
    """A check: a generator function of a `Subject` in a module of this package."""

    function: str
    cost: CheckCost = CheckCost.SECONDS
    kinds: tuple[Purpose, ...] = ("train",)
    problem: Problem = SETTING
    until: CheckCost = CheckCost.MODEL
    """The highest cost at which the check is selected. Above it, another check covers the same."""


CHECKS = (
    Check("settings:needed_settings", kinds=("train", "eval")),
    Check("settings:batches"),
    Check("ranks:compared", CheckCost.ROWS, kinds=("ranks",)),
    Check("sharding:sharding", kinds=("train", "eval", "ranks")),
    Check("settings:sampling_temperature"),
    Check("settings:rewards", kinds=("train", "eval")),
    Check("environments:toolbox", kinds=("train", "eval")),
    Check("settings:token_loss"),
    Check("first_rows:first_rows", kinds=("train", "eval"), until=CheckCost.SECONDS),
    Check("evaluation:evaluation_options", kinds=("eval",)),
    Check("files:output_directory", kinds=("train", "eval")),
    Check("settings:packages", kinds=("train", "eval", "serve")),
    Check("files:model_files", kinds=("train", "eval", "serve")),
    Check("machine:machine", CheckCost.ROWS),
    Check("rows:every_row", CheckCost.ROWS, problem=DATA),
    Check("duplicates:duplicates", CheckCost.ROWS, problem=DATA),
    Check("model:prompts", CheckCost.ROWS, problem=MODEL),
    Check("golds:golds", CheckCost.ROWS, problem=DATA),
    Check("resets:resets", CheckCost.ROWS),
    Check("model:size", CheckCost.ROWS, problem=MODEL),
    Check("model:loaded_model", CheckCost.MODEL, problem=MODEL),
    Check("smoke:two_steps", CheckCost.MODEL, problem=MODEL),
    Check("rank_steps:steps_on_ranks", CheckCost.ROWS, kinds=("ranks",), problem=MODEL),
)


def examine(config: RunConfig, with_model: bool = True, decode: bool = False, kind: Purpose = "train") -> Diagnosis:
    """Run the checks of the doctor. With `with_model`, load the model and take two steps.

    With `decode`, compare images by their pixels. Write nothing to `output_dir`, except two steps of all ranks.
    """
    cost = CheckCost.MODEL if with_model else CheckCost.ROWS
    with TemporaryDirectory(prefix="rl-vlm-doctor-") as folder:
        return collect(Subject(config, kind, cost, decode=decode, folder=folder).run_checks())
