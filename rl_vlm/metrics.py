"""The figures of an optimizer step: sums that add over micro-batches and ranks, times per stage, one line on disk."""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from rl_vlm.types import ScoredGroup

Gather = Callable[[list[Any]], list[Any]]


class StepMetrics:
    """Means in two parts (total, count), plain sums, and seconds per stage, of one rank."""

    def __init__(self) -> None:
        self.means: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self.sums: dict[str, float] = defaultdict(float)
        self.seconds: dict[str, float] = defaultdict(float)

    def add_mean(self, name: str, total: int | float, count: int | float) -> None:
        self.means[name][0] += total
        self.means[name][1] += count

    def add_values(self, name: str, values: torch.Tensor) -> None:
        """Add values to a mean; NaN does not count."""
        self.add_mean(name, values.nansum().item(), (~values.isnan()).sum().item())

    def add_sums(self, sums: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Add the means in two parts that a loss returns."""
        for name, (total, count) in sums.items():
            self.add_mean(name, total.item(), count.item())

    def add_sum(self, name: str, value: int | float) -> None:
        self.sums[name] += value

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def reduce(self, gather: Gather) -> dict[str, float]:
        """The metrics over all ranks; times are the slowest rank's. A mean over nothing is left out."""
        ranks = gather([(dict(self.means), dict(self.sums), dict(self.seconds))])
        means: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        sums: dict[str, float] = defaultdict(float)
        seconds: dict[str, float] = defaultdict(float)
        for rank_means, rank_sums, rank_seconds in ranks:
            for name, (total, count) in rank_means.items():
                means[name][0] += total
                means[name][1] += count
            for name, value in rank_sums.items():
                sums[name] += value
            for name, value in rank_seconds.items():
                seconds[name] = max(seconds[name], value)
        return (
            {name: total / count for name, (total, count) in means.items() if count}
            | dict(sums)
            | {f"time/{name}": value for name, value in seconds.items()}
        )


def add_reward_metrics(metrics: StepMetrics, groups: Sequence[ScoredGroup], names: Sequence[str]) -> None:
    """Rewards, their spread and the completions' lengths, under TRL's names."""
    for scored in groups:
        completions = scored.group.completions
        valid = scored.valid_G
        metrics.add_values("reward", scored.rewards_G)
        if valid.sum() > 1:
            metrics.add_mean("reward_std", scored.rewards_G[valid].std().item(), 1)
        metrics.add_mean("frac_reward_zero_std", float(not scored.has_variance), 1)
        for i, name in enumerate(names):
            metrics.add_values(f"rewards/{name}/mean", scored.scores_GF[:, i])
        lengths = torch.tensor([len(c.token_ids) for c in completions], dtype=torch.float32)
        clipped = torch.tensor([c.finish_reason == "length" for c in completions])
        metrics.add_values("completions/mean_length", lengths)
        metrics.add_values("completions/mean_terminated_length", lengths[~clipped])
        metrics.add_values("completions/clipped_ratio", clipped.float())
        metrics.add_sum("num_tokens", lengths.sum().item() + len(scored.group.prompt.token_ids))


class MetricsLog:
    """`metrics.jsonl`: one line per optimizer step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def keep_until(self, step: int) -> None:
        """Drop lines of later steps, which a run that goes on from `step` writes again, and a torn last line."""
        kept = [line for line in self.complete_lines() if json.loads(line)["step"] <= step]
        unfinished = self.path.with_suffix(".tmp")
        unfinished.write_text("".join(kept))
        os.replace(unfinished, self.path)

    def complete_lines(self) -> list[str]:
        if not self.path.exists():
            return []
        return [line for line in self.path.read_text().splitlines(keepends=True) if line.endswith("\n")]

    def append(self, metrics: Mapping[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(metrics) + "\n")

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.complete_lines()]
