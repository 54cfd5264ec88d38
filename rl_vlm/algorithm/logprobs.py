"""Log-probs that a group keeps between passes: from the weights that generated it, and from the reference."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

from rl_vlm.stages import LogprobStage
from rl_vlm.types import MicroBatch, pad_rows, to_device

T = TypeVar("T")


def store_logprobs(batch: MicroBatch, logprobs_NT: Tensor, stage: LogprobStage) -> None:
    """Store a micro-batch's log-probs with its groups, by completion and without padding.

    Micro-batches with contexts of one completion must come in order.
    """
    for (scored, member, span), logprobs in zip(batch.members, logprobs_NT, strict=True):
        join(getattr(scored, stage.value), member, span, logprobs.cpu())


def join(found: dict[T, Tensor], key: T, span: slice, values: Tensor) -> None:
    """Append the padded values of some tokens of a completion to the values of the tokens before."""
    values = values[: span.stop - span.start]
    found[key] = values if span.start == 0 else torch.cat([found[key][: span.start], values])


def stored_logprobs(batch: MicroBatch, stage: LogprobStage, device: torch.device) -> Tensor | None:
    """Return the stored log-probs of whole completions, (N, T) and right-padded, or None if they were never stored."""
    stored = [getattr(scored, stage.value).get(member) for scored, member, _ in batch.members]
    return None if stored[0] is None else to_device(pad_rows(stored), device)
