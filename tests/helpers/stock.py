"""What the library's own model computes of one prompt at a time, with positions and masks of its own choice."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import getsource, signature
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from rl_vlm.model.family import Family
from rl_vlm.types import Completion, Context, Observation, Prompt
from tests.helpers.builders import make_prompt


def model_inputs(prompt: Prompt) -> dict[str, Tensor]:
    """Keyword arguments of the model's forward."""
    rows = {"input_ids": prompt.token_ids, "attention_mask": torch.ones_like(prompt.token_ids), **prompt.token_inputs}
    return {name: row[None] for name, row in rows.items()} | prompt.mm_inputs


def generation_inputs(model: Any, prompt: Prompt) -> dict[str, Tensor]:
    """Keyword arguments of `generate`, which refuses inputs that its model does not name, as MiniMax M3 the kinds."""
    inputs = model_inputs(prompt)
    if "mm_token_type_ids" not in signature(model.forward).parameters:
        inputs.pop("mm_token_type_ids", None)
    return inputs


@contextmanager
def own_attention(model: Any) -> Iterator[None]:
    """The library's attention: sdpa, or the model's own code if it has a soft cap, which sdpa lacks."""
    text = model.config.get_text_config()
    if getattr(text, "attn_logit_softcapping", None) is None:
        yield
        return
    ours = text._attn_implementation
    model.set_attn_implementation({"text_config": "eager"})
    try:
        yield
    finally:
        model.set_attn_implementation({"text_config": ours})


def own_logits(model: Any, **inputs: Tensor) -> Tensor:
    """The model's logits. Before 5.24 transformers omits the soft cap of PaliGemma 2's logits; it is applied here."""
    with own_attention(model):
        logits = model(**inputs).logits
    bound = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    if bound is None or "softcap" in getsource(type(model).forward):
        return logits
    return torch.tanh(logits / bound) * bound


def generate_with_transformers(
    model: Any, prompt: Prompt, *, banned: Sequence[int], stops: Sequence[int], max_new_tokens: int
) -> list[int]:
    """Greedy decoding by the library."""
    with own_attention(model):
        output = model.generate(
            **generation_inputs(model, prompt),
            do_sample=False,
            max_new_tokens=max_new_tokens,
            suppress_tokens=list(banned) or None,
            eos_token_id=list(stops),
            pad_token_id=0,
        )
    return output[0, len(prompt.token_ids) :].tolist()


def stock_logprobs(
    model: Any, family: Family, prompt: Prompt, completion: Completion, *,
    banned: Sequence[int] = (), temperature: float = 1.0,
) -> Tensor:  # fmt: skip
    """Log-probs of sampled tokens without the banned ones, from one forward per context without a cache."""
    contexts = completion.contexts or (Context((len(completion.token_ids),)),)
    left, found = completion.token_ids, []
    for context in contexts:
        parts: list[Tensor | Observation] = []
        for part in context.parts:
            if isinstance(part, int):
                parts.append(left[:part])
                left = left[part:]
            else:
                parts.append(part)
        found.append(logprobs_of_parts(model, family, prompt, parts, banned, temperature))
    return torch.cat(found)


def logprobs_of_parts(
    model: Any,
    family: Family,
    prompt: Prompt,
    parts: Sequence[Tensor | Observation],
    banned: Sequence[int],
    temperature: float,
) -> Tensor:
    """Log-probs of the parts of a conversation that are sampled tokens; the others are observations."""
    observations = [part for part in parts if isinstance(part, Observation)]
    names = dict.fromkeys(name for each in (prompt, *observations) for name in each.token_inputs)
    rows = {"input_ids": [prompt.token_ids]}
    rows |= {name: [prompt.token_inputs.get(name, torch.zeros_like(prompt.token_ids))] for name in names}
    for part in parts:
        token_ids = part if isinstance(part, Tensor) else part.token_ids
        given = {} if isinstance(part, Tensor) else part.token_inputs
        rows["input_ids"].append(token_ids)
        for name in names:
            default = torch.full((len(token_ids),), family.completion_inputs.get(name, 0))
            rows[name].append(given.get(name, default))
    inputs = {name: torch.cat(some)[None] for name, some in rows.items()}
    width = inputs["input_ids"].shape[1] - len(prompt.token_ids)
    mm_inputs = images_together(model, prompt, observations)
    if "cross_attention_mask" in mm_inputs:  # as `generate` extends it
        mask = mm_inputs["cross_attention_mask"]
        mm_inputs["cross_attention_mask"] = torch.cat([mask, mask[:, -1:].expand(-1, width, -1, -1)], dim=1)
    if hasattr(model.base_model, "rope_deltas"):
        model.base_model.rope_deltas = None
    found = own_logits(model, attention_mask=torch.ones_like(inputs["input_ids"]), **inputs, **mm_inputs)
    logits = found[0, -width - 1 : -1] / temperature
    logits[:, list(banned)] = -torch.inf
    logprobs = logits.log_softmax(-1).gather(-1, inputs["input_ids"][0, -width:, None])[:, 0]
    lengths = [len(part) if isinstance(part, Tensor) else len(part.token_ids) for part in parts]
    pieces = zip(logprobs.split(lengths), parts, strict=True)
    return torch.cat([piece for piece, part in pieces if isinstance(part, Tensor)])


def images_together(model: Any, prompt: Prompt, observations: Sequence[Observation]) -> dict[str, Tensor]:
    """The inputs of all images of a conversation, as the processor makes them in one call.

    LLaVA-OneVision's makes no tiles if a call has several images, so inputs of several calls are joined.
    """
    if not any(observation.images for observation in observations):
        return dict(prompt.mm_inputs)
    if "batch_num_images" in prompt.mm_inputs:
        owners = [prompt.mm_inputs, *(observation.mm_inputs for observation in observations if observation.images)]
        return {name: torch.cat([inputs[name] for inputs in owners]) for name in prompt.mm_inputs}
    files = [file for observation in observations for file in observation.images]
    images = [*prompt.sample.images, *(Image.open(BytesIO(file)) for file in files)]
    inputs = make_prompt(Path(model.name_or_path), images).mm_inputs
    return {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in inputs.items()}
