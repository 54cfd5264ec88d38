"""The rule of the verdict, on lines of metrics that are made by hand."""

import json
from typing import Any

import pytest

from rl_vlm.run.outcome import CollapseWarning, changes_table, explained, headline
from rl_vlm.run.verdict import Evidence, Outcome, Verdict, both_ends, judge

NUM_STEPS = 40


def line(step: int, reward: float, constant: float = 0.1, answers: float = 4.0, best: float = 0.9, **more: Any) -> dict:
    return {
        "step": step, "reward": reward, "reward_std": 0.4, "frac_reward_zero_std": constant,
        "completions/distinct_answers": answers, "reward_best_of_group": best, **more,
    }  # fmt: skip


def rising(start: float = 0.3, end: float = 0.8) -> list[dict]:
    """A run whose groups keep their spread."""
    return [line(i + 1, start + (end - start) * i / (NUM_STEPS - 1)) for i in range(NUM_STEPS)]


def collapsing(reward: float, constant: float = 0.95, answers: float = 1.05, since: int = 15) -> list[dict]:
    """A run that starts at 0.3 with 0.9 as the best of a group, and has no spread from a step on."""
    before = [line(step, 0.3 + step / 1000) for step in range(1, since)]
    return [*before, *(line(step, reward + step / 1000, constant, answers, reward) for step in range(since, NUM_STEPS))]


def held_out(before: list[float], after: list[float]) -> dict[str, Any]:
    return {"held_out": {"reward": (before, after)}, "num_evaluations": 2}


MIXED = [0.0, 1.0] * 10


@pytest.mark.parametrize(
    ("after", "outcome"),
    [
        ([1.0] * 20, "learned"),
        ([0.0] * 20, "worse"),
        ([1.0, 0.0] * 10, "unchanged"),
        (MIXED, "unchanged"),
    ],
)
def test_held_out_rows_decide_in_pairs(after: list[float], outcome: str):
    assert judge(Evidence(rising(), **held_out(MIXED, after))).outcome == outcome


def test_pairs_show_a_change_that_is_small_beside_the_spread_of_rows():
    before = [i / 20 for i in range(20)]
    change = judge(Evidence(rising(), **held_out(before, [value + 0.01 for value in before]))).changes[0]
    assert (change.before, change.after, change.num) == (pytest.approx(0.475), pytest.approx(0.485), 20)
    assert change.low == pytest.approx(0.01) and change.high == pytest.approx(0.01)


def test_without_held_out_data_training_decides_and_the_verdict_says_so():
    verdict = judge(Evidence(rising(), lacks=["There are no held-out data."]))
    assert (verdict.outcome, verdict.is_evaluated) == ("learned", False)
    assert headline(verdict) == "learned, not evaluated"
    assert explained(verdict).startswith("The training reward rose from 0.40 to 0.70 (95% interval of the change: +")
    assert explained(verdict).endswith("There are no held-out data.")


