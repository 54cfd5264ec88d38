"""Policy losses: log-probs of the completions of one micro-batch -> (loss, metrics).

    ratio ─ token loss (clipped | cispo | sapo) ─ * generator weight ─ + beta * KL ─ token weights ─ sum

Every loss is a weighted sum over tokens. The weights hold the denominator of the whole optimizer step over all ranks,
so the losses of its micro-batches add up to the step's loss however it is split. Formulas and metric names are TRL's.
`objective.py` chooses the token loss and the weights of a step, and counts the denominators.

Suffixes: N completions, T tokens, K is T for quantities per token and 1 for those per completion.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from rl_vlm.config.schema import AlgorithmConfig


class MetricSum(NamedTuple):
    """A mean as sum and count, which add up over micro-batches and ranks."""

    total: Tensor
    count: Tensor


class MetricExtreme(NamedTuple):
    """A minimum or maximum, also over micro-batches and ranks."""

    statistic: Literal["min", "max"]
    value: Float[Tensor, ""]
    """NaN if there are no values."""


LossMetrics = Mapping[str, MetricSum | MetricExtreme]


@dataclass(frozen=True)
class Denominators:
    """Denominators of the losses of one optimizer step, summed over all ranks."""

    tokens: float
    completions: float


@dataclass(frozen=True)
class LossInputs:
    """N completions of up to T tokens, right-padded. Log-probs and entropies are fp32, after temperature and bans."""

    policy_logprobs_NT: Float[Tensor, "completions tokens"]
    old_logprobs_NT: Float[Tensor, "completions tokens"] | None
    """If None, the policy has not been updated in this window: its own log-probs are used, detached."""
    ref_logprobs_NT: Float[Tensor, "completions tokens"] | None
    """Required if `beta` > 0."""
    advantages_NK: Float[Tensor, "completions #tokens"]
    """One per completion, or one per token."""
    mask_NT: Bool[Tensor, "completions tokens"]
    """True at tokens to train on; all False for faulted completions, and for truncated ones if these are masked."""
    entropies_NT: Float[Tensor, "completions tokens"]
    entropy_threshold: float | None = None
    """Tokens below it get no policy loss; see `top_entropy_threshold` in `objective.py`."""
    generator_logprobs_NT: Float[Tensor, "completions tokens"] | None = None
    """None if the trained model itself generated the completions."""
    own_NT: Bool[Tensor, "completions tokens"] | None = None
    """True at the tokens of this micro-batch, if other tokens of a completion are in others. Their log-probs have no
    gradient here."""


TokenLoss = Callable[[Tensor, LossInputs, AlgorithmConfig], tuple[Tensor, dict[str, Tensor]]]
"""Loss per token before weighting, and flags to log: (ratio, inputs, settings) -> (loss, flags by metric name).

