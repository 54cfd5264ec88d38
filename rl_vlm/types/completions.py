"""Completions, turns and observations, and the requests to sample them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from rl_vlm.types.media import is_clip
from rl_vlm.types.prompts import Prompt, digest_of
from rl_vlm.types.tensors import to_device

if TYPE_CHECKING:
    from rewards.contract import Fault

FinishReason = Literal["stop", "length", "turns", "fault", "paused"]
"""Reason why a completion ends: a stop token, a length limit, the limit of turns, or an environment that failed. A
paused completion continues later: its rollout reached its token limit, or its environment has answered."""


@dataclass(frozen=True)
class Sampling:
    """Settings for generating completions. Temperature 0 is greedy."""

    num_generations: int
    max_completion_length: int
    temperature: float
    seed: int
    top_p: float = 1.0
    top_k: int = 0
    min_p: float | None = None
    max_rollout_tokens: int | None = None
    """Tokens that one rollout adds to a completion before pausing it; None means no limit."""
    stop_sequences: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that end a turn, as the engine's stop tokens do."""
    stop_texts: tuple[str, ...] = ()
    """The texts of `stop_sequences`, for engines that find texts."""

    def end(self, start: int) -> int:
        """Return the length at which a rollout ends a completion that has `start` tokens so far."""
        return min(self.max_completion_length, start + (self.max_rollout_tokens or self.max_completion_length))

    def reason_at(self, length: int) -> FinishReason:
        """Return the finish reason of a completion that ends at this length without a stop token."""
        return "length" if length == self.max_completion_length else "paused"


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, as the model wrote it."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ToolResult:
    """The result of a call: content that the tool returned, or a message to the model about a failure."""

    content: list[dict[str, Any]]
    """Content blocks. `{"type": "image"}` and `{"type": "video"}` blocks stand for `images`, in order."""
    images: tuple[bytes, ...] = ()
    """Images and clips as files."""
    error: str | None = None
    """Why the call failed."""
    seconds: float = 0.0


@dataclass(frozen=True)
class Turn:
    """One turn of the model, and the results of its calls."""

    text: str
    """Its text as it was sampled, without special tokens."""
    content: str
    """Its text without calls."""
    calls: tuple[ToolCall, ...] = ()
    results: tuple[ToolResult, ...] = ()
    """One per call, in order, as the model saw them. If a call cannot be read, there are no calls, and one result gives
    the reason. Empty if the trajectory ended with this turn. A step has one result, also at the end of a trajectory,
    unless the result did not fit."""
    reward: float | None = None
    """The reward of this turn's step. None if the turn is not a step."""


@dataclass(frozen=True, eq=False)
class Observation:
    """Tokens between two turns: the environment's answer, and the template's text around it.

    They are never trained. Observations are compared by identity, as prompts are.
    """

    name: str
    """Names it in errors: the sample and the turn."""
    token_ids: Int[Tensor, " observed"]
    """Its tokens with every image and video already expanded to its placeholder tokens."""
    token_inputs: dict[str, Tensor]
    """The processor's other per-token inputs, each of shape (observed,)."""
    mm_inputs: dict[str, Tensor]
    """The processor's inputs of images and videos; empty for text."""
    images: tuple[bytes, ...] = ()
    """Its images and clips as files, in order. Frames that the model gets as images are images."""
    unexpanded_ids: tuple[int, ...] = ()
    """Its tokens with one placeholder per image and video, for engines that expand them. Empty for text."""

    @property
    def num_images(self) -> int:
        return len(self.images) - self.num_videos

    @property
    def num_videos(self) -> int:
        return sum(map(is_clip, self.images))

    @cached_property
    def digest(self) -> bytes:
        """A hash of its images and videos, as the processor made them. Equal ones share features."""
        return digest_of(self.mm_inputs)


Rendered = Prompt | Observation
"""Tokens that the processor made, with their images: a prompt or an observation."""


