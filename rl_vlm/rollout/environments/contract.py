"""The contract of users: tools and environments, in the form that TRL documents.

    def crop(x: int, y: int) -> list[dict]           a tool: a function with type hints and a Google docstring
    class Env:
        def reset(self, **columns) -> content        called at the start of a completion; its content joins the prompt
        def get_reward(self) -> float | None         optional
        def any_public_method(self, x: int)          a tool

Content is text, or a list of blocks: `{"type": "text", "text": …}` and `{"type": "image", "image": …}`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rl_vlm.config.schema import RolloutConfig
from rl_vlm.data.images import png_bytes, read_image
from rl_vlm.data.tool_calls import schema_of
from rl_vlm.errors import ConfigError, did_you_mean, listed
from rl_vlm.functions import LoadError, load_function
from rl_vlm.stages import is_taken

if TYPE_CHECKING:
    from rl_vlm.data.samples import Rows

Schema = dict[str, Any]

NOT_TOOLS = frozenset({"reset", "get_reward", "close"})
"""Public methods of an environment that the model cannot call."""
COLUMN = "environment"
"""Column of the data that names the environment of a row, if there are several."""


class Content(NamedTuple):
    """Content that has arrived: blocks as chat templates take them, and the images as PNG files."""

    blocks: list[dict[str, Any]]
    """`{"type": "image"}` blocks stand for `images`, in order."""
    images: tuple[bytes, ...] = ()


@dataclass(frozen=True)
class EnvironmentKind:
    """An environment that rows can use."""

    factory: Callable[[], Any]
    """Makes an instance. It is called at most `max_environments` times."""
    first: Any
    """The first instance, which was made to look at its class."""
    schemas: list[Schema]
    """JSON schemas of its tools."""

    @property
    def name(self) -> str:
        """Return the name of its class."""
        return type(self.first).__name__

    @property
    def tools(self) -> list[str]:
        """Return the names of its tools."""
        return tool_names(type(self.first))

    @property
    def has_reward(self) -> bool:
        """Return whether it rewards completions itself."""
        return inspect.isfunction(getattr(type(self.first), "get_reward", None))

    def reset_arguments(self, offered: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `reset`: the ones that it names, or with `**columns` all but an unnamed `seed`."""
        parameters = inspect.signature(self.first.reset).parameters
        takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        return {
            name: value
            for name, value in offered.items()
            if name in parameters or (takes_all and name not in ("seed", COLUMN))
        }


@dataclass(frozen=True)
class Toolbox:
    """The tools and environments of a run."""

    functions: dict[str, Callable[..., Any]] = field(default_factory=dict)
    """Tools that belong to no environment, by name."""
    schemas: list[Schema] = field(default_factory=list)
    """JSON schemas of `functions`."""
    kinds: dict[str | None, EnvironmentKind] = field(default_factory=dict)
    """Environments by their names in the data. The name is None if all rows use the same."""

    def kind_of(self, columns: Mapping[str, Any]) -> EnvironmentKind | None:
        """Return the environment of a row with these columns."""
        return self.kinds.get(None) or self.kinds.get(columns.get(COLUMN))

    def schemas_of(self, columns: Mapping[str, Any]) -> list[Schema]:
        """Return the schemas of all tools of a row: tools without an environment, then tools of its environment."""
        kind = self.kind_of(columns)
        return [*self.schemas, *(kind.schemas if kind else [])]

    @property
    def all_schemas(self) -> list[Schema]:
        """Return the schemas of all tools. Tools of two environments may have the same name."""
        return [*self.schemas, *(schema for kind in self.kinds.values() for schema in kind.schemas)]

    @property
    def rewarding(self) -> list[str] | None:
        """Return the names of the classes that reward completions themselves. None if there is no environment."""
        if not self.kinds:
            return None
        return list(dict.fromkeys(kind.name for kind in self.kinds.values() if kind.has_reward))

    def check_rows(self, rows: Rows) -> None:
        """Raise ConfigError if rows do not name their environments."""
        if not self.kinds or None in self.kinds:
            return
        if COLUMN not in rows.columns:
            names = listed(map(str, self.kinds))
            raise ConfigError(
                f"rollout.environment names {names}, but the data has no column `{COLUMN}` that says which of them a "
                "row uses; add the column, or name a single class"
            )
        values = rows.source.values(COLUMN) if COLUMN in rows.source.columns else []
        for index, found in enumerate(values):
            if found not in self.kinds:
                raise ConfigError(
                    f"{rows.place(index)}: column `{COLUMN}` is {found!r}, which rollout.environment does not name; "
                    f"{self.known(found)}"
                )

    def known(self, found: Any) -> str:
        """Return the names of environments, with the one that may be meant."""
        names = [str(name) for name in self.kinds]
        return f"it names {listed(names)}{did_you_mean(str(found), names)}"


