import torch

from rl_vlm.data.sampler import Draw
from rl_vlm.rollout.window import Window
from rl_vlm.types import Completion, Group, Prompt, Sample, ScoredGroup
from tests.helpers.builders import Rebuilder


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
    subject.groups[1].turn_advantages = [torch.tensor([0.5, -0.5]), torch.tensor([0.0])]
    torch.save(subject.state_dict(), tmp_path / "window.pt")
    state = torch.load(tmp_path / "window.pt", weights_only=True)
    found = Window.from_state(state, Rebuilder(lambda draw: prompt("abcd"[draw.row])))

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
    assert [values.tolist() for values in found.groups[1].turn_advantages] == [[0.5, -0.5], [0.0]]


def test_a_state_from_before_advantages_of_turns_comes_back():
    state = window().state_dict()
    for group in (group for step in state["steps"] for group in step):
        del group["turn_advantages"]
    found = Window.from_state(state, Rebuilder(lambda draw: prompt("abcd"[draw.row])))
    assert [group.turn_advantages for group in found.groups] == [[]] * 4
