"""Parameters of tests by tier: `make test` runs some, `make test-ci` others, and `make test-all` the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

FAST_FAMILIES = {
    "qwen2_5_vl",  # M-RoPE
    "gemma3",  # sliding windows, images that see themselves in both directions
    "mllama",  # cross-attention
    "qwen3_5",  # gated delta rule
}
"""Families of `make test`: different ways to read a prompt."""
OWN_CODE_PATHS = FAST_FAMILIES | {
    "qwen3_vl",  # deepstack features
    "internvl",  # positions in one dimension, tiles
    "paligemma",  # a prompt that sees itself in both directions
    "lfm2_vl",  # short convolutions
    "glm4v",  # M-RoPE with another tower
    "llava",  # a tower that runs once per prompt
    "llava_next",  # tiles, with a trained vector after each row
    "idefics3",  # a connector, images with masks
    "ovis2",  # a table of visual tokens, other placeholders
    "gemma4_bidirectional",  # attention logits that are not scaled
    "cohere2_vision",  # layers without positions
    "kimi_k25",  # latent attention
    "qwen3_vl_moe",  # experts
    "minicpmv4_7",  # positions of a canvas
    "hunyuan_vl",  # positions on four axes
    "llama4",  # dense rows alone, layers in which padding matters, features that the forward projects
    "qwen2_5_omni_thinker",  # no module holds all but the LM head, and one for audio is not used
}
"""Families of `make test-ci`: one of each kind. The others share their code paths, and most of their tests are slow."""
FEW_FAMILIES = FAST_FAMILIES | {"qwen3_vl", "internvl", "lfm2_vl", "kimi_k25"}
"""Families of `make test-ci` in tests whose subject is another than the way in which a family reads a prompt."""
LATER_FAMILIES = {
    "ernie4_5_vl_moe", "exaone4_5", "fast_vlm", "gemma4_unified", "glm4v_moe", "glm_ocr", "granite4_vision",
    "minimax_m3_vl", "paddleocr_vl", "qwen3_omni_moe_thinker", "qwen4_exp", "step3p7", "video_llama_3",
}  # fmt: skip
"""Families of which all tests are slow. Of others, some short tests are in `make test-ci`."""


def in_tiers(values: Iterable[Any], fast: Collection[Any], ci: Collection[Any] | None = None) -> list[Any]:
    """Return values as parameters: those of `fast` are in the first tier, those of `ci` in the second, others slow.

    Without `ci`, all others are in the second.
    """
    values = list(values)
    ci = values if ci is None else ci
    return [pytest.param(v, marks=() if v in fast else pytest.mark.ci if v in ci else pytest.mark.slow) for v in values]


def short_test_of_families(families: Iterable[str]) -> list[Any]:
    """Return families as parameters of a short test, with most of them in the first two tiers."""
    families = sorted(families)
    return in_tiers(families, FAST_FAMILIES, set(families) - LATER_FAMILIES)


def families_in_tiers(families: Iterable[str], ci: Collection[str] = OWN_CODE_PATHS) -> list[Any]:
    """Return families as parameters, with one of each kind in the first two tiers."""
    return in_tiers(sorted(families), FAST_FAMILIES, ci)
