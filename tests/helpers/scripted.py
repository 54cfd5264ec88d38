"""An engine that writes scripted turns, and environments for tests of trajectories."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from rl_vlm.rollout.engine import Submitted
from rl_vlm.types import Completion, Group, RolloutRequest, Sampling

Script = Callable[[int, int], str]
"""The text of a completion's turn, by the completion's index and the turn's number."""


class ScriptedEngine:
    """A `RolloutEngine` whose turns are scripted. It records the requests of each wave."""

    policy_version = 3

    def __init__(self, tokenizer: Any, stop: str, script: Script) -> None:
        self.tokenizer = tokenizer
        self.stop = tokenizer.convert_tokens_to_ids(stop)
        self.script = script
        self.counters: Counter[str] = Counter()
        self.waves: list[list[RolloutRequest]] = []

    def generate(self, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Group]:
        self.waves.append(list(requests))
        return [
            request.group([self.turn(i, c, sampling) for i, c in request.paused(sampling.num_generations).items()], 3)
            for request in requests
        ]

    def turn(self, index: int, completion: Completion, sampling: Sampling) -> Completion:
        """Write the next turn, up to the limit."""
        so_far = completion.length_so_far
        done = [part for context in completion.contexts for part in context.parts if isinstance(part, int)]
        number = len(done) or int(completion.pending is not None)
        ids = self.tokenizer(self.script(index, number), add_special_tokens=False)["input_ids"] + [self.stop]
        room = sampling.end(so_far) - so_far
        reason = "stop" if len(ids) <= room else sampling.reason_at(so_far + room)
        return completion.continued(
            torch.tensor(ids[:room]), torch.zeros(len(ids[:room])), reason, self.script(index, number)
        )

    def sync(self, source: Any, version: int) -> int:
        return 0

    def sleep(self) -> bool:
        return True

    def close(self) -> None:
        pass


class ScriptedSession:
    """Samples turns in threads."""

    def __init__(self, engine: "ConcurrentScript", pool: ThreadPoolExecutor, sampling: Sampling) -> None:
        self.engine, self.pool, self.sampling = engine, pool, sampling

    def submit(self, request: RolloutRequest) -> Submitted:
        ((index, completion),) = request.paused(self.sampling.num_generations).items()
        number = len(completion.turns)

        def sample() -> Completion:
            time.sleep(self.engine.seconds(index, number))
            return self.engine.turn(index, completion, self.sampling)

        return Submitted(self.pool.submit(sample), lambda turn: request.group([turn], 3))


class ConcurrentScript(ScriptedEngine):
    """A `ConcurrentEngine`. Each turn takes `seconds`, by the completion's index and the turn's number."""

    make_session = ScriptedSession
    seconds: Callable[[int, int], float] = staticmethod(lambda index, turn: 0.0)

    @contextmanager
    def session(self, sampling: Sampling) -> Iterator[Any]:
        with ThreadPoolExecutor(64) as pool:
            yield self.make_session(self, pool, sampling)


def call(name: str, **arguments: Any) -> str:
    """A call in the form of Qwen's templates and of our text."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def grey(value: int, width: int = 32, height: int = 24) -> np.ndarray:
    """An image of one grey."""
    return np.full((height, width, 3), value, np.uint8)
