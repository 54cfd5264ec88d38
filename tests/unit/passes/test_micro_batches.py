from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_vlm.passes.micro_batches import batch_tokens, make_micro_batches, sharing_ratio
from rl_vlm.types import Completion, Context, Group, MicroBatch, Observation, Prompt, Sample, ScoredGroup, SubGroup


def make_group(name, prompt_tokens, lengths, valid=None):
    prompt = Prompt(Sample(name, [], [], {}, ""), torch.zeros(prompt_tokens, dtype=torch.long), {}, {})
    completions = [Completion(torch.zeros(n, dtype=torch.long), torch.zeros(n), "stop", "") for n in lengths]
    zeros = torch.zeros(len(lengths))
    return ScoredGroup(
        Group(name, prompt, completions, policy_version=0),
        scores_GF=zeros[:, None],
        rewards_G=zeros,
        advantages_G=zeros,
        valid_G=torch.tensor([True] * len(lengths) if valid is None else valid),
        has_variance=True,
    )


def contents(batches: list[MicroBatch]) -> list[dict[str, list[int]]]:
    """Members of each group, by micro-batch."""
    return [{s.scored.group.group_id: s.members for s in batch.subgroups} for batch in batches]


def computed_tokens(batch: MicroBatch) -> int:
    """Tokens of the packed row, or of all rows padded to the longest."""
    prefixes = [len(s.prompt.token_ids) for s in batch.subgroups]
    lengths = [[length for c in s.completions for length in c.path_lengths] for s in batch.subgroups]
    if batch.shared:
        return sum(prefixes) + sum(map(sum, lengths))
    rows = [prefix + n for prefix, group in zip(prefixes, lengths, strict=True) for n in group]
    return len(rows) * max(rows)


def test_groups_are_packed_whole_under_the_budget():
    groups = [make_group(name, 10, [2, 3]) for name in "abc"]  # 15 tokens each when shared
    assert contents(make_micro_batches(groups, 45, "shared")) == [{"a": [0, 1], "b": [0, 1], "c": [0, 1]}]
    assert contents(make_micro_batches(groups, 44, "shared")) == [{"a": [0, 1], "b": [0, 1]}, {"c": [0, 1]}]
    assert contents(make_micro_batches(groups, 15, "shared")) == [{"a": [0, 1]}, {"b": [0, 1]}, {"c": [0, 1]}]


def test_dense_rows_cost_their_padding():
    groups = [make_group("short", 10, [2, 3]), make_group("long", 20, [1, 4])]  # rows of up to 13 and 24 tokens
    assert contents(make_micro_batches(groups, 96, "dense")) == [{"long": [0, 1], "short": [0, 1]}]
    assert contents(make_micro_batches(groups, 95, "dense")) == [{"long": [0, 1]}, {"short": [0, 1]}]


def with_turns(group, *contexts):
    """The group, each of whose completions has these contexts."""
    completions = [replace(completion, contexts=contexts) for completion in group.group.completions]
    return replace(group, group=replace(group.group, completions=completions))


def test_observed_tokens_and_images_count_as_well():
    """A prompt of 10 tokens; each completion samples 4 tokens, and observes 6 with an image worth 20."""
    image = torch.zeros(1)
    seen = Observation("o", torch.zeros(6, dtype=torch.long), {}, {"pixel_values": image})
    group = with_turns(make_group("a", 10, [4, 4]), Context((1, seen, 3)))

    def price(rendered):
        return 20 if rendered.mm_inputs else 0

    (batch,) = make_micro_batches([group], 1000, "shared", price)
    assert batch_tokens(batch, price) == 10 + 2 * (10 + 20)
    assert sharing_ratio(group) == (20 + 20) / 30
    assert contents(make_micro_batches([group], 70, "shared", price)) == [{"a": [0, 1]}]
    assert contents(make_micro_batches([group], 69, "shared", price)) == [{"a": [0]}, {"a": [1]}]


def test_each_context_is_a_row_and_an_image_in_several_of_them_is_paid_once():
    seen = Observation("o", torch.zeros(6, dtype=torch.long), {}, {"pixel_values": torch.zeros(1)})
    group = with_turns(make_group("a", 10, [5]), Context((1, seen, 2)), Context((seen, 2)))
    (batch,) = make_micro_batches([group], 1000, "dense", lambda rendered: 20 if rendered.mm_inputs else 0)
    assert batch_tokens(batch, lambda rendered: 0) == 2 * (10 + 9)
    assert batch_tokens(batch, lambda rendered: 20 if rendered.mm_inputs else 0) == 2 * (10 + 9) + 20
    assert sharing_ratio(group) == 38 / (10 + 9 + 8)


def test_a_group_beyond_the_budget_is_split_between_completions():
    group = make_group("a", 10, [4, 4, 4, 4, 4])
    assert contents(make_micro_batches([group], 18, "shared")) == [{"a": [0, 1]}, {"a": [2, 3]}, {"a": [4]}]
    assert contents(make_micro_batches([group], 28, "dense")) == [{"a": [0, 1]}, {"a": [2, 3]}, {"a": [4]}]


