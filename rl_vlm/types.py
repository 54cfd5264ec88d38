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
from functools import cache, cached_property
from hashlib import blake2b
from importlib.metadata import version
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

T = TypeVar("T")
Sharing = Literal["auto", "shared", "dense", "unproven"]
"""How often a group's prompt is computed: once (shared), once per completion (dense), or whichever is cheaper."""
VideoFormat = Literal["native", "frames"]
"""Whether a model gets a video through its own input for videos, or its frames as images."""
FinishReason = Literal["stop", "length", "turns", "fault", "paused"]
"""Why a completion ends: a stop token, a length limit, the limit of turns, or an environment that failed. A paused one
goes on later: its rollout was at its token limit, or its environment has answered."""


@dataclass(frozen=True, eq=False)
class Video:
    """Frames of one video. They are chosen once, and have the size that the vision tower gets."""

    frames: UInt8[np.ndarray, "frames height width 3"]
    indices: tuple[int, ...]
    """The number of each frame in the file, or milliseconds if frames of the file have no constant rate."""
    fps: float
    """Frames per second of the file, or 1000 for milliseconds."""
    total_num_frames: int
    """Frames of the file from the clip's start to its end, or that time in milliseconds. Processors divide by it to
    know how many seconds lie between the chosen frames."""
    duration: float
    """Seconds of the file."""
    path: str | None = None
    """The file or folder, or None if the row holds the video itself."""
    reader: str = ""
    """Name and version of the software that decoded the frames."""

    @cached_property
    def digest(self) -> str:
        """A hash of the frames."""
        return blake2b(self.frames.tobytes(), digest_size=16).hexdigest()

    @property
    def times(self) -> list[float]:
        """The second of the file at which each frame is shown."""
        return [index / self.fps for index in self.indices]

    @property
    def metadata(self) -> dict[str, Any]:
        """The times of the frames, as processors read them. They change its list of indices, so each call makes one."""
        height, width = self.frames.shape[1:3]
        return {
            "total_num_frames": self.total_num_frames, "fps": self.fps, "frames_indices": list(self.indices),
            "duration": self.duration, "height": height, "width": width,
        }  # fmt: skip


@cache
def pillow_version() -> str:
    """Return the version of the package that decodes images."""
    return version("pillow")


