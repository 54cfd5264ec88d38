"""Completions of several turns are those that TRL's own loop makes of the same calls and results."""

import io
from types import SimpleNamespace
from typing import Any

import torch
from PIL import Image

from rl_vlm.reward.conversation import completion_as
from rl_vlm.types import Completion, Context, Observation, ToolCall, ToolResult, Turn

RED = Image.new("RGB", (3, 2), "red")
SUFFIX = [90, 91]
"""Tokens of each observation."""


def look(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}, {"type": "image", "image": RED}]


def add(a: int, b: int) -> int:
    return a + b


def fail() -> None:
    raise ValueError("no such digit")


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


PARSED = {
    11: {"role": "assistant", "content": "First.", "tool_calls": [call("look", text="left:"), call("add", a=1, b=2)]},
    12: {"role": "assistant", "content": "", "tool_calls": [call("fail"), call("none")]},
    13: {"role": "assistant", "content": "It is 3."},
}
"""What TRL reads in a turn, by its only token."""


def of_trl(limit: int) -> tuple[list[dict[str, Any]], list[int]]:
    """Run TRL's loop on these turns. Return the completion and its ids."""
    from trl.trainer.grpo_trainer import GRPOTrainer

    turns = iter([[[12]], [[13]]])
    trainer: Any = SimpleNamespace(
        max_tool_calling_iterations=limit,
        _sync_tool_dicts=[{"look": look, "add": add, "fail": fail}],
        _async_tool_dicts=[{}],
        _get_tool_suffix_ids=lambda messages: SUFFIX,
        _generate_single_turn=lambda *given, **named: (next(turns), None),
        _tokenizer=SimpleNamespace(parse_response=lambda ids, **named: dict(PARSED[ids[-1]]), eos_token="<eos>"),
        use_vllm=False,
        _is_vlm=False,
        model=SimpleNamespace(config=SimpleNamespace(max_position_embeddings=1000)),
        max_completion_length=100,
        environment_factories=None,
        tools=[look, add, fail],
    )
    _, completions, ids, *_ = GRPOTrainer._tool_call_loop(
        trainer, [[{"role": "user", "content": "?"}]], [[1, 2]], [[11]], [[dict(PARSED[11])]], None, None, {}
    )
    return completions[0], ids[0]


def text(words: str, error: str | None = None) -> ToolResult:
    return ToolResult([{"type": "text", "text": words}], error=error)


def ours(num_turns: int) -> Completion:
    """The same trajectory as our types have it."""
    file = io.BytesIO()
    RED.save(file, "PNG")
    shown = ToolResult([{"type": "text", "text": "left:"}, {"type": "image"}], (file.getvalue(),))
    failed = text("{'error': 'no such digit'}", "no such digit")
    unknown = text("{'error': 'Tool none not found.'}", "Tool none not found.")
    turns = (
        Turn(
            "…", "First.", (ToolCall("look", {"text": "left:"}), ToolCall("add", {"a": 1, "b": 2})), (shown, text("3"))
        ),
        Turn("…", "", (ToolCall("fail", {}), ToolCall("none", {})), (failed, unknown)),
        Turn("It is 3.", "It is 3."),
    )[:num_turns]
    observed = [Observation("s0", torch.tensor(SUFFIX), {}, {}) for _ in turns]
    parts = [part for observation in observed for part in (1, observation)][:-1]
    ids = torch.tensor([11, 12, 13][:num_turns])
    return Completion(ids, torch.zeros(num_turns), "stop", "It is 3.", (Context(tuple(parts)),), turns=turns)


def plain(messages: Any) -> list[dict[str, Any]]:
    """Return messages with the pixels of images."""

    def block(each: dict[str, Any]) -> dict[str, Any]:
        return each | ({"image": (each["image"].size, each["image"].tobytes())} if "image" in each else {})

    return [
        message | {"content": list(map(block, content)) if isinstance(content := message["content"], list) else content}
        for message in messages
    ]


def test_messages_and_ids_are_those_of_trls_loop() -> None:
    messages, ids = of_trl(limit=5)
    assert len(messages) == 7
    completion = ours(num_turns=3)
    assert plain(completion_as("messages", completion)) == plain(messages)
    assert completion.paths[-1].token_ids.tolist() == ids == [11, 90, 91, 12, 90, 91, 13]


def test_a_trajectory_at_the_limit_of_turns_ends_with_its_calls() -> None:
    messages, ids = of_trl(limit=1)
    completion = ours(num_turns=2)
    last = completion.turns[-1]
    ended = Completion(
        completion.token_ids, completion.generator_logprobs, "turns", "", completion.contexts,
        turns=(completion.turns[0], Turn(last.text, last.content, last.calls)),
    )  # fmt: skip
    assert plain(completion_as("messages", ended)) == plain(messages)
    assert completion.paths[-1].token_ids.tolist() == ids == [11, 90, 91, 12]
