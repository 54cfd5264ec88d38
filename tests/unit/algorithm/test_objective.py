from collections.abc import Sequence
from dataclasses import replace
from math import exp, log
from typing import Any

import pytest
import torch

from rl_vlm.algorithm.losses import Denominators
from rl_vlm.algorithm.objective import (
    Objective,
    configured_loss,
    contributes,
    count_denominators,
    top_entropy_threshold,
    trained_completions,
    trained_tokens,
)
from rl_vlm.config.schema import RunConfig
from rl_vlm.distributed.collectives import Collectives
from rl_vlm.types import (
    Completion,
    Context,
    FinishReason,
    Group,
    MicroBatch,
    Observation,
    PolicyOutput,
    Prompt,
    Sample,
    ScoredGroup,
    SubGroup,
)

F, T = False, True

CPU = torch.device("cpu")


def scored_group(
    lengths: Sequence[int],
    finish_reasons: Sequence[FinishReason] | None = None,
    valid: Sequence[bool] | None = None,
    advantages: Sequence[float] | None = None,
    generator: float = 0.0,
) -> ScoredGroup:
    """A group of completions of these lengths. Advantages are those of a group without variance by default."""
    prompt = Prompt(Sample("s0", [], [], {}, ""), torch.tensor([1, 2]), {}, {})
    completions = [
        Completion(torch.arange(n), torch.full((n,), generator), finish_reasons[i] if finish_reasons else "stop", "")
        for i, n in enumerate(lengths)
    ]
    return ScoredGroup(
        Group("g0", prompt, completions, policy_version=0),
        scores_GF=torch.zeros(len(lengths), 1),
        rewards_G=torch.zeros(len(lengths)),
        advantages_G=torch.tensor(advantages or [0.0] * len(lengths)),
        valid_G=torch.tensor(valid or [True] * len(lengths)),
        has_variance=advantages is not None,
    )


def batch_of(*groups: ScoredGroup, **fields: Any) -> MicroBatch:
    """The micro-batch of whole groups."""
    return MicroBatch([SubGroup(g, list(range(len(g.group.completions)))) for g in groups], shared=False, **fields)


def output_of(logprobs: Sequence[Sequence[float]], entropies: Sequence[Sequence[float]] | None = None) -> PolicyOutput:
    """What a policy returns, of which the log-probs have gradients."""
    values = torch.tensor(logprobs, requires_grad=True)
    return PolicyOutput(values, torch.zeros_like(values) if entropies is None else torch.tensor(entropies))


class OneOfTwo(Collectives):
    """A rank beside another one, which has 5 tokens in 3 completions, and these entropies."""

    entropies = (0.5, 3.0)

    def sum(self, values: Sequence[float]) -> list[float]:
        tokens, completions = values
        return [tokens + 5, completions + 3]

    def gather(self, values: list[Any]) -> list[Any]:
        return [*values, torch.tensor(self.entropies)]


def objective_of(
    groups: Sequence[ScoredGroup],
    window: Sequence[ScoredGroup] | None = None,
    ranks: Collectives | None = None,
    outputs: Sequence[tuple[MicroBatch, PolicyOutput]] | None = None,
    rollout: Any = None,
    **algorithm: Any,
) -> Objective:
    """The objective of a step. A window of other groups has two steps."""
    config = RunConfig.model_validate(
        {
            "model": {"model_name_or_path": "none"},
            "rollout": {"max_completion_length": 10, "num_generations": 2} | (rollout or {}),
            "algorithm": algorithm,
        }
    )

    def given_outputs() -> Sequence[tuple[MicroBatch, PolicyOutput]]:
        assert outputs is not None, "a forward pass that no setting needs"
        return outputs

    return Objective.of_step(
        config,
        ranks or Collectives(CPU),
        groups,
        window or groups,
        2 if window else 1,
        lambda g: g.has_variance,
        given_outputs,
        configured_loss(config.algorithm),
    )


def loss_and_gradient(objective: Objective, batch: MicroBatch, output: PolicyOutput) -> tuple[float, list[list[float]]]:
    loss, _ = objective.loss(batch, output)
    (gradient,) = torch.autograd.grad(loss, output.logprobs_NT)
    return loss.item(), gradient.tolist()


