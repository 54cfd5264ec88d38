"""Check reward functions before a run, on gold answers, on cheats and on completions of the model.

rows ─ cheats: completions by name ─ trial: scores and times ─ findings: problems ─ report: text or JSON
"""

import rl_vlm.reward  # noqa: F401  checks that the imports of `rewards` find ours
