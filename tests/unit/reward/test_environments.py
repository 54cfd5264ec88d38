"""Rewards and faults of environments in the reward table."""

import logging
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from rewards.contract import Fault, FaultKind
from rl_vlm.algorithm.advantages import compute_advantages
from rl_vlm.config.schema import RewardsConfig, RewardSpec
from rl_vlm.errors import RewardError
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.rollout.scoring import failing, weighted_rewards
from rl_vlm.types import Completion, FaultKey, Group, Prompt, RewardTable, Sample, TrainerState

STATE = TrainerState(global_step=0, max_steps=1, epoch=0.0)


def done(text: str, name: str = "Game", **fields) -> Completion:
    return Completion(torch.arange(2), torch.zeros(2), "stop", text, environment_name=name, **fields)


def failed(kind: FaultKind, message: str) -> Completion:
    return replace(done("9"), finish_reason="fault", fault=Fault(kind, message), environment_reward=1.0)


def group(*completions: Completion, sample_id: str = "s0", **columns) -> Group:
    prompt = Prompt(Sample(sample_id, [], [], columns, "?"), torch.tensor([1]), {}, {})
    return Group(sample_id, prompt, list(completions), 0)


def scored(*groups: Group, functions: list | None = None, environments: list[str] | None = None) -> RewardTable:
    config = RewardsConfig(reward_funcs=["mine.py:number"] if functions is None else functions)
    with RewardSuite(config, environments or []) as suite:
        return suite.score(groups, STATE)


