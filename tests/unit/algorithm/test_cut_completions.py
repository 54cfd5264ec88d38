"""Completions whose contexts are in several micro-batches: losses, gradients and metrics are those of whole ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from rl_vlm.algorithm.cut_completions import CutOutputs, own_tokens
from rl_vlm.algorithm.losses import LossMetrics, MetricExtreme, MetricSum
from rl_vlm.algorithm.objective import Objective
from rl_vlm.types import Completion, Context, MicroBatch, PolicyOutput, ScoredGroup, SubGroup, pad_rows
from tests.unit.algorithm.test_objective import batch_of, objective_of, scored_group

LENGTHS = [[2, 1, 3], [4], [1, 2]]
"""Sampled tokens of the contexts of three completions."""
CUT: list[list[tuple[list[int], dict[int, range]]]] = [
    [([0], {0: range(2)})], [([0, 1], {0: range(2, 3)})], [([2], {2: range(1)})], [([2], {2: range(1, 2)})],
]  # fmt: skip
"""Members and contexts of four micro-batches."""
SEQUENCE, CORRECTED = {"importance_sampling_level": "sequence"}, {"engine": "vllm"}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "dapo": ({}, {}),
    "grpo": ({"loss_type": "grpo", "delta": 1.3}, {}),
    "dr_grpo": ({"loss_type": "dr_grpo"}, {}),
    "cispo": ({"loss_type": "cispo", "epsilon_high": 1.5}, {}),
    "sapo": ({"loss_type": "sapo"}, {}),
    "KL": ({"beta": 0.2, "use_bias_correction_kl": False}, {}),
    "entropies": ({"top_entropy_quantile": 0.5}, {}),
    "GSPO": (SEQUENCE, {}),
    "GSPO, sums of completions": (SEQUENCE | {"loss_type": "grpo", "epsilon": 0.01}, {}),
    "GSPO, entropies": (SEQUENCE | {"top_entropy_quantile": 0.5}, {}),
    "GSPO, KL": (SEQUENCE | {"beta": 0.2, "use_bias_correction_kl": True}, {}),
    "weights of tokens": ({"vllm_importance_sampling_mode": "token_truncate"}, CORRECTED),
    "weights of completions": ({"vllm_importance_sampling_mode": "sequence_truncate"}, CORRECTED),
    "GSPO, weights of tokens": (SEQUENCE | {"vllm_importance_sampling_mode": "token_truncate"}, CORRECTED),
    "GSPO, masked tokens": (SEQUENCE | {"vllm_importance_sampling_mode": "token_mask"}, CORRECTED),
    "GSPO, weights of completions": (SEQUENCE | {"vllm_importance_sampling_mode": "sequence_truncate"}, CORRECTED),
}


def a_group(is_first: bool) -> ScoredGroup:
    """Three completions; the last one is truncated."""
    generator = torch.Generator().manual_seed(0)
    group = scored_group([sum(some) for some in LENGTHS], ["stop", "stop", "length"], advantages=[1.5, -1.0, 0.5])
    some = [
        replace(
            one, contexts=tuple(map(a_context, lengths)), generator_logprobs=-torch.rand(6, generator=generator)[:n]
        )
        for one, lengths, n in zip(group.group.completions, LENGTHS, map(sum, LENGTHS), strict=True)
    ]
    group.group = replace(group.group, completions=some)
    for stored in (group.ref_logprobs, *([] if is_first else [group.old_logprobs])):
        stored.update({i: -torch.rand(len(c.token_ids), generator=generator) for i, c in enumerate(some)})
    return group


def a_context(num_sampled: int) -> Context:
    return Context((num_sampled,))


def cut_batches(group: ScoredGroup) -> list[MicroBatch]:
    return [MicroBatch([SubGroup(group, m, contexts=c) for m, c in subgroups], shared=True) for subgroups in CUT]


class Policy:
    """Log-probs that are parameters, and entropies, by completion."""

    def __init__(self, completions: Sequence[Completion]) -> None:
        generator = torch.Generator().manual_seed(1)
        lengths = [len(completion.token_ids) for completion in completions]
        self.logprobs = [(-torch.rand(n, generator=generator)).requires_grad_() for n in lengths]
        self.entropies = [torch.rand(n, generator=generator) for n in lengths]

    def __call__(self, batch: MicroBatch) -> PolicyOutput:
        logprobs = [self.logprobs[member][span] for _, member, span in batch.members]
        entropies = [self.entropies[member][span] for _, member, span in batch.members]
        return PolicyOutput(pad_rows(logprobs), pad_rows(entropies))


def outcome(objective: Objective, group: ScoredGroup, batches: Sequence[MicroBatch]) -> tuple[float, list[Tensor], Any]:
    """Return the loss, the gradients of the log-probs, and the means and extremes of metrics."""
    policy = Policy(group.group.completions)
    needed = [batch for batch in batches if objective.needs_all_tokens(batch)]
    cut = CutOutputs([(batch, PolicyOutput(*(values.detach() for values in policy(batch)))) for batch in needed])
    found = [objective.loss(batch, policy(batch), cut) for batch in batches]
    torch.stack([loss for loss, _ in found]).sum().backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in policy.logprobs]
    return sum(loss.item() for loss, _ in found), gradients, joined([metrics for _, metrics in found])


def joined(found: Sequence[LossMetrics]) -> dict[str, list[float]]:
    """Return sums and counts, or the extreme of finite values, by name."""
    metrics: dict[str, list[float]] = {}
    for name in found[0]:
        values = [each[name] for each in found]
        sums = [value for value in values if isinstance(value, MetricSum)]
        extremes = [value for value in values if isinstance(value, MetricExtreme) and not math.isnan(value.value)]
        if sums:
            metrics[name] = [float(sum(each.total for each in sums)), float(sum(each.count for each in sums))]
        else:
            metrics[name] = [(min if extremes[0].statistic == "min" else max)(float(each.value) for each in extremes)]
    return metrics


@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("name", SETTINGS)
def test_losses_gradients_and_metrics_are_those_of_whole_completions(name: str, masked: bool, is_first: bool) -> None:
    algorithm, rollout = SETTINGS[name]
    group = a_group(is_first)
    whole = batch_of(group)
    outputs = [(whole, Policy(group.group.completions)(whole))]
    settings: dict[str, Any] = algorithm | {"mask_truncated_completions": masked}
    objective = objective_of([group], outputs=outputs, rollout={"num_generations": 3} | rollout, **settings)
    loss, gradients, metrics = outcome(objective, group, [whole])
    assert sum(gradient.norm() for gradient in gradients) > 0.01
    found, found_gradients, found_metrics = outcome(objective, group, cut_batches(group))
    assert found == pytest.approx(loss, abs=1e-6)
    for ours, expected in zip(found_gradients, gradients, strict=True):
        assert (ours - expected).abs().max() <= 1e-6
    assert found_metrics.keys() == metrics.keys()
    for key, values in metrics.items():
        assert found_metrics[key] == pytest.approx(values, abs=1e-6), key


@pytest.mark.parametrize(
    ("name", "is_first", "expected"),
    [
        ("dapo", False, False), ("KL", True, False), ("entropies", False, False), ("weights of tokens", True, False),
        ("GSPO", True, False), ("GSPO", False, True),  # its ratio is 1 in the first update
        ("GSPO, entropies", True, True), ("GSPO, KL", True, True),
        ("weights of completions", True, True), ("weights of completions", False, False),  # of stored log-probs
    ],
)  # fmt: skip
def test_one_more_forward_is_needed_only_if_losses_depend_on_other_tokens(
    name: str, is_first: bool, expected: bool
) -> None:
    algorithm, rollout = SETTINGS[name]
    group = a_group(is_first)
    settings = algorithm | {"top_entropy_quantile": algorithm.get("top_entropy_quantile", 1.0)}
    outputs = [(batch_of(group), Policy(group.group.completions)(batch_of(group)))]
    objective = objective_of([group], outputs=outputs, rollout={"num_generations": 3} | rollout, **settings)
    assert [objective.needs_all_tokens(batch) for batch in cut_batches(group)] == [expected] * 4
    assert not objective.needs_all_tokens(batch_of(group))


def test_without_the_other_tokens_gspo_would_have_another_gradient() -> None:
    group = a_group(is_first=False)
    objective = objective_of([group], rollout={"num_generations": 3}, importance_sampling_level="sequence")
    policy = Policy(group.group.completions)
    _, expected, _ = outcome(objective, group, [batch_of(group)])
    for batch in cut_batches(group):
        objective.loss(batch, policy(batch))[0].backward()
    found = [p.grad for p in policy.logprobs if p.grad is not None]
    assert max((a - b).abs().max().item() for a, b in zip(found, expected, strict=True)) >= 0.01


def test_tokens_of_a_micro_batch_within_whole_completions() -> None:
    batches = cut_batches(a_group(is_first=True))
    assert [own_tokens(batch).int().tolist() for batch in batches] == [
        [[1, 1, 1, 0, 0, 0]], [[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 0, 0]], [[1, 0, 0]], [[0, 1, 1]],
    ]  # fmt: skip
