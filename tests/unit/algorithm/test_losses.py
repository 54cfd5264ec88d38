from math import exp, log
from typing import Any

import pytest
import torch
from beartype import beartype
from jaxtyping import TypeCheckError, jaxtyped
from pydantic import ValidationError

from rl_vlm.algorithm.losses import Denominators, LossInputs, MetricExtreme, policy_loss
from rl_vlm.algorithm.objective import LOSS_FORMS, configured_loss
from rl_vlm.config.schema import AlgorithmConfig, RunConfig
from rl_vlm.log.metrics import StepMetrics
from rl_vlm.types import length_mask

F, T = False, True


def make_inputs(
    policy, advantages, old=None, ref=None, mask=None, entropies=None, entropy_threshold=None, generator=None
):
    policy = torch.tensor(policy, requires_grad=True)
    return LossInputs(
        policy_logprobs_NT=policy,
        old_logprobs_NT=None if old is None else torch.tensor(old),
        ref_logprobs_NT=None if ref is None else torch.tensor(ref),
        advantages_NK=torch.tensor(advantages).view(len(policy), -1),
        mask_NT=torch.ones_like(policy, dtype=torch.bool) if mask is None else torch.tensor(mask),
        entropies_NT=torch.zeros_like(policy) if entropies is None else torch.tensor(entropies),
        entropy_threshold=entropy_threshold,
        generator_logprobs_NT=None if generator is None else torch.tensor(generator),
    )


def from_ratios(ratios, advantages, **kwargs):
    """Inputs whose policy / old ratios are given, at policy log-probs of 0."""
    old = (-torch.tensor(ratios).log()).tolist()
    return make_inputs(torch.zeros(len(ratios), len(ratios[0])).tolist(), advantages, old=old, **kwargs)


def loss_of(inputs, denominators=None, max_completion_length=10, **algorithm):
    """Loss, gradient per token and metrics; every token counts 1 by default."""
    loss, metrics = configured(inputs, AlgorithmConfig(**algorithm), denominators, max_completion_length)
    (gradient,) = torch.autograd.grad(loss, inputs.policy_logprobs_NT)
    return loss.item(), gradient, {name: plain(metric) for name, metric in metrics.items()}


def configured(inputs, algorithm, denominators=None, max_completion_length=10):
    """The loss and metrics of the `loss_type`."""
    token_loss, token_weights = configured_loss(algorithm)
    weights_NT = token_weights(inputs.mask_NT, denominators or Denominators(1.0, 1.0), max_completion_length)
    return policy_loss(inputs, algorithm, token_loss, weights_NT)


def plain(metric):
    if isinstance(metric, MetricExtreme):
        return metric.statistic, metric.value.item()
    return metric.total.item(), metric.count.item()


@pytest.mark.parametrize(
    ("loss_type", "weights"),
    [
        ("dapo", [[1 / 4, 0, 0], [1 / 4, 1 / 4, 1 / 4]]),  # the 4 tokens of the step
        ("bnpo", [[1 / 4, 0, 0], [1 / 4, 1 / 4, 1 / 4]]),
        ("cispo", [[1 / 4, 0, 0], [1 / 4, 1 / 4, 1 / 4]]),
        ("grpo", [[1 / 2, 0, 0], [1 / 6, 1 / 6, 1 / 6]]),  # a mean per completion, over 2 completions
        ("sapo", [[1 / 2, 0, 0], [1 / 6, 1 / 6, 1 / 6]]),
        ("dr_grpo", [[1 / 20, 0, 0], [1 / 20, 1 / 20, 1 / 20]]),  # 2 completions of at most 10 tokens
    ],
)
def test_weight_of_each_token_on_policy(loss_type, weights):
    inputs = make_inputs([[-1.0, 0, 0], [-1.0, -2.0, -3.0]], [1.0, 1.0], mask=[[T, F, F], [T, T, T]])
    _, gradient, _ = loss_of(inputs, Denominators(tokens=4.0, completions=2.0), loss_type=loss_type, epsilon_high=5.0)
    torch.testing.assert_close(-gradient, torch.tensor(weights))


