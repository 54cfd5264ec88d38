"""Rollouts with the policy's own transformers model: no second copy of the weights, no server, any device.

    requests ─ batches of whole groups ─► prefill: each prompt and its images once
             ─ a cache with each prompt's keys once ─► decode: one token per forward and completion ─► Group

The sampling loop is not `model.generate`, which would prefill once per completion, use one random stream for the
whole batch and take settings from the checkpoint's generation config. `GroupLayout` is the attention of a decode.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from inspect import signature
from itertools import groupby, islice
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar, cast, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from rl_vlm.config.schema import RunConfig
from rl_vlm.data.prompts import PromptBuilder
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.signals import stop
from rl_vlm.errors import OutOfMemory
from rl_vlm.model.body import run_body
from rl_vlm.model.families import stop_token_ids
from rl_vlm.model.group_cache import (
    GroupCacheLayer,
    GroupLayout,
    RowGroups,
    expanded_cache,
    group_layers,
    keep_positions,
)
from rl_vlm.model.layout import collate_rows, token_input_names, token_inputs
from rl_vlm.model.loading import load_policy
from rl_vlm.model.shared_prefix import attention_layout, routes_attention
from rl_vlm.model.softcap import final_logits
from rl_vlm.model.vision import VisionEncoder
from rl_vlm.passes.recovery import Failure, described, repeated
from rl_vlm.rollout.engine import RolloutEngine, WeightSource
from rl_vlm.rollout.lockstep import Lockstep
from rl_vlm.rollout.sampling import EndOfTurn, next_tokens, stream_keys
from rl_vlm.rollout.weights import PolicyWeights
from rl_vlm.types import Completion, FinishReason, Group, Path, Prompt, RolloutRequest, Sampling, to_device

if TYPE_CHECKING:
    from transformers import Cache, PreTrainedModel

T = TypeVar("T")

logger = logging.getLogger(__name__)

COMPACT_FRACTION = 0.25
"""Finished completions are removed once they are this share of the batch. Copying the cache costs about a forward."""


@runtime_checkable
class SampledPolicy(Protocol):
    """The part of the trained policy that the engine uses."""

    vision: VisionEncoder

    def autocast(self, keeps_casts: bool) -> AbstractContextManager[None]: ...


@dataclass(frozen=True)
class Prefix:
    """The prefilled prompts of a batch: one row per prompt or, after `expand`, per completion."""

    cache: Cache
    logits_NV: Float[Tensor, "rows vocabulary"]
    """Logits of the first completion token."""
    mask: Int[Tensor, "rows longest_prompt"]
    """0 at left padding."""
    is_padded: bool
    next_positions: Int[Tensor, "*axes rows 1"]
    """Position ids of the first completion token, in the model's layout; equal on all axes."""
    cross_attention: dict[str, Tensor]
    """Image mask of completion tokens, (rows, 1, images, tiles). Empty if the model does not cross-attend to images."""
    groups: RowGroups | None = None
    """The rows of each prompt, if layers of the cache hold the keys of a prompt once. Set by `expand`."""

    def expand(self, owners: list[int], grouped: set[int]) -> Prefix:
        """Return a prefix with row `owners[n]`, in ascending order, for completion n, and its own cache.

        Layers `grouped` of the cache hold the keys of each prompt once.
        """
        device = self.mask.device
        of_rows = torch.tensor(owners)
        of_prompts, within = of_rows.unique(return_inverse=True)
        rows, prompts = to_device(of_rows, device), to_device(of_prompts, device)
        cache = expanded_cache(self.cache, rows, prompts, grouped)
        valid = self.mask[prompts].bool() if self.is_padded else None
        return replace(self.select(rows), cache=cache, groups=RowGroups.of(within, valid, device) if grouped else None)

    def keep(self, rows: Int[Tensor, " kept"]) -> Prefix:
        """Return an expanded prefix with some of the rows. This one must not be used any more."""
        groups, prompts = (None, None) if self.groups is None else self.groups.keep(rows)
        keep_positions(self.cache, rows)
        for layer in self.cache.layers:
            if isinstance(layer, GroupCacheLayer):
                layer.keep(rows, prompts)
            else:
                layer.reorder_cache(cast(Any, rows))
        return replace(self.select(rows), groups=groups)

    def select(self, rows: Int[Tensor, " selected"]) -> Prefix:
        """Return a prefix with some of the rows, and the same cache."""
        cross = {name: mask[rows] for name, mask in self.cross_attention.items()}
        return replace(
            self, logits_NV=self.logits_NV[rows], mask=self.mask[rows],
            next_positions=self.next_positions[..., rows, :], cross_attention=cross,
        )  # fmt: skip

    def attention(self, num_before: int, num_new: int) -> GroupLayout | None:
        """Return the attention of new tokens, after `num_before` others. None means transformers' own."""
        if self.groups is None:
            return None
        layers = [layer for layer in self.cache.layers if isinstance(layer, GroupCacheLayer)]
        return GroupLayout(self.groups, layers, num_new, num_keys=self.mask.shape[1] + num_before + num_new)


