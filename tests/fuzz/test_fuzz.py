"""A few cases of `make fuzz`; `make test-all` runs 500 of each."""

import pytest

from rewards.registry import BUILT_INS
from tests.fuzz.campaign import run_built_in, run_outputs
from tests.fuzz.completions import BATCH

pytestmark = pytest.mark.ci

FEW = 40


def test_some_returned_values() -> None:
    assert run_outputs(part=0, count=FEW)["cases"] >= FEW


@pytest.mark.slow
def test_many_returned_values() -> None:
    assert run_outputs(part=0, count=500)["cases"] >= 500


@pytest.mark.parametrize("name", sorted(BUILT_INS))
def test_some_completions(name: str) -> None:
    run_built_in(name, part=0, count=FEW // BATCH)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(BUILT_INS))
def test_many_completions(name: str) -> None:
    run_built_in(name, part=1, count=500 // BATCH + 1)
