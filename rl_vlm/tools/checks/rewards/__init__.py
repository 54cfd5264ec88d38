"""Check reward functions before a run, on gold answers, on cheats and on completions of the model.

rows ─ cheats: completions by name ─ trial: scores and times ─ findings: problems ─ text: text or JSON
"""
