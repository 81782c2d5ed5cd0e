"""`runs/<run_name>`: config.yaml, status.json, and metrics.jsonl with one object per batch. Only rank 0 writes.

Composer's logger is called many times a batch, with Composer's own step numbers. `RunFolder` collects the metrics of a
batch and writes them once, after that batch's evaluation, under that batch's number.
"""

import contextlib
import errno
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from composer import Trainer
from composer.core import State
from composer.loggers import Logger, LoggerDestination

from llmfoundry_lite.checkpoint.run_log import METRICS, Record, missing_lines, read_lines
from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.config.yaml_text import dump_record
from llmfoundry_lite.errors import UserError, mask_urls, printable
from llmfoundry_lite.files import open_no_link, write_atomically
from llmfoundry_lite.ranks.status import LAUNCHES, STATUS, TRY_AGAIN, write_ended_early, write_status
from llmfoundry_lite.training.log_file import LogFile
from llmfoundry_lite.training.mirrors import WANDB_ID, Mirror, build_mirrors, in_order
from llmfoundry_lite.training.schedule import progress_of

CONFIG = "config.yaml"
STATUS_SECONDS = 5.0
"""Minimum time between two updates of status.json."""


class RunFolder(LoggerDestination):
    """The files of a run. A launch that fails before the run is restored writes only the reason into status.json."""

    def __init__(self, config: TrainConfig):
        self.config = config
        self.folder = Path(config.run_folder)
        self.log = self.folder / METRICS
        self.is_main = dist.get_rank() == 0
        self.trainer: Trainer | None = None
        """None until the run has been restored."""
        self.asked_by: str | None = None
        """The reason why the launch is asked to leave."""
        self.saves: dict[str, Any] = {}
        """What status.json says of saves, once the run has been restored."""
        self.has_saved = False
        """This launch has published a save, so that another one would not begin where this one did."""
        self.is_running = False
        self.is_done = False
        self.launch = 0
        self.record: Record = {}
        """Metrics collected for the next record."""
        self.last: Record = {}
        self.file: LogFile | None = None
        self.written_once: dict[str, bytes] = {}
        """Name -> content, of files that a launch writes at its beginning."""
        self.mirrors: list[Mirror] = []
        self._writing = threading.Lock()
        self._noted_at = 0.0
        if self.is_main:
            with clear_disk_errors(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def batch(self) -> int:
        return int(self.trainer.state.timestamp.batch) if self.trainer is not None else 0

    def start(self, trainer: Trainer, wandb_run_id: str | None, history: bytes | None) -> None:
        """Begin to write. `history` is the checkpoint's log: its lines that the log here lacks are appended first.
        Metrics logged before this call go into the first record."""
        if self.is_main:
            with clear_disk_errors(self.folder):
                if wandb_run_id is not None:
                    write_atomically(self.folder / WANDB_ID, wandb_run_id + "\n")
                self.written_once[CONFIG] = dump_record(as_dict(self.config)).encode()
                write_atomically(self.folder / CONFIG, self.written_once[CONFIG])
                missed = take_over(self.log, history) if history else []
                self.launch = 1 + last_launch(self.log)
                batch = int(trainer.state.timestamp.batch)
                write_status(self.folder, "running", batch, self.asked_by, launch=self.launch, **self.saves)
                duration = self.config.max_duration
                self.written_once[LAUNCHES] = (self.folder / LAUNCHES).read_bytes()
                self.mirrors = build_mirrors(self.config, lambda: progress_of(trainer.state, duration))
                for mirror in self.mirrors:
                    mirror.begin(self.log, in_order(missed))
                self.file = LogFile(self.log)
        self.trainer = trainer
        self.is_running = self.is_main

    # ------------------------------------------------------------------------------------------------------- the log

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        for key, value in metrics.items() if self.is_main else ():
            if key.startswith(("time/", "trainer/")) and not key.endswith("_seconds"):
                continue  # Composer's own clocks, taken before the batch is counted
            name = key.replace("metrics/eval/", "eval/")
            self.record[name] = value.item() if isinstance(value, torch.Tensor) else value

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        self.write(state)
        if self.is_running and time.monotonic() - self._noted_at >= STATUS_SECONDS:
            self._note()

    def write(self, state: State) -> None:
        """Write the collected metrics as the record of the last batch (0: before the first)."""
        stamp = state.timestamp
        clocks = {"time/epoch": int(stamp.epoch), "time/sample": int(stamp.sample), "time/token": int(stamp.token)}
        self.last = {"batch": int(stamp.batch), "launch": self.launch, **self.record, **clocks}
        self._publish(self.last)

    def write_once(self, state: State) -> None:
        """Write the record of the last batch, unless that has been done."""
        if self.last.get("batch") != int(state.timestamp.batch):
            self.write(state)

    def record_of(self, batch: int) -> Record:
        """Return the log's record of a batch, or one without metrics if there is none."""
        self._mend_files()
        records = [record for _, record in read_lines(self.log.read_bytes()) if record["batch"] == batch]
        return records[-1] if records else {"batch": batch, "launch": self.launch}

    def add_to(self, batch: int) -> None:
        """Add the collected metrics to the record of a batch that an earlier launch has trained."""
        self._publish({**self.record_of(batch), **self.record})

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write the last record again with metrics that came after it, such as the duration of its save."""
        if self.record:
            self._append({**self.last, **self.record})
            self.record = {}

    def post_close(self) -> None:
        if self.file is not None:
            with contextlib.suppress(OSError):
                self._mend_files()
            self.file.close()
            self.file = None
        for mirror in self.mirrors:
            mirror.close()
        self.mirrors = []

    def _publish(self, record: Record) -> None:
        if self.is_main:
            self.record = {}
            self._append(record)
            for mirror in self.mirrors:
                mirror(record)

    def _append(self, record: Record) -> None:
        assert self.file is not None
        plain = {key: None if isinstance(v, float) and not isfinite(v) else v for key, v in record.items()}
        with clear_disk_errors(self.log):
            self._mend_files()
            self.file.append(mask_urls(json.dumps(plain, allow_nan=False)))

    def _mend_files(self) -> None:
        """Write files again that somebody has removed while the run trains, and say so. Raises OSError."""
        if self.file is None:
            return
        if note := self.file.mend():
            print(printable(f"warning: {note}"), flush=True)
        if not self.folder.is_dir():
            return

        lost = [name for name in self.written_once if not (self.folder / name).exists()]
        if self.is_running and not (self.folder / STATUS).exists():
            self._note()
        for name in lost:
            path = self.folder / name
            write_atomically(path, self.written_once[name])
            print(printable(f"warning: {path} was removed while the run trained; it was written again"), flush=True)

    # ---------------------------------------------------------------------------------------------------- the status

    def note_request(self, reason: str) -> None:
        """Note why the launch is asked to leave, from any thread, in case rank 0 is killed first."""
        self.asked_by = reason
        note = threading.Thread(target=self._note, daemon=True)
        note.start()
        note.join(1.0)  # the caller must not hang if the disk does

    def note_saves(self, saves: dict[str, Any]) -> None:
        """Note at once which save is the last, or that saves fail."""
        if self.saves and saves.get("last_saved") != self.saves.get("last_saved"):
            self.has_saved = True
        self.saves = saves
        self._note()

    def _note(self) -> None:
        """Write batch and status to status.json, if the launch has begun. Ignores errors."""
        if not self.is_running:
            return  # the first batch is noted at once
        with contextlib.suppress(OSError), self._writing:
            if self.is_running:
                write_status(self.folder, "running", self.batch, self.asked_by, is_update=True, **self.saves)
        self._noted_at = time.monotonic()

    def finish(self, status: str) -> None:
        self._stop_noting()
        if self.is_main:
            with clear_disk_errors(self.folder):
                write_status(self.folder, status, self.batch, **self.saves)
        self.is_done = True

    def fail(self, status: str, reason: str, *, may_pass: bool = False) -> None:
        """Write the reason to status.json, and whether it is a fault that may pass. Ignores errors, which would hide
        the failure itself."""
        self._stop_noting()
        if self.is_main:
            with contextlib.suppress(OSError):
                self._write_reason(status, reason, may_pass=may_pass)
                self.post_close()

    def leave(self, status: str, reason: str) -> None:
        """Print and write why the process ends, from another thread while the main thread hangs."""
        self._stop_noting()
        if self.is_main:
            print(printable(reason), file=sys.stderr, flush=True)
            self._write_reason(status, reason)

    def _stop_noting(self) -> None:
        """Prevent a later `_note` from overwriting how the launch ended."""
        self.is_running = False
        if self._writing.acquire(timeout=1.0):
            self._writing.release()

    def _write_reason(self, status: str, reason: str, *, may_pass: bool = False) -> None:
        if self.trainer is None:
            write_ended_early(self.folder, "preempted" if may_pass else status, reason)
        elif not (self.is_done and status == "failed"):  # a run that is done stays so; preempted, it exports again
            more = dict(self.saves)
            may_pass = may_pass or bool(self.saves.get("failed_saves"))
            if status == "failed" and may_pass and self.has_saved:
                more[TRY_AGAIN] = True
            write_status(self.folder, status, self.batch, reason, **more)


@contextlib.contextmanager
def clear_disk_errors(path: Path) -> Iterator[None]:
    """Raise UserError if the disk is full, read-only or missing."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.ELOOP and error.filename is not None:  # a link in a folder that can be written
            raise UserError(f"{error.filename} cannot be written: {error.strerror}") from error
        raise UserError(f"{path} cannot be written: {error.strerror or error}; make room, or set run_folder") from error


def last_launch(path: Path) -> int:
    """Return the number of the last launch in the log, 0 if there is none. Cuts off an incomplete last line."""
    content = _read(path)
    if content and not content.endswith(b"\n"):
        content = content[: content.rfind(b"\n") + 1]
        os.truncate(path, len(content))
    return max((record.get("launch", 0) for _, record in read_lines(content)), default=0)


def log_until(path: Path, batch: int) -> bytes:
    """Return the lines of batches up to `batch`, of all launches: the log that goes into a checkpoint."""
    content = _read(path)
    return b"".join(line for line, record in read_lines(content) if record["batch"] <= batch)


def take_over(path: Path, history: bytes) -> list[Record]:
    """Append a checkpoint's log from the first line that is missing here, and return the records appended. Batches that
    were trained here after that line become a dead branch, as if a launch had lost them."""
    last_launch(path)  # cuts off a torn line
    here = _read(path).splitlines(keepends=True)
    missing = missing_lines(here, [line for line, _ in read_lines(history)])
    with open(path, "ab", opener=open_no_link) as file:
        file.writelines(missing)
    return [record for _, record in read_lines(missing)]


def _read(path: Path) -> bytes:
    """Return the log; nothing if there is none. Raises OSError for a link or a pipe, before anything is cut off."""
    try:
        with open(path, "rb", opener=open_no_link) as file:
            return file.read()
    except FileNotFoundError:
        return b""
