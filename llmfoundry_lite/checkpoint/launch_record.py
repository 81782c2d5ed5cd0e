"""The record of a launch beside a run's checkpoints, `launches/<epoch>.json`, for readers on any machine. No torch.

A launch writes its record when it begins, after each save, and when it ends. Each launch has a file of its own, named
by the epoch of its lease, so that no launch can replace the record of another one, however late it writes. The highest
epoch is the newest launch's. The content is a JSON object of plain facts, which the caller chooses.

`RecordWriter` writes in a background thread, so that training does not wait for a bucket, and the end of a launch only
as long as its caller says.

A launch that ends before it trains has no lease, and so no epoch. `record_early_end` writes its record as EARLY_END. It
is outside of what the lease protects: readers of checkpoints never look at it, and there is one such file for each run.
It holds until any launch claims, renews or releases the lease.

Readers are in the companion `llmfoundry_ops`.
"""

import contextlib
import re
import threading
import time
from collections.abc import Sequence
from typing import Any

from llmfoundry_lite.checkpoint.folder import Folder
from llmfoundry_lite.checkpoint.lease import FOLDER as LEASES
from llmfoundry_lite.checkpoint.lease import Holder, Leases
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.errors import CheckpointError
from llmfoundry_lite.ranks.codec import write_json

RECORDS = "launches"
"""Folder of the records, beside the checkpoints."""
RECORD_NAME = re.compile(r"[0-9]{8}\.json")
"""Name of a record. A file with a longer number is not one, because no run has so many launches."""
EARLY_END = "early-end.json"
"""Name of the record of the newest launch that ended before it trained. The next such launch replaces it."""
EARLY_END_SECONDS = 2.0
"""The longest time that a launch which ends early waits until its record is written, once the folder is open."""
EARLY_END_IMPORT_SECONDS = 10.0
"""The longest time that it waits until the folder is open. For a bucket, its client is imported then."""
LEASE = "lease"
"""Key of an early end's record: the lease as the launch has found it, by `describe_lease`."""
RETRY_SECONDS = 30.0
"""Time after which a record that could not be written is written again, if there is no newer one."""


def list_records(root: Folder) -> list[int]:
    """Return the lease epochs of all launches that have a record in a run's folder, in order. Raises OSError."""
    return find_epochs(root.child(RECORDS).names())


def find_epochs(names: Sequence[str]) -> list[int]:
    """Return the lease epochs of the records among file names, in order."""
    return sorted(int(name[:8]) for name in names if RECORD_NAME.fullmatch(name))


def record_name(epoch: int) -> str:
    """Return the file name of a launch's record: `00000007.json` for the launch that holds lease 7."""
    return f"{epoch:08d}.json"


def describe_lease(holder: Holder | None) -> str:
    """Return text that changes whenever a launch claims, renews or releases a run's lease; empty if there is none."""
    return "" if holder is None else f"{holder.activity_id} {holder.is_released}"


def record_early_end(url: str, record: dict[str, Any]) -> None:
    """Write the record of a launch that ends before it trains, beside the checkpoints at a path or URL.

    Waits for EARLY_END_IMPORT_SECONDS and EARLY_END_SECONDS at most, and raises nothing if it cannot be written.
    """
    is_open = threading.Event()
    thread = threading.Thread(target=_write_early_end, args=(url, record, is_open), name="early-end", daemon=True)
    thread.start()
    if is_open.wait(EARLY_END_IMPORT_SECONDS):
        thread.join(EARLY_END_SECONDS)


def _write_early_end(url: str, record: dict[str, Any], is_open: threading.Event) -> None:
    """Write the record of a launch that ends early. Runs in a background thread.

    Sets `is_open` once the folder is open, or cannot be opened.
    """
    with contextlib.suppress(OSError, CheckpointError):
        try:
            root = open_folder(url)
        finally:
            is_open.set()
        holder = Leases(root).current_holder()
        # Without a lease, a disk may not be mounted, and this would write into its mount point.
        if root.path_here is not None and holder is None:
            return
        facts = {LEASE: describe_lease(holder), "written_at": time.time()}
        folder = root.child(RECORDS)
        folder.make()
        folder.put(EARLY_END, write_json(record | facts) + b"\n")


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
