"""Checks before a run: `--dry-run`, `rl-vlm doctor`, and `rl-vlm rewards check` in `rewards/`.

    table ─ Subject.run_checks: the checks of a command ─► findings, notes ─ collect ─► Diagnosis ─ text ─► text, JSON

settings     settings, reward functions, packages        first_rows   columns, the first row of each entry, length
evaluation   options of an evaluation                    files        output directory, files of the model
machine      packages, ports, shared memory, disk        rows         every row and image header
duplicates   rows that repeat others, or held-out ones   golds        gold answers, scored by their rewards
boxes        gold boxes in their images                  model        prompts, token limits, the memory of the model
pixels       whether images change log-probs             smoke        two steps of the run, and constant rewards
ranks        the processes of a launch (`--ranks`)

`diagnosis` defines a check, and turns the errors that checks raise into findings.
"""

import rl_vlm.reward  # noqa: F401  checks that the imports of `rewards` find ours
