"""Live line of a run: batch, loss, rate, remaining time, last checkpoint.

    llmfoundry-lite watch runs/mpt-1b

Reads status.json, config.yaml and the end of metrics.jsonl again and again, until the run has ended. No torch.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from llmfoundry_lite.bounded import MAX_LOG_BYTES, read_lines_at_most
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.errors import CheckpointError, DataError, printable
from llmfoundry_lite.launch.log_lines import (
    Record,
    console_line,
    number_of,
    read_lines,
    validation_losses,
)
from llmfoundry_lite.launch.status import STATUS, read_status
from llmfoundry_lite.report.reading import LOSS, METRICS, folder_of_checkpoints, read_config, what_to_give

UNITS = {"ba": "batch", "ep": "time/epoch", "sp": "time/sample", "tok": "time/token"}
PIPE_SECONDS = 10.0
"""Between lines that go to a file or pipe."""
LOOK_SECONDS = 1.0
"""Between two looks at a terminal."""


class Watched:
    """State of a run: each `look` reads what has been written since the last one.

    `status` is what `status.json` has, `last` the newest line of the log, `config` the run's YAML.
    """

    def __init__(self, folder: Path):
        """Raises DataError if there is no run."""
        self.folder = folder
        self.config: dict[str, Any] = {}
        self.status: dict[str, Any] = {}
        self.last: Record = {}
        """Numbers in the newest line of the log."""
        self.validation: tuple[int, float] | None = None
        """(batch, loss)"""
        self.max_duration: Duration | None = None
        self._offset = 0
        self._opened = open_folder(str(folder))
        if not any((folder / name).is_file() for name in (STATUS, METRICS)):
            raise DataError(f"{folder}: no {STATUS} here; {what_to_give(folder)}")

    def look(self) -> None:
        """Read the status, and what the log has since the last look."""
        self.status = {"status": "unknown", "batch": 0, "reason": None, **(read_status(self.folder) or {})}
        if self.max_duration is None:
            with contextlib.suppress(OSError, ValueError, LookupError, TypeError):  # not written yet, or not by us
                self.config = read_config(self._opened, []) or {}
                self.max_duration = Duration.parse(self.config["max_duration"])
        with contextlib.suppress(OSError):
            for _, record in read_lines(self._new_lines()):
                self.last = {key: value for key, value in record.items() if number_of(value) is not None}
                if losses := [*validation_losses(self.last).values()]:
                    self.validation = (record["batch"], losses[0])

    def _new_lines(self) -> Iterator[bytes]:
        """Yield lines of the log since the last look. One that is being written is for the next."""
        for line in read_lines_at_most(self.folder / METRICS, MAX_LOG_BYTES, METRICS, begin=self._offset):
            if line.endswith(b"\n"):
                self._offset += len(line)
                yield line

    def __fspath__(self) -> str:
        return str(self.folder)

    def __repr__(self) -> str:
        facts = [f"{self.folder}: {ending_of(self)}"]
        if self.loss is not None:
            facts.append(f"loss {self.loss:.4f}")
        if self.validation is not None:
            facts.append(f"validation {self.validation[1]:.4f} at batch {self.validation[0]:,}")
        if saved := self.last_checkpoint():
            facts.append(f"saved {saved}")
        return f"<{', '.join(facts)}>"

    @property
    def loss(self) -> float | None:
        """Training loss of the newest batch."""
        return self.last.get(LOSS)

    @property
    def has_ended(self) -> bool:
        return self.status["status"] != "running"

    @property
    def batch(self) -> int:
        return max(self.status["batch"], 0 if self.has_ended else self.last.get("batch", 0))

    @property
    def progress(self) -> float | None:
        """Return the share of the run that is done."""
        if self.status["status"] == "done":
            return 1.0
        if self.max_duration is None:
            return None
        key = UNITS[self.max_duration.unit]
        done = self.batch if key == "batch" else self.last.get(key, 0)
        return min(1.0, done / float(self.max_duration.value))

    def last_checkpoint(self) -> str | None:
        """Return `ba200`; None if there is none, or if they lie behind a URL."""
        where = folder_of_checkpoints(self._opened, self.config, opens=())
        with contextlib.suppress(CheckpointError):  # a disk that does not answer now
            candidates = CheckpointStore(where).candidates() if where is not None else []
            return next((f"ba{one.batch}" for one in candidates if one.head is not None), None)
        return None


def runs(folder: str | os.PathLike[str] = "runs") -> list[Watched]:
    """List the runs in a folder by name, with what `llmfoundry-lite watch` knows of each. No torch is needed.

    A run that is still written stands as it is now; `look()` reads what has come since. It stands for its folder
    wherever a path is asked for, as in `lf.load(run)`.

    >>> lf.runs("runs")
    [<runs/tiny: done at batch 6, loss ..., saved ba6>]
    >>> run = lf.runs("runs")[0]
    >>> run.batch, run.has_ended, run.progress, run.last_checkpoint(), run.config["global_train_batch_size"]
    (6, True, 1.0, 'ba6', 8)

    Raises DataError if there is no such folder.
    """
    if not os.path.isdir(folder):
        raise DataError(f"{os.fspath(folder)} is no folder on this disk; expected one whose folders are runs")
    found = []
    for place in sorted(Path(folder).iterdir()):
        if any(os.path.isfile(place / name) for name in (STATUS, METRICS)):  # False where it may not look
            found.append(Watched(place))
            found[-1].look()
    return found


def watch(
    folder: Path, *, console: Console | None = None, pause: Callable[[float], None] = time.sleep
) -> dict[str, Any]:
    """Show the run at `folder` until it has ended; returns its status. Raises DataError if there is no run.

    A terminal has one line, written anew at each look; a file or pipe gets one whenever the run has moved on.
    """
    console = console or Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    run, shown = Watched(folder), None
    run.look()
    with Live(console=console, auto_refresh=False) if console.is_terminal else contextlib.nullcontext() as live:
        while True:
            line = Text(printable(line_of(run)))
            if live is not None:
                live.update(line, refresh=True)
            elif run.last and run.last["batch"] != shown:
                shown = run.last["batch"]
                console.print(line)
            if run.has_ended:
                break
            pause(LOOK_SECONDS if console.is_terminal else PIPE_SECONDS)
            run.look()
    console.print(Text(printable(f"{run.folder}: {ending_of(run)}" if console.is_terminal else ending_of(run))))
    return run.status


def line_of(run: Watched) -> str:
    """Return `batch 2/4 · loss 4.5000 · 1,234 tokens/s · ETA 1:15 · saved ba2`."""
    if not run.last:
        return f"{run.status['status']}, no batch done yet"
    parts = [console_line(run.last, run.max_duration) if run.max_duration else f"batch {run.last['batch']}"]
    if "islands/local_steps" in run.last:
        parts.append(f"local steps, every {run.last['islands/local_steps']}: losses are of this island's rows")
    if (saved := run.last_checkpoint()) is not None:
        parts.append(f"saved {saved}")
    if not run.has_ended and (reason := run.status.get("reason")):
        parts.append(f"asked to leave: {reason}")
    return " · ".join(parts)


def ending_of(run: Watched) -> str:
    """Return `done at batch 300` or `failed at batch 120: out of memory …`."""
    reason = f": {run.status['reason']}" if run.status.get("reason") else ""
    return f"{run.status['status']} at batch {run.batch}{reason}"
