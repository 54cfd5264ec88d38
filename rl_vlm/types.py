"""The data types of the system, in the order in which a batch passes through them.

    Sample ─ prompts ─► Prompt ─ generation ─► Group ─ reward, advantages ─► ScoredGroup ─ batching ─► MicroBatch

Example: 2 prompts, G = 3 completions each, one group split in two by the token budget:

    groups        A: [a0 a1 a2]        B: [b0 b1 b2]
    micro-batch 0 SubGroup(A, members=[0, 1, 2]), SubGroup(B, members=[0])
    micro-batch 1 SubGroup(B, members=[1, 2])

Suffixes of ragged or padded values: P prompts, G completions of a group, N completions of a micro-batch,
T tokens of a completion, F reward functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import blake2b
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

Sharing = Literal["auto", "shared", "dense"]
"""How often a group's prompt is computed: once (shared), once per completion (dense), or whichever is cheaper."""
FinishReason = Literal["stop", "length", "turns", "fault", "paused"]
"""Why a completion ends: a stop token, a length limit, the limit of turns, or an environment that failed. A paused one
goes on later: its rollout was at its token limit, or its environment has answered."""


@dataclass(frozen=True)
class Sample:
    """One dataset row."""

    sample_id: str
    messages: list[dict[str, Any]]
    """Chat messages; `{"type": "image"}` blocks stand for `images`, in order."""
    images: list[Image]
    columns: dict[str, Any]
    """All other columns of the row, as reward functions receive them."""
    prompt: Any
    """The prompt as reward functions receive it: messages, or the text of a plain-text row."""
    encoded_images: dict[int, bytes] = field(default_factory=dict)
    """The row's own PNG, JPEG or WEBP files by index in `images`, if they decode to these pixels. They are sent to
    servers unchanged; other images are sent as PNG."""
    image_files: list[str | None] = field(default_factory=list)
    """Path of each image, or None for an image that is not a file."""
    is_made: bool = False
    """Whether an environment made it from the row, by its `reset`. It cannot be made again without the environment."""


@dataclass(frozen=True, eq=False)
class Prompt:
    """A sample rendered for one model, together with its image inputs.

    Prompts are compared by identity, since equal token ids may stand for different images.
    """

    sample: Sample
    token_ids: Int[Tensor, " prompt_tokens"]
    """Prompt tokens with every image already expanded to its placeholder tokens."""
    token_inputs: dict[str, Tensor]
    """The processor's other per-token inputs, each of shape (prompt_tokens,), such as `mm_token_type_ids`."""
    mm_inputs: dict[str, Tensor]
    """The processor's per-image inputs under the model's names (`pixel_values`, `image_grid_thw`); empty for text."""
    image_sizes: list[tuple[int, int]] | None = None
    """Width and height of each image in pixels, after the processor's resizing. None if the processor makes tiles, or
    is not known (endpoints)."""

    @property
    def name(self) -> str:
        """Return how errors name it."""
        return f"sample {self.sample.sample_id}"

    @property
    def num_images(self) -> int:
        return len(self.sample.images)

    @cached_property
    def digest(self) -> bytes:
        """A hash of its images, as the processor made them. Those of equal digests share features."""
        return digest_of(self.mm_inputs)


@dataclass(frozen=True)
class Sampling:
    """How completions are generated. Temperature 0 is greedy."""

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


@dataclass(frozen=True)
class TrainerState:
    """State of the run, as reward functions receive it in `trainer_state`."""

    global_step: int
    max_steps: int
    epoch: float


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool, as the model wrote it."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ToolResult:
    """What a tool returned, or what the model is told about a call that failed."""

    content: list[dict[str, Any]]
    """Content blocks. `{"type": "image"}` blocks stand for `images`, in order."""
    images: tuple[bytes, ...] = ()
    """Images as files."""
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
    """One per call, in order, as the model saw them. If a call cannot be read, there are no calls, and one result that
    says why. Empty if the trajectory ended with this turn."""


