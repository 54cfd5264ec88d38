"""Reward functions over groups: builds their arguments, calls them, and collects their scores in a table.

suite      RewardSuite: all functions of a run ─► RewardTable
function   one function: loading, its form, calls per window, per group or in a worker process
arguments  groups ─► the arguments of a call

The functions themselves, and the rules for their results, are in the package `rewards` next to `rl_vlm`.
"""

import importlib.util
from pathlib import Path

from rl_vlm.errors import RewardError


def refuse_shadow() -> None:
    """Raise RewardError if `import rewards` would find something other than the package next to `rl_vlm`."""
    ours = Path(__file__).resolve().parents[2] / "rewards" / "__init__.py"
    spec = importlib.util.find_spec("rewards")
    found = spec and (spec.origin or list(spec.submodule_search_locations or []))
    if not isinstance(found, str) or Path(found).resolve() != ours:
        raise RewardError(
            f"`import rewards` finds {found} instead of rl-vlm's own {ours}; rename yours, or start from another "
            "directory (reward functions are named `file.py:function`, so their file may have any name)"
        )


refuse_shadow()
