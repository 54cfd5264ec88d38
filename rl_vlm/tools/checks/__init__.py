"""Checks before a run: `--dry-run`, `rl-vlm doctor`, and `rl-vlm rewards check` in `rewards/`.

settings     checks that take seconds, with dry_run     machine      packages, ports, shared memory, disk
rows         every row and image header                 duplicates   rows that repeat others, or held-out ones
golds        gold answers, scored by their rewards      model        prompts, token limits, the memory of the model
boxes        gold boxes in their images                 pixels       whether images change log-probs
smoke        two steps of the run itself                constant     rewards that were equal in these steps

`examine` calls them in this order, `diagnosis` collects their findings, and `report` prints these. `ranks` compares the
processes of a launch (`--ranks`).
"""
