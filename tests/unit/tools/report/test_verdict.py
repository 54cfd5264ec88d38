import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl_vlm.log.completions import held_out_path, window_path, write_rows
from rl_vlm.run.outcome import explained, headline
from rl_vlm.run.verdict import judge
from rl_vlm.tools.report.build import build_page
from rl_vlm.tools.report.read import RunResults, read_runs
from rl_vlm.tools.report.verdict import Judged, fault_counts, verdict_of
from tests.helpers.run_directory import completion_row, evidence_in, write_run


def judged(folder: Path) -> Judged:
    return verdict_of(*read_runs([folder]))


def write_lines(folder: Path, *lines: dict[str, Any]) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def learning_run(folder: Path, settings: dict[str, Any] | None = None) -> Path:
    """A run of 20 steps whose 10 held-out rows all rise from 0 to 1."""
    write_run(folder, *([settings] if settings else []))
    steps = [
        {"step": s, "reward": s / 20, "frac_reward_zero_std": 0.0, "reward_best_of_group": 1.0, "time/step": 6.0}
        for s in range(1, 21)
    ]
    first, last = ({"step": step, "eval_num_samples": 10.0, "eval_rewards/exact_match/mean": score}
                   for step, score in ((0, 0.0), (20, 1.0)))  # fmt: skip
    write_lines(folder, first, *steps, last)
    for step, score in ((0, 0.0), (20, 1.0)):
        write_rows(held_out_path(folder, step), [completion_row(step, p, 0, score) for p in range(10)])
    return folder


def test_the_page_has_the_verdict_of_the_terminal(tmp_path: Path):
    folder = learning_run(tmp_path / "run")
    verdict = judge(evidence_in(folder, result_step=20, decisive="exact_match"))
    found = judged(folder)
    assert (found.title, found.sentence) == ("Learned", explained(verdict))
    assert headline(verdict) == "learned" and (found.state, found.mark) == ("good", "↑")
    assert (found.moved[0].label, found.moved[0].values) == ("Held-out reward", "0.00 → 1.00")
    assert (found.moved[0].interval, found.moved[0].word) == ("+1.00 to +1.00", "rose")
    assert (found.steps, found.minutes, found.is_complete) == ("20 of 2", "2.0", True)
    page = build_page(read_runs([folder]))
    assert "0.00 → 1.00" in page and explained(verdict) in page


def test_few_values_have_no_interval(tmp_path: Path):
    found = judged(write_run(tmp_path / "run"))
    assert (found.title, found.state) == ("Too short to tell", "even")
    assert [(m.label, m.values, m.interval) for m in found.moved] == [
        ("Training reward", "0.25 → 0.75", "too few values (1)"),
        ("Held-out exact_match", "0.10 → 0.90", "the latter: 0.00 to 0.50"),
    ]


