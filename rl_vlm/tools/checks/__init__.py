"""`rl-vlm doctor`: what can be found before the first step of a run.

settings     the checks of a dry run                    machine      packages, ports, shared memory, disk
rows         every row and image header                 duplicates   rows that repeat others, or held-out ones
golds        gold answers under their own rewards       model        prompts, token limits, the memory of the model
boxes        gold boxes in their images                 pixels       whether images change log-probs
smoke        two steps of the run itself                constant     rewards that gave these one score

examine calls them in this order, findings is what they return, and report shows it.
"""
