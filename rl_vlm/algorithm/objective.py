"""The objective of an optimizer step: which groups and tokens it trains on, and the loss of each micro-batch.

    groups of all ranks ─ denominators ─┐
    groups ─ entropy threshold ─────────┼─► Objective ─ loss(micro-batch, log-probs) ─► (loss, metrics)
    groups ─ contributing ──────────────┘

Denominators and threshold cover the whole step, before any group is skipped. `losses.py` has the formulas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_vlm.algorithm.cut_completions import CutOutputs, needs_all_tokens, own_tokens, whole_output
from rl_vlm.algorithm.logprobs import stored_logprobs
from rl_vlm.algorithm.losses import (
    Denominators,
    LossInputs,
    LossMetrics,
    TokenLoss,
    TokenWeights,
    cispo_loss,
    clipped_loss,
    per_budget,
    per_completion,
    per_token,
    policy_loss,
    sapo_loss,
)
from rl_vlm.algorithm.own_loss import load_loss
from rl_vlm.config.schema import AlgorithmConfig, RunConfig
from rl_vlm.stages import Stage
from rl_vlm.types import MicroBatch, PolicyOutput, Rendered, ScoredGroup, length_mask, pad_rows, to_device

if TYPE_CHECKING:
    from rl_vlm.distributed.collectives import Collectives

ENTROPY_ROUNDING = 1e-5
"""Tolerance below the entropy threshold. The first tokens of a group's completions have equal entropies up to rounding:
without it, the split into micro-batches would decide which of them are trained on."""

LossForm = tuple[TokenLoss, TokenWeights]

LOSS_FORMS: dict[str, LossForm] = {
    "grpo": (clipped_loss, per_completion),
    "bnpo": (clipped_loss, per_token),  # TRL divides by each micro-batch's tokens; a step's loss must not depend on it
    "dr_grpo": (clipped_loss, per_budget),
    "dapo": (clipped_loss, per_token),
    "cispo": (cispo_loss, per_token),
    "sapo": (sapo_loss, per_completion),
}

LOSS_WEIGHTS: dict[str, TokenWeights] = {"token": per_token, "completion": per_completion, "budget": per_budget}
"""The values of `loss_weights`."""

NONE_CUT = CutOutputs()

Outputs = Callable[[], Sequence[tuple[MicroBatch, PolicyOutput]]]
"""Computes the policy's outputs for all groups of a step, without gradients and in host memory."""


def configured_loss(algorithm: AlgorithmConfig) -> LossForm:
    """Return the token loss and the token weights of `loss_type`: a row of the table, or the user's function.

    Raises ConfigError if the function cannot be loaded.
    """
    if algorithm.has_own_loss:
        return load_loss(algorithm.loss_type), LOSS_WEIGHTS[algorithm.loss_weights]
    return LOSS_FORMS[algorithm.loss_type]


@dataclass(frozen=True)
class Objective:
    """The loss of one optimizer step. The losses of its micro-batches add up to it, over all ranks."""

    config: RunConfig
    device: torch.device
    groups: Sequence[ScoredGroup]
    """This rank's groups of the step."""
    contributing: Sequence[ScoredGroup]
    """The groups whose loss has a gradient. Others need no training pass."""
    denominators: Denominators
    """Over the step's groups on all ranks."""
    entropy_threshold: float | None
    """Tokens below it get no policy loss; None if all do."""
    form: LossForm
    """The result of `configured_loss`."""

    @classmethod
    def of_step(
        cls,
        config: RunConfig,
        ranks: Collectives,
        groups: Sequence[ScoredGroup],
        window_groups: Sequence[ScoredGroup],
        steps_per_window: int,
        contributes: Callable[[ScoredGroup], bool],
        outputs: Outputs,
        form: LossForm,
    ) -> Objective:
        """Build the objective of a step on these groups. All ranks must call this together.

        `window_groups` are the groups of all `steps_per_window` steps of the generation window. `outputs` is called
        only if `top_entropy_quantile` needs it.
        """
        algorithm = config.algorithm
        return cls(
            config,
            ranks.device,
            groups,
            list(filter(contributes, groups)),
            step_denominators(algorithm, ranks, groups, window_groups, steps_per_window),
            entropy_threshold(algorithm, ranks, outputs),
            form,
        )

    def needs_all_tokens(self, batch: MicroBatch) -> bool:
        """Return whether the loss of a micro-batch needs outputs for tokens in others, of completions that are cut."""
        return needs_all_tokens(self.config, batch)

    def loss(self, batch: MicroBatch, output: PolicyOutput, cut: CutOutputs = NONE_CUT) -> tuple[Tensor, LossMetrics]:
        """Return the micro-batch's share of the step's loss, and its metrics.

        `cut` has the outputs for completions that are cut, if `needs_all_tokens`.
        """
        if batch.is_dummy:
            return 0.0 * output.logprobs_NT.sum(), {}
        algorithm, rollout = self.config.algorithm, self.config.rollout
        inputs = self.inputs(batch, output, cut)
        token_loss, token_weights = self.form
        weights_NT = token_weights(inputs.mask_NT, self.denominators, rollout.max_completion_length)
        return policy_loss(inputs, algorithm, token_loss, weights_NT)

    def inputs(self, batch: MicroBatch, output: PolicyOutput, cut: CutOutputs) -> LossInputs:
        """Return the inputs of the loss, with all tokens of completions that are cut."""
        device, whole = self.device, batch.whole
        generator_logprobs_NT = own_NT = None
        if self.config.rollout.is_off_policy:
            generator_logprobs_NT = to_device(pad_rows([c.generator_logprobs for c in whole.completions]), device)
        if batch.cuts_completions:
            output = whole_output(batch, output, cut)
            own_NT = to_device(own_tokens(batch), device)
        return LossInputs(
            policy_logprobs_NT=output.logprobs_NT,
            old_logprobs_NT=stored_logprobs(batch, Stage.OLD_LOGPROBS, device),
            ref_logprobs_NT=stored_logprobs(batch, Stage.REF_LOGPROBS, device),
            advantages_NK=to_device(advantages_of(batch), device),
            mask_NT=to_device(trained_tokens(whole, self.config.algorithm.mask_truncated_completions), device),
            entropies_NT=output.entropies_NT,
            entropy_threshold=self.entropy_threshold,
            generator_logprobs_NT=generator_logprobs_NT,
            own_NT=own_NT,
        )


