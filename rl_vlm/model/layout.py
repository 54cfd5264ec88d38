"""Layout of a micro-batch's completions as rows of tokens for one forward.

    shared   one packed row     [prompt 1][completion]…[completion][prompt 2][completion]…      each prompt once
    dense    one row each       [prompt 1][completion] …, right-padded                          each prompt repeated

In both, `predictor_index` is the index of the hidden state that predicts each completion token. The prompt's last
hidden state predicts the first token of a completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad

from rl_vlm.errors import ModelError
from rl_vlm.model.families import Family
from rl_vlm.model.shared_prefix import RowLayout
from rl_vlm.types import MicroBatch, Prompt, to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True)
class ForwardInputs:
    """Token inputs of one forward."""

    kwargs: dict[str, Tensor]
    predictor_index: Int[Tensor, " scored"]
    """Indices into the flattened (rows x tokens) hidden states."""
    prompts: list[Prompt]
    """The prompts in order of their placeholders in the rows."""
    layout: RowLayout | None = None


def check_completions(batch: MicroBatch, placeholders: Sequence[int]) -> None:
    """Raise ModelError if a completion is empty, or contains a placeholder token: there is no image for it."""
    completions = batch.completions
    token_ids = torch.cat([completion.token_ids for completion in completions])
    has_placeholder = torch.isin(token_ids, torch.tensor(list(placeholders), dtype=torch.int64)).any()
    if all(len(completion.token_ids) for completion in completions) and not has_placeholder:
        return
    for subgroup in batch.subgroups:
        for member, completion in zip(subgroup.members, subgroup.completions, strict=True):
            held = sorted(set(completion.token_ids.tolist()) & set(placeholders))
            if held or not len(completion.token_ids):
                found = f"holds placeholder tokens {held}, for which there are no images" if held else "is empty"
                raise ModelError(
                    f"Completion {member} of sample {subgroup.prompt.sample.sample_id} {found}. "
                    "The rollout engine must ban placeholder tokens and return at least one token."
                )


def shared_inputs(batch: MicroBatch, family: Family, model: PreTrainedModel) -> ForwardInputs:
    """Build one packed row of prompts, each followed by its completions. The last token of each is left out."""
    prompts = [subgroup.prompt for subgroup in batch.subgroups]
    bodies = [[c.token_ids[:-1] for c in subgroup.completions] for subgroup in batch.subgroups]
    layout = RowLayout.build(
        [len(p.token_ids) for p in prompts], [[len(body) for body in some] for some in bodies], model.device
    )
    names = token_input_names(prompts)
    sections = [token_inputs(p, some, names, family, model) for p, some in zip(prompts, bodies, strict=True)]
    kwargs = {name: torch.cat([section[name] for section in sections], dim=-1) for name in sections[0]}
    return ForwardInputs(collate_rows([kwargs], model.device), layout.predictor_index, prompts, layout)


def dense_inputs(batch: MicroBatch, family: Family, model: PreTrainedModel) -> ForwardInputs:
    """Build one right-padded row `[prompt][completion]` per completion."""
    pairs = [(s.prompt, completion.token_ids) for s in batch.subgroups for completion in s.completions]
    prompts = [prompt for prompt, _ in pairs]
    names = token_input_names(prompts)
    rows = [token_inputs(prompt, [token_ids], names, family, model) for prompt, token_ids in pairs]
    width = max(row["input_ids"].shape[-1] for row in rows)
    predictor_index = [
        n * width + len(prompt.token_ids) - 1 + torch.arange(len(token_ids))
        for n, (prompt, token_ids) in enumerate(pairs)
    ]
    index = to_device(torch.cat(predictor_index), model.device)
    return ForwardInputs(collate_rows(rows, model.device), index, prompts)


def token_input_names(prompts: Sequence[Prompt]) -> list[str]:
    """Return the names of all per-token inputs of the prompts."""
    return list(dict.fromkeys(name for prompt in prompts for name in prompt.token_inputs))


def token_inputs(
    prompt: Prompt, continuations: Sequence[Tensor], names: Sequence[str], family: Family, model: PreTrainedModel
) -> dict[str, Tensor]:
    """Build the per-token inputs (..., tokens) of a prompt and of token sequences that each continue it."""
    positions = family.prompt_positions(model, prompt)  # (axes, prompt tokens)
    start = positions.max() + 1
    behind = start + torch.cat([torch.arange(len(tokens)) for tokens in [[], *continuations]])
    token_ids = torch.cat([prompt.token_ids, *continuations])
    extra = {
        name: torch.cat(
            [
                prompt.token_inputs.get(name, torch.zeros_like(prompt.token_ids)),
                torch.full_like(behind, family.completion_inputs.get(name, 0)),
            ]
        )
        for name in names
    }
    if "cross_attention_mask" in prompt.mm_inputs:
        # (1, tokens, images, tiles); completions attend to the same images as the prompt's last token
        mask = prompt.mm_inputs["cross_attention_mask"][0].movedim(0, -1)
        extra["cross_attention_mask"] = torch.cat([mask, mask[..., -1:].expand(*mask.shape[:2], len(behind))], dim=-1)
    return {
        "input_ids": token_ids,
        "attention_mask": torch.ones_like(token_ids),
        "position_ids": torch.cat([positions, behind.expand(len(positions), -1)], dim=-1),
        **extra,
    }


def collate_rows(rows: Sequence[dict[str, Tensor]], device: torch.device, pad_left: bool = False) -> dict[str, Tensor]:
    """Pad rows of per-token inputs with 0 and stack them into a model's keyword arguments."""
    width = max(row["input_ids"].shape[-1] for row in rows)

    def padded(value: Tensor) -> Tensor:
        missing = width - value.shape[-1]
        return pad(value, (missing, 0) if pad_left else (0, missing))

    kwargs = {name: to_device(torch.stack([padded(row[name]) for row in rows], dim=-2), device) for name in rows[0]}
    if len(kwargs["position_ids"]) == 1:  # one axis: (1, rows, tokens) -> (rows, tokens)
        kwargs["position_ids"] = kwargs["position_ids"][0]
    if "cross_attention_mask" in kwargs:  # (images, tiles, rows, tokens) -> (rows, tokens, images, tiles)
        kwargs["cross_attention_mask"] = kwargs["cross_attention_mask"].permute(2, 3, 0, 1)
    return kwargs
