"""Built-in reward functions score as the tables of docs/built_in_rewards.md say, in both forms of a completion."""

import inspect

import pytest

from rewards.calling import Call
from rewards.contract import Fault
from rewards.judges.reply import read_reply
from rewards.registry import BUILT_INS
from tests.helpers.reward_tables import PAGE, WITHOUT_TABLE, StatedScore, stated_replies, stated_scores

PENALTIES = ("overlong", "repetition")
"""Functions whose maximum is 0.0."""
SCORES = list(stated_scores(PAGE.read_text()))
REPLIES = list(stated_replies(PAGE.read_text()))


@pytest.mark.parametrize("stated", SCORES, ids=str)
def test_a_completion_scores_as_the_page_says(stated: StatedScore) -> None:
    for completion in (stated.completion, [{"role": "assistant", "content": stated.completion}]):
        (score,) = (
            Call(BUILT_INS[stated.function], {"completions": [completion], **arguments(stated)}, 1).answer().scores
        )
        if stated.score == "fault":
            assert isinstance(score, Fault)
        elif stated.score == "does not apply":
            assert score is None
        else:
            assert score == pytest.approx(float(stated.score), abs=5e-4)


@pytest.mark.parametrize(("reply", "stated"), REPLIES)
def test_a_reply_of_a_judge_scores_as_the_page_says(reply: str, stated: str) -> None:
    score = read_reply(reply, 10.0)
    assert isinstance(score, Fault) if stated == "fault" else score == float(stated)


def test_the_page_says_what_a_judges_replies_score() -> None:
    assert REPLIES[0] == ('{"score": 10}', "1.0") and ("", "fault") in REPLIES and len(REPLIES) == 13


def arguments(stated: StatedScore) -> dict[str, object]:
    """Columns have one entry per completion, and settings do not. A column that the row leaves out is None."""
    known = inspect.signature(BUILT_INS[stated.function]).parameters
    settings = {name for name, p in known.items() if p.kind is p.KEYWORD_ONLY}
    left_out: dict[str, object] = {name: [None] for name in known if name not in settings and name != "completions"}
    return left_out | {name: value if name in settings else [value] for name, value in stated.arguments.items()}


@pytest.mark.parametrize("name", sorted(BUILT_INS.keys() - WITHOUT_TABLE))
def test_every_function_has_a_table_with_its_maximum_and_exploits(name: str) -> None:
    mine = [stated for stated in SCORES if stated.function == name]
    assert mine[0].score == ("0.0" if name in PENALTIES else "1.0"), "the first row is a gold answer"
    assert len(mine) >= 5
    assert any(stated.completion == "" for stated in mine), "an empty completion is the first thing that a policy tries"
