from dataclasses import replace

import torch

from rl_vlm.algorithm.logprobs import store_logprobs, stored_logprobs
from rl_vlm.stages import Stage
from rl_vlm.types import Completion, Context, Group, MicroBatch, Prompt, Sample, ScoredGroup, SubGroup

CPU = torch.device("cpu")


def scored_group(*lengths: int) -> ScoredGroup:
    prompt = Prompt(Sample("s0", [], [], {}, ""), torch.tensor([1, 2]), {}, {})
    completions = [Completion(torch.arange(n), torch.zeros(n), "stop", "") for n in lengths]
    size = len(lengths)
    return ScoredGroup(
        Group("0/0/s0", prompt, completions, policy_version=3),
        torch.zeros(size, 1), torch.zeros(size), torch.zeros(size), torch.ones(size, dtype=torch.bool),
        has_variance=True,
    )  # fmt: skip


def test_logprobs_are_kept_by_completion_without_padding():
    first, second = scored_group(2, 4), scored_group(3)
    batch = MicroBatch([SubGroup(first, [1]), SubGroup(second, [0])], shared=False)
    store_logprobs(batch, torch.tensor([[-1.0, -2.0, -3.0, -4.0], [-5.0, -6.0, -7.0, 0.0]]), Stage.OLD_LOGPROBS)
    assert {member: values.tolist() for member, values in first.old_logprobs.items()} == {1: [-1.0, -2.0, -3.0, -4.0]}
    assert second.old_logprobs[0].tolist() == [-5.0, -6.0, -7.0]

    other_cut = MicroBatch([SubGroup(second, [0])], shared=True)
    old_logprobs = stored_logprobs(other_cut, Stage.OLD_LOGPROBS, CPU)
    assert old_logprobs is not None and old_logprobs.tolist() == [[-5.0, -6.0, -7.0]]
    assert stored_logprobs(other_cut, Stage.REF_LOGPROBS, CPU) is None


def test_logprobs_of_a_completion_that_is_cut_are_joined():
    group = scored_group(5, 2)
    first = replace(group.group.completions[0], contexts=(Context((2,)), Context((1,)), Context((2,))))
    group = replace(group, group=replace(group.group, completions=[first, group.group.completions[1]]))
    parts = [SubGroup(group, [0], contexts={0: range(2)}), SubGroup(group, [0, 1], contexts={0: range(2, 3)})]
    batches = [MicroBatch([part], shared=True) for part in parts]
    rows = [[[-1.0, -2.0, -3.0]], [[-4.0, -5.0], [-6.0, -7.0]]]
    for _ in range(2):  # a second attempt replaces them
        for batch, values in zip(batches, rows, strict=True):
            store_logprobs(batch, torch.tensor(values), Stage.OLD_LOGPROBS)
    assert {member: values.tolist() for member, values in group.old_logprobs.items()} == {
        0: [-1.0, -2.0, -3.0, -4.0, -5.0], 1: [-6.0, -7.0],
    }  # fmt: skip
    found = stored_logprobs(batches[0], Stage.OLD_LOGPROBS, CPU)
    assert found is not None and found.tolist() == [[-1.0, -2.0, -3.0, -4.0, -5.0]]