def test_numbers_that_are_0_are_left_out(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    assert [(f.label, f.value) for f in judged(folder).facts] == [("Rows skipped", "3"), ("Reward faults", "1")]
    (folder / "dropped_prompts.jsonl").unlink()
    assert [(f.label, f.value) for f in judged(folder).facts] == [("Reward faults", "1")]


def test_held_out_scores_are_those_of_the_model_that_the_run_ends_with(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    line = {"step": 3, "eval_num_samples": 4.0, "eval_rewards/exact_match/mean": 0.5}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")
    assert judged(folder).by_label["Held-out exact_match"].values == "0.10 → 0.50"
    (folder / "summary.json").write_text('{"checkpoint": "run/checkpoint-2"}')
    score = judged(folder).by_label["Held-out exact_match"]
    assert (score.values, score.interval) == ("0.10 → 0.90", "the latter: 0.00 to 0.50")


def test_held_out_scores_without_completions_begin_with_those_that_decide(tmp_path: Path):
    scores = {"eval_num_samples": 4.0, "eval_rewards/format/mean": 1.0, "eval_rewards/match/mean": 0.5}
    lines = [
        {"step": 0, "eval_reward": 0.25, **scores},
        {"step": 1, "reward": 0.5},
        {"step": 1, "eval_reward": 0.75, **scores},
    ]
    write_lines(tmp_path, *lines)
    settings = {"rewards": {"reward_funcs": [{"function": "format", "weight": 0.1}, "match"]}}
    run = RunResults("run", tmp_path, "training", lines=lines, names=["format", "match"], settings=settings)
    assert [(m.label, m.values) for m in verdict_of(run).moved if m.label.startswith("Held-out")] == [
        ("Held-out reward", "0.25 → 0.75"), ("Held-out match", "0.50 → 0.50"), ("Held-out format", "1.00 → 1.00"),
    ]  # fmt: skip


def test_rewards_of_environments_have_the_weight_1(tmp_path: Path):
    rewards = {"reward_funcs": [{"function": "format", "weight": 0.1}, "match"], "reward_weights": [0.5, 2.0]}
    names = ["format", "match", "Game"]
    run = RunResults("run", tmp_path, "training", names=names, settings={"rewards": rewards})
    assert run.weights == {"format": 1.0, "match": 1.0, "Game": 1.0}
    with_game = replace(run, settings={"rewards": rewards, "rollout": {"environment": "game.py:Game"}})
    assert with_game.weights == {"format": 0.5, "match": 2.0, "Game": 1.0}
    assert with_game.decisive == ["match"]


def test_a_run_of_an_earlier_version_is_judged_by_its_completions(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    steps = range(30)
    write_lines(
        folder,
        *({"step": s + 1, "reward": 0.5, "reward_std": 0.4, "frac_reward_zero_std": 1.0 * (s > 9)} for s in steps),
    )
    for path in (folder / "completions").glob("completions_*.parquet"):
        path.unlink()
    for step in steps:
        answers = ["a", "b", "c", "d"] if step < 10 else ["a"] * 4
        rows = [
            completion_row(step, group, i, 1.0 * (text == "d"), {"completion": f"<answer>{text}</answer>"})
            for group in range(8)
            for i, text in enumerate(answers)
        ]
        write_rows(window_path(folder, step), rows)
    found = judged(folder)
    # 128 groups are 16 steps. 13 of steps 8 to 23 have one answer: 0.56 beyond the first, below 0.2 of 3.
    assert (found.title, found.state) == ("Collapsed at step 8, not evaluated", "bad")
    assert found.by_label["Distinct answers of a group"].values == "4.00 → 1.00"


def test_held_out_pass_rates_are_beside_the_verdict(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    lines = [
        {"step": step, "eval_num_samples": 4.0, "eval_rewards/f/mean": 0.1, "eval_rewards/f/pass@1": 0.1,
         "eval_rewards/f/pass@4": rate}
        for step, rate in ((0, 0.25), (2, 0.75))
    ]  # fmt: skip
    write_lines(folder, lines[0], {"step": 1, "reward": 0.5}, lines[1])
    fact = judged(folder).facts[0]
    assert (fact.label, fact.value, fact.note) == ("Held-out pass@4", "0.25 → 0.75", "f")


def test_a_run_that_began_elsewhere_says_which_steps_are_missing(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text(lines[2] + "\n")
    assert "Steps before 2 are in another directory, so a collapse cannot be seen." in judged(folder).sentence


def test_a_run_up_to_a_checkpoint_is_judged_by_its_first_steps(tmp_path: Path):
    (run,) = read_runs([learning_run(tmp_path / "run")])
    early = RunResults(run.name, run.path, "training", lines=[line for line in run.lines if line["step"] <= 10])
    found = verdict_of(early)
    assert (found.moved[0].label, found.moved[0].values) == ("Training reward", "0.15 → 0.40")
    assert "after step 0." in found.sentence


def test_an_evaluation_shows_the_scores_that_decide_first(tmp_path: Path):
    summary = {"num_samples": 1200.0, "rewards/format/mean": 1.0, "rewards/match/mean": 0.25,
               "rewards/match/ci_low": 0.2, "rewards/match/ci_high": 0.3, "reward_faults/match/nan": 2.0}  # fmt: skip
    settings = {"rewards": {"reward_funcs": [{"function": "format", "weight": 0.1}, "match"]}}
    run = RunResults("eval", tmp_path, "evaluation", names=["format", "match"], summary=summary, settings=settings)
    found = verdict_of(run)
    assert (found.title, found.state) == ("Evaluated on 1,200 samples", "even")
    assert [(m.label, m.values, m.interval) for m in found.moved] == [
        ("Held-out match", "0.25", "0.20 to 0.30"), ("Held-out format", "1.00", ""),
    ]  # fmt: skip
    assert [(f.label, f.value) for f in found.facts] == [("Reward faults", "2")]


def test_faults_of_evaluations_within_a_run_count_and_rows_that_no_function_scores_do_not(tmp_path: Path):
    folder = write_run(tmp_path / "run")
    more = {"step": 3, "eval_reward_faults/judge/timeout": 40.0, "reward_faults/all/not_applicable": 5.0}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(more) + "\n")
    (run,) = read_runs([folder])
    expected = {"exact_match/nan": 1.0, "all/not_applicable": 5.0, "judge/timeout (held out)": 40.0}
    assert fault_counts(run) == expected
    assert ("Reward faults", "41") in [(f.label, f.value) for f in verdict_of(run).facts]
