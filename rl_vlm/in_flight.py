"""Groups between their first token and their last. With partial rollouts that can take several rollouts and windows.

max_rollout_tokens = 2, windows of two groups; the tokens of each group's longest completion, by rollout:

    rollout    0     1     2
    a          ..                    window 0 (rollout 0): a, c, which are finished first
    b          ..    ..    .         window 1 (rollouts 1 and 2): b, d
    c          .
    d          ..    .
    e                ..    ..   …    e and f are new in window 1, and go on in window 2
    f                ..    ..   …

(Kimi k1.5, https://arxiv.org/abs/2501.12599, section 2.6.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rl_vlm.sampler import Draw
from rl_vlm.types import Group, Prompt, RolloutRequest
from rl_vlm.window import group_from_state, group_state


@dataclass(frozen=True)
class InFlight:
    """A drawn row with what there is of its group."""

    draw: Draw
    request: RolloutRequest

    @property
    def finished(self) -> Group | None:
        """The group, once none of its completions is paused."""
        group = self.request.begun
        return None if group is None or any(c.is_paused for c in group.completions) else group

    def state_dict(self) -> dict[str, Any]:
        """Everything but the prompt, which is made again from the dataset row of `draw`."""
        begun = None if self.request.begun is None else group_state(self.request.begun)
        return {"draw": tuple(self.draw), "group_id": self.request.group_id, "begun": begun}

    @classmethod
    def from_state(cls, state: dict[str, Any], build: Callable[[Draw], Prompt]) -> InFlight:
        """What `state_dict` holds, with the prompt that `build` makes of its draw."""
        draw = Draw(*state["draw"])
        prompt = build(draw)
        begun = None if state["begun"] is None else group_from_state(state["begun"], prompt)
        return cls(draw, RolloutRequest(state["group_id"], prompt, begun))


def roll_on(
    in_flight: Sequence[InFlight], num: int, generate: Callable[[list[RolloutRequest]], list[Group]]
) -> tuple[dict[Draw, Group], list[InFlight]]:
    """Sample until `num` groups are finished: the oldest of those, and all that stay in flight."""
    flight = list(in_flight)
    while len(finished := {one.draw: one.finished for one in flight if one.finished}) < num:
        unfinished = [i for i, one in enumerate(flight) if not one.finished]
        groups = generate([flight[i].request for i in unfinished])
        for i, group in zip(unfinished, groups, strict=True):
            flight[i] = InFlight(flight[i].draw, RolloutRequest(group.group_id, group.prompt, group))
    taken = dict(list(finished.items())[:num])
    return taken, [one for one in flight if one.draw not in taken]
