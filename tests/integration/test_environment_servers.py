"""Runs whose trajectories advance each on its own: they are resumed bitwise, and real servers sample as in waves."""

from __future__ import annotations

import copy
import os
import secrets
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from rl_vlm.config.schema import RunConfig, VLLMConfig
from rl_vlm.data.prompts import PromptBuilder, build_prompt, load_processor
from rl_vlm.data.samples import load_rows
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.log.metrics import MetricsLog
from rl_vlm.model.families import TokenRules
from rl_vlm.model.loading import load_policy
from rl_vlm.rollout.engine import Submitted
from rl_vlm.rollout.environments.build import build_trajectories, choose_turns
from rl_vlm.rollout.environments.loading import load_toolbox
from rl_vlm.rollout.hf import HFEngine
from rl_vlm.rollout.sampling import sampling_params
from rl_vlm.rollout.vllm.arguments import engine_arguments
from rl_vlm.rollout.vllm.client import VLLMClient
from rl_vlm.rollout.vllm.process import ServerProcess, server_environment, wait_until_healthy
from rl_vlm.rollout.vllm.servers import VLLMServers
from rl_vlm.rollout.weights import PolicyWeights
from rl_vlm.run import build as build_module
from rl_vlm.run.run import train
from rl_vlm.types import Group, RolloutRequest, Sampling
from tests.helpers import tiny_run
from tests.helpers.calling import NUM_LOOKS, Shades, Steps, calling_checkpoint
from tests.helpers.resuming import assert_same_run, resumed, train_until
from tests.helpers.tiers import in_tiers

NUM_STEPS = 11