class Path(NamedTuple):
    """The tokens of one context after the prompt."""

    token_ids: Int[Tensor, " path"]
    sampled: Bool[Tensor, " path"]
    """True at the tokens that are trained on."""
    observations: dict[int, Observation]
    """Observations by the place of their first token, in order."""

    @classmethod
    def of(cls, parts: Sequence[int | Observation], sampled: Int[Tensor, " sampled"]) -> Path:
        """Return the tokens of parts. `sampled` holds the sampled tokens."""
        turns = iter(sampled.split([part for part in parts if isinstance(part, int)]))
        tokens = [next(turns) if isinstance(part, int) else part.token_ids for part in parts]
        masks = [torch.full((len(some),), isinstance(part, int)) for some, part in zip(tokens, parts, strict=True)]
        starts = accumulate((len(some) for some in tokens), initial=0)
        observations = {at: part for at, part in zip(starts, parts, strict=False) if isinstance(part, Observation)}
        return cls(torch.cat([sampled[:0], *tokens]), torch.cat([torch.ones(0).bool(), *masks]), observations)

    def without_last(self) -> Path:
        """Return the path without its last token, which predicts no token."""
        return Path(self.token_ids[:-1], self.sampled[:-1], self.observations)


@dataclass(frozen=True, eq=False)
class Context:
    """One linear sequence after the prompt, as the model saw it when it sampled.

    Example: two turns of 3 and 2 tokens, with an observation of 4 tokens between them:

        parts      (3, observation, 2)
        sampled    1 1 1 0 0 0 0 1 1
    """

    parts: tuple[int | Observation, ...]
    """Numbers of sampled tokens and observations, in order. The last part is sampled."""

    def __post_init__(self) -> None:
        """Raise ValueError if the last part is not sampled, or if a turn has no token."""
        if not self.parts or isinstance(self.parts[-1], Observation):
            raise ValueError("a context must end with sampled tokens")
        if any(isinstance(part, int) and part < 1 for part in self.parts):
            raise ValueError("a turn must have at least one token")

    @cached_property
    def observations(self) -> list[Observation]:
        return [part for part in self.parts if isinstance(part, Observation)]

    @cached_property
    def num_sampled(self) -> int:
        return sum(part for part in self.parts if isinstance(part, int))

    @cached_property
    def num_tokens(self) -> int:
        """Return the number of tokens, sampled and observed."""
        return num_tokens(self.parts)

    def path(self, sampled: Int[Tensor, " sampled"]) -> Path:
        """Return the context's tokens. `sampled` holds the sampled tokens."""
        return Path.of(self.parts, sampled)

    def first_tokens(self, number: int) -> Context:
        """Return the context up to its `number`-th token, or up to the last sampled one before.

        It has at least one sampled token, even if an observation before it is longer.
        """
        parts: list[int | Observation] = []
        left, last = number, 0
        for part in self.parts:
            if left <= 0 and last:
                break
            parts.append(min(part, max(left, 1)) if isinstance(part, int) else part)
            left -= part if isinstance(part, int) else len(part.token_ids)
            last = len(parts) if isinstance(part, int) else last
        return Context(tuple(parts[:last]))


