"""Tools as a model sees them: their schemas, the calls that it writes, and checks of its arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rl_vlm.errors import did_you_mean, listed, shorten
from rl_vlm.types import ToolCall

Schema = dict[str, Any]
"""A tool as chat templates take it: `{"type": "function", "function": {"name": …, "parameters": …}}`."""

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALL = re.compile(rf"{OPEN}(.*?){CLOSE}", re.DOTALL)
THOUGHTS = re.compile(r"\A.*</think>|\A\s*<\|channel>.*?<channel\|>", re.DOTALL)
"""The thoughts before an answer. Calls in them are not made."""

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


class UnreadableCall(ValueError):
    """A call that cannot be read. The message is for the model."""


class FoundCalls(NamedTuple):
    """What was read from a turn."""

    content: str
    """The text without calls."""
    calls: tuple[ToolCall, ...]


Reader = Callable[[str, Sequence[Schema]], FoundCalls]
"""Reads the calls in the text of a turn, with its special tokens. Raises UnreadableCall."""


def introduction_of(schemas: Sequence[Schema]) -> str:
    """Return a text that tells a model of its tools, and how to call them."""
    return INTRODUCTION.format(schemas="\n".join(json.dumps(schema, ensure_ascii=False) for schema in schemas))


def read_json_calls(text: str, schemas: Sequence[Schema] = ()) -> FoundCalls:
    """Read calls that are JSON in `<tool_call>` tags. Raises UnreadableCall if one cannot be read."""
    thoughts, answer = split_thoughts(text)
    calls = tuple(read_json_call(found) for found in CALL.findall(answer))
    content = CALL.sub("", answer)
    for tag, problem in ((OPEN, f"a call has no {CLOSE} at its end"), (CLOSE, f"a call has no {OPEN} at its start")):
        if tag in content:
            raise UnreadableCall(problem)
    return FoundCalls(thoughts + content, calls)


def read_json_call(text: str) -> ToolCall:
    """Read a call that is a JSON object with `name` and `arguments`. Raises UnreadableCall if it is not."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UnreadableCall(f"a call is not valid JSON: {shorten(error)}") from error
    if not isinstance(call, dict):
        raise UnreadableCall("a call is not a JSON object")
    if unknown := call.keys() - {"name", "arguments"}:
        raise UnreadableCall(f'a call has keys other than "name" and "arguments": {listed(unknown)}')
    return made_call(call)


def made_call(call: Mapping[str, Any]) -> ToolCall:
    """Return the call of a name and arguments. Raises UnreadableCall if they are not a text and an object."""
    name, arguments = call.get("name"), call.get("arguments")
    if not isinstance(name, str) or not name:
        raise UnreadableCall('a call has no "name"')
    arguments = {} if arguments is None else arguments  # templates leave out those of a call without arguments
    if not isinstance(arguments, dict):
        raise UnreadableCall(f'the "arguments" of {name} are not a JSON object')
    return ToolCall(name, arguments)


def split_thoughts(text: str) -> tuple[str, str]:
    """Split a turn after its thoughts."""
    found = THOUGHTS.match(text)
    return (found[0], text[found.end() :]) if found else ("", text)


@dataclass(frozen=True)
class TemplateReader:
    """Reads calls with a response template of transformers."""

    tokenizer: Any
    template: dict[str, Any]
    prefix: str
    """The text before a turn, which may open its thoughts."""
    opening: str = ""
    """How a call starts."""
    skips_thoughts: bool = False
    """Whether thoughts are split off before."""

    def __call__(self, text: str, schemas: Sequence[Schema] = ()) -> FoundCalls:
        """Read the calls of a turn. Arguments get the types of the schemas. Raises UnreadableCall."""
        thoughts, answer = split_thoughts(text) if self.skips_thoughts else ("", text)
        try:
            found = self.tokenizer.parse_response(answer, schema=self.template, prefix=self.prefix, tools=list(schemas))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise UnreadableCall(f"a call cannot be read: {shorten(str(error).splitlines()[0])}") from error
        content = found.get("content") or ""
        calls = tuple(made_call(call.get("function", call)) for call in found.get("tool_calls") or ())
        if self.opening and self.opening in content:
            raise UnreadableCall(f"a call that starts with {self.opening} cannot be read")
        return FoundCalls(thoughts + content, calls)


def _form(open_pattern: str, close_pattern: str, content: str, **content_args: Any) -> dict[str, Any]:
    """Return the response template of calls whose name is a group of `open_pattern`."""
    call = {
        "open_pattern": open_pattern, "close_pattern": close_pattern, "repeats": True, "content": content,
        "content_args": content_args,
        "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
    }  # fmt: skip
    return {
        "defaults": {"role": "assistant"}, "start_anchor_pattern": r"\A",
        "fields": {"tool_calls": call, "content": {"content": "text", "content_args": {"strip": False}}},
    }  # fmt: skip


_ATOM = r"[^\[\]{}'\"]|'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\""
_VALUE = rf"'(?:\\.|[^'\\])*'|[\[{{](?:{_ATOM}|[\[{{](?:{_ATOM}|[\[{{](?:{_ATOM})*[\]}}])*[\]}}])*[\]}}]|[^,)]*"

CALL_FORMS: dict[str, dict[str, Any]] = {
    "<function=…> in <tool_call> tags": _form(  # Qwen3.5 to 3.8
        r"<tool_call>\s*<function=(?P<name>[^\n>]+)>", r"</tool_call>\s*", "xml-inline",
        tag_pattern=r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>.*?)\n?</parameter>", value_parser={"name": "text"},
    ),
    "<arg_key> in <tool_call> tags": _form(  # GLM-4.5V, GLM-4.6V
        r"<tool_call>(?P<name>[^\s<{]+)", r"</tool_call>\s*", "xml-inline",
        tag_pattern=r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
        value_parser={"name": "text"},
    ),
    "Python between <|tool_call_start|> and <|tool_call_end|>": _form(  # LFM2.5-VL
        r"(?:<\|tool_call_start\|>\[|(?<=\)),\s*)(?P<name>\w+)\(", r"\)(?:\]<\|tool_call_end\|>)?", "xml-inline",
        tag_pattern=rf"(?P<key>\w+)=(?P<value>{_VALUE})",
        value_parser={"name": "json", "args": {"string_delims": [["'", "'"]], "allow_non_json": True}},
    ),
    "call:… between <|tool_call> and <tool_call|>": _form(  # Gemma 4
        r"<\|tool_call>call:(?P<name>\w+)", r"<tool_call\|>", "json",
        string_delims=[['<|"|>', '<|"|>']], unquoted_keys=True,
    ),
}  # fmt: skip
"""Forms in which templates of published models write calls, for tokenizers that do not bring a response template."""


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
        schema = get_json_schema(function)
    except Exception as error:  # its own classes of errors are not public
        problem = " ".join(str(error).split())
        raise ValueError(
            f"the tool {called} cannot be described to a model: {problem}. A tool needs a type hint for each argument, "
            "and a docstring that says what it does and describes each argument under `Args:`"
        ) from error
    return schema | {"function": schema["function"] | {"name": called}}


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
    """Return whether a value is one of a JSON schema of those that type hints become."""
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
