"""What the check before the first step compares, and when the run ends."""

import math

import pytest
import torch

from rl_vlm.errors import ModelError
from rl_vlm.passes.proof import OTHER_IMAGES, SHARED, Comparison, Probe, ProofCheck, compare, refuse

CPU = torch.device("cpu")


def probe(logprobs: list[float], gradient: list[float]) -> Probe:
    return Probe(torch.tensor(logprobs), torch.tensor(gradient))


DENSE = probe([-2.0, -2.0], [3.0, 4.0])  # root mean square 2, norm 5


def compared(shared: Probe, *others: Probe, smallest: float = 0.0) -> list[Comparison]:
    return compare(shared, DENSE, others or [DENSE], smallest)


def test_differences_are_relative() -> None:
    logprobs, gradient = compared(probe([-2.0, -1.6], [3.0, 3.0]))
    assert logprobs.difference == pytest.approx(0.4 / math.sqrt(2) / 2)
    assert gradient.difference == pytest.approx((5 - math.sqrt(18)) / 5)


def test_log_probs_near_zero_are_compared_with_one() -> None:
    (logprobs, _) = compare(probe([-0.01], [1.0]), probe([-0.02], [1.0]), [probe([-0.02], [1.0])], 0.0)
    assert logprobs.difference == pytest.approx(0.01)


def test_bounds_are_ten_times_the_largest_difference_of_dense_rows() -> None:
    logprobs, gradient = compared(DENSE, probe([-2.0, -2.2], [3.0, 4.0]), probe([-2.0, -2.0], [0.0, 4.0]))
    assert logprobs.bound == pytest.approx(10 * 0.2 / math.sqrt(2) / 2)
    assert gradient.bound == pytest.approx(10 * 1 / 5)


def test_bounds_are_at_least_the_smallest() -> None:
    assert [each.bound for each in compared(DENSE, smallest=0.01)] == [0.01, 0.01]


def test_shared_rows_that_are_not_finite_end_the_run() -> None:
    found = compared(probe([math.nan, -2.0], [3.0, 4.0]), smallest=0.01)
    with pytest.raises(ModelError, match=r"differ on this CPU in log-probs by nan \(bound 1.0e-02\)\. Each bound"):
        refuse(ProofCheck(SHARED, tuple(found)), CPU)


def test_both_differences_are_named() -> None:
    found = compared(probe([0.0, 0.0], [0.0, 0.0]), smallest=0.01)
    with pytest.raises(ModelError, match=r"log-probs by 1\.0e\+00 .* and in the norm of a gradient by 1\.0e\+00"):
        refuse(ProofCheck(SHARED, tuple(found)), CPU)


def test_equal_rows_pass() -> None:
    refuse(ProofCheck(SHARED, tuple(compared(DENSE))), CPU)


def test_values_that_must_differ_are_refused_if_they_do_not() -> None:
    refuse(ProofCheck(OTHER_IMAGES, (Comparison("log-probs", 1e-9, 0.0, unlike=True),)), CPU)
    equal = ProofCheck(OTHER_IMAGES, (Comparison("log-probs", 0.0, 0.0, unlike=True),))
    with pytest.raises(ModelError, match=r"rows with other images do not differ on this CPU in log-probs by 0\.0e\+00"):
        refuse(equal, CPU)


def test_what_was_not_tried_is_said() -> None:
    check = ProofCheck(OTHER_IMAGES, untried="no prompt has an image")
    assert check.holds and str(check).endswith("rows with other images were not checked: no prompt has an image")
