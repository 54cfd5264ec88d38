"""Partial rollouts: groups whose generation can span several rollouts and windows.

max_rollout_tokens = 2, windows of two groups; the tokens of each group's longest completion, by rollout:

    rollout    0     1     2
    a          ..                    window 0 (rollout 0): a, c, which are finished first
    b          ..    ..    .         window 1 (rollouts 1 and 2): b, d
    c          .
    d          ..    .
    e                ..    ..   …    e and f start in window 1 and continue in window 2
    f                ..    ..   …

(Kimi k1.5, https://arxiv.org/abs/2501.12599, section 2.6.)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_vlm.config.schema import RolloutConfig
from rl_vlm.data.sampler import Draw
from rl_vlm.errors import CheckpointError
from rl_vlm.rollout.states import Builder, group_from_state, group_state, prompt_from_state, prompt_state
from rl_vlm.types import Group, RolloutRequest


@dataclass(frozen=True)
class InFlight:
    """A drawn row and its group so far."""

    draw: Draw
    request: RolloutRequest

    @property
    def finished(self) -> Group | None:
        """Return the group if none of its completions is paused, else None."""
        group = self.request.partial
        return None if group is None or any(c.is_paused for c in group.completions) else group

    def state_dict(self) -> dict[str, Any]:
        """Return everything but prompts and pixels, which `from_state` builds again."""
        partial = None if self.request.partial is None else group_state(self.request.partial)
        of_prompt = prompt_state(self.draw, self.request.prompt)
        return {**of_prompt, "group_id": self.request.group_id, "partial": partial}

    @classmethod
    def from_state(cls, state: dict[str, Any], builder: Builder) -> InFlight:
        """Restore `state_dict`. `builder` makes the prompt of its draw."""
        draw, prompt = prompt_from_state(state, builder)
        partial = None if state["partial"] is None else group_from_state(state["partial"], prompt, builder)
        return cls(draw, RolloutRequest(state["group_id"], partial.prompt if partial else prompt, partial))


class PartialRollouts:
    """The groups of one rank that are in flight between windows."""

    def __init__(self, max_rollout_tokens: int) -> None:
        self.max_rollout_tokens = max_rollout_tokens
        self.in_flight: list[InFlight] = []

    def restore(self, in_flight: list[InFlight]) -> None:
        """Restore the groups in flight, from a checkpoint or from before a step that failed."""
        self.in_flight = in_flight

    def finish(
        self,
        requests: Mapping[Draw, RolloutRequest],
        num: int,
        generate: Callable[[list[RolloutRequest]], list[Group]],
    ) -> dict[Draw, Group]:
        """Add the requests to those in flight, generate until `num` groups are finished, and return the oldest."""
        new = [InFlight(draw, request) for draw, request in requests.items()]
        finished, self.in_flight = roll_on([*self.in_flight, *new], num, generate)
        return finished


def check_in_flight(in_flight: Sequence[InFlight], rollout: RolloutConfig) -> None:
    """Raise CheckpointError if paused completions of a checkpoint cannot be continued with these settings."""
    longest = max((group.request.num_paused_tokens for group in in_flight if not group.finished), default=0)
    if (in_flight and rollout.max_rollout_tokens is None) or longest >= rollout.max_completion_length:
        raise CheckpointError(
            f"the checkpoint holds paused completions of up to {longest} tokens, which this run cannot continue with "
            f"rollout.max_rollout_tokens {rollout.max_rollout_tokens} and rollout.max_completion_length "
            f"{rollout.max_completion_length}; resume with the settings of the checkpoint's run"
        )


def roll_on(
    in_flight: Sequence[InFlight], num: int, generate: Callable[[list[RolloutRequest]], list[Group]]
) -> tuple[dict[Draw, Group], list[InFlight]]:
    """Generate until `num` groups are finished. Return the `num` oldest, and the groups that stay in flight."""
    flight = list(in_flight)
    while len(finished := {one.draw: one.finished for one in flight if one.finished}) < num:
        unfinished = [i for i, one in enumerate(flight) if not one.finished]
        groups = generate([flight[i].request for i in unfinished])
        for i, group in zip(unfinished, groups, strict=True):
            flight[i] = InFlight(flight[i].draw, RolloutRequest(group.group_id, group.prompt, group))
    taken = dict(list(finished.items())[:num])
    return taken, [one for one in flight if one.draw not in taken]
