"""The rules of the ring, with a store in memory and ranks that are threads."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from torch.distributed import DistNetworkError

from rl_vlm.distributed import watch
from rl_vlm.distributed.sign_of_life import mark_alive, position, seconds_without_sign
from rl_vlm.distributed.signals import Stop, stop
from rl_vlm.distributed.watch import Beat, Neighbour, Watch, this_host
from rl_vlm.errors import RankLost, Stopped, TrainingError


class MemoryStore:
    """What is used of torch's stores."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.lock = threading.Lock()
        self.is_gone = False

    def set(self, key: str, value: str) -> None:
        if self.is_gone:
            raise DistNetworkError("Broken pipe")
        self.values[key] = value

    def get(self, key: str) -> bytes:
        return self.values[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.values for key in keys)

    def add(self, key: str, amount: int) -> int:
        with self.lock:
            self.values[key] = str(int(self.values.get(key, "0")) + amount)
            return int(self.values[key])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        with self.lock:
            return self.values.setdefault(key, desired).encode()

    def delete_key(self, key: str) -> bool:
        return self.values.pop(key, None) is not None


@pytest.fixture(autouse=True)
def faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "INTERVAL", 0.02)


def make(store: MemoryStore, rank: int, world_size: int = 2, lost: float = 60.0, hang: float = 1800.0) -> Watch:
    return Watch(store, store, rank, world_size, lost, hang)


def beat(number: int = 0, pid: int = 0, host: str = "elsewhere", idle: float = 0.0, has_left: bool = False) -> Beat:
    return Beat(number, host, pid, idle, "  loop.py:3 in spin", has_left)


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_each_rank_watches_its_two_neighbours():
    def watched(rank: int, world_size: int) -> list[int]:
        return [neighbour.rank for neighbour in make(MemoryStore(), rank, world_size).neighbours]

    assert [watched(0, 2), watched(0, 4), watched(3, 4)] == [[1], [1, 3], [0, 2]]


@pytest.mark.parametrize(
    ("last", "seconds", "found"),
    [
        (beat(), 59.0, None),
        (beat(), 61.0, "rank 1 (process 0 on elsewhere) gave no sign of life for 60 s"),
        (beat(has_left=True), 61.0, None),
        (beat(pid=os.getpid(), host=this_host()), 59.0, None),
        (beat(pid=dead_pid(), host=this_host()), 1.0, "died. Its main thread was last at\n  loop.py:3 in spin"),
    ],
)
def test_a_rank_is_lost_if_its_process_is_gone_or_its_beats_end(last, seconds, found):
    neighbour = Neighbour(1)
    assert neighbour.loss(500.0, 60.0) is None  # it has not begun
    neighbour.hear(last, 100.0)
    neighbour.hear(last, 130.0)  # the same beat is no new sign of life
    loss = neighbour.loss(100.0 + seconds, 60.0)
    assert found in loss if found else loss is None


def test_a_rank_is_lost_that_has_never_beaten():
    neighbour = Neighbour(1)
    assert neighbour.absence(1799.0, 1800.0) is None
    assert neighbour.absence(1801.0, 1800.0) == "rank 1 has not started within 1800 s (train.ddp_timeout)"
    neighbour.hear(beat(), 100.0)
    assert neighbour.absence(1801.0, 1800.0) is None
    started = make(MemoryStore(), 0, hang=0.05).start()
    end = time.monotonic() + 10
    while started.failure is None:
        assert time.monotonic() < end
        time.sleep(0.01)
    started.is_leaving.set()
    assert "rank 1 has not started" in started.failure


def test_a_rank_beats_as_soon_as_it_watches(monkeypatch):
    monkeypatch.setattr(watch, "INTERVAL", 60.0)
    store = MemoryStore()
    started = make(store, 0).start()
    end = time.monotonic() + 10
    while not store.check(["beat/0"]):
        assert time.monotonic() < end
        time.sleep(0.01)
    started.is_leaving.set()