@pytest.mark.parametrize(
    ("loss_type", "weights"),
    [
        ("dapo", [1 / 8, 1 / 8]),  # 3 tokens here and 5 on the other rank
        ("bnpo", [1 / 8, 1 / 8]),
        ("cispo", [1 / 8, 1 / 8]),
        ("grpo", [1 / 2 / 5, 1 / 5]),  # the mean of 2 tokens, and that of 1; 5 completions
        ("sapo", [1 / 2 / 5, 1 / 5]),
        ("dr_grpo", [1 / 5 / 10, 1 / 5 / 10]),  # 5 completions of at most 10 tokens
    ],
)
def test_each_loss_type_divides_by_its_denominator_of_all_ranks(loss_type, weights):
    """At a ratio of 1 the gradient of every loss is minus the advantage, times the weight of the token."""
    group = scored_group([2, 1], advantages=[3.0, -1.0])
    settings: dict[str, Any] = {"epsilon_high": 5.0} if loss_type == "cispo" else {}
    objective = objective_of([group], ranks=OneOfTwo(CPU), loss_type=loss_type, **settings)
    _, gradient = loss_and_gradient(objective, batch_of(group), output_of([[-1.0, -2.0], [-3.0, 0.0]]))
    long, short = weights
    assert gradient == [pytest.approx([-3.0 * long, -3.0 * long]), pytest.approx([1.0 * short, 0.0])]


def with_turns(
    lengths: Sequence[Sequence[int]], advantages: Sequence[Sequence[float]], valid: Sequence[bool] | None = None
) -> ScoredGroup:
    """A group of trajectories with turns of these lengths and advantages."""
    seen = Observation("o", torch.tensor([7, 8]), {}, {})
    group = scored_group([sum(turns) for turns in lengths], valid=valid, advantages=[1.0] * len(lengths))
    contexts = [Context(tuple(part for turn in turns for part in (turn, seen))[:-1]) for turns in lengths]
    pairs = zip(group.group.completions, contexts, strict=True)
    group.group = replace(group.group, completions=[replace(one, contexts=(each,)) for one, each in pairs])
    group.turn_advantages = [torch.tensor(values) for values in advantages]
    return group


def test_each_turn_trains_with_its_own_advantage():
    """At a ratio of 1 the gradient is minus the advantage over the 6 tokens. A turn with advantage 0 has none."""
    group = with_turns([[1, 2], [2, 1]], [[3.0, -1.0], [0.0, 2.0]])
    output = output_of([[-1.0] * 3] * 2)
    _, gradient = loss_and_gradient(objective_of([group]), batch_of(group), output)
    assert gradient == [pytest.approx([-3 / 6, 1 / 6, 1 / 6]), pytest.approx([0.0, 0.0, -2 / 6])]
    part = MicroBatch([SubGroup(group, [1])], shared=False)
    _, gradient = loss_and_gradient(objective_of([group]), part, output_of([[-1.0] * 3]))
    assert gradient == [pytest.approx([0.0, 0.0, -2 / 6])]


def test_a_turn_with_advantage_0_leaves_the_gradient_of_the_other_turns():
    """Its tokens count in the denominator as before: the others' gradient is that of a loss without its tokens."""
    whole, silent = with_turns([[1, 2]], [[3.0, -1.0]]), with_turns([[1, 2]], [[3.0, 0.0]])
    settings: dict[str, Any] = {"beta": 0.0, "epsilon": 0.2}
    for group in (whole, silent):
        group.old_logprobs = {0: torch.tensor([-1.1, -1.0, -0.9])}
    gradients = [
        loss_and_gradient(objective_of([group], **settings), batch_of(group), output_of([[-1.0] * 3]))[1][0]
        for group in (whole, silent)
    ]
    assert gradients[1] == pytest.approx([-3 * exp(0.1) / 3, 0.0, 0.0])
    assert gradients[0] == pytest.approx([gradients[1][0], 1 / 3, exp(-0.1) / 3])


def test_turns_and_completions_of_one_micro_batch_keep_their_advantages():
    turns, whole = with_turns([[1, 2]], [[3.0, -1.0]]), scored_group([2], advantages=[2.0])
    _, gradient = loss_and_gradient(objective_of([turns, whole]), batch_of(turns, whole), output_of([[-1.0] * 3] * 2))
    assert gradient == [pytest.approx([-3 / 5, 1 / 5, 1 / 5]), pytest.approx([-2 / 5, -2 / 5, 0.0])]


