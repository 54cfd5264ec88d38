"""Curves of a report: series of points with bands, from metrics and completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rl_vlm.log.curve import Point, Series, metric_points, reward_metrics, reward_series, thinned
from rl_vlm.log.metrics import function_name, seconds_of, stage_seconds
from rl_vlm.stages import Stage
from rl_vlm.tools.report.diversity import distinct_answers
from rl_vlm.tools.report.read import RunResults, values_of

T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5% quantiles of Student's t for 1 to 30 degrees of freedom. For more, the normal distribution is close."""
Z_95 = 1.96
MOST_STAGES = 5
CLIPPED = {
    "clip_ratio/region_mean": "low or high", "clip_ratio/low_mean": "low", "clip_ratio/high_mean": "high",
    "cispo_clip_ratio": "cispo",
}  # fmt: skip


@dataclass(frozen=True)
class Chart:
    """Series over optimizer steps. The areas of a stacked chart stand on each other."""

    title: str
    note: str
    series: list[Series] = field(default_factory=list)


def charts_of(runs: Sequence[RunResults]) -> list[Chart]:
    """Return the charts of training runs; evaluations have none. Several runs are overlaid, in one colour each."""
    names = reward_metrics([line for run in runs for line in run.lines])
    charts = [reward_chart(runs, title, metric) for title, metric in names]
    charts += [
        metric_chart(runs, "Completion length", "tokens: mean, with shortest to longest", ["completions/mean_length"]),
        metric_chart(runs, "Cut off", "share of completions at the length limit", ["completions/clipped_ratio"]),
        answers_chart(runs),
        metric_chart(runs, "Groups of equal rewards", "share of groups, without advantages", ["frac_reward_zero_std"]),
        metric_chart(runs, "Entropy", "mean per token, in nats", ["entropy"]),
        metric_chart(runs, "KL", "mean per token, to the reference", ["kl"]),
        metric_chart(runs, "Clipped tokens", "share of tokens whose ratio is clipped", list(CLIPPED)),
        metric_chart(
            runs, "Staleness", "updates since the completions were sampled", ["sampling/policy_version_lag"]
        ),
        *(stages_chart(run, several=len(runs) > 1) for run in runs if run.lines),
        metric_chart(runs, "Memory", "of the process that holds most, in GiB", ["memory/held_gib"]),
        metric_chart(runs, "Token budget", "tokens of a micro-batch", ["memory/micro_batch_tokens"]),
        metric_chart(runs, "Gradient norm", "before clipping", ["grad_norm"]),
        metric_chart(runs, "Loss", "of the step", ["loss"]),
        metric_chart(runs, "Learning rate", "of the step", ["learning_rate"]),
    ]  # fmt: skip
    return [chart for chart in charts if chart.series]


def reward_chart(runs: Sequence[RunResults], title: str, metric: str) -> Chart:
    """Chart a reward in training and on held-out rows, each with the 95% interval of its mean."""
    column = "reward" if metric == "reward" else function_name(metric)
    found = [(run, reward_series(run.lines, metric, window_points(run, column))) for run in runs]
    series = [one for _, own in found for one in own]
    if len(runs) > 1:
        series = [
            replace(one, label=f"{run.name}, {one.label}", color=i) for i, (run, own) in enumerate(found) for one in own
        ]
    return Chart(title, "mean over prompts; band and bars: 95% interval", series)


def window_points(run: RunResults, column: str) -> list[Point]:
    """Return the mean of a column over the prompts of each window, with its 95% interval by Student's t.

    The mean of one prompt has no interval.
    """
    points = []
    for step, groups in run.windows.items():
        means = [float(np.mean(values)) for group in groups if (values := values_of(group, column))]
        if means:
            half = half_interval(means)
            mean = float(np.mean(means))
            points.append(Point(step + 1, mean, *((mean - half, mean + half) if half is not None else ())))
    return points


def half_interval(values: Sequence[float]) -> float | None:
    """Return half of the 95% interval of a mean, or None if there is one value."""
    if len(values) == 1:
        return None
    quantile = T_95[len(values) - 2] if len(values) - 2 < len(T_95) else Z_95
    return quantile * float(np.std(values, ddof=1)) / len(values) ** 0.5


def metric_chart(runs: Sequence[RunResults], title: str, note: str, metrics: Sequence[str]) -> Chart:
    """Chart all metrics of a single run, one colour each. If there are several runs, chart each one's first metric."""
    if len(runs) > 1:
        points = [next(filter(None, (metric_points(run.lines, metric) for metric in metrics)), []) for run in runs]
        found = [(i, run.name, points[i]) for i, run in enumerate(runs)]
    else:
        labels = [CLIPPED.get(metric, metric.split("/")[-1].replace("_", " ")) for metric in metrics]
        found = [(i, labels[i], metric_points(run.lines, metric)) for run in runs for i, metric in enumerate(metrics)]
        found = [one for one in found if any(point.value for point in one[2])] or found[:1]
    return Chart(title, note, [Series(label, thinned(points), i) for i, label, points in found if points])


def answers_chart(runs: Sequence[RunResults]) -> Chart:
    """Chart the mean number of distinct answers per group."""
    series = [Series(run.name, thinned(answer_points(run)), i) for i, run in enumerate(runs)]
    if len(runs) == 1:
        series = [Series("per group", series[0].points)]
    return Chart("Distinct answers", "mean number per group", [one for one in series if one.points])


def answer_points(run: RunResults) -> list[Point]:
    return [
        Point(step + 1, float(np.mean([distinct_answers(group, run.decisive[0]) for group in groups])))
        for step, groups in run.windows.items()
    ]


def stages_chart(run: RunResults, several: bool) -> Chart:
    """Chart the seconds of a step by stage: the longest stages one by one, and all others together."""
    steps = [line for line in run.lines if seconds_of(Stage.STEP) in line]
    totals: dict[str, float] = {}
    for line in steps:
        for name, value in stage_seconds(line).items():
            totals[name] = totals.get(name, 0.0) + value
    longest = sorted(totals, key=totals.__getitem__, reverse=True)[:MOST_STAGES]
    seconds = {name: [line.get(seconds_of(name), 0.0) for line in steps] for name in longest}
    rest = np.array([line[seconds_of(Stage.STEP)] for line in steps]) - np.sum(list(seconds.values()), axis=0)
    seconds["other"] = np.maximum(rest, 0.0).tolist()
    below = np.zeros(len(steps))
    series = []
    for i, (name, own) in enumerate(seconds.items()):
        above = below + own
        points = [
            Point(line["step"], float(top), float(low), float(top))
            for line, top, low in zip(steps, above, below, strict=True)
        ]
        series.append(Series(name, thinned(points), i, "area"))
        below = above
    title = f"Seconds by stage: {run.name}" if several else "Seconds by stage"
    return Chart(title, "of a step; stages stand on each other", series if steps else [])
