"""Names for parts of a model that settings accept in every family, and what an adapter does to its base."""

from __future__ import annotations

PARTS = ("lm_head", "language_model", "projector", "vision_tower")
"""Parts that `trainable_modules` and `lora_target_modules` accept in addition to names of modules."""
CHANGING_THE_BASE = ("pissa", "olora")
"""Values of `init_lora_weights` that are computed from the base weights, and change them."""


def as_names(modules: list[str] | str) -> list[str] | str:
    """Return a part that stands alone as a list of one name. Return a list or a regular expression unchanged."""
    return [modules] if modules in PARTS else modules


def named_parts(modules: list[str] | str) -> list[str]:
    """Return the parts among the names of modules."""
    names = as_names(modules)
    return [] if isinstance(names, str) else [name for name in names if name in PARTS]
