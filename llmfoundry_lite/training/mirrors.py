"""Mirrors of metrics.jsonl: console and progress bar; a companion has wandb and TensorBoard."""

import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from llmfoundry_lite import companions
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.launch.log_lines import Record, console_line, validation_losses

WANDB_ID = "wandb_id"


class Mirror:
    """One destination of the log. A launch calls `begin`, then the mirror itself with each record, then `close`."""

    def begin(self, log: Path, missed: list[Record]) -> None:
        """Prepare for the first record, given the log of earlier launches, and those of its records that came with the
        checkpoint from another machine, in order of batch."""

    def __call__(self, record: Record) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


def build_mirrors(config: TrainConfig, progress: Callable[[], float]) -> list[Mirror]:
    """Build the mirrors of a run. `progress` returns the fraction of the run that is done."""
    max_duration = Duration.parse(config.max_duration)
    mirrors: list[Mirror] = []
    if config.progress_bar and has_width(sys.stdout):
        mirrors.append(ProgressBar(max_duration, progress))
    elif config.log_to_console or config.progress_bar:
        mirrors.append(ConsoleLine(max_duration, Duration.parse(config.console_log_interval)))
    mirrors += [companions.find("builders", name)(config) for name in config.loggers.of_companions]
    return mirrors


@dataclass
class ConsoleLine(Mirror):
    """One line each `interval`: where the run is, its loss, its speed, the time it still needs."""

    max_duration: Duration
    interval: Duration
    last_epoch: int = -1

    def __call__(self, record: Record) -> None:
        due = record["batch"] % int(self.interval.value) == 0
        if self.interval.unit == "ep":
            due, self.last_epoch = record["time/epoch"] != self.last_epoch, record["time/epoch"]
        if due or validation_losses(record):
            print(console_line(record, self.max_duration), flush=True)


def has_width(stream: TextIO | None) -> bool:
    """Return whether a stream is a terminal of a known width."""
    try:
        return stream is not None and os.get_terminal_size(stream.fileno()).columns > 0
    except (AttributeError, OSError, ValueError):  # another kind of stream, no terminal, or a closed one
        return False


class ProgressBar(Mirror):
    """The console line as a bar on standard output that stays in place, below lines that are printed meanwhile."""

    def __init__(self, max_duration: Duration, progress: Callable[[], float]):
        from tqdm import tqdm

        self.max_duration = max_duration
        self.progress = progress
        # tqdm puts a comma before what it calls the postfix, and a colon behind a description in l_bar.
        form = "{percentage:3.0f}%|{bar}| {desc}"
        look = {"bar_format": form, "desc": "first batch", "dynamic_ncols": True}
        self.output = sys.stdout
        self.bar = tqdm(total=1.0, initial=progress(), file=self.output, **look)

    def begin(self, log: Path, missed: list[Record]) -> None:
        from tqdm.contrib import DummyTqdmFile

        sys.stdout = DummyTqdmFile(self.output)  # clears the bar before a line, and draws it again

    def __call__(self, record: Record) -> None:
        self.bar.n = self.progress()
        self.bar.set_description_str(console_line(record, self.max_duration))

    def close(self) -> None:
        sys.stdout = self.output
        self.bar.close()


def wandb_run_id(run_folder: Path) -> str | None:
    file = run_folder / WANDB_ID
    return file.read_text().strip() if file.exists() else None


def in_order(records: Iterable[Record]) -> list[Record]:
    """Keep the last record of each batch, in order of batch."""
    latest = {record["batch"]: record for record in records}
    return [latest[batch] for batch in sorted(latest)]
