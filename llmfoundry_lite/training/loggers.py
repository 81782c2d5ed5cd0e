"""The record of a run: metrics.jsonl, one object per batch; console, wandb and TensorBoard are its mirrors.

Composer's logger calls us many times a batch, with its own idea of the step. Here everything about a batch is
gathered and written once, after that batch's evaluation, under the number of the batch it belongs to.
"""

import json
import os
import secrets
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any, TextIO

import torch
from composer.core import State
from composer.loggers import Logger, LoggerDestination

from llmfoundry_lite.config.schema import Duration, TensorboardConfig, WandbConfig
from llmfoundry_lite.errors import UserError
from llmfoundry_lite.launch.log_lines import Record, console_line, missing_lines, read_lines, validation_losses
from llmfoundry_lite.training.wandb_files import offline_steps

METRICS = "metrics.jsonl"
SAVED = "checkpoint/bytes"
"""Stands in the record of the batch at which a save was known to be published."""


class Mirror:
    """Shows each record elsewhere. A launch `begin`s, is called with one record after the other, and is `close`d."""

    def begin(self, log: Path, missed: list[Record]) -> None:
        """Before the first record: what earlier launches have written, and which of it ran elsewhere and came with
        the checkpoint, in order of batch."""

    def __call__(self, record: Record) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


class RunLog(LoggerDestination):
    """Appends to metrics.jsonl. Lives on rank 0 only."""

    def __init__(self, path: Path):
        self.path = path
        self.mirrors: list[Mirror] = []
        self.launch = 0
        self.record: Record = {}
        self.last: Record = {}
        self.file: TextIO | None = None

    def open(self, mirrors: list[Mirror], history: bytes | None = None) -> None:
        """Begin to write, after the lines of `history` that are not here. What was logged before waits in the first
        record."""
        self.mirrors = mirrors
        missed = take_over(self.path, history) if history else []
        self.launch = 1 + last_launch(self.path)
        for mirror in mirrors:
            mirror.begin(self.path, in_order(missed))
        self.file = self.path.open("a")

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        for key, value in metrics.items():
            if key.startswith(("time/", "trainer/")) and not key.endswith("_seconds"):
                continue  # Composer's own clocks, taken before the batch is counted
            name = key.replace("metrics/eval/", "eval/")
            self.record[name] = value.item() if isinstance(value, torch.Tensor) else value

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        self.write(state)

    def write(self, state: State) -> None:
        """Write what has been gathered as the record of the batch that was trained last (0: before the first)."""
        stamp = state.timestamp
        clocks = {"time/epoch": int(stamp.epoch), "time/sample": int(stamp.sample), "time/token": int(stamp.token)}
        record = {"batch": int(stamp.batch), "launch": self.launch, **self.record, **clocks}
        self.last, self.record = record, {}
        self._append(record)
        for mirror in self.mirrors:
            mirror(record)

    def record_of(self, batch: int) -> Record:
        """What stands in the log of that batch; nothing if it is not there."""
        records = [record for _, record in read_lines(self.path.read_bytes()) if record["batch"] == batch]
        return records[-1] if records else {"batch": batch, "launch": self.launch}

    def add_to(self, batch: int) -> None:
        """Write what has been gathered into the record of a batch that an earlier launch has trained."""
        record, self.record = {**self.record_of(batch), **self.record}, {}
        self._append(record)
        for mirror in self.mirrors:
            mirror(record)

    def fit_end(self, state: State, logger: Logger) -> None:
        """What came after the last batch, such as how long its save took, belongs to it: it is written once more."""
        if self.record:
            self._append({**self.last, **self.record})
            self.record = {}

    def post_close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None
        for mirror in self.mirrors:
            mirror.close()
        self.mirrors = []

    def _append(self, record: Record) -> None:
        assert self.file is not None
        plain = {
            key: None if isinstance(value, float) and not isfinite(value) else value for key, value in record.items()
        }
        with clear_disk_errors(self.path):
            self.file.write(json.dumps(plain, allow_nan=False) + "\n")
            self.file.flush()


