"""The cache of shards on a node: downloads them when needed, verifies each once, and evicts beyond `cache_limit`.

The ranks and loader workers of a node share four columns of the shard table, which is a file mapped into memory:

- `state`: ABSENT, FETCHING or PRESENT. Only the process that set it to FETCHING changes it back.
- `is_copy`: whether a shard here is a copy from the remote. Only copies are evicted, and count for `cache_limit`.
- `verified_status`: a hash of the file's status when it was found whole, or 0.
- `last_read_ns`: when the shard was last read or asked for.

`streams.py` does what this module decides: it downloads, unpacks, checks and removes files.
"""

import fcntl
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from threading import Lock, Timer
from time import sleep, time_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray
from streaming.base.format.mds import MDSReader

from llmfoundry_lite.data.shard_table import ShardTable
from llmfoundry_lite.data.streams import INDEX, ShardFolder, find_damage
from llmfoundry_lite.errors import DataError, mask_credentials, one_line, printable

log = logging.getLogger(__name__)

ABSENT = 0
FETCHING = 1
"""A process of this node downloads or unpacks the shard, and the others wait for it."""
PRESENT = 2
"""The shard's file is in its folder, raw or packed. It may still have to be verified."""

TICK_SECONDS = 0.01
"""Time between two looks at a shard that another process fetches."""
NOTE_SECONDS = 10.0
"""Time after which a read says which shard it waits for."""
MAX_TRIES = 8
"""Times that one read fetches a shard, where other processes keep removing it."""
MIN_LIMIT_IN_SHARDS = 4
"""Largest shards that a `cache_limit` has to hold: some are read while the next ones are downloaded and unpacked."""


