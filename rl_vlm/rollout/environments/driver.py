"""Trajectories: completions of several turns, between which tools run.

    reset ─► turn ─ calls ─► tools ─ observation ─► turn ─ … ─► turn without a call ─► get_reward

All completions advance in waves: the engine samples a turn of each, then the tools of all run concurrently.
A failure of an environment ends its completion as a fault, which is masked. It is never a reward of 0.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch

from rl_vlm.data.images import decoded
from rl_vlm.data.tool_calls import CLOSE, problem_of_call
from rl_vlm.data.turns import ParsedTurn, TurnFormat
from rl_vlm.distributed.collectives import Collectives
from rl_vlm.errors import DataError, RolloutError
from rl_vlm.rollout.engine import RolloutEngine
from rl_vlm.rollout.environments.contract import COLUMN, Content, EnvironmentKind, Schema, Toolbox, read_content
from rl_vlm.rollout.environments.instances import Instance, Instances, QueuedCall, ToolFailure
from rl_vlm.types import (
    NO_TOKENS,
    Completion,
    FinishReason,
    Group,
    Prompt,
    RolloutRequest,
    Sampling,
    ToolCall,
    ToolResult,
    Turn,
)

ENDED = replace(NO_TOKENS, finish_reason="stop")
"""Stands for a completion that does not take part in a wave."""
UNLIKE_STARTS = "environment/unlike_starts"
"""Counts groups whose completions started unlike each other."""
CHARACTERS_PER_TOKEN = 256
"""A text with more characters per token that is left is too long, and is not tokenized."""


@dataclass(frozen=True)
class TurnLimits:
    """Limits of trajectories."""

    max_turns: int
    max_turn_tokens: int | None
    tool_timeout: float
    masks_errors: bool
    """Whether an exception in a tool is a fault. Otherwise the model is told."""
    max_image_pixels: int
    max_prompt_length: int | None


@dataclass
class Member:
    """A completion on its way."""

    request: RolloutRequest
    index: int
    kind: EnvironmentKind | None
    schemas: list[Schema]
    format: TurnFormat
    starts: dict[str, Prompt]
    """Prompts that environments have started completions of this group with, by a digest of the content."""
    completion: Completion = NO_TOKENS
    instance: Instance | None = None

    @property
    def prompt(self) -> Prompt:
        return self.completion.start or self.request.prompt

    @property
    def name(self) -> str:
        """Return how errors name its last turn."""
        return f"{self.request.prompt.name}, completion {self.index}, turn {len(self.completion.turns) + 1}"

    @property
    def is_active(self) -> bool:
        return self.completion.is_paused

    def end(self, reason: FinishReason, turn: Turn | None = None, fault: str | None = None) -> None:
        """End the completion, with its last turn."""
        turns = self.completion.turns if turn is None else (*self.completion.turns, turn)
        self.completion = replace(self.completion, finish_reason=reason, turns=turns, fault=fault, pending=None)

    def fail(self, kind: str, message: str, turn: Turn | None = None) -> None:
        """End the completion as a fault."""
        self.end("fault", turn, f"{kind}: {message}")


class Running(NamedTuple):
    """A turn whose calls run."""

    member: Member
    turn: ParsedTurn
    calls: list[QueuedCall | str]
    """One per call of the turn: the call, or why it cannot be made."""

    def seen(self, results: Sequence[ToolResult] = ()) -> Turn:
        """Return the turn with the results that the model sees."""
        return Turn(self.turn.text, self.turn.content, self.turn.calls, tuple(results))


class Trajectories:
    """Generates groups of trajectories with an engine that samples turns."""

    def __init__(
        self,
        toolbox: Toolbox,
        formats: Mapping[str | None, TurnFormat],
        limits: TurnLimits,
        instances: Instances,
        keeps_instances: bool = False,
        together: Collectives | None = None,
    ) -> None:
        """`formats` are by the names of environments, as in `toolbox.kinds`.

        With `keeps_instances`, instances stay in use until `release`, since reward functions look at them. `together`
        are the ranks that must call the engine equally often.
        """
        self.toolbox = toolbox
        self.formats = formats
        self.limits = limits
        self.instances = instances
        self.keeps_instances = keeps_instances
        self.together = together
        self.kept: list[Instance] = []
        self.counters: Counter[str] = Counter()

    def generate(self, engine: RolloutEngine, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Group]:
        """Generate one group of trajectories per request, in order."""
        by_request = [self.members(request, sampling.num_generations) for request in requests]
        stops = dict.fromkeys(ids for each in self.formats.values() for ids in each.stop_sequences)
        sampling = replace(
            sampling, max_rollout_tokens=self.limits.max_turn_tokens, stop_sequences=tuple(stops),
            stop_texts=(CLOSE,) * bool(stops),
        )  # fmt: skip
        waiting, active = deque(chain.from_iterable(by_request)), list[Member]()
        while self.goes_on(bool(waiting or active)):
            active += self.admit(waiting, sampling.seed)
            if waiting and not active:
                raise RolloutError(
                    f"rollout.max_environments {self.instances.max_num} is too small: all environments are kept for "
                    "reward functions that name `environments`, and further completions wait for one"
                )
            sampled = [member for member in active if member.is_active]
            self.sample_turns(engine, sampled, sampling)
            self.answer(sampled, sampling.max_completion_length)
            self.finish([member for member in active if not member.is_active])
            active = [member for member in active if member.is_active]
        for members in by_request:
            self.counters[UNLIKE_STARTS] += len({m.completion.start for m in members if not m.completion.fault}) > 1
        return [
            Group(request.group_id, request.prompt, [m.completion for m in members], engine.policy_version)
            for request, members in zip(requests, by_request, strict=True)
        ]

    def members(self, request: RolloutRequest, num: int) -> list[Member]:
        """Return the completions of a group before their first turn."""
        columns = request.prompt.sample.columns
        kind, schemas = self.toolbox.kind_of(columns), self.toolbox.schemas_of(columns)
        chosen = self.formats[None if None in self.formats else columns.get(COLUMN)]
        starts: dict[str, Prompt] = {}
        return [Member(request, i, kind, schemas, chosen, starts) for i in range(num)]

    def goes_on(self, has_work: bool) -> bool:
        """Return whether there is one more wave, on any of the ranks that must call the engine equally often."""
        return has_work if self.together is None else bool(self.together.max([int(has_work)])[0])

    def admit(self, waiting: deque[Member], seed: int) -> list[Member]:
        """Start as many completions as there are instances for. Their environments are reset concurrently."""
        admitted, resets = list[Member](), list[tuple[Member, QueuedCall]]()
        while waiting and (instance := self.instances.acquire(waiting[0].kind)) is not None:
            member = waiting.popleft()
            member.instance = instance
            admitted.append(member)
            if member.kind is not None:
                arguments = own_copy(member.kind.reset_arguments(offered(member.request, seed)))
                resets.append((member, instance.method("reset", arguments, self.read)))
        for member, call in resets:
            self.start(member, call)
        return admitted

    def start(self, member: Member, call: QueuedCall) -> None:
        """Give a completion the prompt with the content that `reset` returned."""
        assert member.instance is not None
        try:
            content = member.instance.finish(call, self.limits.tool_timeout)
            if content is not None:
                member.completion = replace(member.completion, start=self.starting_prompt(member, content))
        except ToolFailure as failure:
            member.fail("reset" if failure.kind == "exception" else failure.kind, f"reset: {failure.message}")
        except DataError as error:
            member.fail("reset", f"reset: {error}")

    def read(self, returned: Any) -> Content | None:
        """Read the content that `reset` returned, if any, or the content that a tool returned."""
        return None if returned is None else read_content(returned, self.limits.max_image_pixels)

    def starting_prompt(self, member: Member, content: Content) -> Prompt:
        """Return the prompt with content at its end. Members of a group share it if their content is equal.

        Raises DataError if the model cannot have it.
        """
        key = digest_of(content)
        if key not in member.starts:
            images = [decoded(image) for image in content.images]
            sample = member.format.reset_sample(member.request.prompt.sample, content.blocks, images, content.images)
            prompt = member.format.builder.build(replace(sample, is_made=True))
            longest, length = self.limits.max_prompt_length, len(prompt.token_ids)
            if longest is not None and length > longest:
                raise DataError(f"the prompt has {length} tokens, more than data.max_prompt_length {longest}")
            member.starts[key] = prompt
        return member.starts[key]

    def sample_turns(self, engine: RolloutEngine, members: Sequence[Member], sampling: Sampling) -> None:
        """Sample the next turn of each completion."""
        alike: dict[tuple[int, int], list[Member]] = {}
        for member in members:
            alike.setdefault((id(member.request), id(member.prompt)), []).append(member)
        requests = [turn_request(some, sampling.num_generations) for some in alike.values()]
        if not requests and self.together is None:
            return
        for some, group in zip(alike.values(), engine.generate(requests, sampling), strict=True):
            for member in some:
                new = group.completions[member.index]
                member.completion = replace(
                    member.completion, token_ids=new.token_ids, generator_logprobs=new.generator_logprobs,
                    finish_reason=new.finish_reason, text=new.text, contexts=new.contexts, pending=None,
                    fault=new.fault,
                )  # fmt: skip

    def answer(self, members: Sequence[Member], max_tokens: int) -> None:
        """Run the calls of all turns concurrently, and let the completions that have some go on."""
        running = [begun for member in members if (begun := self.begin(member)) is not None]
        for each in running:
            self.observe(each, max_tokens)

    def begin(self, member: Member) -> Running | None:
        """Read a turn, and start its calls. Return None if the completion ends with it."""
        completion = member.completion
        if completion.finish_reason == "fault":
            return None
        if completion.finish_reason != "stop":  # a turn at a limit can hold half a call
            member.end("length", Turn(completion.text, completion.text.strip()))
            return None
        running = Running(member, parsed(member), [])
        if not running.turn.calls and running.turn.problem is None:
            member.end("stop", running.seen())
            return None
        if len(completion.turns) + 1 >= self.limits.max_turns:
            member.end("turns", running.seen())
            return None
        running.calls.extend(self.begin_call(member, call) for call in running.turn.calls)
        return running

    def begin_call(self, member: Member, call: ToolCall) -> QueuedCall | str:
        """Start a call, or return why it cannot be made."""
        assert member.instance is not None
        if problem := problem_of_call(call, member.schemas):
            return problem
        if call.name in self.toolbox.functions:
            return member.instance.call(partial(self.toolbox.functions[call.name], **call.arguments), self.read_result)
        return member.instance.method(call.name, call.arguments, self.read_result)

    def read_result(self, returned: Any) -> Content:
        """Read the content that a tool returned. As in TRL, None is the text "None"."""
        return read_content(returned, self.limits.max_image_pixels)

    def observe(self, running: Running, max_tokens: int) -> None:
        """Wait for the calls of a turn, and show their results to the model, all or none of them."""
        member, turn, completion = running.member, running.turn, running.member.completion
        left = max_tokens - completion.length_so_far
        try:
            results = [self.result(member, call) for call in running.calls] or [told(turn.problem or "")]
            if num_characters(results) > CHARACTERS_PER_TOKEN * left:
                return member.end("length", running.seen())
            images = [[decoded(image) for image in result.images] for result in results]
            seen = member.format.observe(member.name, completion.last_turn.tolist(), turn.calls, results, images)
        except ToolFailure as failure:
            assert member.instance is not None
            member.instance.drop([call for call in running.calls if isinstance(call, QueuedCall)])
            return member.fail(failure.kind, failure.message, running.seen())
        except DataError as error:
            return member.fail("observation", str(error), running.seen())
        if len(seen.token_ids) >= left:
            return member.end("length", running.seen())
        member.completion = replace(
            completion, finish_reason="paused", pending=seen, turns=(*completion.turns, running.seen(results))
        )  # fmt: skip
        return None

    def result(self, member: Member, call: QueuedCall | str) -> ToolResult:
        """Wait for a call. Raises ToolFailure if its environment has failed."""
        if isinstance(call, str):
            return told(call)
        assert member.instance is not None
        try:
            content = member.instance.finish(call, self.limits.tool_timeout)
        except ToolFailure as failure:
            if failure.kind != "exception" or self.limits.masks_errors:
                raise
            return told(failure.text, call.seconds)
        return ToolResult(content.blocks, content.images, None, call.seconds)

    def finish(self, members: Sequence[Member]) -> None:
        """Ask the environments of completions that have ended for their rewards, and free their instances."""
        asked = [
            (member, member.instance.method("get_reward", {}, read_reward))
            for member in members
            if member.instance and member.kind and member.kind.has_reward and not member.completion.fault
        ]
        for member, call in asked:
            self.add_reward(member, call)
        for member in members:
            self.free(member)

    def add_reward(self, member: Member, call: QueuedCall) -> None:
        """Add what `get_reward` returned: a number, or None if it does not apply."""
        assert member.instance is not None
        try:
            reward = member.instance.finish(call, self.limits.tool_timeout)
            member.completion = replace(member.completion, environment_reward=reward)
        except ToolFailure as failure:
            member.fail("get_reward" if failure.kind == "exception" else failure.kind, failure.message)

    def free(self, member: Member) -> None:
        """Free the instance of a completion, or keep it until `release`."""
        instance, completion = member.instance, member.completion
        assert instance is not None
        member.instance = None
        if not len(completion.token_ids):  # a fault before the first token; it is not trained on
            first = member.prompt.token_ids[:1]
            completion = replace(completion, token_ids=first, generator_logprobs=torch.zeros(1))
        if member.kind is not None:
            live = instance.environment if self.keeps_instances and not instance.is_lost else None
            completion = replace(completion, environment=live, environment_name=member.kind.name)
        member.completion = completion
        if self.keeps_instances:
            self.kept.append(instance)
        else:
            self.instances.release(instance)

    def release(self) -> None:
        """Free the instances that were kept for reward functions."""
        for instance in self.kept:
            self.instances.release(instance)
        self.kept = []

    def close(self) -> None:
        """Close all instances."""
        self.instances.close()

    def take_counters(self) -> Counter[str]:
        """Return the numbers of events since the last call, by metric."""
        found = Counter[str]()
        for counters in (self.counters, *(each.counters for each in self.formats.values())):
            found.update(counters)
            counters.clear()
        return found


def generated(
    engine: RolloutEngine, trajectories: Trajectories | None, requests: Sequence[RolloutRequest], sampling: Sampling
) -> list[Group]:
    """Generate one group per request, in order: of trajectories, or of single turns."""
    if trajectories is None:
        return engine.generate(requests, sampling)
    return trajectories.generate(engine, requests, sampling)


def turn_request(members: Sequence[Member], num_generations: int) -> RolloutRequest:
    """Return the request for the next turn of completions of one group with the same prompt."""
    first = members[0]
    group_id, prompt = first.request.group_id, first.prompt
    completions = [ENDED] * num_generations
    for member in members:
        completions[member.index] = member.completion
    is_new = all(completion.is_paused and not completion.length_so_far for completion in completions)
    return RolloutRequest(group_id, prompt, None if is_new else Group(group_id, prompt, completions, 0))


def offered(request: RolloutRequest, seed: int) -> dict[str, Any]:
    """Return what `reset` can name: all columns of the row, its prompt and images, their sizes, and a seed.

    The seed is the same for all completions of a group.
    """
    sample = request.prompt.sample
    digest = hashlib.blake2b(f"{seed}/{request.group_id}/reset".encode(), digest_size=4).digest()
    return {
        "seed": int.from_bytes(digest, "little"),
        "image_sizes": [image.size for image in sample.images],
        "model_image_sizes": request.prompt.image_sizes,
        "images": list(sample.images),
        "image": sample.images[0] if len(sample.images) == 1 else None,
        "prompt": sample.prompt,
        **sample.columns,
    }


def parsed(member: Member) -> ParsedTurn:
    """Read the last turn of a completion. A call with values that JSON cannot hold is a problem to tell the model."""
    completion = member.completion
    try:
        turn = member.format.parse(completion.last_turn.tolist())
        json.dumps([[call.name, call.arguments] for call in turn.calls], ensure_ascii=False).encode()
    except Exception as error:  # a sampled call can hold anything
        problem = f"the call cannot be read: {type(error).__name__}"
        return ParsedTurn(completion.text, completion.text.strip(), problem=problem)
    return turn


def read_reward(returned: Any) -> float | None:
    """Read what `get_reward` returned: a number, or None if it does not apply."""
    return None if returned is None else float(returned)


def own_copy(value: Any) -> Any:
    """Return a copy for one environment, which may draw into images and change lists. Siblings have others."""
    from PIL import Image

    if isinstance(value, Image.Image):
        return value.copy()
    if isinstance(value, dict):
        return {key: own_copy(item) for key, item in value.items()}
    return [own_copy(item) for item in value] if isinstance(value, list) else copy.copy(value)


def told(error: str, seconds: float = 0.0) -> ToolResult:
    """Return the result of a call that failed, as TRL writes it for the model."""
    return ToolResult([{"type": "text", "text": str({"error": error})}], error=error, seconds=seconds)


def digest_of(content: Content) -> str:
    """Return a digest of content and its images."""
    digest = hashlib.blake2b(json.dumps(content.blocks).encode(), digest_size=16)
    for image in content.images:
        digest.update(hashlib.blake2b(image, digest_size=16).digest())
    return digest.hexdigest()


def num_characters(results: Sequence[ToolResult]) -> int:
    """Return the number of characters of all texts of results."""
    return sum(len(block.get("text", "")) for result in results for block in result.content)
