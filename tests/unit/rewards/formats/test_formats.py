"""The reward functions boxed and json_schema, beyond the tables of docs/built_in_rewards.md."""

import json

import pytest

from rewards.formats.boxed import boxed
from rewards.formats.json_schema import json_schema
from rewards.text import boxed_spans
from tests.helpers.cpu_time import stays_within

LINKED = {
    "$defs": {
        "node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}, "additionalProperties": False}
    },
    "$ref": "#/$defs/node",
}


@pytest.mark.parametrize(
    ("text", "contents"),
    [
        (r"\boxed{7}", ["7"]),
        (r"\boxed {7} and \boxed{8}", ["7", "8"]),
        (r"\boxed{\boxed{7}+1}", ["7", r"\boxed{7}+1"]),
        (r"\boxed{\{7\}}", [r"\{7\}"]),
        (r"} \boxed{\frac{1}{2}} {", [r"\frac{1}{2}"]),
        (r"{\boxed{7}", ["7"]),
        (r"\boxed{8 \boxed{7}", ["7"]),
        (r"\boxed{7\}", []),
        (r"\boxed 7 \boxed", []),
        ("", []),
    ],
)
def test_contents_of_boxes(text, contents):
    assert [text[start:end] for start, end in boxed_spans(text)] == contents


@pytest.mark.parametrize("text", ["\\boxed{" * 15_000, "\\boxed{" * 12_000 + "}" * 12_000, "\\boxed" + " " * 100_000,
                                  "\\boxed " * 15_000, "}" * 100_000, "\\" * 100_001, "\x00", "\ud800"])  # fmt: skip
def test_long_and_odd_completions_have_no_single_box(text):
    assert boxed([text]) == [0.0]
    assert stays_within(2.0, lambda: boxed([text]))


@pytest.mark.parametrize("text", [r"\boxed{$ $}", r"\boxed{\ }", r"\boxed{~}", r"\boxed{{}{}}", "\\boxed{\n\t}"])
def test_an_empty_box_is_none(text):
    assert boxed([text]) == [0.0]


@pytest.mark.parametrize("depth", [1, 31, 32, 33, 900, 20_000])
def test_nesting_is_bounded(depth):
    text = '{"next":' * (depth - 1) + "{}" + "}" * (depth - 1)
    assert json_schema([text], schema=LINKED) == [float(depth <= 32)]


@pytest.mark.parametrize("text", ["[" * 100_000, "[1," * 30_000, "[" + "1," * 60_000 + "1]", "1" * 301,
                                  "-" + "1" * 5000, "1e400", '"\x00"', "\ud800", "٧",
                                  "True", "{'a': 1}", '{"a": 1,}', "// 1\n1"])  # fmt: skip
def test_no_json_or_too_much_of_it_scores_zero(text):
    assert json_schema([text], schema={}) == [0.0]
    assert stays_within(2.0, lambda: json_schema([text], schema={}))


def test_numbers_of_any_size_can_be_multiples():
    texts = ["1e300", "9" * 300, "5e-324", "-0.0", "0"]
    assert len(json_schema(texts, schema={"multipleOf": 1e-300})) == len(texts)


@pytest.mark.parametrize("value", [None, True, 7, 0.5, "text", [], {"a": [1, {"b": None}]}])
def test_all_json_is_valid_under_the_empty_schema(value):
    assert json_schema([json.dumps(value), f"```\n{json.dumps(value, indent=1)}\n```"], schema={}) == [1.0, 1.0]


def test_formats_are_not_checked():
    assert json_schema(['"no address"'], schema={"format": "email"}) == [1.0]


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "objekt"}, r"invalid at \$\.type"),
        ({"pattern": "("}, "is not a 'regex'"),
        ({"$ref": "https://example.com/schema"}, "which it does not contain"),
        ({"items": [{"$ref": "file:///etc/passwd"}], "$defs": {}}, "invalid at|does not contain"),
        ({"$dynamicRef": "https://example.com/schema"}, "which it does not contain"),
        ({"$ref": "#/$defs/nothing"}, "which it does not contain"),
        ({"$schema": "http://json-schema.org/draft-07/schema#"}, "only https://json-schema.org/draft/2020-12/schema"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused(schema, message):
    with pytest.raises(ValueError, match=message):
        json_schema(["{}"], schema=schema)


@pytest.mark.parametrize("schema", [None, [], "object", True])
def test_a_schema_is_a_mapping(schema):
    with pytest.raises(TypeError, match="needs `schema`"):
        json_schema(["{}"], schema=schema)
