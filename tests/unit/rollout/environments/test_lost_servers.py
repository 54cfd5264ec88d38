"""Trajectories on servers that are killed and restarted: a turn is repeated exactly elsewhere, or is a fault."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.data.turns import TurnFormat
from rl_vlm.errors import RolloutError
from rl_vlm.model.families import TokenRules
from rl_vlm.rollout.environments.driver import Trajectories
from rl_vlm.rollout.environments.instances import Instances
from rl_vlm.rollout.environments.turns import TurnLimits
from rl_vlm.rollout.vllm.servers import VLLMServers
from rl_vlm.types import Completion, RolloutRequest, Sample, Sampling
from tests.helpers.scripted import call
from tests.helpers.templates import END, STOPS, builder_of
from tests.helpers.turn_server import TurnServer
from tests.unit.rollout.environments.test_driver import toolbox_of

NUM, NUM_TURNS = 4, 3


class Counter:
    """Counts in text."""

    _called: Callable[[int], None] = staticmethod(lambda number: None)
    """Called with the argument of each call."""

    def reset(self, seed: int, **columns: Any) -> str:
        self.count = seed % 50
        return f" Start at {self.count}."

    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: What to add.
        """
        Counter._called(number)
        self.count += number
        return f"count {self.count}"

    def get_reward(self) -> float:
        return float(self.count)


def write(text: str, seed: int) -> str:
    """Call `add` in all turns but the last. The number depends on the seed."""
    return call("add", number=seed % 9) if text.count("<|im_start|>assistant") < NUM_TURNS else f"Done {seed % 100}"


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> PromptBuilder:
    return builder_of("qwen2_5_vl", tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def servers(builder: PromptBuilder) -> Iterator[list[TurnServer]]:
    made = [TurnServer(builder.processor.tokenizer, END, write) for _ in range(2)]
    yield made
    for server in made:
        if not server.killed.is_set():
            server.kill()


class Adapter:
    sends_adapter = True
    is_sharded = False

    def save_adapter(self, directory: Path) -> int:
        directory.mkdir(parents=True)
        return 4

    def trained_weights(self) -> Any:
        raise AssertionError("the adapter is sent")

    def join_gathering(self) -> None:
        raise AssertionError("this process sends")


class Rollouts:
    """Trajectories of one prompt on servers, which have weights of version 1."""

    def __init__(self, builder: PromptBuilder, servers: list[TurnServer], folder: Path) -> None:
        toolbox = toolbox_of(Counter)
        tokenizer = builder.processor.tokenizer
        stops = tokenizer.convert_tokens_to_ids(STOPS["qwen2_5_vl"])
        self.format = TurnFormat.choose(builder, stops, toolbox.all_schemas, "auto", "auto", True)
        limits = TurnLimits(10, None, 20.0, False, 10**7, None)
        self.trajectories = Trajectories(toolbox, {None: self.format}, limits, Instances())
        clients = [server.client() for server in servers]
        rules = TokenRules(stops, [])
        self.engine = VLLMServers(clients, rules, self.format.builder, folder / "weights", True, {}, run="ours/")
        self.engine.sync(Adapter(), 1)

    def completions(self) -> list[Completion]:
        messages = [{"role": "user", "content": [{"type": "text", "text": "Count!"}]}]
        prompt = self.format.builder.build(Sample("s", messages, [], {}, messages))
        sampling = Sampling(num_generations=NUM, max_completion_length=4000, temperature=1.0, seed=0)
        (group,) = self.trajectories.generate(self.engine, [RolloutRequest("0/s", prompt)], sampling)
        return group.completions


def facts(completion: Completion) -> Any:
    turns = [(turn.text, [result.content for result in turn.results]) for turn in completion.turns]
    logprobs = completion.generator_logprobs.tolist()
    return completion.token_ids.tolist(), logprobs, completion.finish_reason, turns, completion.environment_reward


def undisturbed(builder: PromptBuilder, servers: list[TurnServer], folder: Path) -> list[Any]:
    found = list(map(facts, Rollouts(builder, servers, folder / "undisturbed").completions()))
    assert [(reason, len(turns)) for _, _, reason, turns, _ in found] == [("stop", NUM_TURNS)] * NUM
    assert len({str(each) for each in found}) == NUM
    return found


def kill_when_all_wait(server: TurnServer, then: Callable[[], Any] = lambda: None) -> threading.Thread:
    """Kill a server half a second after it has stopped to answer, and its other requests have come."""

    def watch() -> None:
        deadline = time.monotonic() + 20
        while server.num_answers <= server.most_answers and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.5)
        server.kill()
        then()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


