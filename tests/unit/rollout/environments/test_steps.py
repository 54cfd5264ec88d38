"""Step environments with a scripted engine, and what `reset` and `step` may return."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
from PIL import Image

from rl_vlm.config.schema import RolloutConfig
from rl_vlm.data.images import decode_image
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.data.tool_calls import introduction_of, schema_of
from rl_vlm.errors import ConfigError
from rl_vlm.log.trajectories import turns_json
from rl_vlm.reward.conversation import completion_as
from rl_vlm.rollout.environments.contract import Toolbox
from rl_vlm.rollout.environments.failures import ToolFailure, UnknownAction
from rl_vlm.rollout.environments.hosts import InThread
from rl_vlm.rollout.environments.loading import kind_of, load_toolbox
from rl_vlm.rollout.environments.steps import read_reset, read_step
from rl_vlm.types import Completion, Turn
from tests.helpers.scripted import Script, call, grey
from tests.helpers.templates import builder_of
from tests.unit.rollout.environments.test_driver import Run


class Walk:
    """Walk right to 3. Each step shows where one is, and costs 0.1; the last is worth 1."""

    def __init__(self, goal: int = 3) -> None:
        self.goal = goal

    def reset(self, start: int = 0, **columns: Any) -> tuple[str, dict[str, Any]]:
        self.at = start
        return f" You are at {start}.", {}

    def step(self, text: str) -> tuple[Any, float, bool, Any]:
        if text == "crash":
            raise ConnectionError("gone")
        if text == "break":
            return "no dict", 1.0, True, "of facts"
        if text == "jump":
            raise UnknownAction("there is no action 'jump'")
        if text == "fall":
            raise ValueError("you fell")
        self.at += 1
        seen = [{"type": "text", "text": f"at {self.at}"}, {"type": "image", "image": grey(self.at)}]
        return seen, 1.0 if self.at == self.goal else -0.1, self.at == self.goal, {"success": self.at == self.goal}

    def system_prompt(self) -> str:
        return f"Walk to {self.goal}."


class Limited(Walk):
    """Truncates the second step, in the form of Gymnasium."""

    def step(self, text: str) -> Any:
        content, reward, done, info = super().step(text)
        return content, reward, done, self.at == 2, info

    def get_reward(self) -> float:
        return 7.0


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> PromptBuilder:
    return builder_of("qwen2_5_vl", tmp_path_factory.mktemp("tiny"))


def run(builder: PromptBuilder, turns: Sequence[str] | Script, environment: type = Walk, **settings: Any) -> Run:
    script: Any = turns if callable(turns) else lambda _, number: turns[number]
    kind = kind_of(partial(InThread, environment), takes_steps=True)
    return Run(builder, script, Toolbox({}, [], {None: kind}), **settings)


def rewards(completion: Completion) -> list[float | None]:
    return [turn.reward for turn in completion.turns]


def test_steps_go_on_until_one_is_done(builder: PromptBuilder) -> None:
    walked = run(builder, ["right", "go", "run"])
    completion = walked.completion
    assert (completion.finish_reason, rewards(completion)) == ("stop", [-0.1, -0.1, 1.0])
    assert completion.environment_reward == pytest.approx(0.8)
    assert completion.environment_name == "Walk"
    assert [len(seen.images) for seen in completion.observations] == [1, 1]  # the last is not shown to the model
    assert "at 1" in walked.seen()[0]
    assert "at 2" in walked.seen()[1]
    assert [len(turn.results) for turn in completion.turns] == [1, 1, 1]  # and is recorded
    assert completion.turns[2].results[0].content[0] == {"type": "text", "text": "at 3"}


def test_the_system_prompt_and_the_start_are_in_the_prompt(builder: PromptBuilder) -> None:
    prompt = run(builder, ["a", "b", "c"]).completion.start
    assert prompt is not None
    assert prompt.sample.messages == [
        {"role": "system", "content": [{"type": "text", "text": "Walk to 3."}]},
        {"role": "user", "content": [{"type": "text", "text": "Count! You are at 0."}]},
    ]
    text = builder.processor.tokenizer.decode(prompt.token_ids)
    assert text.index("Walk to 3.") < text.index("Count! You are at 0.")


def test_the_last_turn_is_a_step(builder: PromptBuilder) -> None:
    completion = run(builder, ["right"] * 2, max_turns=2).completion
    assert (completion.finish_reason, rewards(completion)) == ("turns", [-0.1, -0.1])
    assert completion.environment_reward == pytest.approx(-0.2)


def test_an_environment_can_truncate_and_reward_itself(builder: PromptBuilder) -> None:
    completion = run(builder, ["right"] * 3, Limited).completion
    assert (completion.finish_reason, rewards(completion)) == ("turns", [-0.1, -0.1])
    assert completion.environment_reward == 7.0


def test_texts_that_utf_8_cannot_hold_get_question_marks(builder: PromptBuilder) -> None:
    """Otherwise the completions file could not be written. The last step is not rendered for the model."""

    class Named(Walk):
        def step(self, text: str) -> Any:
            shown = [{"type": "image", "image": "caf\udcff.png"}] if text == "picture" else "caf\udcff"
            return shown, 1.0, True, {}

    last = run(builder, ["right"], Named).completion
    assert last.finish_reason == "stop" and "caf?" in turns_json(last.turns).encode().decode()
    fault = run(builder, ["picture"], Named).completion.fault
    assert fault is not None and "caf?.png" in fault.message


@pytest.mark.parametrize("text", ["jump", "fall"])
def test_the_model_is_told_of_a_step_that_fails(builder: PromptBuilder, text: str) -> None:
    walked = run(builder, [text, "right", "right", "right"])
    assert (walked.completion.finish_reason, rewards(walked.completion)) == ("stop", [0.0, -0.1, -0.1, 1.0])
    assert "error" in walked.seen()[0]
    assert walked.completion.turns[0].results[0].error is not None


def test_an_unknown_action_is_told_even_if_errors_are_masked(builder: PromptBuilder) -> None:
    assert run(builder, ["jump", "right", "right", "right"], masks_errors=True).completion.finish_reason == "stop"
    masked = run(builder, ["fall", "right"], masks_errors=True).completion
    assert (masked.finish_reason, masked.environment_reward) == ("fault", None)


@pytest.mark.parametrize(("text", "kind"), [("crash", "connection"), ("break", "step")])
def test_a_step_that_breaks_is_a_fault(builder: PromptBuilder, text: str, kind: str) -> None:
    completion = run(builder, ["right", text]).completion
    assert (completion.finish_reason, completion.environment_reward) == ("fault", None)
    assert completion.fault and completion.fault.kind == kind


def test_a_turn_at_the_limit_of_tokens_is_no_step(builder: PromptBuilder) -> None:
    completion = run(builder, ["right", "right and on " * 9], max_turn_tokens=12).completion
    assert (completion.finish_reason, rewards(completion)) == ("length", [-0.1, None])


def test_calls_in_text_are_no_calls(builder: PromptBuilder) -> None:
    completion = run(builder, ['<tool_call>\n{"name": "x", "arguments": {}}\n</tool_call>', "b", "c"]).completion
    assert completion.finish_reason == "stop"
    assert [turn.calls for turn in completion.turns] == [(), (), ()]


def test_reward_functions_see_steps_as_messages_of_the_user(builder: PromptBuilder) -> None:
    messages: Any = completion_as("messages", run(builder, ["a", "b", "c"]).completion)
    assert [message["role"] for message in messages] == ["assistant", "user"] * 3
    assert [message["content"] for message in messages[::2]] == ["a", "b", "c"]
    assert messages[5]["content"][0] == {"type": "text", "text": "at 3"}


def test_members_of_a_group_share_their_start(builder: PromptBuilder) -> None:
    walked = run(builder, ["a", "b", "c"], num=3)
    first, *others = walked.groups[0].completions
    assert all(other.start is first.start for other in others)


class Tooled:
    """The walk, with a tool."""

    def reset(self, start: int = 0, **columns: Any) -> str:
        self.walk = Walk()
        return self.walk.reset(start)[0]

    def go(self, where: str) -> Any:
        """Go.

        Args:
            where: A direction.
        """
        content, reward, _, _ = self.walk.step(where)
        self.total = getattr(self, "total", 0.0) + reward
        return content

    def get_reward(self) -> float:
        return self.total


class Called(Tooled):
    """The same walk, whose steps read the calls of a turn and write the tags around results."""

    def system_prompt(self) -> str:
        return introduction_of([schema_of(Tooled().go)])

    def step(self, text: str) -> Any:
        done = "tool_call" not in text
        seen = [] if done else self.go("right")
        tags = [{"type": "text", "text": text} for text in ("<tool_response>\n", "\n</tool_response>")]
        return [tags[0], *seen, tags[1]], 0.0, done, {}


def test_an_episode_by_steps_has_the_tokens_and_rewards_of_one_by_tools(builder: PromptBuilder) -> None:
    texts = [call("go", where="right"), call("go", where="right"), "I am there."]
    kind = kind_of(partial(InThread, Tooled))
    by_tools = Run(builder, lambda _, number: texts[number], Toolbox({}, [], {None: kind})).completion
    by_steps = run(builder, texts, Called).completion
    (tools,), (steps,) = by_tools.paths, by_steps.paths
    assert by_tools.start and by_steps.start
    assert by_tools.start.token_ids.tolist() == by_steps.start.token_ids.tolist()
    assert tools.token_ids.tolist() == steps.token_ids.tolist()
    assert tools.sampled.tolist() == steps.sampled.tolist()
    assert [seen.digest for seen in by_tools.observations] == [seen.digest for seen in by_steps.observations]
    assert by_tools.environment_reward == by_steps.environment_reward == -0.2


@pytest.mark.parametrize(
    ("returned", "reward", "end"),
    [
        (("x", 1, False, {}), 1.0, None),
        (("x", np.float32(0.5), np.True_, {}), 0.5, "stop"),
        (("x", 0, False, True, {}), 0.0, "turns"),
        (("x", 0, True, True, {}), 0.0, "stop"),
        ((None, 0, True, {}), 0.0, "stop"),
        (([], 0, True, {}), 0.0, "stop"),
    ],
)
def test_forms_of_a_step(returned: Any, reward: float, end: str | None) -> None:
    step = read_step(returned, 10**6)
    assert (step.reward, step.end) == (reward, end)


@pytest.mark.parametrize(
    "returned",
    [
        None, "x", ("x", 1.0), ("x", 1.0, True), ("x", 1.0, True, None), ("x", None, True, {}), ("x", "much", True, {}),
        ("x", float("nan"), True, {}), ("x", 1e300, True, {}), ("x", 10**400, True, {}),
        ("x", 1.0, np.array([True, False]), {}), ([{"type": "image", "image": b"no file"}], 1.0, True, {}),
    ],
)  # fmt: skip
def test_other_forms_of_a_step_are_faults(returned: Any) -> None:
    with pytest.raises(ToolFailure) as caught:
        read_step(returned, 10**6)
    assert caught.value.kind == "step"


@pytest.mark.parametrize("returned", [grey(7), Image.fromarray(grey(7)), (grey(7), {})])
def test_a_picture_can_be_returned_as_gymnasium_does(returned: Any) -> None:
    content = read_reset(returned, 10**6)
    assert content is not None
    assert content.blocks == [{"type": "image"}]
    assert np.array(decode_image(content.images[0])).tolist() == grey(7).tolist()


def test_forms_of_a_reset() -> None:
    assert read_reset(None, 10**6) is None
    assert read_reset([], 10**6) is None
    assert read_reset((None, {}), 10**6) is None
    for returned in ("x", ("x", {"info": 1})):
        content = read_reset(returned, 10**6)
        assert content is not None
        assert content.blocks == [{"type": "text", "text": "x"}]


class NoStep:
    def reset(self) -> None: ...


class NeedsGoal(Walk):
    def __init__(self, goal: int) -> None:
        super().__init__(goal)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"environment": f"{__name__}:NoStep"}, "NoStep needs a method `step\\(text\\)`"),
        ({"environment": f"{__name__}:NeedsGoal"}, "cannot be made without arguments: TypeError"),
        ({"environment": f"{__name__}:Walk", "environment_kwargs": {"aim": 3}}, "with rollout.environment_kwargs"),
        ({"environment": "vagen:games.Sokoban"}, "comes from a package with the module `games`"),
        ({"environment": "skyrl:aime"}, "comes from `pip install skyrl-gym`"),
        ({"environment": "openenv:http://localhost:1"}, "name the fields that the model sees"),
    ],
)
def test_what_cannot_take_steps_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_toolbox(RolloutConfig(environment_protocol="steps", **settings))


def test_an_adapter_takes_steps() -> None:
    with pytest.raises(ConfigError, match="takes steps; set"):
        load_toolbox(RolloutConfig(environment="gymnasium:FrozenLake-v1"))


def test_arguments_of_the_class() -> None:
    settings: Any = {"environment": f"{__name__}:NeedsGoal", "environment_kwargs": {"goal": 5}}
    toolbox = load_toolbox(RolloutConfig(environment_protocol="steps", **settings))
    kind = toolbox.kinds[None]
    assert (kind.first.environment.goal, kind.schemas, toolbox.rewarding) == (5, [], ["NeedsGoal"])


def test_turns_have_a_reward_only_if_they_are_steps() -> None:
    assert Turn("a", "a").reward is None
