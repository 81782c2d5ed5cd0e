"""The record of a launch beside a run's checkpoints, `launches/<epoch>.json`, for readers on any machine. No torch.

A launch writes its record when it begins, after each save, and when it ends. Each launch has a file of its own, named
by the epoch of its lease, so that no launch can replace the record of another one, however late it writes. The highest
epoch is the newest launch's. The content is a JSON object of plain facts, which the caller chooses.

`RecordWriter` writes in a background thread, so that neither training nor the end of a launch waits for a bucket.
Readers are in the companion `llmfoundry_ops`.
"""

import contextlib
import re
import threading
import time
from typing import Any

from llmfoundry_lite.checkpoint.folder import Folder
from llmfoundry_lite.checkpoint.lease import FOLDER as LEASES
from llmfoundry_lite.errors import CheckpointError
from llmfoundry_lite.ranks.codec import write_json

RECORDS = "launches"
"""Folder of the records, beside the checkpoints."""
RECORD_NAME = re.compile(r"[0-9]{8}\.json")
"""Name of a record. A file with a longer number is not one, because no run has so many launches."""
RETRY_SECONDS = 30.0
"""Time after which a record that could not be written is written again, if there is no newer one."""


def list_records(root: Folder) -> list[int]:
    """Return the lease epochs of all launches that have a record in a run's folder, in order. Raises OSError."""
    return sorted(int(name[:8]) for name in root.child(RECORDS).names() if RECORD_NAME.fullmatch(name))


def record_name(epoch: int) -> str:
    """Return the file name of a launch's record: `00000007.json` for the launch that holds lease 7."""
    return f"{epoch:08d}.json"


class RecordWriter:
    """Writes the record of one launch, from a background thread. Any thread may call its methods.

    A record that cannot be written raises nothing: the next one may succeed, and training must neither wait for it nor
    end by it.
    """

    def __init__(self, root: Folder, epoch: int):
        """Prepare to write the record of the launch that holds lease `epoch` of the run's folder `root`.

        Nothing is written before `write` is called.
        """
        self._root = root
        self._folder = root.child(RECORDS)
        self._name = record_name(epoch)
        self._lock = threading.Lock()
        self._newest: dict[str, Any] | None = None
        """The newest record, until it is written."""
        self._is_over = False
        """No record comes after the newest one."""
        self._has_news = threading.Event()
        self._thread: threading.Thread | None = None

    def write(self, record: dict[str, Any]) -> None:
        """Let the thread write a record soon, and return at once. It replaces one that has not been written yet."""
        with self._lock:
            self._newest = record
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="launch-record", daemon=True)
                self._thread.start()
        self._has_news.set()

    def end(self) -> None:
        """Let the thread end once it has tried to write the newest record. Does not wait for that."""
        self._is_over = True
        self._has_news.set()

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, for `seconds` at most. Call `end` first."""
        if self._thread is not None:
            self._thread.join(max(0.0, seconds))

    def _run(self) -> None:
        """Write each new record until `end` is called. Runs in the background thread."""
        while True:
            self._has_news.wait(RETRY_SECONDS)
            self._has_news.clear()
            is_over = self._is_over  # read before the record, which may be set just before `end` is called
            self._write_newest()
            if is_over:
                return

    def _write_newest(self) -> None:
        """Write the newest record, if it has not been written yet. It is kept for the next attempt if that fails."""
        record = self._newest
        if record is None:
            return
        with contextlib.suppress(OSError, CheckpointError):
            # Without the leases, a disk has been unmounted, and this would write into its mount point.
            if self._root.path_here is not None and not self._root.child(LEASES).exists():
                return
            self._folder.make()
            self._folder.put(self._name, write_json(record | {"written_at": time.time()}) + b"\n")
            with self._lock:
                if self._newest is record:
                    self._newest = None
