"""Reward functions over groups: builds their arguments, calls them, and collects their scores in a table.

suite         RewardSuite: all functions of a run ─► RewardTable
function      one function: loading, its form, calls per window, per group or in a worker process
arguments     groups ─► the arguments of a call
conversation  completions of several turns ─► messages and plain dicts

The functions themselves, and the rules for their results, are in the package `rewards` next to `rl_vlm`.
"""

from rl_vlm.errors import refuse_shadow

refuse_shadow()
