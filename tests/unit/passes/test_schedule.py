"""Schedules of passes: the runs of the vision tower, equal work on all ranks, and where gradients are exchanged."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from rl_vlm.distributed.collectives import Collectives
from rl_vlm.passes.schedule import Round, make_schedule
from rl_vlm.types import Completion, Context, MicroBatch, Observation, Prompt, Rendered, SubGroup
from tests.unit.model.test_vision import make_batch, make_encoder, make_prompt

A, B, C, TEXT = (make_prompt(name, tokens) for name, tokens in [("a", [1]), ("b", [1]), ("c", [1]), ("text", [])])
IDLE = make_prompt("idle", [1])
SPARE, SPARE_TEXT = (make_batch([prompt]).subgroups[0].scored for prompt in (A, TEXT))
CUT = [make_batch([A], [A]), make_batch([A, B, C], [A, B]), make_batch([B], [B])]
"""Micro-batches of two groups that are cut, and of one that is not."""


class BesideAnother(Collectives):
    """The first of two ranks. The other one has these runs of its rounds, a first and a later dummy included."""

    def __init__(self, other: Sequence[tuple[int, int, int]]) -> None:
        super().__init__(torch.device("cpu"))
        self.other = list(other)
        self.num_exchanges = 0

    def gather(self, values: list[Any]) -> list[Any]:
        self.num_exchanges += 1
        return [*values, self.other]


def name_of(rendered: Rendered) -> str:
    return rendered.sample.sample_id if isinstance(rendered, Prompt) else rendered.name


def runs(rounds: Sequence[Round]) -> list[tuple[int, int, str]]:
    """Runs of the tower before and within each forward, and the names of its own backwards."""
    return [
        (r.forward.before, r.forward.within, " ".join(name_of(b.rendered) for b in r.tower_backwards)) for r in rounds
    ]


@pytest.mark.parametrize(
    ("encoder", "prompts", "expected"),
    [
        ({"frozen": True}, [[A, TEXT], [A, B], [TEXT]], [1, 1, 0]),
        ({"frozen": False}, [[A, TEXT], [A, B], [TEXT]], [1, 1, 0]),
        ({"frozen": True}, [[A], [A]], [1, 0]),  # features are cached
        ({"frozen": False}, [[A], [A]], [1, 1]),
        ({"joins_images": False}, [[A, TEXT], [A, B], [TEXT]], [1, 2, 0]),
    ],
)
def test_runs_within_forwards(encoder: dict[str, bool], prompts: list[list[Prompt]], expected: list[int]) -> None:
    found = make_schedule([make_batch(some) for some in prompts], make_encoder(**encoder), SPARE)
    assert [each.forward.within for each in found] == expected


def test_the_tower_runs_before_the_first_and_after_the_last_micro_batch_of_a_cut_group() -> None:
    encoder = make_encoder()
    assert runs(make_schedule(CUT, encoder, SPARE)) == [(1, 0, ""), (1, 1, "a"), (0, 0, "b")]
    with torch.no_grad():
        assert runs(make_schedule(CUT, encoder, SPARE)) == [(0, 1, "")] * 3
    assert runs(make_schedule(CUT, make_encoder(frozen=True), SPARE)) == [(0, 1, ""), (0, 1, ""), (0, 0, "")]


def test_prompts_of_equal_images_count_as_one() -> None:
    again = make_prompt("a", [1])
    batches = [make_batch([A], [A]), make_batch([A, again], [A]), make_batch([again], [again]), make_batch([again])]
    assert runs(make_schedule(batches, make_encoder(), SPARE)) == [(1, 0, ""), (0, 0, ""), (0, 0, "a"), (0, 1, "")]
    found = make_schedule(batches, make_encoder(frozen=True), SPARE)
    assert runs(found) == [(0, 1, ""), (0, 0, ""), (0, 0, ""), (0, 0, "")]


def with_contexts(*contexts: Context) -> MicroBatch:
    """A micro-batch of a prompt without images, with a completion in these contexts."""
    (subgroup,) = make_batch([TEXT]).subgroups
    tokens = torch.arange(sum(context.num_sampled for context in contexts))
    completion = Completion(tokens, torch.zeros(len(tokens)), "stop", "", contexts)
    group = replace(subgroup.scored.group, completions=[completion])
    return MicroBatch([SubGroup(replace(subgroup.scored, group=group), [0])], shared=True)


def in_contexts(batch: MicroBatch, *contexts: int) -> MicroBatch:
    (subgroup,) = batch.subgroups
    inside = {0: range(contexts[0], contexts[-1] + 1)}
    return MicroBatch([SubGroup(subgroup.scored, [0], contexts=inside)], shared=True)


def seen(name: str) -> Observation:
    """An observation with an image of its own."""
    image = make_prompt(name, [1])
    return Observation(name, image.token_ids, {}, image.mm_inputs)


def test_the_tower_runs_apart_on_images_that_stay_in_a_context_of_another_micro_batch() -> None:
    one, two, three = map(seen, ("one", "two", "three"))
    whole = with_contexts(Context((1, one, 1)), Context((one, 1, two, 1)), Context((two, 1, three, 1)))
    batches = [in_contexts(whole, i) for i in range(3)]
    # `one` is in the first two, `two` in the last two, and `three` in the last alone, so in its forward.
    assert runs(make_schedule(batches, make_encoder(), SPARE)) == [(1, 0, ""), (1, 0, "one"), (0, 1, "two")]
    batches = [in_contexts(whole, 0, 1), in_contexts(whole, 2)]
    assert runs(make_schedule(batches, make_encoder(), SPARE)) == [(1, 1, ""), (0, 1, "two")]
    assert runs(make_schedule([whole], make_encoder(), SPARE)) == [(0, 1, "")]
    with torch.no_grad():
        assert runs(make_schedule(batches, make_encoder(), SPARE)) == [(0, 1, ""), (0, 1, "")]


def test_a_dummy_has_one_context() -> None:
    one = seen("one")
    spare = with_contexts(Context((1, one, 2)), Context((one, 3))).subgroups[0].scored
    ranks = BesideAnother([(0, 1, 0)] * 3)
    (first,) = make_schedule([], make_encoder(), spare, ranks)
    (completion,) = first.forward.batch.completions
    assert first.forward.batch.is_dummy and completion.contexts == spare.group.completions[0].contexts[:1]
    assert completion.token_ids.tolist() == [0, 1, 2]


def test_gradients_are_exchanged_in_the_last_round() -> None:
    assert [each.is_last for each in make_schedule(CUT, make_encoder(), SPARE)] == [False, False, True]
    assert make_schedule([], make_encoder(), SPARE) == []


def test_a_rank_with_fewer_micro_batches_runs_dummies_with_idle_runs() -> None:
    encoder = make_encoder()
    encoder.idle_prompt = IDLE
    ranks = BesideAnother([(1, 1, 0), (1, 2, 2), (0, 0, 1), (0, 1, 1), (0, 1, 0), (0, 1, 0)])
    found = make_schedule([CUT[0], make_batch([A], [A])], encoder, SPARE_TEXT, ranks)
    # Own: (1, 0, -) and (0, 0, a); dummies of text have no runs.
    assert runs(found) == [(1, 1, ""), (1, 2, "a idle"), (0, 0, "idle"), (0, 1, "idle")]
    assert [each.forward.batch.is_dummy for each in found] == [False, False, True, True]
    assert [each.forward.batch.subgroups[0].scored for each in found[2:]] == [SPARE_TEXT] * 2
    assert [each.is_last for each in found] == [False, False, False, True]
    assert ranks.num_exchanges == 1


def test_another_ranks_dummies_count_as_well() -> None:
    """It has no micro-batch: its first dummy runs the tower, and the later one finds cached features."""
    ranks, text = BesideAnother([(0, 1, 0), (0, 0, 0)]), make_batch([TEXT])
    assert runs(make_schedule([text] * 3, make_encoder(frozen=True), SPARE, ranks)) == [
        (0, 1, ""), (0, 0, ""), (0, 0, ""),
    ]  # fmt: skip


def test_ranks_without_micro_batches_have_no_rounds() -> None:
    assert make_schedule([], make_encoder(), SPARE, BesideAnother([(0, 1, 0), (0, 1, 0)])) == []


def test_every_weight_gets_a_gradient_in_the_first_and_the_last_backward() -> None:
    """The tower runs in every forward, and a forward follows its own last backward."""
    ranks = Collectives(torch.device("cpu"))
    found = make_schedule(CUT, make_encoder(), SPARE, ranks, needs_all_gradients=True)
    assert runs(found) == [(1, 1, ""), (1, 1, "a"), (0, 1, "b"), (0, 1, "")]
    assert found[-1].forward.batch.is_dummy and [each.is_last for each in found] == [False] * 3 + [True]
    whole = make_schedule([make_batch([TEXT])], make_encoder(), SPARE, ranks, needs_all_gradients=True)
    assert runs(whole) == [(0, 1, "")]
    frozen = make_schedule([make_batch([TEXT])], make_encoder(frozen=True), SPARE, ranks, needs_all_gradients=True)
    assert runs(frozen) == [(0, 0, "")]