Shapes are (N, K)."""

TokenWeights = Callable[[Tensor, Denominators, int], Tensor]
"""Weight per token: (mask, denominators, max_completion_length) -> weights, 0 where masked."""


def policy_loss(
    inputs: LossInputs,
    algorithm: AlgorithmConfig,
    token_loss: TokenLoss,
    weights_NT: Float[Tensor, "completions tokens"],
) -> tuple[Tensor, LossMetrics]:
    """Compute this micro-batch's share of the optimizer step's loss, and its metrics.

    `weights_NT` are the weights of its tokens in the step's loss, 0 where masked. If gradients are averaged over ranks,
    as in DDP and DeepSpeed, multiply the loss by the number of ranks. For a cut completion, the result has the gradient
    of its whole loss, and the value of this micro-batch's tokens. Raises ValueError if `beta` > 0 and reference
    log-probs are missing.
    """
    ratio_NK = importance_ratio(inputs, algorithm.importance_sampling_level)
    loss_NK, clipped = token_loss(ratio_NK, inputs, algorithm)
    metrics: dict[str, MetricSum | MetricExtreme] = {n: masked_sum(flags_NK, inputs) for n, flags_NK in clipped.items()}
    metrics["entropy"] = masked_sum(inputs.entropies_NT, inputs)

    if inputs.entropy_threshold is not None:
        loss_NK = loss_NK * (inputs.entropies_NT >= inputs.entropy_threshold)
    if inputs.generator_logprobs_NT is not None:
        weight_NK, mismatch = generator_weight(inputs, inputs.generator_logprobs_NT, algorithm)
        loss_NK = loss_NK * weight_NK
        metrics |= mismatch
    if algorithm.beta > 0:
        kl_NT = kl_estimate(inputs) * (ratio_NK if algorithm.use_bias_correction_kl else 1.0)
        loss_NK = loss_NK + algorithm.beta * kl_NT
        metrics["kl"] = masked_sum(kl_NT, inputs)

    loss = (loss_NK * weights_NT).sum()
    if inputs.own_NT is not None:
        loss = loss - loss.detach() + (loss_NK.detach() * weights_NT * inputs.own_NT).sum()
    return loss, metrics


def importance_ratio(inputs: LossInputs, level: str) -> Float[Tensor, "completions #tokens"]:
    """Compute policy / old per token, 1 if masked.

    At level "sequence", compute its geometric mean over each completion, as in GSPO (https://arxiv.org/abs/2507.18071).
    """
    log_ratio = torch.where(inputs.mask_NT, inputs.policy_logprobs_NT - old_logprobs(inputs), 0.0)
    if level == "sequence":
        log_ratio = log_ratio.sum(dim=1, keepdim=True) / token_counts(inputs.mask_NT)
    return log_ratio.exp()


def old_logprobs(inputs: LossInputs) -> Float[Tensor, "completions tokens"]:
    return inputs.policy_logprobs_NT.detach() if inputs.old_logprobs_NT is None else inputs.old_logprobs_NT


def generator_weight(
    inputs: LossInputs, generator_logprobs_NT: Float[Tensor, "completions tokens"], algorithm: AlgorithmConfig
) -> tuple[Float[Tensor, "completions #tokens"], LossMetrics]:
    """Compute constant weights old / generator per token, or their product per completion, and mismatch metrics.

    They correct for sampling with another engine or older weights (https://fengyao.notion.site/off-policy-rl); 1 if the
    correction is disabled.
    """
    mask = inputs.mask_NT
    log_weight = torch.where(mask, old_logprobs(inputs).detach() - generator_logprobs_NT, 0.0)
    metrics: dict[str, MetricSum | MetricExtreme] = {
        "sampling/sampling_logp_difference/mean": masked_sum(log_weight.abs(), inputs),
        "sampling/sampling_logp_difference/max": masked_extreme("max", log_weight.abs(), inputs),
    }
    if not algorithm.vllm_importance_sampling_correction:
        return torch.ones_like(log_weight), metrics
    if algorithm.corrects_sequences:
        log_weight = log_weight.sum(dim=1, keepdim=True)
    weight_NK = bounded_weight(log_weight.exp(), algorithm)
    metrics["sampling/importance_sampling_ratio/mean"] = masked_sum(weight_NK, inputs)
    metrics["sampling/importance_sampling_ratio/min"] = masked_extreme("min", weight_NK, inputs)
    metrics["sampling/importance_sampling_ratio/max"] = masked_extreme("max", weight_NK, inputs)
    return weight_NK, metrics


def bounded_weight(
    weight_NK: Float[Tensor, "completions #tokens"], algorithm: AlgorithmConfig
) -> Float[Tensor, "completions #tokens"]:
    """Set weights out of bounds to the bound (truncate) or to 0 (mask)."""
    low = algorithm.vllm_importance_sampling_clip_min
    high = algorithm.vllm_importance_sampling_clip_max or math.inf
    if algorithm.vllm_importance_sampling_mode.endswith("truncate"):
        return weight_NK.clamp(low, high)
    return weight_NK.masked_fill((weight_NK < low) | (weight_NK > high), 0.0)


def kl_estimate(inputs: LossInputs) -> Float[Tensor, "completions tokens"]:
    """Compute the k3 estimate of KL(policy || ref) per token (http://joschu.net/blog/kl-approx.html); 0 if masked."""
    if inputs.ref_logprobs_NT is None:
        raise ValueError("beta > 0 needs ref_logprobs_NT, got None")
    log_ratio = torch.where(inputs.mask_NT, inputs.ref_logprobs_NT - inputs.policy_logprobs_NT, 0.0)
    return log_ratio.exp() - log_ratio - 1


def clipped_loss(ratio_NK: Tensor, inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's clipped surrogate from ratios per token, or per completion as in GSPO.

    `delta` also bounds the unclipped side (INTELLECT-2, arXiv:2505.07291).
    """
    advantages = inputs.advantages_NK
    low, high = 1 - algorithm.epsilon, 1 + upper_epsilon(algorithm)
    bounded = ratio_NK if algorithm.delta is None else ratio_NK.clamp(max=algorithm.delta)
    loss = -torch.min(bounded * advantages, ratio_NK.clamp(low, high) * advantages)
    is_low, is_high = (ratio_NK < low) & (advantages < 0), (ratio_NK > high) & (advantages > 0)
    return loss, {
        "clip_ratio/low_mean": is_low,
        "clip_ratio/high_mean": is_high,
        "clip_ratio/region_mean": is_low | is_high,
    }


def cispo_loss(ratio_NK: Tensor, inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute REINFORCE weighted by the truncated, detached ratio (MiniMax-M1, https://arxiv.org/abs/2506.13585)."""
    advantages, cap = inputs.advantages_NK, upper_epsilon(algorithm)
    loss = -ratio_NK.clamp(max=cap).detach() * advantages * inputs.policy_logprobs_NT
    return loss, {"cispo_clip_ratio": (ratio_NK > cap) & (advantages > 0)}


def sapo_loss(ratio_NK: Tensor, inputs: LossInputs, algorithm: AlgorithmConfig) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute the loss with a sigmoid gate on the ratio instead of a clip (SAPO, https://arxiv.org/abs/2511.20347)."""
    advantages = inputs.advantages_NK
    temperature = torch.where(advantages > 0, algorithm.sapo_temperature_pos, algorithm.sapo_temperature_neg)
    return -4 / temperature * torch.sigmoid(temperature * (ratio_NK - 1)) * advantages, {}


def upper_epsilon(algorithm: AlgorithmConfig) -> float:
    return algorithm.epsilon if algorithm.epsilon_high is None else algorithm.epsilon_high


def per_token(mask_NT: Tensor, denominators: Denominators, max_completion_length: int) -> Tensor:
    """Weight all tokens of the step equally."""
    return mask_NT / max(denominators.tokens, 1.0)


def per_completion(mask_NT: Tensor, denominators: Denominators, max_completion_length: int) -> Tensor:
    """Weight all completions equally, so that a token of a short completion counts more."""
    return mask_NT / token_counts(mask_NT) / max(denominators.completions, 1.0)


def per_budget(mask_NT: Tensor, denominators: Denominators, max_completion_length: int) -> Tensor:
    """Weight all tokens equally, whatever the completions' lengths (Dr. GRPO, https://arxiv.org/abs/2503.20783)."""
    return mask_NT / (max(denominators.completions, 1.0) * max_completion_length)


def masked_sum(values_NK: Tensor, inputs: LossInputs) -> MetricSum:
    """Sum and count values of unmasked tokens. A value per completion counts if the completion has such a token."""
    counted = counted_of(values_NK, inputs)
    return MetricSum((values_NK.detach() * counted).sum(), counted.sum())


def masked_extreme(statistic: Literal["min", "max"], values_NK: Tensor, inputs: LossInputs) -> MetricExtreme:
    """Return the minimum or maximum of the values that `masked_sum` would sum."""
    counted, values = counted_of(values_NK, inputs), values_NK.detach()
    reduce, beyond_all = (torch.amin, math.inf) if statistic == "min" else (torch.amax, -math.inf)
    extreme = reduce(values.masked_fill(~counted, beyond_all))
    return MetricExtreme(statistic, torch.where(counted.any(), extreme, math.nan))


def counted_of(values_NK: Tensor, inputs: LossInputs) -> Tensor:
    """Return the mask of values that belong to unmasked tokens, or to completions with an unmasked token.

    A completion that is cut counts in the micro-batch of its first token.
    """
    mask, own = inputs.mask_NT, inputs.own_NT
    if values_NK.shape == mask.shape:
        return mask if own is None else mask & own
    trains = mask.any(dim=1, keepdim=True)
    return trains if own is None else trains & own[:, :1]


def token_counts(mask_NT: Bool[Tensor, "completions tokens"]) -> Float[Tensor, "completions 1"]:
    """Count the unmasked tokens of each completion, at least 1."""
    return mask_NT.sum(dim=1, keepdim=True).clamp(min=1).float()
