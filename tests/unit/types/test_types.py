from dataclasses import replace

import pytest
import torch

from rl_vlm.types import Completion, Context, Observation, Progress, Prompt, Sample, pad_split


def observation(*token_ids: int) -> Observation:
    return Observation("o", torch.tensor(token_ids), {}, {})


def trajectory(token_ids: list[int], *contexts: Context) -> Completion:
    return Completion(torch.tensor(token_ids), torch.tensor(token_ids) / 10, "stop", "", contexts)


def test_observations_stand_between_sampled_tokens():
    first, second = observation(70, 71), observation(80)
    completion = trajectory([1, 2, 3, 4, 5, 6], Context((2, first, 1)), Context((second, first, 3)))
    one, two = completion.paths
    assert one.token_ids.tolist() == [1, 2, 70, 71, 3]
    assert one.sampled.tolist() == [True, True, False, False, True]
    assert one.observations == {2: first}
    assert two.token_ids.tolist() == [80, 70, 71, 4, 5, 6]
    assert two.sampled.tolist() == [False, False, False, True, True, True]
    assert two.observations == {0: second, 1: first}
    assert completion.path_lengths == [5, 6] and completion.num_tokens == 11
    assert completion.observations == [first, second, first]


def test_turns_have_lengths_and_what_they_begin_with():
    first, second = observation(70, 71), observation(80)
    prompt = Prompt(Sample("s", [], [], {}, ""), torch.tensor([1]), {}, {})
    completion = trajectory([1, 2, 3, 4, 5, 6], Context((2, first, 1)), Context((second, first, 3)))
    assert completion.turn_lengths == [2, 1, 3]
    assert completion.turn_starts(prompt) == [prompt, first, first]
    assert trajectory([1, 2]).turn_lengths == [2] and trajectory([1, 2]).turn_starts(prompt) == [prompt]


def test_a_completion_of_one_turn_is_a_path_of_its_own_tokens():
    completion = trajectory([1, 2])
    (path,) = completion.paths
    assert path.token_ids.tolist() == [1, 2] and path.sampled.tolist() == [True, True] and path.observations == {}
    assert completion.path_lengths == [2] and completion.num_tokens == 2 and completion.observations == []


def test_the_first_tokens_of_a_trajectory_end_with_a_sampled_token():
    """All tokens count. An observation is whole, and stands only before a turn."""
    first, second = observation(70, 71), observation(80)
    completion = trajectory([1, 2, 3, 4, 5, 6], Context((2, first, 2)), Context((second, 2)))
    expected = {
        1: [1], 2: [1, 2], 4: [1, 2], 5: [1, 2, 70, 71, 3], 6: [1, 2, 70, 71, 3, 4], 9: [1, 2, 70, 71, 3, 4],
    }  # fmt: skip
    for number, token_ids in expected.items():
        cut = completion.first_tokens(number)
        (path,) = cut.paths
        assert path.token_ids.tolist() == token_ids
        assert cut.token_ids.tolist() == [token for token in token_ids if token < 70]
        assert len(cut.generator_logprobs) == len(cut.token_ids)


def test_the_first_tokens_of_one_turn():
    assert trajectory([1, 2, 3]).first_tokens(2).token_ids.tolist() == [1, 2]


def test_the_first_tokens_have_a_sampled_one_after_a_long_observation():
    (path,) = trajectory([1, 2], Context((observation(70, 71, 72), 2))).first_tokens(2).paths
    assert path.token_ids.tolist() == [70, 71, 72, 1]


@pytest.mark.parametrize("parts", [(), (2, observation(70)), (observation(70),), (0,), (1, observation(70), 0)])
def test_a_context_ends_with_a_turn_of_at_least_a_token(parts: tuple[int | Observation, ...]):
    with pytest.raises(ValueError, match="must"):
        Context(parts)


def test_rows_are_split_and_padded():
    values = torch.tensor([1.0, 2.0, 3.0, 4.0], requires_grad=True)
    padded = pad_split(values, [1, 0, 3])
    assert padded.tolist() == [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0], [2.0, 3.0, 4.0]]
    assert not padded._is_view()  # FSDP2 warns of modules that return views
    (padded * torch.tensor([[1.0], [9.0], [10.0]])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [1.0, 10.0, 10.0, 10.0]


def num_nodes(output: torch.Tensor) -> int:
    """Operators of the graph that made a tensor."""
    found, nodes = set(), [output.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is not None and node not in found:
            found.add(node)
            nodes += [following for following, _ in node.next_functions]
    return len(found)


def test_more_rows_make_no_larger_graph():
    sizes = {num_nodes(pad_split(torch.zeros(rows * 2, requires_grad=True), [2] * rows)) for rows in (1, 3, 50)}
    assert len(sizes) == 1


def test_a_turn_after_an_edit_is_in_a_context_of_its_own():
    """The earlier turn is read again as an observation. The parts of the first context stay as they were."""
    first, second, again, text = observation(70, 71), observation(80), observation(1, 2), observation(90)
    completion = trajectory([1, 2, 3], Context((2, first, 1)))
    paused = replace(completion, pending=second, edited=(again, text, observation(3)))
    assert paused.length_so_far == 5
    path = paused.so_far()
    assert path.token_ids.tolist() == [1, 2, 90, 3, 80] and not path.sampled.any()
    going_on = paused.continued(torch.tensor([4, 5]), torch.tensor([0.4, 0.5]), "stop", "")
    assert [path.token_ids.tolist() for path in going_on.paths] == [[1, 2, 70, 71, 3], [1, 2, 90, 3, 80, 4, 5]]
    assert [path.sampled.tolist() for path in going_on.paths] == [
        [True, True, False, False, True],
        [False] * 5 + [True] * 2,
    ]
    assert going_on.token_ids.tolist() == [1, 2, 3, 4, 5] and going_on.turn_lengths == [2, 1, 2]
    assert (going_on.pending, going_on.edited) == (None, ())
    assert going_on.so_far().token_ids.tolist() == [1, 2, 90, 3, 80, 4, 5]


def test_a_part_of_a_completion_has_the_tokens_of_its_contexts():
    completion = trajectory([1, 2, 3, 4, 5, 6], Context((2,)), Context((observation(70), 1)), Context((3,)))
    part = completion.part(range(1, 3))
    assert [path.token_ids.tolist() for path in part.paths] == [[70, 3], [4, 5, 6]]
    assert part.token_ids.tolist() == [3, 4, 5, 6] and len(part.generator_logprobs) == 4
    assert (completion.span(range(1)), completion.span(range(1, 3))) == (slice(0, 2), slice(2, 6))


def test_the_position_of_a_run_counts_updates_and_skipped_steps():
    progress = Progress(max_steps=9)
    for has_changed, is_finite in ((True, True), (False, True), (False, False), (False, False)):
        progress.update_done(has_changed, is_finite)
        progress.step_done()
    assert progress == Progress(9, global_step=4, policy_version=1, nonfinite_in_a_row=2)
    progress.mark_saved()
    progress.update_done(True, True)
    assert progress == Progress(9, global_step=4, policy_version=2, saved_version=1)


def test_a_resumed_run_may_have_another_number_of_steps():
    progress = Progress(max_steps=9)
    progress.restore({"max_steps": 4, "global_step": 3, "policy_version": 2, "saved_version": 1})
    assert progress == Progress(9, global_step=3, policy_version=2, saved_version=1)
