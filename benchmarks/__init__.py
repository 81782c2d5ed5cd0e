"""Proofs, and races beside peers: `python -m benchmarks`."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

LOOK_SECONDS = 0.02
ROOT = Path(__file__).parents[1]


def with_root(**changes: str) -> dict[str, str]:
    """This process's environment, in which programs find this clone before anything else."""
    paths = [str(ROOT), str(ROOT / "companions"), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), **changes}


def wait_for(
    is_there: Callable[[], Any],
    seconds: float,
    lost: Callable[[], Exception],
    is_over: Callable[[], Any] = lambda: False,
) -> Any:
    """Return what comes. Raises what `lost` makes after so many seconds, and once `is_over`: then nothing comes."""
    deadline = time.monotonic() + seconds
    while not (found := is_there()):
        if time.monotonic() > deadline or is_over():
            raise lost()
        time.sleep(LOOK_SECONDS)
    return found


def last_lines(output: Path | str, count: int = 20, between: str = "\n") -> str:
    """Return the last lines of a file, or of a text."""
    text = output.read_text(errors="replace") if isinstance(output, Path) else output
    return between.join(text.strip().splitlines()[-count:])
