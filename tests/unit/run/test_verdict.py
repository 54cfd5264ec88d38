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
    assert explained(verdict).startswith("The training reward rose from 0.34 to 0.76 (95% interval of the change: +")
    assert explained(verdict).endswith("There are no held-out data.")


def test_steps_of_one_window_are_one_value():
    """40 steps that train on four windows of ten updates each are four values."""
    steps = [line(i + 1, 0.1 * (i // 10)) for i in range(NUM_STEPS)]
    verdict = judge(Evidence(steps))
    assert (verdict.outcome, verdict.changes[0].num) == ("too short to tell", 2)


def test_few_steps_and_few_rows_are_too_short():
    assert judge(Evidence(rising()[:9], **held_out(MIXED, MIXED))).outcome == "too short to tell"
    assert judge(Evidence(rising()[:9], **held_out(MIXED, [1.0] * 20))).outcome == "too short to tell"
    assert judge(Evidence(rising()[:10], **held_out(MIXED, [1.0] * 20))).outcome == "learned"
    assert judge(Evidence(rising(), **held_out([0.0] * 7, [1.0] * 7))).outcome == "too short to tell"
    assert judge(Evidence([])).outcome == "too short to tell"


def test_a_collapse_is_named_by_its_step():
    """With 7 of the last 8 steps at 1.05 and one at 4 answers: 0.42 beyond the first are below 0.2 of 3."""
    verdict = judge(Evidence(collapsing(reward=0.35), **held_out(MIXED, MIXED)))
    assert (verdict.outcome, verdict.step, headline(verdict)) == ("collapsed", 21, "collapsed at step 21")


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


def test_texts_without_a_form_of_an_answer_are_judged_by_variance():
    assert judge(Evidence(collapsing(0.35, constant=0.95, answers=4.0))).outcome == "collapsed"
    assert judge(Evidence(collapsing(0.35, constant=0.55, answers=4.0))).outcome != "collapsed"


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
    seldom = [{**each, "frac_reward_faults": 0.04} for each in rising()]
    assert judge(Evidence(seldom, **held_out(MIXED, [1.0] * 20))).outcome == "learned"


def test_scores_of_several_functions_stand_below_the_reward():
    steps = [{**each, "rewards/a/mean": 0.5, "rewards/b/mean": each["reward"]} for each in rising()]
    names = [change.name for change in judge(Evidence(steps)).changes]
    assert names == [
        "training reward", "training a", "training b", "distinct answers of a group",
        "share of groups without variance", "best reward of a group",
    ]  # fmt: skip
    one = [{**each, "rewards/a/mean": each["reward"]} for each in rising()]
    assert "training a" not in [change.name for change in judge(Evidence(one)).changes]


@pytest.mark.parametrize(
    ("num", "before", "after"),
    [(1, [0], [0]), (3, [0], [2]), (20, range(8), range(12, 20)), (200, range(20), range(180, 200))],
)
def test_ends_are_a_tenth_and_at_least_eight_if_both_can(num: int, before: Any, after: Any):
    assert both_ends([float(i) for i in range(num)]) == (list(map(float, before)), list(map(float, after)))


def test_a_verdict_survives_json():
    verdict = judge(Evidence(collapsing(0.35), **held_out(MIXED, MIXED), lacks=["a"]))
    assert Verdict.from_json(json.loads(json.dumps(verdict.as_json()))) == verdict


def test_a_collapse_is_warned_of_once_and_not_again_after_a_resume(caplog: pytest.LogCaptureFixture):
    steps = collapsing(0.35)
    warning = CollapseWarning(NUM_STEPS)
    for each in [{"step": 0, "eval_reward": 0.3}, *steps]:
        warning.give(each)
    (message,) = [record.getMessage() for record in caplog.records]
    assert message.startswith(
        "step 21: the run begins to collapse. The completions of a group have become nearly equal, and the reward is "
        "far below the best completions of the first groups (distinct answers of a group 4.00 → 1.42;"
    )
    assert "lower learning_rate, a higher epsilon_high" in message
    caplog.clear()
    resumed = CollapseWarning(NUM_STEPS, steps[:30])
    for each in steps[30:]:
        resumed.give(each)
    assert not caplog.records


def test_every_outcome_has_a_sentence_and_the_table_has_intervals():
    verdict = judge(Evidence(rising(), **held_out(MIXED, [value + 0.25 for value in MIXED])))
    for outcome in Outcome:
        assert explained(Verdict(outcome, None, True, verdict.changes)).count(".") >= 1
    assert changes_table(verdict.changes).splitlines()[:2] == [
        "                                  start  end   95% interval of the change",
        "held-out reward                   0.50   0.75  +0.25 to +0.25",
    ]
