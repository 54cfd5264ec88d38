"""The LM head: log-probs and entropies of tokens, from hidden states, in chunks whose logits are not kept.

forward    hidden ─ head ─► logits ─ token_scores ─► log-probs, entropies, log-sum-exp
backward   hidden ─ head ─► logits ─ softmax_gradient_ ─► gradient of logits ─► gradients of hidden and weights
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, no_type_check

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

HEAD_CHUNK_ELEMENTS = 2**26
"""Number of logits (tokens per chunk x vocabulary) that the LM head computes at once: 256 MiB in float32."""


@dataclass(frozen=True)
class Head:
    """An LM head, and how tokens are sampled from its logits.

    Autograd keeps it to the end of the backward pass, so it holds no copies of weights.
    """

    logits: Callable[..., Tensor]
    """The logits as a function of hidden states and of the head's weights, with the soft cap of the model."""
    temperature: float
    banned: Int[Tensor, " banned"]
    """Tokens that are never sampled."""
    fused: bool = False
    """Whether elementwise operations are compiled to fused kernels."""

    def logits_with_bans(self, *inputs: Tensor | None) -> Tensor:
        """Return the logits. Banned tokens have logits so low that their probability is 0."""
        logits = self.logits(*inputs)
        lowest = torch.finfo(logits.dtype).min / 2 * min(1, self.temperature)  # finite after the temperature
        logits.detach().index_fill_(-1, self.banned, lowest)
        return logits

    def scores(self, inputs: Sequence[Tensor | None], targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return log-probs of `targets`, entropies, and the log-sum-exp of the logits."""
        function = compiled(token_scores) if self.fused else token_scores
        return function(self.logits_with_bans(*inputs), targets, self.temperature)

    def replace_by_gradient(
        self, logits: Tensor, targets: Tensor, logprobs: Tensor, log_normalizer: Tensor, gradient: Tensor
    ) -> None:
        """Replace logits by their gradient. `gradient` is the gradient of the targets' log-probs.

        Targets are few, so their logits' gradients are set after the elementwise operations.
        """
        gradient = gradient / self.temperature
        of_targets = gradient - gradient * logprobs.exp()
        function = compiled(softmax_gradient_) if self.fused else softmax_gradient_
        function(logits, log_normalizer, gradient, self.temperature)
        logits.scatter_(-1, targets[:, None], of_targets[:, None].to(logits.dtype))


def chunked_scores(
    head: Head,
    weights: Sequence[Tensor | None],
    hidden: Float[Tensor, "scored hidden"],
    targets: Int[Tensor, " scored"],
    vocabulary: int,
) -> tuple[Float[Tensor, " scored"], Float[Tensor, " scored"]]:
    """Compute log-probs of `targets`, and detached entropies, in at least float32."""
    size = max(1, HEAD_CHUNK_ELEMENTS // vocabulary)
    chunks = zip(targets.split(size), hidden.split(size), strict=True)
    logprobs, entropies = zip(*(TokenScores.apply(head, *chunk, *weights) for chunk in chunks), strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


class TokenScores(torch.autograd.Function):
    """Log-probs and entropies of a chunk of tokens. The backward pass computes the chunk's logits again.

    Entropies have no gradient, since they are used in a metric and a threshold, never in a loss.
    """

    @staticmethod
    def forward(
        ctx: Any, head: Head, targets: Tensor, hidden: Tensor, *weights: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, log_normalizer = head.scores((hidden, *weights), targets)
        ctx.head = head
        ctx.save_for_backward(targets, logprobs, log_normalizer, hidden, *weights)
        ctx.mark_non_differentiable(entropies)
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        targets, logprobs, log_normalizer, hidden, *weights = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        inputs = [hidden.detach().requires_grad_(needed[0]), *weights]
        with torch.enable_grad():
            logits = ctx.head.logits_with_bans(*inputs)
        of_logits = logits.detach()  # in the same memory
        ctx.head.replace_by_gradient(of_logits, targets, logprobs, log_normalizer, gradients[0])
        differentiable = [tensor for tensor, is_needed in zip(inputs, needed, strict=True) if is_needed]
        found = iter(torch.autograd.grad(logits, differentiable, of_logits))
        return None, None, *(next(found) if is_needed else None for is_needed in needed)


@cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function whose operations are fused, for any number of tokens."""
    return torch.compile(function, dynamic=True)


@no_type_check  # the checks of tests cannot be compiled
def token_scores(
    logits: Float[Tensor, "tokens vocabulary"], targets: Int[Tensor, " tokens"], temperature: float
) -> tuple[Float[Tensor, " tokens"], Float[Tensor, " tokens"], Float[Tensor, " tokens"]]:
    """Return log-probs of `targets`, entropies, and the log-sum-exp. Logits in float32 are overwritten."""
    logits = at_temperature(logits, temperature)
    of_targets = logits.gather(-1, targets[:, None])[:, 0]
    highest = logits.amax(-1, keepdim=True)
    below = logits.sub_(highest)
    shares = below.exp()
    total = shares.sum(-1)
    log_normalizer = total.log() + highest[:, 0]
    entropies = total.log() - shares.mul_(below).sum(-1) / total
    return of_targets - log_normalizer, entropies, log_normalizer


@no_type_check
def softmax_gradient_(
    logits: Float[Tensor, "tokens vocabulary"],
    log_normalizer: Float[Tensor, " tokens"],
    gradient: Float[Tensor, " tokens"],
    temperature: float,
) -> None:
    """Replace logits by `-gradient * softmax`: the gradient of tokens that are not the target."""
    softmax = at_temperature(logits, temperature).sub_(log_normalizer[:, None]).exp_()
    logits.copy_(softmax.mul_(-gradient[:, None]))


@no_type_check
def at_temperature(logits: Tensor, temperature: float) -> Tensor:
    """Divide logits by the temperature, in at least float32. Overwrite them if they have that precision."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits if temperature == 1 else logits.div_(temperature)


def head_function(head: Any, dtype: torch.dtype | None) -> tuple[Callable[..., Tensor], Sequence[Tensor | None]]:
    """Return an LM head as a function of hidden states and weights, and these weights.

    A plain head computes in `dtype`, if given; its weights are cast once. It is not called as a module, since ranks
    that shard it must call modules equally often but have different numbers of chunks. Other heads are called, and
    their weights are those that are trained.
    """
    if not is_plain_head(head):
        return lambda hidden, *_: head(hidden), [p for p in head.parameters() if p.requires_grad]
    if dtype is None or head.weight.dtype == dtype:
        return F.linear, (head.weight, head.bias)
    return cast_linear, (head.weight, head.bias, head.weight.detach().to(dtype))


def cast_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None, cast: Tensor) -> Tensor:
    """Compute `F.linear` in the dtype of `cast`, which holds the weights in this dtype."""
    logits = CastLinear.apply(hidden.to(cast.dtype), weight, cast)
    return logits if bias is None else logits + bias.to(cast.dtype)


class CastLinear(torch.autograd.Function):
    """A product with weights that are already cast.

    As under autocast, each product's gradient is cast back before gradients are added.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, cast: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, cast)
        ctx.dtype = weight.dtype
        return F.linear(hidden, cast)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        hidden, cast = ctx.saved_tensors
        needs_hidden, needs_weight, _ = ctx.needs_input_grad
        (gradient,) = gradients
        of_hidden = gradient @ cast if needs_hidden else None
        return of_hidden, (gradient.T @ hidden).to(ctx.dtype) if needs_weight else None, None


def is_plain_head(head: Any) -> bool:
    """Return whether an LM head is just a matrix product, without an adapter for example."""
    return type(head) is nn.Linear