def test_the_ratio_is_clipped_on_both_sides_and_by_delta():
    ratios = [0.5, 1.0, 1.5, 4.0]
    settings: dict[str, Any] = {"epsilon": 0.2, "epsilon_high": 0.3, "delta": 3.0}
    losses = {1.0: [-0.5, -1.0, -1.3, -1.3], -1.0: [0.8, 1.0, 1.5, 3.0]}
    trains = {1.0: [T, T, F, F], -1.0: [F, T, T, F]}
    for advantage in (1.0, -1.0):
        for ratio, expected_loss, has_gradient in zip(ratios, losses[advantage], trains[advantage], strict=True):
            loss, gradient, _ = loss_of(from_ratios([[ratio]], [advantage]), **settings)
            assert loss == pytest.approx(expected_loss)
            assert gradient.item() == pytest.approx(-advantage * ratio if has_gradient else 0.0)


def test_upper_clip_defaults_to_epsilon():
    assert loss_of(from_ratios([[9.0]], [1.0]), epsilon=0.2)[0] == pytest.approx(-1.2)


def test_cispo_truncates_the_weight_and_keeps_the_gradient_of_every_token():
    inputs = make_inputs([[-1.0, -1.0]], [2.0], old=[[-1.0 - log(3), -1.0 - log(9)]])  # ratios 3 and 9
    loss, gradient, metrics = loss_of(inputs, loss_type="cispo", epsilon_high=5.0)
    assert loss == pytest.approx(2.0 * (3 + 5))
    assert gradient[0].tolist() == pytest.approx([-6.0, -10.0])
    assert metrics["cispo_clip_ratio"] == (1, 2)
    negative = loss_of(from_ratios([[9.0]], [-1.0]), loss_type="cispo", epsilon_high=5.0)
    assert negative[2]["cispo_clip_ratio"] == (0, 1)