@contextmanager
def clear_disk_errors(path: Path) -> Iterator[None]:
    """A disk that is full, read-only or not there is the user's to mend."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}; make room, or set run_folder") from error


def last_launch(path: Path) -> int:
    """The highest number of a launch that wrote here; 0 if there is none. A torn last line is cut off."""
    if not path.exists():
        return 0
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        content = content[: content.rfind(b"\n") + 1]
        os.truncate(path, len(content))
    return max((record.get("launch", 0) for _, record in read_lines(content)), default=0)


def in_order(records: Iterable[Record]) -> list[Record]:
    """Of each batch the last, by batch."""
    latest = {record["batch"]: record for record in records}
    return [latest[batch] for batch in sorted(latest)]


def log_until(path: Path, batch: int) -> bytes:
    """The lines of the batches up to `batch`, those of earlier launches too: what a save of that batch takes along."""
    content = path.read_bytes() if path.exists() else b""
    return b"".join(line for line, record in read_lines(content) if record["batch"] <= batch)


def take_over(path: Path, history: bytes) -> list[Record]:
    """Append the log that came with a checkpoint, from its first line on that is not here: other machines' batches.

    Batches that were trained here instead thereby become a dead branch, as if an earlier launch had lost them.
    """
    last_launch(path)  # cuts off a torn line
    here = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    missing = missing_lines(here, [line for line, _ in read_lines(history)])
    with path.open("ab") as file:
        file.writelines(missing)
    return [record for _, record in read_lines(missing)]


# ------------------------------------------------------------------------------------------------- mirrors


class ConsoleLine(Mirror):
    """One line each `interval`: where the run is, its loss, its speed, the time it still needs."""

    def __init__(self, max_duration: Duration, interval: Duration, stream: TextIO | None = None):
        self.max_duration = max_duration
        self.interval = interval
        self.stream = stream
        """None: standard output, as it is when a line is due."""
        self.last_epoch = -1

    def __call__(self, record: Record) -> None:
        due = record["batch"] % int(self.interval.value) == 0
        if self.interval.unit == "ep":
            due, self.last_epoch = record["time/epoch"] != self.last_epoch, record["time/epoch"]
        if due or validation_losses(record):
            print(console_line(record, self.max_duration), file=self.stream, flush=True)


class ProgressBar(Mirror):
    """The console line as a bar that stays in place."""

    def __init__(self, max_duration: Duration, progress: Callable[[], float]):
        from tqdm import tqdm

        self.max_duration = max_duration
        self.progress = progress
        # tqdm puts a comma before what it calls the postfix, and a colon behind a description in l_bar.
        form = "{percentage:3.0f}%|{bar}| {desc}"
        self.bar = tqdm(total=1.0, initial=progress(), bar_format=form, desc="first batch", dynamic_ncols=True)

    def __call__(self, record: Record) -> None:
        self.bar.n = self.progress()
        self.bar.set_description_str(console_line(record, self.max_duration))

    def close(self) -> None:
        self.bar.close()


WANDB_ID = "wandb_id"


def wandb_run_id(run_folder: Path) -> str | None:
    file = run_folder / WANDB_ID
    return file.read_text().strip() if file.exists() else None


class WandbMirror(Mirror):
    """The same wandb run across launches: its id is kept in the run directory, and in checkpoints for other machines.
    WANDB_MODE=offline works.

    wandb takes no step twice: of a batch that is trained again after a restore, it keeps what was logged first. And it
    writes and sends every 15 seconds only: what a killed launch had logged after that is logged again from our log.
    """

    def __init__(self, config: WandbConfig, run_name: str, run_folder: Path, settings: dict[str, Any]):
        import wandb

        run_id = wandb_run_id(run_folder) or secrets.token_hex(4)
        (run_folder / WANDB_ID).write_text(run_id + "\n")
        self.run = wandb.init(
            project=config.project,
            entity=config.entity,
            group=config.group,
            name=config.name or run_name,
            tags=config.tags or None,
            dir=str(run_folder),
            config=settings,
            **{"id": run_id, "resume": "allow", **config.init_kwargs},
        )
        self.last_step = -1
        self.lost: list[Record] = []

    def begin(self, log: Path, missed: list[Record]) -> None:
        """A server says itself which step comes next; offline, the other machine's part has what was trained there."""
        files = Path(self.run.dir).parents[1]  # <files>/offline-run-<time>-<id>/files
        self.last_step = max([self.run.step - 1, *offline_steps(files, self.run.id)])
        elsewhere = {record["batch"] for record in missed} if self.run.offline else set()
        records = (record for _, record in read_lines(log.read_bytes() if log.exists() else b""))
        self.lost = in_order(r for r in records if r["batch"] > self.last_step and r["batch"] not in elsewhere)

    def __call__(self, record: Record) -> None:
        lost, self.lost = self.lost, []
        for known in (*(known for known in lost if known["batch"] < record["batch"]), record):
            if known["batch"] > self.last_step:
                numbers = {key: value for key, value in known.items() if is_number(value)}
                self.run.log(numbers, step=known["batch"], commit=True)

    def close(self) -> None:
        self.run.finish()


class TensorboardMirror(Mirror):
    """Every step once: a launch declares void what an earlier one wrote of the batches it trains again."""

    def __init__(self, config: TensorboardConfig, run_folder: Path):
        self.folder = config.log_dir or str(run_folder / "tensorboard")
        self.writer: Any = None

    def begin(self, log: Path, missed: list[Record]) -> None:
        for record in missed:
            self(record)
        self.close()  # the first record of this launch, too, may go back behind these

    def __call__(self, record: Record) -> None:
        if self.writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(self.folder, purge_step=record["batch"])
        for key, value in record.items():
            if is_number(value) and key != "batch":
                self.writer.add_scalar(key, value, global_step=record["batch"])
        # Whatever a checkpoint has, this has; else a killed launch would leave a hole before the batch it goes back to.
        self.writer.flush()

    def close(self) -> None:
        if self.writer is not None:
            self.writer.close()
            self.writer = None


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
