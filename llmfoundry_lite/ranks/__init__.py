"""Processes of a launch: which rank each one is, how ranks exchange data, and how the launch ends for all of them.

A launch is one start of a command on one or more nodes. Its processes are the ranks. Read the files in the order in
which a rank goes through them:

1. `signals.py`, `output.py` and `lean_imports.py` are used before anything else: they handle signals that ask to leave,
   prepare the standard streams, and import Composer without parts that are not needed. `preload.py` does these imports
   for processes that are forked.
2. `rank.py` reads from the environment which rank this is. `start.py` connects the ranks to a process group.
3. `exchange.py` has the collectives of the core over JSON and bytes. `codec.py` encodes typed values as JSON.
4. `ending.py` is the end: which rank's error is printed, and with which code each process exits. Ranks find each
   other's failures through `siblings.py` on one node, and through the process group's store. `identity.py` tells
   whether a recorded process still runs.
5. `status.py` records how a launch ended, in status.json of the run directory.

Only `start.py` and `exchange.py` import torch.
"""
