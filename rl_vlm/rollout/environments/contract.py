"""The contract of users: tools and environments, in the form that TRL documents.

    def crop(x: int, y: int) -> list[dict]           a tool: a function with type hints and a Google docstring
    class Env:
        def reset(self, **columns) -> content        called at the start of a completion; its content joins the prompt
        def get_reward(self) -> float | None         optional
        def any_public_method(self, x: int)          a tool

Or in the form of Gymnasium, with `rollout.environment_protocol: steps`. The model calls no tools; its turns are steps:

    class Game:
        def reset(self, **columns) -> content        or (content, info)
        def step(self, text: str)                    -> (content, reward, done, info), or with (terminated, truncated)
        def system_prompt(self) -> content           optional
        def get_reward(self) -> float | None         optional; without it, the sum of the steps' rewards

Content is text, or a list of blocks: `{"type": "text", "text": …}`, `{"type": "image", "image": …}`, and
`{"type": "video", "video": …}` with frames and their `fps`, or with a file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from rl_vlm.data.images import png_bytes, read_image
from rl_vlm.data.tool_calls import schema_of
from rl_vlm.data.video.frames import FrameRule
from rl_vlm.data.video.shown import ShownClip, choose_frames, read_clip
from rl_vlm.errors import ConfigError, did_you_mean, listed
from rl_vlm.functions import load_function, search_working_directory
from rl_vlm.rollout.environments.adapters import ADAPTERS, name_of
from rl_vlm.rollout.environments.failures import writable
from rl_vlm.rollout.environments.hosts import Host
from rl_vlm.rollout.environments.threads import CallThread
from rl_vlm.stages import is_taken

if TYPE_CHECKING:
    from rl_vlm.data.samples import Rows

Schema = dict[str, Any]

NOT_TOOLS = frozenset({"reset", "get_reward", "close"})
"""Public methods of an environment that the model cannot call."""
COLUMN = "environment"
"""Column of the data that names the environment of a row, if there are several."""


class Content(NamedTuple):
    """Content that has arrived: blocks as chat templates take them, and images and clips."""

    blocks: list[dict[str, Any]]
    """`{"type": "image"}` and `{"type": "video"}` blocks stand for `images`, in order."""
    images: tuple[Any, ...] = ()
    """PNG files of images. Clips are a `ShownClip` each, and files after `with_frames`."""


class Step(NamedTuple):
    """The values that a step returned."""

    content: Content
    reward: float
    end: Literal["stop", "turns"] | None
    """How the completion ends with this step, if it does: `turns` if the environment has truncated it."""


class Description(NamedTuple):
    """Facts about the class of an environment, as plain values that another process can send."""

    name: str
    methods: list[str]
    """Public methods of the class."""
    reset: list[str]
    """Parameters of `reset`."""
    takes_all_columns: bool
    """Whether `reset` has `**columns`."""
    schemas: list[Schema]
    """JSON schemas of its tools."""
    problems: list[str]
    """Why it cannot be used."""


@dataclass(frozen=True)
class EnvironmentKind:
    """An environment that rows can use."""

    make: Callable[[], Host]
    """Makes a host of an instance. It is called at most `max_environments` times."""
    first: Host
    """The host of the first instance, which was made to look at its class."""
    thread: CallThread
    """The thread that has made the first instance, and makes all calls of it."""
    description: Description
    takes_steps: bool = False
    """Whether the turns of the model are steps. Then there are no tools."""
    label: str | None = None
    """Its name, if it is not that of its class."""

    @property
    def name(self) -> str:
        """Return `label` if it is set, else the name of its class or its id in another system."""
        return self.label or self.description.name

    @property
    def schemas(self) -> list[Schema]:
        """Return the JSON schemas of its tools."""
        return self.description.schemas

    @property
    def tools(self) -> list[str]:
        """Return the names of its tools."""
        return [schema["function"]["name"] for schema in self.schemas]

    @property
    def has_reward(self) -> bool:
        """Return whether it rewards completions itself."""
        return self.takes_steps or self.has_method("get_reward")

    def has_method(self, name: str) -> bool:
        """Return whether its class has a method."""
        return name in self.description.methods

    def reset_arguments(self, offered: Mapping[str, Any], columns: Collection[str]) -> dict[str, Any]:
        """Return the arguments of `reset`: the ones that it names. With `**columns` it gets all others, too.

        It must name a `seed` that is not among the row's `columns`.
        """
        named, takes_all = self.description.reset, self.description.takes_all_columns
        withheld = {COLUMN} if "seed" in columns else {COLUMN, "seed"}
        return {name: value for name, value in offered.items() if name in named or (takes_all and name not in withheld)}


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
            if not isinstance(found, str) or found not in self.kinds:
                raise ConfigError(
                    f"{rows.place(index)}: column `{COLUMN}` is {found!r}, which rollout.environment does not name; "
                    f"{self.known(found)}"
                )

    def close(self) -> None:
        """End the processes of first instances, also of those that no completion has used."""
        for kind in self.kinds.values():
            kind.first.kill()

    def known(self, found: Any) -> str:
        """Return the names of environments, with the one that may be meant."""
        names = [str(name) for name in self.kinds]
        return f"it names {listed(names)}{did_you_mean(str(found), names)}"


def load_environment(source: str) -> Callable[..., Any]:
    """Load the class of an environment, or the adapter that its prefix names. Raises LoadError if there is none."""
    prefix, _, rest = source.partition(":")
    if prefix not in ADAPTERS:
        return load_function(source)
    search_working_directory()  # the rest may name a module
    return partial(ADAPTERS[prefix], rest)


def describe(environment: Any, takes_steps: bool) -> Description:
    """Describe the class of an instance, with all of its problems."""
    cls, own_name = type(environment), name_of(environment)
    problems = [*kind_problems(environment), *(step_problems(environment) if takes_steps else ())]
    if is_taken(own_name) and (takes_steps or has_method(cls, "get_reward")):
        problems.append(f"the reward would be called {own_name!r}, a name that the run uses itself; rename the class")
    schemas: list[Schema] = []
    for name in [] if takes_steps else tool_names(cls):
        try:
            schemas.append(schema_of(getattr(environment, name)))
        except ValueError as error:
            problems.append(str(error))
    parameters = inspect.signature(environment.reset).parameters.values() if has_method(cls, "reset") else ()
    return Description(
        name=own_name,
        methods=public_methods(cls),
        reset=[parameter.name for parameter in parameters],
        takes_all_columns=any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters),
        schemas=schemas,
        problems=problems,
    )


def kind_problems(first: Any) -> Iterator[str]:
    """Yield the problems of the class of an instance, except with its tools."""
    cls = type(first)
    if not has_method(cls, "reset"):
        yield f"{cls.__name__} needs a method `reset`, which is called at the start of a completion"
        return
    parameters = list(inspect.signature(first.reset).parameters.values())
    if any(p.kind in (p.POSITIONAL_ONLY, p.VAR_POSITIONAL) for p in parameters):
        yield "`reset` gets the columns of a row by name; write `def reset(self, **columns)`"


def step_problems(first: Any) -> Iterator[str]:
    """Yield the problems of the class of an instance whose turns are steps."""
    if not has_method(type(first), "step"):
        yield (
            f"{type(first).__name__} needs a method `step(text)`, since rollout.environment_protocol is steps; without "
            "it, write tools"
        )


def has_method(cls: type, name: str) -> bool:
    """Return whether a class has a method."""
    return inspect.isfunction(getattr(cls, name, None))


def public_methods(cls: type) -> list[str]:
    """Return the names of the public methods of a class."""
    members = inspect.getmembers(cls, predicate=inspect.isfunction)
    return [name for name, _ in members if not name.startswith("_")]


def tool_names(cls: type) -> list[str]:
    """Return the names of the public methods that the model can call, as TRL lists them, without `close`."""
    return [name for name in public_methods(cls) if name not in NOT_TOOLS]


def read_content(value: Any, max_image_pixels: int) -> Content:
    """Read the content that a tool returned. Images and clips are copied at once, since callers may change them.

    A list of dicts that all have a `type` is read as blocks. Anything else becomes text, as in TRL. Texts are made
    `writable`. Raises DataError if an image or a clip cannot be read, and ValueError for other blocks.
    """
    if not is_blocks(value):
        return Content([{"type": "text", "text": writable(str(value))}])
    blocks, images = [], []
    for block in value:
        if block["type"] == "text":
            blocks.append({"type": "text", "text": writable(str(block.get("text", "")))})
        elif block["type"] == "image" and block.get("image") is not None:
            images.append(read_picture(block["image"], max_image_pixels))
            blocks.append({"type": "image"})
        elif block["type"] == "video" and block.get("video") is not None:
            images.append(read_clip(block, max_image_pixels))
            blocks.append({"type": "video"})
        else:
            raise ValueError(f"a block of type {block['type']!r} has no text, image or video")
    return Content(blocks, tuple(images))


def with_frames(content: Content | None, rule: FrameRule) -> Content | None:
    """Return content with the chosen frames of each clip, as files. Raises DataError if a clip cannot be decoded."""
    if content is None:
        return None
    images = (choose_frames(each, rule).encoded() if isinstance(each, ShownClip) else each for each in content.images)
    return content._replace(images=tuple(images))


def read_start(value: Any, max_image_pixels: int) -> Content | None:
    """Read the content that `reset` returned, if any. Raises errors like `read_content`."""
    return None if value is None else read_content(value, max_image_pixels)


def read_reward(returned: Any) -> float | None:
    """Read the reward that `get_reward` returned: a number, or None if it does not apply."""
    return None if returned is None else float(returned)


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
