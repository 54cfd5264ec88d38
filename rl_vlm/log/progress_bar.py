"""The progress of a run or an evaluation: figures and time left, on a bar or on plain lines.

A notebook shows its own bar, or the terminal's bar if ipywidgets is not installed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from time import monotonic
from typing import Any

import tqdm

from rl_vlm.log.metrics import (
    function_name,
    is_score,
    reward_faults,
    seconds_of,
    skipped_updates,
    stage_seconds,
)
from rl_vlm.stages import Stage

SHOWN_STAGES = 2
"""Stages of a step whose seconds are shown."""


class ProgressBar:
    """Shows progress as a bar, on standard error or in a notebook. Prints lines if `plain` or if no bar can be drawn.

    A nested bar, such as an evaluation's during training, disappears when it is complete. `title` is shown before the
    bar. `silent` prints nothing.
    """

    def __init__(
        self, done: int, total: int, unit: str, plain: bool = False, silent: bool = False, title: str = ""
    ) -> None:
        self.first, self.total, self.unit, self.title = done, total, unit, title
        self.start = monotonic()
        is_bar = not (silent or plain) and can_draw_bar()
        self.prints_lines = not (silent or is_bar)
        self.bar = bar_class()(
            initial=done, total=total, unit=unit, desc=title or None, disable=not is_bar, dynamic_ncols=True
        )
        self.bar.leave = self.bar.pos == 0

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def show(self, done: int, figures: Mapping[str, str]) -> None:
        """Advance to `done` of `total` units, with figures by name."""
        if self.prints_lines:
            seconds_per_unit = (monotonic() - self.start) / max(1, done - self.first)
            begin = f"{self.title}: " if self.title else ""
            parts = [f"{begin}{self.unit} {done}/{self.total}", *(f"{name} {value}" for name, value in figures.items())]
            left = f"{seconds_per_unit * (self.total - done):.0f} s left"
            print(", ".join([*parts, left]), file=sys.stderr, flush=True)
        self.bar.set_postfix(figures, refresh=False)
        self.bar.update(done - self.bar.n)


def bar_class() -> type[tqdm.tqdm]:
    """Return the notebook's bar in a notebook with ipywidgets, or else the terminal's."""
    if in_notebook() and find_spec("ipywidgets"):
        from tqdm.notebook import tqdm_notebook

        return tqdm_notebook
    return tqdm.tqdm


def in_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    if "IPython" not in sys.modules:
        return False
    shell = sys.modules["IPython"].get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def can_draw_bar() -> bool:
    """Return whether this is a notebook, or standard error is a terminal of known width.

    A terminal that reports 0 columns cannot show a bar.
    """
    if in_notebook():
        return True
    try:
        return sys.stderr.isatty() and os.get_terminal_size(sys.stderr.fileno()).columns > 0
    except OSError:  # a terminal without a file descriptor
        return True


def training_figures(line: Mapping[str, Any]) -> dict[str, str]:
    """Return figures of a line of `metrics.jsonl`, the most important first: a bar is cut at the terminal's width.

    They are rewards by short names, faults, why its update was skipped, tokens per second, and the longest stages.
    """
    figures = {short_name(name): f"{line[name]:.2f}" for name in line if name == "reward" or is_score(name)}
    if faults := reward_faults(line):
        figures["reward faults"] = f"{sum(faults.values()):.0f}"
    if reasons := [reason for reason, skipped in skipped_updates(line).items() if skipped]:
        figures["update skipped"] = reasons[0].replace("_", " ")
    if seconds := line.get(seconds_of(Stage.STEP)):
        figures["tokens/s"] = f"{line.get('step_tokens', 0.0) / seconds:,.0f}"
        stages = stage_seconds(line)
        for name in sorted(stages, key=stages.__getitem__, reverse=True)[:SHOWN_STAGES]:
            figures[seconds_of(name)] = f"{stages[name]:.1f}s"
    return figures


def short_name(metric: str) -> str:
    """Shorten `rewards/exact_match/mean` to `exact_match`, and `eval_rewards/…` to `held-out exact_match`.

    `reward` is the total. The score of a function called `reward` becomes `rewards/reward`.
    """
    if not is_score(metric):
        return metric
    name = function_name(metric)
    if metric.startswith("eval_"):
        return f"held-out {name}"
    return "rewards/reward" if name == "reward" else name
