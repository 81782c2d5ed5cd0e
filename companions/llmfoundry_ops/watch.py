"""Live line of a run: batch, loss, rate, remaining time, last checkpoint. No torch.

llmfoundry-lite watch runs/mpt-1b
llmfoundry-lite watch s3://bucket/mpt-1b     what its checkpoints tell
"""

import contextlib
import os
import time
from collections.abc import Callable
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from llmfoundry_lite import tables
from llmfoundry_lite.checkpoint.run_log import console_line
from llmfoundry_lite.errors import EXIT_DONE, EXIT_FAILURE, EXIT_PREEMPTED, printable
from llmfoundry_ops.runs import PATIENCE_SECONDS, LiveRun, SavedRun, open_run

PIPE_SECONDS = 10.0
"""Time between two lines that go to a file or pipe."""
EXIT_CODES = {"done": EXIT_DONE, "stopped": EXIT_DONE, "preempted": EXIT_PREEMPTED}
"""How a run ended -> the exit code of `watch`; EXIT_FAILURE for any other end."""


def exit_code_of(status: dict[str, Any]) -> int:
    return EXIT_CODES.get(status["status"], EXIT_FAILURE)


def watch(
    folder: str | os.PathLike[str],
    *,
    patience_seconds: float = PATIENCE_SECONDS,
    console: Console | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Show the run at `folder` until it has ended; returns its status. Raises DataError if there is no run.

    A terminal has one line, written anew at each look; a file or pipe gets one whenever the run has moved on, and when
    it begins or ends that checkpoints cannot be read, or that nobody seems to train the run. A run that is known by its
    checkpoints alone counts as ended after `patience_seconds` without a launch.
    """
    console = console or tables.console()
    run, shown = open_run(folder), None
    if isinstance(run, SavedRun):
        run.patience_seconds = patience_seconds
    run.look()
    with Live(console=console, auto_refresh=False) if console.is_terminal else contextlib.nullcontext() as live:
        while True:
            line = Text(printable(line_of(run)))
            if live is not None:
                live.update(line, refresh=True)
            elif run.last:
                news = (run.last["batch"], run.trouble is None, run.idle is None)
                if news != shown:
                    shown = news
                    console.print(line)
            if run.has_ended:
                break
            pause(run.look_seconds if console.is_terminal else PIPE_SECONDS)
            run.look()
    console.print(Text(printable(f"{run.folder}: {run.ending}" if console.is_terminal else run.ending)))
    return run.status


def line_of(run: LiveRun) -> str:
    """Return `batch 2/4 · loss 4.5000 · 1,234 tokens/s · ETA 1:15 · saved ba2`."""
    if not run.last:
        return f"{run.status['status']}, no batch done yet"
    parts = [console_line(run.last, run.max_duration) if run.max_duration else f"batch {run.last['batch']}"]
    if "islands/local_steps" in run.last:
        parts.append(f"local steps, every {run.last['islands/local_steps']}: losses are of this island's rows")
    if (saved := run.last_checkpoint()) is not None:
        parts.append(f"saved {saved}")
    if run.failed_saves:
        parts.append(f"failed saves {run.failed_saves}: {run.save_error}")
    if run.trouble is not None:
        parts.append(run.trouble)
    if run.idle is not None and not run.has_ended:
        parts.append(run.idle)
    if not run.has_ended and (reason := run.status.get("reason")):
        parts.append(f"asked to leave: {reason}")
    return " · ".join(parts)
