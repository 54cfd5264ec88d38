"""Trajectories that advance each on its own: nobody waits for a slow tool, and the result is that of waves."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from rewards.contract import Fault
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.errors import DataError, RolloutError
from rl_vlm.rollout.engine import Submitted, TurnLost
from rl_vlm.rollout.environments import advance
from rl_vlm.rollout.environments.advance import EngineClock
from rl_vlm.rollout.environments.failures import ToolFailure
from rl_vlm.rollout.environments.instances import QueuedCall
from rl_vlm.types import Completion, RolloutRequest
from tests.helpers import scripted
from tests.helpers.scripted import ConcurrentScript, ScriptedEngine, call
from tests.helpers.templates import builder_of
from tests.unit.rollout.environments.test_driver import Game, Run, toolbox_of
from tests.unit.rollout.environments.test_steps import Walk
from tests.unit.rollout.environments.test_steps import run as run_steps

pytestmark = pytest.mark.ci


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> PromptBuilder:
    return builder_of("qwen2_5_vl", tmp_path_factory.mktemp("tiny"))


class Relay(Game):
    """The slow tool of one completion ends once another completion has begun its fourth turn."""

    fourth_turn = threading.Event()

    def wait_for_others(self) -> str:
        """Wait."""
        return str(Relay.fourth_turn.wait(10))


def relay(index: int, turn: int) -> str:
    if index == 0:
        return [call("wait_for_others"), "Done"][turn]
    if turn == 3:
        Relay.fourth_turn.set()
    return [call("add", number=1), call("add", number=2), call("add", number=3), "Done"][turn]


@pytest.mark.parametrize(("engine", "met"), [(ConcurrentScript, "True"), (ScriptedEngine, "no answer")])
def test_a_slow_tool_holds_up_its_own_completion_alone(
    builder: PromptBuilder, engine: type[ScriptedEngine], met: str
) -> None:
    Relay.fourth_turn.clear()
    run = Run(builder, relay, toolbox_of(Relay), num=3, engine=engine, tool_timeout=2.0)
    slow, *others = run.groups[0].completions
    assert met in (slow.fault.message if slow.fault else slow.turns[0].results[0].content[0]["text"])
    assert [(c.finish_reason, c.environment_reward) for c in others] == [("stop", 6.0)] * 2


def facts(completion: Completion) -> Any:
    """What must be equal in waves and independently."""
    turns = [(t.text, t.calls, [(r.content, r.images, r.error) for r in t.results], t.reward) for t in completion.turns]
    observed = [(seen.name, seen.token_ids.tolist(), seen.images) for seen in completion.observations]
    start = completion.start and completion.start.token_ids.tolist()
    return (
        completion.token_ids.tolist(), completion.finish_reason, completion.text, completion.environment_reward,
        completion.environment_name, completion.fault, turns, observed, start,
    )  # fmt: skip


class Slow(Game):
    def add(self, number: int) -> Any:
        """Add a number.

        Args:
            number: What to add.
        """
        time.sleep(number / 100)
        return super().add(number)


def varied(index: int, turn: int) -> str:
    """Turns of unlike number and tools of unlike length; one fails, and one breaks off."""
    if turn == 1 + index % 3:
        return call("fail", kind="connection") if index == 4 else f"Done {index}"
    return call("add", number=(7 * index + 3 * turn) % 11) + call("double", number=index) * (index % 2)


@pytest.mark.parametrize("max_num", [None, 2])
def test_the_result_is_that_of_waves(builder: PromptBuilder, max_num: int | None) -> None:
    rows = [{"start": start} for start in (5, 6, 7)]
    waves, alone = (
        Run(builder, varied, toolbox_of(Slow), rows, num=6, max_num=max_num, engine=engine)
        for engine in (ScriptedEngine, ConcurrentScript)
    )
    assert len(waves.engine.waves) >= 3 and not alone.engine.waves
    for one, other in zip(waves.groups, alone.groups, strict=True):
        assert (one.group_id, one.policy_version) == (other.group_id, other.policy_version)
        assert list(map(facts, one.completions)) == list(map(facts, other.completions))
        assert len(one.by_prompt()) == len(other.by_prompt()) == 1
    assert len({facts(c)[3] for group in alone.groups for c in group.completions}) > 6


def test_steps_advance_alone_as_well(builder: PromptBuilder) -> None:
    def script(index: int, turn: int) -> str:
        return "crash" if (index, turn) == (1, 1) else "right"

    waves, alone = (run_steps(builder, script, Walk, num=3, engine=e) for e in (ScriptedEngine, ConcurrentScript))
    assert list(map(facts, waves.groups[0].completions)) == list(map(facts, alone.groups[0].completions))
    assert [c.finish_reason for c in alone.groups[0].completions] == ["stop", "fault", "stop"]


def failing(error: Callable[[], Exception]) -> type[ConcurrentScript]:
    """An engine that fails to sample the second turn of completion 1."""

    class Session(scripted.ScriptedSession):
        def submit(self, request: RolloutRequest) -> Submitted:
            ((index, completion),) = request.paused(self.sampling.num_generations).items()
            if (index, len(completion.turns)) != (1, 1):
                return super().submit(request)
            future: Future[Any] = Future()
            future.set_exception(error())
            return Submitted(future, lambda turn: request.group([turn], 3))

    class Engine(ConcurrentScript):
        make_session = Session

    return Engine


def test_a_turn_that_is_lost_is_a_fault_of_its_completion_alone(builder: PromptBuilder) -> None:
    def script(index: int, turn: int) -> str:
        return [call("add", number=1), "Done"][turn]

    run = Run(builder, script, num=3, engine=failing(lambda: TurnLost("http://a does not answer.")))
    lost = run.groups[0].completions[1]
    assert [c.finish_reason for c in run.groups[0].completions] == ["stop", "fault", "stop"]
    assert (lost.fault, lost.environment_reward) == (Fault("server", "http://a does not answer."), None)
    assert [turn.calls[0].name for turn in lost.turns] == ["add"]  # what was before is recorded
    assert len(lost.token_ids) and not run.instances.busy
    with pytest.raises(RolloutError, match="other weights"):
        Run(builder, script, num=3, engine=failing(lambda: RolloutError("other weights")))


def test_a_call_that_is_too_late_is_a_fault_and_its_end_is_not_seen(builder: PromptBuilder) -> None:
    class Late(Game):
        def nap(self) -> str:
            """Sleep."""
            time.sleep(0.6)
            return "too late"

    def script(index: int, turn: int) -> str:
        if index == 0:
            return call("nap")
        return call("add", number=1) if turn < 8 else "Done"

    class Steady(ConcurrentScript):
        seconds = staticmethod(lambda index, turn: 0.15)

    run = Run(builder, script, toolbox_of(Late), num=2, engine=Steady, tool_timeout=0.3)
    late, steady = run.groups[0].completions
    assert (late.finish_reason, steady.finish_reason) == ("fault", "stop")
    assert late.fault == Fault("timeout", "no answer within 0.3 seconds (rollout.tool_timeout)")
    assert len(late.turns) == 1 and not late.turns[0].results


def test_few_instances_and_kept_ones(builder: PromptBuilder) -> None:
    def script(index: int, turn: int) -> str:
        return [call("add", number=index), "Done"][turn]

    Game.made = 0
    run = Run(builder, script, toolbox_of(Game), num=7, max_num=2, engine=ConcurrentScript)
    assert [c.environment_reward for c in run.groups[0].completions] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
    assert Game.made == 2
    with pytest.raises(RolloutError, match="max_environments 2 is too small"):
        Run(builder, script, num=3, max_num=2, keeps=True, engine=ConcurrentScript)


def test_a_call_has_its_time_from_its_start_or_from_the_first_look(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    queued = QueuedCall(int)
    assert queued.seconds_left(5.0) == 5.0
    now = 103.0
    assert queued.seconds_left(5.0) == 2.0  # somebody has waited for 3 seconds
    queued.started = 102.0
    assert queued.seconds_left(5.0) == 4.0
    now = 107.0
    with pytest.raises(ToolFailure, match="no answer within 5 seconds"):
        queued.result(5.0)


def test_the_clock_adds_up_the_seconds_without_a_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr(advance.time, "monotonic", lambda: now)
    clock = EngineClock()
    with clock.rollout():
        now = 11.0  # 1 s until the first turn
        clock.begin_turn()
        now = 12.0
        clock.begin_turn()
        now = 14.0
        clock.end_turn()
        now = 15.0
        clock.end_turn()
        now = 17.0  # 2 s
        with clock.wave():
            now = 20.0
        now = 24.0  # 4 s
    assert (clock.waited, clock.total) == (1 + 2 + 4, 14)


def test_the_clock_of_a_rollout_knows_how_long_tools_held_up_the_engine(builder: PromptBuilder) -> None:
    class Naps(Game):
        def nap(self) -> str:
            """Sleep."""
            time.sleep(0.3)
            return "awake"

    def script(index: int, turn: int) -> str:
        return [call("nap"), "Done"][turn]

    for engine in (ScriptedEngine, ConcurrentScript):
        clock = Run(builder, script, toolbox_of(Naps), engine=engine).trajectories.clock
        assert 0.3 <= clock.waited <= clock.total <= clock.waited + 0.5


def test_an_error_of_a_request_ends_the_rollout(builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(session: Any, request: RolloutRequest) -> Submitted:
        raise DataError("too long")

    monkeypatch.setattr(scripted.ScriptedSession, "submit", refuse)
    with pytest.raises(DataError, match="too long"):
        Run(builder, lambda index, turn: "Done", engine=ConcurrentScript)
