"""Live line of a run: batch, loss, rate, remaining time, last checkpoint. No torch.

llmfoundry-lite watch runs/mpt-1b
llmfoundry-lite watch s3://bucket/mpt-1b     as far as its checkpoints and the records beside them tell
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
from llmfoundry_ops.rank_times import read_all_slow_ranks, read_slow_ranks
from llmfoundry_ops.runs import PATIENCE_SECONDS, RunState, SavedRun, open_run

PIPE_SECONDS = 10.0
"""Time between two lines that go to a file or pipe."""
EXIT_CODES = {"done": EXIT_DONE, "stopped": EXIT_DONE, "preempted": EXIT_PREEMPTED}
"""End of a run -> the exit code of `watch`; EXIT_FAILURE for any other end."""


def exit_code_of(status: dict[str, Any]) -> int:
    """Return the exit code of `watch` for the last status of a run."""
    return EXIT_CODES.get(status["status"], EXIT_FAILURE)


def watch(
    folder: str | os.PathLike[str],
    *,
    patience_seconds: float = PATIENCE_SECONDS,
    console: Console | None = None,
    pause: Callable[[float], None] = time.sleep,
) -> dict[str, Any]:
    """Show the state of a run until it has ended, and return its status.

    A terminal has one line, which each look rewrites. A file or pipe gets a new line whenever the run has trained a
    batch, whenever a launch ends after which another may follow, and whenever checkpoints become unreadable or readable
    again, or the run seems to be abandoned or trained again.

    folder: a run folder, or a folder or URL of checkpoints.
    patience_seconds: time without a sign of a launch after which a run that is known by its checkpoints counts as
        ended. Until then, another machine may continue it.
    pause: waits between two looks.

    Raises DataError if there is no run.
    """
    console = console or tables.console()
    run = open_run(folder)
    if isinstance(run, SavedRun):
        run.patience_seconds = patience_seconds
    run.look()

    pause_seconds = run.look_seconds if console.is_terminal else PIPE_SECONDS
    display = Live(console=console, auto_refresh=False) if console.is_terminal else contextlib.nullcontext()
    shown: tuple[Any, ...] | None = None
    shown_status = ""
    with display as live:
        while True:
            line = Text(printable(line_of(run)))
            if live is not None:
                live.update(line, refresh=True)
            elif run.last_record:
                news = (run.last_record["batch"], run.read_error is None, run.idle_reason is None)
                has_left = run.may_go_on and run.status["status"] != shown_status
                if news != shown or has_left:
                    shown = news
                    shown_status = run.status["status"]
                    console.print(line)
            if run.has_ended and not run.may_go_on:
                break
            pause(pause_seconds)
            run.look()

    ending = run.describe_status()
    if console.is_terminal:
        ending = f"{run.folder}: {ending}"
    console.print(Text(printable(ending)))
    return run.status


def line_of(run: RunState) -> str:
    """Describe a run in a line, such as `batch 2/4 · loss 4.5000 · 1,234 tokens/s · ETA 1:15 · saved ba2`."""
    if not run.last_record:
        return f"{run.status['status']}, no batch done yet"

    if run.max_duration is None:
        parts = [f"batch {run.last_record['batch']}"]
    else:
        parts = [console_line(run.last_record, run.max_duration)]
    if "islands/local_steps" in run.last_record:
        parts.append(f"local steps, every {run.last_record['islands/local_steps']}: losses are of this island's rows")
    checkpoint = run.last_checkpoint()
    if checkpoint is not None:
        parts.append(f"saved {checkpoint}{run.second_place}")
    if run.failed_saves:
        parts.append(f"failed saves {run.failed_saves}: {run.save_error}")
    slow_ranks = [] if run.has_ended else read_slow_ranks(run.status)
    if slow_ranks:
        num_more = len(read_all_slow_ranks(run.status)) - 1
        others = f" and {num_more} more" if num_more > 0 else ""
        parts.append(f"slow: {max(slow_ranks, key=lambda time: time.ratio)}{others}")
    if run.read_error is not None:
        parts.append(run.read_error)

    # What the launch does, or how it ended, if another one may follow.
    if run.may_go_on:
        parts.append(run.describe_status())
    is_watched_on = run.may_go_on or not run.has_ended
    if is_watched_on and run.idle_reason is not None:
        parts.append(run.idle_reason)
    if not run.has_ended and run.status.get("reason"):
        parts.append(f"asked to leave: {run.status['reason']}")
    return " · ".join(parts)