def test_groups_that_are_skipped_and_completions_that_do_not_train_are_counted():
    trained, equal = scored_group([2, 4], ["stop", "length"], advantages=[1.0, -1.0]), scored_group([3, 3])
    faulted = scored_group([1, 9], valid=[T, F], advantages=[1.0, 0.0])
    objective = objective_of([trained, equal, faulted], mask_truncated_completions=True)
    assert objective.contributing == [trained, faulted]
    assert objective.denominators == Denominators(tokens=2.0 + 6.0 + 1.0, completions=2.0 + 2.0 + 1.0)
    loss, gradient = loss_and_gradient(objective, batch_of(trained), output_of([[0.0] * 4, [0.0] * 4]))
    assert loss == pytest.approx(-2 / 9)
    assert gradient == [pytest.approx([-1 / 9, -1 / 9, 0.0, 0.0]), [0.0] * 4]


def test_the_losses_of_parts_of_a_group_add_up_to_its_loss():
    group = scored_group([2, 1, 1], advantages=[1.0, -0.5, -0.5])
    objective = objective_of([group], rollout={"num_generations": 3})
    group.old_logprobs = {i: torch.full((n,), -1.0 - log(1.1)) for i, n in enumerate([2, 1, 1])}
    parts = [MicroBatch([SubGroup(group, members)], shared=False) for members in ([1], [0, 2])]
    outputs = [output_of([[-1.0]]), output_of([[-1.0, -1.0], [-1.0, 0.0]])]
    losses = [objective.loss(batch, output)[0].item() for batch, output in zip(parts, outputs, strict=True)]
    assert losses == [pytest.approx(0.5 * 1.1 / 4), pytest.approx((-2 * 1.1 + 0.5 * 1.1) / 4)]


def test_the_tokens_of_a_window_are_averaged_over_its_steps():
    group, later = scored_group([2, 2], advantages=[1.0, -1.0]), scored_group([6, 4], advantages=[1.0, -1.0])
    assert objective_of([group], [group, later]).denominators == Denominators(4.0, 2.0)
    of_window = objective_of([group], [group, later], loss_normalizer="window")
    assert of_window.denominators == Denominators((4.0 + 10.0) / 2, 2.0)


def test_old_and_reference_log_probs_are_those_that_were_stored():
    group = scored_group([1, 1], advantages=[1.0, -1.0])
    group.old_logprobs = {0: torch.tensor([-1.0 - log(1.1)]), 1: torch.tensor([-1.0])}
    group.ref_logprobs = {0: torch.tensor([-1.0 + log(3)]), 1: torch.tensor([-1.0])}
    settings = {"beta": 0.5, "use_bias_correction_kl": False}
    loss, metrics = objective_of([group], **settings).loss(batch_of(group), output_of([[-1.0], [-1.0]]))
    k3 = 3 - log(3) - 1
    assert loss.item() == pytest.approx((-1.1 + 1.0 + 0.5 * k3) / 2)
    assert metrics["kl"] == (pytest.approx(k3), 2)


@pytest.mark.parametrize("rollout", [{}, {"engine": "vllm"}, {"max_rollout_tokens": 5}])
def test_the_generators_log_probs_are_used_if_it_is_not_the_policy(rollout):
    group = scored_group([1, 1], advantages=[1.0, -1.0], generator=-1.0)
    loss, metrics = objective_of([group], rollout=rollout).loss(batch_of(group), output_of([[-1.5], [-2.0]]))
    weighted = -exp(-0.5) + exp(-1.0) if rollout else 0.0
    assert loss.item() == pytest.approx(weighted / 2)
    assert ("sampling/importance_sampling_ratio/mean" in metrics) == bool(rollout)


def test_a_dummy_has_loss_0_and_a_gradient_whatever_its_group_lacks():
    """Its completion may be one that failed, which the reference never scored."""
    group, output = scored_group([2, 1], valid=[F, F]), output_of([[-1.0, -1.0], [-1.0, 0.0]])
    loss, metrics = objective_of([group], beta=0.1).loss(batch_of(group, is_dummy=True), output)
    assert (loss.item(), loss.requires_grad, metrics) == (0.0, True, {})


