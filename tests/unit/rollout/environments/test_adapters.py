"""Adapters: Gymnasium's own games, and stand-ins in the form of other systems' packages."""

import base64
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest

from rl_vlm.config.schema import DataConfig, RolloutConfig
from rl_vlm.data.images import png_bytes
from rl_vlm.data.video.frames import FrameRule
from rl_vlm.errors import ConfigError
from rl_vlm.rollout.environments.adapters import Gymnasium, OpenEnv, contents, marked, picture
from rl_vlm.rollout.environments.contract import Content, read_content
from rl_vlm.rollout.environments.failures import ToolFailure, UnknownAction
from rl_vlm.rollout.environments.instances import Instance
from rl_vlm.rollout.environments.loading import load_toolbox
from rl_vlm.rollout.environments.steps import Step
from tests.helpers.scripted import grey


class Played:
    """An instance of an environment that a run would load."""

    def __init__(self, source: str, **kwargs: Any) -> None:
        rollout = RolloutConfig(environment=source, environment_protocol="steps", environment_kwargs=kwargs)
        self.kind = load_toolbox(rollout).kinds[None]
        self.instance = Instance(self.kind, self.kind.first, self.kind.thread)

    def reset(self, **offered: Any) -> list[Content | None]:
        calls = self.instance.start(self.kind.reset_arguments(offered, ()), 10**6, FrameRule(DataConfig()))
        return [self.instance.finish(call, 20.0) for call in calls]

    def step(self, text: str) -> Step:
        return self.instance.finish(self.instance.step(text, 10**6, FrameRule(DataConfig())), 20.0)

    def close(self) -> None:
        self.instance.close()
        self.instance.wait(10.0)


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Add modules for a test."""

    def add(name: str, **values: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    yield add


def test_gymnasium() -> None:
    actions = {"left": 0, "down": 1, "right": 2, "up": 3}
    game = Played("gymnasium:FrozenLake-v1", actions=actions, is_slippery=False, map_name="4x4")
    assert game.kind.name == "FrozenLake-v1"
    (start,) = game.reset(seed=0, image=None)
    assert start is not None
    assert [block["type"] for block in start.blocks] == ["image"]
    way = ("down", "down", "right", "right", "down", "right")
    steps = [game.step(f"I think. <action>{name}</action>") for name in way]
    assert [step.reward for step in steps] == [0, 0, 0, 0, 0, 1]  # the way through the documented map
    assert [step.end for step in steps] == [None] * 5 + ["stop"]
    assert len({step.content.images for step in steps}) == 6
    game.reset(seed=0)
    assert [game.step("<action>right</action>").end for _ in range(2)] == [None, None]
    assert game.step("<action>down</action><action>down</action>").end is None
    game.close()


@pytest.mark.parametrize("text", ["go left", "<action>jump</action>", "<action></action>"])
def test_gymnasium_does_not_step_without_a_known_action(text: str) -> None:
    game = Gymnasium("FrozenLake-v1", {"left": 0}, max_episode_steps=1)
    game.reset(seed=0)
    with pytest.raises(UnknownAction, match="left"):
        game.step(text)
    assert game.step("<action> left </action>")[3], "the first step was the last"


def test_a_module_of_the_working_directory_can_register_a_game(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("gymnasium")
    (tmp_path / "my_lake.py").write_text(
        "import gymnasium\n"
        "gymnasium.register('MyLake-v0', entry_point='gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [folder for folder in sys.path if folder])
    game = Played("gymnasium:my_lake:MyLake-v0", actions={"left": 0})
    assert game.kind.name == "MyLake-v0"
    assert len(game.reset(seed=0)) == 1
    game.close()


@pytest.mark.parametrize(
    ("sources", "names"),
    [
        (["vagen:a.Game", "vagen:a.Maze"], ["Game", "Maze"]),
        (["vagen:a.Game", "vagen:b.Game"], ["one", "two"]),
        (["vagen:a.Game", "vagen:a.Game"], ["Game", "Game"]),
        (["vagen:a.Game", "a:Plain"], ["Game", "Plain"]),
        (["a:Plain", "b:Plain"], ["one", "two"]),
    ],
)
def test_environments_of_unlike_sources_have_unlike_names(packages: Any, sources: list[str], names: list[str]) -> None:
    class Plain:
        def reset(self, **columns: Any) -> None: ...

        def step(self, text: str) -> None: ...

    class Game(Plain):
        def __init__(self, env_config: dict[str, Any]) -> None: ...

    for module in ("a", "b"):
        packages(module, Game=Game, Maze=Game, Plain=Plain)
    environment: dict[str, str] = dict(zip(("one", "two"), sources, strict=True))
    toolbox = load_toolbox(RolloutConfig(environment=environment, environment_protocol="steps"))
    assert [kind.name for kind in toolbox.kinds.values()] == names
    assert toolbox.rewarding == list(dict.fromkeys(names))


class Blocks:
    """VAGEN's form: `env_config`, async methods, marks in text."""

    def __init__(self, env_config: dict[str, Any]) -> None:
        self.size = env_config["size"]

    async def reset(self, seed: int) -> tuple[dict[str, Any], dict[str, Any]]:
        self.count = seed
        return self.seen(), {}

    async def system_prompt(self) -> dict[str, Any]:
        return {"obs_str": f"A board of {self.size}."}

    async def step(self, action_str: str) -> tuple[dict[str, Any], float, bool, dict[str, Any]]:
        self.count += 1
        return self.seen(), 0.5, action_str == "stop", {"success": True}

    async def close(self) -> None: ...

    def seen(self) -> dict[str, Any]:
        from PIL import Image

        pictures = [Image.fromarray(grey(self.count)), Image.fromarray(grey(self.count + 1))]
        return {"obs_str": f"{self.count}: <image> or <image>?", "multi_modal_input": {"<image>": pictures}}