def load_toolbox(rollout: RolloutConfig) -> Toolbox:
    """Load the tools and environments of a run. Raises ConfigError with all problems at once."""
    problems: list[str] = []
    functions, schemas = load_tools(rollout.tools, problems)
    named = rollout.environment if isinstance(rollout.environment, dict) else {None: rollout.environment}
    kinds: dict[str | None, EnvironmentKind] = {}
    for name, source in named.items():
        if source is not None and (kind := load_kind(source, problems)) is not None:
            kinds[name] = kind
            problems += [
                f"rollout.environment: {source} has a tool {tool!r}, and so has rollout.tools; rename one"
                for tool in kind.tools
                if tool in functions
            ]
    if problems:
        raise ConfigError("\n".join(problems))
    return Toolbox(functions, schemas, kinds)


def load_tools(sources: Sequence[str], problems: list[str]) -> tuple[dict[str, Callable[..., Any]], list[Schema]]:
    """Load functions and their schemas. Add problems to the list."""
    functions: dict[str, Callable[..., Any]] = {}
    schemas: list[Schema] = []
    for source in sources:
        try:
            function = load_function(source)
            schema = schema_of(function)
        except (LoadError, ValueError) as error:
            problems.append(f"rollout.tools: {source}: {error}")
            continue
        name = schema["function"]["name"]
        if name in functions:
            problems.append(f"rollout.tools: two tools are called {name!r}; rename one")
        functions[name] = function
        schemas.append(schema)
    return functions, schemas


def load_kind(source: str, problems: list[str]) -> EnvironmentKind | None:
    """Load an environment, and make its first instance. If it cannot be used, add the reasons to `problems`."""
    where = f"rollout.environment: {source}"
    try:
        factory = load_function(source)
    except LoadError as error:
        problems.append(f"{where}: {error}")
        return None
    try:
        first = factory()
    except Exception as error:
        problems.append(f"{where} cannot be made without arguments: {type(error).__name__}: {error}")
        return None
    found = list(kind_problems(first))
    schemas = []
    for name in tool_names(type(first)):
        try:
            schemas.append(schema_of(getattr(first, name)))
        except ValueError as error:
            found.append(str(error))
    problems += [f"{where}: {problem}" for problem in found]
    return None if found else EnvironmentKind(factory, first, schemas)


def kind_problems(first: Any) -> Iterator[str]:
    """Yield the problems of the class of an instance, except with its tools."""
    cls = type(first)
    if not inspect.isfunction(getattr(cls, "reset", None)):
        yield f"{cls.__name__} needs a method `reset`, which is called at the start of a completion"
        return
    parameters = list(inspect.signature(first.reset).parameters.values())
    if any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in parameters):
        yield "`reset` gets the columns of a row by name; write `def reset(self, **columns)`"
    if is_taken(cls.__name__) and inspect.isfunction(getattr(cls, "get_reward", None)):
        yield f"the reward would be called {cls.__name__!r}, a name that the run uses itself; rename the class"


def tool_names(cls: type) -> list[str]:
    """Return the names of the public methods that the model can call, as TRL lists them, without `close`."""
    members = inspect.getmembers(cls, predicate=inspect.isfunction)
    return [name for name, _ in members if not name.startswith("_") and name not in NOT_TOOLS]


def read_content(value: Any, max_image_pixels: int) -> Content:
    """Read the content that `reset` or a tool returned. Images are encoded at once, since callers may change them.

    A list of dicts that all have a `type` is read as blocks. Anything else becomes text, as in TRL. Raises DataError if
    an image cannot be read, and ValueError for other blocks.
    """
    if not is_blocks(value):
        return Content([{"type": "text", "text": str(value)}])
    blocks, images = [], []
    for block in value:
        if block["type"] == "text":
            blocks.append({"type": "text", "text": str(block.get("text", ""))})
        elif block["type"] == "image" and block.get("image") is not None:
            images.append(read_picture(block["image"], max_image_pixels))
            blocks.append({"type": "image"})
        else:
            raise ValueError(f"a block of type {block['type']!r} has no text and no image")
    return Content(blocks, tuple(images))


def is_blocks(value: Any) -> bool:
    """Return whether a value is a list of content blocks."""
    return isinstance(value, list) and bool(value) and all(isinstance(b, dict) and "type" in b for b in value)


def read_picture(value: Any, max_pixels: int) -> bytes:
    """Return an image as a PNG file. It is a PIL image, an array of uint8 (height, width, 3), a file, or its path."""
    from PIL import Image

    if isinstance(value, np.ndarray):
        if value.dtype != np.uint8 or value.ndim != 3 or value.shape[2] != 3:
            raise ValueError(f"an image has shape {value.shape} and type {value.dtype}; it must be (H, W, 3) of uint8")
        value = Image.fromarray(value)
    return png_bytes(read_image(value, Path.cwd(), max_pixels, "an image of the environment")[0])
