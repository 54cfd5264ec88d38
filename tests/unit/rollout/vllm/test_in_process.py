"""Sleep mode and adapters of vLLM in this process. vLLM is a stand-in: its CPU build has no sleep mode."""

import os
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rl_vlm.checkpoint.random_states import random_states, restore_random_states
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import ConfigError, RolloutError
from rl_vlm.model.families import TokenRules
from rl_vlm.rollout.agreement import AgreementCheck
from rl_vlm.rollout.engine import SyncedEngine
from rl_vlm.rollout.vllm import in_process
from rl_vlm.rollout.vllm.in_process import VLLMEngine
from rl_vlm.types import (
    MicroBatch,
    PolicyOutput,
    Progress,
    Prompt,
    RolloutRequest,
    Sample,
    Sampling,
    ScoredGroup,
    SubGroup,
)  # fmt: skip
from tests.helpers.tiny_run import make_config

TAGS = {"weights", "kv_cache"}
SAMPLING = Sampling(num_generations=2, max_completion_length=3, temperature=1.0, seed=0)
REQUEST = RolloutRequest("g", Prompt(Sample("s", [], [], {}, ""), torch.tensor([1, 2]), {}, {}))
LOST = "lost"
RANKS = Ranks()


class StandIn:
    """`vllm.LLM` whose model is two numbers. A token's log-prob is minus their sum."""

    def __init__(self, ignores_adapters: bool = False, loses_adapter: bool = False) -> None:
        self.ignores_adapters, self.loses_adapter = ignores_adapters, loses_adapter
        self.calls: list[str] = []
        self.asleep: set[str] = set()
        self.level = 0
        self.weights: Any = 1.0
        self.adapter = 0.0
        self.version = ""
        self.model_config = SimpleNamespace(max_model_len=64)
        self.llm_engine = SimpleNamespace(
            step=lambda: None, add_lora=self.add_lora, reset_encoder_cache=lambda: None,
            vllm_config=SimpleNamespace(lora_config=None),
        )  # fmt: skip

    def sleep(self, level: int) -> None:
        """vLLM frees all memory or none: it does not look at what is already free."""
        assert not self.asleep
        self.calls.append(f"sleep {level}")
        self.asleep, self.level = set(TAGS), level
        if level == 2:
            self.weights = LOST

    def wake_up(self, tags: list[str]) -> None:
        assert {*tags} <= self.asleep
        self.calls.append(f"wake {' '.join(tags)}")
        self.asleep -= {*tags}
        if not self.asleep and self.loses_adapter:
            self.adapter = 0.0

    def add_lora(self, request: Any) -> None:
        self.calls.append("adapter")
        if not self.ignores_adapters and "weights" not in self.asleep:
            self.adapter = float((Path(request.path) / "adapter").read_text())

    def update_weights(self, _: Any) -> None:
        assert "weights" not in self.asleep
        self.calls.append("weights")
        ((_, weight),) = Receiver.handed_over
        self.weights = weight.item()

    def generate(self, prompts: list[Any], params: list[Any], lora_request: Any, use_tqdm: bool) -> list[Any]:
        assert not self.asleep
        self.calls.append("generate")
        value = SimpleNamespace(logprob=-(self.weights + (self.adapter if lora_request else 0.0)))
        completion = SimpleNamespace(
            token_ids=[5, 6], logprobs=[{5: value}, {6: value}], finish_reason="stop",
            weight_versions=[SimpleNamespace(version=self.version)],
        )  # fmt: skip
        return [
            SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[completion] * param.n)
            for prompt, param in zip(prompts, params, strict=True)
        ]

    def update_weight_version(self, version: str) -> None:
        self.version = version

    def reset_prefix_cache(self) -> bool:
        return True

    def get_metrics(self) -> list[Any]:
        return []

    def start_weight_update(self) -> None: ...
    def finish_weight_update(self) -> None: ...
    def reset_mm_cache(self) -> None: ...


class Receiver:
    handed_over: Any = ()


