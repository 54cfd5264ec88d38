"""Tools and environments of TRL's documentation run unchanged, also on models whose chat templates TRL refuses."""

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from transformers import AutoProcessor

from rl_vlm.grpo_trainer import GRPOTrainer
from rl_vlm.run.run import Run
from tests.helpers import tiny_run, trl_documented, trl_tools
from tests.helpers.scripted import ScriptedEngine, call
from tests.helpers.templates import STOPS, builder_of, message, renderer_of, turn

HERE = "tests.helpers.trl_documented"


class Case(NamedTuple):
    """What TRL's trainer is given, and the turns of four completions."""

    turns: list[list[str]]
    rewards: Sequence[str] = ()
    tools: Sequence[str] = ()
    environment: str | dict[str, str] | None = None
    columns: Sequence[dict[str, Any]] = ({}, {})
    """Columns of the two rows."""
    num_images: int = 0
    """Images after the rows' prompts, of both groups."""
    calls: float = 0.0
    """Calls per completion."""


def increments(*steps: int) -> list[str]:
    return [*(call("increment", step=step) for step in steps), "Done."]


CASES = {
    "self-rewarding": Case(
        [increments(1), increments(2, 2), increments(), increments(7)], environment="IncrementEnv", calls=1.0
    ),
    "dataset and functions": Case(
        [increments(1), increments(2, 2), increments(), increments(7)], ["counter_reward", "length_reward"],
        environment="PlainIncrementEnv", calls=1.0,
    ),
    "both rewards": Case(
        [increments(1), increments(2, 2), increments(), increments(7)], ["length_reward"],
        environment="IncrementEnv", calls=1.0,
    ),
    "coding and game": Case(
        [
            [call("run_code", code="print(1)"), call("move", direction="right"), "Done."],
            [call("move", direction="right"), call("move", direction="right"), "Done."],
            [call("move", direction="up"), call("run_code", code="print(2)"), "Done."],
            ["Nothing."],
        ],
        environment={"coding": "CodingEnv", "game": "GameEnv"},
        columns=[{"environment": "coding", "task": "print 1"}, {"environment": "game", "task": ""}], calls=1.5,
    ),
    "tools": Case(
        [
            [call("multiply", a=3, b=4), call("async_add", a=12, b=1), "13"],
            [call("async_add", a=1, b=1), "2"], ["nothing"],
            [call("multiply", a=3, b=4) + "\n" + call("async_add", a=3, b=4), "12 and 7"],
        ],
        ["length_reward"], ["multiply", "async_add"], calls=5 / 4,
    ),
    "screenshot": Case(
        [[call("take_screenshot"), "A page."], [call("take_screenshot")] * 2 + ["Two."], ["None."], ["None."]],
        ["length_reward"], ["take_screenshot"], num_images=6, calls=3 / 4,
    ),
    "wordle": Case(
        [
            [call("guess", guess="[crane]"), call("guess", guess="[crate]"), call("guess", guess="[crane]"), "Over."],
            [call("guess", guess="[crank]"), "I give up."], ["?"], [call("guess", guess="[slate]"), "No."],
        ],
        ["wordle_reward"], environment="WordleEnv", columns=[{"word": "crate"}, {"word": "slate"}], calls=5 / 4,
    ),
    "catch": Case(
        [
            [call("move", direction="left"), call("move", direction="right"), "Caught."],
            [call("move", direction="left"), call("move", direction="left"), "Missed."],
            [call("move", direction="left"), call("move", direction="stay"), "Near."],
            ["Nothing."],
        ],
        environment="CatchEnv", num_images=12 + 8, calls=6 / 4,
    ),
    "echo": Case(
        [[call("echo", message="hi"), "Said."], [call("echo", message="hello"), "Said."], ["."], [call("echo"), "."]],
        ["echo_reward"], environment="EchoToolEnv", calls=3 / 4,
    ),
    "driving": Case(
        [
            [call("turn", lane="left"), "Safe."], [call("turn", lane="right"), call("turn", lane="left"), "Late."],
            ["Straight on."], [call("turn", lane="right"), "Hit."],
        ],
        environment="DrivingEnv", num_images=8 + 6, calls=4 / 4,
    ),
}  # fmt: skip
"""The examples of TRL's documentation."""