def parts(batches: list[MicroBatch]) -> list[list[tuple[list[int], dict[int, list[int]]]]]:
    """Of each sub-group, its members and the contexts of those that are cut, by micro-batch."""
    return [[(s.members, {i: [*c] for i, c in s.contexts.items()}) for s in batch.subgroups] for batch in batches]


def test_a_completion_beyond_the_budget_is_split_between_contexts():
    """A prompt of 10 tokens; contexts of 6, 5 and 4 tokens."""
    group = with_turns(make_group("a", 10, [5, 5]), Context((6,)), Context((5,)), Context((4,)))
    both = [([0, 1], {})]
    assert parts(make_micro_batches([group], 40, "shared")) == [both]
    assert parts(make_micro_batches([group], 39, "shared")) == [[([0], {})], [([1], {})]]
    of_first, of_second = ([0], {0: [0, 1]}), ([1], {1: [0, 1]})
    # The last context of the first completion leaves no room for the second one, which is cut as well.
    found = parts(make_micro_batches([group], 24, "shared"))
    assert found == [[of_first], [([0], {0: [2]})], [of_second], [([1], {1: [2]})]]
    for budget in (0, 14):
        found = parts(make_micro_batches([group], budget, "shared"))
        assert found == [[([i], {i: [context]})] for i in (0, 1) for context in (0, 1, 2)]
    assert parts(make_micro_batches([group], 32, "dense"))[0] == [of_first]  # two rows of 16
    assert parts(make_micro_batches([group], 31, "dense"))[0] == [([0], {0: [0]})]


def test_the_last_contexts_of_a_completion_leave_room_for_the_next_completion():
    group = make_group("a", 10, [15, 3, 3])
    first = replace(group.group.completions[0], contexts=(Context((6,)), Context((5,)), Context((4,))))
    group = replace(group, group=replace(group.group, completions=[first, *group.group.completions[1:]]))
    found = make_micro_batches([group], 21, "shared")
    assert parts(found) == [[([0], {0: [0, 1]})], [([0, 1, 2], {0: [2]})]]
    assert [batch_tokens(batch, lambda rendered: 0) for batch in found] == [21, 20]
    assert [[len(c.token_ids) for c in batch.completions] for batch in found] == [[11], [4, 3, 3]]


def test_images_that_several_parts_of_a_completion_need_are_not_paid():
    pixels = [{"pixel_values": torch.full((1,), value)} for value in (1.0, 2.0)]
    seen, last = (Observation("o", torch.zeros(2).long(), {}, images) for images in pixels)
    contexts = Context((1, seen, 2)), Context((seen, 2)), Context((seen, 1, last, 1))
    group = with_turns(make_group("a", 10, [7]), *contexts)

    def price(rendered):
        return 20 if rendered.mm_inputs else 0

    (batch,) = make_micro_batches([group], 65, "shared", price)
    assert batch_tokens(batch, price) == 10 + 5 + 4 + 6 + 2 * 20
    # The image of the last context is its own. The other one runs apart: it was not paid in the first part either.
    found = make_micro_batches([group], 54, "shared", price)
    assert parts(found) == [[([0], {0: [0, 1]})], [([0], {0: [2]})]]
    assert [batch_tokens(batch, price) for batch in found] == [10 + 5 + 4, 10 + 6 + 20]
    assert [[each.digest for each in batch.subgroups[0].apart] for batch in found] == [[seen.digest] * 2, [seen.digest]]
    (both,) = make_micro_batches([group], 64, "shared", price)  # they fit together as they are
    assert parts([both]) == [[([0], {0: [0, 1]}), ([0], {0: [2]})]] and batch_tokens(both, price) == 55


def test_a_large_group_is_split_in_linear_time():
    lengths: Counter[str] = Counter()

    class Tokens(torch.Tensor):
        def __len__(self) -> int:
            lengths["read"] += 1
            return super().__len__()

    for size in (100, 200):
        group = make_group("a", 10, [4] * size)
        completions = [replace(c, token_ids=c.token_ids.as_subclass(Tokens)) for c in group.group.completions]
        lengths.clear()
        make_micro_batches([replace(group, group=replace(group.group, completions=completions))], 410, "shared")
        assert lengths["read"] <= 10 * size


def test_a_group_that_is_split_does_not_pay_for_its_images():
    whole, split = make_group("whole", 10, [2]), make_group("split", 10, [4, 4, 4, 4, 4])
    batches = make_micro_batches([whole, split], 26, "shared", vision_tokens=lambda prompt: 8)
    assert contents(batches) == [{"split": [0, 1, 2, 3]}, {"split": [4]}, {"whole": [0]}]
    assert [[s.vision_apart for s in batch.subgroups] for batch in batches] == [[True], [True], [False]]
    (batch,) = make_micro_batches([make_group("a", 10, [4, 4, 4, 4])], 26, "shared", vision_tokens=lambda prompt: 8)
    assert [s.vision_apart for s in batch.subgroups] == [True]  # fits without its images
    assert not make_micro_batches([split], 26, "shared")[0].subgroups[0].vision_apart


