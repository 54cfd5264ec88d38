"""Rewards and advantages of completions, micro-batches, and the position of training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rl_vlm.types.completions import Completion, Group, Observation, Rendered, rendered_of
from rl_vlm.types.prompts import Prompt

Sharing = Literal["auto", "shared", "dense", "unproven"]
"""Number of times that a group's prompt is computed: once (shared), once per completion (dense), or the cheaper of
both."""


@dataclass
class Progress:
    """Position of training."""

    max_steps: int
    """Optimizer steps of the run."""
    global_step: int = 0
    """Number of complete optimizer steps."""
    policy_version: int = 0
    """Number of weight updates. A skipped step does not count."""
    saved_version: int = 0
    """`policy_version` of the last checkpoint."""
    nonfinite_in_a_row: int = 0
    """Number of skipped steps since the last one with a finite loss and gradient."""

    def update_done(self, has_changed: bool, is_finite: bool) -> None:
        """Count an update of the weights, or a step that was skipped because it is not finite."""
        self.policy_version += has_changed
        self.nonfinite_in_a_row = 0 if is_finite else self.nonfinite_in_a_row + 1

    def step_done(self) -> None:
        """Count a complete optimizer step."""
        self.global_step += 1

    def mark_saved(self) -> None:
        """Note that the weights are saved."""
        self.saved_version = self.policy_version

    def restore(self, state: Mapping[str, int]) -> None:
        """Continue at the position of a checkpoint. The number of the run's steps may be another one."""
        vars(self).update(state, max_steps=self.max_steps)


@dataclass(frozen=True)
class TrainerState:
    """State of the run, as reward functions receive it in `trainer_state`."""

    global_step: int
    max_steps: int
    epoch: float


class FaultKey(NamedTuple):
    """The function and the kind of a fault. Metrics have it as a text, for instance `slow_judge/timeout`."""

    function: str
    """The name of a reward function, `environment`, or `all` if no function applies."""
    kind: str

    def __str__(self) -> str:
        return f"{self.function}/{self.kind}"

    @classmethod
    def read(cls, text: str) -> FaultKey:
        """Read the text of a key."""
        function, _, kind = text.rpartition("/")
        return cls(function, kind)


@dataclass
class RewardTable:
    """Scores of P groups of G completions from all reward functions."""

    names: list[str]
    scores_PGF: Float[Tensor, "prompts group functions"]
    """NaN if a function does not apply to a completion, and for every fault."""
    valid_PG: Bool[Tensor, "prompts group"]
    """False if a function failed on the completion or none applied. Baseline, loss and denominator leave it out."""
    faulted_PG: Bool[Tensor, "prompts group"]
    """True if a function failed on the completion."""
    breakdown: dict[str, list[list[Any]]] = field(default_factory=dict)
    """Named sub-scores and extra columns, each P lists of G values, for the completions file."""
    metrics: dict[str, list[float]] = field(default_factory=dict)
    """Scalars that reward functions logged through `log_metric`."""
    fault_counts: dict[FaultKey, int] = field(default_factory=dict)
    """Numbers of masked completions."""
    fault_messages: dict[FaultKey, str] = field(default_factory=dict)
    """The first fault of each key on a line: function, samples, completions, and the returned value or the error."""
    faults: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    """Faults of completions, by prompt and index."""


@dataclass
class ScoredGroup:
    """A group with its rewards, advantages and log-probs for training."""

    group: Group
    scores_GF: Float[Tensor, "group functions"]
    """Reward of each function, unweighted; NaN if it does not apply."""
    rewards_G: Float[Tensor, " group"]
    """Weighted sum of the rewards; NaN if `valid_G` is False."""
    advantages_G: Float[Tensor, " group"]
    """0 if `valid_G` is False. If turns have their own, the mean over the completion's turns."""
    valid_G: Bool[Tensor, " group"]
    has_variance: bool
    """False if all advantages are 0, as with equal rewards: the group has no policy gradient."""
    num_answers: int | None = None
    """Distinct answers, as the first reward function of the largest weight reads them; None if they are not counted."""
    old_logprobs: dict[int, Tensor] = field(default_factory=dict)
    """Old log-probs by completion, once computed. A window's first optimizer step uses its own forward's log-probs,
    detached."""
    ref_logprobs: dict[int, Tensor] = field(default_factory=dict)
    """Reference log-probs by completion, if the KL term needs them."""
    turn_advantages: list[Tensor] = field(default_factory=list)
    """For each completion, the advantages of its turns. Empty if all turns have the completion's advantage."""

    def token_advantages(self, member: int) -> Float[Tensor, " sampled"]:
        """Return the advantage of each sampled token of a completion."""
        completion = self.group.completions[member]
        if not self.turn_advantages:
            return self.advantages_G[member].expand(len(completion.token_ids))
        return self.turn_advantages[member].repeat_interleave(torch.tensor(completion.turn_lengths))


