"""Tools as a model sees them: schemas, and checks of arguments."""

from typing import Any, Literal

import pytest

from rl_vlm.data.tool_calls import introduction_of, problem_of_call, schema_of
from rl_vlm.types import ToolCall


def crop(box: list[int], mode: Literal["fast", "exact"] = "fast", zoom: float | None = None) -> str:
    """Crop the image.

    Args:
        box: Left, top, right and bottom.
        mode: How to crop.
        zoom: Factor of the size.

    Returns:
        The part.
    """
    return f"{box} {mode} {zoom}"


class Game:
    def move(self, steps: int, back: bool = False) -> str:
        """Move the piece.

        Args:
            steps: Number of steps.
            back: Whether to move back.
        """
        return f"{steps} {back}"

    def look(self) -> str:
        """Look at the board."""
        return ""


CROP = {
    "type": "function",
    "function": {
        "name": "crop",
        "description": "Crop the image.",
        "parameters": {
            "type": "object",
            "properties": {
                "box": {
                    "type": "array",
                    "items": {"type": "integer"},
                    "description": "Left, top, right and bottom.",
                },
                "mode": {"type": "string", "enum": ["fast", "exact"], "description": "How to crop."},
                "zoom": {"type": "number", "nullable": True, "description": "Factor of the size."},
            },
            "required": ["box"],
        },
        "return": {"type": "string", "description": "The part."},
    },
}


def test_a_function_becomes_a_schema():
    assert schema_of(crop) == CROP
    assert schema_of(crop, "cut")["function"] == CROP["function"] | {"name": "cut"}


def test_a_method_becomes_a_schema_without_self():
    function = schema_of(Game().move)["function"]
    assert (function["name"], list(function["parameters"]["properties"])) == ("move", ["steps", "back"])


def untyped(x):
    """Do it.

    Args:
        x: A value.
    """


def undocumented(x: int) -> int:
    return x


def undescribed(x: int) -> int:
    """Do it."""
    return x


def several(*numbers: int) -> int:
    """Do it.

    Args:
        numbers: Some.
    """
    return len(numbers)


def named(**numbers: int) -> int:
    """Do it."""
    return len(numbers)


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (
            untyped,
            r"the tool untyped cannot be described to a model: .* missing a type hint .*A tool needs a type hint",
        ),
        (undocumented, r"the tool undocumented cannot be described to a model: .* has no docstring.* under `Args:`"),
        (undescribed, r"the tool undescribed cannot be described .* no description for the argument 'x'"),
        (several, r"the tool several takes \*numbers: int, which a model cannot be told of; name its arguments"),
        (named, r"the tool named takes \*\*numbers: int, which"),
    ],
)
def test_a_function_that_a_model_cannot_be_told_of_is_refused(function: Any, problem: str):
    with pytest.raises(ValueError, match=problem):
        schema_of(function)


TOOLS = [CROP, schema_of(Game().move), schema_of(Game().look)]


@pytest.mark.parametrize(
    ("name", "arguments", "problem"),
    [
        ("crop", {"box": [1, 2]}, None),
        ("crop", {"box": [], "mode": "exact", "zoom": 2}, None),
        ("crop", {"box": [1], "zoom": None}, None),
        ("crop", {"box": [1], "zoom": 0.5}, None),
        ("move", {"steps": 3, "back": True}, None),
        ("look", {}, None),
        ("crops", {}, "there is no tool crops (did you mean 'crop'?); the tools are: crop, look, move"),
        ("zoom", {}, "there is no tool zoom; the tools are: crop, look, move"),
        ("crop", {}, "crop needs box"),
        ("crop", {"box": [1], "size": 2}, "crop has no argument size; its arguments are: box, mode, zoom"),
        ("look", {"x": 1}, "look has no argument x; its arguments are: none"),
        ("crop", {"box": "1, 2"}, 'box of crop must be array of integer, not "1, 2"'),
        ("crop", {"box": [1, 2.5]}, "box of crop must be array of integer, not [1, 2.5]"),
        ("crop", {"box": None}, "box of crop must be array of integer, not null"),
        ("crop", {"box": [1], "mode": "slow"}, 'mode of crop must be one of "fast", "exact", not "slow"'),
        ("crop", {"box": [1], "zoom": "2"}, 'zoom of crop must be number or null, not "2"'),
        ("crop", {"box": [1], "zoom": True}, "zoom of crop must be number or null, not true"),
        ("move", {"steps": True}, "steps of move must be integer, not true"),
        ("move", {"steps": 2.0}, "steps of move must be integer, not 2.0"),
        ("move", {"steps": 1, "back": 0}, "back of move must be boolean, not 0"),
    ],
)
def test_a_call_must_fit_a_tool(name: str, arguments: dict[str, Any], problem: str | None):
    assert problem_of_call(ToolCall(name, arguments), TOOLS) == problem


def nested(
    pairs: dict[str, int], point: tuple[int, str], either: int | list[str], any_number: int | float, whatever: Any
) -> str:
    """Take nested values.

    Args:
        pairs: Numbers by name.
        point: A number and a text.
        either: A number or texts.
        any_number: A number.
        whatever: Anything.
    """
    return ""


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("pairs", {"a": "b"}, 'pairs of nested must be object, not {"a": "b"}'),
        ("pairs", [], "pairs of nested must be object, not []"),
        ("point", [1, 2], "point of nested must be array, not [1, 2]"),
        ("point", [1], "point of nested must be array, not [1]"),
        ("either", ["a", 1], 'either of nested must be integer or array of string, not ["a", 1]'),
        ("either", ["a"], None),
        ("any_number", "1", 'any_number of nested must be integer or number, not "1"'),
        ("any_number", 1.5, None),
        ("whatever", {"a": [None]}, None),
    ],
)
def test_types_within_types_are_checked(key: str, value: Any, problem: str | None):
    right = {"pairs": {"a": 1}, "point": [1, "a"], "either": 2, "any_number": 1, "whatever": None}
    schemas = [schema_of(nested)]
    assert problem_of_call(ToolCall("nested", right), schemas) is None
    assert problem_of_call(ToolCall("nested", right | {key: value}), schemas) == problem


def test_long_values_are_shortened_for_the_model():
    problem = problem_of_call(ToolCall("move", {"steps": "x" * 5000}), TOOLS)
    assert problem is not None and len(problem) < 120
    problem = problem_of_call(ToolCall("y" * 5000, {}), TOOLS)
    assert problem is not None and len(problem) < 160


def test_the_introduction_has_the_tools_and_the_form_of_a_call():
    text = introduction_of([schema_of(Game().look)])
    assert '<tools>\n{"type": "function", "function": {"name": "look", "description": "Look at the board.", ' in text
    assert '<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>' in text
    assert "<tool_response></tool_response>" in text
