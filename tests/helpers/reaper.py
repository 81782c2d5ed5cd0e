"""End every process that has a variable with a value in its environment, and remove a folder, when nobody can
write to our input any more.

    python -m tests.helpers.reaper SLURM_CONF=/tmp/x/slurm.conf /tmp/slurm-x

For daemons that a test starts, and what they start: pytest may be killed, too.
"""

import os
import shutil
import sys
from contextlib import suppress
from pathlib import Path

import psutil


def main(variable: str, folder: str) -> None:
    sys.stdin.read()
    for end in (psutil.Process.terminate, psutil.Process.kill):
        found = [process for process in psutil.process_iter() if _has(process.pid, variable.encode())]
        for process in found:
            with suppress(psutil.NoSuchProcess):
                end(process)
        psutil.wait_procs(found, timeout=5)
    shutil.rmtree(folder, ignore_errors=True)


def _has(pid: int, variable: bytes) -> bool:
    """Return whether it is in the environment, of which slurmstepd overwrites the beginning by its title."""
    try:
        return pid != os.getpid() and variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


if __name__ == "__main__":
    main(*sys.argv[1:])
