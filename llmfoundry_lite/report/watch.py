"""Live view of a run: batch, loss, rate, remaining time, last checkpoint.

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

import yaml
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from llmfoundry_lite.bounded import MAX_LOG_BYTES, MAX_YAML_BYTES, read_at_most, read_lines_at_most
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.config.yaml_text import read_record
from llmfoundry_lite.errors import CheckpointError, DataError, printable
from llmfoundry_lite.launch.log_lines import (
    Record,
    console_line,
    duration_text,
    number_of,
    read_lines,
    validation_losses,
)
from llmfoundry_lite.launch.status import STATUS, read_status
from llmfoundry_lite.report.reading import CONFIG, LOSS, METRICS, MFU, RATE, runs_within

REMAINING = "time/remaining_seconds"
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
        if not any((folder / name).is_file() for name in ("status.json", METRICS)):
            expected = runs_within(folder) or "expected a run directory such as runs/mpt-quickstart"
            raise DataError(f"{folder}: no status.json here; {expected}")

    def look(self) -> None:
        """Read the status, and what the log has since the last look."""
        self.status = {"status": "unknown", "batch": 0, "reason": None, **(read_status(self.folder) or {})}
        if self.max_duration is None:
            self.max_duration = self._read_duration()
        try:
            for _, record in read_lines(self._new_lines()):
                self.last = {key: value for key, value in record.items() if number_of(value) is not None}
                if losses := [*validation_losses(self.last).values()]:
                    self.validation = (record["batch"], losses[0])
        except OSError:
            return

    def _new_lines(self) -> Iterator[bytes]:
        """Yield lines of the log since the last look. One that is being written is for the next."""
        for line in read_lines_at_most(self.folder / METRICS, MAX_LOG_BYTES, METRICS, begin=self._offset):
            if line.endswith(b"\n"):
                self._offset += len(line)
                yield line

    def _read_duration(self) -> Duration | None:
        try:
            config = read_record(read_at_most(self.folder / CONFIG, MAX_YAML_BYTES, CONFIG))
            self.config = config if isinstance(config, dict) else {}
            return Duration.parse(self.config["max_duration"])
        except (OSError, yaml.YAMLError, KeyError, TypeError, ValueError):  # not written yet, or not by us
            return None

    def __fspath__(self) -> str:
        return str(self.folder)

    def __repr__(self) -> str:
        facts = [f"{label} {text}" for label, text in facts_of(self) if label in ("loss", "validation")]
        saved = self.last_checkpoint()
        return f"<{', '.join([f'{self.folder}: {ending_of(self)}', *facts, *([f'saved {saved}'] if saved else [])])}>"

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
        where = str(self.config.get("save_folder") or self.folder / "checkpoints")
        if "${" in where:  # nothing recorded is resolved
            where = str(self.folder / "checkpoints")
        if "://" in where:
            return None
        with contextlib.suppress(CheckpointError):  # a disk that does not answer now
            return next((f"ba{one.batch}" for one in CheckpointStore(where).candidates() if one.head is not None), None)
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
    """Show the run at `folder` until it has ended; returns its status. Raises DataError if there is no run."""
    console = console or Console(width=None if sys.stdout.isatty() else 160, highlight=False)
    run = Watched(folder)
    run.look()
    if not console.is_terminal:
        return _print_lines(run, console, pause)
    with Live(picture(run), console=console, auto_refresh=False) as live:
        while not run.has_ended:
            pause(LOOK_SECONDS)
            run.look()
            live.update(picture(run), refresh=True)
    return run.status


def _print_lines(run: Watched, console: Console, pause: Callable[[float], None]) -> dict[str, Any]:
    """Print a line whenever the run has moved on, for files and pipes."""
    shown = None
    while True:
        if run.last and run.last["batch"] != shown:
            shown, saved = run.last["batch"], run.last_checkpoint()
            line = console_line(run.last, run.max_duration) if run.max_duration else f"batch {shown}"
            console.print(Text(printable(f"{line} · saved {saved}" if saved else line)))
        if run.has_ended:
            break
        pause(PIPE_SECONDS)
        run.look()
    console.print(Text(printable(ending_of(run))))
    return run.status


def ending_of(run: Watched) -> str:
    """Return `done at batch 300` or `failed at batch 120: out of memory …`."""
    reason = f": {run.status['reason']}" if run.status.get("reason") else ""
    return f"{run.status['status']} at batch {run.batch}{reason}"


def picture(run: Watched) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column()
    name = run.config.get("run_name") or run.folder.name
    table.add_row("run", Text(printable(f"{name} in {run.folder}")))
    table.add_row("status", Text(printable(ending_of(run) if run.has_ended else _running(run))))
    if (progress := run.progress) is not None:
        end = f"of {run.max_duration}" if run.max_duration else ""
        table.add_row("batch", Text(f"{run.batch:,} {end} · {progress:.0%}"))
        table.add_row("", ProgressBar(total=1.0, completed=progress, width=40))
    else:
        table.add_row("batch", f"{run.batch:,}")
    for label, text in facts_of(run):
        table.add_row(label, Text(printable(text)))
    return table


def _running(run: Watched) -> str:
    asked = run.status.get("reason")
    return f"running, and asked to leave: {asked}" if asked else "running" if run.last else "running, no batch done yet"


def facts_of(run: Watched) -> list[tuple[str, str]]:
    facts, last = [], run.last
    if "islands/local_steps" in last:
        facts.append(("islands", f"local steps, every {last['islands/local_steps']}: losses are of this island's rows"))
    if run.loss is not None:
        facts.append(("loss", f"{run.loss:.4f}"))
    if run.validation is not None:
        facts.append(("validation", f"{run.validation[1]:.4f} at batch {run.validation[0]:,}"))
    if last.get(RATE) is not None:
        mfu = f" · MFU {last[MFU]:.1%}" if last.get(MFU) is not None else ""
        facts.append(("rate", f"{last[RATE]:,.0f} tokens/s{mfu}"))
    if not run.has_ended and last.get(REMAINING) is not None:
        facts.append(("remaining", duration_text(last[REMAINING])))
    if (saved := run.last_checkpoint()) is not None:
        ago = max(0, run.batch - int(saved[2:]))
        facts.append(
            ("last save", f"{saved}, {ago:,} batch{'es' if ago != 1 else ''} ago" if ago else f"{saved}, this batch")
        )
    elif any(part in str(run.config.get("save_folder") or "") for part in ("://", "${")):
        facts.append(("saves", f"in {run.config['save_folder']}"))
    return facts
