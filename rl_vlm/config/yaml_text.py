"""Parse and write YAML. A key given twice is an error, and `1e-6` is a number.

PyYAML follows YAML 1.1, which reads `1e-6` as a string because it has no dot.
"""

import re
from typing import Any

import yaml

_EXPONENT_FLOAT = re.compile(r"[-+]?[0-9][0-9_]*[eE][-+]?[0-9]+$")
_FIRST_CHARACTERS = list("-+0123456789")
_OTHER_LINE_BREAKS = re.compile("[\x85\u2028\u2029]")


class _Loader(yaml.SafeLoader):
    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                line = key.start_mark.line + 1
                raise yaml.constructor.ConstructorError(problem=f"line {line}: key `{key.value}` is given twice")
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    pass


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT_FLOAT, _FIRST_CHARACTERS)


def _represent_text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    """Represent a text. Use double quotes if the text has line breaks that only these keep."""
    style = '"' if _OTHER_LINE_BREAKS.search(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


class _LineDumper(_Dumper):
    pass


def _represent_line(dumper: _LineDumper, text: str) -> yaml.ScalarNode:
    """Represent a text on one line."""
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style='"' if "\n" in text else None)


_Dumper.add_representer(str, _represent_text)
_LineDumper.add_representer(str, _represent_line)


def parse(text: str) -> Any:
    """Parse `text`. Raises yaml.YAMLError if it is not valid or if a mapping has a key twice."""
    try:
        return yaml.load(text, Loader=_Loader)
    except ValueError as error:  # raised by PyYAML, for instance for the date 2020-13-45
        raise yaml.YAMLError(str(error)) from error
    except RecursionError as error:
        raise yaml.YAMLError("it is nested too deeply") from error


def dump(value: Any) -> str:
    """Write `value` as block YAML with its keys in order. `parse` reads it back."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def one_line(value: Any) -> str:
    """Return a value as YAML on one line."""
    return yaml.dump(value, Dumper=_LineDumper, default_flow_style=True, width=float("inf")).splitlines()[0]
