"""A program of several ranks: `python -m tests.launch.leaver 1=3 0=wait:FILE`.

Rank 1 leaves with 3. Rank 0 makes the file, and leaves with 75 when it gets SIGTERM. Others leave with 0.
"""

import os
import signal
import sys
from pathlib import Path

rank = os.environ.get("RANK", "0")
print(f"rank {rank} of {os.environ.get('WORLD_SIZE', '1')} speaks", flush=True)
action = dict(word.split("=", 1) for word in sys.argv[1:]).get(rank, "0")
if action.startswith("wait:"):
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(75))
    Path(action.removeprefix("wait:")).touch()
    while True:
        signal.pause()
sys.exit(int(action))