def contributes(scored: ScoredGroup, has_kl: bool, trains_on: Callable[[Sequence[Rendered]], bool]) -> bool:
    """Return whether a group's loss has a gradient for a trained weight. Other groups need no training pass.

    Without a KL term, a group whose advantages are all 0 has no gradient. `trains_on` returns whether a forward of
    prompts and observations uses a trained weight.
    """
    has_loss = bool(scored.valid_G.any()) and (scored.has_variance or has_kl)
    return has_loss and trains_on(scored.group.rendered)


def advantages_of(batch: MicroBatch) -> Tensor:
    """Return the advantages of completions, (N, 1), or of all their tokens, (N, T), if turns have their own."""
    if any(s.scored.turn_advantages for s in batch.subgroups):
        return pad_rows([s.scored.token_advantages(i) for s in batch.subgroups for i in s.members])
    return torch.cat([s.scored.advantages_G[s.members] for s in batch.subgroups])[:, None]


def trained_completions(scored: ScoredGroup, mask_truncated_completions: bool) -> Tensor:
    """Return a mask of shape (G,) of the completions to train on: the valid ones, without truncated ones if masked."""
    truncated = [completion.is_truncated for completion in scored.group.completions]
    return scored.valid_G & ~(torch.tensor(truncated, device=scored.valid_G.device) & mask_truncated_completions)


def trained_tokens(batch: MicroBatch, mask_truncated_completions: bool) -> Tensor:
    """Return a mask of shape (N, T) of the tokens in the loss, on the host."""
    trains = torch.cat([trained_completions(s.scored, mask_truncated_completions)[s.members] for s in batch.subgroups])
    return length_mask([len(c.token_ids) for c in batch.completions]) & trains[:, None]


def count_denominators(groups: Sequence[ScoredGroup], mask_truncated_completions: bool) -> Denominators:
    """Count this rank's share of an optimizer step's denominators, before any group is skipped.

    Masked truncated completions count in `completions` but not in `tokens`, as in TRL; faulted ones count in neither.
    """
    tokens = completions = 0
    for scored in groups:
        trains = trained_completions(scored, mask_truncated_completions).tolist()
        tokens += sum(len(c.token_ids) for c, train in zip(scored.group.completions, trains, strict=True) if train)
        completions += int(scored.valid_G.sum())
    return Denominators(float(tokens), float(completions))


def step_denominators(
    algorithm: AlgorithmConfig,
    ranks: Collectives,
    groups: Sequence[ScoredGroup],
    window_groups: Sequence[ScoredGroup],
    steps_per_window: int,
) -> Denominators:
    """Return the denominators of a step's losses, over all ranks and including skipped groups.

    With `loss_normalizer` window, the tokens are the average over the steps of one pass over the window.
    """
    local = count_denominators(groups, algorithm.mask_truncated_completions)
    if algorithm.loss_normalizer == "window":
        of_window = count_denominators(window_groups, algorithm.mask_truncated_completions)
        local = replace(local, tokens=of_window.tokens / steps_per_window)
    return Denominators(*ranks.sum([local.tokens, local.completions]))


def entropy_threshold(algorithm: AlgorithmConfig, ranks: Collectives, outputs: Outputs) -> float | None:
    """Return the entropy below which tokens of this step are not trained on, or None if all are.

    The threshold counts the tokens of all groups, including groups that do not contribute.
    """
    if algorithm.top_entropy_quantile == 1.0:
        return None
    masked = algorithm.mask_truncated_completions
    gathered = ranks.gather([output.entropies_NT[trained_tokens(batch, masked)] for batch, output in outputs()])
    return top_entropy_threshold(torch.cat(gathered), algorithm.top_entropy_quantile) if gathered else None


def top_entropy_threshold(entropies: Tensor, top_entropy_quantile: float) -> float:
    """Compute the entropy that a share `top_entropy_quantile` of a step's trained tokens over all ranks reaches.

    Return infinity without tokens. Training on high-entropy tokens alone is from "Beyond the 80/20 rule"
    (https://arxiv.org/abs/2506.01939).
    """
    if entropies.numel() == 0:
        return torch.inf
    rank_from_below = entropies.numel() - int(top_entropy_quantile * (entropies.numel() - 1))
    # torch.quantile refuses more than 2**24 values
    return entropies.kthvalue(rank_from_below).values.item() - ENTROPY_ROUNDING