def test_sapo_has_a_temperature_per_sign_of_the_advantage():
    def gate(temperature):
        return 4 / temperature / (1 + exp(-temperature * (3 - 1)))

    settings: dict[str, Any] = {"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 2.0}
    assert loss_of(from_ratios([[3.0]], [1.0]), **settings)[0] == pytest.approx(-gate(1.0))
    assert loss_of(from_ratios([[3.0]], [-1.0]), **settings)[0] == pytest.approx(gate(2.0))


def test_sequence_level_ratio_is_the_geometric_mean_of_the_completion():
    inputs = from_ratios([[2.0, 8.0, 100.0]], [-1.0], mask=[[T, T, F]])
    loss, gradient, metrics = loss_of(inputs, loss_type="grpo", importance_sampling_level="sequence")
    assert loss == pytest.approx(4.0)
    assert gradient[0].tolist() == pytest.approx([2.0, 2.0, 0.0])
    assert metrics["clip_ratio/high_mean"] == (0, 1)


def test_without_old_logprobs_the_policys_own_are_taken_as_constants():
    on_policy = make_inputs([[-1.0, -2.0]], [3.0])
    given = make_inputs([[-1.0, -2.0]], [3.0], old=[[-1.0, -2.0]])
    assert loss_of(on_policy)[0] == loss_of(given)[0] == -6.0
    assert loss_of(on_policy)[1].tolist() == loss_of(given)[1].tolist() == [[-3.0, -3.0]]


def test_kl_is_the_k3_estimate_times_the_ratio():
    inputs = make_inputs([[0.0]], [0.0], old=[[-log(2)]], ref=[[-log(4)]])  # ratio 2, ref / policy 1/4
    k3 = 1 / 4 + log(4) - 1
    loss, gradient, metrics = loss_of(inputs, beta=0.1, use_bias_correction_kl=False)
    assert loss == pytest.approx(0.1 * k3)
    assert gradient.item() == pytest.approx(0.1 * (1 - 1 / 4))
    assert metrics["kl"] == (pytest.approx(k3), 1)

    loss, gradient, metrics = loss_of(inputs, beta=0.1, use_bias_correction_kl=True)
    assert loss == pytest.approx(0.1 * 2 * k3)
    assert gradient.item() == pytest.approx(0.1 * 2 * (k3 + 1 - 1 / 4))
    assert metrics["kl"] == (pytest.approx(2 * k3), 1)


def test_kl_without_reference_logprobs_is_refused():
    with pytest.raises(ValueError, match="ref_logprobs_NT"):
        loss_of(make_inputs([[0.0]], [1.0]), beta=0.1)


def from_weights(weights, **kwargs):
    """On-policy inputs at log-probs of 0 and advantages of -1, whose old / generator weights are given.

    Every token counts 1, so that gradients are the weights in use.
    """
    policy, generator = torch.zeros(len(weights), len(weights[0])), -torch.tensor(weights).log()
    return make_inputs(policy.tolist(), [-1.0] * len(weights), generator=generator.tolist(), **kwargs)


WEIGHTS = [[0.1, 2.0, 4.0], [0.25, 0.5, 100.0]]
WEIGHTS_MASK = [[T, T, T], [T, T, F]]
"""Over completions: 0.8 and 0.125."""


@pytest.mark.parametrize(
    ("mode", "clip_min", "clip_max", "expected"),
    [
        ("token_truncate", 0.0, 3.0, [[0.1, 2.0, 3.0], [0.25, 0.5, 0.0]]),
        ("token_truncate", 0.2, 3.0, [[0.2, 2.0, 3.0], [0.25, 0.5, 0.0]]),
        ("token_mask", 0.0, 3.0, [[0.1, 2.0, 0.0], [0.25, 0.5, 0.0]]),
        ("token_mask", 0.2, 3.0, [[0.0, 2.0, 0.0], [0.25, 0.5, 0.0]]),
        ("token_mask", 0.2, 0.0, [[0.0, 2.0, 4.0], [0.25, 0.5, 0.0]]),  # no upper bound
        ("sequence_truncate", 0.0, 3.0, [[0.8, 0.8, 0.8], [0.125, 0.125, 0.0]]),
        ("sequence_truncate", 0.2, 0.6, [[0.6, 0.6, 0.6], [0.2, 0.2, 0.0]]),
        ("sequence_mask", 0.0, 3.0, [[0.8, 0.8, 0.8], [0.125, 0.125, 0.0]]),
        ("sequence_mask", 0.2, 3.0, [[0.8, 0.8, 0.8], [0.0, 0.0, 0.0]]),
        ("sequence_mask", 0.0, 0.6, [[0.0, 0.0, 0.0], [0.125, 0.125, 0.0]]),
    ],
)
def test_generator_weight_of_each_token(mode, clip_min, clip_max, expected):
    _, gradient, _ = loss_of(
        from_weights(WEIGHTS, mask=WEIGHTS_MASK),
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=clip_min,
        vllm_importance_sampling_clip_max=clip_max,
    )
    torch.testing.assert_close(gradient, torch.tensor(expected))


def test_generator_weight_is_old_over_generator_beside_the_clipped_ratio():
    inputs = make_inputs([[0.0]], [-1.0], old=[[-log(1.5)]], generator=[[-log(1.5) - log(2)]])
    loss, gradient, metrics = loss_of(inputs)
    assert (loss, gradient.item()) == (pytest.approx(1.5 * 2), pytest.approx(1.5 * 2))
    assert metrics["clip_ratio/region_mean"] == (0, 1)


def test_bounds_that_leave_no_weight_are_refused():
    with pytest.raises(ValidationError, match=r"`vllm_importance_sampling_clip_min` 3 is not below .*clip_max` 2"):
        config_of(vllm_importance_sampling_clip_min=3.0, vllm_importance_sampling_clip_max=2.0)
    config_of(vllm_importance_sampling_clip_min=3.0, vllm_importance_sampling_clip_max=0.0)  # no upper bound


def config_of(**algorithm):
    return RunConfig.model_validate(
        {"model": {"model_name_or_path": "none"}, "rollout": {"engine": "vllm"}, "algorithm": algorithm}
    )


def test_generator_weight_leaves_the_kl_term_and_the_denominators_alone():
    inputs = from_weights([[9.0], [2.0]], ref=[[log(2)], [log(2)]])  # 9 is masked
    settings: dict[str, Any] = {"beta": 1.0, "use_bias_correction_kl": False}
    _, gradient, _ = loss_of(inputs, Denominators(2.0, 2.0), **settings)
    kl = 1 - 2
    torch.testing.assert_close(gradient, torch.tensor([[kl / 2], [(2 + kl) / 2]]))


def test_without_correction_the_generator_moves_nothing_and_the_mismatch_is_logged():
    inputs = from_weights([[2.0, 4.0]])
    loss, gradient, metrics = loss_of(inputs, vllm_importance_sampling_correction=False)
    assert (loss, gradient.tolist()) == (2.0, [[1.0, 1.0]])
    assert {name for name in metrics if name.startswith("sampling/")} == {
        "sampling/sampling_logp_difference/mean", "sampling/sampling_logp_difference/max"
    }  # fmt: skip


def test_mismatch_metrics_are_over_trained_tokens_of_all_micro_batches_and_ranks():
    def metrics_of(*micro_batches):
        step = StepMetrics()
        for weights, mask in micro_batches:
            algorithm = AlgorithmConfig(vllm_importance_sampling_mode="token_mask")
            _, metrics = configured(from_weights(weights, mask=mask), algorithm)
            step.add_loss_metrics([metrics])
        return step

    first = metrics_of(([[0.5, 2.0], [8.0, 8.0]], [[T, T], [F, F]]), ([[0.25]], [[T]]))
    second = metrics_of(([[4.0, 0.01]], [[T, F]]), ([[100.0]], [[F]]))  # 4 is out of bounds
    parts = [part for rank in (first, second) for part in rank_parts(rank)]
    found = first.reduce(lambda mine: parts)
    assert {name: value for name, value in found.items() if name.startswith("sampling/")} == {
        "sampling/sampling_logp_difference/mean": pytest.approx((log(2) + log(2) + log(4) + log(4)) / 4),
        "sampling/sampling_logp_difference/max": pytest.approx(log(4)),
        "sampling/importance_sampling_ratio/mean": pytest.approx((0.5 + 2.0 + 0.25 + 0.0) / 4),
        "sampling/importance_sampling_ratio/min": 0.0,
        "sampling/importance_sampling_ratio/max": pytest.approx(2.0),
    }


def rank_parts(metrics: StepMetrics) -> list[Any]:
    parts: list[Any] = []
    metrics.reduce(lambda mine: parts.extend(mine) or mine)
    return parts


@pytest.mark.parametrize("mode", ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"])
def test_generator_logprobs_that_overflow_are_bounded_or_masked(mode):
    settings: dict[str, Any] = {"vllm_importance_sampling_mode": mode}
    weight = 3.0 if mode.endswith("truncate") else 0.0
    inputs = make_inputs([[0.0]], [-1.0], generator=[[-1000.0]])
    assert loss_of(inputs, **settings)[0] == pytest.approx(weight)

    # the second completion does not train, whatever its log-probs
    inputs = make_inputs([[0.0], [0.0]], [-1.0, -1.0], generator=[[0.0], [-1000.0]], mask=[[T], [F]])
    loss, gradient, metrics = loss_of(inputs, **settings, vllm_importance_sampling_clip_max=0.0)
    assert (loss, gradient.tolist()) == (1.0, [[1.0], [0.0]])
    assert metrics["sampling/importance_sampling_ratio/max"] == ("max", 1.0)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_FORMS)
def test_masked_completions_take_no_part_whatever_their_logprobs(loss_type, level):
    settings: dict[str, Any] = {
        "loss_type": loss_type, "importance_sampling_level": level, "epsilon_high": 5.0, "beta": 0.1
    }  # fmt: skip
    # the second completion's ratios overflow to infinity
    inputs = make_inputs(
        [[-1.0, -1.0], [0.0, 0.0]], [1.0, -1.0],
        old=[[-1.0, -1.0], [-300.0, -300.0]], ref=[[-1.0, -1.0], [300.0, 300.0]], mask=[[T, T], [F, F]],
    )  # fmt: skip
    loss, gradient, metrics = loss_of(inputs, **settings)
    alone = make_inputs([[-1.0, -1.0]], [1.0], old=[[-1.0, -1.0]], ref=[[-1.0, -1.0]])
    expected_loss, expected_gradient, expected_metrics = loss_of(alone, **settings)
    assert loss == expected_loss
    assert gradient.tolist() == [*expected_gradient.tolist(), [0.0, 0.0]]
    assert metrics == expected_metrics


@pytest.mark.parametrize("loss_type", LOSS_FORMS)
def test_a_step_without_a_token_that_trains_has_loss_0(loss_type):
    inputs = make_inputs([[-1.0]], [1.0], mask=[[F]])
    assert loss_of(inputs, Denominators(0.0, 0.0), loss_type=loss_type)[0] == 0.0


@pytest.mark.parametrize("correction", ["token_truncate", "sequence_mask"])
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_FORMS)
def test_micro_batches_add_up_to_the_step(loss_type, level, correction):
    torch.manual_seed(0)
    lengths, advantages = [2, 7, 4, 5], torch.tensor([1.0, -0.5, 0.0, 2.0])
    policy, old, ref, entropies, generator = -torch.rand(5, 4, 7).double() * 2

    def run(cuts):
        total, gradient, step = 0.0, torch.zeros(4, 7).double(), StepMetrics()
        for rows in cuts:
            width = max(lengths[i] for i in rows)
            inputs = LossInputs(
                policy[rows, :width].requires_grad_(),
                old[rows, :width],
                ref[rows, :width],
                advantages[rows, None],
                length_mask([lengths[i] for i in rows]),
                entropies[rows, :width],
                entropy_threshold=-1.5,
                generator_logprobs_NT=generator[rows, :width] * length_mask([lengths[i] for i in rows]),
            )
            algorithm = AlgorithmConfig(
                loss_type=loss_type, importance_sampling_level=level, beta=0.1, delta=2.0, epsilon_high=1.5,
                vllm_importance_sampling_mode=correction,
            )  # fmt: skip
            loss, metrics = configured(inputs, algorithm, Denominators(tokens=18.0, completions=4.0))
            total += loss.item()
            (gradient[rows, :width],) = torch.autograd.grad(loss, inputs.policy_logprobs_NT)
            step.add_loss_metrics([metrics])
        return total, gradient, step.reduce(list)

    whole_loss, whole_gradient, whole_metrics = run([[0, 1, 2, 3]])
    for cuts in ([[0], [1], [2], [3]], [[0, 2], [1, 3]], [[3, 0, 1], [2]]):
        loss, gradient, metrics = run(cuts)
        assert loss == pytest.approx(whole_loss, rel=1e-12)
        torch.testing.assert_close(gradient, whole_gradient)
        assert metrics == {name: pytest.approx(value, rel=1e-12) for name, value in whole_metrics.items()}


