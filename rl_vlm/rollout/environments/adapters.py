"""Environments and tools of other systems, by the prefix of their names.

    gymnasium:Id             an environment of Gymnasium, as pictures
    openenv:URL              a server of OpenEnv
    vagen:module.Class       an environment of VAGEN
    skyrl:id                 an environment of SkyRL-Gym
    verl:file.py:function    a function that verl's `@function_tool` registers

All but the last take steps, see `contract.py`. Their packages are imported when they are used.
"""

from __future__ import annotations

import base64
import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any, cast
from urllib.parse import urlsplit

from rl_vlm.data.messages import as_messages, blocks_of, split_marks
from rl_vlm.errors import listed, shorten
from rl_vlm.functions import LoadError, load_function
from rl_vlm.rollout.environments.failures import ToolFailure, UnknownAction

Blocks = list[dict[str, Any]]

ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)
SOURCES = {
    "gymnasium": "`pip install gymnasium`",
    "openenv": "`pip install 'openenv>=0.10'`",
    "skyrl_gym": "`pip install skyrl-gym`",
    "vagen": "github.com/mll-lab-nu/VAGEN; the package of this name in registries is another project",
    "verl": "`pip install verl`",
}
"""Where packages come from."""


class Adapter:
    """An environment of another system."""

    id: str
    """The name of the environment there, without its module. It names the reward, and the environment in logs."""


class Gymnasium(Adapter):
    """An environment of Gymnasium. The model sees its pictures, and writes `<action>name</action>`."""

    def __init__(self, name: str, /, actions: Mapping[Any, Any], **arguments: Any) -> None:
        """`name` is its id, or `module:id`. `actions` are values by the names that the model writes.

        `arguments` are passed to `gymnasium.make`.
        """
        self.id = re.split("[:/]", name)[-1]
        self.environment: Any = package("gymnasium").make(name, render_mode="rgb_array", **arguments)
        with suppress(ImportError):  # threads that import it together, at their first picture, can get a part of it
            import_module("pygame.surfarray")
        self.actions = {str(action): value for action, value in actions.items()}

    def reset(self, seed: int, **columns: Any) -> Blocks:
        """Start an episode, with the columns of the row as Gymnasium's `options`."""
        self.environment.reset(seed=seed, options=columns)
        return self.picture()

    def step(self, text: str) -> tuple[Blocks, Any, bool, bool, dict[str, Any]]:
        """Take the last action of a turn. Raises UnknownAction if it has none; then the episode does not go on."""
        found = [name.strip() for name in ACTION.findall(text)]
        if not found:
            raise UnknownAction(f"there is no <action>; write one of {listed(self.actions)} in <action> tags")
        if found[-1] not in self.actions:
            raise UnknownAction(
                f"there is no action {shorten(found[-1], 60)!r}; the actions are {listed(self.actions)}"
            )
        _, reward, terminated, truncated, info = self.environment.step(self.actions[found[-1]])
        return self.picture(), reward, terminated, truncated, info

    def picture(self) -> Blocks:
        """Return a picture of the environment."""
        with observing():
            return [picture(self.environment.render())]

    def close(self) -> None:
        """Close the environment."""
        self.environment.close()


