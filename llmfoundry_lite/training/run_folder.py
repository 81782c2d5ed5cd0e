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
from collections.abc import Callable, Iterator
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
from llmfoundry_lite.errors import TransientError, UserError, mask_credentials, mask_urls, printable
from llmfoundry_lite.files import open_no_link, write_atomically
from llmfoundry_lite.ranks import output
from llmfoundry_lite.ranks.identity import describe_this_process
from llmfoundry_lite.ranks.status import (
    HAS_SAVED,
    LAUNCHES,
    STATUS,
    TRY_AGAIN,
    WAITS_FOR_SAVE,
    write_ended_early,
    write_status,
)
from llmfoundry_lite.training.log_file import LogFile
from llmfoundry_lite.training.mirrors import WANDB_ID, Mirror, build_mirrors, in_order
from llmfoundry_lite.training.schedule import progress_of

CONFIG = "config.yaml"
STATUS_SECONDS = 5.0
"""Minimum time between two updates of status.json."""
RECORDED_METRICS = ("loss/train/total", "throughput/tokens_per_sec")
"""Metrics of the last batch that the record of a launch has, under the same keys."""


class RunFolder(LoggerDestination):
    """The files of a run, and Composer's logger. Every rank has one, and rank 0's writes.

    A launch that fails before the run is restored writes only the reason, into status.json.
    """

    def __init__(self, config: TrainConfig):
        """Create the folder, on rank 0. Raises UserError if that fails.

        Nothing is written into it before `start`, except by `fail` and `leave`. Call order: `start`, then the methods
        that write records and the status, then `finish` or `fail`.
        """
        self.config = config
        self.folder = Path(config.run_folder)
        self.log_path = self.folder / METRICS
        self.is_main = dist.get_rank() == 0
        """This is rank 0, which writes."""
        self.trainer: Trainer | None = None
        """None until the run has been restored."""

        # The status.
        self.leave_reason: str | None = None
        """Why the launch is asked to leave; None if it is not."""
        self.saves: dict[str, Any] = {}
        """The fields of status.json about saves; empty until the run has been restored."""
        self.rank_facts: dict[str, Any] = {}
        """The fields of status.json about the times of ranks; empty until they were compared."""
        self.has_saved = False
        """This launch has published a save, so that another one would not begin where this one did."""
        self.is_running = False
        """On rank 0: the launch has begun and not ended, so status.json may be updated."""
        self.is_done = False
        """The launch has recorded an orderly end."""
        self._status_lock = threading.Lock()
        """Held while status.json is updated, from any thread."""
        self._status_updated_at = 0.0
        """Monotonic time of the last update."""
        self.on_status: Callable[[dict[str, Any]], None] = lambda record: None
        """Called on rank 0 with `describe_launch()` when the launch begins, is asked to leave, has saved or has failed
        to, and ends. Called from any thread, and must not wait."""
        self._fixed_facts: dict[str, Any] = {}
        """Facts for `describe_launch` that do not change during the launch."""
        self._saved_at: float | None = None
        """Time at which this launch has published its newest save, in seconds since 1970."""

        # The log.
        self.launch = 0
        """Number of this launch in the log. The first launch of a run has 1."""
        self.metrics: Record = {}
        """Metrics collected for the next record."""
        self.last_record: Record = {}
        self.log_file: LogFile | None = None
        """On rank 0, the log while it is open."""
        self.initial_files: dict[str, bytes] = {}
        """Name -> content, of files that a launch writes only at its beginning."""
        self.mirrors: list[Mirror] = []

        if self.is_main:
            with disk_errors_as_user_errors(self.folder):
                self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def batch(self) -> int:
        """Number of batches that the run has trained; 0 until it has been restored."""
        return int(self.trainer.state.timestamp.batch) if self.trainer is not None else 0

    def start(self, trainer: Trainer, wandb_run_id: str | None, history: bytes | None) -> None:
        """Open the log and its mirrors, on rank 0, and record in status.json that the launch has begun.

        `history` is the log that the checkpoint holds, whose missing lines are appended to the log here first, and
        `wandb_run_id` the run at wandb to continue; both may be None. Metrics logged before this call go into the first
        record. Sets `trainer`, `launch`, `mirrors`, `log_file` and `is_running`. Raises UserError.
        """
        if self.is_main:
            with disk_errors_as_user_errors(self.folder):
                # Files that are written once.
                if wandb_run_id is not None:
                    write_atomically(self.folder / WANDB_ID, wandb_run_id + "\n")
                config_text = dump_record(as_dict(self.config)).encode()
                write_atomically(self.folder / CONFIG, config_text)

                # The log gets what another machine has logged. Its last launch decides this one's number.
                restored_records = append_missing_records(self.log_path, history) if history else []
                self.launch = 1 + last_launch(self.log_path)
                output.labels["launch"] = self.launch
                batch = int(trainer.state.timestamp.batch)
                began_at = write_status(
                    self.folder, "running", batch, self.leave_reason, launch=self.launch, **self.saves
                )
                self._fixed_facts = {
                    "run_name": self.config.run_name,
                    "max_duration": str(self.config.max_duration),
                    "began_at": began_at,
                    "began_at_batch": batch,
                    "launch": self.launch,
                    "process": describe_this_process(),
                }
                self.initial_files = {CONFIG: config_text, LAUNCHES: (self.folder / LAUNCHES).read_bytes()}

                # Mirrors first see the log as it was before this launch.
                max_duration = self.config.max_duration
                self.mirrors = build_mirrors(self.config, lambda: progress_of(trainer.state, max_duration))
                for mirror in self.mirrors:
                    mirror.begin(self.log_path, in_order(restored_records))
                self.log_file = LogFile(self.log_path)
        self.trainer = trainer
        self.is_running = self.is_main
        self._tell_status("running", self.leave_reason)

    # ------------------------------------------------------------------------------------------------------- the log

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        """Collect metrics for the next record, on rank 0. Later values of a metric replace earlier ones.

        Composer calls this many times in a batch, with its own `step`, which is not used. Composer's own clocks are
        dropped, because it logs them before it counts the batch. Reading a tensor's value waits for its device.
        """
        if not self.is_main:
            return
        for key, value in metrics.items():
            is_composers_clock = key.startswith(("time/", "trainer/")) and not key.endswith("_seconds")
            if is_composers_clock:
                continue
            name = key.replace("metrics/eval/", "eval/")  # Composer's name of our validation losses
            self.metrics[name] = value.item() if isinstance(value, torch.Tensor) else value

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        """Write the batch's record, and update status.json from time to time.

        Composer calls this after the callbacks.
        """
        self.write(state)
        if self.is_running and time.monotonic() - self._status_updated_at >= STATUS_SECONDS:
            self._update_status()

    def write(self, state: State) -> None:
        """Write the collected metrics as the record of the last batch, or of batch 0 before the first.

        Only rank 0 writes. Sets `last_record`, and begins to collect for the next record.
        """
        timestamp = state.timestamp
        output.labels["batch"] = int(timestamp.batch)
        self.last_record = {
            "batch": int(timestamp.batch),
            "launch": self.launch,
            **self.metrics,
            "time/epoch": int(timestamp.epoch),
            "time/sample": int(timestamp.sample),
            "time/token": int(timestamp.token),
        }
        self._publish(self.last_record)

    def write_unless_written(self, state: State) -> None:
        """Write the record of the last batch, unless it has been written."""
        if self.last_record.get("batch") != int(state.timestamp.batch):
            self.write(state)

    def record_of(self, batch: int) -> Record:
        """Return the log's newest record of a batch, or one without metrics if there is none. For rank 0."""
        self._mend_files()
        records = [record for _, record in read_lines(self.log_path.read_bytes()) if record["batch"] == batch]
        return records[-1] if records else {"batch": batch, "launch": self.launch}

    def add_to(self, batch: int) -> None:
        """Write the record of a batch again, with the collected metrics in addition. Only rank 0 calls this.

        An earlier launch has trained that batch and written its record. A reader of the log takes the last record of a
        batch.
        """
        self._publish({**self.record_of(batch), **self.metrics})

    def fit_end(self, state: State, logger: Logger) -> None:
        """Write the last record again if metrics came after it, such as the duration of its save."""
        if self.metrics:
            self._append({**self.last_record, **self.metrics})
            self.metrics = {}

    def post_close(self) -> None:
        """Close the log and its mirrors."""
        if self.log_file is not None:
            with contextlib.suppress(OSError):
                self._mend_files()
            self.log_file.close()
            self.log_file = None
        for mirror in self.mirrors:
            mirror.close()
        self.mirrors = []

    def _publish(self, record: Record) -> None:
        """Append a record to the log, pass it to the mirrors, and begin to collect for the next one.

        Ranks other than 0 do nothing.
        """
        if self.is_main:
            self.metrics = {}
            self._append(record)
            for mirror in self.mirrors:
                mirror(record)

    def _append(self, record: Record) -> None:
        """Append a record to the log as a line of JSON, with null for NaN and infinity. Only rank 0 calls this.

        Writes a log that was removed meanwhile again first. Raises UserError if the disk fails.
        """
        assert self.log_file is not None
        json_record: Record = {}
        for key, value in record.items():
            has_json_value = not isinstance(value, float) or isfinite(value)
            json_record[key] = value if has_json_value else None
        with disk_errors_as_user_errors(self.log_path):
            self._mend_files()
            self.log_file.append(mask_urls(json.dumps(json_record, allow_nan=False)))

    def _mend_files(self) -> None:
        """Write files again that somebody has removed while the run trains, and print that.

        Only rank 0 does this. Raises OSError.
        """
        if self.log_file is None:
            return
        # Somebody has refused access, as `chmod` does, and may grant it again. The open file takes records meanwhile.
        with contextlib.suppress(PermissionError):
            self._write_lost_files(self.log_file)

    def _write_lost_files(self, log_file: LogFile) -> None:
        """Write the log, status.json, config.yaml and the list of launches again, if somebody has removed them.

        Prints a warning for each. Does nothing while the folder itself is missing, except that the log may create it.
        Raises OSError.
        """
        note = log_file.mend()
        if note:
            print(printable(f"warning: {note}"), flush=True)
        if not self.folder.is_dir():
            return

        # Look before the status is updated, because that may write the list of launches, too.
        lost = [name for name in self.initial_files if not (self.folder / name).exists()]
        if self.is_running and not (self.folder / STATUS).exists():
            self._update_status()
        for name in lost:
            path = self.folder / name
            write_atomically(path, self.initial_files[name])
            print(printable(f"warning: {path} was removed while the run trained; it was written again"), flush=True)

    # ---------------------------------------------------------------------------------------------------- the status

    def note_leave_reason(self, reason: str) -> None:
        """Write to status.json why the launch is asked to leave, in case rank 0 is killed before it can.

        It may be called from any thread. A new thread writes, and this waits for it one second at most, so that the
        caller does not hang if the disk does.
        """
        self.leave_reason = reason
        if self.is_running:
            self._tell_status("running", reason)
        writer = threading.Thread(target=self._update_status, daemon=True)
        writer.start()
        writer.join(1.0)

    def note_saves(self, saves: dict[str, Any]) -> None:
        """Write to status.json which save is the newest, or that saves fail.

        `saves` is the result of `describe_saves` (`save_texts.py`).
        """
        is_first_report = not self.saves
        if not is_first_report and saves.get("last_saved") != self.saves.get("last_saved"):
            self.has_saved = True
            self._saved_at = time.time()
        self.saves = {**saves, "saved_at": self._saved_at}
        self._update_status()
        if self.is_running:
            self._tell_status("running", self.leave_reason)

    def note_ranks(self, facts: dict[str, Any], *, is_news: bool) -> None:
        """Take the fields about the times of ranks, `SlowRanks.facts`, for the next update of status.json.

        It is updated at once if there is news: a rank has become slow, or has recovered.
        """
        self.rank_facts = facts
        if is_news:
            self._update_status()

    def _update_status(self) -> None:
        """Write batch, reason and saves to status.json while the launch runs.

        Ignores disk errors. It may be called from any thread.
        """
        if not self.is_running:
            return
        fields = {**self.saves, **self.rank_facts}
        if self.has_saved:
            fields[HAS_SAVED] = True
        with contextlib.suppress(OSError), self._status_lock:
            if self.is_running:  # still, now that no other thread writes
                write_status(self.folder, "running", self.batch, self.leave_reason, is_update=True, **fields)
        self._status_updated_at = time.monotonic()

    def finish(self, status: str) -> None:
        """Write an orderly end to status.json: "done" or "stopped". Raises UserError if the disk fails."""
        self._stop_updates()
        if self.is_main:
            with disk_errors_as_user_errors(self.folder):
                write_status(self.folder, status, self.batch, **self.saves, **self.rank_facts)
            facts = {"status": status, "batch": self.batch, "last_saved": self.saves.get("last_saved")}
            output.tell(f"the run is {status} at batch {self.batch}", "ended", facts)
        self._tell_status(status)
        self.is_done = True

    def fail(self, status: str, reason: str, *, may_pass: bool = False) -> None:
        """Write to status.json why the launch ends, and close the log. `status` is "failed" or "preempted".

        `may_pass` says that the fault may be gone for the next launch. Ignores disk errors, which would hide the
        failure itself.
        """
        self._stop_updates()
        if self.is_main:
            with contextlib.suppress(OSError):
                self._write_reason(status, reason, may_pass=may_pass)
                self.post_close()

    def leave(self, status: str, reason: str) -> None:
        """Print why the process ends, and write it to status.json. From another thread, while the main thread hangs."""
        self._stop_updates()
        if self.is_main:
            facts = {"status": status, "batch": self.batch}
            output.say(printable(reason), "ended", facts, file=sys.stderr)
            self._write_reason(status, reason)

    def _stop_updates(self) -> None:
        """Let no later update of status.json overwrite how the launch has ended. Waits a second for one in progress.

        Training does not wait for a save any more, so that the status that follows does not say so.
        """
        self.is_running = False
        self.saves = {key: value for key, value in self.saves.items() if key != WAITS_FOR_SAVE}
        if self._status_lock.acquire(timeout=1.0):
            self._status_lock.release()

    def _write_reason(self, status: str, reason: str, *, may_pass: bool = False) -> None:
        """Write to status.json that the launch has "failed" or was "preempted", why, and whether to try again.

        Only rank 0 calls this. `may_pass` says that the fault may be gone for the next launch.
        """
        # Before the run is restored, nothing is known of batches and saves.
        if self.trainer is None:
            write_ended_early(self.folder, "preempted" if may_pass else status, reason)
            return
        if self.is_done and status == "failed":
            return  # the run is done, whatever fails in its export; a preempted launch is repeated, and exports again

        # A launcher may try again if the fault may pass. If this launch has saved nothing, another one would not get
        # further.
        fields = {**self.saves, **self.rank_facts}
        may_pass = may_pass or bool(self.saves.get("failed_saves"))
        if status == "failed" and may_pass and self.has_saved:
            fields[TRY_AGAIN] = True
        self._tell_status(status, reason)
        write_status(self.folder, status, self.batch, reason, **fields)

    def _tell_status(self, status: str, reason: str | None = None) -> None:
        """Call `on_status`, on rank 0 and once the run has been restored. `reason` is that of the status."""
        if self.is_main and self.trainer is not None:
            self.on_status(self.describe_launch(status, reason))

    def describe_launch(self, status: str, reason: str | None) -> dict[str, Any]:
        """Return facts about this launch that can be written as JSON, for readers on other machines.

        {"status": "running", "batch": 40, "reason": null, "run_name": "mpt-1b", "launch": 1, "began_at_batch": 0,
         "last_saved": "ba40", "saved_at": 1.7e9, "process": {"host": "gpu003", …}, "loss/train/total": 2.3, …}

        `status` and `reason` are as in status.json. Credentials in the reason are masked, as there.
        """
        facts: dict[str, Any] = {
            "status": status,
            "batch": self.batch,
            "reason": mask_credentials(reason or "") or None,
            "saved_at": self._saved_at,
            **self._fixed_facts,
        }
        for key, value in self.saves.items():
            facts[key] = mask_credentials(value) if isinstance(value, str) else value
        for key in RECORDED_METRICS:
            value = self.last_record.get(key)
            if isinstance(value, int | float) and isfinite(value):
                facts[key] = value
        return facts


