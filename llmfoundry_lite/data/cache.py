"""The cache of shards on a node: downloads them when needed, verifies each once, and evicts beyond `cache_limit`.

The ranks and loader workers of a node share four columns of the shard table, which is a memory-mapped file:

- `state`: ABSENT, FETCHING or PRESENT. Only the process that set it to FETCHING changes it back.
- `is_copy`: whether the shard in the folder is a copy from the remote. Only copies count for `cache_limit` and are
  evicted.
- `verified_status`: a hash of the file's inode, size and modification time when it was verified, or 0.
- `last_read_ns`: time at which the shard was last read or requested.

This module decides which shards to fetch and evict. `streams.py` downloads, unpacks, checks and removes the files.
"""

import fcntl
import logging
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from threading import Event, Lock, Thread
from time import monotonic, sleep, time_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray
from streaming.base.format.mds import MDSReader

from llmfoundry_lite.data.shard_table import ShardTable
from llmfoundry_lite.data.streams import ShardFolder, find_damage
from llmfoundry_lite.errors import DataError, mask_credentials, one_line, printable

log = logging.getLogger(__name__)

ABSENT = 0
FETCHING = 1
"""A process of this node is downloading or unpacking the shard, and the others wait for it."""
PRESENT = 2
"""The shard's file is in its folder, compressed or not. It may still have to be verified."""

POLL_SECONDS = 0.01
"""Time between two checks whether another process has fetched a shard."""
WAIT_MESSAGE_SECONDS = 10.0
"""Time after which a read prints which shard it is waiting for. It doubles with each line of this process, up to
MAX_WAIT_MESSAGE_SECONDS, so that a slow network does not fill the log."""
MAX_WAIT_MESSAGE_SECONDS = 600.0
MAX_FETCH_ATTEMPTS = 8
"""Number of times that one read fetches a shard that other processes keep removing."""
MIN_LIMIT_IN_SHARDS = 4
"""How often the largest shard has to fit into `cache_limit`: some shards are read while others are being downloaded and
unpacked."""


