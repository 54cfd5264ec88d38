"""What the check before the first step compares, and when the run ends."""

import math
from typing import Any

import pytest
import torch

from rl_vlm.errors import ModelError
from rl_vlm.passes.proof import GRADIENTS, OTHER_IMAGES, SHARED, Comparison, Expected, Probe, ProofCheck, refuse
from rl_vlm.passes.start_check import gradients_found

CPU = torch.device("cpu")


def probe(logprobs: list[float], gradient: list[float], **weights: list[float]) -> Probe:
    gradients = {"embeddings": gradient, **weights}
    return Probe(torch.tensor(logprobs), {name: torch.tensor(values) for name, values in gradients.items()})


DENSE = probe([-2.0, -2.0], [3.0, 4.0])  # root mean square 2, norm 5


def compared(shared: Probe, *others: Probe, smallest: float = 1e-9, dense: Probe = DENSE) -> tuple[Comparison, ...]:
    return Expected(dense, list(others) or [dense], smallest).equal(shared)


def test_differences_are_relative() -> None:
    logprobs, worst, gradient = compared(probe([-2.0, -1.6], [3.0, 3.0]))
    assert logprobs.difference == pytest.approx(0.4 / math.sqrt(2) / 2)
    assert worst.difference == pytest.approx(0.4 / 2)
    assert gradient.difference == pytest.approx(1 / 5)


def test_log_probs_near_zero_are_compared_with_one() -> None:
    logprobs, worst, _ = compared(probe([-0.01], [1.0]), dense=probe([-0.02], [1.0]))
    assert [logprobs.difference, worst.difference] == pytest.approx([0.01, 0.01])


def test_bounds_are_ten_times_the_largest_difference_of_dense_rows() -> None:
    found = compared(DENSE, probe([-2.0, -2.2], [3.0, 4.0]), probe([-2.0, -2.0], [0.0, 4.0]))
    assert [each.bound for each in found] == pytest.approx([10 * 0.2 / math.sqrt(2) / 2, 10 * 0.2 / 2, 10 * 3 / 5])


def test_bounds_are_at_least_the_smallest() -> None:
    assert [each.bound for each in compared(DENSE, smallest=0.01)] == [0.01, 0.05, 0.01]


def test_a_single_wrong_token_ends_the_run() -> None:
    """Over 128 tokens its root mean square is within the bound of bfloat16."""
    right, wrong = [-1.0] * 128, [-1.1] + [-1.0] * 127
    logprobs, worst, _ = compared(probe(wrong, [1.0]), smallest=0.01, dense=probe(right, [1.0]))
    assert logprobs.difference == pytest.approx(0.1 / math.sqrt(128)) and logprobs.holds
    with pytest.raises(ModelError, match=r"differ on this CPU in the worst log-prob by 1\.0e-01 \(bound 5\.0e-02\)"):
        refuse(ProofCheck(SHARED, (logprobs, worst)), CPU)


@pytest.mark.parametrize("gradient", [[-3.0, -4.0], [4.0, 3.0]], ids=["negated", "rotated"])
def test_a_gradient_of_the_same_norm_ends_the_run_if_it_has_another_direction(gradient: list[float]) -> None:
    found = compared(probe([-2.0, -2.0], gradient), smallest=0.01)
    with pytest.raises(ModelError, match="differ on this CPU in the gradient of embeddings by"):
        refuse(ProofCheck(SHARED, found), CPU)


def test_the_gradient_that_exceeds_its_bound_most_is_named() -> None:
    dense = probe([-2.0], [3.0, 4.0], first=[1.0, 0.0], new=[0.0, 0.0])
    wrong = probe([-2.0], [3.0, 4.1], first=[0.9, 0.0], new=[0.0, 0.0])
    assert compared(wrong, dense=dense)[-1].name == "the gradient of first"
    assert compared(wrong, probe([-2.0], [3.0, 4.0], first=[0.5, 0.0], new=[0.0, 0.0]), dense=dense)[-1].name == (
        "the gradient of embeddings"
    )
    new = probe([-2.0], [3.0, 4.0], first=[1.0, 0.0], new=[0.1, 0.0])
    assert str(compared(new, smallest=0.01, dense=dense)[-1]) == "the gradient of new by 1.0e+00 (bound 1.0e-02)"
    (*_, nan) = compared(probe([-2.0], [3.0, 4.1], first=[math.nan, 0.0], new=[0.0, 0.0]), dense=dense)
    assert nan.name == "the gradient of first" and not nan.holds


def test_shared_rows_that_are_not_finite_end_the_run() -> None:
    found = compared(probe([math.nan, -2.0], [3.0, 4.0]), smallest=0.01)
    with pytest.raises(ModelError, match=r"differ on this CPU in log-probs by nan \(bound 1.0e-02\) and in the worst"):
        refuse(ProofCheck(SHARED, found), CPU)


def test_all_differences_are_named() -> None:
    found = compared(probe([0.0, 0.0], [0.0, 0.0]), smallest=0.01)
    expected = (
        r"log-probs by 1\.0e\+00 .* and in the worst log-prob by 1\.0e\+00 .* and in the gradient of embeddings by 1"
    )
    with pytest.raises(ModelError, match=expected):
        refuse(ProofCheck(SHARED, found), CPU)


def test_equal_rows_pass() -> None:
    refuse(ProofCheck(SHARED, compared(DENSE)), CPU)


def test_values_that_must_differ_are_refused_if_they_do_not() -> None:
    refuse(ProofCheck(OTHER_IMAGES, (Comparison("log-probs", 1e-9, 0.0, unlike=True),)), CPU)
    equal = ProofCheck(OTHER_IMAGES, (Comparison("log-probs", 0.0, 0.0, unlike=True),))
    with pytest.raises(ModelError, match=r"rows with other images do not differ on this CPU in log-probs by 0\.0e\+00"):
        refuse(equal, CPU)


def test_what_was_not_tried_is_said() -> None:
    check = ProofCheck(OTHER_IMAGES, untried="no prompt has an image")
    assert check.holds and str(check).endswith("rows with other images were not checked: no prompt has an image")


def test_weights_without_a_gradient_are_counted_and_parts_that_were_not_tried_are_said() -> None:
    def line(*found: Any) -> str:
        return str(ProofCheck(GRADIENTS, found=gradients_found(*found)))

    assert line(57, [], 0, None) == line(57, [], 0, "no prompt has an image") == "trained weights all have a gradient"
    assert line(57, ["a", "b"], 0, None) == "trained weights have a gradient: 55 of 57, not a, b"
    assert line(9, list("abcd"), 0, None) == "trained weights have a gradient: 5 of 9, not a, b, c, …"
    assert line(40, [], 17, "no prompt has an image") == (
        "trained weights have a gradient: 40 of 40; 17 of the vision tower were not tried, since no prompt has an image"
    )
