"""Bytes of live storages, by hand arithmetic."""

import gc
from typing import Any

import torch

from rl_vlm.passes.peaks import Peaks
from rl_vlm.plan.tracing.fake import fake_tensors
from rl_vlm.plan.tracing.live import LiveBytes

KIB = 1024
FLOATS = (16, 16)
"""The shape of a kibibyte of float32."""


def test_a_storage_counts_once_and_until_its_last_view_is_freed():
    with fake_tensors() as live:
        matrix = torch.empty(FLOATS)
        row = matrix.t()[0]
        assert live.now == KIB
        del matrix
        assert live.now == KIB
        del row
        assert (live.now, live.peak) == (0, KIB)


def test_temporaries_count_in_the_peak_only():
    with fake_tensors() as live:
        made = torch.empty(FLOATS).mul(2).add(1)
        assert live.now == KIB
        assert live.peak == 2 * KIB  # the argument and the result of an operator
        made.mul_(3)
        assert live.now == KIB
        del made
        assert live.now == 0


def test_the_backward_of_a_matrix_product_by_hand():
    with fake_tensors() as live:
        weight = torch.empty(16, 32, requires_grad=True)  # 2 KiB
        inputs = torch.empty(FLOATS)
        with Peaks(live).block() as forward:
            hidden = (inputs @ weight).exp()
        # exp keeps its result, and nothing keeps the product, which is freed: 2 KiB of the 4 KiB at the peak.
        assert (forward.before, forward.after - forward.before, forward.peak - forward.before) == (
            3 * KIB, 2 * KIB, 4 * KIB
        )  # fmt: skip
        with Peaks(live).block() as backward:
            hidden.backward(torch.empty_like(hidden))
        # The gradient that was given, that of the product, and that of the weight, which stays.
        assert backward.after - backward.before == 2 * KIB
        assert backward.peak - backward.before == 6 * KIB


def test_paused_and_meta_tensors_and_real_ones_do_not_count():
    real = torch.empty(FLOATS)
    with fake_tensors() as live:
        with live.paused():
            hidden = torch.empty(FLOATS)
        on_meta = torch.empty(FLOATS, device="meta") + 1
        assert live.now == 0
        del hidden, on_meta
        assert live.now == 0
    with LiveBytes() as live:
        real = real + 1
        assert live.now == 0


def test_a_cycle_is_counted_until_it_is_collected():
    with fake_tensors() as live:
        cycle: list[Any] = [torch.empty(FLOATS)]
        cycle.append(cycle)
        del cycle
        assert live.now == KIB
        gc.collect()
        assert live.now == 0
