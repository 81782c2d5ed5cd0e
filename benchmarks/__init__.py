"""Proofs, and races beside peers: `python -m benchmarks`."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[1]


def with_root(**changes: str) -> dict[str, str]:
    """This process's environment, in which programs find this clone before anything else."""
    paths = [str(ROOT), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **changes}