class OpenEnv(Adapter):
    """A server of OpenEnv, over OpenEnv's client. Each instance has its own session."""

    def __init__(
        self,
        url: str,
        /,
        action_field: str = "message",
        text_fields: Sequence[str] = (),
        image_fields: Sequence[str] = (),
        **arguments: Any,
    ) -> None:
        """`action_field` is the field of the server's action that takes the model's text.

        `text_fields` and `image_fields` are the fields of observations that the model sees, in order. An image is
        base64 text, also as a data URI, or nested lists (height, width, 3). `arguments` are passed to OpenEnv's client.
        Raises ValueError if the model would see nothing.
        """
        if not text_fields and not image_fields:
            raise ValueError("name the fields that the model sees, in text_fields or image_fields")
        self.id = urlsplit(url).netloc or url
        self.client: Any = package("openenv").GenericEnvClient(base_url=url, **arguments).sync()
        self.action_field, self.text_fields, self.image_fields = action_field, text_fields, image_fields

    def reset(self, seed: int, **columns: Any) -> Blocks:
        """Start an episode. The server gets the seed, and the columns of the row that JSON can hold."""
        plain = {name: value for name, value in columns.items() if is_plain(value)}
        return self.seen(self.answer(lambda: self.client.reset(seed=seed, **plain)).observation)

    def step(self, text: str) -> tuple[Blocks, float, bool, dict[str, Any]]:
        """Send a turn."""
        result = self.answer(lambda: self.client.step({self.action_field: text}))
        return self.seen(result.observation), result.reward or 0.0, result.done, {}

    def answer(self, ask: Callable[[], Any]) -> Any:
        """Ask the server. Raises ConnectionError if there is no answer: a new session would begin another episode."""
        try:
            return ask()
        except RuntimeError:  # the server's own error
            raise
        except Exception as error:
            with suppress(Exception):
                self.client.disconnect()
            raise ConnectionError(f"{type(error).__name__}: {error}") from error

    def seen(self, observation: Mapping[str, Any]) -> Blocks:
        """Return the fields of an observation that the model sees. Raises ToolFailure if one is missing."""
        with observing():
            if missing := [name for name in (*self.text_fields, *self.image_fields) if name not in observation]:
                raise ValueError(f"there is no field {missing[0]}; the fields are {listed(observation)}")
            texts = [{"type": "text", "text": str(observation[name])} for name in self.text_fields]
            images = [observation[name] for name in self.image_fields]
            return [*texts, *(picture(image) for image in images if image is not None)]

    def close(self) -> None:
        """Close the session."""
        self.client.close()


class Vagen(Adapter):
    """An environment of VAGEN: `<image>` marks in its texts are places of images."""

    def __init__(self, name: str, /, **settings: Any) -> None:
        """`name` is `module.Class`. `settings` are its `env_config`."""
        module, _, self.id = name.rpartition(".")
        self.environment: Any = getattr(package(module), self.id)(settings)

    async def reset(self, seed: int) -> tuple[Blocks, dict[str, Any]]:
        """Start an episode."""
        observation, info = await self.environment.reset(seed)
        return marked(observation), info

    async def system_prompt(self) -> Blocks:
        """Return the rules of the game."""
        return marked(await self.environment.system_prompt())

    async def step(self, text: str) -> tuple[Blocks, Any, bool, dict[str, Any]]:
        """Take a step."""
        observation, reward, done, info = await self.environment.step(text)
        return marked(observation), reward, done, info

    async def close(self) -> None:
        """Close the environment."""
        await self.environment.close()


class SkyRL(Adapter):
    """An environment of SkyRL-Gym. Each episode has a new one, which gets the columns of the row as `extras`."""

    def __init__(self, name: str, /, **settings: Any) -> None:
        """`name` is its id, or `module:id` with the module that registers it. `settings` are its `env_config`.

        Raises an error of SkyRL-Gym if the id is not registered.
        """
        module, _, self.id = name.rpartition(":")
        self.settings, self.package = Settings(settings), cast(Any, package("skyrl_gym"))
        if module:
            package(module)
        self.package.spec(self.id)
        self.environment: Any = None

    def reset(self, prompt: Any, **columns: Any) -> Blocks:
        """Start an episode with the row's prompt. Raises ValueError if `init` changes it, except at its end."""
        self.close()
        self.environment = self.package.make(self.id, env_config=self.settings, extras=columns)
        given = as_messages(prompt)
        started, _ = self.environment.init(list(given))
        if started[: len(given)] != given:
            raise ValueError("`init` changes the prompt of the row; write the prompt in the data")
        return contents(started[len(given) :])

    def step(self, text: str) -> tuple[Blocks, float, bool, dict[str, Any]]:
        """Take a step."""
        outcome = self.environment.step(text)
        return contents(outcome["observations"]), outcome["reward"], outcome["done"], outcome.get("metadata") or {}

    def close(self) -> None:
        """Close the episode's environment."""
        if self.environment is not None:
            self.environment.close()