def rows_of(case: Case) -> list[dict[str, Any]]:
    return [{"prompt": [{"role": "user", "content": f"Row {i}. "}], **row} for i, row in enumerate(case.columns)]


def named(names: Any) -> Any:
    if isinstance(names, dict):
        return {key: named(name) for key, name in names.items()}
    return names and f"{HERE}:{names}"


def script_of(case: Case) -> Any:
    return lambda index, turn: case.turns[index][turn]


def our_step(case: Case, checkpoint: Path, template: str, output_dir: Path) -> tuple[list[Any], dict[str, float]]:
    """The groups of a step of a run, and what it logs."""
    config = tiny_run.make_config(
        checkpoint, output_dir, dataset_name=f"{__name__}:current_rows", tools=[named(t) for t in case.tools],
        environment=named(case.environment), reward_funcs=[named(r) for r in case.rewards], max_steps=1,
        max_completion_length=2000, shuffle_dataset=False, micro_batch_tokens=65536, text_only=True,
    )  # fmt: skip
    with mock.patch(f"{__name__}.current_rows", lambda: rows_of(case)):
        run = Run(config)
        try:
            tokenizer = AutoProcessor.from_pretrained(checkpoint).tokenizer
            engine = ScriptedEngine(tokenizer, STOPS[template][0], script_of(case))
            with mock.patch.object(run.collector.engine, "engine", engine):
                line = run.next_step()
            assert run.collector.window is not None
            return run.collector.window.groups, line
        finally:
            run.close()


def current_rows() -> list[dict[str, Any]]:
    """The rows of a case, which each test puts here."""
    raise AssertionError("no case")


def factory_of(environment: Any) -> Any:
    if isinstance(environment, dict):
        return {key: factory_of(name) for key, name in environment.items()}
    return environment and getattr(trl_documented, environment)


def trl_of(case: Case, checkpoint: Path, output_dir: Path, script: Any = None) -> Any:
    found = [getattr(trl_documented, name) for name in case.rewards]
    tools = [getattr(trl_documented, name) for name in case.tools]
    return trl_tools.trl_trainer(
        checkpoint,
        output_dir,
        found,
        script,
        tools=tools,
        environment_factory=factory_of(case.environment),
        max_completion_length=2000,
    )


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, Path] = {}

    def make(template: str) -> Path:
        if template not in made:
            made[template] = trl_tools.published(template, tmp_path_factory.mktemp(template))
        return made[template]

    return make


@pytest.mark.parametrize("name", CASES)
def test_documented_tools_and_environments_do_what_they_do_in_trl(name: str, published: Any, tmp_path: Path) -> None:
    case, checkpoint = CASES[name], published("qwen3_vl")
    groups, line = our_step(case, checkpoint, "qwen3_vl", tmp_path / "ours")
    trainer = trl_of(case, checkpoint, tmp_path / "trl", script_of(case))
    batch = trainer._generate_and_score_completions([row for row in rows_of(case) for _ in range(4)])
    advantages = torch.cat([group.advantages_G for group in groups])
    torch.testing.assert_close(advantages, batch["advantages"], rtol=0, atol=1e-6)
    assert advantages.abs().max() > 0.1
    assert trainer._metrics["train"]["tools/call_frequency"] == [case.calls]
    assert sum(len(turn.calls) for g in groups for c in g.group.completions for turn in c.turns) == 8 * case.calls
    check_images(case, groups)
    assert sum(batch.get("num_images") or [0]) == case.num_images
    assert torch.isfinite(torch.tensor(line["loss"])) and line["grad_norm"] > 0


def check_images(case: Case, groups: list[Any]) -> None:
    completions = [completion for scored in groups for completion in scored.group.completions]
    seen = [each.num_images for completion in completions for each in completion.observations]
    starts = [completion.start.num_images for completion in completions if completion.start is not None]
    assert sum(seen) + sum(starts) == case.num_images


REFUSED = ["qwen2_5_vl", "gemma3", "smolvlm"]