class LongTail(Steps):
    """Takes steps of unlike and random lengths."""

    def step(self, text: str) -> Any:
        time.sleep(time.time_ns() // 1000 % 17 / 1000)
        return super().step(text)


class OneByOne(HFEngine):
    """A `ConcurrentEngine` with weights of its own. It samples turns one by one, so their order changes no rounding."""

    def sync(self, source: Any, version: int) -> int:
        self.model.load_state_dict(source.policy.transformer.state_dict())
        return super().sync(source, version)

    @contextmanager
    def session(self, sampling: Sampling) -> Iterator[Any]:
        yield OneTurn(self, sampling)


class OneTurn:
    def __init__(self, engine: OneByOne, sampling: Sampling) -> None:
        self.engine, self.sampling = engine, sampling

    def submit(self, request: RolloutRequest) -> Submitted:
        future: Future[Any] = Future()
        future.set_result(self.engine.generate([request], self.sampling)[0])
        return Submitted(future, lambda group: group)


def one_by_one(config: RunConfig, _: str, weights: PolicyWeights, builder: PromptBuilder, *__: Any) -> HFEngine:
    engine = OneByOne.for_policy(copy.deepcopy(weights.policy), builder.processor.tokenizer, 1)
    engine.policy_version = -1
    return engine


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return calling_checkpoint(tmp_path_factory.mktemp("calling"))


def config_of(checkpoint: Path, output_dir: Path) -> RunConfig:
    """Windows of two updates, which are sampled one window ahead."""
    return tiny_run.make_config(
        checkpoint, output_dir, engine="vllm_server", max_staleness=1, environment=f"{__name__}:LongTail",
        environment_protocol="steps", environment_kwargs={"num_steps": 3}, reward_funcs=[], prompts_per_step=1,
        num_generations=3, max_completion_length=180, max_turns=3, steps_per_generation=2,
        gradient_accumulation_steps=1, max_steps=NUM_STEPS,
    )  # fmt: skip


@pytest.fixture(scope="module")
def straight(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "straight"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build_module, "training_engine", one_by_one)
        train(config_of(checkpoint, folder))
    return folder


@pytest.mark.parametrize("step", in_tiers(range(1, NUM_STEPS), set(), {6}))
def test_a_killed_run_whose_trajectories_advance_alone_goes_on_bitwise(
    checkpoint: Path, straight: Path, step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build_module, "training_engine", one_by_one)
    killed = config_of(checkpoint, tmp_path / "killed")
    train_until(step, killed, monkeypatch)
    train(resumed(killed))
    assert_same_run(tmp_path / "killed", straight, last=NUM_STEPS)
    lines = tiny_run.metric_lines(straight)
    assert [line["sampling/policy_version_lag"] for line in lines[:6]] == [0, 1, 2, 3, 2, 3]
    waits = [line.get("environment/engine_wait_fraction") for line in MetricsLog(straight / "metrics.jsonl").read()]
    assert all(wait is not None and 0 < wait <= 1 for wait in waits[::2]) and set(waits[1::2]) == {None}
    rows = [row for rows in tiny_run.completions(straight).values() for row in rows]
    assert len({row["num_turns"] for row in rows}) > 1


class Deadly(Shades):
    """Shows greys. One of the calls can kill the server."""

    _calls = 0
    _kills: tuple[int, int] | None = None
    """Number of the call that kills, and the process group of the server."""
    _lock = threading.Lock()

    def look(self, shade: int) -> list[dict[str, Any]]:
        """Look at a grey.

        Args:
            shade: The grey, from 0 to 255.
        """
        with Deadly._lock:
            Deadly._calls += 1
            if Deadly._kills is not None and Deadly._calls == Deadly._kills[0]:
                os.killpg(Deadly._kills[1], signal.SIGKILL)
        return super().look(shade)


class InWaves:
    """Servers as an engine that takes all requests at once."""

    def __init__(self, servers: VLLMServers) -> None:
        self.servers, self.policy_version, self.counters = servers, servers.policy_version, servers.counters
        self.num_waves = 0

    def generate(self, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Group]:
        self.num_waves += 1
        return self.servers.generate(requests, sampling)

    def sync(self, source: Any, version: int) -> int:
        return self.servers.sync(source, version)

    def sleep(self) -> bool:
        return True

    def close(self) -> None: ...


class Served:
    """A real server, which can be killed and started again on its port, and trajectories on it."""

    def __init__(self, checkpoint: Path, folder: Path) -> None:
        self.config = tiny_run.make_config(
            checkpoint, folder / "run", engine="vllm_server", environment=f"{__name__}:Deadly", num_generations=6,
            max_completion_length=220, max_turns=4, vllm_max_model_length=2048, max_num_seqs=16,
            reward_funcs=[NUM_LOOKS],
        )  # fmt: skip
        self.arguments = engine_arguments(self.config, str(checkpoint), lora_rank=None)
        self.log, self.token, self.process = folder / "server.log", secrets.token_urlsafe(), None
        self.start()
        self.policy = load_policy(self.config, str(checkpoint))
        builder = PromptBuilder(load_processor(str(checkpoint), self.config.model, self.config.data), self.config.data)
        toolbox = load_toolbox(self.config.rollout)
        turns = choose_turns(self.config, str(checkpoint), builder, toolbox)
        self.trajectories = build_trajectories(self.config, toolbox, turns, False, Ranks())
        model, tokenizer = self.policy.transformer, builder.processor.tokenizer
        tokens = TokenRules.of(model.config, model.generation_config, tokenizer)
        self.engine = VLLMServers([self.client], tokens, turns.builder, folder / "weights", True, {}, run="ours/")
        rows = load_rows(self.config.data, "train")
        self.requests = [RolloutRequest(str(i), build_prompt(rows, i, turns.builder)) for i in range(3)]

    def start(self) -> None:
        environment = server_environment(VLLMConfig(), self.token, None)
        port = None if self.process is None else self.process.port
        self.process = ServerProcess(self.arguments, environment, self.log, "127.0.0.1", port)
        self.client = VLLMClient(self.process.url, self.token, 240.0)
        wait_until_healthy([self.process], [self.client], 500.0)

    def sync(self, version: int) -> None:
        self.engine.sync(PolicyWeights(self.policy, "adapter"), version)

    def generate(self, engine: Any) -> list[Any]:
        sampling = sampling_params(self.config, 6, 1.0)
        groups = self.trajectories.generate(engine, self.requests, sampling)
        return [completion for group in groups for completion in group.completions]


def sampled(completions: Sequence[Any]) -> list[Any]:
    return [(c.token_ids.tolist(), c.finish_reason, c.environment_reward) for c in completions]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs vllm")
def test_a_real_server_samples_as_in_waves_and_is_killed_and_restarted(checkpoint: Path, tmp_path: Path) -> None:
    served = Served(checkpoint, tmp_path)
    try:
        served.sync(0)
        waves = InWaves(served.engine)
        expected = served.generate(waves)
        assert Counter(c.fault for c in expected) == {None: 18}
        assert waves.num_waves == max(len(c.turns) for c in expected) >= 3
        alone = served.generate(served.engine)
        assert sampled(alone) == sampled(expected)
        for one, other in zip(alone, expected, strict=True):
            assert (one.generator_logprobs - other.generator_logprobs).abs().max() <= 1e-4

        assert served.process is not None
        Deadly._calls, Deadly._kills = 0, (5, served.process.process.pid)
        killed = served.generate(served.engine)
        found = Counter(completion.finish_reason for completion in killed)
        assert found["fault"] >= 1 and found["stop"] >= 1
        for one, other in zip(killed, expected, strict=True):
            if one.finish_reason == "fault":
                assert one.fault.kind == "server"
                assert one.fault.message.startswith(f"The vLLM server {served.process.url} ")
            else:
                assert sampled([one]) == sampled([other])
        Deadly._kills = None
        served.process.stop()
        served.start()
        served.sync(1)
        again = served.generate(served.engine)
        assert sampled(again) == sampled(expected)
    finally:
        assert served.process is not None
        served.process.stop()
