"""The progress of a run: reward, scores and time left, on a bar or on a plain line per step."""

from __future__ import annotations

import sys
from time import monotonic
from typing import Any

from tqdm import tqdm

from rl_vlm.metrics import function_name, is_score


class ProgressBar:
    """Shows the steps of a run on standard error: plain lines if `plain` or where it is no terminal, else a bar.

    `silent` prints nothing.
    """

    def __init__(self, step: int, total_steps: int, plain: bool = False, silent: bool = False) -> None:
        self.first_step, self.total_steps = step, total_steps
        self.start = monotonic()
        is_bar = not (silent or plain) and sys.stderr.isatty()
        self.prints_lines = not (silent or is_bar)
        self.bar = tqdm(initial=step, total=total_steps, unit="step", disable=not is_bar, dynamic_ncols=True)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def show(self, line: dict[str, Any]) -> None:
        """Advance to the step of a metrics line."""
        figures = {short_name(name): f"{line[name]:.2f}" for name in line if name == "reward" or is_score(name)}
        step = line["step"]
        if self.prints_lines:
            seconds_per_step = (monotonic() - self.start) / (step - self.first_step)
            parts = [f"step {step}/{self.total_steps}", *(f"{name} {value}" for name, value in figures.items())]
            left = f"{seconds_per_step * (self.total_steps - step):.0f} s left"
            print(", ".join([*parts, left]), file=sys.stderr, flush=True)
        self.bar.set_postfix(figures, refresh=False)
        self.bar.update(step - self.bar.n)


def short_name(metric: str) -> str:
    """`reward` -> itself, `eval_rewards/exact_match/mean` -> `held-out exact_match`."""
    if not is_score(metric):
        return metric
    return f"held-out {function_name(metric)}" if metric.startswith("eval_") else function_name(metric)
