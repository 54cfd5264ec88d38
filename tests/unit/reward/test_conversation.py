"""Completions of several turns, as reward functions receive them."""

import io
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from rewards.text import completion_text
from rl_vlm.config.schema import RewardsConfig, RewardSpec
from rl_vlm.data.frames import frames_as_images
from rl_vlm.errors import RewardError
from rl_vlm.reward.conversation import completion_as, turns_of
from rl_vlm.reward.function import Reward, arguments
from rl_vlm.reward.golds import why_not_scored
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.rollout.environments.starts import offered
from rl_vlm.types import (
    Completion,
    Context,
    Group,
    Observation,
    Prompt,
    RolloutRequest,
    Sample,
    ToolCall,
    ToolResult,
    TrainerState,
    Turn,
    Video,
)

STATE = TrainerState(global_step=0, max_steps=1, epoch=0.0)
ASKED = [{"role": "user", "content": "Which digit?"}]


def png(size: tuple[int, int]) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", size, "red").save(file, "PNG")
    return file.getvalue()


def text(words: str) -> ToolResult:
    return ToolResult([{"type": "text", "text": words}], seconds=0.25)


def prompt(asked: list = ASKED, **columns) -> Prompt:
    return Prompt(Sample("s0", asked, [], columns, asked), torch.tensor([1]), {}, {})


CROP, ADD = ToolCall("crop", {"x": 1}), ToolCall("add", {"a": 1, "b": 2})
SHOWN = ToolResult([{"type": "text", "text": "left:"}, {"type": "image"}], (png((3, 2)),), seconds=0.5)
TURNS = (
    Turn("Look. <call crop> <call add>", "Look.", (CROP, ADD), (SHOWN, text("3"))),
    Turn("<call", "<call", (), (ToolResult([{"type": "text", "text": "{'error': 'no JSON'}"}], error="no JSON"),)),
    Turn("<answer>7</answer>", "<answer>7</answer>"),
)
"""Two calls, a call that cannot be read, and an answer."""


def trajectory(turns: tuple[Turn, ...] = TURNS, **fields) -> Completion:
    """Two sampled tokens, an observation of three, one sampled token."""
    observation = Observation("s0, turn 1", torch.tensor([50, 51, 52]), {}, {})
    completion = Completion(
        torch.tensor([5, 6, 7]), torch.zeros(3), "stop", turns[-1].text, (Context((2, observation, 1)),), turns=turns
    )
    return replace(completion, **fields)


def messages(completion: Completion) -> list[Any]:
    found = completion_as("messages", completion)
    assert isinstance(found, list)
    return found


def of(*completions: Completion, **columns) -> Group:
    return Group("g0", prompt(**columns), list(completions), 0)


def test_messages_are_those_of_trl() -> None:
    first, crop, added, unread, told, last = messages(trajectory())
    assert first == {
        "role": "assistant",
        "content": "Look.",
        "tool_calls": [
            {"type": "function", "function": {"name": "crop", "arguments": {"x": 1}}},
            {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}},
        ],
    }
    image = crop["content"][1].pop("image")
    assert crop == {"role": "tool", "name": "crop", "content": [{"type": "text", "text": "left:"}, {"type": "image"}]}
    assert (image.size, image.getpixel((0, 0))) == ((3, 2), (255, 0, 0))
    assert added == {"role": "tool", "name": "add", "content": "3"}
    assert unread == {"role": "assistant", "content": "<call"}
    assert told == {"role": "tool", "name": "unknown", "content": "{'error': 'no JSON'}"}
    assert last == {"role": "assistant", "content": "<answer>7</answer>"}


def test_a_trajectory_that_ends_with_calls_has_no_results() -> None:
    (message,) = messages(trajectory((Turn("Look. <call>", "Look.", (ADD,)),)))
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": 2}}}]
    assert list(message) == ["role", "content", "tool_calls"]


def test_text_is_the_last_turn() -> None:
    assert completion_as("text", trajectory()) == "<answer>7</answer>"
    assert completion_text(messages(trajectory())) == "<answer>7</answer>"


