from pathlib import Path

import pytest

from tests.integration import tiny_run


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The starting model of `tiny_run`."""
    return tiny_run.build_checkpoint(tmp_path_factory.mktemp("tiny") / "model")
