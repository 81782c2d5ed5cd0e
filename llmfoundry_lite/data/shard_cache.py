"""The shards of a data set that a node holds: brought when they are needed, whole, and within `cache_limit`.

Owns what the processes of a node share, which shards its cache holds, and the threads that fetch them. Leaves folders
and downloads to `streams.py`, `index.json` to `shard_table.py`, left-over shared memory to `shared_memory.py`, and
which samples are read to `dataset.py`.
"""

import errno
import logging
import os
import secrets
import socket
from collections.abc import Mapping
from tempfile import gettempdir
from time import sleep, time_ns
from typing import Any

import numpy as np
from filelock import FileLock
from numpy.typing import NDArray
from streaming import StreamingDataset
from streaming.base.constant import (
    BARRIER,
    BARRIER_FILELOCK,
    CACHE_FILELOCK,
    CACHE_USAGE,
    NEXT_EPOCH,
    SHARD_ACCESS_TIMES,
    SHARD_STATES,
    TICK,
)
from streaming.base.dataset import _ShardState
from streaming.base.distributed import get_local_rank, get_rank
from streaming.base.format.mds import MDSReader
from streaming.base.shared import SharedArray, SharedBarrier, SharedScalar
from streaming.base.shared.prefix import _get_path
from streaming.base.util import bytes_to_int

from llmfoundry_lite.data.agreement import failing_together, one_line
from llmfoundry_lite.data.lazy_arrays import ShardBounds, ShardReaders
from llmfoundry_lite.data.order import NO_SAMPLE
from llmfoundry_lite.data.shard_table import ShardTable, write_table
from llmfoundry_lite.data.shared_memory import (
    ELSEWHERE,
    VERIFIED,
    clean_stale_shared_memory,
    one_start_at_a_time,
    register_folders,
    remove_at_exit,
    shard_table_path,
    wait_for_folders,
)
from llmfoundry_lite.data.streams import CheckedStream, build_streams, find_damage, folder_of, remedy
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.ranks.exchange import all_gather_json, broadcast_json

log = logging.getLogger(__name__)


