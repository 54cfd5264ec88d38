import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator

import pytest

from tests.tiny.cache import CACHE


def pytest_configure(config: pytest.Config) -> None:
    """Give all test processes one folder for tiny checkpoints."""
    if not hasattr(config, "workerinput"):
        os.environ[CACHE] = tempfile.mkdtemp(prefix="rl_vlm_tiny_")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ.pop(CACHE), ignore_errors=True)


@pytest.fixture(autouse=True)
def path_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take back folders that a test adds to the module path, as loading a user's function does."""
    monkeypatch.setattr(sys, "path", list(sys.path))


@pytest.fixture(autouse=True)
def interruptible() -> Iterator[None]:
    """Let SIGINT end a test, and the programs that it starts. A shell's commands in the background ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def stop_forgotten() -> Iterator[None]:
    """Let no test leave a request to stop behind."""
    yield
    if signals := sys.modules.get("rl_vlm.distributed.signals"):
        if signals.stop.timer:
            signals.stop.timer.cancel()
        vars(signals.stop).update(vars(signals.Stop()))
