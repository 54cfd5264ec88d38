"""Curves of a report: series of points with bands, from metrics and completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from rl_vlm.log.completions import distinct_answers, values_of
from rl_vlm.log.curve import Point, Series, held_out_points, metric_points, reward_metrics, thinned
from rl_vlm.log.metrics import (
    BEST_OF_GROUP,
    DISTINCT_ANSWERS,
    ENGINE_WAIT,
    FAILURE_FREQUENCY,
    TURNS,
    WITHOUT_VARIANCE,
    function_name,
    seconds_of,
    stage_seconds,
)
from rl_vlm.stages import Stage
from rl_vlm.tools.report.read import RunResults

T_95 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""97.5% quantiles of Student's t for 1 to 30 degrees of freedom. For more, the normal distribution is close."""
Z_95 = 1.96
CONSTANT = 1e-9
"""Largest difference of values, as a share of the largest, that counts as none."""
SHARE_OF_GROUPS = "share of groups"
ALL_ZERO = "whose advantages are all 0"
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
    run: int | None = None
    """Index of the only run, if there are several. Otherwise the colours of the series are indices of runs."""

    @property
    def changes(self) -> bool:
        """Return whether any series has two different values, or two series differ."""
        values = [point.value for series in self.series for point in series.points]
        return max(values) - min(values) > CONSTANT * max(map(abs, values))


@dataclass(frozen=True)
class Charts:
    """The charts of a page."""

    first: list[Chart]
    """Reward, held-out scores, length and spread."""
    internals: list[Chart]
    """The others, if they change."""
    constant: list[tuple[str, int | float]]
    """Titles and values of the others that do not."""


def charts_of(runs: Sequence[RunResults]) -> Charts:
    """Return the charts of training runs; evaluations have none. Several runs are overlaid, in one colour each."""
    first = [
        reward_chart(runs, "Reward", "reward"),
        held_out_chart(runs),
        metric_chart(
            runs, "Length", "tokens of a completion: mean, band from shortest to longest", ["completions/mean_length"]
        ),
        spread_chart(runs),
    ]
    others = [chart for chart in internal_charts(runs) if chart.series]
    return Charts(
        [chart for chart in first if chart.series],
        [chart for chart in others if chart.changes],
        [(chart.title, chart.series[0].points[-1].value) for chart in others if not chart.changes],
    )


def internal_charts(runs: Sequence[RunResults]) -> list[Chart]:
    """Return the charts under "Training internals"."""
    _, *functions = reward_metrics([line for run in runs for line in run.lines])
    scores = [reward_chart(runs, f"Training {name}", metric) for name, metric in functions]
    idle = metric_chart(runs, "Groups without advantages", f"{SHARE_OF_GROUPS} {ALL_ZERO}", [WITHOUT_VARIANCE])
    return [
        *(scores if len(functions) > 1 else []),
        metric_chart(runs, "Best of a group", "mean over groups of the best reward", [BEST_OF_GROUP]),
        *([idle] if len(runs) > 1 else []),
        metric_chart(runs, "Cut off", "share of completions at the length limit", ["completions/clipped_ratio"]),
        metric_chart(runs, "Turns", "of a completion, mean", [TURNS]),
        metric_chart(runs, "Failed calls", "share of calls of tools", [FAILURE_FREQUENCY]),
        metric_chart(runs, "Waiting for tools", "share of generation without a turn to sample", [ENGINE_WAIT]),
        metric_chart(runs, "Entropy", "mean per token, in nats", ["entropy"]),
        metric_chart(runs, "KL", "mean per token, to the reference", ["kl"]),
        metric_chart(runs, "Clipped tokens", "share of tokens whose ratio is clipped", list(CLIPPED)),
        metric_chart(
            runs, "Staleness", "updates since the completions were sampled", ["sampling/policy_version_lag"]
        ),
        metric_chart(runs, "Gradient norm", "before clipping", ["grad_norm"]),
        metric_chart(runs, "Loss", "of the step", ["loss"]),
        metric_chart(runs, "Learning rate", "of the step", ["learning_rate"]),
        *(replace(stages_chart(run, several=len(runs) > 1), run=i) for i, run in enumerate(runs) if run.lines),
        metric_chart(runs, "Memory", "of the process that holds most, in GiB", ["memory/held_gib"]),
        metric_chart(runs, "Token budget", "tokens of a micro-batch", ["memory/micro_batch_tokens"]),
    ]  # fmt: skip


