"""Checks of one machine, or of all nodes of a launch, before a run uses them.

Read `finding.py` first: a check is a function that takes `CheckOptions` and yields a `Finding` for each row of the
table. `examine.py` runs each check in a process of its own, and prints the table. The checks are in `machine.py`
(versions, devices, limits), `folder.py` (clocks, disk, bucket), `speed.py` (products, memory, rates) and
`collectives.py`. `nodes.py` examines all nodes of a launch together, with parts of these.
"""
