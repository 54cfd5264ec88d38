"""The closing words of a training run."""

from typing import Any

from rl_vlm.log.changes import Change
from rl_vlm.run.outcome import RunSummary, training_outcome
from rl_vlm.run.verdict import Outcome, Verdict

RUN: dict[str, Any] = {
    "eval_before": None,
    "eval_after": None,
    "optimizer_steps": 30,
    "train_seconds": 1.6,
    "checkpoint": "runs/a/checkpoint-30",
    "verdict": Verdict(
        Outcome.LEARNED,
        None,
        True,
        [
            Change("reward", 0.25, 0.75, 0.4, 0.6, 450, "held-out"),
            Change("distinct answers of a group", 3.0, 1.5),
        ],
    ).as_json(),
}


def test_the_verdict_the_changes_and_the_files():
    assert training_outcome(RUN, "runs/a").splitlines() == [
        "Verdict: learned. The held-out reward rose from 0.25 to 0.75 (95% interval of the change: +0.40 to +0.60).",
        "                             start  end   95% interval of the change",
        "held-out reward              0.25   0.75  +0.40 to +0.60",
        "distinct answers of a group  3.00   1.50",
        "30 optimizer steps took 2 s. The model is runs/a/checkpoint-30, every completion with its rewards is in "
        "runs/a/completions.",
    ]


def test_a_summary_is_a_dict_that_prints_as_the_closing_words():
    summary = RunSummary(RUN)
    assert summary == RUN and summary["optimizer_steps"] == 30
    assert f"{summary}".splitlines()[:3] == [
        "Verdict: learned. The held-out reward rose from 0.25 to 0.75 (95% interval of the change: +0.40 to +0.60).",
        "                             start  end   95% interval of the change",
        "held-out reward              0.25   0.75  +0.40 to +0.60",
    ]
    assert repr(RunSummary(optimizer_steps=3)) == "{'optimizer_steps': 3}"


def test_faults_and_skipped_updates():
    found = RUN | {
        "reward_faults": {"judge/timeout": 12.0, "judge/nan": 1.0},
        "skipped_updates": {"no_variance": 2.0, "nonfinite": 0.0},
        "eval_after": {"reward_faults/judge/nan": 3.0},
    }
    skipped, training, held_out = training_outcome(found, "runs/a").splitlines()[5:]
    assert skipped == "Steps of 30 that did not update the weights: no variance 2."
    assert training.startswith("Completions ") and training.endswith(": judge/timeout 12, judge/nan 1.")
    assert held_out.startswith("Held-out completions ") and held_out.endswith(": judge/nan 3.")


def test_few_values_have_no_interval():
    few = Verdict(Outcome.SHORT, None, True, [Change("reward", 0.25, 0.75, 0.4, 0.6, 7, "held-out")]).as_json()
    verdict, *table = training_outcome(RUN | {"verdict": few}, "runs/a").splitlines()[:3]
    assert verdict.startswith("Verdict: too short to tell. ")
    assert verdict.endswith(" the held-out reward: 0.25 at first, 0.75 at the end.")
    assert table == [
        "                 start  end   95% interval of the change",
        "held-out reward  0.25   0.75  too few values (7)",
    ]


def test_a_run_without_a_reward_names_what_is_missing():
    nothing = Verdict(Outcome.SHORT, None, False, [], ["There are no held-out data."]).as_json()
    assert training_outcome(RUN | {"verdict": nothing}, "runs/a").splitlines()[0] == (
        "Verdict: too short to tell, not evaluated. There are no rewards to compare. There are no held-out data."
    )
