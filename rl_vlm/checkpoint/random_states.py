"""The states of the global random generators, for checkpoints."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_random_generators(seed: int) -> None:
    """Seed the global generators. They initialise adapters, and reward functions may use them."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_states() -> dict[str, Any]:
    """Return the states of the global generators in types that `torch.load(weights_only=True)` reads.

    Sampling has its own generator.
    """
    name, keys, *position = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), *position),
        "torch": torch.get_rng_state(),
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Restore states from `random_states`."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