class ShardCache:
    """Reader of samples that fetches their shards when needed.

    A process that waits for another's download tries it itself when that one fails, so that no process waits without
    end.
    """

    def __init__(self, folders: Sequence[ShardFolder], path: str, facts: dict[str, Any], cache_limit: int | None):
        """Map the table at `path`, whose facts were returned by `read_indexes`. `cache_limit` is in bytes."""
        self.folders = folders
        self.table = ShardTable(np.load(path, mmap_mode="r+"), facts)
        self.cache_limit = cache_limit
        self._state = self.table.rows["state"]
        self._is_copy = self.table.rows["is_copy"]
        self._verified_status = self.table.rows["verified_status"]
        self._last_read_ns = self.table.rows["last_read_ns"]
        self._lock_file = open(path, "r+b")  # noqa: SIM115 (as long as this lives)
        self._thread_lock = Lock()

    def find_present(self) -> None:
        """Note which shards are in their folders. One process of a node does that, before any reads."""
        for index, folder in enumerate(self.folders):
            rows = self.table.rows_of_stream(index)
            is_present = folder.find_present(rows)
            rows["state"] = np.where(is_present, PRESENT, ABSENT)
            rows["is_copy"] = is_present & folder.holds_only_downloads

    def check_limit(self) -> None:
        """Raise DataError for a `cache_limit` that is too small for these shards."""
        has_remote = any(folder.remote for folder in self.folders)
        if not self.cache_limit or not has_remote:
            return
        largest_shard = int((self.table.rows["raw_bytes"] + self.table.rows["zip_bytes"]).max())
        least = self._index_bytes + MIN_LIMIT_IN_SHARDS * largest_shard
        if self.cache_limit < least:
            raise DataError(
                f"cache_limit is {self.cache_limit} bytes, expected at least {least}: the indexes and four times the "
                "largest shard, compressed and not"
            )

    def is_ready(self, shard: int) -> bool:
        """Return whether `read` most likely finds the shard here and whole. Marks it as read, so that it is kept."""
        self._last_read_ns[shard] = time_ns()
        return bool(self._verified_status[shard]) and self._state[shard] == PRESENT

    def read(self, shard: int, sample: int) -> dict[str, Any]:
        """Return the columns of a sample, fetching its shard if needed. Raises DataError."""
        for _ in range(MAX_TRIES):
            if self._state[shard] == PRESENT:
                self.ensure_present(shard)
            else:
                with self._noting_a_wait(shard):
                    self.ensure_present(shard)
            try:
                return self._reader(shard)[sample]
            except FileNotFoundError:
                continue  # another process has evicted it since
            except Exception as error:
                # If the file is damaged, that explains the error: verifying it again raises what should be reported.
                self._verified_status[shard] = 0
                self._is_whole(shard)
                raise DataError(f"{self.path(shard)}, sample {sample}: {one_line(error)}") from error
        raise self._evicted_too_often(shard)

    @contextmanager
    def _noting_a_wait(self, shard: int) -> Iterator[None]:
        """Say which shard training waits for, if it is not here after NOTE_SECONDS. Downloads ahead of need say
        nothing."""
        source = mask_credentials(self._folder(shard).remote or self._folder(shard).path)
        text = f"waiting for {source}: {self.table.name(shard)} is not here after {NOTE_SECONDS:.0f} s"
        timer = Timer(NOTE_SECONDS, lambda: print(printable(text), flush=True))
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def ensure_present(self, shard: int) -> None:
        """Wait until the file of a shard is here and whole; fetch it if need be. Raises DataError."""
        for _ in range(MAX_TRIES):
            self._last_read_ns[shard] = time_ns()
            if self._state[shard] == PRESENT and self._is_whole(shard):
                return
            self._fetch(shard)
        raise self._evicted_too_often(shard)

    def path(self, shard: int) -> str:
        """Return the path of a shard's raw file, which may be absent."""
        return os.path.join(self._folder(shard).path, self.table.name(shard))

    def _folder(self, shard: int) -> ShardFolder:
        """Return the folder that a shard belongs to."""
        return self.folders[self.table.stream_of(shard)]

    def _reader(self, shard: int) -> MDSReader:
        """Build a reader of a shard, which opens the raw file each time that a sample is read."""
        return self.table.reader(shard, self._folder(shard).path)

    def _evicted_too_often(self, shard: int) -> DataError:
        """Return the error for a shard that other processes remove faster than this one reads it."""
        return DataError(
            f"{self.path(shard)} is removed each time it has been downloaded; give each run a `local` of its own"
        )

    def _is_whole(self, shard: int) -> bool:
        """Return whether the file is here, after verifying it. False means that it has been removed.

        A file is hashed once on each node, and again if it is replaced. A damaged one is fetched again once. Raises
        DataError if it is still damaged, or has no remote.
        """
        path = self.path(shard)
        folder = self._folder(shard)
        try:
            status = _hash_status(path)
            if self._verified_status[shard] == status:
                return True
            damage = self._find_damage(shard)
            if damage and folder.remote:
                log.warning("%s is damaged: %s; it is downloaded again", path, damage)
                self._fetch(shard, damage)
                status = _hash_status(path)
                damage = self._find_damage(shard)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise DataError(f"{path} cannot be read on {socket.gethostname()}: {one_line(error)}") from error
        if damage:
            raise DataError(f"{path} is damaged: {damage}; {folder.remedy}")
        self._verified_status[shard] = status
        return True

    def _find_damage(self, shard: int) -> str:
        """Describe how the file, or its number of samples, differs from the index; empty if it does not."""
        path = self.path(shard)
        reader = self._reader(shard)
        damage = find_damage(path, reader.raw_data)
        if damage:
            return damage
        num_samples = int(np.fromfile(path, "<u4", 1)[0])  # an MDS shard begins with it
        if num_samples != reader.samples:
            return f"it holds {num_samples} samples, {reader.samples} by its index.json"
        return ""

    def _fetch(self, shard: int, damage: str = "") -> None:
        """Fetch a shard that is missing, or that has `damage`; or wait for another process that is fetching it.

        Changes the shard's columns of the shared table. If the fetch of another process fails, this returns all the
        same, and the caller tries again. Raises DataError if the fetch of this process fails.
        """
        with self._locked():
            is_fetched_elsewhere = self._state[shard] == FETCHING
            if not is_fetched_elsewhere:
                if self._state[shard] == ABSENT and self.cache_limit:
                    self._make_room(shard)
                # A shard that is being fetched counts for `cache_limit` already.
                self._state[shard] = FETCHING
                self._is_copy[shard] = bool(self._folder(shard).remote)
        if is_fetched_elsewhere:
            while self._state[shard] == FETCHING:
                sleep(TICK_SECONDS)
            return

        folder = self._folder(shard)
        state_afterwards = ABSENT
        try:
            if damage:
                damage = self._find_damage(shard)  # another process may have replaced it since
            self._verified_status[shard] = 0
            was_downloaded = folder.fetch_shard(self._reader(shard), again=bool(damage))
            self._is_copy[shard] = was_downloaded or folder.holds_only_downloads
            state_afterwards = PRESENT
        except Exception as error:
            source = f"from {folder.remote}" if folder.remote else "which is not there, and no `remote` has it"
            problem = f"cannot get {self.path(shard)}"
            if damage:
                problem = f"{self.path(shard)} is damaged: {damage}; cannot get it again"
            raise DataError(f"{problem} {source}: {one_line(error)}") from error
        finally:
            self._state[shard] = state_afterwards  # after a failure too, so that a process that waits tries next

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep out other threads, and other processes of the node. (A lock of `lockf` holds for a whole process.)"""
        with self._thread_lock:
            fcntl.lockf(self._lock_file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._lock_file, fcntl.LOCK_UN)

    # Eviction: the caller holds the lock ------------------------------------------------------------------------------

    @cached_property
    def _limited_bytes(self) -> NDArray[np.int64]:
        """Bytes of each shard that count for `cache_limit` [num_shards]: 0 for shards without a remote."""
        bytes_of_streams = []
        for index, folder in enumerate(self.folders):
            rows = self.table.rows_of_stream(index)
            shard_bytes = rows["raw_bytes"] + rows["zip_bytes"] * folder.stream.keep_zip
            bytes_of_streams.append(shard_bytes * bool(folder.remote))
        return np.concatenate(bytes_of_streams)

    @cached_property
    def _index_bytes(self) -> int:
        """Bytes of the indexes of all folders with a remote, which count for `cache_limit` and are never evicted."""
        paths = [os.path.join(folder.path, INDEX) for folder in self.folders if folder.remote]
        return sum(os.stat(path).st_size for path in paths)

    def _make_room(self, shard: int) -> None:
        """Evict the copies that were read longest ago, until this shard fits, or none is left to evict."""
        assert self.cache_limit
        used_bytes = self._limited_bytes[self._is_copy & (self._state != ABSENT)]
        free_bytes = self.cache_limit - self._index_bytes - int(used_bytes.sum())
        while free_bytes < self._limited_bytes[shard]:
            evictable = np.flatnonzero(self._is_copy & (self._state == PRESENT))
            if not len(evictable):
                return
            oldest = int(evictable[self._last_read_ns[evictable].argmin()])
            folder = self._folder(oldest)
            if folder.remote_has(self._reader(oldest)):
                folder.remove_shard(self._reader(oldest))
                self._state[oldest] = ABSENT
                self._verified_status[oldest] = 0
            else:
                self._is_copy[oldest] = False  # the only one now: it stays, and does not count
            free_bytes += int(self._limited_bytes[oldest])


def _hash_status(path: str) -> int:
    """Hash inode, size and time of modification of a file to a number above 0. Raises FileNotFoundError."""
    status = os.stat(path)
    return hash((status.st_ino, status.st_size, status.st_mtime_ns)) % 2**64 | 1
