"""Tools as a model sees them: their schemas, how it is told of them, and checks of its calls."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from rl_vlm.errors import did_you_mean, listed, shorten

if TYPE_CHECKING:
    from rl_vlm.types import ToolCall  # imports torch, which processes of environments need not

Schema = dict[str, Any]
"""A tool as chat templates take it: `{"type": "function", "function": {"name": …, "parameters": …}}`."""

OPEN, CLOSE = "<tool_call>", "</tool_call>"
"""Tags of a call in text."""
INTRODUCTION = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>

Your turn ends with the call. The next message has its result within <tool_response></tool_response> XML tags."""
"""How models are told of tools in text. The first part is the text of Qwen's templates, which many models have seen."""


def introduction_of(schemas: Sequence[Schema]) -> str:
    """Return a text that tells a model of its tools, and how to call them."""
    return INTRODUCTION.format(schemas="\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas))


def schema_of(function: Callable[..., Any], name: str | None = None) -> Schema:
    """Return the schema of a function or a bound method, with another name if there is one.

    Raises ValueError if an argument has no type or description, or if it is `*args` or `**kwargs`.
    """
    import inspect

    from transformers.utils.chat_template_utils import get_json_schema

    called = name or getattr(function, "__name__", type(function).__name__)
    several = [
        p for p in inspect.signature(function).parameters.values() if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    if several:
        raise ValueError(f"the tool {called} takes {several[0]}, which a model cannot be told of; name its arguments")
    try:
        with torch_left_out():
            schema = get_json_schema(function)
    except Exception as error:  # its own classes of errors are not public
        problem = " ".join(str(error).split())
        raise ValueError(
            f"the tool {called} cannot be described to a model: {problem}. A tool needs a type hint for each argument, "
            "and a docstring that says what it does and describes each argument under `Args:`"
        ) from error
    return schema | {"function": schema["function"] | {"name": called}}


@contextmanager
def torch_left_out() -> Iterator[None]:
    """Give the block a module with a class `Tensor` for torch, unless torch is imported. Then no tool has tensors.

    transformers imports torch to compare type hints with that class. A process of an environment would grow by 300 MB.
    """
    if "torch" in sys.modules:
        yield
        return
    stand_in = ModuleType("torch")
    vars(stand_in).update(Tensor=type("Tensor", (), {}), __spec__=ModuleSpec("torch", None))
    sys.modules["torch"] = stand_in
    try:
        yield
    finally:
        del sys.modules["torch"]


def problem_of_call(call: ToolCall, schemas: Sequence[Schema]) -> str | None:
    """Return why a call does not fit the tools, for the model to see, or None if it does."""
    parameters = {schema["function"]["name"]: schema["function"].get("parameters") or {} for schema in schemas}
    if call.name not in parameters:
        name = shorten(call.name, 60)
        return f"there is no tool {name}{did_you_mean(name, parameters)}; the tools are: {listed(parameters)}"
    found = parameters[call.name]
    properties = found.get("properties") or {}
    if missing := [key for key in found.get("required") or () if key not in call.arguments]:
        return f"{call.name} needs {', '.join(missing)}"
    if unknown := [key for key in call.arguments if key not in properties]:
        known = ", ".join(properties) or "none"
        return (
            f"{call.name} has no argument {', '.join(shorten(key, 60) for key in unknown)}; its arguments are: {known}"
        )
    for key, value in call.arguments.items():
        if not fits(value, properties[key]):
            return f"{key} of {call.name} must be {expected(properties[key])}, not {shorten(json.dumps(value), 60)}"
    return None


KINDS: dict[str, Callable[[Any], bool]] = {
    "string": lambda value: isinstance(value, str),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "boolean": lambda value: isinstance(value, bool),
    "array": lambda value: isinstance(value, list),
    "object": lambda value: isinstance(value, dict),
    "null": lambda value: value is None,
}


def fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Return whether a value fits one of the JSON schemas that type hints become."""
    if value is None and schema.get("nullable"):
        return True
    if "enum" in schema and not any(value == choice and type(value) is type(choice) for choice in schema["enum"]):
        return False
    if "anyOf" in schema and not any(fits(value, choice) for choice in schema["anyOf"]):
        return False
    kinds = schema.get("type", ())
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(KINDS[kind](value) for kind in kinds if kind in KINDS):
        return False
    if isinstance(value, list):
        first = schema.get("prefixItems")
        if first is not None:
            return len(value) == len(first) and all(map(fits, value, first))
        return all(fits(item, schema.get("items") or {}) for item in value)
    if isinstance(value, dict):
        properties, others = schema.get("properties") or {}, schema.get("additionalProperties")
        others = others if isinstance(others, dict) else {}
        return all(fits(item, properties.get(key, others)) for key, item in value.items())
    return True


def expected(schema: Mapping[str, Any]) -> str:
    """Return a schema in words."""
    if "enum" in schema:
        words = f"one of {', '.join(map(json.dumps, schema['enum']))}"
    elif "anyOf" in schema:
        words = " or ".join(expected(choice) for choice in schema["anyOf"])
    else:
        kinds = schema.get("type", "any value")
        words = kinds if isinstance(kinds, str) else " or ".join(kinds)
        inner = schema.get("items")
        words += f" of {expected(inner)}" if inner and words == "array" else ""
    return f"{words} or null" if schema.get("nullable") else words
