"""Supervisors find processes as soon as they are started."""

import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from rewards.supervisor import Memory

WAITER = "import sys; sys.stdin.read()"
STARTER = f"import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', {WAITER!r}]); print(child.pid)"


@pytest.fixture
def grandchild() -> Iterator[int]:
    command = [sys.executable, "-c", f"{STARTER}; child.wait()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        yield int(child.stdout.readline())


@pytest.fixture
def memory() -> Memory:
    """Has already looked for processes."""
    memory = Memory()
    memory.search()
    return memory


def test_a_new_process_is_found_by_the_next_search(memory: Memory, grandchild: int) -> None:
    assert memory.used_bytes(more_than=2**60) > 0
    assert grandchild in {process.pid for process in memory.processes}


def test_a_process_that_has_ended_is_forgotten(memory: Memory, grandchild: int) -> None:
    memory.search()
    psutil.Process(grandchild).kill()
    while psutil.pid_exists(grandchild):
        pass
    memory.search()
    assert grandchild not in memory.is_ours and grandchild not in {process.pid for process in memory.processes}


def test_processes_of_others_are_not_ours(memory: Memory) -> None:
    memory.search()
    assert memory.is_ours[1] is False and 1 not in {process.pid for process in memory.processes}


def test_searches_follow_each_other_within_a_second(memory: Memory) -> None:
    """A process that fills 0.8 GB per second is found before it holds much."""
    before = time.monotonic()
    memory.used_bytes(more_than=2**60)
    assert memory.next_search - before < 1.0
