"""Metrics of an evaluation: means with intervals, pass@k and majority@k."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rl_vlm.log.completions import answer

ScoredRow = Mapping[str, Any]

BOOTSTRAP_RESAMPLES = 1000


def summarise(rows: Sequence[ScoredRow], solved_from: Mapping[str, float], num_generations: int) -> dict[str, float]:
    """Compute mean, 95% interval, pass@k and majority@k of each reward function, and lengths of the completions.

    `solved_from` maps each function to the lowest score of a solved completion. If a function does not apply to a
    completion, or fails on it, the completion does not count in its figures.
    """
    metrics = {"num_samples": float(len({row["sample_id"] for row in rows})), "num_completions": float(len(rows))}
    for column, name in [("reward", "reward"), *((name, f"rewards/{name}/mean") for name in solved_from)]:
        values = [row[column] for row in rows if row[column] is not None]
        if values:
            metrics[name] = float(np.mean(values))
    for name, score in solved_from.items():
        found = figures(rows, name, score, num_generations)
        metrics |= {f"rewards/{name}/{figure}": value for figure, value in found.items()}
    lengths = [row["completion_length"] for row in rows if row["completion_length"] is not None]
    if lengths:
        metrics["completions/mean_length"] = float(np.mean(lengths))
    metrics["completions/clipped_ratio"] = float(np.mean([row["finish_reason"] == "length" for row in rows]))
    return metrics


def summarise_by(
    rows: Sequence[ScoredRow], column: str, solved_from: Mapping[str, float], num_generations: int
) -> dict[str, dict[str, float]]:
    """Call `summarise` for each value of a data column, on its rows, in order of the values as text."""
    by_value: dict[str, list[ScoredRow]] = {}
    for row in rows:
        by_value.setdefault(str(row.get(f"data/{column}")), []).append(row)
    return {value: summarise(by_value[value], solved_from, num_generations) for value in sorted(by_value)}


def figures(rows: Sequence[ScoredRow], name: str, solved_from: float, num_generations: int) -> dict[str, float]:
    """Compute interval, pass@k and majority@k of one reward function. Empty if it scored nothing."""
    by_sample: dict[str, list[ScoredRow]] = {}
    for row in rows:
        if row[name] is not None:
            by_sample.setdefault(row["sample_id"], []).append(row)
    if not by_sample:
        return {}
    scores = {sample: [row[name] for row in scored] for sample, scored in by_sample.items()}
    answers = {sample: [answer(row, name) for row in scored] for sample, scored in by_sample.items()}
    low, high = bootstrap_interval([float(np.mean(values)) for values in scores.values()])
    return (
        {"ci_low": low, "ci_high": high}
        | {f"pass@{k}": value for k, value in pass_at(scores, num_generations, solved_from).items()}
        | {f"majority@{k}": value for k, value in majority_at(answers, scores, num_generations).items()}
    )


def powers_of_two(limit: int) -> list[int]:
    """Return 1, 2, 4, … up to `limit`."""
    return [2**i for i in range(limit.bit_length())]


def pass_at(scores: Mapping[str, Sequence[float]], num_generations: int, solved_from: float = 1.0) -> dict[int, float]:
    """Compute pass@k for k = 1, 2, 4, … up to the completions per sample. A score of `solved_from` or more passes.

    If c of n completions pass, the unbiased estimate is 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv:2107.03374,
    equation 1). It is averaged over samples that have k scores.
    """
    result = {}
    for k in powers_of_two(num_generations):
        estimates = [
            1.0 - np.prod(1.0 - k / np.arange(len(v) - sum(s >= solved_from for s in v) + 1, len(v) + 1))
            for v in scores.values()
            if len(v) >= k
        ]
        if estimates:
            result[k] = float(np.mean(estimates))
    return result


def majority_at(
    answers: Mapping[str, Sequence[str]], scores: Mapping[str, Sequence[float]], num_generations: int
) -> dict[int, float]:
    """Compute majority@k for k = 2, 4, … up to the completions per sample: the score of the most frequent answer.

    This is self-consistency (Wang et al., arXiv:2203.11171, section 2) over a sample's first k scored completions. If
    answers are equally frequent, the earliest counts. The first completion with an answer gives the answer's score. The
    result is averaged over samples that have k scores.
    """
    result = {}
    for k in powers_of_two(num_generations)[1:]:
        winners = [
            scores[sample][given.index(most_common(given[:k]))] for sample, given in answers.items() if len(given) >= k
        ]
        if winners:
            result[k] = float(np.mean(winners))
    return result


def most_common(answers: Sequence[str]) -> str:
    """Return the most frequent answer, or the earliest of several."""
    return Counter(answers).most_common(1)[0][0]  # stable: equal counts stay in order of insertion


def bootstrap_interval(values: Sequence[float], before: Sequence[float] | None = None) -> tuple[float, float]:
    """Compute the 95% percentile bootstrap interval of the mean over samples.

    With `before`, compute the interval of the difference of both means. Their samples are drawn independently.
    """
    generator = np.random.default_rng(0)
    means = bootstrap_means(values, generator)
    if before is not None:
        means = means - bootstrap_means(before, generator)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(low), float(high)


def bootstrap_means(values: Sequence[float], generator: np.random.Generator) -> np.ndarray:
    """Return the means of `BOOTSTRAP_RESAMPLES` samples that are drawn with replacement."""
    return np.array([generator.choice(values, size=len(values)).mean() for _ in range(BOOTSTRAP_RESAMPLES)])
