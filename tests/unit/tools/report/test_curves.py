from pathlib import Path

import pytest
from scipy import stats

from rl_vlm.log.curve import Point, Series
from rl_vlm.tools.report.build import build_page
from rl_vlm.tools.report.curves import T_95, Chart, Charts, charts_of, stages_chart, window_points
from rl_vlm.tools.report.draw import chart_data, clock_of, figure_of, number, sparkline
from rl_vlm.tools.report.read import RunResults, read_runs
from tests.helpers.run_directory import completion_row, write_run
from tests.unit.tools.report.test_report import page_data


def titles(charts: Charts) -> tuple[list[str], list[str], list[str]]:
    return [c.title for c in charts.first], [c.title for c in charts.internals], [title for title, _ in charts.constant]


def test_four_curves_come_first_and_others_only_if_they_change(tmp_path: Path):
    metrics = {
        "reward": 0.5,
        "completions/mean_length": 9.0,
        "completions/distinct_answers": 4.0,
        "kl": 0.1,
        "loss": 0.0,
    }
    lines = [
        {"step": 0, "eval_num_samples": 4.0, "eval_reward": 0.3},
        {"step": 1, **metrics, "frac_reward_zero_std": 0.25},
        {"step": 2, **metrics, "frac_reward_zero_std": 0.25, "kl": 0.2},
    ]
    settings = {"rollout": {"num_generations": 8}}
    charts = charts_of([RunResults("run", tmp_path, "training", lines=lines, settings=settings)])
    assert titles(charts) == (["Reward", "Held out", "Length", "Spread"], ["KL"], ["Loss"])
    spread = [(series.label, [p.value for p in series.points]) for series in charts.first[3].series]
    assert spread == [
        ("distinct answers / group size", [0.5, 0.5]),
        ("groups whose advantages are all 0", [0.25, 0.25]),
    ]


def test_values_that_differ_by_rounding_are_constant():
    chart = lambda *values: Chart("", "", [Series("", [Point(i, value) for i, value in enumerate(values)])])  # noqa: E731
    assert [chart(*values).changes for values in ((0.0, 0.0), (0.3, 0.1 + 0.2), (0.3, 0.31))] == [False, False, True]


def test_distinct_answers_of_earlier_versions_are_those_of_the_completions(tmp_path: Path):
    (run,) = read_runs([write_run(tmp_path / "run")])
    assert [[p.value for p in s.points] for s in charts_of([run]).first[2].series] == [[1.0, 1.0]]


def test_the_band_of_a_reward_is_the_interval_of_its_mean_over_prompts():
    rows = [completion_row(4, p, i, float(p)) for p in range(2) for i in range(3)]
    (point,) = window_points(RunResults("run", Path(), "training", rows=rows), "reward")
    half = 12.706 * (0.5**0.5) / 2**0.5  # Student's t of one degree of freedom; deviation of (0, 1) is sqrt(1/2)
    assert (point.step, point.value) == (5, 0.5)
    assert (point.low, point.high) == pytest.approx((0.5 - half, 0.5 + half))
    (alone,) = window_points(RunResults("run", Path(), "training", rows=rows[:3]), "reward")
    assert (alone.low, alone.high) == (None, None)


def test_quantiles_of_students_t():
    assert [round(float(stats.t.ppf(0.975, df)), 3) for df in range(1, 31)] == list(T_95)


def test_a_chart_as_data_and_in_words():
    chart = Chart("Reward", "note", [Series("training", [Point(0, 0.0), Point(10, 1.23456789, 1.0, 2.0)], 9)])
    assert chart_data(chart, 1) == {
        "series": [{"label": "training", "run": 0, "color": 1, "style": "line", "points": [[0, 0], [10, 1.2346, 1, 2]]}]
    }
    assert figure_of(chart).summary == "Reward. training: 0 at step 0, 1.23 at step 10"
    assert [number(value) for value in (0, 0.25, 16384.0, 1.2e-5)] == ["0", "0.25", "16.38k", "1.2e-05"]


def test_the_clock_adds_up_seconds_and_tokens():
    lines = [
        {"step": 0, "eval_reward": 0.1},
        {"step": 4, "time/step": 2.0, "step_tokens": 100.0},
        {"step": 5, "time/step": 1.5, "step_tokens": 50.0},
    ]
    assert clock_of(lines) == [[3, 0, 0], [4, 2.0, 100], [5, 3.5, 150]]
    assert clock_of([{"step": 1, "reward": 1.0}]) == []
    many = clock_of([{"step": i, "time/step": 1.0} for i in range(1, 5001)])
    assert len(many) <= 502 and many[-1] == [5000, 5000.0, 0]


def test_a_small_curve_fills_its_box():
    spark = sparkline([Point(1, 0.0), Point(2, 0.5), Point(3, 1.0)], "training reward")
    assert spark and (spark.path, spark.words) == ("M2.0 25.0L60.0 14.0L118.0 3.0", "training reward from 0 to 1")
    assert sparkline([Point(1, 0.0)], "") is None


def test_charts_of_a_run_that_has_no_completions(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    for path in (folder / "completions").glob("*.parquet"):
        path.unlink()
    (run,) = read_runs([folder])
    reward = charts_of([run]).first[0]
    assert [(s.label, [p.value for p in s.points]) for s in reward.series] == [("training", [0.25, 0.75])]
    assert page_data(build_page([run]))["groups"] == []


def test_stages_stand_on_each_other_without_what_runs_beside(tmp_path: Path):
    lines = [{"step": 1, "time/step": 10.0, "time/training": 4.0, "time/generation": 3.0,
              "time/ahead/generation": 9.0, "time/save": 5.0}]  # fmt: skip
    chart = stages_chart(RunResults("run", tmp_path, "training", lines=lines), several=False)
    assert [(s.label, s.points[0].low, s.points[0].high) for s in chart.series] == [
        ("training", 0.0, 4.0), ("generation", 4.0, 7.0), ("other", 7.0, 10.0),
    ]  # fmt: skip


def test_runs_of_a_comparison_keep_their_colours_and_show_the_clipping_that_they_have(tmp_path: Path):
    lines = [{"step": 1, "reward": 0.5, "clip_ratio/low_mean": 0.0, "clip_ratio/region_mean": 0.3}]
    lines += [{"step": step, "time/step": 1.0 * step} for step in (2, 3)]
    records = [
        RunResults("eval", tmp_path, "evaluation", rows=[completion_row(0, 0, 0, 1.0)], names=["exact_match"]),
        RunResults("a", tmp_path, "training", lines=lines),
        RunResults("b", tmp_path, "training", lines=[{"step": 1, "reward": 0.1, "cispo_clip_ratio": 0.2}]),
    ]
    charts = charts_of(records)
    by_title = {chart.title: chart for chart in (*charts.first, *charts.internals)}
    assert [(s.label, s.color) for s in by_title["Reward"].series] == [("a", 1), ("b", 2)]
    assert [(s.label, s.points[0].value) for s in by_title["Clipped tokens"].series] == [("a", 0.3), ("b", 0.2)]
    runs = lambda title: [series["run"] for series in chart_data(by_title[title], 3)["series"]]  # noqa: E731
    assert runs("Reward") == [1, 2]
    assert runs("Seconds by stage: a") == [1]