def reward_chart(runs: Sequence[RunResults], title: str, metric: str) -> Chart:
    """Chart a reward in training, with the 95% interval of its mean."""
    column = "reward" if metric == "reward" else function_name(metric)
    points = [window_points(run, column) or metric_points(run.lines, metric) for run in runs]
    return Chart(title, "in training: mean over prompts, band: 95% interval", overlaid(runs, points, "training"))


def held_out_chart(runs: Sequence[RunResults]) -> Chart:
    """Chart the held-out reward, and the held-out score of each function if there are several.

    If there are several runs, chart the reward of each, or its first score if its evaluations have no reward.
    """
    _, *functions = reward_metrics([line for run in runs for line in run.lines])
    found = [
        {name: held_out_points(run.lines, metric) for name, metric in (("reward", "reward"), *functions)}
        for run in runs
    ]
    has_interval = any(point.low is not None for own in found for points in own.values() for point in points)
    note = "mean over held-out rows, bars: 95% interval" if has_interval else "mean over held-out rows"
    if len(runs) > 1:
        return Chart("Held out", note, overlaid(runs, [next(filter(None, own.values()), []) for own in found]))
    labels = [name for own in found for name, points in own.items() if points]
    if len(functions) == 1 and len(labels) > 1:
        labels = labels[1:]  # with one function, its score has the reward's values, and an interval
    return Chart("Held out", note, [
        Series(label, thinned(found[0][label]), i + 1, "dots") for i, label in enumerate(labels)
    ])  # fmt: skip


def spread_chart(runs: Sequence[RunResults]) -> Chart:
    """Chart the distinct answers of a group as a share of its size, and the share of groups whose advantages are all 0.

    If there are several runs, chart the first of these that a run has.
    """
    distinct = [answer_points(run) for run in runs]
    if len(runs) > 1 and any(distinct):
        return Chart("Spread", "distinct answers of a group, as a share of its size", overlaid(runs, distinct))
    idle = [metric_points(run.lines, WITHOUT_VARIANCE) for run in runs]
    if len(runs) > 1:
        return Chart("Spread", f"{SHARE_OF_GROUPS} {ALL_ZERO}", overlaid(runs, idle))
    series = [
        Series("distinct answers / group size", thinned(distinct[0])),
        Series(f"groups {ALL_ZERO}", thinned(idle[0]), 1),
    ]
    return Chart("Spread", "of groups, as shares", [one for one in series if one.points])


def overlaid(runs: Sequence[RunResults], points: Sequence[Sequence[Point]], label: str = "") -> list[Series]:
    """Return a series of each run that has points. A single run's is called `label`."""
    return [
        Series(run.name if len(runs) > 1 else label, thinned(own), i)
        for i, (run, own) in enumerate(zip(runs, points, strict=True))
        if own
    ]


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


def answer_points(run: RunResults) -> list[Point]:
    """Return the mean number of distinct answers of a group, divided by its size.

    Runs of earlier versions have no such metric: count the answers in their completions.
    """
    if not (size := group_size(run)):
        return []
    if logged := metric_points(run.lines, DISTINCT_ANSWERS):
        return [Point(point.step, point.value / size) for point in logged]
    return [
        Point(step + 1, float(np.mean([distinct_answers(group, run.decisive[0]) for group in groups])) / size)
        for step, groups in run.windows.items()
    ]


def group_size(run: RunResults) -> int:
    """Return the completions of a group, or 0 if they are not known."""
    if size := run.settings.get("rollout", {}).get("num_generations"):
        return int(size)
    return max((len(group) for groups in run.windows.values() for group in groups), default=0)


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
