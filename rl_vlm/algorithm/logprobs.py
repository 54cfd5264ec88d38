"""Log-probs that a group keeps between passes: from the weights that generated it, and from the reference."""

from __future__ import annotations

import torch
from torch import Tensor

from rl_vlm.stages import LogprobStage
from rl_vlm.types import MicroBatch, pad_rows, to_device


def store_logprobs(batch: MicroBatch, logprobs_NT: Tensor, stage: LogprobStage) -> None:
    """Store a micro-batch's log-probs with its groups, by completion and without padding."""
    completions = [(s.scored, member) for s in batch.subgroups for member in s.members]
    for (scored, member), logprobs, completion in zip(completions, logprobs_NT, batch.completions, strict=True):
        getattr(scored, stage.value)[member] = logprobs[: len(completion.token_ids)].cpu()


def stored_logprobs(batch: MicroBatch, stage: LogprobStage, device: torch.device) -> Tensor | None:
    """Return the stored log-probs of a micro-batch, (N, T) and right-padded, or None if they were never stored."""
    stored = [getattr(s.scored, stage.value).get(member) for s in batch.subgroups for member in s.members]
    return None if stored[0] is None else to_device(pad_rows(stored), device)
