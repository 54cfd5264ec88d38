"""An upper bound on a run's bytes on a CPU, from the shapes of its weights. It takes a tenth of a second; a plan takes
many.

A matrix of r rows and c columns reads c values per token and computes r. Passes keep at most `KEPT` times these values,
and attention weights. In plans of tiny models the factor is 0.5 to 4.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from rl_vlm.config.schema import RunConfig
from rl_vlm.model.head import HEAD_CHUNK_ELEMENTS
from rl_vlm.model.loading import load_policy
from rl_vlm.model.vision import num_patches
from rl_vlm.plan.observed import tokens_per_image
from rl_vlm.plan.weights import traceable
from rl_vlm.types import Prompt

FLOAT = 4
"""Bytes of a value. No device keeps larger ones."""
COPIES = 6
"""Copies of all weights: weights, reference, gradients, two moments, and buffers to send gradients from."""
KEPT = 8
TOKENS_PER_VALUE = 32
"""Attention weights count like the values of one more matrix product per this many tokens of a row."""
CHUNK_COPIES = 4
"""Copies of the LM head's chunk of logits."""


def bytes_at_most(config: RunConfig, checkpoint: str, prompt: Prompt, tokens: int) -> float:
    """Return an upper bound on the bytes of training with micro-batches of this many tokens, for prompts like this one.

    `checkpoint` is the directory of a model. Only its config is read.
    """
    policy = load_policy(traceable(config), checkpoint, empty=True)
    model = policy.transformer
    vision = set(policy.family.vision_parameters(model))
    of_vocabulary = {
        module.weight for module in (model.get_input_embeddings(), model.get_output_embeddings()) if module
    }
    language = [p for p in policy.parameters() if p not in vision | of_vocabulary]
    patches = num_patches(model.config, prompt)
    row = len(prompt.token_ids) + config.rollout.max_completion_length
    placeholders = policy.vision.placeholders([prompt])[0] if prompt.mm_inputs else 0
    most_patches = patches * (1 + tokens // tokens_per_image(config.rollout, len(prompt.token_ids), placeholders))
    values = (
        COPIES * sum(p.numel() for p in policy.parameters())
        + tokens * values_per_token(language, row)
        + most_patches * values_per_token(vision, patches)
        + CHUNK_COPIES * max(HEAD_CHUNK_ELEMENTS, model.config.get_text_config().vocab_size)
    )
    return FLOAT * values


def values_per_token(weights: Iterable[nn.Parameter], row: int) -> float:
    """Return an upper bound on the values that these weights' layers keep per token, or patch, of a row of this
    length."""
    widths = sum(p.numel() / p.shape[-1] + p.numel() / p.shape[-2] for p in weights if p.ndim > 1)  # rows + columns
    return (KEPT + row / TOKENS_PER_VALUE) * widths
