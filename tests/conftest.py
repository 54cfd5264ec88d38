import os
import shutil
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