def test_a_hang_is_shown_with_the_place_of_every_rank():
    store = MemoryStore()
    waiting = Beat(1, "a", 7, 31.0, "  ranks.py:9 in gather")
    for rank, its_beat in enumerate([waiting, beat(idle=30.5, pid=8), waiting]):
        store.set(f"beat/{rank}", json.dumps(vars(its_beat)))
    own = make(store, 0, 3, hang=30.0)
    own.look_at(own.neighbours[0])
    assert (
        own.failure
        == store.values["failed"]
        == (
            "no progress for 30 s (train.ddp_timeout). The main threads were last at:\n"
            "rank 1 (process 8 on elsewhere) at\n  loop.py:3 in spin\n"
            "rank 0 (process 7 on a), rank 2 (process 7 on a) at\n  ranks.py:9 in gather"
        )
    )


def test_the_first_verdict_is_that_of_all_ranks():
    store = MemoryStore()
    store.set("failed", "rank 5 (process 1 on b) failed:\nKeyError")
    own = make(store, 0)
    own.exchange()
    with pytest.raises(RankLost, match=r"rank 5 .* failed:\nKeyError\nTo continue .* resume_from_checkpoint=auto"):
        own.check()


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_ranks_join_once_all_are_there():
    store = MemoryStore()
    first, second = make(store, 0), make(store, 1)
    late = in_thread(lambda: [time.sleep(0.1), second.join()])
    first.join()
    late.join()
    assert store.values["joined"] == "all" and first.has_joined and second.has_joined


def test_a_signal_before_all_ranks_are_there_stops_every_one_and_is_named(caplog):
    store = MemoryStore()
    told, other = make(store, 1, 3), make(store, 0, 3)
    for rank in (0, 1):
        store.set(f"beat/{rank}", json.dumps(vars(beat())))
    stop.ask(signal.SIGTERM)
    with pytest.raises(Stopped):
        told.join()
    assert stop.timer
    stop.timer.cancel()
    vars(stop).update(vars(Stop()), is_handled=True, is_joining=True)  # as in another process
    caplog.clear()
    with pytest.raises(Stopped) as stopped:
        other.join()
    assert stopped.value.exit_status == stop.exit_status == 143
    (message,) = caplog.messages
    assert message.startswith(f"rank 1 (process {os.getpid()} on ")
    assert message.endswith(" was sent SIGTERM: all ranks stop (rank 2 had not started)")


def test_a_signal_after_all_ranks_are_there_lets_them_join():
    """Or some would wait in the process group for those that have stopped."""
    store = MemoryStore()
    store.set("joined", "all")
    stop.ask(signal.SIGTERM)
    make(store, 0).join()


def test_a_rank_that_leaves_before_it_has_joined_waits_for_the_others_only_briefly(monkeypatch):
    monkeypatch.setattr(watch, "RAISE_SECONDS", 0.1)
    own, start = make(MemoryStore(), 0).start(), time.monotonic()
    own.leave()
    assert time.monotonic() - start < 5


def test_ranks_meet_and_leave_nothing_but_the_last_meeting():
    store = MemoryStore()
    first, second = make(store, 0), make(store, 1)
    late = in_thread(lambda: [time.sleep(0.1), *(second.meet() for _ in range(3))])
    begin = time.monotonic()
    for _ in range(3):
        first.meet()
    assert time.monotonic() - begin >= 0.1
    assert seconds_without_sign() < 0.15  # a rank that waits for another is not stuck
    late.join()
    assert sorted(store.values) == ["arrived/2", "met/2"]


def test_a_rank_that_waits_is_told_of_a_loss():
    own = make(MemoryStore(), 0)
    threading.Timer(0.05, lambda: setattr(own, "failure", "rank 1 died")).start()
    with pytest.raises(RankLost, match="rank 1 died"):
        own.meet()


