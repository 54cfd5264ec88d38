"""The generation window: a set of generated groups and the number of updates done on them.

steps_per_window = 2, num_iterations = 2:   update   0        1        2        3
                                            groups   first    second   first    second
                                                     half     half     half     half
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

from rl_vlm.data.sampler import Draw
from rl_vlm.log.metrics import StepMetrics
from rl_vlm.types import (
    Completion,
    Context,
    Group,
    MicroBatch,
    Observation,
    PolicyOutput,
    Progress,
    Prompt,
    ScoredGroup,
)

Outputs = Callable[[Sequence[ScoredGroup]], Iterable[tuple[MicroBatch, PolicyOutput]]]
"""Computes the policy's outputs for groups, by micro-batch. All ranks must call it."""


class DrawnGroup(NamedTuple):
    """A scored group and the draw of its row."""

    draw: Draw
    scored: ScoredGroup

    def state_dict(self) -> dict[str, Any]:
        """Return everything but the prompt, which `from_state` rebuilds from the dataset row of `draw`."""
        return {**vars(self.scored), "draw": tuple(self.draw), "group": group_state(self.scored.group)}

    @classmethod
    def from_state(cls, state: dict[str, Any], build: Callable[[Draw], Prompt]) -> DrawnGroup:
        """Restore `state_dict`. `build` makes the prompt of its draw."""
        draw = Draw(*state["draw"])
        scored = {name: value for name, value in state.items() if name not in ("draw", "group")}
        return cls(draw, ScoredGroup(group_from_state(state["group"], build(draw)), **scored))


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
        """Return everything but the prompts, which `from_state` rebuilds from the dataset rows of the draws."""
        return {
            "steps": [[group.state_dict() for group in step] for step in self.steps],
            "num_iterations": self.num_iterations,
            "updates_done": self.updates_done,
        }

    @classmethod
    def from_state(cls, state: dict[str, Any], build: Callable[[Draw], Prompt]) -> Window:
        """Restore `state_dict`. `build` makes the prompts of its draws."""
        steps = [[DrawnGroup.from_state(group, build) for group in step] for step in state["steps"]]
        return cls(**{**state, "steps": steps})


@runtime_checkable
class WindowSource(Protocol):
    """Gives a trainer its windows. `Collector` generates them."""

    def check_is_due(self, progress: Progress) -> bool:
        """Return whether to compare the engine that generates the windows with the policy, before a step's passes."""
        ...

    def check_engine(self, progress: Progress, groups: Sequence[ScoredGroup], policy_outputs: Outputs) -> None:
        """Raise RolloutError if the engine's log-probs differ from the policy's."""
        ...

    def sleep_engine(self) -> None:
        """Free the memory that the engine takes on the trainer's device, until it is next used."""
        ...

    def current(self, progress: Progress, metrics: StepMetrics) -> Window:
        """Return the current window. If all its updates are done, get the next one first."""
        ...

    def prefetch(self, progress: Progress) -> None:
        """Start to generate the next window, if windows are generated ahead."""
        ...

    def add_metrics(self, groups: Sequence[ScoredGroup], metrics: StepMetrics) -> None:
        """Add the metrics of the groups of an optimizer step."""
        ...


class GivenWindows:
    """Gives a new window of the same groups at every step. There is no engine."""

    def __init__(self, groups: Sequence[ScoredGroup] = (), num_iterations: int = 1) -> None:
        self.groups = groups
        self.num_iterations = num_iterations

    def check_is_due(self, progress: Progress) -> bool:
        """Return False."""
        return False

    def check_engine(self, progress: Progress, groups: Sequence[ScoredGroup], policy_outputs: Outputs) -> None:
        """Do nothing."""

    def sleep_engine(self) -> None:
        """Do nothing."""

    def current(self, progress: Progress, metrics: StepMetrics) -> Window:
        """Return a new window of one optimizer step per iteration."""
        fresh = [replace(group, old_logprobs={}, ref_logprobs={}) for group in self.groups]
        return Window.of([Draw(0, i) for i in range(len(fresh))], fresh, 1, self.num_iterations)

    def prefetch(self, progress: Progress) -> None:
        """Do nothing."""

    def add_metrics(self, groups: Sequence[ScoredGroup], metrics: StepMetrics) -> None:
        """Do nothing."""


def group_state(group: Group) -> dict[str, Any]:
    """Return the state of a group without its prompt.

    It holds each observation once, with its images, since no row of the data has them.
    """
    observations = list(dict.fromkeys(group.rendered[1:]))
    places = {observation: [i] for i, observation in enumerate(observations)}
    return {
        "group_id": group.group_id,
        "policy_version": group.policy_version,
        "observations": [dict(vars(observation)) for observation in observations],
        "completions": [
            vars(completion)
            | {
                "contexts": [
                    [part if isinstance(part, int) else places[part] for part in context.parts]
                    for context in completion.contexts
                ]
            }
            for completion in group.completions
        ],
    }


def group_from_state(state: dict[str, Any], prompt: Prompt) -> Group:
    """Restore a group from `group_state` and its prompt."""
    observations = [Observation(**observation) for observation in state.get("observations", ())]

    def restored(parts: list[int | list[int]]) -> Context:
        return Context(tuple(part if isinstance(part, int) else observations[part[0]] for part in parts))

    completions = [
        Completion(**completion | {"contexts": tuple(map(restored, completion.get("contexts", ())))})
        for completion in state["completions"]
    ]
    return Group(state["group_id"], prompt, completions, state["policy_version"])
