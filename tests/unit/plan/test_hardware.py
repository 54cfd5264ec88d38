import pytest

from rl_vlm.errors import ConfigError
from rl_vlm.plan.hardware import CARD_OF_SIZE, CARDS, Card, parse_card


@pytest.mark.parametrize(
    ("text", "name", "gib"),
    [
        ("80GB", "h100", 79.1),
        ("80", "h100", 79.1),
        (" 80 gb", "h100", 79.1),
        ("24GB", "rtx-4090", 23.6),
        ("48G", "l40s", 44.3),
        ("96GB", "rtx-pro-6000", 94.9),
        ("141GB", "h200", 139.7),
        ("192GB", "b200", 178.3),
        ("A100-80GB", "a100-80gb", 79.1),
        ("NVIDIA H200", "h200", 139.7),
        ("RTX PRO 6000", "rtx-pro-6000", 94.9),
        ("rtx4090", "rtx-4090", 23.6),
        ("4090", "rtx-4090", 23.6),
        ("NVIDIA GeForce RTX 4090", "rtx-4090", 23.6),
        ("a6000", "rtx-a6000", 44.3),
        ("a100_80gb", "a100-80gb", 79.1),
        ("80GiB", "80GiB", 80.0),
        ("12.5GB", "12.5GiB", 12.5),
    ],
)
def test_a_card_by_size_or_name(text, name, gib):
    card = parse_card(text)
    assert (card.name, card.memory) == (name, int(gib * 1073741824))


@pytest.mark.parametrize("text", ["h1000", "eighty", "", "-80GB", "0GB", "80MB", "8e1", "9" * 400, "٣GB"])
def test_an_unknown_accelerator_is_refused_with_the_known_ones(text):
    with pytest.raises(ConfigError, match=r"neither a size nor a known card.* 80GB .*rtx-3090, .* h100, .* b200"):
        parse_card(text)


def test_a_near_name_is_suggested():
    with pytest.raises(ConfigError, match="did you mean 'h100'"):
        parse_card("h1000")


def test_the_budget_leaves_context_buffers_and_reserve():
    card = Card("test", 100 * 2**30)
    assert card.budget() == 95 * 2**30 - 644245094  # 5% of the card and 0.6 GiB
    assert card.budget(num_ranks=8) == card.budget() - 2**29
    assert Card("tiny", 2**20).budget() == 0


def test_a_card_offers_less_than_its_label():
    for size, name in CARD_OF_SIZE.items():
        assert 0.91 < CARDS[name].memory / 2**30 / size < 1
