"""Completions that try to break the functions that ask a model: `judge`, with replies as wild, and `reward_model`."""

from __future__ import annotations

import atexit
import functools
import math
import random
import tempfile
import time
from contextlib import ExitStack

from rewards.calling import Call
from rewards.contract import Fault
from rewards.registry import BUILT_INS
from tests.fuzz.completions import BATCH, SECONDS_PER_CALL, limited, text
from tests.helpers.judge_server import JudgeServer
from tests.helpers.serving import in_thread
from tests.unit.rewards.judges.test_reward_model import saved

GOLD = {"judge": '{"score": 8}', "reward_model": "<answer>7</answer>"}
"""What texts are mutated from: for `judge` the reply of a model too."""


def check_asked(name: str, index: int) -> float:
    """Call a function on a batch and check its scores. Returns the seconds that the call took."""
    rng = random.Random(f"{name}:{index}")
    completions = [text(rng, GOLD[name]) for _ in range(BATCH)]
    arguments = {"completions": completions, "prompts": [text(rng, "Which digit?") for _ in range(BATCH)]}
    if name == "judge":
        judge_server().reply = text(rng, GOLD[name])
        arguments |= {"images": [[]] * BATCH, "base_url": judge_server().url, "model": "critic"}
    else:
        arguments |= {"model": checkpoint(), "device": "cpu", "max_length": 512}
    started = time.perf_counter()
    with limited(SECONDS_PER_CALL):
        scores = Call(BUILT_INS[name], arguments, BATCH).answer().scores
    seconds = time.perf_counter() - started
    assert len(scores) == BATCH
    for score in scores:
        if isinstance(score, Fault):
            assert name == "judge" and score.kind == "reply", f"{name} {index}: {score}"
        else:
            assert score is not None and math.isfinite(score), f"{name} {index}: {score}"
            assert name != "judge" or 0 <= score <= 1, f"{name} {index}: {score}"
    return seconds


@functools.cache
def opened() -> ExitStack:
    """Return what is closed when the process ends."""
    stack = ExitStack()
    atexit.register(stack.close)
    return stack


@functools.cache
def judge_server() -> JudgeServer:
    return opened().enter_context(in_thread(JudgeServer()))


@functools.cache
def checkpoint() -> str:
    """Return the folder of a tiny reward model."""
    return saved(opened().enter_context(tempfile.TemporaryDirectory()))