def test_vagen(packages: Any) -> None:
    packages("boards", Blocks=Blocks)
    game = Played("vagen:boards.Blocks", size=4)
    assert game.kind.name == "Blocks"
    start, system = game.reset(seed=5, solution="x")
    assert start is not None
    assert start.blocks == [
        {"type": "text", "text": "5: "}, {"type": "image"}, {"type": "text", "text": " or "}, {"type": "image"},
        {"type": "text", "text": "?"},
    ]  # fmt: skip
    assert start.images == (png(grey(5)), png(grey(6)))
    assert system == Content([{"type": "text", "text": "A board of 4."}])
    step = game.step("stop")
    assert (step.reward, step.end, step.content.images) == (0.5, "stop", (png(grey(6)), png(grey(7))))


def png(values: np.ndarray) -> bytes:
    from PIL import Image

    return png_bytes(Image.fromarray(values))


class TextEnv:
    """SkyRL-Gym's form: `init` with messages, and a dict of each step."""

    def __init__(self, env_config: dict[str, Any], extras: dict[str, Any]) -> None:
        self.answer, self.hint = extras["solution"], getattr(env_config, "hint", env_config.get("none"))

    def init(self, prompt: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        return [*prompt, *([{"role": "user", "content": self.hint}] if self.hint else [])], {}

    def step(self, action: str) -> dict[str, Any]:
        uri = f"data:image/png;base64,{base64.b64encode(png(grey(9))).decode()}"
        content = [{"type": "text", "text": "no"}, {"type": "image_url", "image_url": {"url": uri}}]
        right = action == self.answer
        observed = [] if right else [{"role": "user", "content": content}]
        return {"observations": observed, "reward": float(right), "done": right, "metadata": {}}

    def close(self) -> None: ...


@pytest.mark.parametrize("hint", [None, " Think."])
def test_skyrl(packages: Any, hint: str | None) -> None:
    def make(name: str, env_config: dict[str, Any], extras: dict[str, Any]) -> TextEnv:
        assert name == "maze"
        return TextEnv(env_config, extras)

    packages("own_games")
    packages("skyrl_gym", make=make, spec={"maze": None}.__getitem__)
    with pytest.raises(ConfigError, match="KeyError: 'maize'"):
        Played("skyrl:own_games:maize")
    game = Played("skyrl:own_games:maze", **({"hint": hint} if hint else {}))
    assert game.kind.name == "maze"
    (start,) = game.reset(seed=1, prompt="Which?", solution="left")
    assert (start and start.blocks) == (hint and [{"type": "text", "text": hint}])
    wrong, right = game.step("up"), game.step("left")
    assert (wrong.reward, wrong.end, wrong.content.images) == (0.0, None, (png(grey(9)),))
    assert wrong.content.blocks == [{"type": "text", "text": "no"}, {"type": "image"}]
    assert (right.reward, right.end, right.content.blocks) == (1.0, "stop", [])


class Client:
    """OpenEnv's client, in its synchronous form."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, **arguments: Any) -> None:
        Client.made.append(arguments)

    def sync(self) -> "Client":
        return self

    def reset(self, **columns: Any) -> SimpleNamespace:
        return SimpleNamespace(observation={"text": repr(columns), "screenshot": None}, reward=None, done=False)

    def step(self, action: dict[str, Any]) -> SimpleNamespace:
        picture = base64.b64encode(png(grey(3))).decode()
        return SimpleNamespace(observation={"text": str(action), "screenshot": picture}, reward=None, done=True)

    def close(self) -> None: ...


def test_openenv(packages: Any) -> None:
    packages("openenv", GenericEnvClient=Client)
    game = Played(
        "openenv:http://here:8000", text_fields=["text"], image_fields=["screenshot"], action_field="code",
        message_timeout_s=5,
    )  # fmt: skip
    assert game.kind.name == "here:8000"
    assert Client.made[-1] == {"base_url": "http://here:8000", "message_timeout_s": 5}
    (start,) = game.reset(seed=1, image=grey(0), solution="x")
    assert start == Content([{"type": "text", "text": "{'seed': 1, 'solution': 'x'}"}])
    step = game.step("print(1)")
    assert step.content.blocks == [{"type": "text", "text": "{'code': 'print(1)'}"}, {"type": "image"}]
    assert (step.content.images, step.reward, step.end) == ((png(grey(3)),), 0.0, "stop")


def test_an_openenv_session_that_is_lost_is_no_step(packages: Any) -> None:
    class Closed(Exception):
        """As `websockets` raises it."""

    class Lost(Client):
        left = 0

        def step(self, action: dict[str, Any]) -> SimpleNamespace:
            raise RuntimeError("Server error") if action["message"] == "bad" else Closed("gone")

        def disconnect(self) -> None:
            Lost.left += 1

    packages("openenv", GenericEnvClient=Lost)
    server = OpenEnv("http://here:8000", text_fields=["text"])
    with pytest.raises(RuntimeError, match="Server error"):
        server.step("bad")
    with pytest.raises(ConnectionError, match="Closed: gone"):
        server.step("go")
    assert Lost.left == 1
    with pytest.raises(ToolFailure, match="there is no field text; the fields are shot") as caught:
        server.seen({"shot": "x"})
    assert caught.value.kind == "step"


@pytest.mark.parametrize(
    "observe",
    [
        lambda: marked({"obs_str": "<image>"}),
        lambda: marked({}),
        lambda: contents([{"role": "user", "content": [{"type": "image_url"}]}]),
    ],
)
def test_an_observation_that_cannot_be_read_is_a_fault(observe: Any) -> None:
    with pytest.raises(ToolFailure) as caught:
        observe()
    assert caught.value.kind == "step"


@pytest.mark.parametrize("pixels", [[[[0.5, 0.9, 1.0]]], [[[0, 0, 256]]], [[[-1, 0, 0]]]])
def test_pixels_of_lists_are_bytes(pixels: Any) -> None:
    with pytest.raises(ValueError, match="whole numbers from 0 to 255"):
        picture(pixels)
    assert picture([[[0, 1, 255]]])["image"].tolist() == [[[0, 1, 255]]]


class Response:
    """verl's `ToolResponse`."""

    def __init__(self, text: str | None = None, image: list[Any] | None = None) -> None:
        self.text, self.image = text, image


def lookup(city: str) -> dict[str, str]:
    """Look up the weather.

    Args:
        city: Name of the city.
    """
    return {"city": city}


def unregistered(city: str) -> str:
    """Look up nothing.

    Args:
        city: Name of the city.
    """
    return city


def test_verl(packages: Any) -> None:
    registry = {"get_weather": SimpleNamespace(fn=lookup)}
    packages("verl")
    packages("verl.tools")
    packages(
        "verl.tools.function_tool",
        FUNCTION_TOOL_REGISTRY=registry,
        normalize_function_tool_return=lambda value: (Response(str(value), [grey(2)]), 0.0, {}),
    )
    toolbox = load_toolbox(RolloutConfig(tools=[f"verl:{__name__}:lookup"]))
    (schema,) = toolbox.schemas
    assert schema["function"]["name"] == "get_weather"
    assert schema["function"]["parameters"]["required"] == ["city"]
    instance = Instance(None)
    function = toolbox.functions["get_weather"]
    call = instance.call(lambda: function(city="Rome"), lambda value: read_content(value, 10**6))
    content = instance.finish(call, 20.0)
    assert content.blocks == [{"type": "image"}, {"type": "text", "text": "{'city': 'Rome'}"}]
    assert content.images == (png(grey(2)),)
    with pytest.raises(ConfigError, match="is not registered by verl's `@function_tool`"):
        load_toolbox(RolloutConfig(tools=[f"verl:{__name__}:unregistered"]))


def test_a_missing_package_is_named() -> None:
    with pytest.raises(ConfigError, match="the module `verl` is not installed; it comes from `pip install verl`"):
        load_toolbox(RolloutConfig(tools=[f"verl:{__name__}:lookup"]))


def test_gymnasium_imports_what_draws_before_threads_need_it() -> None:
    """Threads that import pygame at the same time have failed to draw."""
    code = (
        "import sys\n"
        "from rl_vlm.rollout.environments.adapters import Gymnasium\n"
        "Gymnasium('FrozenLake-v1', actions={'left': 0})\n"
        "print('pygame.surfarray' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "True"