@dataclass(frozen=True)
class Completion:
    """One generated completion: a turn, or a trajectory of several turns with observations between them.

    All values per token are of sampled tokens. EOS is the last one if `finish_reason` is "stop".
    """

    token_ids: Int[Tensor, " sampled"]
    """The sampled tokens of all turns, in order."""
    generator_logprobs: Float[Tensor, " sampled"]
    """Log-probs at the sampling temperature with placeholder tokens banned, before top-k, top-p and min-p."""
    finish_reason: FinishReason
    text: str
    """The text of the last turn."""
    contexts: tuple[Context, ...] = ()
    """The order of sampled tokens and observations, per context. Empty for one turn."""
    pending: Observation | None = None
    """The observation after which a paused completion continues, if its environment has answered."""
    edited: tuple[Observation, ...] = ()
    """First parts of a new context, if a paused completion continues in one. Empty if it continues in its last
    context."""
    turns: tuple[Turn, ...] = ()
    """The turns of a trajectory. Empty without tools."""
    start: Prompt | None = None
    """Its own prompt, if its environment started differently from the others of its group. None: the group's prompt."""
    fault: Fault | None = None
    """The failure of its environment, if `finish_reason` is "fault"."""
    environment_reward: float | None = None
    """The value that the environment's `get_reward` returned."""
    environment_name: str | None = None
    """Name of its environment's class."""
    environment: Any = field(default=None, compare=False, repr=False)
    """The environment's instance, for reward functions. It is not saved. After the window is scored, it is used
    again."""

    @property
    def is_paused(self) -> bool:
        return self.finish_reason == "paused"

    @property
    def is_truncated(self) -> bool:
        """Return whether a limit of tokens or turns ended it."""
        return self.finish_reason in ("length", "turns")

    @property
    def turn_lengths(self) -> list[int]:
        """Return the number of sampled tokens of each turn."""
        lengths = [part for context in self.contexts for part in context.parts if isinstance(part, int)]
        return lengths or [len(self.token_ids)]

    def turn_starts(self, prompt: Prompt) -> list[Rendered]:
        """Return the observation before each turn, or the prompt before the first turn of a context."""
        starts: list[Rendered] = []
        for context in self.contexts:
            start: Rendered = prompt
            for part in context.parts:
                if isinstance(part, int):
                    starts.append(start)
                else:
                    start = part
        return starts or [prompt]

    @property
    def paths(self) -> list[Path]:
        """Return the tokens of each context. A completion of one turn has a single context."""
        if not self.contexts:
            return [Path(self.token_ids, torch.ones_like(self.token_ids, dtype=torch.bool), {})]
        sampled = self.token_ids.split([context.num_sampled for context in self.contexts])
        return [context.path(tokens) for context, tokens in zip(self.contexts, sampled, strict=True)]

    @property
    def observations(self) -> list[Observation]:
        """Return the observations of all contexts, in order. An observation in several contexts is repeated."""
        return [observation for context in self.contexts for observation in context.observations]

    def span(self, contexts: range) -> slice:
        """Return the slice that the sampled tokens of some consecutive contexts have among all sampled tokens."""
        ends = list(accumulate((context.num_sampled for context in self.contexts), initial=0))
        return slice(ends[contexts.start], ends[contexts.stop])

    def part(self, contexts: range) -> Completion:
        """Return the completion with only some consecutive contexts."""
        span, some = self.span(contexts), self.contexts[contexts.start : contexts.stop]
        token_ids, logprobs = self.token_ids[span], self.generator_logprobs[span]
        return replace(self, token_ids=token_ids, generator_logprobs=logprobs, contexts=some)

    @property
    def path_lengths(self) -> list[int]:
        """Return the number of tokens of each context, sampled and observed."""
        return [context.num_tokens for context in self.contexts] or [len(self.token_ids)]

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens after the prompt, sampled and observed, of all contexts."""
        return sum(self.path_lengths)

    @property
    def parts_so_far(self) -> tuple[int | Observation, ...]:
        """Return the parts of the context that the next turn continues, with the pending observation."""
        only_turn = (len(self.token_ids),) * bool(len(self.token_ids))
        parts = self.edited or (self.contexts[-1].parts if self.contexts else only_turn)
        return parts if self.pending is None else (*parts, self.pending)

    @property
    def length_so_far(self) -> int:
        """Return the number of tokens of `so_far`."""
        return num_tokens(self.parts_so_far)

    @property
    def last_turn(self) -> Int[Tensor, " turn"]:
        """Return the sampled tokens of the last turn. There are none after a pending observation."""
        if self.pending is not None:
            return self.token_ids[:0]
        last = self.contexts[-1].parts[-1] if self.contexts else len(self.token_ids)
        return self.token_ids[-last:] if isinstance(last, int) and last else self.token_ids[:0]

    def so_far(self) -> Path:
        """Return the tokens of `parts_so_far`, which the next turn follows."""
        parts = self.parts_so_far
        num_sampled = sum(part for part in parts if isinstance(part, int))
        return Path.of(parts, self.token_ids[len(self.token_ids) - num_sampled :])

    def continued(
        self, token_ids: Int[Tensor, " new"], logprobs: Float[Tensor, " new"], finish_reason: FinishReason, text: str
    ) -> Completion:
        """Return the completion with newly sampled tokens at its end."""
        *before, last = self.parts_so_far or (0,)
        parts = (*before, last + len(token_ids)) if isinstance(last, int) else (*before, last, len(token_ids))
        contexts = self.contexts if self.edited else self.contexts[:-1]
        if contexts or len(parts) > 1:
            contexts = (*contexts, Context(parts))
        return replace(
            self, token_ids=torch.cat([self.token_ids, token_ids]),
            generator_logprobs=torch.cat([self.generator_logprobs, logprobs]),
            finish_reason=finish_reason, text=text, contexts=contexts, pending=None, edited=(),
        )  # fmt: skip

    def first_tokens(self, number: int) -> Completion:
        """Return the completion up to its `number`-th token, in its first context."""
        contexts = tuple(context.first_tokens(number) for context in self.contexts[:1])
        end = contexts[0].num_sampled if contexts else number
        return replace(
            self, token_ids=self.token_ids[:end], generator_logprobs=self.generator_logprobs[:end], contexts=contexts
        )


@dataclass(frozen=True)
class ServedCompletion(Completion):
    """A completion from a server that returns text without tokens; `token_ids` is empty."""

    reported_tokens: int | None = None
    """Number of tokens that the server reports; None if it reports none."""


NO_TOKENS = Completion(torch.empty(0, dtype=torch.int64), torch.empty(0), "paused", "")


@dataclass(frozen=True)
class Group:
    """One prompt with its `num_generations` completions; never split between ranks."""

    group_id: str
    prompt: Prompt
    completions: list[Completion]
    policy_version: int
    """Version of the weights that generated the first tokens. Resumed completions continue with newer weights."""

    @property
    def rendered(self) -> list[Rendered]:
        """Return the prompts and all observations."""
        return [each for members in self.by_prompt() for each in self.rendered_by(members)]

    def prompt_of(self, member: int) -> Prompt:
        """Return the prompt of a completion."""
        return self.completions[member].start or self.prompt

    def by_prompt(self, members: Sequence[int] | None = None) -> list[list[int]]:
        """Return members, by default all, in lists of equal prompts. There is one list unless environments start
        differently.
        """
        lists: dict[Prompt, list[int]] = {}
        for member in range(len(self.completions)) if members is None else members:
            lists.setdefault(self.prompt_of(member), []).append(member)
        return list(lists.values())

    def rendered_by(self, members: Sequence[int]) -> list[Rendered]:
        """Return the common prompt of members, and their observations."""
        return rendered_of(self.prompt_of(members[0]), [self.completions[i] for i in members])


@dataclass(frozen=True)
class RolloutRequest:
    """A prompt to generate completions for. Random streams are hashes of (seed, group_id, completion index)."""

    group_id: str
    """Optimizer step, epoch and sample id. They identify the draw, not only the row."""
    prompt: Prompt
    partial: Group | None = None
    """The group so far. Its paused completions are equally long, since all of them reached the same limits."""

    def paused(self, num_generations: int) -> dict[int, Completion]:
        """Return the completions to generate or continue, by index, with their tokens so far."""
        completions = self.partial.completions if self.partial else [NO_TOKENS] * num_generations
        return {i: completion for i, completion in enumerate(completions) if completion.is_paused}

    @property
    def num_paused_tokens(self) -> int:
        """Return the number of tokens that each paused completion has."""
        return len(next(iter(self.paused(1).values())).token_ids)

    def group(self, sampled: Sequence[Completion], policy_version: int) -> Group:
        """Build the group, with `sampled` in place of the paused completions, in order."""
        if self.partial is None:
            return Group(self.group_id, self.prompt, list(sampled), policy_version)
        further = iter(sampled)
        completions = [next(further) if c.is_paused else c for c in self.partial.completions]
        return replace(self.partial, completions=completions)


def num_tokens(parts: Sequence[int | Observation]) -> int:
    """Return the number of tokens of the parts of a context, sampled and observed."""
    return sum(part if isinstance(part, int) else len(part.token_ids) for part in parts)


def rendered_of(prompt: Prompt, completions: Sequence[Completion]) -> list[Rendered]:
    """Return a prompt and the observations of its completions, in order."""
    return [prompt, *(each for completion in completions for each in completion.observations)]


def has_video(rendered: Rendered) -> bool:
    """Return whether a prompt or an observation has a video in the model's own input for videos."""
    return "pixel_values_videos" in rendered.mm_inputs


def concatenate_images(some: Sequence[Rendered], device: torch.device) -> dict[str, Tensor]:
    """Concatenate the inputs of images and videos of prompts and observations, in order. Skip those without any."""
    names = dict.fromkeys(name for each in some for name in each.mm_inputs)
    parts = {name: [each.mm_inputs[name] for each in some if name in each.mm_inputs] for name in names}
    return {name: to_device(torch.cat(tensors), device) for name, tensors in parts.items()}