@dataclass(frozen=True, eq=False)
class Observation:
    """Tokens between two turns: the environment's answer, and the template's text around it.

    They are never trained. Observations are compared by identity, as prompts are.
    """

    name: str
    """Names it in errors: the sample and the turn."""
    token_ids: Int[Tensor, " observed"]
    """Its tokens with every image already expanded to its placeholder tokens."""
    token_inputs: dict[str, Tensor]
    """The processor's other per-token inputs, each of shape (observed,)."""
    mm_inputs: dict[str, Tensor]
    """The processor's per-image inputs; empty for text."""
    images: tuple[bytes, ...] = ()
    """Its images as files, in order."""
    unexpanded_ids: tuple[int, ...] = ()
    """Its tokens with one placeholder per image, for engines that expand them. Empty if it has no image."""

    @property
    def num_images(self) -> int:
        return len(self.images)

    @cached_property
    def digest(self) -> bytes:
        """A hash of its images, as the processor made them. Those of equal digests share features."""
        return digest_of(self.mm_inputs)


Rendered = Prompt | Observation
"""Tokens of a row that the processor made, with their images."""


class Path(NamedTuple):
    """The tokens of one context after the prompt."""

    token_ids: Int[Tensor, " path"]
    sampled: Bool[Tensor, " path"]
    """True at the tokens that are trained on."""
    observations: dict[int, Observation]
    """By the place of their first token, in order."""

    def without_last(self) -> Path:
        """Return the path without its last token, which predicts none."""
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
        return sum(part if isinstance(part, int) else len(part.token_ids) for part in self.parts)

    def path(self, sampled: Int[Tensor, " sampled"]) -> Path:
        """Return the context's tokens, of which `sampled` are the sampled ones."""
        turns = iter(sampled.split([part for part in self.parts if isinstance(part, int)]))
        tokens = [next(turns) if isinstance(part, int) else part.token_ids for part in self.parts]
        masks = [torch.full((len(some),), isinstance(part, int)) for some, part in zip(tokens, self.parts, strict=True)]
        starts = accumulate((len(some) for some in tokens), initial=0)
        observations = {at: part for at, part in zip(starts, self.parts, strict=False) if isinstance(part, Observation)}
        return Path(torch.cat(tokens), torch.cat(masks), observations)

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
    """How the sampled tokens follow each other and observations. Empty for one turn."""
    pending: Observation | None = None
    """The observation that a paused completion goes on after, if its environment has answered."""
    turns: tuple[Turn, ...] = ()
    """The turns of a trajectory. Empty without tools."""
    start: Prompt | None = None
    """Its own prompt, if its environment started unlike those of its group. None: the group's prompt."""
    fault: str | None = None
    """Kind and message of a failure of its environment, if `finish_reason` is "fault"."""
    environment_reward: float | None = None
    """What the environment's `get_reward` returned."""
    environment_name: str | None = None
    """Name of its environment's class."""
    environment: Any = field(default=None, compare=False, repr=False)
    """The environment's instance, for reward functions. It is not saved, and used again after the window is scored."""

    @property
    def is_paused(self) -> bool:
        return self.finish_reason == "paused"

    @property
    def is_truncated(self) -> bool:
        """Return whether it would have gone on without a limit of tokens or turns."""
        return self.finish_reason in ("length", "turns")

    @property
    def paths(self) -> list[Path]:
        """Return the tokens of each context. A completion of one turn has a single context."""
        if not self.contexts:
            return [Path(self.token_ids, torch.ones_like(self.token_ids, dtype=torch.bool), {})]
        sampled = self.token_ids.split([context.num_sampled for context in self.contexts])
        return [context.path(tokens) for context, tokens in zip(self.contexts, sampled, strict=True)]

    @property
    def observations(self) -> list[Observation]:
        """Return the observations of all contexts, in order. One that several contexts hold is there several times."""
        return [observation for context in self.contexts for observation in context.observations]

    @property
    def path_lengths(self) -> list[int]:
        """Return the number of tokens of each context, sampled and observed."""
        return [context.num_tokens for context in self.contexts] or [len(self.token_ids)]

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens after the prompt, sampled and observed, of all contexts."""
        return sum(self.path_lengths)

    @property
    def length_so_far(self) -> int:
        """Return the number of tokens of `so_far`."""
        return self.path_lengths[-1] + (0 if self.pending is None else len(self.pending.token_ids))

    @property
    def last_turn(self) -> Int[Tensor, " turn"]:
        """Return the sampled tokens of the last turn. There are none after a pending observation."""
        if self.pending is not None:
            return self.token_ids[:0]
        last = self.contexts[-1].parts[-1] if self.contexts else len(self.token_ids)
        return self.token_ids[-last:] if isinstance(last, int) and last else self.token_ids[:0]

    def so_far(self) -> Path:
        """Return the tokens of its last context, with the pending observation: what it goes on after."""
        (path,) = self.paths[-1:]
        if self.pending is None:
            return path
        observed = self.pending.token_ids
        return Path(
            torch.cat([path.token_ids, observed]),
            torch.cat([path.sampled, torch.zeros_like(observed, dtype=torch.bool)]),
            path.observations | {len(path.token_ids): self.pending},
        )

    def continued(
        self, token_ids: Int[Tensor, " new"], logprobs: Float[Tensor, " new"], finish_reason: FinishReason, text: str
    ) -> Completion:
        """Return the completion with newly sampled tokens after what it has so far."""
        contexts = self.contexts
        if contexts or self.pending is not None:
            parts = contexts[-1].parts if contexts else (len(self.token_ids),) * bool(len(self.token_ids))
            added = (len(token_ids),) if self.pending is None else (self.pending, len(token_ids))
            if parts and isinstance(parts[-1], int) and self.pending is None:
                parts, added = parts[:-1], (parts[-1] + len(token_ids),)
            contexts = (*contexts[:-1], Context((*parts, *added)))
        return replace(
            self, token_ids=torch.cat([self.token_ids, token_ids]),
            generator_logprobs=torch.cat([self.generator_logprobs, logprobs]),
            finish_reason=finish_reason, text=text, contexts=contexts, pending=None,
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
        unlike each other.
        """
        lists: dict[Prompt, list[int]] = {}
        for member in range(len(self.completions)) if members is None else members:
            lists.setdefault(self.prompt_of(member), []).append(member)
        return list(lists.values())

    def rendered_by(self, members: Sequence[int]) -> list[Rendered]:
        """Return the prompt of members that have the same, and their observations."""
        return rendered_of(self.prompt_of(members[0]), [self.completions[i] for i in members])


