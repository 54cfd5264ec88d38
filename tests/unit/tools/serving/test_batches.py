"""Requests of many threads in batches of one."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch

from rl_vlm.errors import DataError
from rl_vlm.tools.serving import batches
from rl_vlm.tools.serving.batches import Batches, Stopping
from rl_vlm.tools.serving.budget import NotInTime
from rl_vlm.types import Group, Prompt, RolloutRequest, Sample, Sampling

GREEDY = Sampling(1, 4, 0.0, 0)


class Engine:
    """Records its batches, and fails if a prompt is `bad`."""

    policy_version = 0

    def __init__(self, seconds: float = 0.0) -> None:
        self.counters: Counter[str] = Counter()
        self.seconds = seconds
        self.seen: list[tuple[list[str], Sampling]] = []

    def generate(self, requests: Sequence[RolloutRequest], sampling: Sampling) -> list[Group]:
        self.seen.append(([request.group_id for request in requests], sampling))
        time.sleep(self.seconds)
        if any(request.group_id == "bad" for request in requests):
            raise DataError("a bad prompt")
        return [Group(request.group_id, request.prompt, [], 0) for request in requests]

    def sync(self, source: Any, version: int) -> int:
        raise NotImplementedError

    def sleep(self) -> bool:
        return True

    def close(self) -> None: ...


def request(name: str) -> RolloutRequest:
    return RolloutRequest(name, Prompt(Sample(name, [], [], {}, ""), torch.tensor([1]), {}, {}))


def start(target: Callable[[], Any]) -> None:
    threading.Thread(target=target, daemon=True).start()


def test_what_waits_is_one_batch_per_sampling():
    engine, warm = Engine(), Sampling(2, 4, 1.0, 0)
    jobs = Batches(engine, 64)
    futures = [jobs.submit(request(name), warm if name in "bd" else GREEDY) for name in "abcd"]
    start(jobs.run)
    assert [future.result(5).group_id for future in futures] == ["a", "b", "c", "d"]
    assert engine.seen == [(["a", "c"], GREEDY), (["b", "d"], warm)]


def test_a_batch_is_as_large_as_the_engine_decodes_at_once():
    engine = Engine()
    jobs = Batches(engine, 4)
    futures = [jobs.submit(request(name), Sampling(2, 4, 1.0, 0)) for name in "abc"]
    start(jobs.run)
    assert [future.result(5).group_id for future in futures] == ["a", "b", "c"]
    assert [names for names, _ in engine.seen] == [["a", "b"], ["c"]]


def test_requests_that_arrive_a_little_later_join(monkeypatch):
    monkeypatch.setattr(batches, "COLLECT_SECONDS", 5.0)
    engine = Engine()
    jobs = Batches(engine, 2)
    start(jobs.run)
    first = jobs.submit(request("a"), GREEDY)
    time.sleep(0.2)
    second = jobs.submit(request("b"), GREEDY)
    assert (first.result(2).group_id, second.result(2).group_id) == ("a", "b")
    assert [names for names, _ in engine.seen] == [["a", "b"]]


def test_a_bad_request_fails_alone():
    jobs = Batches(Engine(), 64)
    good, bad, other = (jobs.submit(request(name), GREEDY) for name in ("good", "bad", "other"))
    start(jobs.run)
    assert (good.result(5).group_id, other.result(5).group_id) == ("good", "other")
    with pytest.raises(DataError, match="a bad prompt"):
        bad.result(5)


def test_of_many_threads_none_is_lost():
    jobs, answers = Batches(Engine(0.001), 8), {}
    start(jobs.run)

    def ask(name: str) -> None:
        answers[name] = jobs.submit(request(name), GREEDY).result(20).group_id

    threads = [threading.Thread(target=ask, args=[str(i)]) for i in range(100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == {str(i): str(i) for i in range(100)}


def test_closing_answers_what_waits_and_refuses_the_rest():
    engine = Engine(seconds=0.3)
    jobs = Batches(engine, 1)
    start(jobs.run)
    in_work, waiting = jobs.submit(request("a"), GREEDY), jobs.submit(request("b"), GREEDY)
    time.sleep(0.1)
    jobs.close()
    for future in (in_work, waiting):
        with pytest.raises(Stopping):
            future.result(0)
    with pytest.raises(Stopping):
        jobs.submit(request("c"), GREEDY)
    time.sleep(0.4)  # the engine's own answer comes too late, and is dropped
    assert isinstance(in_work.exception(), Stopping)


def test_a_request_for_which_nobody_waits_is_not_generated():
    engine = Engine()
    jobs = Batches(engine, 64)
    given_up, other = jobs.submit(request("a"), GREEDY), jobs.submit(request("b"), GREEDY)
    assert given_up.cancel()
    start(jobs.run)
    assert other.result(5).group_id == "b"
    assert (engine.seen, jobs.unanswered) == ([(["b"], GREEDY)], set())


def test_a_request_that_is_given_up_while_it_is_generated_does_no_harm():
    jobs = Batches(Engine(seconds=0.3), 64)
    start(jobs.run)
    given_up = jobs.submit(request("a"), GREEDY)
    time.sleep(0.1)
    assert given_up.cancel()
    assert jobs.submit(request("b"), GREEDY).result(5).group_id == "b"


@pytest.mark.parametrize(("seconds", "is_gone", "error"), [(9.0, True, ConnectionError), (0.0, False, NotInTime)])
def test_a_request_without_a_client_or_time_leaves_the_queue(seconds, is_gone, error):
    jobs = Batches(Engine(), 64)
    with pytest.raises(error):
        jobs.group(request("a"), GREEDY, time.monotonic() + seconds, lambda: is_gone)
    assert (jobs.waiting, jobs.unanswered) == ({}, set())


def test_a_client_that_goes_while_it_waits_is_noticed(monkeypatch):
    monkeypatch.setattr(batches, "WATCH_SECONDS", 0.01)
    jobs, looks = Batches(Engine(), 64), iter([False, False, True])
    with pytest.raises(ConnectionError):
        jobs.group(request("a"), GREEDY, time.monotonic() + 20, lambda: next(looks))


@pytest.mark.parametrize("names", [["good"], ["bad"], ["good", "bad", "other"]], ids="-".join)
def test_no_prompt_is_held_after_its_answer(names):
    """A garbage collection would find the cycle of an error and its traceback, but nobody knows when."""
    jobs = Batches(Engine(), len(names))
    requests = [request(name) for name in names]
    prompts = [weakref.ref(each.prompt) for each in requests]

    def ask(each: RolloutRequest) -> None:
        with suppress(DataError):
            jobs.group(each, GREEDY, time.monotonic() + 20, lambda: False)

    threads = [threading.Thread(target=ask, args=[requests.pop()]) for _ in names]
    gc.disable()
    try:
        for thread in threads:
            thread.start()
        start(jobs.run)
        for thread in threads:
            thread.join()
        time.sleep(0.2)  # the engine's thread waits for the next batch
        assert [prompt() for prompt in prompts] == [None] * len(names)
    finally:
        gc.enable()
