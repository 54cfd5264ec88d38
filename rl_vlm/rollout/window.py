"""The generation window: a set of generated groups and the number of updates done on them.

steps_per_window = 2, num_iterations = 2:   update   0        1        2        3
                                            groups   first    second   first    second
                                                     half     half     half     half
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rl_vlm.data.sampler import Draw
from rl_vlm.log.metrics import StepMetrics
from rl_vlm.rollout.states import Builder, group_from_state, group_state, prompt_from_state, prompt_state
from rl_vlm.types import MicroBatch, PolicyOutput, Progress, ScoredGroup

PolicyOutputs = Callable[[Sequence[ScoredGroup]], Iterable[tuple[MicroBatch, PolicyOutput]]]
"""Computes the policy's outputs for groups, by micro-batch. All ranks must call it."""


class DrawnGroup(NamedTuple):
    """A scored group and the draw of its row."""

    draw: Draw
    scored: ScoredGroup

    def state_dict(self) -> dict[str, Any]:
        """Return everything but prompts and pixels. `from_state` builds them again, see `group_state`."""
        group = self.scored.group
        return {**vars(self.scored), **prompt_state(self.draw, group.prompt), "group": group_state(group)}

    @classmethod
    def from_state(cls, state: dict[str, Any], builder: Builder) -> DrawnGroup:
        """Restore `state_dict`. `builder` makes the prompt of its draw."""
        draw, prompt = prompt_from_state(state, builder)
        group = group_from_state(state["group"], prompt, builder)
        scored = {name: value for name, value in state.items() if name not in ("draw", "reads", "group")}
        return cls(draw, ScoredGroup(group, **scored))


@dataclass
class Window:
    """One rank's share of a window."""

    steps: list[list[DrawnGroup]]
    """The groups of each optimizer step. Ranks can have different numbers of them."""
    num_iterations: int
    updates_done: int = 0

    @classmethod
    def of(
        cls, draws: Sequence[Draw], groups: Sequence[ScoredGroup], steps_per_window: int, num_iterations: int
    ) -> Window:
        """Build a new window from one group per draw. The groups are split into steps of equal size."""
        drawn = [DrawnGroup(draw, scored) for draw, scored in zip(draws, groups, strict=True)]
        share = len(drawn) // steps_per_window
        return cls([drawn[s * share : (s + 1) * share] for s in range(steps_per_window)], num_iterations)

    @property
    def steps_per_window(self) -> int:
        return len(self.steps)

    @property
    def groups(self) -> list[ScoredGroup]:
        """Return the groups of all steps."""
        return [group.scored for step in self.steps for group in step]

    @property
    def is_new(self) -> bool:
        return self.updates_done == 0

    @property
    def is_spent(self) -> bool:
        return self.updates_left == 0

    @property
    def updates_left(self) -> int:
        return self.steps_per_window * self.num_iterations - self.updates_done

    @property
    def iteration(self) -> int:
        """Return how often earlier updates have trained on the groups of the next one."""
        return self.updates_done // self.steps_per_window

    @property
    def outlives_update(self) -> bool:
        """Return whether the window has several updates. The later ones need old log-probs."""
        return self.steps_per_window * self.num_iterations > 1

    def step_groups(self) -> list[ScoredGroup]:
        """Return the groups of the next optimizer step."""
        return [group.scored for group in self.steps[self.updates_done % self.steps_per_window]]

    def later_groups(self) -> list[ScoredGroup]:
        """Return the groups of all optimizer steps but the first."""
        return self.groups[len(self.steps[0]) :]

    def state_dict(self) -> dict[str, Any]:
        """Return everything but prompts and pixels. `from_state` builds them again, see `group_state`."""
        return {
            "steps": [[group.state_dict() for group in step] for step in self.steps],
            "num_iterations": self.num_iterations,
            "updates_done": self.updates_done,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], builder: Builder) -> Window:
        """Restore `state_dict`. `builder` makes the prompts of its draws."""
        steps = [[DrawnGroup.from_state(group, builder) for group in step] for step in state["steps"]]
        return cls(**{**state, "steps": steps})


class WindowSource:
    """Gives a trainer its windows. `Collector` generates them. Without an engine, the other methods do nothing."""

    def current(self, progress: Progress, metrics: StepMetrics) -> Window:
        """Return the current window. If all its updates are done, get the next one first."""
        raise NotImplementedError

    def check_is_due(self, progress: Progress) -> bool:
        """Return whether to compare the engine that generates the windows with the policy, before a step's passes."""
        return False

    def check_engine(self, progress: Progress, groups: Sequence[ScoredGroup], policy_outputs: PolicyOutputs) -> None:
        """Raise RolloutError if the engine's log-probs differ from the policy's."""

    def sleep_engine(self) -> None:
        """Free the memory that the engine takes on the trainer's device, until it is next used."""

    def prefetch(self, progress: Progress) -> None:
        """Start to generate the next window, if windows are generated ahead."""

    def add_metrics(self, groups: Sequence[ScoredGroup], metrics: StepMetrics) -> None:
        """Add the metrics of the groups of an optimizer step."""


class GivenWindows(WindowSource):
    """Gives a new window of the same groups at every step. There is no engine."""

    def __init__(self, groups: Sequence[ScoredGroup] = (), num_iterations: int = 1) -> None:
        self.groups = groups
        self.num_iterations = num_iterations

    def current(self, progress: Progress, metrics: StepMetrics) -> Window:
        """Return a new window of one optimizer step per iteration."""
        fresh = [replace(group, old_logprobs={}, ref_logprobs={}) for group in self.groups]
        return Window.of([Draw(0, i) for i in range(len(fresh))], fresh, 1, self.num_iterations)