@dataclass
class Source:
    """The policy's side: its base weight, and the value of its adapter."""

    sends_adapter: bool
    weight: float = 1.0
    adapter: float = 0.0
    is_sharded: bool = False

    def save_adapter(self, directory: Path) -> int:
        return (directory / "adapter").write_text(str(self.adapter))

    def trained_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", torch.tensor(self.weight)

    def join_gathering(self) -> None: ...

    def outputs(self, groups: Sequence[ScoredGroup]) -> list[tuple[MicroBatch, PolicyOutput]]:
        """Return the log-probs of the policy for the groups' completions."""
        batch = MicroBatch([SubGroup(group, [*range(len(group.group.completions))]) for group in groups], shared=True)
        logprobs_NT = torch.full((len(batch.completions), 2), -(self.weight + self.adapter))
        return [(batch, PolicyOutput(logprobs_NT, torch.zeros_like(logprobs_NT)))]


class Renderer:
    processor = SimpleNamespace(tokenizer=SimpleNamespace(decode=lambda ids, **_: "text"))

    def unexpanded_ids(self, sample: object) -> list[int]:
        return [1, 2]


@pytest.fixture(autouse=True)
def modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put stand-ins in the place of vLLM's modules, which take half a minute to import."""

    def lora_request(name: str, number: int, path: str, load_inplace: bool = False) -> Any:
        return SimpleNamespace(path=path)

    contents = {
        "vllm": {"SamplingParams": SimpleNamespace},
        "vllm.exceptions": {"VLLMValidationError": ValueError},
        "vllm.lora": {},
        "vllm.lora.request": {"LoRARequest": lora_request},
        "rl_vlm.rollout.vllm.receiver": {"WeightReceiver": Receiver},
    }
    for name, values in contents.items():
        module = ModuleType(name)
        vars(module).update(values)
        monkeypatch.setitem(sys.modules, name, module)


def make_engine(
    monkeypatch: pytest.MonkeyPatch, llm: StandIn, keeps_weights: bool = True, kind: type[VLLMEngine] = VLLMEngine
) -> VLLMEngine:
    monkeypatch.setattr(in_process, "start_vllm", lambda *_: llm)
    return kind({"enable_sleep_mode": True}, TokenRules([], []), Renderer(), keeps_weights=keeps_weights)


def test_the_cache_is_reallocated_after_the_weights_are_sent(monkeypatch):
    llm = StandIn()
    engine = SyncedEngine(make_engine(monkeypatch, llm, keeps_weights=False), Source(sends_adapter=False), RANKS)
    for version in (0, 1):
        engine.sync(version)
        for _ in range(3):  # the window, a round of resampling, the check
            engine.generate([REQUEST], SAMPLING)
        engine.sleep()
        engine.sleep()
    first = "weights generate generate generate sleep 2"
    assert " ".join(llm.calls) == f"{first} wake weights weights wake kv_cache generate generate generate sleep 2"


def test_weights_that_are_not_kept_are_sent_again(monkeypatch):
    engine = SyncedEngine(make_engine(monkeypatch, StandIn(), keeps_weights=False), Source(False), RANKS)
    engine.sync(3)
    assert engine.sent_version == 3
    engine.sleep()
    assert engine.sent_version == -1
    engine.sync(3)
    engine.generate([REQUEST], SAMPLING)

    kept = SyncedEngine(make_engine(monkeypatch, StandIn()), Source(sends_adapter=False), RANKS)
    kept.sync(3)
    kept.sleep()
    assert kept.sent_version == 3
    kept.generate([REQUEST], SAMPLING)


def test_an_engine_that_is_half_awake_sleeps_again(monkeypatch):
    llm = StandIn()
    engine = make_engine(monkeypatch, llm)
    engine.sleep()
    engine.sync(Source(sends_adapter=False), 1)
    engine.sleep()
    assert llm.asleep == TAGS


class SendsToSleeping(VLLMEngine):
    """Sends weights before memory is reallocated."""

    def wake_up(self, *tags: str) -> None:
        if "kv_cache" in tags:
            super().wake_up(*tags)


