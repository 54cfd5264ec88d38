"""The progress of a run or an evaluation: figures and time left, on a bar or on plain lines."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from time import monotonic
from typing import Any

from tqdm import tqdm

from rl_vlm.log.metrics import function_name, is_score, reward_faults, skipped_updates


class ProgressBar:
    """Shows progress on standard error: plain lines if `plain` or if it is no terminal, else a bar.

    `silent` prints nothing.
    """

    def __init__(self, done: int, total: int, unit: str, plain: bool = False, silent: bool = False) -> None:
        self.first, self.total, self.unit = done, total, unit
        self.start = monotonic()
        is_bar = not (silent or plain) and sys.stderr.isatty()
        self.prints_lines = not (silent or is_bar)
        self.bar = tqdm(initial=done, total=total, unit=unit, disable=not is_bar, dynamic_ncols=True)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def show(self, done: int, figures: Mapping[str, str]) -> None:
        """Advance to `done` of `total` units, with figures by name."""
        if self.prints_lines:
            seconds_per_unit = (monotonic() - self.start) / max(1, done - self.first)
            parts = [f"{self.unit} {done}/{self.total}", *(f"{name} {value}" for name, value in figures.items())]
            left = f"{seconds_per_unit * (self.total - done):.0f} s left"
            print(", ".join([*parts, left]), file=sys.stderr, flush=True)
        self.bar.set_postfix(figures, refresh=False)
        self.bar.update(done - self.bar.n)


def training_figures(line: Mapping[str, Any]) -> dict[str, str]:
    """Return the rewards of a line of `metrics.jsonl` by short names, its faults, and why its update was skipped."""
    figures = {short_name(name): f"{line[name]:.2f}" for name in line if name == "reward" or is_score(name)}
    if faults := reward_faults(line):
        figures["reward faults"] = f"{sum(faults.values()):.0f}"
    if reasons := [reason for reason, skipped in skipped_updates(line).items() if skipped]:
        figures["update skipped"] = reasons[0].replace("_", " ")
    return figures


def short_name(metric: str) -> str:
    """Return `reward` unchanged, and `held-out exact_match` for `eval_rewards/exact_match/mean`."""
    if not is_score(metric):
        return metric
    return f"held-out {function_name(metric)}" if metric.startswith("eval_") else function_name(metric)
