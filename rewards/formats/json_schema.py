"""Reward for an answer that is JSON of a given form."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rewards.contract import Score
from rewards.text import TextOrMessages, completion_text, final_text

DRAFT = "https://json-schema.org/draft/2020-12/schema"
LONGEST_TEXT = 100_000
LARGEST_DEPTH = 32
"""Maximum nesting of lists and objects."""
LONGEST_NUMBER = 300
"""Maximum characters of a number, so that it fits into a float."""
BLOCK = re.compile(r"```(?:json)?[ \t]*\n(.*)\n[ \t]*```", re.DOTALL)


def json_schema(completions: Sequence[TextOrMessages], *, schema: Mapping[str, Any] | None = None) -> list[Score]:
    """Return 1.0 if the answer is JSON that is valid under `schema` (JSON Schema, draft 2020-12), else 0.0.

    The answer may stand in a block of ```json. Raises TypeError or ValueError if `schema` is invalid.
    """
    validator = _validator(schema)
    return [_is_valid(completion_text(completion), validator) for completion in completions]


def _validator(schema: Any) -> Any:
    """Build a validator that reads no other documents and checks no formats."""
    from jsonschema import Draft202012Validator, SchemaError
    from referencing import Registry
    from referencing.exceptions import Unresolvable
    from referencing.jsonschema import DRAFT202012

    if not isinstance(schema, Mapping):
        raise TypeError(f"json_schema needs `schema` in its kwargs: a mapping, not {type(schema).__name__}")
    if (draft := str(schema.get("$schema", DRAFT)).rstrip("#")) != DRAFT:
        raise ValueError(f"`schema` is of {draft}; only {DRAFT} is read")
    try:
        Draft202012Validator.check_schema(schema, format_checker=Draft202012Validator.FORMAT_CHECKER)
        resolver = Registry().resolver_with_root(DRAFT202012.create_resource(schema))
        for reference in _references(schema):
            resolver.lookup(reference)
    except SchemaError as error:
        raise ValueError(f"`schema` is invalid at {error.json_path}: {error.message[:200]}") from error
    except Unresolvable as error:
        raise ValueError(f"`schema` refers to {error.ref!r}, which it does not contain") from error
    return Draft202012Validator(schema, registry=Registry())


def _references(schema: Any) -> Iterator[str]:
    """Yield all references in a schema."""
    if isinstance(schema, Mapping):
        yield from (value for key, value in schema.items() if key in ("$ref", "$dynamicRef") and isinstance(value, str))
    children = schema.values() if isinstance(schema, Mapping) else schema if isinstance(schema, list) else ()
    for child in children:
        yield from _references(child)


def _is_valid(text: str, validator: Any) -> float:
    answer = final_text(text)
    if len(answer) > LONGEST_TEXT:
        return 0.0
    block = BLOCK.fullmatch(answer)
    try:
        value = json.loads(block[1] if block else answer, **STRICT)
    except (ValueError, RecursionError):
        return 0.0
    return float(_depth(value) <= LARGEST_DEPTH and validator.is_valid(value))


def _number(text: str) -> int | float:
    """Parse a finite JSON number. Raises ValueError for any other number."""
    number = int(text) if text.lstrip("-").isdigit() else float(text)
    if len(text) > LONGEST_NUMBER or not math.isfinite(number):
        raise ValueError(f"{text[:20]} is no finite number")
    return number


STRICT: dict[str, Any] = {"parse_int": _number, "parse_float": _number, "parse_constant": _number}


def _depth(value: Any) -> int:
    """Return the maximum nesting of lists and objects."""
    depth, level = 0, [value]
    while level := [v for v in level if isinstance(v, list | dict)]:
        depth += 1
        level = [child for v in level for child in (v.values() if isinstance(v, dict) else v)]
    return depth
