"""Transfer of tensors between islands.

Read `boxes.py` first, which names parts of tensors, and `exchange.py`, which has the sockets. `summing.py` and
`packing.py` sum gradients; `changes.py` and `encoding.py` send changes of weights.
"""