@pytest.mark.slow
@pytest.mark.parametrize("template", REFUSED)
def test_documented_tools_and_environments_run_where_trl_refuses(template: str, published: Any, tmp_path: Path) -> None:
    checkpoint = published(template)
    expected = {}
    for number, (name, case) in enumerate(CASES.items()):
        with pytest.raises(ValueError, match="does not support tool calling"):
            trl_of(case, checkpoint, tmp_path / f"trl{number}")
        groups, line = our_step(case, checkpoint, template, tmp_path / f"ours{number}")
        check_images(case, groups)
        completions = [completion for scored in groups for completion in scored.group.completions]
        assert [completion.finish_reason for completion in completions] == ["stop"] * 8, name
        assert line["grad_norm"] > 0, name
        expected[name] = [round(float(r), 4) for scored in groups for r in scored.rewards_G]
    assert expected["self-rewarding"] == [1.0, 4.0, 0.0, 7.0] * 2
    assert expected["dataset and functions"] == [1.3, 4.5, 0.1, 7.3] * 2
    assert expected["coding and game"] == [1.0, 0.0, 0.0, 0.0, 0.5, 1.0, 0.0, 0.0]
    assert expected["wordle"] == [1.0, 0.6, 0.0, 0.6, 0.4, 0.2, 0.0, 1.0]
    assert expected["echo"] == [0.2, 0.5, 0.0, 0.0] * 2
    assert expected["driving"] == [1.0, 0.0, 0.0, 0.0] * 2
    assert expected["catch"] == [1.0, 0.5, 0.75, 0.0] * 2


def test_the_trainer_takes_trls_arguments(published: Any, tmp_path: Path) -> None:
    """A random model trains for two steps, and calls nothing."""
    trainer = GRPOTrainer(
        str(published("qwen2_5_vl")), reward_funcs=tiny_run.token_sum, train_dataset=rows_of(CASES["self-rewarding"]),
        tools=[trl_documented.multiply, trl_documented.async_add], environment_factory=trl_documented.IncrementEnv,
        output_dir=str(tmp_path / "run"), num_generations=4, prompts_per_step=2, max_completion_length=6, max_steps=2,
        text_only=True, report=False, disable_tqdm=True, micro_batch_tokens=8192,
    )  # fmt: skip
    trainer.train()
    lines = tiny_run.metric_lines(tmp_path / "run")
    assert [line["rewards/IncrementEnv/mean"] for line in lines if "loss" in line] == [0.0, 0.0]


def test_results_of_sync_and_async_tools_stay_in_the_order_of_calls(published: Any, tmp_path: Path) -> None:
    """TRL appends the results of async tools after the others."""
    both = call("async_add", a=3, b=4) + "\n" + call("multiply", a=3, b=4)
    case = Case([[both, "Done."]] * 4, ["length_reward"], ["multiply", "async_add"])
    checkpoint = published("qwen3_vl")
    groups, _ = our_step(case, checkpoint, "qwen3_vl", tmp_path / "ours")
    (result, other) = groups[0].group.completions[0].turns[0].results
    assert [result.content[0]["text"], other.content[0]["text"]] == ["7", "12"]
    seen: list[Any] = []
    with mock.patch.object(
        trl_documented, "length_reward", lambda completions, **_: seen.extend(completions) or [0] * 8
    ):
        trainer = trl_of(case, checkpoint, tmp_path / "trl", script_of(case))
    trainer._generate_and_score_completions([row for row in rows_of(case) for _ in range(4)])
    assert [message["content"] for message in seen[0]][1:3] == ["12", "7"]


def test_results_of_two_calls_have_their_own_names_on_gemma_4(tmp_path: Path) -> None:
    """TRL labels both with the first tool's name."""
    from trl.trainer.grpo_trainer import GRPOTrainer as TRLTrainer

    builder = builder_of("gemma4_v4", tmp_path)
    stub: Any = SimpleNamespace(
        _is_vlm=True, processing_class=builder.processor, chat_template=None, chat_template_kwargs={},
        _tokenizer=builder.processor.tokenizer,
    )  # fmt: skip
    results = [{"role": "tool", "name": name, "content": f"{name} result"} for name in ("crop", "search")]
    decode = builder.processor.tokenizer.decode
    of_trl = decode(TRLTrainer._get_tool_suffix_ids(stub, results))
    assert (of_trl.count("response:crop"), of_trl.count("response:search")) == (2, 0)
    shown = [message("tool", f"{name} result") for name in ("crop", "search")]
    ended = turn(builder, "7", "<|tool_response>")
    ours = decode(renderer_of("gemma4_v4", builder).render("o", shown, [], [], ended, ["crop", "search"]).token_ids)
    assert (ours.count("response:crop"), ours.count("response:search")) == (1, 1)
