"""The progress bar: reward, accuracy and time left on one line, or a plain line per step."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm


class ProgressBar:
    """Shows the steps of a run; `hidden` prints nothing."""

    def __init__(self, step: int, total_steps: int, hidden: bool) -> None:
        self.bar = tqdm(initial=step, total=total_steps, unit="step", disable=hidden, dynamic_ncols=True)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *_: object) -> None:
        self.bar.close()

    def show(self, line: dict[str, Any]) -> None:
        """Advance to the step of a metrics line."""
        figures = {"reward": line.get("reward")}
        figures |= {short_name(name): value for name, value in line.items() if is_reward_mean(name)}
        self.bar.set_postfix(
            {name: f"{value:.2f}" for name, value in figures.items() if value is not None}, refresh=False
        )
        self.bar.update(line["step"] - self.bar.n)


def is_reward_mean(name: str) -> bool:
    return name.startswith(("rewards/", "eval_rewards/")) and name.endswith("/mean")


def short_name(name: str) -> str:
    """`eval_rewards/exact_match/mean` -> `held-out exact_match`."""
    function = name.split("/")[1]
    return f"held-out {function}" if name.startswith("eval_") else function
