"""Groups that take several rollouts, from a generator that needs a known number of them for each."""

from typing import Any

import pytest
import torch

from rl_vlm.config.schema import RolloutConfig
from rl_vlm.data.sampler import Draw
from rl_vlm.errors import CheckpointError
from rl_vlm.rollout.partial import InFlight, check_in_flight, roll_on
from rl_vlm.types import Completion, Group, Prompt, RolloutRequest, Sample
from tests.helpers.builders import Rebuilder


def prompt(name: str) -> Prompt:
    return Prompt(Sample(name, [], [], {}, "?"), torch.tensor([1]), {}, {})


def new(names: str) -> list[InFlight]:
    """Draws 0, 1, … of rows with these names."""
    return [InFlight(Draw(0, "abcdef".index(name)), RolloutRequest(name, prompt(name))) for name in names]


class Rollouts:
    """One token per rollout and completion; the first completion ends with it, the second after `lengths` tokens."""

    def __init__(self, **lengths: int) -> None:
        self.lengths = lengths
        self.version = 0
        self.calls: list[str] = []

    def __call__(self, requests: list[RolloutRequest]) -> list[Group]:
        self.calls.append("".join(request.group_id for request in requests))
        groups = [
            request.group([self.further(request, i) for i in request.paused(2)], self.version) for request in requests
        ]
        self.version += 1
        return groups

    def further(self, request: RolloutRequest, index: int) -> Completion:
        token_ids = torch.cat([request.paused(2)[index].token_ids, torch.tensor([self.version])])
        ends = index == 0 or len(token_ids) == self.lengths[request.group_id]
        return Completion(token_ids, torch.zeros(len(token_ids)), "stop" if ends else "paused", "")


def names(found: dict[Draw, Group]) -> str:
    return "".join(group.group_id for group in found.values())


def second(group: Group) -> list[int]:
    """The versions that sampled each token of the second completion."""
    return group.completions[1].token_ids.tolist()


def test_the_first_to_finish_are_taken_and_the_others_go_on_by_newer_weights():
    rollouts = Rollouts(a=1, b=3, c=1, d=2)
    finished, in_flight = roll_on(new("abcd"), 2, rollouts)
    assert (names(finished), rollouts.calls) == ("ac", ["abcd"])
    finished, in_flight = roll_on(in_flight, 2, rollouts)
    assert (names(finished), in_flight) == ("bd", [])
    assert rollouts.calls == ["abcd", "bd", "b"]
    groups = list(finished.values())
    assert [second(group) for group in groups] == [[0, 1, 2], [0, 1]]
    assert [group.completions[0].token_ids.tolist() for group in groups] == [[0], [0]]  # which ended at once
    assert [group.policy_version for group in groups] == [0, 0]


def test_what_is_finished_beyond_the_window_waits_for_the_next():
    rollouts = Rollouts(a=2, b=1, c=1, d=1)
    finished, in_flight = roll_on(new("abcd"), 2, rollouts)
    assert names(finished) == "bc"
    assert [one.finished is not None for one in in_flight] == [False, True]
    finished, in_flight = roll_on(in_flight, 1, rollouts)
    assert names(finished) == "d" and rollouts.calls == ["abcd"]  # nothing had to be sampled
    finished, in_flight = roll_on(in_flight, 1, rollouts)
    assert (names(finished), in_flight, rollouts.calls) == ("a", [], ["abcd", "a"])


@pytest.mark.parametrize("num", [2, 3])
def test_without_pauses_one_rollout_is_a_window(num: int):
    rollouts = Rollouts(a=1, b=1, c=1)
    finished, in_flight = roll_on(new("abc")[:num], num, rollouts)
    assert (names(finished), in_flight, len(rollouts.calls)) == ("abc"[:num], [], 1)


def test_what_is_in_flight_survives_a_checkpoint():
    _, in_flight = roll_on(new("abc"), 1, Rollouts(a=1, b=3, c=1))
    in_flight += new("d")
    built: list[Draw] = []

    def build(draw: Draw) -> Prompt:
        built.append(draw)
        return prompt("abcdef"[draw.row])

    states: list[dict[str, Any]] = [one.state_dict() for one in in_flight]
    again = [InFlight.from_state(state, Rebuilder(build)) for state in states]
    assert built == [one.draw for one in in_flight]
    assert [one.request.group_id for one in again] == ["b", "c", "d"]
    assert [one.finished is not None for one in again] == [False, True, False]
    assert again[0].request.partial is not None and second(again[0].request.partial) == [0]
    assert again[2].request.partial is None
    finished, _ = roll_on(again, 3, Rollouts(b=3, d=1))
    assert names(finished) == "bcd"


def test_paused_completions_of_a_checkpoint_need_room_for_another_token():
    _, in_flight = roll_on(new("abc"), 1, Rollouts(a=9, b=9, c=1))
    _, in_flight = roll_on([*in_flight, *new("d")], 1, Rollouts(a=9, b=9, d=1))
    assert [one.request.num_paused_tokens for one in in_flight] == [2, 2]

    def check(max_completion_length: int, max_rollout_tokens: int | None = 1) -> None:
        settings = {"max_completion_length": max_completion_length, "max_rollout_tokens": max_rollout_tokens}
        check_in_flight(in_flight, RolloutConfig.model_validate(settings))

    check(3)
    for refused in ((2, 1), (3, None)):
        with pytest.raises(CheckpointError, match=r"paused completions of up to 2 tokens, .*max_completion_length \d"):
            check(*refused)
