"""Environments in processes: equal to those in threads, and nothing is lost or left when they fail."""

import gc
import pickle
from operator import methodcaller
from pathlib import Path
from typing import Any

import psutil
import pytest

from rl_vlm.config.schema import DataConfig, RolloutConfig
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.data.video.frames import FrameRule
from rl_vlm.errors import ConfigError
from rl_vlm.functions import live
from rl_vlm.rollout.environments import processes
from rl_vlm.rollout.environments.contract import Content, Toolbox
from rl_vlm.rollout.environments.failures import ToolFailure
from rl_vlm.rollout.environments.instances import Instance, Instances
from rl_vlm.rollout.environments.loading import load_toolbox
from rl_vlm.rollout.environments.processes import Answers, InProcess, packed, unpacked
from rl_vlm.rollout.environments.steps import Step
from tests.helpers.faulty import Faulty
from tests.helpers.processes import is_gone
from tests.helpers.templates import builder_of
from tests.unit.rollout.environments.test_driver import Run

pytestmark = pytest.mark.ci

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> PromptBuilder:
    return builder_of("qwen2_5_vl", tmp_path_factory.mktemp("tiny"))


def toolbox_of(source: str = "tests.helpers.faulty:Faulty", **settings: Any) -> Toolbox:
    chosen = {"environment_protocol": "steps", "environment_isolation": "process", **settings}
    return load_toolbox(RolloutConfig(environment=source, **chosen))


def what_is_compared(run: Run) -> list[Any]:
    return [
        (
            completion.finish_reason, completion.environment_reward, completion.environment_name,
            completion.start and completion.start.token_ids.tolist(), completion.token_ids.tolist(),
            [observation.images for observation in completion.observations],
            [observation.token_ids.tolist() for observation in completion.observations],
            [(turn.text, turn.reward, [result.content for result in turn.results]) for turn in completion.turns],
        )
        for group in run.groups
        for completion in group.completions
    ]  # fmt: skip


def test_processes_give_the_completions_of_threads(builder: PromptBuilder) -> None:
    def script(index: int, turn: int) -> str:
        return ["go", "raise", "end"][min(turn + index % 2, 2)]

    runs = []
    for isolation in ("thread", "process"):
        toolbox = toolbox_of(environment_isolation=isolation)
        runs.append(Run(builder, script, toolbox, rows=[{"start": 3}, {"start": 9}], num=2, max_num=2))
        runs[-1].trajectories.close()
    threads, processes = map(what_is_compared, runs)
    assert threads == processes
    assert [completion[:3] for completion in threads] == [
        ("stop", 5.0, "Faulty"), ("stop", 4.0, "Faulty"), ("stop", 11.0, "Faulty"), ("stop", 10.0, "Faulty"),
    ]  # fmt: skip


def test_values_arrive_as_they_were_sent() -> None:
    blocks = [{"type": "text", "text": "a\ud83d"}, {"type": "image"}, {"type": "image"}]
    step = Step(Content(blocks, (b"one", b"")), 0.1, None)
    for value in (step, step.content, None, 1.5, [], {"type": "plain"}):
        assert unpacked(packed(value)) == value


def test_a_fault_ends_its_completion_and_nothing_else(builder: PromptBuilder, tmp_path: Path) -> None:
    """`tests/integration/test_isolation.py` has all kinds of faults, at random."""
    hows = ["go", "null", "leak", "orphans", "deaf", "raise"]
    settings = {"environment_kwargs": {"pids": str(tmp_path / "pids")}, "environment_memory": "300MiB"}
    run = Run(
        builder, lambda index, turn: [hows[index], "end"][turn], toolbox_of(**settings), num=6, max_num=3,
        tool_timeout=3.0, masks_errors=True,
    )  # fmt: skip
    run.trajectories.close()
    faults = [completion.fault and completion.fault.kind for completion in run.groups[0].completions]
    assert faults == [None, "crash", "memory", "crash", "timeout", "exception"]
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 5 + 3 and all(map(is_gone, pids))


def test_a_process_that_has_ended_between_completions_is_replaced() -> None:
    toolbox = toolbox_of()
    instances = Instances(1)
    kind = toolbox.kinds[None]
    first = instances.acquire(kind)
    assert first is not None
    first.finish(first.start({"start": 1}, 10**6, FrameRule(DataConfig()))[0], 30.0)
    instances.release(first)
    assert isinstance(first.host, InProcess) and first.host.process is not None
    supervisor = psutil.Process(first.host.process._process.pid)
    (worker,) = supervisor.children()
    supervisor.kill()
    assert is_gone(supervisor.pid) and is_gone(worker.pid)
    second = instances.acquire(kind)
    assert second is not None and second is not first
    (content,) = (second.finish(call, 30.0) for call in second.start({"start": 2}, 10**6, FrameRule(DataConfig())))
    assert content.blocks[0] == {"type": "text", "text": "Start at 2."}
    with pytest.raises(ToolFailure, match="its process cannot get the arguments"):
        second.finish(second.start({"start": lambda: 0}, 10**6, FrameRule(DataConfig()))[0], 30.0)
    instances.close()
    assert second.host is not None and second.host.has_ended


def test_a_reply_that_is_too_large_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "LARGEST_REPLY", 1000)
    answers = Answers(Faulty)
    (small,) = answers(pickle.dumps((methodcaller("reset"), len)))
    assert unpacked(small) == 2
    monkeypatch.setattr(processes, "LARGEST_REPLY", 80)
    (large,) = answers(pickle.dumps((methodcaller("reset"), repr)))
    with pytest.raises(ToolFailure, match="more than 80"):
        unpacked(large)


@pytest.mark.parametrize("protocol", ["steps", "tools"])
def test_the_process_imports_no_torch(protocol: str) -> None:
    """An environment that needs none of it starts in a second, with 30 MB."""
    kind = toolbox_of("tests.helpers.faulty:Modules", environment_protocol=protocol).kinds[None]
    assert kind is not None and kind.tools == (["step"] if protocol == "tools" else [])
    instance = Instance(kind, kind.first, kind.thread)
    loaded, *_ = instance.finish(instance.step("go", 10**6, FrameRule(DataConfig())), 30.0).content.blocks
    instance.close()
    assert "numpy" in loaded["text"] and not {"torch", "pydantic", "pyarrow"} & set(loaded["text"].split())


def test_what_another_process_cannot_have_is_refused() -> None:
    class Local(Faulty):
        """A class that no module has."""

    for factory in (lambda: Faulty(), Local):
        with live({"python:mine#1": factory}), pytest.raises(ConfigError, match=r"name it as `file\.py:Class`"):
            toolbox_of("python:mine#1")


def test_an_object_of_the_session_is_sent() -> None:
    with live({"python:mine#1": Faulty}):
        toolbox = toolbox_of("python:mine#1")
    assert toolbox.rewarding == ["Faulty"]


def test_a_toolbox_that_is_dropped_leaves_no_process() -> None:
    others = psutil.Process().children()
    toolbox = toolbox_of()
    (supervisor,) = set(psutil.Process().children()) - set(others)
    del toolbox
    gc.collect()
    assert is_gone(supervisor.pid)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("tests.helpers.absent:Faulty", "No module named 'tests.helpers.absent'"),
        ("tests.helpers.faulty:Ends", r"its process ended with exit code 7"),
        ("tests.helpers.faulty:FAULTS", "has a dict, not a function"),
    ],
)
def test_an_environment_that_cannot_be_made_is_refused(source: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        toolbox_of(source)
