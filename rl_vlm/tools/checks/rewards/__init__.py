"""What reward functions give to gold answers, to cheats and to a model's completions, before a run.

rows ─ cheats: completions by name ─ measure: scores and times ─ findings: what is wrong ─ report: text or JSON
"""
