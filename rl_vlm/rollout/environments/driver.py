"""Trajectories: completions of several turns, between which tools run (`turns.py`).

All completions advance in waves: the engine samples a turn of each, then the tools of all run concurrently. With an
engine that takes requests at any time, each advances on its own.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from rl_vlm.data.tool_calls import CLOSE
from rl_vlm.data.turns import TurnFormat
from rl_vlm.distributed.collectives import Collectives
from rl_vlm.errors import RolloutError
from rl_vlm.rollout.engine import ConcurrentEngine, RolloutEngine, Submitted, TurnLost
from rl_vlm.rollout.environments.advance import Course, EngineClock, Independent, Steps, settle
from rl_vlm.rollout.environments.contract import COLUMN, Toolbox
from rl_vlm.rollout.environments.instances import Instance, Instances
from rl_vlm.rollout.environments.member import Member
from rl_vlm.rollout.environments.turns import TurnLimits, TurnRunner
from rl_vlm.types import NO_TOKENS, Group, Prompt, RolloutRequest, Sampling

ENDED = replace(NO_TOKENS, finish_reason="stop")
"""Stands for a completion that does not take part in a wave."""
UNLIKE_STARTS = "environment/unlike_starts"
"""Counts groups whose completions started unlike each other."""

logger = logging.getLogger(__name__)


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
        self.turns = TurnRunner(toolbox, limits)
        self.instances = instances
        self.keeps_instances = keeps_instances
        self.together = together
        self.kept: list[Instance] = []
        self.counters: Counter[str] = Counter()
        self.clock = EngineClock()
        """Times of the last rollout."""

    def generate(self, engine: RolloutEngine, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Group]:
        """Generate one group of trajectories per request, in order."""
        by_request = [self.members(request, sampling.num_generations) for request in requests]
        stops = dict.fromkeys(ids for each in self.formats.values() for ids in each.stop_sequences)
        sampling = replace(
            sampling, max_rollout_tokens=self.limits.max_turn_tokens, stop_sequences=tuple(stops),
            stop_texts=(CLOSE,) * bool(stops),
        )  # fmt: skip
        waiting = deque(chain.from_iterable(by_request))
        self.clock = EngineClock()
        with self.clock.rollout():
            if isinstance(engine, ConcurrentEngine):
                self.advance_independently(engine, waiting, sampling)
            else:
                self.advance_in_waves(engine, waiting, sampling)
        for members in by_request:
            self.counters[UNLIKE_STARTS] += len({m.completion.start for m in members if not m.completion.fault}) > 1
        return [
            Group(request.group_id, request.prompt, [m.completion for m in members], engine.policy_version)
            for request, members in zip(requests, by_request, strict=True)
        ]

    def starting_prompts(self, prompts: Iterable[Prompt], seed: int) -> Iterator[Prompt]:
        """Yield prompts with the content that `reset` adds to them, for a memory plan.

        One environment after the other is reset. If a reset fails, yield the prompt without it.
        """
        for index, prompt in enumerate(prompts):
            (member,) = self.members(RolloutRequest(f"plan/{index}", prompt), 1)
            if member.kind is None or (instance := self.instances.acquire(member.kind)) is None:
                yield prompt
                continue
            member.enter(instance)
            course = Course(self.turns.reset(member, seed))
            course.resume()
            settle([course], self.limits.tool_timeout)
            self.instances.release(instance)
            self.take_counters()  # they are about rollouts
            if fault := member.completion.fault:
                logger.warning("%s is planned without what its environment shows: %s", prompt.name, fault.message)
            yield member.prompt

    def members(self, request: RolloutRequest, num: int) -> list[Member]:
        """Return the completions of a group before their first turn."""
        columns = request.prompt.sample.columns
        kind, schemas = self.toolbox.kind_of(columns), self.toolbox.schemas_of(columns)
        chosen = self.formats[None if None in self.formats else columns.get(COLUMN)]
        starts: dict[tuple[str | None, ...], Prompt] = {}
        return [Member(request, i, kind, schemas, chosen, starts) for i in range(num)]

    def goes_on(self, has_work: bool) -> bool:
        """Return whether there is one more wave, on any of the ranks that must call the engine equally often."""
        return has_work if self.together is None else bool(self.together.max([int(has_work)])[0])

    def advance_in_waves(self, engine: RolloutEngine, waiting: deque[Member], sampling: Sampling) -> None:
        """Run completions: the engine samples a turn of each, then the calls of all run concurrently."""
        active: dict[Course, Member] = {}
        while self.goes_on(bool(waiting or active)):
            for course, member in self.admit(waiting, sampling, bool(active)):
                active[course] = member
                course.resume()
            settle(list(active), self.limits.tool_timeout)
            sampled = [course for course in active if not course.has_ended]
            with self.clock.wave():
                self.sample_turns(engine, [active[course] for course in sampled], sampling)
            for course in sampled:
                course.resume()
            settle(sampled, self.limits.tool_timeout)
            active = {course: active[course] for course in sampled if not course.has_ended}

    def advance_independently(self, engine: ConcurrentEngine, waiting: deque[Member], sampling: Sampling) -> None:
        """Run completions. Each continues as soon as its turn is sampled or its calls have ended."""
        active: dict[Course, Member] = {}
        with engine.session(sampling) as session:
            courses = Independent(session, self.clock, self.limits.tool_timeout)
            while waiting or active:
                new = dict(self.admit(waiting, sampling, bool(active)))
                active |= new
                for course in [*new] or courses.ready(active):
                    member = active[course]
                    if course.turn is not None:
                        self.take_turn(member, course.turn)
                    courses.resume(course)
                    if course.waits_for_turn:
                        courses.submit(course, turn_request([member], sampling.num_generations))
                    elif course.has_ended:
                        del active[course]

    def admit(self, waiting: deque[Member], sampling: Sampling, others_run: bool) -> Iterator[tuple[Course, Member]]:
        """Yield the courses of as many completions as there are instances for.

        Raises RolloutError if there is none and no others run, which could free one.
        """
        while waiting and (instance := self.instances.acquire(waiting[0].kind)) is not None:
            member, others_run = waiting.popleft(), True
            member.enter(instance)
            yield Course(self.steps(member, sampling)), member
        if waiting and not others_run:
            raise RolloutError(
                f"rollout.max_environments {self.instances.max_num} is too small: all environments are kept for "
                "reward functions that name `environments`, and further completions wait for one"
            )

    def steps(self, member: Member, sampling: Sampling) -> Steps:
        """Run a completion, and free its instance."""
        yield from self.turns.run(member, sampling)
        self.free(member)

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
                member.take(group)

    def take_turn(self, member: Member, turn: Submitted) -> None:
        """Add the turn that an engine has sampled. If it is lost, the completion is a fault."""
        try:
            member.take(turn.group())
        except TurnLost as error:
            member.fail("server", str(error))

    def free(self, member: Member) -> None:
        """Free the instance of a completion, or keep it until `release`."""
        instance = member.leave(self.keeps_instances)
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