def test_images_are_decoded_when_they_are_used() -> None:
    """A file that ends early opens, and fails only when its pixels are read."""
    whole = png((3000, 2))
    broken = ToolResult([{"type": "image"}], (whole[: len(whole) // 2],))
    image = messages(trajectory((Turn("", "", (CROP,), (broken,)),)))[1]["content"][0]["image"]
    assert image.size == (3000, 2)
    with pytest.raises(OSError):
        image.load()


def test_turns_are_plain() -> None:
    first, second, last = turns_of(TURNS)
    shown = first["results"][0]
    image = shown["content"][1].pop("image")
    assert image.size == (3, 2)
    assert first == {
        "text": "Look. <call crop> <call add>",
        "calls": [{"name": "crop", "arguments": {"x": 1}}, {"name": "add", "arguments": {"a": 1, "b": 2}}],
        "results": [
            {"content": [{"type": "text", "text": "left:"}, {"type": "image"}], "error": None, "seconds": 0.5},
            {"content": "3", "error": None, "seconds": 0.25},
        ],
        "reward": None,
        "seconds": 0.75,
    }
    assert second["calls"] == [] and second["results"][0]["error"] == "no JSON"
    assert last == {"text": "<answer>7</answer>", "calls": [], "results": [], "reward": None, "seconds": 0}


def test_ids_are_all_after_the_prompt() -> None:
    found = arguments([of(trajectory(), Completion(torch.tensor([8]), torch.zeros(1), "length", "a"))], [], None)
    assert found["completion_ids"] == [[5, 6, 50, 51, 52, 7], [8]]
    assert found["finish_reasons"] == ["stop", "length"]
    assert [len(turns) for turns in found["turns"]] == [3, 0]
    assert found["completions"][1] == [{"role": "assistant", "content": "a"}]


def test_videos_give_their_seconds_and_the_times_of_their_frames() -> None:
    video = Video(np.zeros((2, 4, 4, 3), np.uint8), (0, 15), 30.0, 300, 10.0)
    group = of(trajectory())
    frames = [Image.fromarray(frame) for frame in video.frames]
    for videos in ({"videos": [video]}, {"frames_of": [video], "frame_starts": [0], "images": frames}):
        shown = replace(group.prompt, sample=replace(group.prompt.sample, **videos))
        found = arguments([replace(group, prompt=shown)], [], None)
        assert (found["video_duration"], found["video_frame_times"]) == ([[10.0]], [[[0.0, 0.5]]])
    assert arguments([of(trajectory(), video_duration=7)], ["video_duration"], None)["video_duration"] == [7]


def test_frames_of_a_video_are_no_images_of_the_row() -> None:
    """A row of a video and an image has the same arguments if the model gets frames as images."""
    video = Video(np.zeros((2, 4, 4, 3), np.uint8), (0, 15), 30.0, 300, 10.0)
    content = [{"type": "video"}, {"type": "image"}, {"type": "text", "text": "Where?"}]
    messages = [{"role": "user", "content": content}]
    picture = Image.new("RGB", (6, 8))
    row = Sample("s0", messages, [picture], {}, messages, image_files=["a.png"], videos=[video])
    resized = {"native": [(28, 56)], "frames": [(14, 14), (14, 14), (28, 56)]}
    for sample, sizes in ((row, resized["native"]), (frames_as_images(row), resized["frames"])):
        shown = replace(prompt(), sample=sample, image_sizes=sizes)
        found = arguments([replace(of(trajectory()), prompt=shown)], [], None)
        assert (found["image_sizes"], found["model_image_sizes"]) == ([[(6, 8)]], [[(28, 56)]])
        assert (found["images"], found["image_path"], found["image_grid_thw"]) == (
            [[picture]],
            [["a.png"]],
            [[1, 4, 2]],
        )
        reset = offered(RolloutRequest("g0", shown), 0)
        assert (reset["image"], reset["image_sizes"], reset["model_image_sizes"]) == (picture, [(6, 8)], [(28, 56)])


def test_a_prompt_has_what_reset_appended() -> None:
    started = prompt([{"role": "user", "content": "Which digit? Now."}])
    found = arguments([of(trajectory(start=started), trajectory())], [], None)
    assert [messages[0]["content"] for messages in found["prompts"]] == ["Which digit? Now.", "Which digit?"]


def test_environments_are_offered_if_there_are_any() -> None:
    class Game: ...

    game = Game()
    assert "environments" not in arguments([of(trajectory())], [], None)
    alive = trajectory(environment=game, environment_name="Game")
    moved = trajectory(environment_name="Game")
    assert arguments([of(alive, moved)], [], None)["environments"] == [game, None]
    assert arguments([of(alive, environments="a column")], ["environments"], None)["environments"] == [game]


def test_a_column_replaces_turns_as_it_replaces_arguments_of_vlm_r1() -> None:
    found = arguments([of(trajectory(), turns=4, finish_reasons="x", environments="mine")],
                        ["turns", "finish_reasons", "environments"], None)  # fmt: skip
    assert (found["turns"], found["finish_reasons"], found["environments"]) == ([4], ["x"], ["mine"])


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes functions to a file `mine.py`."""
    monkeypatch.chdir(tmp_path)
    yield Path("mine.py").write_text
    sys.modules.pop(str(tmp_path / "mine.py"), None)


def spec(**fields) -> RewardSpec:
    return RewardSpec(function="mine.py:f", **fields)


def test_built_ins_read_the_last_message() -> None:
    with RewardSuite(RewardsConfig(reward_funcs=["exact_match", "format_tags"])) as suite:
        table = suite.score([of(trajectory(), solution="7")], STATE)
    assert table.scores_PGF[0, 0, 0] == 1.0


def test_a_function_reads_an_environment(mine) -> None:
    mine("def f(environments, turns):\n    return [e.score + len(t) for e, t in zip(environments, turns)]\n")

    class Game:
        score = 4

    with RewardSuite(RewardsConfig(reward_funcs=["mine.py:f"]), environments=()) as suite:
        suite.check_columns([])
        table = suite.score([of(trajectory(environment=Game(), environment_name="Game"))], STATE)
    assert table.scores_PGF.tolist() == [[[7.0]]]


def test_a_function_that_needs_environments_is_refused_without_one(mine) -> None:
    mine("def f(environments): ...\n")
    with RewardSuite(RewardsConfig(reward_funcs=["mine.py:f"])) as suite:
        with pytest.raises(RewardError, match="'f' reads `environments`, and the run has none: set"):
            suite.check_columns([])
        suite.check_columns(["environments"])


def test_a_worker_process_has_no_environments(mine) -> None:
    mine("def f(environments=None): ...\n")
    assert Reward(spec(timeout=1.0)).worker is not None
    with pytest.raises(RewardError, match="'f' reads `environments` and has a timeout, so it runs in a process that"):
        RewardSuite(RewardsConfig(reward_funcs=[spec(timeout=1.0)]), environments=())


def test_a_worker_gets_turns_and_messages(mine) -> None:
    mine(
        "def f(completions, turns, **given):\n"
        "    sizes = [c[1]['content'][1]['image'].size[0] for c in completions]\n"
        "    return [size + len(t) + 10 * ('environments' in given) for size, t in zip(sizes, turns)]\n"
    )

    class Game:
        """Cannot be sent to a process."""

    config = RewardsConfig(reward_funcs=[spec(timeout=60.0, completions="messages")])
    with RewardSuite(config, environments=()) as suite:
        table = suite.score([of(trajectory(environment=Game(), environment_name="Game"))], STATE)
    assert (table.scores_PGF.tolist(), table.fault_messages) == ([[[6.0]]], {})


@pytest.mark.parametrize(("argument", "is_called"), [("turns", False), ("environments", False), ("solution", True)])
def test_a_function_that_reads_turns_is_not_called_on_made_up_completions(mine, argument: str, is_called: bool) -> None:
    mine(f"calls = []\ndef f(completions, {argument}):\n    calls.append(1)\n    return [0.0 for _ in completions]\n")
    reward = Reward(spec(), has_environment=True)
    assert reward.find_form(prompt(solution="7").sample) == ("messages" if is_called else None)
    assert reward.function.__globals__["calls"] == [1] * is_called
    assert (why_not_scored(reward) is None) == is_called


def test_a_column_called_turns_is_none_of_a_trajectory(mine) -> None:
    mine("def f(completions, turns): return [float(n) for n in turns]\n")
    reward = Reward(spec())
    assert reward.find_form(prompt(turns=3).sample) == "messages"
    assert why_not_scored(reward, ["turns"]) is None
