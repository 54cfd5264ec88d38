"""Layout of a micro-batch's completions as rows of tokens for one forward.

    shared   one packed row     [prompt 1][completion]…[completion][prompt 2][completion]…      each prompt once
    dense    one row each       [prompt 1][completion] …, right-padded                          each prompt repeated

In both, `predictor_index` is the index of the hidden state that predicts each sampled token. The prompt's last hidden
state predicts the first token of a completion. A completion of several turns has observations between its sampled
tokens. Each of its contexts takes the place of a completion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import pad

from rl_vlm.errors import ModelError, shorten, text_of
from rl_vlm.model.family import Family, positions_after_videos
from rl_vlm.model.shared_prefix import RowLayout
from rl_vlm.types import MicroBatch, Path, Prompt, Rendered, concatenate_images, digest_of, has_video, to_device

if TYPE_CHECKING:
    from transformers import PreTrainedModel


PIXELS = ("pixel_values", "pixel_values_videos")
"""Inputs of which positions depend on the shape alone."""


@dataclass(frozen=True)
class ForwardInputs:
    """Token inputs of one forward."""

    kwargs: dict[str, Tensor]
    predictor_index: Int[Tensor, " scored"]
    """Indices into the flattened (rows x tokens) hidden states."""
    rendered: list[Rendered]
    """The prompts and observations in order of their placeholders in the rows."""
    num_prefix_tokens: int
    """Sum over the rows' prompts."""
    layout: RowLayout | None = None


def check_completions(batch: MicroBatch, family: Family, placeholders: Sequence[int]) -> None:
    """Raise ModelError if a completion is empty, or if images are not where the model can have them.

    A sampled token must not be a placeholder, since there is no image for it.
    """
    completions = batch.completions
    token_ids = torch.cat([completion.token_ids for completion in completions])
    has_placeholder = torch.isin(token_ids, torch.tensor(list(placeholders), dtype=torch.int64)).any()
    check_observations(batch, family, placeholders)
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


def check_observations(batch: MicroBatch, family: Family, placeholders: Sequence[int]) -> None:
    """Raise ModelError if an observation has placeholders without images, or images that the family cannot have."""
    for observation in (each for completion in batch.completions for each in completion.observations):
        if observation.mm_inputs and family.first_images_only:
            raise ModelError(
                f"The observation {observation.name} has images, and {family.model_type} takes them in the prompt "
                f"alone: {family.first_images_only}."
            )
        if not observation.mm_inputs and set(placeholders) & set(observation.token_ids.tolist()):
            raise ModelError(f"The observation {observation.name} has placeholder tokens, but no images.")


def shared_inputs(batch: MicroBatch, family: Family, model: PreTrainedModel) -> ForwardInputs:
    """Build one packed row of prompts, each followed by its completions. The last token of each is left out."""
    prompts = [subgroup.prompt for subgroup in batch.subgroups]
    paths = [[path for c in subgroup.completions for path in c.paths] for subgroup in batch.subgroups]
    layout = RowLayout.build(
        [len(p.token_ids) for p in prompts],
        [[len(path.token_ids) - 1 for path in some] for some in paths],
        model.device,
        [path.sampled for some in paths for path in some],
    )
    bodies = [[path.without_last() for path in some] for some in paths]
    names = token_input_names(batch.rendered)
    sections = [token_inputs(p, some, names, family, model) for p, some in zip(prompts, bodies, strict=True)]
    kwargs = {name: torch.cat([section[name] for section in sections], dim=-1) for name in sections[0]}
    return ForwardInputs(
        collate_rows([kwargs], model.device), layout.predictor_index, batch.rendered, layout.num_prefix_tokens, layout
    )


def dense_inputs(batch: MicroBatch, family: Family, model: PreTrainedModel) -> ForwardInputs:
    """Build one right-padded row `[prompt][completion]` for each context of a completion."""
    pairs = [(s.prompt, path) for s in batch.subgroups for completion in s.completions for path in completion.paths]
    rendered = [each for prompt, path in pairs for each in (prompt, *path.observations.values())]
    names = token_input_names(rendered)
    rows = [token_inputs(prompt, [path], names, family, model) for prompt, path in pairs]
    width = max(row["input_ids"].shape[-1] for row in rows)
    predictor_index = [
        n * width + len(prompt.token_ids) - 1 + path.sampled.nonzero()[:, 0] for n, (prompt, path) in enumerate(pairs)
    ]
    index = to_device(torch.cat(predictor_index), model.device)
    num_prefix_tokens = sum(len(prompt.token_ids) for prompt, _ in pairs)
    return ForwardInputs(collate_rows(rows, model.device), index, rendered, num_prefix_tokens)


