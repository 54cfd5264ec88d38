"""What a run refuses about its tools, environments and reward functions, all at once."""

from typing import Any
from unittest.mock import Mock

import pytest

from rl_vlm.config.schema import RunConfig
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.errors import ConfigError, RewardError
from rl_vlm.rollout.environments.build import TurnFormats, build_trajectories, load_functions
from rl_vlm.rollout.environments.contract import Toolbox
from tests.helpers.threaded_ranks import on_ranks


class Stand:
    """Has no docstring at its tool."""

    def reset(self, **columns: Any) -> None: ...

    def look(self, x: int) -> str:
        return "dark"


class Lamp:
    def reset(self, **columns: Any) -> None: ...

    def get_reward(self) -> float:
        return 1.0


def mine(completions: list[Any], environments: list[Any]) -> list[float]:
    return [0.0 for _ in environments]


def config_of(rewards: list[Any], **rollout: Any) -> RunConfig:
    values = {"model": {"model_name_or_path": "none"}, "train": {"output_dir": "none"}}
    return RunConfig.model_validate(values | {"rewards": {"reward_funcs": rewards}, "rollout": rollout})


def test_all_functions_that_cannot_be_used_are_refused_in_one_error() -> None:
    config = config_of(["exactmatch", f"{__name__}:absent"], tools=["none.py:f"], environment=f"{__name__}:Stand")
    with pytest.raises(ConfigError) as caught:
        load_functions(config)
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        "rollout.tools", "rollout.environment", "reward function 'exactmatch'", f"reward function '{__name__}:absent'",
    ]  # fmt: skip
    assert lines[1].startswith(f"rollout.environment: {__name__}:Stand: the tool look cannot be described")


def test_errors_of_reward_functions_alone_are_a_reward_error() -> None:
    with pytest.raises(RewardError, match=r"(?s)function 'none_a': .*function 'none_b': "):
        load_functions(config_of(["none_a", "none_b"]))
    with pytest.raises(RewardError, match=r"2 reward functions are called 'a'.*\n2 reward functions are called 'b'"):
        load_functions(config_of([{"function": "choice", "name": name} for name in ("a", "b", "a", "b")]))


def test_a_function_may_read_environments_that_cannot_be_loaded() -> None:
    """Else it would be a second error, which goes away with the first."""
    with pytest.raises(ConfigError) as caught:
        load_functions(config_of([f"{__name__}:mine"], environment=f"{__name__}:absent"))
    assert str(caught.value).startswith(f"rollout.environment: {__name__}:absent: ")
    assert "\n" not in str(caught.value)


def test_functions_that_can_be_used_are_loaded() -> None:
    toolbox, rewards = load_functions(config_of([f"{__name__}:mine"], environment=f"{__name__}:Lamp"))
    assert list(toolbox.kinds) == [None]
    assert rewards.names == ["mine", "Lamp"]


@pytest.mark.parametrize(("ranks_per_model", "expected"), [(1, [True, False]), (2, [True, True])])
def test_ranks_that_share_a_model_advance_together(ranks_per_model: int, expected: list[bool]) -> None:
    """Otherwise each goes on by itself, since ranks can sample groups again unequally often."""
    vllm = {"vllm_tensor_parallel_size": ranks_per_model}
    config = RunConfig.model_validate(config_of([], engine="vllm").model_dump() | {"vllm": vllm})

    def goes_on(ranks: Ranks) -> bool:
        trajectories = build_trajectories(config, Toolbox(), TurnFormats({}, Mock(spec=PromptBuilder)), False, ranks)
        return trajectories.goes_on(has_work=ranks.is_main)

    assert on_ranks(2, goes_on) == expected
