"""One completion: its reset, what happens after each turn, and its reward.

    reset ─► turn ─ calls ─► tools ─ observation ─► turn ─ … ─► turn without a call ─► get_reward
    reset ─► turn ─────────► step ── observation ─► turn ─ … ─► step that is done ───► get_reward

A failure of an environment ends its completion as a fault, which is masked. It is never a reward of 0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from rl_vlm.data.tool_calls import problem_of_call
from rl_vlm.data.turns import ParsedTurn, TurnFormat
from rl_vlm.data.video.shown import decode_medium
from rl_vlm.errors import DataError
from rl_vlm.rollout.environments.advance import Steps
from rl_vlm.rollout.environments.context_policy import ContextPolicy, read_again
from rl_vlm.rollout.environments.contract import Content, Toolbox, read_content, read_reward, with_frames
from rl_vlm.rollout.environments.failures import ToolFailure
from rl_vlm.rollout.environments.hosts import QueuedCall
from rl_vlm.rollout.environments.member import Member, Running
from rl_vlm.rollout.environments.starts import digests_of, offered, own_copy
from rl_vlm.types import Completion, FinishReason, Observation, Prompt, Sampling, ToolCall, ToolResult, Turn

CHARACTERS_PER_TOKEN = 256
"""A text with more characters per token of the longest completion is too long, and is not tokenized."""


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
    context_policy: ContextPolicy | None = None
    """How contexts are edited. None: they hold all images."""


@dataclass(frozen=True)
class TurnRunner:
    """Runs the turns of a completion, which an engine samples between them."""

    toolbox: Toolbox
    limits: TurnLimits

    def run(self, member: Member, sampling: Sampling) -> Steps:
        """Run a completion. Yields a call that it waits for, or None if its next turn is to be sampled."""
        yield from self.reset(member, sampling.seed)
        while member.is_active:
            yield None
            if (running := self.begin(member)) is not None:
                yield from self.until_answered(running.calls)
                self.observe(running, sampling.max_completion_length)
        yield from self.finish(member)

    def reset(self, member: Member, seed: int) -> Steps:
        """Reset the environment of a completion, if it has one, which may give it another prompt.

        Yields a call that it waits for. If the reset fails, the completion ends as a fault.
        """
        assert member.instance is not None
        if member.kind is not None:
            columns = member.request.prompt.sample.columns
            arguments = member.kind.reset_arguments(offered(member.request, seed), columns)
            calls = member.instance.start(own_copy(arguments), self.limits.max_image_pixels, member.format.prompt_rule)
            yield from self.until_answered(calls)
            self.start(member, calls)

    def until_answered(self, calls: Sequence[QueuedCall | str]) -> Steps:
        """Wait for one call after the other, until all have ended or one is a fault."""
        for call in calls:
            if isinstance(call, QueuedCall):
                yield call
                if not call.future.done() or self.is_fault(call.future.exception()):
                    return

    def start(self, member: Member, calls: Sequence[QueuedCall]) -> None:
        """Give a completion the prompt with the contents that `reset` and `system_prompt` returned."""
        assert member.instance is not None
        try:
            contents = [member.instance.finish(call, self.limits.tool_timeout) for call in calls]
            if any(content is not None for content in contents):
                member.start_with(self.starting_prompt(member, *contents))
        except ToolFailure as failure:
            member.instance.drop(calls)
            member.fail(failure.fault_in("reset"), f"reset: {failure.message}")
        except DataError as error:
            member.fail("reset", f"reset: {error}")

    def starting_prompt(self, member: Member, content: Content | None, system: Content | None = None) -> Prompt:
        """Return the prompt with content at its end, and with `system` in a message of the system.

        Members of a group share it if their contents are equal. Raises DataError if the model cannot have it.
        """
        key = digests_of((content, system))
        if key not in member.starts:
            sample = member.request.prompt.sample
            for some, add in ((content, member.format.reset_sample), (system, member.format.system_sample)):
                if some is not None:
                    sample = add(sample, some.blocks, [decode_medium(file) for file in some.images], some.images)
            prompt = member.format.builder.build(sample)
            longest, length = self.limits.max_prompt_length, len(prompt.token_ids)
            if longest is not None and length > longest:
                raise DataError(f"the prompt has {length} tokens, more than data.max_prompt_length {longest}")
            member.starts[key] = prompt
        return member.starts[key]

    def begin(self, member: Member) -> Running | None:
        """Read a turn, and start its calls. Return None if the completion ends with it."""
        completion = member.completion
        if completion.finish_reason == "fault":
            return None
        if completion.finish_reason != "stop":  # a turn at a limit can hold half a call
            member.end("length", Turn(completion.text, completion.text.strip()))
            return None
        if member.takes_steps:
            return self.begin_step(member)
        running = Running(member, parsed(member), [])
        if not running.turn.calls and running.turn.problem is None:
            member.end("stop", running.seen())
            return None
        if len(completion.turns) + 1 >= self.limits.max_turns:
            member.end("turns", running.seen())
            return None
        running.calls.extend(self.begin_call(member, call) for call in running.turn.calls)
        return running

    def begin_step(self, member: Member) -> Running:
        """Start the step of a turn. The last turn is a step, too."""
        assert member.instance is not None
        text = member.completion.text
        call = member.instance.step(text, self.limits.max_image_pixels, member.format.result_rule)
        return Running(member, ParsedTurn(text, text.strip()), [call])

    def begin_call(self, member: Member, call: ToolCall) -> QueuedCall | str:
        """Start a call, or return why it cannot be made."""
        assert member.instance is not None
        if problem := problem_of_call(call, member.schemas):
            return problem
        read = partial(read_content, max_image_pixels=self.limits.max_image_pixels)
        complete = partial(with_frames, rule=member.format.result_rule)
        if call.name in self.toolbox.functions:
            return member.instance.call(partial(self.toolbox.functions[call.name], **call.arguments), read, complete)
        return member.instance.method(call.name, call.arguments, read, complete)

    def observe(self, running: Running, max_tokens: int) -> None:
        """Wait for the calls of a turn, and show their results to the model, all or none of them."""
        member, completion = running.member, running.member.completion
        try:
            turn, end = self.step_taken(running) if member.takes_steps else self.results_seen(running)
            if end is not None:
                return member.end(end, turn)
            if num_characters(turn.results) > CHARACTERS_PER_TOKEN * max_tokens:
                return member.end("length", replace(turn, results=()))
            seen = rendered(member.format, member.name, completion.last_turn.tolist(), turn)
            going_on, observations = self.going_on(member, replace(completion, turns=(*completion.turns, turn)), seen)
        except ToolFailure as failure:
            assert member.instance is not None
            member.instance.drop([call for call in running.calls if isinstance(call, QueuedCall)])
            return member.fail(failure.kind, failure.message, running.seen())
        except DataError as error:
            return member.fail("observation", str(error), running.seen())
        if going_on.length_so_far >= max_tokens:
            return member.end("length", replace(turn, results=()))
        return member.go_on(going_on, observations)

    def going_on(
        self, member: Member, completion: Completion, seen: Observation
    ) -> tuple[Completion, list[Observation]]:
        """Return the completion before its next turn, which follows `seen`, and the observations of its context.

        Edit the context if that is due.
        """
        policy, observations = self.limits.context_policy, [*member.observations, seen]
        if policy is None or not policy.is_due(completion, observations):
            edited = ()
        else:
            observations = policy.edit(completion, completion.turns, observations, partial(rendered, member.format))
            edited = read_again(completion, observations)
        return replace(completion, finish_reason="paused", pending=seen, edited=edited), observations

    def results_seen(self, running: Running) -> tuple[Turn, None]:
        """Wait for the calls of a turn. Raises ToolFailure if the environment has failed."""
        results = [self.result(running.member, call) for call in running.calls]
        return running.seen(results or [told(running.turn.problem or "")]), None

    def step_taken(self, running: Running) -> tuple[Turn, FinishReason | None]:
        """Wait for a step. Return the turn, and how the completion ends with it, if it does.

        A step that fails so that the model is told has a reward of 0. Raises ToolFailure if the environment has failed.
        """
        (call,), member = running.calls, running.member
        assert isinstance(call, QueuedCall) and member.instance is not None
        at_limit = "turns" if len(member.completion.turns) + 1 >= self.limits.max_turns else None
        try:
            step = member.instance.finish(call, self.limits.tool_timeout)
        except ToolFailure as failure:
            return running.seen([self.told_of(failure, call)], 0.0), at_limit
        shown = ToolResult(step.content.blocks, step.content.images, None, call.seconds)
        return running.seen([shown], step.reward), step.end or at_limit

    def result(self, member: Member, call: QueuedCall | str) -> ToolResult:
        """Wait for a call. Raises ToolFailure if its environment has failed."""
        if isinstance(call, str):
            return told(call)
        assert member.instance is not None
        try:
            content = member.instance.finish(call, self.limits.tool_timeout)
        except ToolFailure as failure:
            return self.told_of(failure, call)
        return ToolResult(content.blocks, content.images, None, call.seconds)

    def told_of(self, failure: ToolFailure, call: QueuedCall) -> ToolResult:
        """Return the message to the model about a failure. Raises the failure if the completion is a fault."""
        if self.is_fault(failure):
            raise failure
        return told(failure.text, call.seconds)

    def is_fault(self, failure: BaseException | None) -> bool:
        """Return whether the failure of a call is a fault. The model is told of others."""
        if not isinstance(failure, ToolFailure):
            return False
        return not (failure.kind == "action" or (failure.kind == "exception" and not self.limits.masks_errors))

    def finish(self, member: Member) -> Steps:
        """Add the reward of the environment of a completion that has ended without a fault."""
        if member.completion.fault:
            return
        assert member.instance is not None
        if member.takes_steps:
            member.add_reward(sum(turn.reward or 0.0 for turn in member.completion.turns))
        if member.kind is not None and member.kind.has_method("get_reward"):
            call = member.instance.method("get_reward", {}, read_reward)
            yield call
            self.add_reward(member, call)

    def add_reward(self, member: Member, call: QueuedCall) -> None:
        """Add the reward that `get_reward` returned: a number, or None if it does not apply."""
        assert member.instance is not None
        try:
            member.add_reward(member.instance.finish(call, self.limits.tool_timeout))
        except ToolFailure as failure:
            member.fail(failure.fault_in("get_reward"), failure.message)


def rendered(turn_format: TurnFormat, name: str, token_ids: list[int], turn: Turn) -> Observation:
    """Render the results of a turn. Raises DataError if the model cannot have them."""
    media = [[decode_medium(file) for file in result.images] for result in turn.results]
    return turn_format.observe(name, token_ids, turn.calls, turn.results, media)


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


def told(error: str, seconds: float = 0.0) -> ToolResult:
    """Return the result of a call that failed, as TRL writes it for the model."""
    return ToolResult([{"type": "text", "text": str({"error": error})}], error=error, seconds=seconds)


def num_characters(results: Sequence[ToolResult]) -> int:
    """Return the number of characters of all texts of results."""
    return sum(len(block.get("text", "")) for result in results for block in result.content)
