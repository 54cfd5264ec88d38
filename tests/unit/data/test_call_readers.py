"""Calls as models write them."""

from collections.abc import Callable
from typing import Any

import pytest
from transformers import AutoTokenizer

from rl_vlm.data.call_readers import (
    CALL_FORMS,
    FoundCalls,
    TemplateReader,
    UnreadableCall,
    read_json_calls,
    read_python_calls,
)
from rl_vlm.data.tool_calls import schema_of
from rl_vlm.types import ToolCall
from tests.tiny.build import build_tiny


def crop(box: list[int], mode: str, zoom: float) -> None:
    """Crop the image.

    Args:
        box: Left, top, right and bottom.
        mode: How to crop.
        zoom: Factor of the size.
    """


def move(steps: int, back: bool) -> None:
    """Move the piece.

    Args:
        steps: Number of steps.
        back: Whether to move back.
    """


TOOLS = [schema_of(crop), schema_of(move)]
ONE = '<tool_call>\n{"name": "crop", "arguments": {"box": [1, 2]}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        ("It is 7.", "It is 7.", []),
        (ONE, "", [("crop", {"box": [1, 2]})]),
        (f"First. {ONE}\n{ONE}Last.", "First. \nLast.", [("crop", {"box": [1, 2]})] * 2),
        ('<tool_call>{"arguments": {}, "name": "look"}</tool_call>', "", [("look", {})]),
        ('<tool_call>{"name": "look"}</tool_call>', "", [("look", {})]),
        ('<tool_call>{"name": "look", "arguments": null}</tool_call>', "", [("look", {})]),
        (f"<think>I could {ONE}</think>\nNo.", f"<think>I could {ONE}</think>\nNo.", []),
        (f"I could {ONE}</think>\n{ONE}", f"I could {ONE}</think>\n", [("crop", {"box": [1, 2]})]),
        ("<think>I could <tool_call></think>7", "<think>I could <tool_call></think>7", []),
    ],
)
def test_calls_in_text_are_read(text: str, content: str, calls: list[Any]):
    assert read_json_calls(text) == FoundCalls(content, tuple(ToolCall(*call) for call in calls))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<tool_call>{'name': 'crop'}</tool_call>", "a call is not valid JSON: Expecting property name"),
        ("<tool_call></tool_call>", "a call is not valid JSON"),
        ("<tool_call>" + '{"a":' * 5000 + "</tool_call>", "a call is not valid JSON: maximum recursion depth exceeded"),
        ("<tool_call>[1]</tool_call>", "a call is not a JSON object"),
        ('<tool_call>{"name": "crop", "parameters": {}}</tool_call>', "other than .*: parameters"),
        ('<tool_call>{"arguments": {}}</tool_call>', 'a call has no "name"'),
        ('<tool_call>{"name": 3, "arguments": {}}</tool_call>', 'a call has no "name"'),
        ('<tool_call>{"name": "", "arguments": {}}</tool_call>', 'a call has no "name"'),
        ('<tool_call>{"name": "crop", "arguments": "{}"}</tool_call>', 'the "arguments" of crop are not a JSON object'),
        ('<tool_call>{"name": "crop", "arguments": [1]}</tool_call>', 'the "arguments" of crop are not a JSON object'),
        ('<tool_call>{"name": "look"}', "a call has no </tool_call> at its end"),
        (f'{ONE}<tool_call>{{"name": "look"}}', "a call has no </tool_call> at its end"),
        ('{"name": "look"}</tool_call>', "a call has no <tool_call> at its start"),
        (f"{ONE}<tool_call>?</tool_call>", "a call is not valid JSON"),
    ],
)
def test_a_call_that_cannot_be_read_is_a_problem_to_tell(text: str, problem: str):
    with pytest.raises(UnreadableCall, match=problem):
        read_json_calls(text)


XML, GLM, GEMMA = CALL_FORMS
LOOK: tuple[str, dict[str, Any]] = ("look", {})
MOVE = ("move", {"steps": 3, "back": True})
CUT = ("crop", {"box": [1, 2], "mode": "exact", "zoom": 0.5})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return AutoTokenizer.from_pretrained(build_tiny("qwen2_5_vl", tmp_path_factory.mktemp("tiny")))


