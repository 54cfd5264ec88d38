import torch

from rl_vlm.algorithm.logprobs import store_logprobs, stored_logprobs
from rl_vlm.stages import Stage
from rl_vlm.types import Completion, Group, MicroBatch, Prompt, Sample, ScoredGroup, SubGroup

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
