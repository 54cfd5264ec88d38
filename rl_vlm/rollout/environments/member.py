"""A completion on its way, and a turn whose calls run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from rewards.contract import Fault, FaultKind
from rl_vlm.data.turns import ParsedTurn, TurnFormat
from rl_vlm.rollout.environments.contract import EnvironmentKind, Schema
from rl_vlm.rollout.environments.failures import writable
from rl_vlm.rollout.environments.hosts import QueuedCall
from rl_vlm.rollout.environments.instances import Instance
from rl_vlm.types import (
    NO_TOKENS,
    Completion,
    FinishReason,
    Group,
    Observation,
    Prompt,
    RolloutRequest,
    ToolResult,
    Turn,
)


@dataclass
class Member:
    """A completion on its way."""

    request: RolloutRequest
    index: int
    kind: EnvironmentKind | None
    schemas: list[Schema]
    format: TurnFormat
    starts: dict[tuple[str | None, ...], Prompt]
    """Prompts that environments have started completions of this group with, by digests of the contents."""
    completion: Completion = NO_TOKENS
    instance: Instance | None = None
    observations: list[Observation] = field(default_factory=list)
    """The observation after each turn, as the current context has it."""

    @property
    def prompt(self) -> Prompt:
        return self.completion.start or self.request.prompt

    @property
    def name(self) -> str:
        """Return how errors name its last turn."""
        return f"{self.request.prompt.name}, completion {self.index}, turn {len(self.completion.turns) + 1}"

    @property
    def takes_steps(self) -> bool:
        return self.kind is not None and self.kind.takes_steps

    @property
    def is_active(self) -> bool:
        return self.completion.is_paused

    def enter(self, instance: Instance) -> None:
        """Run in this instance of the environment."""
        self.instance = instance

    def start_with(self, prompt: Prompt) -> None:
        """Start with a prompt of its own."""
        self.completion = replace(self.completion, start=prompt)

    def take(self, group: Group) -> None:
        """Add the turn that an engine has sampled, in a group of its request."""
        new = group.completions[self.index]
        self.completion = replace(
            self.completion, token_ids=new.token_ids, generator_logprobs=new.generator_logprobs,
            finish_reason=new.finish_reason, text=new.text, contexts=new.contexts, pending=None, edited=(),
            fault=new.fault,
        )  # fmt: skip

    def go_on(self, completion: Completion, observations: list[Observation]) -> None:
        """Continue with the next turn, after the observations of the current context."""
        self.completion, self.observations = completion, observations

    def end(self, reason: FinishReason, turn: Turn | None = None, fault: Fault | None = None) -> None:
        """End the completion, with its last turn."""
        turns = self.completion.turns if turn is None else (*self.completion.turns, turn)
        self.completion = replace(
            self.completion, finish_reason=reason, turns=turns, fault=fault, pending=None, edited=()
        )

    def fail(self, kind: FaultKind, message: str, turn: Turn | None = None) -> None:
        """End the completion as a fault."""
        self.end("fault", turn, Fault(kind, writable(message)))

    def add_reward(self, reward: float | None) -> None:
        """Add the reward of the environment. None if it does not apply."""
        self.completion = replace(self.completion, environment_reward=reward)

    def leave(self, keeps_environment: bool) -> Instance:
        """Leave the instance, and return it. Reward functions may look at its environment if it is kept."""
        instance, completion = self.instance, self.completion
        assert instance is not None
        self.instance = None
        if not len(completion.token_ids):  # a fault before the first token; it is not trained on
            first = self.prompt.token_ids[:1]
            completion = replace(completion, token_ids=first, generator_logprobs=torch.zeros(1))
        if self.kind is not None:
            live = instance.environment if keeps_environment and not instance.is_lost else None
            completion = replace(completion, environment=live, environment_name=self.kind.name)
        self.completion = completion
        return instance


class Running(NamedTuple):
    """A turn whose calls run."""

    member: Member
    turn: ParsedTurn
    calls: list[QueuedCall | str]
    """One per call of the turn: the call, or why it cannot be made. One call for a step."""

    def seen(self, results: Sequence[ToolResult] = (), reward: float | None = None) -> Turn:
        """Return the turn with the results that the model sees."""
        return Turn(self.turn.text, self.turn.content, self.turn.calls, tuple(results), reward)