@contextlib.contextmanager
def disk_errors_as_user_errors(path: Path) -> Iterator[None]:
    """Raise UserError instead of OSError in a block that writes to `path`, with what the user can do.

    The disk may be full, read-only or missing, or the user may lack the right to write. If the file is a link, somebody
    else may have put it there, so the error names it and advises nothing.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.ELOOP and error.filename is not None:  # a link in a folder that can be written
            raise UserError(f"{error.filename} cannot be written: {error.strerror}") from error
        remedy = "ask for the right to write there" if isinstance(error, PermissionError) else "make room"
        raise UserError(f"{path} cannot be written: {error.strerror or error}; {remedy}, or set run_folder") from error


def last_launch(path: Path) -> int:
    """Return the number of the last launch in the log at `path`, 0 if there is none.

    Cuts off an incomplete last line.
    """
    content = _read_log(path)
    if content and not content.endswith(b"\n"):
        content = content[: content.rfind(b"\n") + 1]
        os.truncate(path, len(content))
    return max((record.get("launch", 0) for _, record in read_lines(content)), default=0)


def log_until(path: Path, batch: int) -> bytes:
    """Return the log's lines of batches up to `batch`, by all launches, for the log that goes into a checkpoint.

    Raises OSError. It is one that may pass if somebody has put a link in the log's place, because the next record
    replaces that.
    """
    try:
        content = _read_log(path)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise TransientError(str(error)) from error
        raise
    return b"".join(line for line, record in read_lines(content) if record["batch"] <= batch)


def append_missing_records(path: Path, history: bytes) -> list[Record]:
    """Append a checkpoint's log, `history`, to the log at `path`, from the first line on that is missing there.

    Batches that were trained here after that line stay in the log as a dead branch, like batches that a launch has
    lost. Returns the records that were appended.
    """
    last_launch(path)  # cuts off an incomplete last line
    existing_lines = _read_log(path).splitlines(keepends=True)
    missing = missing_lines(existing_lines, [line for line, _ in read_lines(history)])
    with open(path, "ab", opener=open_no_link) as file:
        file.writelines(missing)
    return [record for _, record in read_lines(missing)]


def _read_log(path: Path) -> bytes:
    """Return the content of the log at `path`; nothing if there is none.

    Raises OSError for a link or a pipe, before anything is cut off.
    """
    try:
        with open(path, "rb", opener=open_no_link) as file:
            return file.read()
    except FileNotFoundError:
        return b""
