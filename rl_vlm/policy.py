"""The policy as a function from micro-batches to token scores: log-probs and entropies of N completions.

    MicroBatch ─ shared_inputs | dense_inputs ─► forward of the language model ─► hidden states
               ─ rows that predict completion tokens ─► LM head in chunks ─► TokenScores

Both input layouts end in the same place: `score_index` names, for every completion token, the hidden state that
predicts it. The first token of a completion is predicted by the prompt's last hidden state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rl_vlm.families import Family
from rl_vlm.shared_prefix import RowLayout, shared_row
from rl_vlm.types import MicroBatch, TokenScores, concatenate_images, pad_rows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

HEAD_CHUNK_ELEMENTS = 2**26
"""Logits held at once by the LM head: tokens per chunk x vocabulary; 256 MiB in float32."""


@dataclass(frozen=True)
class ModelInputs:
    """One forward's inputs, and which hidden states score which tokens."""

    kwargs: dict[str, Any]
    score_index: Int[Tensor, " scored"]
    """Into the flattened (rows x tokens) hidden states."""
    layout: RowLayout | None


class Policy(nn.Module):
    """A vision-language model with what it takes to score completions; the module that engines wrap and train."""

    def __init__(self, model: nn.Module, family: Family, temperature: float, compute_dtype: torch.dtype) -> None:
        """`model` is a transformers model or a PEFT model around one; `compute_dtype` is the autocast precision."""
        super().__init__()
        self.model: Any = model
        self.family = family
        self.temperature = temperature
        self.compute_dtype = compute_dtype
        self.banned_token_ids = family.banned_token_ids(self.transformer.config)
        self.counters: Counter[str] = Counter()

    @property
    def transformer(self) -> PreTrainedModel:
        """The transformers model, below any adapter."""
        return base_model(self.model)

    @property
    def device(self) -> torch.device:
        return self.transformer.device

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Compute in `compute_dtype` while weights keep theirs."""
        enabled = self.compute_dtype != torch.float32
        with torch.autocast(self.device.type, dtype=self.compute_dtype, enabled=enabled):
            yield

    def forward(self, batch: MicroBatch) -> TokenScores:
        """Score the completions of a micro-batch under the policy at the sampling temperature."""
        inputs = self.shared_inputs(batch) if batch.shared else self.dense_inputs(batch)
        with self.autocast(), shared_row(inputs.layout):
            hidden = self.transformer.base_model(**inputs.kwargs, use_cache=False).last_hidden_state
        self.count(batch, inputs)
        targets = torch.cat([c.token_ids for c in batch.completions]).to(self.device)
        logprobs, entropies = self.score(hidden.flatten(0, 1)[inputs.score_index], targets)
        lengths = [len(c.token_ids) for c in batch.completions]
        return TokenScores(pad_rows(logprobs.split(lengths)), pad_rows(entropies.split(lengths)))

    def shared_inputs(self, batch: MicroBatch) -> ModelInputs:
        """One packed row: every prompt once, then all completions without their last token, which predicts nothing."""
        prompts = [subgroup.prompt for subgroup in batch.subgroups]
        owners = [i for i, subgroup in enumerate(batch.subgroups) for _ in subgroup.members]
        bodies = [completion.token_ids[:-1] for completion in batch.completions]
        layout = RowLayout.build([len(p.token_ids) for p in prompts], [len(b) for b in bodies], owners, self.device)

        prompt_positions = [self.family.prompt_positions(self.transformer, prompt) for prompt in prompts]
        starts = torch.stack([positions.max() + 1 for positions in prompt_positions])
        lengths = torch.tensor([len(body) for body in bodies])
        offsets = torch.cat([torch.arange(length) for length in lengths.tolist()])
        body_positions = starts[owners].repeat_interleave(lengths) + offsets  # alike on all axes
        num_axes = len(prompt_positions[0])
        token_ids = torch.cat([p.token_ids for p in prompts] + bodies)
        kwargs = {
            "input_ids": token_ids[None],
            "attention_mask": torch.ones_like(token_ids[None]),
            "position_ids": torch.cat([*prompt_positions, body_positions.expand(num_axes, -1)], dim=-1)[:, None],
            **concatenate_images(prompts, self.device),
        }
        return ModelInputs(_to(kwargs, self.device), layout.predictor_index, layout)

    def dense_inputs(self, batch: MicroBatch) -> ModelInputs:
        """One right-padded row `[prompt][completion]` per completion, images repeated, positions left to the model."""
        prompts = [subgroup.prompt for subgroup in batch.subgroups for _ in subgroup.members]
        token_ids = [c.token_ids for c in batch.completions]
        rows = [torch.cat([p.token_ids, ids]) for p, ids in zip(prompts, token_ids, strict=True)]
        width = max(len(row) for row in rows)
        score_index = [
            n * width + torch.arange(len(p.token_ids) - 1, len(row) - 1)
            for n, (p, row) in enumerate(zip(prompts, rows, strict=True))
        ]
        kwargs = {
            "input_ids": pad_rows(rows),
            "attention_mask": pad_rows([torch.ones_like(row) for row in rows]),
            **{
                name: pad_rows(
                    [nn.functional.pad(p.token_inputs[name], (0, width - len(p.token_ids))) for p in prompts]
                )
                for name in prompts[0].token_inputs
            },
            **concatenate_images(prompts, self.device),
        }
        return ModelInputs(_to(kwargs, self.device), torch.cat(score_index).to(self.device), layout=None)

    def score(
        self, hidden: Float[Tensor, "scored hidden"], targets: Int[Tensor, " scored"]
    ) -> tuple[Float[Tensor, " scored"], Float[Tensor, " scored"]]:
        """Log-probs of `targets` and entropies, in fp32; the logits of a chunk are recomputed for its gradient."""
        head: Any = self.transformer.get_output_embeddings()
        chunk_size = max(1, HEAD_CHUNK_ELEMENTS // head.weight.shape[0])
        scores = [
            checkpoint(self.score_chunk, head, h, t, use_reentrant=False)
            for h, t in zip(hidden.split(chunk_size), targets.split(chunk_size), strict=True)
        ]
        logprobs, entropies = zip(*scores, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def score_chunk(self, head: nn.Module, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Scores under the distribution that was sampled from: after temperature and the ban on placeholder tokens."""
        with self.autocast():
            logits = head(hidden)
        logits = logits.float() / self.temperature
        logits[:, self.banned_token_ids] = torch.finfo(logits.dtype).min
        log_normalizer = logits.logsumexp(-1)
        logprobs = logits.gather(-1, targets[:, None])[:, 0] - log_normalizer
        expected_logit = ((logits - log_normalizer[:, None]).exp() * logits).sum(-1)
        return logprobs, log_normalizer - expected_logit

    def count(self, batch: MicroBatch, inputs: ModelInputs) -> None:
        """Keep account of what forwards computed: `unique_tokens` in language rows, `dense_tokens` without sharing."""
        dense = sum(len(s.prompt.token_ids) + len(c.token_ids) for s in batch.subgroups for c in s.completions)
        self.counters["shared_forwards" if batch.shared else "dense_forwards"] += 1
        self.counters["computed_tokens"] += inputs.kwargs["input_ids"].numel()
        self.counters["dense_tokens"] += dense
        self.counters["vision_patches"] += len(inputs.kwargs.get("pixel_values", ()))


def base_model(model: Any) -> PreTrainedModel:
    """The transformers model below an adapter, or the model itself."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _to(kwargs: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: value.to(device) for name, value in kwargs.items()}