def own_inputs(batch: MicroBatch, family: Family, model: PreTrainedModel) -> ForwardInputs:
    """Build the inputs of the model's own forward for one completion, as transformers documents it.

    They have the processor's images and videos. They have positions only if the model's own place text in videos.
    """
    rows = dense_inputs(batch, family, model)
    is_misplaced = family.row_positions is positions_after_videos and any(map(has_video, rows.rendered))
    kwargs = {name: values for name, values in rows.kwargs.items() if is_misplaced or name != "position_ids"}
    return replace(rows, kwargs=concatenate_images(rows.rendered, model.device) | kwargs)


def token_input_names(rendered: Sequence[Rendered]) -> list[str]:
    """Return the names of all per-token inputs of prompts and observations."""
    return list(dict.fromkeys(name for each in rendered for name in each.token_inputs))


def prompt_positions(prompt: Prompt, family: Family, model: PreTrainedModel) -> Int[Tensor, "axes prompt_tokens"]:
    """Return the positions of a prompt. Raises ModelError if the model cannot compute them."""
    try:
        return family.prompt_positions(model, prompt)
    except (RuntimeError, IndexError, StopIteration) as error:  # torch's and Python's, if counts do not fit
        if isinstance(error, torch.OutOfMemoryError):
            raise
        raise ModelError(
            f"The model cannot compute positions for the {len(prompt.token_ids)} tokens of {prompt.name} "
            f"({shorten(text_of(error))}). Its processor may be of another revision, so that the images have another "
            "number of tokens: load both from one checkpoint."
        ) from error


def token_inputs(
    prompt: Prompt, paths: Sequence[Path], names: Sequence[str], family: Family, model: PreTrainedModel
) -> dict[str, Tensor]:
    """Build the per-token inputs (..., tokens) of a prompt and of paths that each continue it.

    The values of an observation are the processor's. Sampled tokens have the family's.
    """
    start, lengths = len(prompt.token_ids), [len(path.token_ids) for path in paths]
    values = {"input_ids": torch.cat([prompt.token_ids, *(path.token_ids for path in paths)])}
    for name in names:
        first = prompt.token_inputs.get(name, torch.zeros_like(prompt.token_ids))
        values[name] = torch.cat([first, first.new_full((sum(lengths),), family.completion_inputs.get(name, 0))])
    positions = prompt_positions(prompt, family, model)
    later = positions.max() + 1 + torch.cat([torch.arange(length) for length in [0, *lengths]])
    positions = torch.cat([positions, later.expand(len(positions), -1)], dim=-1)
    known: dict[Any, Tensor] = {}
    for at, path in zip(accumulate(lengths, initial=start), paths, strict=False):
        for place, observation in path.observations.items():
            for name, own in observation.token_inputs.items():
                values[name][at + place : at + place + len(own)] = own
        if any(observation.mm_inputs for observation in path.observations.values()):
            here, form = slice(at, at + len(path.token_ids)), form_of(path)
            if form not in known:
                row = {name: torch.cat([value[:start], value[here]]) for name, value in values.items()}
                images = [each.mm_inputs for each in (prompt, *path.observations.values())]
                known[form] = family.row_positions(model, row, images)[:, start:]
            positions[:, here] = known[form]
    if "cross_attention_mask" in prompt.mm_inputs:
        # (1, tokens, images, tiles); completions attend to the same images as the prompt's last token
        mask = prompt.mm_inputs["cross_attention_mask"][0].movedim(0, -1)
        last = mask[..., -1:].expand(*mask.shape[:2], sum(lengths))
        values["cross_attention_mask"] = torch.cat([mask, last], dim=-1)
    return {"attention_mask": torch.ones_like(values["input_ids"]), "position_ids": positions, **values}


def form_of(path: Path) -> Any:
    """Return a key for the positions of a path: the places and tokens of observations, and the sizes of their images.

    Pixels count by their shape. Other inputs of images and videos, such as grids and the seconds of a temporal patch,
    count by their values.
    """
    return len(path.token_ids), *(
        (
            place,
            *observation.token_ids.tolist(),
            *(values.shape for values in observation.mm_inputs.values()),
            digest_of({name: v for name, v in observation.mm_inputs.items() if name not in PIXELS}),
        )
        for place, observation in path.observations.items()
    )


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