@dataclass(frozen=True)
class RolloutRequest:
    """A prompt to generate completions for. Random streams are hashes of (seed, group_id, completion index)."""

    group_id: str
    """Optimizer step, epoch and sample id, which identify the draw and not only the row."""
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
    fault_counts: dict[str, int] = field(default_factory=dict)
    """Number of masked completions by `function/kind`, for instance `slow_judge/timeout`."""
    fault_messages: list[str] = field(default_factory=list)
    """One line per fault: function, sample, completion, and the returned value or the error."""
    faults: dict[tuple[int, int], list[str]] = field(default_factory=dict)
    """The faults of a completion, by prompt and index."""


@dataclass
class ScoredGroup:
    """A group with its rewards, advantages and log-probs for training."""

    group: Group
    scores_GF: Float[Tensor, "group functions"]
    """Reward of each function, unweighted; NaN if it does not apply."""
    rewards_G: Float[Tensor, " group"]
    """Weighted sum of the rewards; NaN if `valid_G` is False."""
    advantages_G: Float[Tensor, " group"]
    """0 if `valid_G` is False."""
    valid_G: Bool[Tensor, " group"]
    has_variance: bool
    """False if all valid rewards are equal: the group has no policy gradient."""
    num_answers: int | None = None
    """Distinct answers, as the first reward function of the largest weight reads them; None if they are not counted."""
    old_logprobs: dict[int, Tensor] = field(default_factory=dict)
    """By completion, once computed. A window's first optimizer step uses its own forward's, detached."""
    ref_logprobs: dict[int, Tensor] = field(default_factory=dict)
    """By completion, if the KL term needs them."""