def test_clip_metrics_count_tokens_by_sign_of_advantage_and_side():
    inputs = from_ratios([[0.5, 1.0, 2.0], [0.5, 0.6, 2.0]], [1.0, -1.0], mask=[[T, T, T], [T, T, F]])
    metrics = loss_of(inputs, epsilon=0.2)[2]
    assert metrics["clip_ratio/high_mean"] == (1, 5)
    assert metrics["clip_ratio/low_mean"] == (2, 5)
    assert metrics["clip_ratio/region_mean"] == (3, 5)


def test_entropy_metric_is_over_unmasked_tokens():
    inputs = make_inputs([[0.0, 0.0, 0.0]], [1.0], mask=[[T, T, F]], entropies=[[1.0, 2.0, 50.0]])
    assert loss_of(inputs)[2]["entropy"] == (3.0, 2)


def test_only_high_entropy_tokens_get_policy_loss_but_all_count_and_have_kl():
    entropies, ref = [[0.1, 0.5, 0.9, 2.0]], [[log(2)] * 4]
    inputs = make_inputs([[0.0] * 4], [1.0], ref=ref, entropies=entropies, entropy_threshold=0.5, mask=[[T, T, T, F]])
    _, gradient, _ = loss_of(inputs, Denominators(3.0, 1.0))
    torch.testing.assert_close(gradient, torch.tensor([[0.0, -1 / 3, -1 / 3, 0.0]]))
    _, gradient, _ = loss_of(inputs, Denominators(3.0, 1.0), beta=1.0, use_bias_correction_kl=False)
    torch.testing.assert_close(gradient, torch.tensor([[-1 / 3, -2 / 3, -2 / 3, 0.0]]))


