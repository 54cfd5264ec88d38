"""Signals, and what they do to the main thread, to waits and to forked processes."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest

from launch import cli
from rl_vlm.config.schema import RewardsConfig, RewardSpec
from rl_vlm.distributed import signals
from rl_vlm.distributed.ranks import Ranks
from rl_vlm.distributed.signals import handled, stop, wait_for
from rl_vlm.errors import Stopped
from rl_vlm.reward.suite import RewardSuite
from rl_vlm.rollout.lockstep import Lockstep
from rl_vlm.rollout.vllm.in_process import before_steps
from tests.unit.reward.test_suite import STATE, group


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.fixture
def heard() -> Iterator[None]:
    """Signals that the tests were started to ignore, as under nohup, are heard."""
    ignored = [number for number in (signal.SIGHUP, signal.SIGINT) if signal.getsignal(number) is signal.SIG_IGN]
    for number in ignored:
        signal.signal(number, signal.SIG_DFL)
    yield
    for number in ignored:
        signal.signal(number, signal.SIG_IGN)


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGUSR1, 143), (signal.SIGHUP, 143)]
)
def test_a_signal_is_raised_at_the_next_safe_point(number, status, heard):
    with handled(), stop.deferred(60.0):
        stop.check()
        os.kill(os.getpid(), number)
        wait_until(lambda: stop.signum is not None)
        with stop.postponed():
            stop.check()
        with pytest.raises(Stopped) as stopped:
            stop.check()
    assert stopped.value.exit_status == stop.exit_status == status
    assert pickle.loads(pickle.dumps(stopped.value)).exit_status == status  # as ranks gather it
    assert str(Stopped(15)) == "stopped by SIGTERM"


def test_a_stop_of_another_rank_gives_its_status_before_the_watch_does():
    with pytest.raises(Stopped), stop.deferred(60.0):
        raise Stopped(signal.SIGTERM)
    assert stop.exit_status == 143


def test_a_run_that_is_built_is_interrupted_once():
    with handled():
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(10)
        os.kill(os.getpid(), signal.SIGTERM)  # a repetition, while the run is closed
        time.sleep(0.05)
        assert stop.exit_status == 143


def test_a_signal_raises_only_once_the_processes_are_joined():
    with handled(is_joining=True):
        os.kill(os.getpid(), signal.SIGTERM)
        wait_until(lambda: stop.signum is not None)
        with pytest.raises(KeyboardInterrupt):
            stop.end_joining()
        stop.end_joining()
        assert stop.exit_status == 143


def test_handlers_are_restored_and_ignored_signals_stay_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with handled(), handled():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is signals._interrupt
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_wait_is_ended_by_a_signal_that_another_rank_got(monkeypatch):
    monkeypatch.setattr(signals, "WAIT_SECONDS", 0.01)
    never: Future[int] = Future()
    with stop.deferred(60.0):
        threading.Timer(0.05, stop.ask_for_others, [signal.SIGTERM]).start()
        with pytest.raises(Stopped):
            wait_for(never)
        assert never.cancelled()
        done: Future[int] = Future()
        done.set_result(3)
        assert wait_for(done) == 3  # what is there already is used


def test_signals_within_ten_seconds_are_one_and_a_later_one_ends_at_once(monkeypatch):
    now, ended = [100.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def end_process(status: int, message: str) -> NoReturn:
        ended.append((status, message))
        raise SystemExit

    monkeypatch.setattr(signals, "end_process", end_process)
    for now[0] in (100.0, 103.0, 110.0):
        stop.note_signal(signal.SIGTERM)
    assert ended == [] and stop.signum == signal.SIGTERM
    now[0] = 110.5
    with pytest.raises(SystemExit):
        stop.note_signal(signal.SIGTERM)
    ((status, message),) = ended
    assert status == 143 and "second signal, and ends at once" in message
    assert "in test_signals_within_ten_seconds" in message  # where the main thread was


def test_vllm_in_process_stops_between_its_steps():
    steps = []
    engine = SimpleNamespace(step=lambda: steps.append("step"))
    before_steps(engine, stop.check)
    engine.step()
    stop.ask(signal.SIGTERM)
    with pytest.raises(Stopped):
        engine.step()
    assert steps == ["step"]


def interrupts(completions: list[str]) -> list[float]:
    raise KeyboardInterrupt


async def interrupts_later(completions: list[str]) -> list[float]:
    raise KeyboardInterrupt


def is_sent_a_signal(completions: list[str], *, number: int = signal.SIGINT) -> list[float]:
    os.kill(os.getpid(), number)
    wait_until(lambda: stop.signum is not None)
    return [1.0 for _ in completions]


def hides_a_signal(completions: list[str]) -> list[float]:
    with suppress(BaseException):
        is_sent_a_signal(completions)
    return [1.0 for _ in completions]


def called(function: Callable) -> RewardSuite:
    name = f"{__name__}:{function.__name__}"
    return RewardSuite(RewardsConfig(reward_funcs=[RewardSpec(function=name, calls="group")]))


@pytest.mark.parametrize("is_deferred", [True, False], ids=["while it takes steps", "while it is built"])
def test_a_reward_function_is_stopped_by_a_signal_and_not_by_what_it_raises(is_deferred):
    groups = [group(["a", "b"], "one"), group(["c", "d"], "two")]
    with handled(), stop.deferred(60.0) if is_deferred else nullcontext():
        for function in (interrupts, interrupts_later):
            assert called(function).score(groups, STATE).fault_counts == {(function.__name__, "exception"): 4}
        stop.check()
        with pytest.raises(Stopped) as stopped:
            called(is_sent_a_signal).score(groups[:1], STATE)
    assert stopped.value.exit_status == 130
    with handled(), pytest.raises(Stopped):
        called(hides_a_signal).score(groups[:1], STATE)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_during_a_call_ends_the_check_of_a_function(number, status, tmp_path, capsys):
    Path(tmp_path / "rows.jsonl").write_text('{"prompt": "1 + 1?", "solution": "2"}\n' * 3)
    function = f"{{function: '{__name__}:is_sent_a_signal', kwargs: {{number: {int(number)}}}}}"
    (tmp_path / "run.yaml").write_text(
        f"model: {{model_name_or_path: m}}\ndata: {{dataset_name: {tmp_path}/rows.jsonl}}\n"
        f"rewards: {{reward_funcs: [{function}]}}\n"
    )
    assert cli.main(["rewards", "check", str(tmp_path / "run.yaml")]) == status
    assert capsys.readouterr().err.endswith("\nInterrupted.\n")


class OtherRanks(Ranks):
    """Gives `Lockstep` what the maximum over all ranks would be."""

    def __init__(self, *maxima: list[int]) -> None:
        self.maxima = list(maxima)

    def max(self, values: Sequence[int]) -> list[int]:
        return self.maxima.pop(0)


def test_ranks_that_run_each_forward_together_stop_before_the_same_one():
    calls: list[str] = []

    def lockstep(*maxima: list[int]) -> Lockstep:
        return Lockstep(OtherRanks(*maxima), lambda n: calls.append("vision"), lambda: calls.append("idle"))

    sampling = lockstep([1, 0, 0], [1, 0, 15], [0, 0, 15])  # another rank is asked to stop before the second forward
    with pytest.raises(Stopped), sampling.open():
        for _ in range(2):
            with sampling.forward(0):
                calls.append("forward")
    assert calls == ["forward"]
    finished = lockstep([1, 0, 0], [1, 1, 15], [0, 0, 15])
    with finished.open():
        pass
    assert calls == ["forward", "idle"]  # none for a forward that is not begun


PROGRAM = """
import os, signal, subprocess, sys, time
from rl_vlm.distributed.signals import handled, stop
with handled(), stop.deferred(1.0):
    {child}
    print("ready", child, flush=True)
    end = time.monotonic() + 30
    while time.monotonic() < end and {condition}:
        sum(range(10**5))
    print(stop.signum)
