"""The user's token loss, named by `algorithm.loss_type`: loads it, and checks it before a run.

    name ─ load ─ signature ─► function ─ called on two completions of up to three tokens ─► shapes, values, gradient

torch is imported only when the function is called, so that a dry run can load the function without torch.
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from rl_vlm.config.schema import AlgorithmConfig
from rl_vlm.errors import ConfigError, listed, text_of
from rl_vlm.functions import LoadError, load_callable
from rl_vlm.stages import is_metric

if TYPE_CHECKING:
    from rl_vlm.algorithm.losses import LossInputs, TokenLoss

CALL = "f(ratio_NK, inputs, algorithm)"
RESULT = "(loss_NK, metrics): a tensor of shape (N, T) or (N, 1), and a dict of such tensors by metric name"
OF_LOSSES = ("clip_ratio/", "cispo_clip_ratio")
"""Prefixes of the metrics that token losses log. A user's loss may use them, too."""


def load_loss(name: str) -> TokenLoss:
    """Load a token loss. Raises ConfigError if that fails, or if it cannot be called with three arguments."""
    try:
        function = load_callable(name)
    except LoadError as error:
        raise ConfigError(f"algorithm.loss_type {name!r}: {error}") from error
    try:
        signature = inspect.signature(function)
        signature.bind(None, None, None)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"algorithm.loss_type {name!r} cannot be called as {CALL}: {text_of(error)}. docs/losses.md has an example"
        ) from error
    return function


def check_own_loss(algorithm: AlgorithmConfig) -> None:
    """Call the user's loss, if there is one, on made-up completions.

    Raises ConfigError if it cannot be loaded, fails, or returns something that a run cannot use.
    """
    if not algorithm.has_own_loss:
        return
    import torch

    loss = load_loss(algorithm.loss_type)
    for is_first in (True, False):
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            problem = problem_of(loss, made_up_inputs(algorithm, is_first), algorithm)
        if problem is not None:
            when = " in the first update of a window, without old log-probs" if is_first else ""
            raise ConfigError(f"algorithm.loss_type {algorithm.loss_type!r} {problem}, on made-up completions{when}")


def made_up_inputs(algorithm: AlgorithmConfig, is_first: bool) -> LossInputs:
    """Build the inputs of two completions, with three and two tokens.

    With `is_first` there are no old log-probs, as in a window's first update. With `turn_advantages` there is an
    advantage per token.
    """
    import torch

    from rl_vlm.algorithm.losses import LossInputs

    mask_NT = torch.tensor([[True, True, True], [True, True, False]])
    policy, old, ref, entropies = torch.rand(4, 2, 3, generator=torch.Generator().manual_seed(0)) * mask_NT
    advantages_N1 = torch.tensor([[1.0], [-0.5]])
    return LossInputs(
        policy_logprobs_NT=(-policy).requires_grad_(),
        old_logprobs_NT=None if is_first else -old,
        ref_logprobs_NT=-ref if algorithm.beta > 0 else None,
        advantages_NK=advantages_N1 if algorithm.turn_advantages == "none" else advantages_N1 * mask_NT,
        mask_NT=mask_NT,
        entropies_NT=entropies,
    )


def problem_of(loss: TokenLoss, inputs: LossInputs, algorithm: AlgorithmConfig) -> str | None:
    """Call a token loss. Return its problem, worded to follow the function's name, or None."""
    import torch

    from rl_vlm.algorithm.losses import importance_ratio

    try:
        returned: Any = loss(importance_ratio(inputs, algorithm.importance_sampling_level), inputs, algorithm)
    except Exception as error:
        return f"raised {type(error).__name__}: {text_of(error)}"
    if not isinstance(returned, tuple) or len(returned) != 2:
        return f"returned {described(returned)}; it must return {RESULT}"
    values_NK, metrics = returned
    if problem := problem_of_tensor(values_NK, inputs) or problem_of_metrics(metrics, inputs):
        return problem
    if not values_NK.is_floating_point():
        return f"returned a loss of {values_NK.dtype}; it must be a floating-point tensor"
    if not values_NK.requires_grad:
        has_kl = algorithm.beta > 0
        return None if has_kl else "returned a loss without a gradient, so that nothing would be trained"
    (gradient,) = torch.autograd.grad(values_NK.sum(), inputs.policy_logprobs_NT, allow_unused=True)
    if gradient is not None and not gradient.isfinite().all():
        return "returned a loss whose gradient is not finite"
    return None


def problem_of_tensor(values: Any, inputs: LossInputs, what: str = "a loss") -> str | None:
    """Return the problem of a tensor's shape (N, K) or values, or None."""
    import torch

    num_completions, num_tokens = inputs.mask_NT.shape
    shapes = [(num_completions, num_tokens), (num_completions, 1)]
    if not isinstance(values, torch.Tensor) or tuple(values.shape) not in shapes:
        expected = " or ".join(map(str, shapes))
        return f"returned {described(values)} as {what}; {num_completions} completions need the shape {expected}"
    if not values.isfinite().all():
        return f"returned {what} that is not finite"
    return None


def problem_of_metrics(metrics: Any, inputs: LossInputs) -> str | None:
    """Return the problem of a loss's metrics, or None."""
    if not isinstance(metrics, dict):
        return f"returned {described(metrics)} as metrics; it must return {RESULT}"
    if taken := [name for name in metrics if is_metric(str(name)) and not str(name).startswith(OF_LOSSES)]:
        return f"returned the metric {listed(taken)}, which the run writes itself; choose another name"
    problems = (problem_of_tensor(values, inputs, f"the metric {name!r}") for name, values in metrics.items())
    return next(filter(None, problems), None)


def described(value: Any) -> str:
    """Describe a value in a few words."""
    shape = getattr(value, "shape", None)
    if shape is not None:
        return f"a tensor of shape {tuple(shape)}"
    return f"a {type(value).__name__}" + (f" of {len(value)}" if isinstance(value, tuple | list) else "")