def test_the_threshold_is_over_trained_tokens_of_all_groups_and_ranks():
    group, equal = scored_group([2, 2], ["stop", "length"], advantages=[1.0, -1.0]), scored_group([1, 2])
    outputs = [
        (batch_of(group), output_of([[0.0] * 2] * 2, entropies=[[1.0, 4.0], [90.0, 91.0]])),  # the second is truncated
        (batch_of(equal), output_of([[0.0] * 2] * 2, entropies=[[2.0, 80.0], [0.1, 0.2]])),  # 80 is padding
    ]
    settings = {"top_entropy_quantile": 0.4, "mask_truncated_completions": True}
    objective = objective_of([group, equal], ranks=OneOfTwo(CPU), outputs=outputs, **settings)
    assert objective.entropy_threshold is not None
    assert 1.0 < objective.entropy_threshold <= 2.0  # the quantile 0.6 of 0.1 0.2 0.5 1 2 3 4 is 1.6
    output = output_of([[0.0] * 2] * 2, entropies=[[1.0, 4.0], [90.0, 91.0]])
    _, gradient = loss_and_gradient(objective, batch_of(group), output)
    assert gradient == [pytest.approx([0.0, -1 / 10]), [0.0, 0.0]]  # 2 and 3 tokens here, and 5


def test_trained_tokens_of_a_part_of_a_group():
    group = scored_group([1, 3, 2, 2], ["stop", "stop", "length", "stop"], valid=[T, T, T, F])
    batch = MicroBatch([SubGroup(group, [1, 3, 2])], shared=False)
    assert trained_tokens(batch, False).tolist() == [[T, T, T], [F, F, F], [T, T, F]]
    assert trained_tokens(batch, True).tolist() == [[T, T, T], [F, F, F], [F, F, F]]


@pytest.mark.parametrize(
    ("share", "kept"),
    [(1.0, [T, T, T, T, T]), (0.5, [F, F, T, T, T]), (0.3, [F, F, F, T, T]), (0.01, [F, F, F, F, T])],
)
def test_top_entropy_threshold_keeps_the_share_with_the_highest_entropy(share, kept):
    entropies = torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0])
    assert (entropies >= top_entropy_threshold(entropies, share)).tolist() == kept


def test_tokens_of_one_entropy_up_to_rounding_train_together():
    entropies = torch.tensor([1.0, 2.0, 2.000001, 1.999999, 3.0])
    assert (entropies >= top_entropy_threshold(entropies, 0.5)).tolist() == [F, T, T, T, T]


def test_top_entropy_threshold_of_a_step_without_a_token_that_trains():
    assert top_entropy_threshold(torch.tensor([]), 0.2) == torch.inf


def test_faulted_completions_are_in_no_denominator():
    group = scored_group([5, 3, 2], ["stop", "length", "stop"], valid=[T, T, F])
    assert trained_completions(group, mask_truncated_completions=False).tolist() == [T, T, F]
    assert count_denominators([group, group], mask_truncated_completions=False) == Denominators(16.0, 4.0)


def test_masked_truncated_completions_are_out_of_the_tokens_and_in_the_completions():
    group = scored_group([5, 3, 2], ["stop", "length", "stop"], valid=[T, T, F])
    assert trained_completions(group, mask_truncated_completions=True).tolist() == [T, F, F]
    assert count_denominators([group], mask_truncated_completions=True) == Denominators(tokens=5.0, completions=2.0)


def test_groups_without_variance_stay_in_the_denominators():
    group = scored_group([4, 4], ["stop", "stop"], valid=[T, T])
    assert not group.has_variance
    assert count_denominators([group], mask_truncated_completions=False) == Denominators(8.0, 2.0)


@pytest.mark.parametrize(
    ("valid", "has_variance", "has_kl", "trains", "expected"),
    [
        (T, T, F, T, T), (T, F, F, T, F), (T, F, T, T, T),  # groups without variance have a gradient of the KL term
        (F, F, T, T, F), (T, T, F, F, F), (T, F, T, F, F),  # no valid completion; no trained weight in the forward
    ],
)  # fmt: skip
def test_groups_that_contribute_to_the_gradient(valid, has_variance, has_kl, trains, expected):
    group = scored_group([2, 3], ["stop", "stop"], valid=[valid, F])
    group.has_variance = has_variance
    assert contributes(group, has_kl, lambda prompt: trains) == expected