@dataclass(frozen=True)
class SubGroup:
    """Some completions of one group that share their prompt in one micro-batch."""

    scored: ScoredGroup
    members: list[int]
    vision_apart: bool = False
    """Whether the group is cut, so that a trained vision tower runs apart from its micro-batches."""

    @property
    def prompt(self) -> Prompt:
        return self.scored.group.prompt_of(self.members[0])

    @property
    def completions(self) -> list[Completion]:
        return [self.scored.group.completions[i] for i in self.members]

    @property
    def rendered(self) -> list[Rendered]:
        """Return the prompt and the observations of its completions, in the order of a shared row."""
        return self.scored.group.rendered_by(self.members)


@dataclass(frozen=True)
class MicroBatch:
    """Input of one forward and backward."""

    subgroups: Sequence[SubGroup]
    shared: bool
    """True: each prompt is computed once for its completions. False: one padded row per completion."""
    dense_reason: str | None = None
    """Why prefixes are not shared, for the metrics."""
    is_dummy: bool = False
    """Whether it only gives this rank as many micro-batches as other ranks have. Its loss is multiplied by 0."""

    @property
    def completions(self) -> list[Completion]:
        """Return the N completions, in order of sub-groups."""
        return [completion for subgroup in self.subgroups for completion in subgroup.completions]

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
    """Work of a policy: one more forward of the vision tower, for the gradients of a prompt's kept features."""

    prompt: Prompt


class PolicyOutput(NamedTuple):
    """Per-token results of one forward over N completions, right-padded; padded positions hold 0.

    A tuple, since FSDP and DeepSpeed look for the tensors in a module's output.
    """

    logprobs_NT: Float[Tensor, "completions tokens"]
    entropies_NT: Float[Tensor, "completions tokens"]


def digest_of(mm_inputs: dict[str, Tensor]) -> bytes:
    """Hash the inputs of images. A tensor without values, as traces of memory have them, is equal to itself alone."""
    found = blake2b(digest_size=16)
    for name, tensor in sorted(mm_inputs.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {id(tensor) if tensor.is_meta else ''}".encode())
        if not tensor.is_meta:
            found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return found.digest()


def rendered_of(prompt: Prompt, completions: Sequence[Completion]) -> list[Rendered]:
    """Return a prompt and the observations of its completions, in order."""
    return [prompt, *(each for completion in completions for each in completion.observations)]


def pad_rows(rows: Sequence[Tensor]) -> Tensor:
    """Stack N vectors of lengths up to T into (N, T), right-padded with 0."""
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def pad_split(values: Float[Tensor, " tokens"], lengths: Sequence[int]) -> Float[Tensor, "completions longest"]:
    """Split a vector into N rows of these lengths, right-padded with 0.

    One operator scatters all rows. With an operator per row, each one's backward would copy the gradient of all rows.
    """
    mask = length_mask(lengths)
    places = to_device(mask.flatten().nonzero()[:, 0], values.device)
    return values.new_zeros(mask.numel()).index_copy(0, places, values).view(mask.shape)


def length_mask(lengths: Sequence[int], device: torch.device | None = None) -> Bool[Tensor, "completions tokens"]:
    """Build the (N, max length) mask of N completions, True at real tokens."""
    ends = torch.tensor(list(lengths), device=device)
    return torch.arange(int(ends.max()), device=device)[None, :] < ends[:, None]


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device. The host does not wait for a GPU, since the copy is from pinned memory."""
    if device.type != "cpu" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_host(tensor: Tensor) -> Tensor:
    """Copy a tensor to pinned host memory without waiting for its device. Call `synchronize` before reading it."""
    return tensor.to("cpu", non_blocking=True)


def synchronize(device: torch.device) -> None:
    """Wait until the device has completed its work."""
    if device.type != "cpu":
        torch.accelerator.current_stream(device).synchronize()


def concatenate_images(some: Sequence[Rendered], device: torch.device) -> dict[str, Tensor]:
    """Concatenate the image inputs of prompts and observations, in their order. Skip those without images."""
    names = dict.fromkeys(name for each in some for name in each.mm_inputs)
    parts = {name: [each.mm_inputs[name] for each in some if name in each.mm_inputs] for name in names}
    return {name: to_device(torch.cat(tensors), device) for name, tensors in parts.items()}
