"""Decisions on which island trains which rows, and which batches count. Nothing here imports torch.

Read `coordinator.py` first, which is the protocol, and `member.py`, which is a rank's side of it. `serve.py` is the
coordinator's process, `messages.py` has the format of messages, and `strangers.py` limits unknown connections.
`island.py` is an island as the coordinator knows it, and `choice.py` chooses those that train together. `division.py`
divides rows, and `owners.py` the work of summing.
"""