class Settings(dict[str, Any]):
    """Settings that are read as keys and as attributes, since published environments do both."""

    def __getattr__(self, name: str) -> Any:
        """Return a value. Raises AttributeError if there is none."""
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def verl_tool(source: str) -> Callable[..., Any]:
    """Load a function that verl's `@function_tool` has registered, as a tool. Raises LoadError if there is none."""
    function = load_function(source)
    registry: Any = package("verl.tools.function_tool")
    name = next((name for name, entry in registry.FUNCTION_TOOL_REGISTRY.items() if entry.fn is function), None)
    if name is None:
        raise LoadError(f"{source} is not registered by verl's `@function_tool`; name it without `verl:`")

    @wraps(function)
    async def called(**arguments: Any) -> Any:
        returned = function(**arguments)
        returned = await returned if inspect.isawaitable(returned) else returned
        response, _, _ = registry.normalize_function_tool_return(returned)
        texts = [{"type": "text", "text": response.text}] if response.text else []
        return [*map(picture, response.image or ()), *texts] or ""

    called.__name__ = name
    return called


ADAPTERS: dict[str, Callable[..., Any]] = {
    "gymnasium": Gymnasium, "openenv": OpenEnv, "vagen": Vagen, "skyrl": SkyRL,
}  # fmt: skip
"""Classes of step environments by the prefix of a name. The first argument is the rest of the name."""
VERL = "verl:"
"""Prefix of verl's tools."""


def name_of(environment: Any) -> str:
    """Return the name of an environment in rewards and logs: its id in another system, or else its class."""
    return environment.id if isinstance(environment, Adapter) else type(environment).__name__


def package(name: str) -> ModuleType:
    """Import a module of another system. If it is not installed, the ImportError says where it comes from."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        missing = error.name or name
        source = SOURCES.get(missing, f"a package with the module `{missing}`")
        raise ImportError(f"the module `{missing}` is not installed; it comes from {source}") from error


def marked(observation: Mapping[str, Any]) -> Blocks:
    """Return an observation of VAGEN as blocks. Raises ToolFailure if its marks and images differ in number."""
    with observing():
        images = observation.get("multi_modal_input", {}).get("<image>", [])
        blocks = split_marks(observation["obs_str"])
        places = [block for block in blocks if block["type"] == "image"]
        if len(places) != len(images):
            raise ValueError(f"it has {len(places)} marks <image> for {len(images)} images")
        left = iter(images)
        return [block if block["type"] == "text" else picture(next(left)) for block in blocks]


def contents(messages: Sequence[Mapping[str, Any]]) -> Blocks:
    """Return the contents of messages in the form of OpenAI as blocks, one after the other."""
    with observing():
        return [
            picture(block["image_url"]["url"]) if block["type"] == "image_url" else dict(block)
            for message in messages
            for block in blocks_of(message["content"])
        ]


@contextmanager
def observing() -> Iterator[None]:
    """Raise errors in the block as a ToolFailure: the environment has gone on, and the model cannot mend it."""
    try:
        yield
    except Exception as error:
        raise ToolFailure("step", f"an observation cannot be read: {type(error).__name__}: {error}") from error


def picture(value: Any) -> dict[str, Any]:
    """Return an image block. Base64 text, also as a data URI, and nested lists become files and arrays.

    Raises ValueError if lists hold other values than whole numbers from 0 to 255.
    """
    if isinstance(value, str):
        value = base64.b64decode(value.partition(",")[2] if value.startswith("data:") else value)
    elif isinstance(value, list):
        import numpy as np

        pixels = np.array(value)
        if pixels.dtype.kind not in "iu" or pixels.min(initial=0) < 0 or pixels.max(initial=0) > 255:
            raise ValueError("the pixels of an image must be whole numbers from 0 to 255")
        value = pixels.astype(np.uint8)
    return {"type": "image", "image": value}


def is_plain(value: Any) -> bool:
    """Return whether JSON can hold a value."""
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and is_plain(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(is_plain, value))
    return value is None or isinstance(value, str | int | float)