"""
SLEEPER = 'child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]).pid'
FORKED = "child = os.fork() or time.sleep(600)"


def start(child: str, condition: str) -> tuple[subprocess.Popen[str], int]:
    program = PROGRAM.format(child=child, condition=condition)
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, int(process.stdout.readline().split()[1])


def test_the_grace_period_ends_a_process_and_its_children():
    process, child = start(SLEEPER, "True")
    process.send_signal(signal.SIGTERM)
    _, message = process.communicate(timeout=20)
    assert process.returncode == 143
    assert "has not stopped within 1 s of a signal. The main thread was at" in message
    wait_until(lambda: not os.path.exists(f"/proc/{child}"))


def test_a_signal_to_a_forked_child_is_none_to_its_parent():
    process, child = start(FORKED, "os.waitpid(child, os.WNOHANG)[0] == 0")
    os.kill(child, signal.SIGTERM)
    out, _ = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "None\n")


def test_a_signal_that_the_thread_notes_late_arms_no_timer_behind_the_context(monkeypatch):
    """Or the process, such as that of a notebook, would be ended half a minute later."""
    note_signal = stop.note_signal

    def note_late(number: int) -> None:
        time.sleep(0.3)
        note_signal(number)

    monkeypatch.setattr(stop, "note_signal", note_late, raising=False)
    with pytest.raises(KeyboardInterrupt), handled():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
    time.sleep(0.5)
    assert stop.timer is None or not stop.timer.is_alive()
    assert "signals" not in [thread.name for thread in threading.enumerate()]