class HFEngine(RolloutEngine):
    """Samples from a transformers model, which holds the policy's own weights."""

    def __init__(
        self,
        vision: VisionEncoder,
        tokenizer: Any,
        stop_token_ids: Sequence[int],
        max_num_seqs: int,
        autocast: Callable[[bool], AbstractContextManager[None]] = lambda keeps_casts: nullcontext(),
        policy: SampledPolicy | None = None,
    ) -> None:
        """`max_num_seqs` completions are decoded at once. `autocast` opens the context of forwards, and takes the
        argument of `Policy.autocast`. `policy` has the model, if the engine samples from one.
        """
        self.model = vision.model
        self.vision = vision
        self.tokenizer = tokenizer
        self.stop_token_ids = list(stop_token_ids)
        self.banned_token_ids = vision.family.banned_token_ids(vision.model.config)
        self.max_num_seqs = max_num_seqs
        self.autocast = autocast
        self.policy = policy
        self.cache_name = cache_name(vision.model.base_model)
        self.policy_version = 0
        self.counters: Counter[str] = Counter()
        self.lockstep: Lockstep | None = None
        """Set if all ranks must run each forward together."""

    @classmethod
    def for_policy(cls, policy: SampledPolicy, tokenizer: Any, max_num_seqs: int) -> HFEngine:
        """Build an engine that samples from the trained policy, in its compute precision."""
        stops = stop_token_ids(policy.vision.model.generation_config, tokenizer)
        return cls(policy.vision, tokenizer, stops, max_num_seqs, policy.autocast, policy)

    def sync(self, source: WeightSource, version: int) -> int:
        """Set the version. No weights are moved, since they are the policy's own."""
        self.policy_version = version
        return 0

    @contextmanager
    def in_lockstep(self, ranks: Ranks) -> Iterator[None]:
        """Open the context for generation with weights that are gathered layer by layer. All ranks open it together."""
        self.lockstep = Lockstep(ranks, self.vision.idle, self.idle_forward)
        try:
            with torch.no_grad(), generation_mode(self.model), self.autocast(False), self.lockstep.open():
                yield
        finally:
            self.lockstep = None

    def idle_forward(self) -> None:
        """Run the language model on one token without effect."""
        assert self.vision.idle_prompt is not None, "runs with ZeRO or FSDP2 have a prompt for idle runs"
        token = torch.tensor(self.stop_token_ids[:1])
        extra = {name: torch.zeros_like(token) for name in self.vision.idle_prompt.token_inputs}
        prompt = replace(self.vision.idle_prompt, token_ids=token, token_inputs=extra, mm_inputs={})
        row = token_inputs(prompt, [], list(extra), self.vision.family, self.model)
        self.run_model(collate_rows([row], self.model.device))

    def together(self, num_vision_calls: int) -> AbstractContextManager[None]:
        """Return the context of one forward with this many vision calls. In lockstep, all ranks run it together."""
        return nullcontext() if self.lockstep is None else self.lockstep.forward(num_vision_calls)

    @torch.no_grad()
    def generate(self, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Group]:
        """Generate one group per request, in order.

        A batch holds prompts of similar length, to save padding, and paused completions of equal length. A
        completion that continues after an observation is a row by itself. A batch holds such rows of similar length.
        """
        with generation_mode(self.model), self.autocast(self.lockstep is None):
            rows = [row for number, request in enumerate(requests) for row in turns_to_continue(number, request)]
            turns = self.continue_turns(rows, sampling)
            groups = self.generate_groups([i for i in range(len(requests)) if i not in turns], requests, sampling)
        groups |= {i: requests[i].group(sampled, self.policy_version) for i, sampled in turns.items()}
        return [groups[i] for i in range(len(requests))]

    def generate_groups(
        self, numbers: Sequence[int], requests: Sequence[RolloutRequest], sampling: Sampling
    ) -> dict[int, Group]:
        """Generate the groups of some requests, by their numbers."""
        lengths = {i: (requests[i].num_paused_tokens, len(requests[i].prompt.token_ids)) for i in numbers}
        groups: dict[int, Group] = {}
        for _, equally_long in groupby(sorted(numbers, key=lengths.__getitem__), key=lambda i: lengths[i][0]):
            alike = list(equally_long)
            while alike:
                batch = self.next_batch([requests[i] for i in alike], sampling)
                groups |= zip(alike, batch, strict=False)
                alike = alike[len(batch) :]
        return groups

    def continue_turns(self, rows: Sequence[TurnRow], sampling: Sampling) -> dict[int, list[Completion]]:
        """Sample one more turn of each row. Return the completions of each request, by its number, in their order."""
        sampled: dict[int, Completion] = {}
        left = sorted(range(len(rows)), key=lambda i: rows[i].num_tokens)
        while left:
            batch = self.next_turns([rows[i] for i in left], sampling)
            sampled |= zip(left, batch, strict=False)
            left = left[len(batch) :]
        by_request: dict[int, list[Completion]] = {}
        for i, row in enumerate(rows):
            by_request.setdefault(row.number, []).append(sampled[i])
        return by_request

    def next_batch(self, requests: list[RolloutRequest], sampling: Sampling) -> list[Group]:
        """Generate the groups of one batch: of as many first requests as are sampled at once.

        If memory runs out, `max_num_seqs` is halved. In a smaller batch each completion draws the same random numbers,
        but logits are rounded differently, so a token may differ. Raises OutOfMemory if a single completion does not
        fit. In lockstep, an error is raised unchanged.
        """

        def first() -> list[RolloutRequest]:
            is_single = self.vision.family.one_prompt_at_once
            return requests[: 1 if is_single else max(1, self.max_num_seqs // sampling.num_generations)]

        return self.recovering(
            lambda: self.generate_batch(first(), sampling),
            lambda error: self.failure([request.prompt for request in first()], sampling, error),
        )

    def next_turns(self, rows: list[TurnRow], sampling: Sampling) -> list[Completion]:
        """Sample the turns of one batch: of as many first rows as are sampled at once. See `next_batch`."""

        def first() -> list[TurnRow]:
            return rows[: 1 if self.vision.family.one_prompt_at_once else self.max_num_seqs]

        return self.recovering(
            lambda: self.generate_turns(first(), sampling),
            lambda error: self.failure([row.prompt for row in first()], replace(sampling, num_generations=1), error),
        )

    def recovering(self, sample: Callable[[], T], failure: Callable[[RuntimeError], Failure]) -> T:
        """Sample, again with fewer completions at once if memory runs out, as `failure` describes it."""
        if self.lockstep is not None:
            return sample()

        def attempt() -> T:
            with described(failure):
                return sample()

        return repeated(attempt, self.lower)

    def failure(self, prompts: list[Prompt], sampling: Sampling, error: RuntimeError) -> Failure:
        """Describe a batch that ran out of memory."""
        num = min(self.max_num_seqs, len(prompts) * sampling.num_generations)
        longest = sampling.num_generations * sampling.max_completion_length
        tokens = sum(sampling.num_generations * len(prompt.token_ids) + longest for prompt in prompts)
        return Failure.of(error, prompts, num, tokens)

    def lower(self, failures: list[Failure]) -> None:
        """Halve the number of completions that are sampled at once. Raises OutOfMemory if it was 1."""
        (failure,) = failures
        if failure.num_completions == 1:
            raise OutOfMemory(
                f"a rollout of a single completion of {failure.first} does not fit in memory: {failure}. Set "
                "rollout.max_completion_length or data.max_pixels lower, or sample on other devices: set "
                "rollout.engine to vllm_server."
            )
        self.max_num_seqs = failure.num_completions // 2
        self.counters["out_of_memory/rollout"] += 1
        logger.warning(
            "rollout: %s; max_num_seqs is %d from now on, and the completions are generated again",
            failure, self.max_num_seqs,
        )  # fmt: skip

    def generate_batch(self, requests: list[RolloutRequest], sampling: Sampling) -> list[Group]:
        """Generate the groups of one batch. A group of more than `max_num_seqs` completions is decoded in slices."""
        stop.check()
        device, num_generations = self.model.device, sampling.num_generations
        prefix = self.prefill([request.prompt for request in requests])
        paused = [request.paused(num_generations) for request in requests]
        owners = [row for row, group in enumerate(paused) for _ in group]
        streams = [stream_keys(sampling.seed, request.group_id, num_generations) for request in requests]
        keys = torch.cat([keys_G[list(group)] for keys_G, group in zip(streams, paused, strict=True)]).to(device)
        to_continue = [completion for group in paused for completion in group.values()]

        sampled: list[Completion] = []
        for start in range(0, len(to_continue), self.max_num_seqs):
            some = slice(start, start + self.max_num_seqs)
            rows = prefix.expand(owners[some], self.grouped_layers(prefix))
            tokens_NT = torch.stack([completion.token_ids for completion in to_continue[some]]).to(device)
            logits = self.forward(rows, tokens_NT, 0) if tokens_NT.shape[1] else rows.logits_NV
            sampled += self.decode(rows, logits, tokens_NT.shape[1], keys[some], to_continue[some], sampling)
        further = iter(sampled)
        return [
            request.group(list(islice(further, len(group))), self.policy_version)
            for request, group in zip(requests, paused, strict=True)
        ]

    def generate_turns(self, rows: list[TurnRow], sampling: Sampling) -> list[Completion]:
        """Sample one more turn of each row. Earlier turns are computed again, as a part of its prompt."""
        stop.check()
        sizes = {row.group_id: row.member + 1 for row in sorted(rows, key=lambda row: row.member)}
        streams = {group_id: stream_keys(sampling.seed, group_id, size) for group_id, size in sizes.items()}
        keys = torch.stack([streams[row.group_id][row.member] for row in rows])
        prefix = self.prefill([row.prompt for row in rows], [row.completion.so_far() for row in rows])
        prefix = prefix.expand(list(range(len(rows))), self.grouped_layers(prefix))
        completions = [row.completion for row in rows]
        return self.decode(
            prefix, prefix.logits_NV, 0, keys.to(self.model.device), completions, sampling
        )  # fmt: skip

    def grouped_layers(self, prefix: Prefix) -> set[int]:
        """Return the layers of a prefilled cache that can hold the keys of a prompt once."""
        return group_layers(prefix.cache, self.model.config) if routes_attention(self.model) else set()

    def prefill(self, prompts: Sequence[Prompt], paths: Sequence[Path] = ()) -> Prefix:
        """Run one forward over prompts and images, left-padded so that all rows end together.

        `paths` are the tokens that follow each prompt, by default none.
        """
        family, device = self.vision.family, self.model.device
        after = [[path] for path in paths] or [[] for _ in prompts]
        rendered = [
            each
            for prompt, some in zip(prompts, after, strict=True)
            for each in (prompt, *(observation for path in some for observation in path.observations.values()))
        ]
        names = token_input_names(rendered)
        rows = [token_inputs(p, some, names, family, self.model) for p, some in zip(prompts, after, strict=True)]
        kwargs = collate_rows(rows, device, pad_left=True)
        with self.together(len(self.vision.calls(rendered))):
            features = self.vision.encode(rendered)
            with self.vision.given([features[each] for each in rendered if each in features]) as image_inputs:
                cache, logits = self.run_model(kwargs | image_inputs)
        next_positions = torch.stack([row["position_ids"].max() + 1 for row in rows]).to(device)[:, None]
        next_positions = next_positions.expand(*kwargs["position_ids"].shape[:-1], 1)
        cross = {name: mask[:, -1:] for name, mask in kwargs.items() if name == "cross_attention_mask"}
        is_padded = len({row["input_ids"].shape[-1] for row in rows}) > 1
        return Prefix(cache, logits, kwargs["attention_mask"], is_padded, next_positions, cross)

    def decode(
        self,
        prefix: Prefix,
        logits: Float[Tensor, "rows vocabulary"],
        num_before: int,
        keys_N: Int[Tensor, " completions"],
        to_continue: Sequence[Completion],
        sampling: Sampling,
    ) -> list[Completion]:
        """Continue N completions of N prefix rows, to which `num_before` tokens were appended, from these logits.

        Each forward adds one token to each.
        """
        num, device = len(keys_N), keys_N.device
        limits = [sampling.end(completion.length_so_far) - completion.length_so_far for completion in to_continue]
        ends = EndOfTurn(self.stop_token_ids, sampling.stop_sequences, limits, device)
        banned = torch.tensor(self.banned_token_ids, dtype=torch.int64, device=device)
        tokens_NT = torch.zeros(num, max(limits), dtype=torch.int64, device=device)
        logprobs_NT = torch.zeros(num, max(limits), device=device)
        positions_N = to_device(torch.tensor([len(completion.token_ids) for completion in to_continue]), device)
        rows, finished = torch.arange(num, device=device), torch.zeros(num, dtype=torch.bool, device=device)

        for step in range(max(limits)):
            stop.check()
            tokens, logprobs = next_tokens(logits, keys_N[rows], positions_N[rows] + step, sampling, banned)
            tokens_NT[rows, step], logprobs_NT[rows, step] = tokens, logprobs
            finished = finished | ends.after(step, tokens, rows, tokens_NT)
            num_finished = int(finished.sum())  # the only wait for the device in a step
            if num_finished == len(rows) or step + 1 == max(limits):
                break
            if num_finished >= COMPACT_FRACTION * len(rows):
                unfinished = (~finished).nonzero()[:, 0]
                prefix = prefix.keep(unfinished)
                rows, tokens, finished = rows[unfinished], tokens[unfinished], finished[unfinished]
            logits = self.forward(prefix, tokens[:, None], num_before + step)
        return self.completions(to_continue, tokens_NT.cpu(), logprobs_NT.cpu(), ends, sampling)

    def forward(
        self, prefix: Prefix, tokens_NS: Int[Tensor, "rows new"], num_before: int
    ) -> Float[Tensor, "rows vocabulary"]:
        """Append tokens to completions of `num_before` tokens, and return the logits after the last one."""
        num, num_new = tokens_NS.shape
        layout, mask = prefix.attention(num_before, num_new), None
        if layout is None:
            mask = torch.cat([prefix.mask, prefix.mask.new_ones(num, num_before + num_new)], dim=1)
        kwargs = {
            "input_ids": tokens_NS,
            "attention_mask": mask,
            "position_ids": prefix.next_positions + num_before + torch.arange(num_new, device=tokens_NS.device),
            **{name: mask.expand(-1, num_new, -1, -1) for name, mask in prefix.cross_attention.items()},
        }
        with self.together(num_vision_calls=0), attention_layout(layout):
            return self.run_model(kwargs, prefix.cache)[1]

    def run_model(
        self, kwargs: dict[str, Any], cache: Cache | None = None
    ) -> tuple[Cache, Float[Tensor, "rows vocabulary"]]:
        """Run one forward that appends tokens to the cache. Return the cache, and the logits after the last token."""
        if cache is None:  # not all models make one
            from transformers import DynamicCache

            cache = DynamicCache(config=self.model.config.get_text_config())
        hidden, output = run_body(self.model, **kwargs, **{self.cache_name: cache}, use_cache=True)
        head: Any = self.model.get_output_embeddings()
        logits = final_logits(head(hidden[:, -1]), self.model)
        return getattr(output, self.cache_name), logits

    def completions(
        self,
        to_continue: Sequence[Completion],
        tokens_NT: Int[Tensor, "completions tokens"],
        logprobs_NT: Float[Tensor, "completions tokens"],
        ends: EndOfTurn,
        sampling: Sampling,
    ) -> list[Completion]:
        """Append each row to its completion, up to the end of the turn or the limit."""
        lengths, stopped = ends.lengths(tokens_NT)
        rows = [row[:length].clone() for row, length in zip(tokens_NT, lengths, strict=True)]
        turns = [torch.cat([c.last_turn, row]) for c, row in zip(to_continue, rows, strict=True)]
        texts = self.tokenizer.batch_decode(turns, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        reasons: list[FinishReason] = [
            "stop" if stops else sampling.reason_at(completion.length_so_far + length)
            for completion, length, stops in zip(to_continue, lengths, stopped, strict=True)
        ]
        return [
            completion.continued(row, logprobs[: len(row)].clone(), reason, text)
            for completion, row, logprobs, reason, text in zip(
                to_continue, rows, logprobs_NT, reasons, texts, strict=True
            )
        ]


class TurnRow(NamedTuple):
    """A completion that continues after an observation."""

    number: int
    """Number of its request."""
    group_id: str
    member: int
    """Its index in its group."""
    prompt: Prompt
    completion: Completion

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the next turn follows."""
        return len(self.prompt.token_ids) + self.completion.length_so_far


def turns_to_continue(number: int, request: RolloutRequest) -> list[TurnRow]:
    """Return the rows of a request for a further turn, or none for a first turn."""
    paused = request.paused(0) if request.partial else {}
    if not any(completion.contexts or completion.pending for completion in paused.values()):
        return []
    return [TurnRow(number, request.group_id, member, request.prompt, each) for member, each in paused.items()]


def training_engine(
    config: RunConfig, initial: str, weights: PolicyWeights, builder: PromptBuilder, ranks: Ranks
) -> HFEngine:
    """Build the engine that samples from the policy itself."""
    return HFEngine.for_policy(weights.policy, builder.processor.tokenizer, config.rollout.max_num_seqs)


def evaluation_engine(config: RunConfig, checkpoint: str, builder: PromptBuilder, ranks: Ranks) -> HFEngine:
    """Load a checkpoint, and build an engine that samples from it.

    The policy computes log-probs at the temperature of the evaluation, and at 1 if that is greedy, as the engine does.
    """
    rollout = config.rollout.model_copy(update={"temperature": config.rollout.eval_temperature or 1.0})
    policy = load_policy(config.model_copy(update={"rollout": rollout}), checkpoint, None).to(ranks.device)
    return HFEngine.for_policy(policy, builder.processor.tokenizer, config.rollout.max_num_seqs)


def cache_name(model: torch.nn.Module) -> str:
    """Return the name of the KV cache in the model's arguments and output, which newer transformers call `cache`."""
    return "cache" if "cache" in signature(model.forward).parameters else "past_key_values"


@contextmanager
def generation_mode(model: PreTrainedModel) -> Iterator[None]:
    """Run a block in eval mode without gradient checkpointing, which would drop the KV cache; then restore both.

    Layers are not compiled for it, since each token has other shapes of the cache.
    """
    training = [module for module in model.modules() if module.training]
    checkpointing: list[Any] = [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]
    model.eval()
    for module in checkpointing:
        module.gradient_checkpointing = False
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for module in training:
            module.training = True
        for module in checkpointing:
            module.gradient_checkpointing = True