def test_an_advantage_per_token_weights_its_token():
    inputs = make_inputs([[0.0, 0.0], [0.0, 0.0]], [[1.0, -2.0], [3.0, 50.0]], mask=[[T, T], [T, F]])
    loss, gradient, _ = loss_of(inputs)
    assert (loss, gradient.tolist()) == (-(1.0 - 2.0 + 3.0), [[-1.0, 2.0], [-3.0, 0.0]])
    _, _, metrics = loss_of(from_ratios([[2.0, 2.0]], [[1.0, -1.0]]), epsilon=0.2)
    assert metrics["clip_ratio/high_mean"] == (1, 2)  # the first token's advantage is positive


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("loss_type", LOSS_FORMS)
def test_equal_advantages_of_a_completions_tokens_are_the_completions_advantage(loss_type, level):
    settings: dict[str, Any] = {
        "loss_type": loss_type, "importance_sampling_level": level, "epsilon_high": 1.5, "delta": 2.0
    }  # fmt: skip
    ratios, mask = [[0.5, 1.0, 4.0], [3.0, 0.2, 1.0], [1.1, 1.0, 1.0]], [[T, T, T], [T, T, F], [T, F, F]]
    advantages = [1.5, -0.5, 0.0]
    loss, gradient, metrics = loss_of(from_ratios(ratios, advantages, mask=mask), **settings)
    spread = from_ratios(ratios, [[advantage] * 3 for advantage in advantages], mask=mask)
    assert spread.advantages_NK.shape == (3, 3)
    spread_loss, spread_gradient, spread_metrics = loss_of(spread, **settings)
    assert (spread_loss, spread_gradient.tolist()) == (loss, gradient.tolist())
    if level == "token":  # else what is clipped is counted by token, and before by completion
        assert spread_metrics == metrics


@pytest.mark.parametrize("shape", [(2,), (2, 3), (1, 1)])
def test_advantages_of_another_shape_are_refused(shape):
    inputs = make_inputs([[0.0, 0.0], [0.0, 0.0]], [1.0, 2.0])
    with pytest.raises(TypeCheckError):
        jaxtyped(typechecker=beartype)(LossInputs)(
            inputs.policy_logprobs_NT, None, None, torch.ones(shape), inputs.mask_NT, inputs.entropies_NT
        )