def nested(levels: int) -> str:
    """Lists and objects within each other, as JSON and as Python."""
    return '[{"k": ' * (levels // 2) + "[1]" * (levels % 2) + "0" * (1 - levels % 2) + "}]" * (levels // 2)


@pytest.mark.parametrize("call", [
    lambda value: read_json_calls(f'<tool_call>{{"name": "draw", "arguments": {{"points": {value}}}}}</tool_call>'),
    lambda value: read_python_calls(f"<|tool_call_start|>[draw(points={value})]<|tool_call_end|>"),
])  # fmt: skip
def test_a_deep_argument_is_a_problem_to_tell(call: Callable[[str], FoundCalls]):
    assert call(nested(32)).calls[0].arguments["points"][0]["k"]
    for levels in (33, 80):
        with pytest.raises(UnreadableCall, match="an argument of draw has more than 32 lists and objects within"):
            call(nested(levels))


@pytest.mark.parametrize(
    ("form", "text", "content", "calls"),
    [
        (
            XML,
            "Look.\n\n<tool_call>\n<function=move>\n<parameter=steps>\n3\n</parameter>\n<parameter=back>\nTrue\n"
            "</parameter>\n</function>\n</tool_call><|im_end|>",
            "Look.\n\n<|im_end|>",
            [MOVE],
        ),
        (
            XML,
            "<tool_call>\n<function=crop>\n<parameter=box>\n[1, 2]\n</parameter>\n<parameter=mode>\nexact\n</parameter>"
            "\n<parameter=zoom>\n0.5\n</parameter>\n</function>\n</tool_call>\n<tool_call>\n<function=look>\n</function>"
            "\n</tool_call>",
            "",
            [CUT, ("look", {})],
        ),
        (XML, "I could <tool_call>\n<function=look>\n</function>\n</tool_call></think>7", None, []),
        (
            GLM,
            "\n<tool_call>crop\n<arg_key>box</arg_key>\n<arg_value>[1, 2]</arg_value>\n<arg_key>mode</arg_key>\n"
            "<arg_value>exact</arg_value>\n<arg_key>zoom</arg_key>\n<arg_value>0.5</arg_value>\n</tool_call>",
            "\n",
            [CUT],
        ),
        (GLM, "<tool_call>look\n</tool_call>", "", [("look", {})]),
        (
            GEMMA,
            '<|tool_call>call:crop{box:[1,2],mode:<|"|>exact<|"|>,zoom:0.5}<tool_call|>'
            "<|tool_call>call:look{}<tool_call|><|tool_response>",
            "<|tool_response>",
            [CUT, ("look", {})],
        ),
        (GEMMA, "<|channel>thought\n<|tool_call>call:look{}<tool_call|><channel|>7", None, []),
    ],
)
def test_calls_in_the_forms_of_published_models_are_read(
    tokenizer: Any, form: str, text: str, content: str | None, calls: list[Any]
):
    reader = TemplateReader(tokenizer, CALL_FORMS[form], "", skips_thoughts=True)
    expected = FoundCalls(text if content is None else content, tuple(ToolCall(*call) for call in calls))
    assert reader(text, TOOLS) == expected


@pytest.mark.parametrize(
    ("form", "opening", "text", "problem"),
    [
        (
            XML,
            "<tool_call>",
            '<tool_call>{"name": "look"}</tool_call>',
            "a call that starts with <tool_call> cannot be",
        ),
        (
            GEMMA,
            "<|tool_call>",
            "<|tool_call>call:look{x:}<tool_call|>",
            "a call cannot be read: json: could not parse",
        ),
        (GEMMA, "<|tool_call>", "<|tool_call>look<tool_call|>", "a call that starts with <|tool_call> cannot be read"),
        (
            GEMMA,
            "<|tool_call>",
            "<|tool_call>call:look[1]<tool_call|>",
            'the "arguments" of look are not a JSON object',
        ),
    ],
)
def test_malformed_calls_of_published_models_are_problems(
    tokenizer: Any, form: str, opening: str, text: str, problem: str
):
    with pytest.raises(UnreadableCall) as raised:
        TemplateReader(tokenizer, CALL_FORMS[form], "", opening, skips_thoughts=True)(text, TOOLS)
    assert problem in str(raised.value)


@pytest.mark.parametrize(
    ("text", "content", "calls"),
    [
        (
            "See.<|tool_call_start|>[crop(box=[1, 2], mode='exact', zoom=0.5), look()]<|tool_call_end|>7",
            "See.7",
            [CUT, LOOK],
        ),
        ("<|tool_call_start|>[move(steps=3, back=True)]<|tool_call_end|>", "", [MOVE]),
        ("<|tool_call_start|>[move(steps=3, back=true)]<|tool_call_end|>", "", [MOVE]),
        (
            r"""<|tool_call_start|>[note(text='it\'s (a], \n\\', to={"a": [null, -1]})]<|tool_call_end|>""",
            "",
            [("note", {"text": "it's (a], \n\\", "to": {"a": [None, -1]}})],
        ),
        ("The functions crop(box), look().", "The functions crop(box), look().", []),
        ("I could <|tool_call_start|>[look()]<|tool_call_end|></think>7", None, []),
    ],
)
def test_calls_as_in_python_are_read(text: str, content: str | None, calls: list[Any]):
    expected = FoundCalls(text if content is None else content, tuple(ToolCall(*call) for call in calls))
    assert read_python_calls(text) == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("look()", "calls are not a list"),
        ("[look]", "a call is not of the form name(argument=1)"),
        ("[crop([1, 2])]", "a call is not of the form name(argument=1)"),
        ("[crop(**{'x': 1})]", "a call is not of the form name(argument=1)"),
        ("[a.b(x=1)]", "a call is not of the form name(argument=1)"),
        ("[crop(box=x)]", "a call is not valid Python: malformed node"),
        ("[crop(box=__import__('os').getcwd())]", "a call is not valid Python: malformed node"),
        ("[crop(box=]", "a call is not valid Python"),
        ("[crop(box=1, box=2)]", "a call of crop has an argument twice"),
        ("[crop(box=" + "[" * 5000 + "]" * 5000 + ")]", "a call is not valid Python: too many nested parentheses"),
        ("[crop(box='\0')]", "a call is not valid Python: source code string cannot contain null bytes"),
        ("[look()]<|tool_call_end|><|tool_call_start|>[", "a call has no <|tool_call_end|> at its end"),
    ],
)
def test_a_call_that_is_no_python_is_a_problem(text: str, problem: str):
    end = "" if "_end|><" in text else "<|tool_call_end|>"
    with pytest.raises(UnreadableCall) as raised:
        read_python_calls(f"<|tool_call_start|>{text}{end}")
    assert problem in str(raised.value)