def rounded(table: RewardTable) -> list:
    return [[[None if math.isnan(s) else s for s in row] for row in rows] for rows in table.scores_PGF.tolist()]


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A function `number` that notes the completions of each call."""
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(
        "seen = []\n"
        "def number(completions, log_extra):\n"
        "    seen.append(completions)\n"
        "    log_extra('read', completions)\n"
        "    return [float(text) for text in completions]\n"
    )
    yield lambda: sys.modules[str(tmp_path / "mine.py")].seen
    sys.modules.pop(str(tmp_path / "mine.py"), None)


def test_a_fault_is_masked_and_no_function_is_called_with_it(mine) -> None:
    table = scored(
        group(done("1"), failed("timeout", "crop took longer than 60 s"), done("3")),
        group(
            failed("reset", "no port"),
            failed("reset", "no port"),
            failed("connection", "lost\nat once"),
            sample_id="s1",
        ),
    )
    assert mine() == [["1", "3"]]
    assert rounded(table) == [[[1.0], [None], [3.0]], [[None], [None], [None]]]
    assert table.valid_PG.tolist() == [[True, False, True], [False, False, False]]
    assert table.faulted_PG.tolist() == [[False, True, False], [True, True, True]]
    assert table.breakdown["read"] == [["1", None, "3"], [None, None, None]]
    assert table.fault_counts == {
        ("environment", "timeout"): 1, ("environment", "reset"): 2, ("environment", "connection"): 1
    }  # fmt: skip
    assert list(table.fault_messages.values()) == [
        "environment/timeout: crop took longer than 60 s; masked completions of samples: s0 [1]",
        "environment/reset: no port; masked completions of samples: s1 [0, 1]",
        "environment/connection: lost at once; masked completions of samples: s1 [2]",
    ]
    assert table.faults[0, 1] == ["environment/timeout: crop took longer than 60 s"]


@pytest.mark.parametrize("settings", [{"calls": "group"}, {"timeout": 60.0}, {"applies_to": {"kind": ["a"]}}])
def test_a_fault_is_masked_however_functions_are_called(settings: dict) -> None:
    groups = (
        group(done("1"), failed("ids", "differ"), kind="a"),
        group(failed("ids", "differ"), failed("ids", "differ"), sample_id="s1", kind="a"),
        group(failed("ids", "differ"), done("4"), sample_id="s2", kind="b"),
    )
    spec = RewardSpec(function="mine.py:number", **settings)
    last = None if "applies_to" in settings else 4.0
    table = scored(*groups, functions=[spec])
    assert rounded(table) == [[[1.0], [None]], [[None], [None]], [[None], [last]]]
    assert table.fault_counts.pop(FaultKey("environment", "ids")) == 4
    assert table.fault_counts == ({("all", "not_applicable"): 1} if last is None else {})


def test_a_fault_does_not_change_the_advantages_of_others() -> None:
    def advantages(*completions: Completion) -> list[float]:
        table = scored(group(*completions))
        rewards_PG = weighted_rewards(table, [1.0])
        return compute_advantages(rewards_PG, table.valid_PG, "group").advantages_PG[0].tolist()

    first, none, second = advantages(done("1"), failed("timeout", "slow"), done("3"))
    assert none == 0.0
    assert [first, second] == advantages(done("1"), done("3"))


def test_faults_are_logged_once_per_kind(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        scored(group(failed("reset", "no port"), failed("reset", "no screen")))
    assert [record.message for record in caplog.records] == [
        "environment/reset: no port; masked completions of samples: s0 [0]; later faults of this kind are counted, not "
        "logged"
    ]


def test_an_environment_is_a_reward_after_the_functions() -> None:
    groups = (
        group(done("1", environment_reward=0.5), done("2")),
        group(done("3", "Shop", environment_reward=2.0), failed("timeout", "slow"), sample_id="s1"),
    )
    table = scored(*groups, environments=["Game", "Shop"])
    assert table.names == ["number", "Game", "Shop"]
    assert rounded(table) == [
        [[1.0, 0.5, None], [2.0, None, None]],
        [[3.0, None, 2.0], [None, None, None]],
    ]
    assert table.valid_PG.tolist() == [[True, True], [True, False]]


def test_an_environment_can_be_the_only_reward() -> None:
    table = scored(
        group(done("", environment_reward=0.0), done("", environment_reward=1.0)), functions=[], environments=["Game"]
    )
    assert (table.names, rounded(table), table.fault_counts) == (["Game"], [[[0.0], [1.0]]], {})


def test_a_reward_that_is_no_number_is_a_fault_of_its_class() -> None:
    table = scored(
        group(done("1", environment_reward=math.nan), done("1", environment_reward=1.0)), environments=["Game"]
    )
    assert rounded(table) == [[[1.0, None], [1.0, 1.0]]]
    assert (table.valid_PG.tolist(), table.fault_counts) == ([[False, True]], {("Game", "nan"): 1})


def test_weights_are_those_of_the_functions_and_then_1() -> None:
    config = RewardsConfig(reward_funcs=["mine.py:number", "exact_match"], reward_weights=[0.5, 2.0])
    suite = RewardSuite(config, ["Game"])
    assert (suite.names, suite.weights) == (["number", "exact_match", "Game"], [0.5, 2.0, 1.0])
    assert (suite.decisive, suite.solved_from["Game"]) == ("exact_match", 1.0)
    assert [reward.name for reward in suite.functions] == ["number", "exact_match"]


@pytest.mark.parametrize(
    ("functions", "environments", "message"),
    [
        (["mine.py:number"], ["number"], "2 rewards are called 'number', as a class with `get_reward`: rename one"),
        (["mine.py:number"], ["reward"], "cannot be called 'reward'"),
        ([{"function": "exact_match", "name": "environment"}], ["Game"], "cannot be called 'environment'"),
    ],
)
def test_what_is_refused(functions: list, environments: list[str], message: str) -> None:
    with pytest.raises(RewardError, match=message):
        RewardSuite(RewardsConfig(reward_funcs=functions), environments)


def test_a_run_needs_a_reward_with_a_weight() -> None:
    without_weight = RewardSpec(function="exact_match", weight=0.0)
    choices: list[list[str | RewardSpec]] = [[], [without_weight]]
    for functions in choices:
        with pytest.raises(RewardError, match="no reward has a weight: set `rewards"):
            RewardSuite(RewardsConfig(reward_funcs=functions), []).check_weights()
    RewardSuite(RewardsConfig(reward_funcs=[without_weight]), ["Game"]).check_weights()


def test_a_run_without_environments_may_have_functions_of_weight_0() -> None:
    assert RewardSuite(RewardsConfig(reward_funcs=[RewardSpec(function="exact_match", weight=0.0)])).weights == [0.0]
    assert scored(environments=["Game"]).scores_PGF.shape == (0, 0, 2)


@pytest.mark.parametrize(
    ("faults", "expected"),
    [
        (["f/nan"], "reward functions"),
        (["environment/reset"], "environments"),
        (["f/nan", "environment/reset"], "environments and reward functions"),
    ],
)
def test_errors_name_what_failed(faults: list[str], expected: str) -> None:
    assert failing(map(FaultKey.read, faults)) == expected


@pytest.mark.parametrize(("arguments", "expected"), [("environments, **columns", True), ("**columns", False)])
def test_environments_are_kept_only_for_a_function_that_names_them(arguments: str, expected: bool) -> None:
    Path("kept.py").write_text(f"def score(completions, {arguments}):\n    return [0.0 for _ in completions]\n")
    with RewardSuite(RewardsConfig(reward_funcs=["kept.py:score"]), ["Game"]) as suite:
        assert suite.reads_environments == expected
