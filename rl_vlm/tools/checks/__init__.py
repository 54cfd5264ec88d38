"""Checks before a run: `--dry-run`, `rl-vlm doctor`, and in `rewards/` those of `rl-vlm rewards check`.

settings     dry_run, the checks in seconds             machine      packages, ports, shared memory, disk
rows         every row and image header                 duplicates   rows that repeat others, or held-out ones
golds        gold answers under their own rewards       model        prompts, token limits, the memory of the model
boxes        gold boxes in their images                 pixels       whether images change log-probs
smoke        two steps of the run itself                constant     rewards that gave these one score

examine calls them in this order, diagnosis holds what they find, and report shows it.
"""