class ShardCache:
    """Reader of samples, which fetches their shards when needed.

    Every process of a node has an object of its own, and all of them share one table of the shards' states. If a
    process waits for the download of another and that one fails, it tries the download itself, so that no process waits
    forever.
    """

    _message_pause_factor = 1.0
    """Pause after the latest line about a shard that this process waits for, as a multiple of WAIT_MESSAGE_SECONDS."""
    _next_wait_message_at = 0.0
    """Time at which it may print the next one, by the monotonic clock."""

    def __init__(
        self, folders: Sequence[ShardFolder], table_path: str, metadata: dict[str, Any], cache_limit: int | None
    ):
        """Map the table of shards at `table_path` into memory.

        `metadata` is what `read_indexes` returned with the table. `cache_limit` is in bytes; None is no limit.
        """
        self.folders = folders
        self.table = ShardTable(np.load(table_path, mmap_mode="r+"), metadata)
        self.cache_limit = cache_limit
        self._state = self.table.rows["state"]
        self._is_copy = self.table.rows["is_copy"]
        self._verified_status = self.table.rows["verified_status"]
        self._last_read_ns = self.table.rows["last_read_ns"]
        self._lock_file = open(table_path, "r+b")  # noqa: SIM115 (open as long as this object lives)
        self._thread_lock = Lock()

    def find_present_shards(self) -> None:
        """Look for shards in the folders, and record their states in the shared table.

        One process of each node calls this, before any process reads.
        """
        for index, folder in enumerate(self.folders):
            rows = self.table.rows_of_stream(index)
            is_present = folder.find_present_shards(rows)
            rows["state"] = np.where(is_present, PRESENT, ABSENT)
            rows["is_copy"] = is_present & folder.holds_only_downloads

    def check_cache_limit(self) -> None:
        """Raise DataError if `cache_limit` is too small for the indexes and MIN_LIMIT_IN_SHARDS largest shards."""
        has_remote = any(folder.remote for folder in self.folders)
        if not self.cache_limit or not has_remote:
            return
        largest_shard = int((self.table.rows["raw_bytes"] + self.table.rows["zip_bytes"]).max())
        min_limit = self._index_bytes + MIN_LIMIT_IN_SHARDS * largest_shard
        if self.cache_limit < min_limit:
            raise DataError(
                f"cache_limit is {self.cache_limit} bytes, expected at least {min_limit}: the indexes and four times "
                "the largest shard, compressed and not"
            )

    def is_ready(self, shard: int) -> bool:
        """Return whether the shard is in the cache and verified, so that `read` most likely need not wait.

        Marks the shard as recently read, so that it is evicted later.
        """
        self._last_read_ns[shard] = time_ns()
        return bool(self._verified_status[shard]) and self._state[shard] == PRESENT

    def read(self, shard: int, sample: int) -> dict[str, Any]:
        """Return the columns of a sample by name, fetching its shard if needed. Raises DataError.

        `sample` is the index of the sample in its shard.
        """
        for _ in range(MAX_FETCH_ATTEMPTS):
            if self._state[shard] == PRESENT:
                self.ensure_present(shard)
            else:
                with self.reporting_a_long_wait(shard):
                    self.ensure_present(shard)
            try:
                return self._reader(shard)[sample]
            except FileNotFoundError:
                continue  # another process has evicted the shard in the meantime
            except Exception as error:
                # The file may be damaged. Then verifying it again raises an error that says so.
                self._verified_status[shard] = 0
                self._verify(shard)
                raise DataError(f"{self.path(shard)}, sample {sample}: {one_line(error)}") from error
        raise self._evicted_too_often(shard)

    @contextmanager
    def reporting_a_long_wait(self, shard: int) -> Iterator[None]:
        """Context manager: print which shard training is waiting for, if the block takes WAIT_MESSAGE_SECONDS or more.

        A thread prints. Use it only where training waits: while a shard is fetched ahead of need, nobody waits for it.
        """
        has_ended = Event()
        Thread(target=self._report_wait, args=(shard, has_ended), daemon=True).start()
        try:
            yield
        finally:
            has_ended.set()

    def _report_wait(self, shard: int, has_ended: Event) -> None:
        """Print which shard training is waiting for, now and then until `has_ended` is set. Runs in a thread.

        Pauses between lines double, over all waits of this process: `_message_pause_factor` and `_next_wait_message_at`
        keep the pause and the time of the next line for the next wait.
        """
        began = monotonic()
        source = mask_credentials(self._folder(shard).remote or self._folder(shard).path)
        next_message_at = max(began + WAIT_MESSAGE_SECONDS, self._next_wait_message_at)
        while not has_ended.wait(next_message_at - monotonic()):
            now = monotonic()
            message = f"waiting for {source}: {self.table.name(shard)} is not here after {now - began:.0f} s"
            print(printable(message), flush=True)
            pause_seconds = min(2 * self._message_pause_factor * WAIT_MESSAGE_SECONDS, MAX_WAIT_MESSAGE_SECONDS)
            self._message_pause_factor = pause_seconds / WAIT_MESSAGE_SECONDS
            next_message_at = now + pause_seconds
            self._next_wait_message_at = next_message_at

    def ensure_present(self, shard: int) -> None:
        """Fetch a shard if it is not in its folder, and verify it, or wait until another process has done so.

        Raises DataError if the shard cannot be fetched, is damaged, or is evicted again and again.
        """
        for _ in range(MAX_FETCH_ATTEMPTS):
            self._last_read_ns[shard] = time_ns()
            if self._state[shard] == PRESENT and self._verify(shard):
                return
            self._fetch(shard)
        raise self._evicted_too_often(shard)

    def path(self, shard: int) -> str:
        """Return the path of a shard's uncompressed file, whether it exists or not."""
        return os.path.join(self._folder(shard).path, self.table.name(shard))

    def _folder(self, shard: int) -> ShardFolder:
        """Return the folder of the stream that a shard belongs to."""
        return self.folders[self.table.stream_of(shard)]

    def _reader(self, shard: int) -> MDSReader:
        """Build a reader of a shard. It opens the uncompressed file each time that a sample is read."""
        return self.table.reader(shard, self._folder(shard).path)

    def _evicted_too_often(self, shard: int) -> DataError:
        """Return the error for a shard that other processes remove again before this one can read it."""
        return DataError(
            f"{self.path(shard)} is removed each time it has been downloaded; give each run a `local` of its own"
        )

    def _verify(self, shard: int) -> bool:
        """Verify a shard's file against the index. Returns False if the file has been removed, and True otherwise.

        Each file is hashed only once on a node, unless it is replaced. A damaged file that has a remote is fetched
        again, once. Raises DataError if the file is still damaged, has no remote, or cannot be read.
        """
        path = self.path(shard)
        folder = self._folder(shard)
        try:
            # Nothing has to be done if the file is the one that was verified.
            status = _hash_status(path)
            if self._verified_status[shard] == status:
                return True

            # Verify it, and replace a damaged copy.
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
        """Describe how a shard's file differs from the index in size, hashes or samples; empty if it does not differ.

        Raises FileNotFoundError.
        """
        path = self.path(shard)
        reader = self._reader(shard)
        damage = find_damage(path, reader.raw_data)
        if damage:
            return damage
        num_samples = int(np.fromfile(path, "<u4", 1)[0])  # an MDS shard begins with this number
        if num_samples != reader.samples:
            return f"it holds {num_samples} samples, {reader.samples} by its index.json"
        return ""

    def _fetch(self, shard: int, damage: str = "") -> None:
        """Fetch a shard that is missing, or wait for another process that is fetching it.

        `damage` describes what is wrong with the shard's file, which is then replaced; empty if the file is missing.
        Changes the shard's row in the table that all processes of the node share. Raises DataError if the fetch of
        this process fails. If another process's fetch fails, this returns, and the caller has to try again.
        """
        # Mark the shard as being fetched, unless another process is fetching it, and wait for that.
        with self._locked():
            is_fetched_elsewhere = self._state[shard] == FETCHING
            if not is_fetched_elsewhere:
                if self._state[shard] == ABSENT and self.cache_limit:
                    self._evict_until_it_fits(shard)
                # From now on the shard counts for `cache_limit`.
                self._state[shard] = FETCHING
                self._is_copy[shard] = bool(self._folder(shard).remote)
        if is_fetched_elsewhere:
            while self._state[shard] == FETCHING:
                sleep(POLL_SECONDS)
            return

        # This process fetches the shard. It holds no lock, so that others can fetch further shards meanwhile.
        folder = self._folder(shard)
        state_afterwards = ABSENT
        try:
            if damage:
                damage = self._find_damage(shard)  # another process may have replaced the file by now
            self._verified_status[shard] = 0
            was_downloaded = folder.fetch_shard(self._reader(shard), replace=bool(damage))
            self._is_copy[shard] = was_downloaded or folder.holds_only_downloads
            state_afterwards = PRESENT
        except Exception as error:
            source = f"from {folder.remote}" if folder.remote else "which is not there, and no `remote` has it"
            problem = f"cannot get {self.path(shard)}"
            if damage:
                problem = f"{self.path(shard)} is damaged: {damage}; cannot get it again"
            raise DataError(f"{problem} {source}: {one_line(error)}") from error
        finally:
            # Set after a failure too, so that a process that is waiting tries the download itself.
            self._state[shard] = state_afterwards

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Context manager: hold the lock of the shared table against other threads and other processes of the node.

        `lockf` locks for a whole process, so threads need a lock of their own.
        """
        with self._thread_lock:
            fcntl.lockf(self._lock_file, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.lockf(self._lock_file, fcntl.LOCK_UN)

    # Eviction: the caller holds the lock ------------------------------------------------------------------------------

    @cached_property
    def _bytes_in_cache(self) -> NDArray[np.int64]:
        """Number of bytes that each shard takes of `cache_limit` when it is present [num_shards].

        A shard without a remote takes 0. Compressed files count only if the stream keeps them after unpacking.
        """
        bytes_of_streams = []
        for index, folder in enumerate(self.folders):
            rows = self.table.rows_of_stream(index)
            shard_bytes = rows["raw_bytes"] + rows["zip_bytes"] * folder.stream.keep_zip
            bytes_of_streams.append(shard_bytes * bool(folder.remote))
        return np.concatenate(bytes_of_streams)

    @cached_property
    def _index_bytes(self) -> int:
        """Bytes of the indexes of all folders with a remote. They count for `cache_limit` and are never evicted."""
        num_bytes = 0
        for folder, index_bytes in zip(self.folders, self.table.index_bytes, strict=True):
            if folder.remote:
                num_bytes += index_bytes
        return num_bytes

    def _evict_until_it_fits(self, shard: int) -> None:
        """Evict shards, those that were read longest ago first, until `shard` fits into `cache_limit`.

        Only copies of shards that the remote still has are removed. Returns when none is left, even if the shard does
        not fit. The caller holds the lock of the table.
        """
        assert self.cache_limit
        used_bytes = self._bytes_in_cache[self._is_copy & (self._state != ABSENT)]
        free_bytes = self.cache_limit - self._index_bytes - int(used_bytes.sum())
        while free_bytes < self._bytes_in_cache[shard]:
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
                # The remote has lost this shard, so the file is not removed, and does not count any more.
                self._is_copy[oldest] = False
            free_bytes += int(self._bytes_in_cache[oldest])


def _hash_status(path: str) -> int:
    """Return a hash above 0 of a file's inode, size and modification time, which changes when the file is replaced.

    Raises FileNotFoundError.
    """
    status = os.stat(path)
    return hash((status.st_ino, status.st_size, status.st_mtime_ns)) % 2**64 | 1