@pytest.mark.parametrize("answered", [0, 1, 2, 3, 4, 5])
@pytest.mark.ci
def test_another_server_repeats_a_turn_exactly(
    builder: PromptBuilder, servers: list[TurnServer], answered: int, tmp_path: Path
) -> None:
    """The first server answers some of its six requests, and then dies with the others."""
    expected = undisturbed(builder, servers, tmp_path)
    assert [server.num_answers for server in servers] == [NUM * NUM_TURNS // 2] * 2
    rollouts = Rollouts(builder, servers, tmp_path / "killed")
    servers[0].num_answers, servers[0].most_answers = 0, answered
    thread = kill_when_all_wait(servers[0])
    assert list(map(facts, rollouts.completions())) == expected
    thread.join()
    assert servers[0].killed.is_set() and [client.url for client in rollouts.engine.live] == [servers[1].client().url]


@pytest.mark.parametrize("answered", [0, 5, 9, 11])
@pytest.mark.ci
def test_the_only_server_that_dies_makes_faults_of_the_trajectories_on_it(
    builder: PromptBuilder, servers: list[TurnServer], answered: int, tmp_path: Path
) -> None:
    server = servers[0]
    expected = undisturbed(builder, [server], tmp_path)
    rollouts = Rollouts(builder, [server], tmp_path / "killed")
    server.num_answers, server.most_answers = 0, answered
    thread = kill_when_all_wait(server)
    completions = rollouts.completions()
    thread.join()
    num_faults = sum(completion.finish_reason == "fault" for completion in completions)
    assert num_faults and sum(len(completion.turns) for completion in completions) == answered
    for completion, whole in zip(completions, expected, strict=True):
        if completion.finish_reason == "fault":
            assert completion.fault and completion.fault.kind == "server"
            assert completion.fault.message.startswith(f"The vLLM server {server.client().url} ")
            assert completion.environment_reward is None
            length = len(completion.token_ids) if completion.turns else 0
            assert completion.token_ids[:length].tolist() == whole[0][:length]
        else:
            assert facts(completion) == whole
    with pytest.raises(RolloutError, match="No server is left"):  # a new rollout does not begin with faults
        rollouts.completions()
    server.most_answers = 10**9
    server.start()
    with pytest.raises(RolloutError, match="No server is left"):  # it has no weights of the run
        rollouts.completions()
    rollouts.engine.sync(Adapter(), 1)
    assert list(map(facts, rollouts.completions())) == expected


@pytest.mark.parametrize("has_adapter", [True, False])
def test_a_server_that_has_restarted_between_two_turns_is_noticed(
    builder: PromptBuilder, servers: list[TurnServer], has_adapter: bool, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    expected = undisturbed(builder, servers, tmp_path)

    def restart() -> None:
        servers[0].kill()
        servers[0].start()

    all_call = threading.Barrier(NUM, action=restart)

    def wait_once(number: int) -> None:
        """Wait until all completions are in their first call, and no turn is sampled. Then restart a server."""
        if servers[0].label == "ours/1":
            all_call.wait(20)

    monkeypatch.setattr(Counter, "_called", staticmethod(wait_once))
    rollouts = Rollouts(builder, servers, tmp_path / "restarted")
    rollouts.engine.has_adapter = has_adapter
    assert list(map(facts, rollouts.completions())) == expected
    assert "has restarted, and was not sent the run's weights yet. The run continues without it" in caplog.text
    rollouts.engine.sync(Adapter(), 2)
    assert f"{servers[0].client().url} answers again, and is sent the run's weights" in caplog.text
    assert [server.label for server in servers] == ["ours/2", "ours/2"] and len(rollouts.engine.live) == 2


def test_a_server_that_comes_back_with_other_settings_stays_out(
    builder: PromptBuilder, servers: list[TurnServer], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rollouts = Rollouts(builder, servers, tmp_path)
    rollouts.engine.expected = {"weight_transfer": "nccl"}
    lost, live = rollouts.engine.live
    rollouts.engine.live = [live]
    rollouts.engine.sync(Adapter(), 2)
    assert rollouts.engine.live == [live] and "needs nccl" in caplog.text
    rollouts.engine.expected = {}
    servers[0].kill()
    rollouts.engine.sync(Adapter(), 3)
    assert rollouts.engine.live == [live]
    servers[0].start()
    rollouts.engine.sync(Adapter(), 4)
    assert rollouts.engine.live == [lost, live]


def test_a_server_that_the_run_stops_makes_no_faults(
    builder: PromptBuilder, servers: list[TurnServer], tmp_path: Path
) -> None:
    rollouts = Rollouts(builder, servers[:1], tmp_path)
    rollouts.engine.stop_servers = servers[0].kill
    servers[0].most_answers = 5
    threading.Timer(1.0, rollouts.engine.close).start()
    with pytest.raises(RolloutError, match="The run has ended"):
        rollouts.completions()
