"""Reads the calls that a model writes, in its chat template's form or as JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

from rl_vlm.data.tool_calls import CLOSE, OPEN, Schema
from rl_vlm.errors import listed, shorten
from rl_vlm.types import ToolCall

CALL = re.compile(rf"{OPEN}(.*?){CLOSE}", re.DOTALL)
PYTHON_OPEN, PYTHON_CLOSE = "<|tool_call_start|>", "<|tool_call_end|>"
PYTHON_CALLS = re.compile(rf"{re.escape(PYTHON_OPEN)}(.*?){re.escape(PYTHON_CLOSE)}", re.DOTALL)
MOST_LEVELS = 32
"""Most lists and objects within each other in an argument, so that whatever reads it recursively can."""
THOUGHTS = re.compile(r"\A.*</think>|\A\s*<\|channel>.*?<channel\|>", re.DOTALL)
"""The thoughts before an answer. Calls in them are not made."""


class UnreadableCall(ValueError):
    """A call that cannot be read. The message is for the model."""


class FoundCalls(NamedTuple):
    """Content and calls of a turn."""

    content: str
    """The text without calls."""
    calls: tuple[ToolCall, ...]


Reader = Callable[[str, Sequence[Schema]], FoundCalls]
"""Reads the calls in the text of a turn, with its special tokens. Raises UnreadableCall."""


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


def read_python_calls(text: str, schemas: Sequence[Schema] = ()) -> FoundCalls:
    """Read lists of calls as in Python, `[crop(x=1), look()]`, between the tags of LFM2.5.

    Raises UnreadableCall if one cannot be read.
    """
    thoughts, answer = split_thoughts(text)
    calls = tuple(call for found in PYTHON_CALLS.findall(answer) for call in read_python_list(found))
    content = PYTHON_CALLS.sub("", answer)
    if PYTHON_OPEN in content:
        raise UnreadableCall(f"a call has no {PYTHON_CLOSE} at its end")
    return FoundCalls(thoughts + content, calls)


def read_python_list(text: str) -> list[ToolCall]:
    """Read `[crop(x=1), look()]`. Raises UnreadableCall if it is not a list of calls with named arguments."""
    try:
        match ast.parse(text.strip(), mode="eval").body:
            case ast.List(elts=found):
                return [read_python_call(call) for call in found]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UnreadableCall(f"a call is not valid Python: {shorten(error)}") from error
    raise UnreadableCall("calls are not a list, as in [name(argument=1)]")


def read_python_call(call: ast.expr) -> ToolCall:
    """Read a call of a list.

    Raises UnreadableCall if an argument has no name, and ValueError if one is no value.
    """
    match call:
        case ast.Call(func=ast.Name(id=name), args=[], keywords=found) if all(keyword.arg for keyword in found):
            values = {str(keyword.arg): ast.literal_eval(JSON_NAMES.visit(keyword.value)) for keyword in found}
            if len(values) < len(found):
                raise UnreadableCall(f"a call of {name} has an argument twice")
            return made_call({"name": name, "arguments": values})
    raise UnreadableCall("a call is not of the form name(argument=1)")


class JSONNames(ast.NodeTransformer):
    """Turns names of JSON's constants into values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """Return the constant of a name, or the name."""
        values = {"true": True, "false": False, "null": None}
        return ast.Constant(values[node.id]) if node.id in values else node


JSON_NAMES = JSONNames()


def made_call(call: Mapping[str, Any]) -> ToolCall:
    """Return the call of a name and arguments.

    Raises UnreadableCall if they are not a text and an object, or if an argument has more than `MOST_LEVELS` levels.
    """
    name, arguments = call.get("name"), call.get("arguments")
    if not isinstance(name, str) or not name:
        raise UnreadableCall('a call has no "name"')
    arguments = {} if arguments is None else arguments  # templates leave out those of a call without arguments
    if not isinstance(arguments, dict):
        raise UnreadableCall(f'the "arguments" of {name} are not a JSON object')
    if num_levels(arguments.values()) > MOST_LEVELS:
        raise UnreadableCall(f"an argument of {name} has more than {MOST_LEVELS} lists and objects within each other")
    return ToolCall(name, arguments)


def num_levels(values: Iterable[Any]) -> int:
    """Return the depth of nested lists and objects. Does not recurse."""
    number = 0
    while nested := [value for value in values if isinstance(value, list | tuple | set | dict)]:
        values = chain.from_iterable(value.values() if isinstance(value, dict) else value for value in nested)
        number += 1
    return number


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
    content_field = {"content": "text", "content_args": {"strip": False}, "repeats": True, "join": ""}
    return {
        "defaults": {"role": "assistant"}, "start_anchor_pattern": r"\A",
        "fields": {"tool_calls": call, "content": content_field},
    }  # fmt: skip


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
    "call:… between <|tool_call> and <tool_call|>": _form(  # Gemma 4
        r"<\|tool_call>call:(?P<name>\w+)", r"<tool_call\|>", "json",
        string_delims=[['<|"|>', '<|"|>']], unquoted_keys=True,
    ),
}  # fmt: skip
"""Forms in which templates of published models write calls, for tokenizers that do not bring a response template."""