def test_an_error_of_one_rank_is_shown_to_the_others_and_one_of_all_is_not():
    store = MemoryStore()
    with pytest.raises(ZeroDivisionError), make(store, 1).failures_shared():
        raise ZeroDivisionError("a bug")
    assert store.values["failed"].startswith(f"rank 1 (process {os.getpid()} on ")
    assert store.values["failed"].endswith('raise ZeroDivisionError("a bug")\nZeroDivisionError: a bug')

    of_all = TrainingError("three steps")
    of_all.on_all_ranks = True
    store = MemoryStore()
    with pytest.raises(TrainingError), make(store, 1).failures_shared():
        raise of_all
    assert store.values == {}


def test_a_rank_that_refuses_the_same_settings_later_says_so_itself():
    own = make(MemoryStore(), 1)
    own.failure = "rank 0 failed"
    with pytest.raises(TrainingError, match="three steps"), own.failures_shared():
        raise TrainingError("three steps")
    with pytest.raises(RankLost, match="rank 0 failed"), own.failures_shared():
        raise ZeroDivisionError("of a batch that rank 0 did not send")


def test_a_rank_that_has_failed_gives_the_others_time_to_raise(monkeypatch):
    monkeypatch.setattr(watch, "RAISE_SECONDS", 0.3)
    failed, other = (make(MemoryStore(), rank).start() for rank in range(2))
    failed.failure, failed.has_failed = "rank 0 failed", True
    start = time.monotonic()
    failed.leave()
    assert time.monotonic() - start >= 0.3
    start, other.failure = time.monotonic(), "rank 0 failed"
    other.leave()
    assert time.monotonic() - start < watch.LEAVE_SECONDS - 5


def test_an_error_of_a_collective_waits_for_the_rank_that_caused_it():
    own = make(MemoryStore(), 0)
    threading.Timer(0.05, lambda: setattr(own, "failure", "rank 1 (process 9 on a) died")).start()
    with pytest.raises(RankLost, match=r"rank 1 .* died") as lost, own.failures_shared():
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3821")
    assert isinstance(lost.value.__cause__, RuntimeError)


def test_a_rank_whose_main_thread_is_stuck_is_ended(monkeypatch):
    ended = []
    monkeypatch.setattr(watch, "RAISE_SECONDS", 0.01)
    monkeypatch.setattr(watch, "end_process", lambda *found: ended.append(found))
    own = make(MemoryStore(), 0)
    own.failure = "rank 1 died"
    own.guard()
    ((status, message),) = ended
    assert status == 1 and message.startswith("rank 0 ends: rank 1 died")


def test_a_store_that_is_gone_ends_the_rank(monkeypatch):
    ended, store = [], MemoryStore()
    monkeypatch.setattr(watch, "RAISE_SECONDS", 0.01)
    monkeypatch.setattr(watch, "end_process", lambda *found: ended.append(found))
    store.is_gone = True
    own = make(store, 0, lost=0.1).start()
    for thread in own.threads:
        thread.join(10)
    assert "store was not reached for 0.1 s" in ended[0][1]


def test_ranks_that_leave_are_not_lost():
    store = MemoryStore()
    ranks = [make(store, rank).start() for rank in range(2)]
    other = in_thread(ranks[1].leave)
    ranks[0].leave()
    other.join()
    assert [json.loads(store.values[f"beat/{rank}"])["has_left"] for rank in range(2)] == [True, True]
    assert [rank.failure for rank in ranks] == [None, None]


def test_the_position_is_that_of_the_main_thread():
    mark_alive()
    *outer, innermost = position().splitlines()
    assert innermost.endswith(" in position")
    assert any(line.endswith(" in test_the_position_is_that_of_the_main_thread") for line in outer)
    found = []
    in_thread(lambda: found.append(position())).join()
    assert "in test_the_position_is_that_of_the_main_thread" in found[0]


def test_a_process_that_was_stopped_itself_finds_nobody_lost(monkeypatch):
    own = make(MemoryStore(), 0, lost=5.0)
    times = iter([0.0, 1000.0])
    monkeypatch.setattr(watch, "time", SimpleNamespace(monotonic=lambda: next(times, 1000.0)))
    guard = in_thread(own.guard)
    time.sleep(0.2)
    own.is_leaving.set()
    guard.join()
    assert own.failure is None and own.awake == 0.04  # two intervals, and not 1000 s