def test_tokens_of_a_micro_batch_are_those_that_the_budget_counts():
    whole, split = make_group("whole", 10, [2]), make_group("split", 10, [4, 4, 4, 4, 4])
    batches = make_micro_batches([whole, split], 26, "shared", vision_tokens=lambda prompt: 8)
    # 10 + 4 · 4 and 10 + 4 without the images of the split group; 10 + 2 + 8 with those of the whole one
    assert [batch_tokens(batch, lambda prompt: 8) for batch in batches] == [26, 14, 20]
    (batch,) = make_micro_batches([whole, make_group("other", 11, [3, 2])], 100, "dense", lambda prompt: 8)
    assert batch_tokens(batch, lambda prompt: 8) == 3 * 14 + 2 * 8


def test_what_a_split_group_leaves_free_is_filled():
    groups = [make_group("a", 10, [4, 4, 4]), make_group("b", 2, [1, 1])]
    assert contents(make_micro_batches(groups, 18, "shared")) == [{"a": [0, 1]}, {"a": [2], "b": [0, 1]}]


@pytest.mark.parametrize("sharing", ["shared", "dense"])
def test_a_completion_beyond_the_budget_is_alone(sharing):
    groups = [make_group("a", 10, [90, 4, 4])]
    assert contents(make_micro_batches(groups, 18, sharing))[0] == {"a": [0]}


def test_completions_without_a_valid_reward_are_left_out():
    groups = [make_group("a", 3, [1, 2, 3], [True, False, True]), make_group("b", 3, [1, 2], [False, False])]
    assert contents(make_micro_batches(groups, 100, "shared")) == [{"a": [0, 2]}]
    assert make_micro_batches(groups[1:], 100, "shared") == []
    assert make_micro_batches([], 100, "shared") == []


def test_ratio_of_dense_to_shared_tokens():
    assert sharing_ratio(make_group("a", 100, [10, 10, 10, 10])) == 440 / 140  # k(P + R) / (P + kR)
    assert sharing_ratio(make_group("a", 100, [10])) == 1.0
    assert sharing_ratio(make_group("a", 100, [10, 99, 10], [True, False, True])) == 220 / 120  # valid ones alone


def test_auto_shares_where_it_pays():
    pays, does_not = make_group("pays", 100, [10] * 4), make_group("does not", 5, [100] * 4)  # ratios 3.1 and 1.04
    batches = make_micro_batches([does_not, pays], 10_000, "auto")
    assert contents(batches) == [{"pays": [0, 1, 2, 3]}, {"does not": [0, 1, 2, 3]}]
    assert [batch.shared for batch in batches] == [True, False]


CONTEXTS = st.lists(st.integers(1, 30), min_size=1, max_size=4)
COMPLETIONS = st.lists(st.tuples(CONTEXTS, st.booleans()), min_size=1, max_size=6)
"""Lengths of the contexts of each completion of a group, and whether it has a valid reward."""


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 60), COMPLETIONS), max_size=6),
    st.integers(1, 300),
    st.sampled_from(["auto", "shared", "dense"]),
)
def test_every_context_of_a_valid_completion_is_in_one_micro_batch_under_the_budget(drawn, budget, sharing):
    groups = []
    for i, (prompt, rows) in enumerate(drawn):
        group = make_group(str(i), prompt, [sum(lengths) for lengths, _ in rows], [valid for _, valid in rows])
        pairs = zip(group.group.completions, rows, strict=True)
        some = [
            replace(one, contexts=tuple(Context((n,)) for n in lengths) * (len(lengths) > 1))
            for one, (lengths, _) in pairs
        ]
        groups.append(replace(group, group=replace(group.group, completions=some)))
    batches = make_micro_batches(groups, budget, sharing)
    found = []
    for batch in batches:
        num_rows = sum(len(completion.path_lengths) for completion in batch.completions)
        assert computed_tokens(batch) <= budget or num_rows == 1
        assert sharing == "auto" or batch.shared == (sharing == "shared")
        for scored, member, span in batch.members:
            found += [(scored.group.group_id, member, token) for token in range(span.start, span.stop)]
        for scored, member in [(s.scored, member) for s in batch.subgroups for member in s.contexts]:
            alone = batch_tokens(MicroBatch([SubGroup(scored, [member])], batch.shared), lambda rendered: 0)
            assert alone > budget  # what fits alone is not cut
    expected = [
        (group.group.group_id, i, token)
        for group in groups
        for i, valid in enumerate(group.valid_G.tolist()) if valid
        for token in range(len(group.group.completions[i].token_ids))
    ]  # fmt: skip
    assert sorted(found) == sorted(expected)
    in_order: dict[tuple[str, int], list[int]] = {}
    for name, member, token in found:
        in_order.setdefault((name, member), []).append(token)
    assert all(tokens == sorted(tokens) for tokens in in_order.values())
