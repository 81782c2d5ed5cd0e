"""The cache of shards on a node: downloads them when needed, verifies each once, and evicts beyond `cache_limit`.

The processes of a node share four columns of the table: `state`; `has_come`, whether a shard here is a copy from the
remote; `verified`, a hash of its file's status when it was found whole, or 0; `read_at`, when it was last read.
"""

import fcntl
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from threading import Lock
from time import sleep, time_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray
from streaming.base.format.mds import MDSReader

from llmfoundry_lite.data.shard_table import ShardTable
from llmfoundry_lite.data.streams import INDEX, ShardFolder, find_damage
from llmfoundry_lite.errors import DataError, one_line

log = logging.getLogger(__name__)

ABSENT, COMING, HERE = range(3)
TICK_SECONDS = 0.01
MAX_TRIES = 8
"""Times that one read brings a shard, where other processes keep removing it."""


class ShardCache:
    """Reader of samples that brings their shards when needed.

    A process that waits for another's download tries it itself when that one fails, so none waits for ever.
    """

    def __init__(self, folders: Sequence[ShardFolder], path: str, facts: dict[str, Any], cache_limit: int | None):
        """Map the table at `path`. `cache_limit` is in bytes."""
        self.folders = folders
        self.table = ShardTable(np.load(path, mmap_mode="r+"), facts)
        self.cache_limit = cache_limit
        self._state, self._verified = self.table.rows["state"], self.table.rows["verified"]
        self._has_come, self._read_at = self.table.rows["has_come"], self.table.rows["read_at"]
        self._lock_file, self._thread_lock = open(path, "r+b"), Lock()  # noqa: SIM115 (as long as this lives)

    def find_present(self) -> None:
        """Note which shards are in their folders. One process of a node does that, before any reads."""
        for i, folder in enumerate(self.folders):
            rows = self.table.of_stream(i)
            found = folder.find_present(rows)
            rows["state"] = np.where(found, HERE, ABSENT)
            rows["has_come"] = found & folder.has_downloads_alone

    def check_limit(self) -> None:
        """Raise DataError for a `cache_limit` that is too small for these shards."""
        if not self.cache_limit or not any(folder.remote for folder in self.folders):
            return
        least = self._index_bytes + 4 * int((self.table.rows["raw_bytes"] + self.table.rows["zip_bytes"]).max())
        if self.cache_limit < least:
            raise DataError(
                f"cache_limit is {self.cache_limit} bytes, expected at least {least}: the indexes and four times the "
                "largest shard, compressed and not"
            )

    def is_ready(self, shard: int) -> bool:
        """Return whether `read` most likely finds the shard here and whole. Marks it as read, so that it is kept."""
        self._read_at[shard] = time_ns()
        return bool(self._verified[shard]) and self._state[shard] == HERE

    def read(self, shard: int, sample: int) -> dict[str, Any]:
        """Return the columns of a sample. Raises DataError."""
        for _ in range(MAX_TRIES):
            self.bring(shard)
            try:
                return self._reader(shard)[sample]
            except FileNotFoundError:
                continue  # removed since, to make room for another shard
            except Exception as error:
                self._verified[shard] = 0
                self._is_whole(shard)  # a damaged file explains whatever went wrong
                raise DataError(f"{self.path(shard)}, sample {sample}: {one_line(error)}") from error
        raise self._never_stays(shard)

    def bring(self, shard: int) -> None:
        """Wait until the file of a shard is here and whole; download it if need be. Raises DataError."""
        for _ in range(MAX_TRIES):
            self._read_at[shard] = time_ns()
            if self._state[shard] == HERE and self._is_whole(shard):
                return
            self._fetch(shard)
        raise self._never_stays(shard)

    def path(self, shard: int) -> str:
        return os.path.join(self._folder(shard).path, self.table.name(shard))

    def _folder(self, shard: int) -> ShardFolder:
        return self.folders[self.table.stream_of(shard)]

    def _reader(self, shard: int) -> MDSReader:
        return self.table.reader(shard, self._folder(shard).path)

    def _never_stays(self, shard: int) -> DataError:
        return DataError(f"{self.path(shard)} is removed as often as it is brought; give each run a `local` of its own")

    def _is_whole(self, shard: int) -> bool:
        """Return whether the file is here. A damaged one is downloaded again once. Raises DataError if that fails too.

        A file is hashed once on each node, and again if it is replaced.
        """
        path, folder = self.path(shard), self._folder(shard)
        try:
            state = _state_of(path)
            if self._verified[shard] == state:
                return True
            damage = self._find_damage(shard)
            if damage and folder.remote:
                log.warning("%s is damaged: %s; it is downloaded again", path, damage)
                self._fetch(shard, damage)
                state, damage = _state_of(path), self._find_damage(shard)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise DataError(f"{path} cannot be read on {socket.gethostname()}: {one_line(error)}") from error
        if damage:
            raise DataError(f"{path} is damaged: {damage}; {folder.remedy}")
        self._verified[shard] = state
        return True

    def _find_damage(self, shard: int) -> str:
        """Describe how the file, or its number of samples, differs from the index; empty if it does not."""
        path, reader = self.path(shard), self._reader(shard)
        if damage := find_damage(path, reader.raw_data):
            return damage
        num_samples = int(np.fromfile(path, "<u4", 1)[0])  # an MDS shard begins with it
        is_same = num_samples == reader.samples
        return "" if is_same else f"it holds {num_samples} samples, {reader.samples} by its index.json"

    def _fetch(self, shard: int, damage: str = "") -> None:
        """Bring a shard that is missing or has this damage, or wait for another process that is bringing it."""
        folder = self._folder(shard)
        with self._locked():
            is_ours = self._state[shard] != COMING
            if is_ours:
                if self._state[shard] == ABSENT and self.cache_limit:
                    self._make_room(shard)
                self._state[shard], self._has_come[shard] = COMING, bool(folder.remote)
        if not is_ours:
            while self._state[shard] == COMING:
                sleep(TICK_SECONDS)
            return
        found = ABSENT
        try:
            damage = damage and self._find_damage(shard)  # another process may have replaced it since
            self._verified[shard] = 0
            has_come = folder.bring(self._reader(shard), again=bool(damage))
            self._has_come[shard] = has_come or folder.has_downloads_alone
            found = HERE
        except Exception as error:
            where = f"from {folder.remote}" if folder.remote else "which is not there, and no `remote` has it"
            what = f"{self.path(shard)} is damaged: {damage}; cannot get it again" if damage else ""
            raise DataError(f"{what or f'cannot get {self.path(shard)}'} {where}: {one_line(error)}") from error
        finally:
            self._state[shard] = found  # after a failure too, so that a process that waits tries next

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Keep out other threads, and other processes of the node."""
        with self._thread_lock:
            fcntl.lockf(self._lock_file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._lock_file, fcntl.LOCK_UN)

    # Room: the caller holds the lock ----------------------------------------------------------------------------------

    @cached_property
    def _sizes(self) -> NDArray[np.int64]:
        """Bytes of each shard that count for `cache_limit` [num_shards]: 0 for shards without a remote."""
        sizes = []
        for i, folder in enumerate(self.folders):
            rows = self.table.of_stream(i)
            sizes.append((rows["raw_bytes"] + rows["zip_bytes"] * folder.stream.keep_zip) * bool(folder.remote))
        return np.concatenate(sizes)

    @cached_property
    def _index_bytes(self) -> int:
        return sum(os.stat(os.path.join(folder.path, INDEX)).st_size for folder in self.folders if folder.remote)

    def _make_room(self, shard: int) -> None:
        """Remove the downloads that were read longest ago, until this one fits."""
        assert self.cache_limit
        taken = self._sizes[self._has_come & (self._state != ABSENT)]
        room = self.cache_limit - self._index_bytes - int(taken.sum())
        while room < self._sizes[shard]:
            removable = np.flatnonzero(self._has_come & (self._state == HERE))
            if not len(removable):
                return
            oldest = int(removable[self._read_at[removable].argmin()])
            if not self._folder(oldest).remote_has(self._reader(oldest)):
                self._has_come[oldest] = False  # the only copy now: it stays and does not count
                room += int(self._sizes[oldest])
                continue
            self._folder(oldest).remove(self._reader(oldest))
            self._state[oldest], self._verified[oldest] = ABSENT, 0
            room += int(self._sizes[oldest])


def _state_of(path: str) -> int:
    """Hash inode, size and time of modification of a file to a number above 0. Raises FileNotFoundError."""
    status = os.stat(path)
    return hash((status.st_ino, status.st_size, status.st_mtime_ns)) % 2**64 | 1
