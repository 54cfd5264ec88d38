"""The worker process: what it keeps, what it kills, and that nothing of it is left behind."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from functools import partial
from pathlib import Path

import pytest
from PIL import Image

from rewards.contract import Answer, Fault
from rewards.worker import Worker
from rl_vlm.functions import load_function
from tests.helpers.processes import is_gone

pytestmark = pytest.mark.ci

FUNCTIONS = """
import gc, os, re, subprocess, sys, time
from multiprocessing.connection import Connection

class Panic(BaseException):
    pass

NO_EXCEPTIONS = {"panic": Panic(), "interrupt": KeyboardInterrupt(), "exit": SystemExit(3), "end": GeneratorExit()}

def behave(completions, log_metric=None):
    word = completions[0]
    if word == "hang":
        re.match(r"(a+)+$", "a" * 60 + "b")
    if word == "sleep":
        time.sleep(60)
    if word == "child":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        open("child_pid", "w").write(str(child.pid))
        time.sleep(60)
    if word == "leaves a process":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
        return [float(child.pid)]
    if word == "crash":
        os._exit(3)
    if word == "raise":
        raise ValueError("no luck")
    if word == "nap":
        time.sleep(1.2)
    if word in NO_EXCEPTIONS:
        raise NO_EXCEPTIONS[word]
    return [float(os.getpid() if c == "pid" else len(c)) for c in completions]

async def size(completions, images):
    return [float(image.width) for image in images]

class Unpicklable:
    def __reduce__(self):
        raise Panic("lost")

def panics_in_pickle(completions, log_extra):
    log_extra("object", [Unpicklable()])
    return [1.0]

def unsendable(completions, log_extra):
    log_extra("function", [lambda: 0])
    return [1.0]

def ends_late(completions):
    for connection in (c for c in gc.get_objects() if isinstance(c, Connection)):
        connection.close()
    time.sleep(1.5)
    os._exit(7)

def slow_to_load():
    if sys.argv[0] == "-c":  # in the worker
        time.sleep(1.5)
