"""Estimates of the memory that a training run needs on each device, from its configuration alone. No torch.

Read `portion.py` first: it says which part of a run one device computes. `parameters.py` has the shapes of parameters.
`model_memory.py` counts the bytes that the model takes during forward and backward, and `memory.py` adds the
optimizer's step and libraries, and gives advice.
"""
