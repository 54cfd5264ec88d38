"""A completion on its way, and a turn whose calls run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

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

    def take(self, group: Group) -> None:
        """Add the turn that an engine has sampled, in a group of its request."""
        new = group.completions[self.index]
        self.completion = replace(
            self.completion, token_ids=new.token_ids, generator_logprobs=new.generator_logprobs,
            finish_reason=new.finish_reason, text=new.text, contexts=new.contexts, pending=None, edited=(),
            fault=new.fault,
        )  # fmt: skip

    def end(self, reason: FinishReason, turn: Turn | None = None, fault: Fault | None = None) -> None:
        """End the completion, with its last turn."""
        turns = self.completion.turns if turn is None else (*self.completion.turns, turn)
        self.completion = replace(
            self.completion, finish_reason=reason, turns=turns, fault=fault, pending=None, edited=()
        )

    def fail(self, kind: FaultKind, message: str, turn: Turn | None = None) -> None:
        """End the completion as a fault."""
        self.end("fault", turn, Fault(kind, writable(message)))


class Running(NamedTuple):
    """A turn whose calls run."""

    member: Member
    turn: ParsedTurn
    calls: list[QueuedCall | str]
    """One per call of the turn: the call, or why it cannot be made. One call for a step."""

    def seen(self, results: Sequence[ToolResult] = (), reward: float | None = None) -> Turn:
        """Return the turn with the results that the model sees."""
        return Turn(self.turn.text, self.turn.content, self.turn.calls, tuple(results), reward)
