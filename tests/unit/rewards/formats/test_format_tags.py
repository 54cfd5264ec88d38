import pytest

from rewards.formats.format_tags import format_tags

THINK = ["think", "answer"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<answer>7</answer>", 1.0),
        (" \n<answer>two words</answer>\n", 1.0),
        ("<answer>2 < 3</answer>", 1.0),
        ("", 0.0),
        ("7", 0.0),
        ("<answer></answer>", 0.0),
        ("<answer> \n</answer>", 0.0),
        ("<answer>7", 0.0),
        ("7</answer>", 0.0),
        ("</answer>7<answer>", 0.0),
        ("<Answer>7</Answer>", 0.0),
        ("It is <answer>7</answer>", 0.0),
        ("<answer>7</answer>.", 0.0),
        ("<answer>7</answer><answer>8</answer>", 0.0),
        ("<answer><answer>7</answer></answer>", 0.0),
        ("<answer>7</answer></answer>", 0.0),
        ("<answer>" * 100_000, 0.0),
        ("<answer>7</answer>" + " x" * 1_000_000, 0.0),
    ],
)
def test_one_tag(text, expected):
    assert format_tags([text]) == [expected]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>six, then</think>\n<answer>7</answer>", 1.0),
        ("<answer>7</answer><think>so</think>", 0.0),
        ("<think><answer>7</answer></think>", 0.0),
        ("<think>so<answer>7</think></answer>", 0.0),
        ("<think></think><answer>7</answer>", 0.0),
        ("<think>so</think> and <answer>7</answer>", 0.0),
        ("<think>a</think><think>b</think><answer>7</answer>", 0.0),
        ("<answer>7</answer>", 0.0),
    ],
)
def test_tags_in_order(text, expected):
    assert format_tags([text], tags=THINK) == [expected]


def test_text_outside_can_be_allowed():
    text = "Well: <think>so</think> hence <answer>7</answer>."
    assert format_tags([text, text + "<answer>8</answer>"], tags=THINK, allow_outside=True) == [1.0, 0.0]


def test_conversational_completions():
    message = [{"role": "assistant", "content": "<answer>7</answer>"}]
    blocks = [{"role": "assistant", "content": [{"type": "text", "text": "<answer>7</answer>"}]}]
    assert format_tags([message, blocks]) == [1.0, 1.0]


def test_one_name_instead_of_a_list_is_refused():
    with pytest.raises(TypeError, match=r"write \[answer\]"):
        format_tags(["<answer>7</answer>"], tags="answer")
