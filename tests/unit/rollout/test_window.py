import torch

from rl_vlm.data.sampler import Draw
from rl_vlm.rollout.window import Window, group_from_state, group_state
from rl_vlm.types import Completion, Context, Group, Observation, Prompt, Sample, ScoredGroup


def prompt(name: str) -> Prompt:
    return Prompt(Sample(name, [], [], {}, name), torch.tensor([1, 2]), {}, {})


def scored_group(name: str, *lengths: int) -> ScoredGroup:
    completions = [
        Completion(torch.arange(n), torch.zeros(n), "stop" if n < 4 else "length", f"{name}{n}") for n in lengths
    ]
    size = len(lengths)
    return ScoredGroup(
        Group(f"0/0/{name}", prompt(name), completions, policy_version=3),
        torch.tensor([[1.0], [torch.nan]])[:size], torch.tensor([1.0, torch.nan])[:size], torch.zeros(size),
        torch.tensor([True, False])[:size], has_variance=True,
    )  # fmt: skip


def window(steps_per_window: int = 2, num_iterations: int = 2) -> Window:
    groups = [scored_group(name, 2, 4) for name in "abcd"]
    return Window.of([Draw(0, i) for i in range(4)], groups, steps_per_window, num_iterations)


def names(groups: list[ScoredGroup]) -> str:
    return "".join(scored.group.prompt.sample.sample_id for scored in groups)


def test_order_of_the_groups():
    trained, subject = [], window()
    while not subject.is_spent:
        trained.append(names(subject.step_groups()))
        subject.updates_done += 1
    assert trained == ["ab", "cd", "ab", "cd"]
    assert names(subject.later_groups()) == "cd"


def test_one_update_needs_no_old_logprobs():
    assert not window(steps_per_window=1, num_iterations=1).outlives_update
    assert window(1, 1).later_groups() == []
    assert window(1, 2).outlives_update and window(2, 1).outlives_update


def test_state_comes_back_from_a_file_without_code(tmp_path):
    subject = window()
    subject.updates_done = 3
    subject.groups[1].old_logprobs[0] = torch.tensor([-1.0, -2.0])
    torch.save(subject.state_dict(), tmp_path / "window.pt")
    state = torch.load(tmp_path / "window.pt", weights_only=True)
    found = Window.from_state(state, lambda draw: prompt("abcd"[draw.row]))

    assert (found.updates_done, found.is_spent) == (3, False)
    assert [[group.draw for group in step] for step in found.steps] == [[(0, 0), (0, 1)], [(0, 2), (0, 3)]]
    assert isinstance(found.steps[0][0].draw, Draw)
    assert names(found.step_groups()) == "cd"
    for ours, theirs in zip(found.groups, subject.groups, strict=True):
        assert (ours.group.group_id, ours.group.policy_version) == (theirs.group.group_id, 3)
        assert [c.text for c in ours.group.completions] == [c.text for c in theirs.group.completions]
        assert [c.finish_reason for c in ours.group.completions] == ["stop", "length"]
        assert ours.group.completions[1].token_ids.tolist() == [0, 1, 2, 3]
        assert torch.equal(ours.scores_GF.nan_to_num(9.0), theirs.scores_GF.nan_to_num(9.0))
        assert (ours.valid_G.tolist(), ours.has_variance) == ([True, False], True)
    assert found.groups[1].old_logprobs[0].tolist() == [-1.0, -2.0]


def test_observations_come_back_with_their_images_and_are_shared_as_before(tmp_path):
    pixels = {"pixel_values": torch.ones(2, 3)}
    seen = Observation("o", torch.tensor([70, 71]), {"kinds": torch.tensor([0, 1])}, pixels, (b"png",))
    contexts = (Context((1, seen, 2)), Context((seen, 1)))
    first = Completion(torch.tensor([1, 2, 3, 4]), torch.zeros(4), "stop", "a", contexts)
    group = Group("g", prompt("a"), [first, Completion(torch.tensor([5]), torch.zeros(1), "stop", "b")], 3)
    torch.save(group_state(group), tmp_path / "group.pt")
    found = group_from_state(torch.load(tmp_path / "group.pt", weights_only=True), prompt("a"))
    assert [path.token_ids.tolist() for path in found.completions[0].paths] == [[1, 70, 71, 2, 3], [70, 71, 4]]
    assert found.completions[1].contexts == ()
    once, again = found.completions[0].observations
    assert once is again and once.images == (b"png",) and once.name == "o"
    assert once.mm_inputs["pixel_values"].tolist() == [[1.0] * 3] * 2 and once.token_inputs["kinds"].tolist() == [0, 1]


def test_a_group_of_an_older_checkpoint_has_no_contexts():
    state = group_state(scored_group("a", 2).group)
    del state["observations"]
    for completion in state["completions"]:
        del completion["contexts"]
    (found,) = group_from_state(state, prompt("a")).completions
    assert found.token_ids.tolist() == [0, 1] and found.contexts == ()