FAULTS = {
    "none": (StandIn, VLLMEngine),
    "an adapter that is never sent": (lambda: StandIn(ignores_adapters=True), VLLMEngine),
    "an adapter that is sent to a sleeping engine": (StandIn, SendsToSleeping),
    "an adapter that is lost at wake-up": (lambda: StandIn(loses_adapter=True), VLLMEngine),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_lost_adapter_ends_the_run_at_the_next_check(fault: str, monkeypatch, tmp_path):
    """Each step trains the adapter by 0.04 per token. Weights are sent every second step, and checked every third."""
    make, kind = FAULTS[fault]
    source = Source(sends_adapter=True)
    engine = SyncedEngine(make_engine(monkeypatch, make(), kind=kind), source, RANKS)
    config = make_config("m", tmp_path, engine="vllm", weight_sync_steps=2, agreement_steps=3)
    check, progress, checked = AgreementCheck(config, RANKS, engine), Progress(max_steps=9), []

    def step() -> None:
        if engine.sent_version < progress.policy_version - 1:
            engine.sync(progress.policy_version)
        groups = [scored(group) for group in engine.generate([REQUEST], SAMPLING)]
        if check.is_due(progress):
            checked.append(progress.global_step)
            check.run(progress, groups, source.outputs)
        engine.sleep()
        source.adapter += 0.04
        progress.global_step += 1
        progress.policy_version += 1

    engine.sync(0)
    if fault == "none":
        for _ in range(9):
            step()
        assert checked == [0, 2, 6]
        return
    with pytest.raises(RolloutError) as error:
        for _ in range(9):
            step()
    assert checked[-1] in (2, 6)
    assert f"rollouts before step {checked[-1] + 1} differ" in str(error.value)
    assert "The mean was 0 at the first check, before step 1." in str(error.value)


def scored(group: Any) -> ScoredGroup:
    size = len(group.completions)
    zeros = torch.zeros(size)
    return ScoredGroup(group, zeros[:, None], zeros, zeros, torch.ones(size, dtype=torch.bool), has_variance=False)


class Envs:
    """In the place of `vllm.envs`, which reads a variable at each access until vLLM's first start."""

    def __init__(self) -> None:
        self.kept: list[bool | None] = []

    @property
    def VLLM_USE_V2_MODEL_RUNNER(self) -> bool | None:
        value = os.environ.get("VLLM_USE_V2_MODEL_RUNNER")
        return self.kept[0] if self.kept else None if value is None else bool(int(value))


def start(envs: Envs, seed: int) -> None:
    """Start an engine as vLLM does: it seeds the generators, and keeps its environment."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    envs.kept.append(envs.VLLM_USE_V2_MODEL_RUNNER)


@pytest.fixture
def envs(monkeypatch: pytest.MonkeyPatch) -> Envs:
    envs, module = Envs(), sys.modules["vllm"]
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    vars(module).update(envs=envs, LLM=lambda **arguments: start(envs, arguments["seed"]))
    vars(sys.modules["rl_vlm.rollout.vllm.receiver"]).update(register=lambda: None)
    return envs


@pytest.mark.parametrize(("runner", "value"), [("auto", None), ("v1", False), ("v2", True)])
def test_vllm_starts_with_the_model_runner_of_the_settings(runner: str, value: bool | None, envs: Envs):
    in_process.start_vllm({"seed": 0}, runner)
    assert envs.kept == [value]
    assert "VLLM_USE_V2_MODEL_RUNNER" not in os.environ
    in_process.start_vllm({"seed": 0}, runner)
    for other in {"auto", "v1", "v2"} - {runner}:
        with pytest.raises(ConfigError, match=f"vllm_model_runner: {other} has no effect, because vLLM has already"):
            in_process.start_vllm({"seed": 0}, other)


def test_vllm_changes_neither_the_random_generators_nor_the_threads(envs: Envs):
    def drawn() -> tuple[float, float, float, int]:
        return random.random(), np.random.rand(), torch.rand(()).item(), torch.get_num_threads()

    states = random_states()
    expected = drawn()
    restore_random_states(states)
    in_process.start_vllm({"seed": 7})
    assert drawn() == expected
