"""A rank's side of a run with other islands: between the core's training loop, the coordinator and the other islands.

Read `islands.py` first: it sums the gradient of every batch. `held_parts.py` finds which parts of tensors this rank
holds. For local steps, read `local_steps.py`, `outer_weights.py` and `local_islands.py`.
"""
