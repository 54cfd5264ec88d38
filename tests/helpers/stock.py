"""What the library's own model computes of one prompt at a time, with positions and masks of its own choice."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import getsource
from typing import Any

import torch
from torch import Tensor

from rl_vlm.model.families import Family
from rl_vlm.types import Completion, Prompt


def model_inputs(prompt: Prompt) -> dict[str, Tensor]:
    """Keyword arguments of the model's forward, and of `generate`."""
    rows = {"input_ids": prompt.token_ids, "attention_mask": torch.ones_like(prompt.token_ids), **prompt.token_inputs}
    return {name: row[None] for name, row in rows.items()} | prompt.mm_inputs


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
            **model_inputs(prompt),
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
    """Log-probs of a completion without the banned tokens, from one forward without a cache."""
    width = len(completion.token_ids)
    extra = {
        name: torch.cat([ids, torch.full((width,), family.completion_inputs.get(name, 0))])[None]
        for name, ids in prompt.token_inputs.items()
    }
    token_ids = torch.cat([prompt.token_ids, completion.token_ids])[None]
    mm_inputs = dict(prompt.mm_inputs)
    if "cross_attention_mask" in mm_inputs:  # as `generate` extends it
        mask = mm_inputs["cross_attention_mask"]
        mm_inputs["cross_attention_mask"] = torch.cat([mask, mask[:, -1:].expand(-1, width, -1, -1)], dim=1)
    if hasattr(model.base_model, "rope_deltas"):
        model.base_model.rope_deltas = None
    found = own_logits(model, input_ids=token_ids, attention_mask=torch.ones_like(token_ids), **extra, **mm_inputs)
    logits = found[0, -width - 1 : -1] / temperature
    logits[:, list(banned)] = -torch.inf
    return logits.log_softmax(-1).gather(-1, completion.token_ids[:, None])[:, 0]
