"""Times from counted work, by hand, and the counts of a toy model before and now."""

import pytest

from benchmarks.flops import Training, Workload
from benchmarks.kernel_counts import Kernel, Work
from benchmarks.roofline import Card, Pass, count_pass, flex_attention
from benchmarks.shapes import TOY

CARD = Card(peak=200.0, products=100.0, attention=50.0, bandwidth=10.0, launches=4.0)
WORK = Workload(24, 20, 10, 3)


def test_a_kernel_takes_the_longer_of_flops_and_bytes():
    assert CARD.seconds(Kernel("product", 300, 10)) == 3
    assert CARD.seconds(Kernel("product", 300, 50)) == 5
    assert CARD.seconds(Kernel("attention", 300, 10)) == 6
    assert CARD.seconds(Kernel("elementwise", 0, 20)) == 2


def test_a_pass_is_the_sum_of_its_parts():
    layer = Work([Kernel("product", 100, 0), Kernel("elementwise", 0, 20), Kernel("weights", 0, 30)])
    launched = Work([Kernel("elementwise", 0, 1)] * 8)
    last = Work([Kernel("product", 50, 0), Kernel("elementwise", 0, 10), Kernel("weights", 0, 30)])
    attention, last_attention = Kernel("attention", 200, 0), Kernel("attention", 100, 0)
    update = Kernel("weights", 0, 40)
    found = Pass(layer, last, attention, last_attention, launched, Work(), 3, update, model_flops=1000)
    assert found.seconds(CARD) == {
        "products": 2 + 0.5, "attention": 8 + 2, "elementwise": 4 + 1, "weights": 9 + 4, "head": 2, "tower": 0,
    }  # fmt: skip
    assert found.utilization(CARD) == pytest.approx(1000 / 200 / 32.5)


def test_flex_attention_by_hand():
    text = {"hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2}
    pairs = 44 * 45 / 2 + 3 * (10 * 44 + 10 * 11 / 2)
    kernel = flex_attention(text, WORK, is_recomputed=True)
    assert kernel == Kernel("attention", 4.5 * 4 * pairs * 8, 4.5 * 2 * 74 * (2 * 8 + 2 * 4))


@pytest.mark.slow
def test_a_layer_with_lora_moves_less_now():
    before, now = (count_pass(TOY, Training(lora_r=4), WORK, is_fused) for is_fused in (False, True))
    assert sum(k.flops for k in before.layer.kernels) == pytest.approx(sum(k.flops for k in now.layer.kernels))
    assert sum(k.bytes for k in now.layer.of("elementwise")) < 0.5 * sum(
        k.bytes for k in before.layer.of("elementwise")
    )
    assert len(now.layer.kernels) < 0.6 * len(before.layer.kernels)
    assert (
        before.tower.reads - now.tower.reads == 3 * TOY[1]["depth"] - 3
    )  # lists of lengths in each layer, and now once
    assert sum(k.bytes for k in now.head.of("elementwise")) < sum(k.bytes for k in before.head.of("elementwise"))


@pytest.mark.ci
def test_checkpointing_recomputes_all_layers_but_the_last_if_the_head_is_frozen():
    training = Training(lora_r=4, gradient_checkpointing=True)
    kept, found = (count_pass(TOY, each, WORK, is_fused=False) for each in (Training(lora_r=4), training))
    flops = [
        sum(k.flops for k in layer.kernels) for layer in (kept.layer, kept.last_layer, found.layer, found.last_layer)
    ]
    assert flops[0] == flops[1] == flops[3] < flops[2]
    assert found.last_attention == kept.attention
    assert found.attention.flops > found.last_attention.flops