"""


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Makes workers for functions of a file, and closes them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    workers = []

    def make(function: str, timeout: float = 20.0) -> Worker:
        workers.append(Worker(partial(load_function, f"mine.py:{function}"), timeout))
        return workers[-1]

    yield make
    for worker in workers:
        worker.close()


def batches(*words: str) -> list:
    return [({"completions": [word]}, 1) for word in words]


def outcomes(answers: list[Answer]) -> list:
    """Scores of one-completion batches, with the kind in place of a fault."""
    return [score.kind if isinstance(score, Fault) else score for answer in answers for score in answer.scores]


@pytest.mark.parametrize("how", ["hang", "sleep"])
def test_a_hang_costs_no_more_than_the_timeout_and_keeps_what_was_answered(start, how):
    worker = start("behave", timeout=1.0)
    worker.call(batches("warm"))
    started = time.monotonic()
    answers = worker.call(batches("a", "bb", how, "d", how))
    assert time.monotonic() - started < 1.0 + 2.0
    assert outcomes(answers) == [1.0, 2.0, "timeout", "timeout", "timeout"]
    assert answers[2].scores == [Fault("timeout", "took longer than 1 s and was killed")]
    assert outcomes(worker.call(batches("again"))) == [5.0]


def test_the_process_is_kept_between_calls_and_gone_after_close(start):
    worker = start("behave", timeout=10.0)
    pids = [outcomes(worker.call(batches("pid")))[0] for _ in range(2)]
    assert pids[0] == pids[1] != os.getpid()
    worker.close()
    assert is_gone(int(pids[0]))


def test_processes_that_the_function_started_are_killed_with_it(start, tmp_path):
    assert outcomes(start("behave", timeout=1.0).call(batches("child"))) == ["timeout"]
    assert is_gone(int((tmp_path / "child_pid").read_text()))


@pytest.mark.parametrize("end", ["close", "crash"])
def test_no_process_of_the_function_outlives_its_worker(start, end):
    worker = start("behave")
    (child,) = outcomes(worker.call(batches("leaves a process")))
    assert Path(f"/proc/{child:.0f}").exists()
    if end == "close":
        worker.close()
    else:
        assert outcomes(worker.call(batches("crash"))) == ["crash"]
    assert is_gone(int(child))


def test_no_process_of_the_function_outlives_a_worker_that_is_killed_between_calls(start):
    worker = start("behave")
    pid, child = outcomes(worker.call(batches("pid", "leaves a process")))
    os.kill(int(pid), signal.SIGKILL)
    assert is_gone(int(child))
    assert outcomes(worker.call(batches("a", "b"))) == ["crash", 1.0]


def test_closing_ends_a_call_in_another_thread_and_starts_nothing(start):
    worker, faults = start("behave"), []
    calling = threading.Thread(target=lambda: faults.extend(outcomes(worker.call(batches("sleep", "a")))))
    calling.start()
    time.sleep(2.0)
    worker.close()
    calling.join(10)
    assert len(faults) == 2 and not calling.is_alive() and worker._process is None


def test_a_process_that_ends_late_has_an_exit_code(start):
    answers = start("ends_late").call(batches("a"))
    assert answers[0].scores == [Fault("crash", "its worker process ended with exit code 7")]


def nothing() -> None:
    """A function that the process cannot find by this name."""


def test_the_error_of_the_process_is_in_the_fault(monkeypatch):
    monkeypatch.setattr(nothing, "__qualname__", "absent")
    monkeypatch.setattr(sys.modules[__name__], "absent", nothing, raising=False)
    worker = Worker(partial(load_constant, nothing), 20.0)
    (answer,) = worker.call(batches("a"))
    (fault,) = answer.scores
    assert isinstance(fault, Fault) and fault.kind == "load"
    assert "could not load it: Can't get attribute 'absent' on <module" in fault.message


def load_constant(function):
    return function


def test_a_crash_faults_its_batch_only(start):
    answers = start("behave").call(batches("a", "crash", "ccc", "raise", "crash"))
    assert outcomes(answers) == [1.0, "crash", 3.0, "exception", "crash"]
    assert answers[1].scores == [Fault("crash", "its worker process ended with exit code 3")]


def test_what_is_no_exception_is_a_fault_of_its_batch(start):
    worker = start("behave")
    pid, *answers, last = outcomes(worker.call(batches("pid", "panic", "interrupt", "exit", "end", "pid")))
    assert answers == ["exception"] * 4 and pid == last


def test_loading_does_not_count(start, tmp_path):
    with (tmp_path / "mine.py").open("a") as file:
        file.write("\nslow_to_load()\n")
    assert outcomes(start("behave", timeout=1.0).call(batches("a"))) == [1.0]


def test_a_restart_after_a_crash_does_not_count_and_is_one_of_three(start, tmp_path):
    with (tmp_path / "mine.py").open("a") as file:
        file.write("\nslow_to_load()\n")
    words = ["a", "crash", "bb", "crash", "ccc", "crash", "dddd", "crash", "eeeee", "f"]
    answers = start("behave", timeout=1.0).call(batches(*words))
    assert outcomes(answers[:-2]) == [1.0, "crash", 2.0, "crash", 3.0, "crash", 4.0, "crash"]
    not_called = Fault("crash", "not called: its worker process has ended 4 times in this call")
    assert [answer.scores for answer in answers[-2:]] == [[not_called], [not_called]]


def test_what_was_used_before_a_crash_counts(start):
    answers = start("behave", timeout=2.0).call(batches("nap", "crash", "nap", "a"))
    assert outcomes(answers) == [3.0, "crash", "timeout", "timeout"]


@pytest.mark.parametrize("ending", ["raise ImportError('no GPU')", "raise KeyboardInterrupt", "os._exit(3)"])
def test_a_function_that_the_worker_cannot_load_is_a_fault(start, tmp_path, ending):
    with (tmp_path / "mine.py").open("a") as file:
        file.write(f"\nif sys.argv[0] == '-c': {ending}\n")
    worker = start("behave")
    assert outcomes(worker.call(batches("a", "b"))) == ["load", "load"]
    (tmp_path / "mine.py").write_text(FUNCTIONS)
    assert outcomes(worker.call(batches("a"))) == [1.0]


def test_images_and_async_functions(start, tmp_path):
    Image.new("RGB", (3, 5)).save(tmp_path / "small.png")
    images = [Image.open(tmp_path / "small.png"), Image.new("L", (2000, 1500))]
    assert outcomes(start("size").call([({"completions": ["", ""], "images": images}, 2)])) == [3.0, 2000.0]


def test_what_cannot_be_sent_is_a_fault(start):
    assert outcomes(start("unsendable").call(batches("a"))) == ["type"]
    assert outcomes(start("panics_in_pickle").call(batches("a"))) == ["type"]
    assert outcomes(start("behave").call([({"completions": [lambda: 0]}, 1)])) == ["exception"]


SCRIPT = """
import os, sys, threading
from functools import partial
from rewards.worker import Worker
from rl_vlm.functions import load_function

if __name__ == "__main__":
    worker = Worker(partial(load_function, "mine.py:behave"), timeout=30.0)
    for answer in worker.call([({"completions": [word]}, 1) for word in ("pid", "leaves a process")]):
        print(int(answer.scores[0]), flush=True)
    if sys.argv[1] == "busy":
        threading.Thread(target=worker.call, args=([({"completions": ["hang"]}, 1)],)).start()
    if sys.argv[1] != "exit":
        sys.stdin.read()
"""


@pytest.mark.parametrize("situation", ["exit", "idle", "busy"])
def test_no_worker_outlives_the_main_process(start, tmp_path, situation):
    """Nor a process that its function started: after a normal end, and killed while the worker waits or hangs."""
    (tmp_path / "main.py").write_text(textwrap.dedent(SCRIPT))
    root = str(Path(__file__).parents[3])
    main = subprocess.Popen(
        [sys.executable, "main.py", situation],
        env={**os.environ, "PYTHONPATH": root},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert main.stdout and main.stdin
    pids = [int(main.stdout.readline()) for _ in range(2)]
    if situation != "exit":
        time.sleep(0.3)
        main.send_signal(signal.SIGKILL)
    main.wait(timeout=20)
    assert all(map(is_gone, pids))
