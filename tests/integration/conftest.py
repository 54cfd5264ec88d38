from pathlib import Path

import pytest

from tests.helpers import tiny_run
from tests.helpers.builders import sharp_checkpoint


def pytest_itemcollected(item: pytest.Item) -> None:
    """Leave each test of this folder to `make test-ci`, unless it is slow."""
    if item.get_closest_marker("slow") is None:
        item.add_marker("ci")


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The starting model of `tiny_run`."""
    return tiny_run.build_checkpoint(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(scope="module")
def checkpoint(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of the module's own fixture `family`, sharp enough for wrong masks and positions to show."""
    return sharp_checkpoint(family, tmp_path_factory.mktemp(family))
