import os
import shutil
import sys
import tempfile

import pytest

from tests.tiny.build import CACHE


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