def test_later_iterations_of_a_window_are_no_new_values():
    """Ten windows of two steps with two iterations: the steps train on groups A B A B."""
    steps = [
        line(i + 1, [0.2, 0.4][i % 2], **{"sampling/iteration": i % 4 // 2}) for i in range(NUM_STEPS)
    ]  # fmt: skip
    change = judge(Evidence(steps)).changes[0]
    assert (change.before, change.after, change.num) == (pytest.approx(0.3), pytest.approx(0.3), 10)


def test_windows_with_equal_figures_are_values_of_their_own():
    """20 windows at 0.5 and 20 at 1.0, where nothing varies any more."""
    steps = [line(i + 1, 0.5 if i < 20 else 1.0) for i in range(NUM_STEPS)]
    change = judge(Evidence(steps)).changes[0]
    assert (change.before, change.after, change.num) == (0.5, 1.0, 16)


def test_few_steps_and_few_rows_are_too_short():
    assert judge(Evidence(rising()[:9], **held_out(MIXED, MIXED))).outcome == "too short to tell"
    assert judge(Evidence(rising()[:9], **held_out(MIXED, [1.0] * 20))).outcome == "too short to tell"
    assert judge(Evidence(rising()[:10], **held_out(MIXED, [1.0] * 20))).outcome == "learned"
    assert judge(Evidence(rising(), **held_out([0.0] * 7, [1.0] * 7))).outcome == "too short to tell"
    assert judge(Evidence([])).outcome == "too short to tell"


def test_a_collapse_is_named_by_its_step():
    """With one of the last four steps at 4 answers, 0.79 beyond the first would not be below 0.2 of 3."""
    verdict = judge(Evidence(collapsing(reward=0.35), **held_out(MIXED, MIXED)))
    assert (verdict.outcome, verdict.step, headline(verdict)) == ("collapsed", 15, "collapsed at step 15")


@pytest.mark.parametrize(
    "steps",
    [
        collapsing(reward=0.95),  # right nearly everywhere
        collapsing(reward=0.85),  # misses the best of the first groups, 0.9, by less than a quarter of 0.4
        collapsing(reward=0.75),  # has come more than three quarters of the way from 0.3 to 0.9
        collapsing(reward=0.35, constant=0.5, answers=1.05),  # half of the groups have two rewards
        collapsing(reward=0.35, constant=0.95, answers=1.8),  # answers are still tried
        rising(),
        [*collapsing(reward=0.35), *(line(step, 0.4) for step in range(NUM_STEPS, NUM_STEPS + 10))],  # has recovered
    ],
)
def test_what_is_no_collapse(steps: list[dict]):
    assert judge(Evidence(steps, **held_out(MIXED, MIXED))).outcome == "unchanged"


def test_a_run_that_starts_without_variance_is_judged_by_its_answers():
    def steps(answers: float) -> list[dict]:
        first = [line(step, 0.3 + step / 1000, constant=0.9, best=0.6) for step in range(1, 10)]
        return [*first, *(line(step, 0.3 + step / 1000, 0.9, answers, 0.3) for step in range(10, NUM_STEPS))]

    assert judge(Evidence(steps(1.1))).outcome == "collapsed"
    assert judge(Evidence(steps(4.0))).outcome != "collapsed"


@pytest.mark.parametrize(
    ("constant", "answers", "outcome"),
    [
        (0.95, 4.0, "collapsed"),  # all texts of a group of four are distinct, as at the start
        (0.55, 4.0, "unchanged"),
        (0.95, 3.5, "unchanged"),  # they have a form, and vary
        (0.95, 1.05, "collapsed"),
    ],
)
def test_texts_without_a_form_of_an_answer_are_judged_by_variance(constant: float, answers: float, outcome: str):
    evidence = Evidence(collapsing(0.35, constant, answers), **held_out(MIXED, MIXED), num_generations=4)
    assert judge(evidence).outcome == outcome


def test_small_steps_are_taken_together():
    """With 8 groups in a step, the first 4 steps show the start and the last 16 the end.

    14 of 16 steps at 1.05 answers and 2 at 4 have 0.42 beyond the first, below 0.2 of 3. 13 and 3 have 0.60.
    """
    steps = [{**each, "completions/num_groups": 8} for each in collapsing(0.35)]
    assert (judge(Evidence(steps)).outcome, judge(Evidence(steps)).step) == ("collapsed", 13)
    assert judge(Evidence(steps[:27])).outcome != "collapsed"


def test_a_run_whose_first_steps_are_elsewhere_is_not_called_collapsed():
    assert judge(Evidence(collapsing(0.35)[3:], **held_out(MIXED, MIXED))).outcome == "unchanged"


def test_missing_figures_are_no_collapse():
    steps = [{**each, "reward_std": float("nan"), "completions/distinct_answers": None} for each in collapsing(0.35)]
    assert judge(Evidence(steps, **held_out(MIXED, MIXED))).outcome == "unchanged"


def test_a_reward_that_misses_the_best_by_little_is_at_its_end():
    """0.93 of 0.98 with a standard deviation of 0.4 at the start: there was little left to find."""
    first = [line(step, 0.9 + step / 1000, best=0.98) for step in range(1, 10)]
    steps = [*first, *(line(step, 0.93 + step / 10000, 0.95, 1.05, 0.93) for step in range(10, NUM_STEPS))]
    assert judge(Evidence(steps)).outcome == "learned"


def test_constant_and_faulty_rewards():
    same = [line(step, 0.5, constant=1.0, answers=4.0, best=0.5) for step in range(1, 21)]
    assert judge(Evidence(same, **held_out(MIXED, MIXED))).outcome == "rewards constant"
    faulty = [{**each, "frac_reward_faults": 0.05} for each in rising()]
    assert judge(Evidence(faulty, **held_out(MIXED, [1.0] * 20))).outcome == "rewards faulty"
    few = [{**each, "completions/num_groups": 8} for each in same[:3]]
    assert judge(Evidence(few)).outcome == "too short to tell"
    assert judge(Evidence(faulty)).changes[-1].name == "share of completions with a reward fault"
    seldom = [{**each, "frac_reward_faults": 0.04} for each in rising()]
    assert judge(Evidence(seldom, **held_out(MIXED, [1.0] * 20))).outcome == "learned"


def test_scores_of_several_functions_stand_below_the_reward():
    steps = [{**each, "rewards/a/mean": 0.5, "rewards/b/mean": each["reward"]} for each in rising()]
    names = [change.label for change in judge(Evidence(steps)).changes]
    assert names == [
        "training reward", "training a", "training b", "distinct answers of a group",
        "share of groups without variance", "best reward of a group",
    ]  # fmt: skip
    one = [{**each, "rewards/a/mean": each["reward"]} for each in rising()]
    assert "training a" not in [change.label for change in judge(Evidence(one)).changes]


@pytest.mark.parametrize(
    ("num", "before", "after"),
    [
        (1, [0], [0]),
        (3, [0], [2]),
        (20, range(10), range(10, 20)),
        (40, range(16), range(24, 40)),
        (200, range(20), range(180, 200)),
    ],
)
def test_ends_are_a_tenth_and_at_least_sixteen_if_both_can(num: int, before: Any, after: Any):
    assert both_ends([float(i) for i in range(num)]) == (list(map(float, before)), list(map(float, after)))


def test_a_verdict_survives_json():
    verdict = judge(Evidence(collapsing(0.35), **held_out(MIXED, MIXED), lacks=("a",)))
    assert Verdict.from_json(json.loads(json.dumps(verdict.as_json()))) == verdict


def test_a_collapse_is_warned_of_once_and_not_again_after_a_resume(caplog: pytest.LogCaptureFixture):
    steps = collapsing(0.35)
    warning = CollapseWarning()
    for each in [{"step": 0, "eval_reward": 0.3}, *steps]:
        warning.give(each)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(
        "step 18: the run begins to collapse. Groups have lost their spread since step 15, and the reward is far below "
        "the best completions of the first groups (completions/distinct_answers 4.00 → 1.05;"
    )
    assert "with a lower learning_rate, a higher epsilon_high" in message
    caplog.clear()
    resumed = CollapseWarning(Evidence(steps[:30]))
    for each in steps[30:]:
        resumed.give(each)
    assert not caplog.records


SENTENCES = {
    "learned": "The held-out reward rose from 0.50 to 0.75 (95% interval of the change: +0.25 to +0.25).",
    "worse": "The held-out reward fell from 0.50 to 0.75 (95%",
    "unchanged": "The held-out reward did not change measurably: 0.50 at first, 0.75 at the end (95%",
    "too short to tell": "There are too few steps or values to judge the change of the held-out reward: 0.50 at",
    "collapsed": "Groups have lost their spread, and the reward is far below the best completions of the first "
    "groups. The held-out reward went from 0.50 to 0.75 (95%",
    "rewards constant": "All completions of a group always had the same reward",
    "rewards faulty": "Reward functions failed on a large part of the completions",
}


def test_every_outcome_has_a_sentence_and_the_table_has_intervals():
    verdict = judge(Evidence(rising(), **held_out(MIXED, [value + 0.25 for value in MIXED])))
    assert SENTENCES.keys() == set(Outcome)
    for outcome, sentence in SENTENCES.items():
        assert explained(Verdict(Outcome(outcome), None, True, verdict.changes)).startswith(sentence)
    assert changes_table(verdict.changes).splitlines()[:2] == [
        "                                  start  end   95% interval of the change",
        "held-out reward                   0.50   0.75  +0.25 to +0.25",
    ]
