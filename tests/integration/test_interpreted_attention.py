"""FlexAttention's kernels for CUDA compute plain attention over a packed row, as Triton's interpreter runs them."""

import json
import os
import subprocess
import sys
from functools import cache

import pytest

from tests.integration.interpreted_attention import CASES, FAULTS

pytestmark = pytest.mark.slow

ROUNDING = 1e-5
TIMEOUT = 1200


@cache
def errors(*names: str) -> dict[str, dict[str, float]]:
    """Return the largest errors of some cases, which are run in one process."""
    command = [sys.executable, "-m", "tests.integration.interpreted_attention", *names]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, env=environment)
    assert done.returncode == 0, done.stderr
    print(done.stdout)
    return {name: found for line in done.stdout.splitlines() for name, found in json.loads(line).items()}


@pytest.mark.parametrize("name", [name for name in CASES if name not in FAULTS])
def test_kernels_compute_plain_attention(name: str) -> None:
    found = errors(name)[name]
    assert set(found) == {"output", "log-sum-exp", "query", "key", "value"}
    assert all(error < ROUNDING for error in found.values())  # an error that is not a number fails


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_seen(fault: str) -> None:
    found = errors(*FAULTS)[fault]
    assert not all(error <= 100 * ROUNDING for error in found.values())


def test_the_forward_needs_no_query_blocks_and_the_gradients_of_keys_do() -> None:
    found = errors(*FAULTS)["no query blocks"]
    assert {name for name, error in found.items() if not error <= ROUNDING} == {"key", "value"}