@dataclass(frozen=True)
class SubGroup:
    """Some completions of one group, or contexts of them, that share their prompt in one micro-batch."""

    scored: ScoredGroup
    members: list[int]
    vision_apart: bool = False
    """Whether the group is cut, so that a trained vision tower runs apart from its micro-batches."""
    contexts: dict[int, range] = field(default_factory=dict)
    """The contexts of a cut completion. Its other contexts are in other micro-batches."""

    @property
    def prompt(self) -> Prompt:
        return self.scored.group.prompt_of(self.members[0])

    @property
    def completions(self) -> list[Completion]:
        """Return its completions. Cut completions have only the contexts of this sub-group."""
        every = self.scored.group.completions
        return [every[i].part(self.contexts[i]) if i in self.contexts else every[i] for i in self.members]

    @property
    def spans(self) -> list[slice]:
        """Return the slice of each of `completions` among the sampled tokens of the whole completion."""
        every = self.scored.group.completions
        return [
            every[i].span(self.contexts[i]) if i in self.contexts else slice(0, len(every[i].token_ids))
            for i in self.members
        ]

    @property
    def rendered(self) -> list[Rendered]:
        """Return the prompt and the observations of its completions, in the order of a shared row."""
        return rendered_of(self.prompt, self.completions)

    @cached_property
    def apart(self) -> list[Rendered]:
        """Return the prompts and observations whose images other micro-batches need too. A trained vision tower runs
        apart on them."""
        found: list[Rendered] = [self.prompt] if self.vision_apart else []
        for member, inside in self.contexts.items():
            here: list[Observation] = []
            elsewhere: set[bytes] = set()
            for i, context in enumerate(self.scored.group.completions[member].contexts):
                images = [each for each in context.observations if each.mm_inputs]
                here += images if i in inside else []
                elsewhere.update(each.digest for each in images if i not in inside)
            found += [each for each in here if each.digest in elsewhere]
        return found

    @property
    def whole(self) -> SubGroup:
        """Return the sub-group with all contexts of its completions."""
        return replace(self, contexts={})


@dataclass(frozen=True)
class MicroBatch:
    """Input of one forward and backward."""

    subgroups: Sequence[SubGroup]
    shared: bool
    """True: each prompt is computed once for its completions. False: one padded row per completion."""
    dense_reason: str | None = None
    """Reason why prefixes are not shared, for the metrics."""
    is_dummy: bool = False
    """Whether it is a filler, so that this rank has as many micro-batches as others. Its loss is multiplied by 0."""
    own_forward: bool = False
    """Whether the model encodes images and computes positions itself. The micro-batch then has one completion."""

    @property
    def completions(self) -> list[Completion]:
        """Return the N completions, in order of sub-groups. Cut completions have some of their contexts."""
        return [completion for subgroup in self.subgroups for completion in subgroup.completions]

    @property
    def members(self) -> list[tuple[ScoredGroup, int, slice]]:
        """Return the group and index of each completion, and the slice of its tokens among its sampled tokens."""
        return [(s.scored, i, span) for s in self.subgroups for i, span in zip(s.members, s.spans, strict=True)]

    @property
    def cuts_completions(self) -> bool:
        """Return whether contexts of a completion are in other micro-batches."""
        return any(subgroup.contexts for subgroup in self.subgroups)

    @property
    def whole(self) -> MicroBatch:
        """Return the micro-batch with all contexts of its completions."""
        return replace(self, subgroups=[subgroup.whole for subgroup in self.subgroups])

    @property
    def rendered(self) -> list[Rendered]:
        """Return the prompts and observations, in the order of a shared row."""
        return [each for subgroup in self.subgroups for each in subgroup.rendered]


@dataclass(frozen=True)
class Forward:
    """Work of a policy: a forward of a micro-batch, with runs of the vision tower."""

    batch: MicroBatch
    before: int = 0
    """Runs of the vision tower without gradients. Their features are kept for this micro-batch and later ones."""
    within: int = 0
    """Runs of the tower within the forward, and within the backward if the tower is trained.

    If the rank needs fewer runs, the rest have no effect: all ranks must run the tower equally often."""


@dataclass(frozen=True)
class TowerBackward:
    """Work of a policy: one more forward of the vision tower, for the gradients of kept features."""

    rendered: Rendered
    """The prompt or observation whose features were kept."""


class PolicyOutput(NamedTuple):
    """Per-token results of one forward over N completions, right-padded; padded positions hold 0.

    A tuple, since FSDP and DeepSpeed look for the tensors in a module's output.
    """

    logprobs_NT: Float[Tensor, "completions tokens"]
    entropies_NT: Float[Tensor, "completions tokens"]
