"""The global random generators, of which a checkpoint has the states."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_random_generators(seed: int) -> None:
    """Seed the global generators, which initialise adapters and which reward functions may use."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_states() -> dict[str, Any]:
    """Return global generator states, in types that `torch.load(weights_only=True)` reads; sampling has its own."""
    name, keys, *position = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, np.asarray(keys).tolist(), *position),
        "torch": torch.get_rng_state(),
    }


def restore_random_states(states: dict[str, Any]) -> None:
    """Restore what `random_states` returned."""
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"])