class CachedShards(StreamingDataset):
    """StreamingDataset whose shards are read by way of one table, and whose cache never loses the only copy of one.

    A base of `TextDataset`, which calls `_open` in place of StreamingDataset's constructor.
    """

    predownload: int

    # Opening: StreamingDataset makes an object for each shard on each rank -------------------------------------------

    def _open(
        self,
        streams: Mapping[str, Mapping[str, Any]],
        cache_limit: int | str | None,
        *,
        allow_unhashed_shards: bool,
    ) -> None:
        """The first rank of each node reads the indexes and makes what the node shares; the others open that."""
        self._background_error: Exception | None = None
        launch_id = broadcast_json(secrets.token_hex(8))
        number = None
        self._cannot_open = "cannot open the data set"
        with failing_together(self._cannot_open):
            self.streams = build_streams(streams)
            self.num_streams = len(streams)
            self.cache_limit = bytes_to_int(cache_limit) if isinstance(cache_limit, str) else cache_limit
            folders = ", ".join(stream.remote or folder_of(stream) for stream in self.streams)
        self._cannot_open += f" {folders}"
        with failing_together(self._cannot_open):
            if get_local_rank() == 0:
                number = self._make_shared(launch_id, allow_unhashed_shards)
        numbers = all_gather_json(number)
        with failing_together(self._cannot_open):
            if get_local_rank() > 0:
                self._open_shared(numbers[get_rank() - get_local_rank()])

    def _make_shared(self, launch_id: str, allow_unhashed_shards: bool) -> int:
        with one_start_at_a_time():
            clean_stale_shared_memory()
            wait_for_folders([folder_of(stream) for stream in self.streams if stream.remote], launch_id)
            number, self._locals_shm = register_folders([folder_of(stream) for stream in self.streams], launch_id)
        path = shard_table_path(number)
        remove_at_exit(self, path)
        indexes = [stream.fetch_index() for stream in self.streams]
        try:
            hash_names = [stream.validate_hash for stream in self.streams]
            write_table(path, indexes, hash_names, allow_unhashed_shards=allow_unhashed_shards)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise DataError(
                f"no space left in {path.parent} for the table of shards, about 150 bytes for each; make it larger "
                "(a container's with --shm-size, or --ipc=host)"
            ) from None
        self._open_shared(number)
        self._check_cache_limit()

        # StreamingDataset looks for every shard's file; here a folder without a remote is taken to be complete.
        present = np.concatenate([stream.find_present(self.table, i) for i, stream in enumerate(self.streams)])
        self._shard_states.numpy()[:] = np.where(present, _ShardState.LOCAL, _ShardState.REMOTE)
        self._shard_access_times.numpy()[:] = time_ns()
        self.cache_usage = self._index_bytes() + int(self._sizes_in_cache()[present].sum()) if self.cache_limit else 0
        self.next_epoch = 0
        return number

    def _open_shared(self, number: int) -> None:
        """Open the blocks of this number, or make them."""
        self.table = ShardTable(shard_table_path(number))
        self.num_shards = len(self.table)
        self.shards = ShardReaders(self.table, self.streams)
        self.spanner = ShardBounds(self.table.columns["ends"])
        self.num_samples = int(self.table.columns["ends"][-1])
        self._cache_filelock_path = os.path.join(gettempdir(), _get_path(number, CACHE_FILELOCK))
        self._shared_barrier = SharedBarrier(
            os.path.join(gettempdir(), _get_path(number, BARRIER_FILELOCK)), _get_path(number, BARRIER)
        )
        del self._shared_barrier.lock  # cannot be pickled; made again when it is needed
        self._next_epoch = SharedScalar(np.int64, _get_path(number, NEXT_EPOCH))
        self._cache_usage = SharedScalar(np.int64, _get_path(number, CACHE_USAGE))
        self._shard_states = SharedArray(self.num_shards, np.uint8, _get_path(number, SHARD_STATES))
        self._shard_access_times = SharedArray(self.num_shards, np.uint64, _get_path(number, SHARD_ACCESS_TIMES))
        self._verified = SharedArray(self.num_shards, np.uint64, _get_path(number, VERIFIED))
        """The state of each shard's file when it was found to be whole, or 0."""
        self._elsewhere = SharedArray(self.num_shards, np.uint8, _get_path(number, ELSEWHERE))
        """Which shards the remote has shown to hold: in this launch, they came from there or were compared."""

    def _index_bytes(self) -> int:
        return sum(stream.get_index_size() for stream in self.streams if stream.remote)

    def _sizes_in_cache(self) -> NDArray[np.int64]:
        """Bytes that a shard takes of `cache_limit` [num_shards]: none where no remote has it too."""
        sizes = []
        for i, stream in enumerate(self.streams):
            raw, zipped = self.table.of_stream(i, "raw_bytes"), self.table.of_stream(i, "zip_bytes")
            sizes.append((raw + zipped * bool(stream.keep_zip)) * bool(stream.remote))
        return np.concatenate(sizes)

    def _check_cache_limit(self) -> None:
        if not self.cache_limit or not any(stream.remote for stream in self.streams):
            return
        largest = max(
            int((self.table.of_stream(i, "raw_bytes") + self.table.of_stream(i, "zip_bytes")).max())
            for i in range(self.num_streams)
        )
        least = self._index_bytes() + 4 * largest
        if self.cache_limit < least:
            raise DataError(
                f"cache_limit is {self.cache_limit} bytes, expected at least {least}: the indexes and four times the "
                "largest shard, compressed and not"
            )

    # Bringing and giving up ------------------------------------------------------------------------------------------

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Download a shard, or wait for whoever does (if `blocking`), and make room for it.

        A failure is met by everybody who needs the shard; nobody is left waiting for ever.
        """
        # Asked once for every sample, by a thread that competes with the reader; a file lock takes 0.2 ms. Should the
        # shard be evicted this very moment, get_item downloads it again.
        states = self._shard_states
        if not blocking and self._verified[shard_id] and states[shard_id] == _ShardState.LOCAL:
            self._shard_access_times[shard_id] = time_ns()
            return
        with self._lock_cache():
            is_here = states[shard_id] == _ShardState.LOCAL and os.path.exists(self._path(shard_id))
            is_ours = not is_here and states[shard_id] != _ShardState.PREPARING
            if is_ours:
                if states[shard_id] == _ShardState.REMOTE and self.cache_limit:
                    self._make_room(shard_id)
                states[shard_id] = _ShardState.PREPARING
        if is_ours:
            self._bring_shard(shard_id)
        while blocking and states[shard_id] == _ShardState.PREPARING:
            sleep(TICK)
        self._shard_access_times[shard_id] = time_ns()

    def _lock_cache(self) -> FileLock:
        return FileLock(self._cache_filelock_path)  # made anew, because it cannot be pickled

    def _bring_shard(self, shard_id: int, damage: str = "") -> None:
        """Bring a shard that is not there, or one whose file has this damage."""
        stream = self._stream_of(shard_id)
        try:
            self._verified[shard_id] = 0
            if stream.prepare_shard(self.shards[shard_id], again=bool(damage)):
                self._elsewhere[shard_id] = True
        except Exception as error:
            where = f"from {stream.remote}" if stream.remote else "which is not there, and no `remote` has it"
            what = f"{self._path(shard_id)} is damaged: {damage}; cannot get it again" if damage else ""
            raise DataError(f"{what or f'cannot get {self._path(shard_id)}'} {where}: {one_line(error)}") from error
        finally:
            # Of a failure too: threads of other workers wait until the shard is there, and the DataLoader waits for
            # those workers. They go to read it, find no file, and try it themselves, with the same error to show.
            self._shard_states[shard_id] = _ShardState.LOCAL

    def _make_room(self, shard_id: int) -> None:
        """Count a shard that is about to come, after giving up those that were read longest ago. Holds the lock."""
        assert self.cache_limit
        sizes = self._sizes_in_cache()
        states, access_times = self._shard_states.numpy(), self._shard_access_times.numpy()
        while self.cache_usage + int(sizes[shard_id]) > self.cache_limit:
            evictable = np.flatnonzero((states == _ShardState.LOCAL) & (sizes > 0))
            if not len(evictable):
                break
            self._evict_shard(int(evictable[access_times[evictable].argmin()]))
        self.cache_usage += int(sizes[shard_id])

    def _evict_shard(self, shard_id: int) -> None:
        self._stream_of(shard_id).check_elsewhere(self.shards[shard_id], has_come=bool(self._elsewhere[shard_id]))
        self._elsewhere[shard_id] = False
        self._shard_states[shard_id] = _ShardState.REMOTE
        self._verified[shard_id] = 0
        self._stream_of(shard_id).remove_shard(self.shards[shard_id])
        self.cache_usage -= int(self._sizes_in_cache()[shard_id])

    def _verify_shard(self, shard_id: int) -> bool:
        """Whether the file is there; raises DataError unless it is what the index says, after bringing it again.

        Asked for each sample. The file is hashed once on each node, and again should it be replaced.
        """
        path = self._path(shard_id)
        try:
            if self._verified[shard_id] == _state_of(path):
                return True
            stream, reader = self._stream_of(shard_id), self.shards[shard_id]
            state, damage = _state_of(path), _find_damage(path, reader)
            if damage and stream.remote:
                with self._lock_cache():  # until which somebody else may have mended it, or given it up
                    if damage := _find_damage(path, reader):
                        log.warning("%s is damaged: %s; it is downloaded again", path, damage)
                        self._bring_shard(shard_id, damage)
                    state, damage = _state_of(path), _find_damage(path, reader)
        except FileNotFoundError:
            return False  # it has not been downloaded yet, or given up again
        except OSError as error:
            raise DataError(f"{path} cannot be read on {socket.gethostname()}: {one_line(error)}") from error
        if damage:
            raise DataError(f"{path} is damaged: {damage}; {remedy(stream)}")
        self._verified[shard_id] = state
        return True

    def _path(self, shard_id: int) -> str:
        return os.path.join(folder_of(self._stream_of(shard_id)), self.table.text("raw_name", shard_id))

    def _stream_of(self, shard_id: int) -> CheckedStream:
        return self.streams[self.shards.stream_of(shard_id)]

    # The threads that fetch ------------------------------------------------------------------------------------------

    # StreamingDataset only logs what its two threads fail of, and then waits for ever for both to report their exit.

    def _prepare_thread(self, it: Any) -> None:
        try:
            self._prepare_ahead(it)
            it.on_exit()
        except Exception as error:
            self._end_iteration(it, error)

    def _prepare_ahead(self, it: Any) -> None:
        """Bring the shards of the next `predownload` samples.

        The ready thread brings what it finds missing, so it may overtake this one on a busy machine. Shards that were
        read since are not brought again: they would take the place of those that the reader needs.
        """
        while not it.should_exit() and not self._event.is_set():
            it.prepare_index = max(it.prepare_index, it.ready_index)
            if it.prepare_index == it.total:
                return
            if it.prepare_index - it.yield_index > self.predownload:
                sleep(TICK)
                continue
            if (sample_id := it.sample_ids[it.prepare_index]) != NO_SAMPLE:
                shard_id, _ = self.spanner[sample_id]
                self.prepare_shard(shard_id, blocking=False)
            it.prepare_index += 1

    def _ready_thread(self, it: Any) -> None:
        try:
            super()._ready_thread(it)
        except Exception as error:
            self._end_iteration(it, error)

    def _end_iteration(self, it: Any, error: Exception) -> None:
        self._background_error = error  # for `__iter__` to raise
        self._event.set()
        it.on_exit()


def _find_damage(path: str, reader: MDSReader) -> str:
    """As `streams.find_damage`; of an index that was written to, too, which no hash is of."""
    if damage := find_damage(path, reader.raw_data):
        return damage
    num_samples = int(np.fromfile(path, "<u4", 1)[0])  # an MDS shard begins with it
    return (
        "" if num_samples == reader.samples else f"it holds {num_samples} samples, {reader.samples} by its index.json"
    )


def _state_of(path: str) -> int:
    """Another for a file that was replaced or written to; never 0. Raises FileNotFoundError."""
    status = os.stat(path)
    return hash((status.st_ino, status.st_size, status.st_mtime_ns)) % 2**64 | 1
