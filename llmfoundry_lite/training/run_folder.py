"""`runs/<run_name>`: config.yaml, status.json, and metrics.jsonl with one object per batch. Only rank 0 writes.

Composer's logger calls us many times a batch, with its own idea of the step. Here everything about a batch is
gathered and written once, after that batch's evaluation, under the number of the batch it belongs to.
"""

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import yaml
from composer import Trainer
from composer.core import State
from composer.loggers import Logger, LoggerDestination

from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.errors import UserError
from llmfoundry_lite.files import write_atomically
from llmfoundry_lite.launch.log_lines import Record, missing_lines, read_lines
from llmfoundry_lite.launch.status import start_guard, write_ended_early, write_status
from llmfoundry_lite.training.mirrors import WANDB_ID, Mirror, build_mirrors, in_order
from llmfoundry_lite.training.schedule import progress_of

METRICS = "metrics.jsonl"
SAVED = "checkpoint/bytes"
"""Stands in the record of the batch at which a save was known to be published."""
STATUS_SECONDS = 5.0
"""A running run says where it is at most that often."""


class RunFolder(LoggerDestination):
    """The files of a run. Nothing is written before the run has been restored: a launch that is refused leaves the
    record as it was, except for how the last launch ended."""

    def __init__(self, config: TrainConfig):
        self.config = config
        self.folder = Path(config.run_folder)
        self.log = self.folder / METRICS
        self.is_main = dist.get_rank() == 0
        self.trainer: Trainer | None = None
        """None until the run has been restored."""
        self.asked_by: str | None = None
        """Why the run has been asked to leave."""
        self.is_running = False
        self.is_done = False
        self.launch = 0
        self.record: Record = {}
        """Metrics of the batch in hand."""
        self.last: Record = {}
        self.file: TextIO | None = None
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
        """Begin to write. `history`: the log that came with the checkpoint, of which the lines that are not here come
        first. What was logged before this call waits for the first record."""
        if self.is_main:
            with clear_disk_errors(self.folder):
                if wandb_run_id is not None:
                    (self.folder / WANDB_ID).write_text(wandb_run_id + "\n")
                write_atomically(self.folder / "config.yaml", yaml.safe_dump(as_dict(self.config), sort_keys=False))
                write_status(self.folder, "running", int(trainer.state.timestamp.batch), self.asked_by)
                start_guard(self.folder)
                duration = Duration.parse(self.config.max_duration)
                self.mirrors = build_mirrors(self.config, lambda: progress_of(trainer.state, duration))
                missed = take_over(self.log, history) if history else []
                self.launch = 1 + last_launch(self.log)
                for mirror in self.mirrors:
                    mirror.begin(self.log, in_order(missed))
                self.file = self.log.open("a")
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
        """Write what has been gathered as the record of the batch that was trained last (0: before the first)."""
        stamp = state.timestamp
        clocks = {"time/epoch": int(stamp.epoch), "time/sample": int(stamp.sample), "time/token": int(stamp.token)}
        self.last = {"batch": int(stamp.batch), "launch": self.launch, **self.record, **clocks}
        self._publish(self.last)

    def record_of(self, batch: int) -> Record:
        """Return the log's record of that batch, bare if it is not there."""
        records = [record for _, record in read_lines(self.log.read_bytes()) if record["batch"] == batch]
        return records[-1] if records else {"batch": batch, "launch": self.launch}

    def add_to(self, batch: int) -> None:
        """Write what has been gathered into the record of a batch that an earlier launch has trained."""
        self._publish({**self.record_of(batch), **self.record})

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write the last record again with what came after it, such as how long its save took."""
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
            self.file.write(json.dumps(plain, allow_nan=False) + "\n")
            self.file.flush()

    # ---------------------------------------------------------------------------------------------------- the status

    def note_request(self, reason: str) -> None:
        """Note from any thread why the run is asked to leave, in case rank 0 is killed or aborted before it has."""
        self.asked_by = reason
        note = threading.Thread(target=self._note, daemon=True)
        note.start()
        note.join(1.0)  # whoever asks must not hang with the disk

    def _note(self) -> None:
        """Write where the run is, for those who watch it; never a reason to fail."""
        with contextlib.suppress(OSError), self._writing:
            if self.is_running:
                write_status(self.folder, "running", self.batch, self.asked_by)
        self._noted_at = time.monotonic()

    def finish(self, status: str) -> None:
        self._stop_noting()
        if self.is_main:
            with clear_disk_errors(self.folder):
                write_status(self.folder, status, self.batch)
        self.is_done = True

    def fail(self, status: str, reason: str) -> None:
        """Write the reason to status.json; never fail instead of the failure itself."""
        self._stop_noting()
        if self.is_main:
            with contextlib.suppress(OSError):
                self._write_reason(status, reason)
                self.post_close()

    def leave(self, status: str, reason: str) -> None:
        """Say why the process ends, from another thread while the main thread hangs."""
        self._stop_noting()
        if self.is_main:
            print(reason, file=sys.stderr, flush=True)
            self._write_reason(status, reason)

    def _stop_noting(self) -> None:
        """Let no later `_note` overwrite how the launch ended."""
        self.is_running = False
        if self._writing.acquire(timeout=1.0):
            self._writing.release()

    def _write_reason(self, status: str, reason: str) -> None:
        if self.trainer is None:
            write_ended_early(self.folder, status, reason)
        elif not (self.is_done and status == "failed"):  # a run that is done stays so; preempted, it exports again
            write_status(self.folder, status, self.batch, reason)


@contextlib.contextmanager
def clear_disk_errors(path: Path) -> Iterator[None]:
    """Turn a disk that is full, read-only or not there into a UserError."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror or error}; make room, or set run_folder") from error


def last_launch(path: Path) -> int:
    """Return the highest number of a launch that wrote here, 0 if there is none. A torn last line is cut off."""
    content = path.read_bytes() if path.exists() else b""
    if content and not content.endswith(b"\n"):
        content = content[: content.rfind(b"\n") + 1]
        os.truncate(path, len(content))
    return max((record.get("launch", 0) for _, record in read_lines(content)), default=0)


def log_until(path: Path, batch: int) -> bytes:
    """Read the lines of batches up to `batch`, of all launches: what a save of that batch takes along."""
    content = path.read_bytes() if path.exists() else b""
    return b"".join(line for line, record in read_lines(content) if record["batch"] <= batch)


def take_over(path: Path, history: bytes) -> list[Record]:
    """Append the log that came with a checkpoint, from its first line on that is not here: other machines' batches.

    Batches that were trained here instead become a dead branch, as if an earlier launch had lost them.
    """
    last_launch(path)  # cuts off a torn line
    here = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    missing = missing_lines(here, [line for line, _ in read_lines(history)])
    with path.open("ab") as file:
        file.writelines(missing)
    return [record for _, record in read_lines(missing)]