class MediumRead(NamedTuple):
    """The pixels of an image or a video, in plain values for checkpoints."""

    kind: str
    path: str | None
    size: tuple[int, int]
    """Width and height."""
    indices: tuple[int, ...]
    """`Video.indices`, or nothing for an image."""
    fps: float | None
    """`Video.fps`, or None for an image."""
    digest: str
    """A hash of the pixels."""
    reader: str
    """Name and version of the software that decoded the pixels."""

    @classmethod
    def of_image(cls, image: Image, path: str | None) -> MediumRead:
        digest = blake2b(image.tobytes(), digest_size=16).hexdigest()
        return cls("image", path, image.size, (), None, digest, f"Pillow {pillow_version()}")

    @classmethod
    def of_video(cls, video: Video) -> MediumRead:
        height, width = video.frames.shape[1:3]
        return cls("video", video.path, (width, height), video.indices, video.fps, video.digest, video.reader)

    def is_same(self, other: MediumRead) -> bool:
        """Return whether both have equal pixels and times. The path and the reader may differ."""
        return self._replace(path=None, reader="") == other._replace(path=None, reader="")

    def __str__(self) -> str:
        """Return it for error messages."""
        frames = f", frames {', '.join(map(str, self.indices))} at {self.fps:g} per second" if self.indices else ""
        reader = f", read with {self.reader}" if self.reader else ""
        width, height = self.size
        return f"{self.path or 'a value of the row'}{frames}, {width} × {height} pixels, digest {self.digest}{reader}"


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
    videos: list[Video] = field(default_factory=list)
    """`{"type": "video"}` blocks of `messages` stand for them, in order."""
    frames_of: list[Video] = field(default_factory=list)
    """Videos whose frames are among `images`, in order. They have no blocks of their own."""
    frame_starts: list[int] = field(default_factory=list)
    """Index in `images` of the first frame of each of `frames_of`."""

    @property
    def all_videos(self) -> list[Video]:
        """Its videos, in whichever form the model gets them."""
        return self.videos or self.frames_of

    @property
    def own_images(self) -> list[Image]:
        """Those of `images` that are no frames of a video."""
        return self.without_frames(self.images)

    def without_frames(self, values: Sequence[T]) -> list[T]:
        """Return those of one value per image, or of no values, that belong to no frame of a video."""
        pairs = zip(self.frame_starts, self.frames_of, strict=True)
        frames = {start + i for start, video in pairs for i in range(len(video.frames))}
        return [value for i, value in enumerate(values) if i not in frames]

    @cached_property
    def reads(self) -> list[MediumRead]:
        """The pixels that were read for the prompt. A resumed run compares them with those that it reads."""
        files = self.image_files or [None] * len(self.images)
        images = [MediumRead.of_image(image, path) for image, path in zip(self.images, files, strict=True)]
        return images + [MediumRead.of_video(video) for video in self.all_videos]

    @property
    def media_text(self) -> str:
        """How errors describe its images and videos, such as "images of 64x48 pixels". Empty without any."""
        images = ", ".join(f"{image.width}x{image.height}" for image in self.own_images)
        shapes = [video.frames.shape for video in self.all_videos]
        videos = ", ".join(f"{number} frames of {width}x{height}" for number, height, width, _ in shapes)
        named = [f"images of {images} pixels"] if images else []
        return " and ".join([*named, *([f"videos of {videos} pixels"] if videos else [])])


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
    """The processor's inputs of images and videos under the model's names (`pixel_values`, `image_grid_thw`,
    `pixel_values_videos`); empty for text."""
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

    @property
    def own_image_sizes(self) -> list[tuple[int, int]] | None:
        """`image_sizes` of images that are no frames of a video."""
        return None if self.image_sizes is None else self.sample.without_frames(self.image_sizes)

    @cached_property
    def digest(self) -> bytes:
        """A hash of its images, as the processor made them. Equal images share features."""
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
    """The result of a call: content that the tool returned, or a message to the model about a failure."""

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
    says why. Empty if the trajectory ended with this turn. A step has one result, also at the end of a
    trajectory, unless it did not fit."""
    reward: float | None = None
    """The reward of this turn's step. None if it is no step."""


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
        """A hash of its images, as the processor made them. Equal images share features."""
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

    @classmethod
    def of(cls, parts: Sequence[int | Observation], sampled: Int[Tensor, " sampled"]) -> Path:
        """Return the tokens of parts, of which `sampled` are the sampled ones."""
        turns = iter(sampled.split([part for part in parts if isinstance(part, int)]))
        tokens = [next(turns) if isinstance(part, int) else part.token_ids for part in parts]
        masks = [torch.full((len(some),), isinstance(part, int)) for some, part in zip(tokens, parts, strict=True)]
        starts = accumulate((len(some) for some in tokens), initial=0)
        observations = {at: part for at, part in zip(starts, parts, strict=False) if isinstance(part, Observation)}
        return cls(torch.cat([sampled[:0], *tokens]), torch.cat([torch.ones(0).bool(), *masks]), observations)

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
        return num_tokens(self.parts)

    def path(self, sampled: Int[Tensor, " sampled"]) -> Path:
        """Return the context's tokens, of which `sampled` are the sampled ones."""
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
    """How the sampled tokens follow each other and observations. Empty for one turn."""
    pending: Observation | None = None
    """The observation that a paused completion goes on after, if its environment has answered."""
    edited: tuple[Observation, ...] = ()
    """What a new context begins with, in which a paused completion goes on. Empty if it goes on in its last one."""
    turns: tuple[Turn, ...] = ()
    """The turns of a trajectory. Empty without tools."""
    start: Prompt | None = None
    """Its own prompt, if its environment started unlike those of its group. None: the group's prompt."""
    fault: str | None = None
    """Kind and message of a failure of its environment, if `finish_reason` is "fault"."""
    environment_reward: float | None = None
    """The reward that the environment's `get_reward` returned."""
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
        """Return the observations of all contexts, in order. One that several contexts hold is there several times."""
        return [observation for context in self.contexts for observation in context.observations]

    def span(self, contexts: range) -> slice:
        """Return where the sampled tokens of some consecutive contexts are among all."""
        ends = list(accumulate((context.num_sampled for context in self.contexts), initial=0))
        return slice(ends[contexts.start], ends[contexts.stop])

    def part(self, contexts: range) -> Completion:
        """Return the completion in some consecutive contexts alone."""
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
        """Return the parts of the context that the next turn goes on in, with the pending observation."""
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
        """Return the tokens that the next turn follows: those of `parts_so_far`."""
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
    """0 if `valid_G` is False. If turns have their own, the mean over the completion's turns."""
    valid_G: Bool[Tensor, " group"]
    has_variance: bool
    """False if all advantages are 0, as with equal rewards: the group has no policy gradient."""
    num_answers: int | None = None
    """Distinct answers, as the first reward function of the largest weight reads them; None if they are not counted."""
    old_logprobs: dict[int, Tensor] = field(default_factory=dict)
    """By completion, once computed. A window's first optimizer step uses its own forward's, detached."""
    ref_logprobs: dict[int, Tensor] = field(default_factory=dict)
    """By completion, if the KL term needs them."""
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
    """The contexts of a completion that is cut, whose other contexts are in other micro-batches."""

    @property
    def prompt(self) -> Prompt:
        return self.scored.group.prompt_of(self.members[0])

    @property
    def completions(self) -> list[Completion]:
        """Return its completions. Those that are cut have its contexts alone."""
        every = self.scored.group.completions
        return [every[i].part(self.contexts[i]) if i in self.contexts else every[i] for i in self.members]

    @property
    def spans(self) -> list[slice]:
        """Return where the sampled tokens of `completions` are among all of the same completion."""
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
        """Return those whose images other micro-batches need too, so that a trained vision tower runs apart on them."""
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
    """Why prefixes are not shared, for the metrics."""
    is_dummy: bool = False
    """Whether it only gives this rank as many micro-batches as other ranks have. Its loss is multiplied by 0."""
    own_forward: bool = False
    """Whether the model encodes images and computes positions itself. The micro-batch then has one completion."""

    @property
    def completions(self) -> list[Completion]:
        """Return the N completions, in order of sub-groups. Those that are cut have some of their contexts."""
        return [completion for subgroup in self.subgroups for completion in subgroup.completions]

    @property
    def members(self) -> list[tuple[ScoredGroup, int, slice]]:
        """Return the group and index of each completion, and where its sampled tokens are among all of them."""
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


def digest_of(mm_inputs: dict[str, Tensor]) -> bytes:
    """Hash the inputs of images. A tensor without values, as traces of memory have them, is equal to itself alone."""
    found = blake2b(digest_size=16)
    for name, tensor in sorted(mm_inputs.items()):
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} {id(tensor) if tensor.is_meta else ''}".encode())
        if not tensor.is_meta:
            found.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return found.digest()


def num_tokens(parts: Sequence[int | Observation]) -> int:
    """Return the number of tokens of the parts of a context, sampled and observed."""
    return sum(part if isinstance(part, int) else len(part.token_ids) for part in parts)


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


def has_video(rendered: Rendered) -> bool:
    """Return whether a prompt or an observation has a video in the model's own input for videos."""
    return "pixel_values_videos" in rendered.mm_inputs


def concatenate_images(some: Sequence[Rendered], device: torch.device) -> dict[str, Tensor]:
    """Concatenate the inputs of images and videos of prompts and observations, in order. Skip those without any."""
    names = dict.fromkeys(name for each in some for name in each.mm_inputs)
    parts = {name: [each.mm_inputs[name] for each in some if name in each.mm_inputs] for name in names}
    return {name: to_device(torch.cat(tensors), device) for name, tensors in parts.items()}
