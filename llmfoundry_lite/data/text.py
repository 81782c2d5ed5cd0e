"""MDS shards -> batches of token ids, the same global batches on every world.

Owns the data set (reading samples, what can be wrong with them), its place in an epoch, collation, the loader and the
batch digest. Leaves the order itself to `order.py`, left-over shared memory to `shared_memory.py`, making shards to
`prepare.py`, and labels and loss to the training adapter. Downloading, caching and eviction are StreamingDataset's.

Shapes: b = samples in the batch of one rank, t = max_seq_len.
"""

import json
import multiprocessing
import os
import signal
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from threading import Lock, Thread
from time import sleep, time_ns
from typing import Any, Protocol

import numpy as np
import streaming.base.dataset
import torch
import xxhash
from numpy.typing import NDArray
from streaming import Stream, StreamingDataset
from streaming.base.dataset import _ShardState
from streaming.base.distributed import barrier, get_local_rank, get_world_size, maybe_init_dist
from streaming.base.hashing import get_hash
from streaming.base.world import World
from torch import Tensor
from torch.utils.data import DataLoader

from llmfoundry_lite.data.order import DEFAULT_WINDOW_SAMPLES, NO_SAMPLE, EpochOrder, SampleOrder, share_of_worker
from llmfoundry_lite.data.shared_memory import clean_stale_shared_memory, one_start_at_a_time, wait_for_folders
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.launch import is_lost_peer

PAD_TOKEN = -100
"""Stands where there is no token: it is neither an input nor a target. (The number is cross-entropy's ignore_index.)"""


class Tokenizer(Protocol):
    """What is needed of a tokenizer to read shards of text."""

    def encode(self, text: str) -> list[int]: ...


def build_text_loader(
    dataset: "TextDataset",
    *,
    num_workers: int = 0,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    timeout: float = 0,
) -> "TextLoader":
    """A DataLoader of `{"input_ids": int64 tensor [b, t]}`, one a global batch, in order for any `num_workers`."""
    return TextLoader(
        dataset,
        batch_size=dataset.device_batch_size,
        collate_fn=collate,
        worker_init_fn=_stay_with_the_rank,
        num_workers=num_workers,
        pin_memory=pin_memory,
        # torch refuses these three without workers, but a YAML may turn workers off with one override.
        prefetch_factor=prefetch_factor if num_workers else None,
        persistent_workers=persistent_workers and num_workers > 0,
        timeout=timeout if num_workers else 0,
    )


def build_text_dataset(
    *,
    max_seq_len: int,
    global_batch_size: int,
    local: str | None = None,
    remote: str | None = None,
    split: str | None = None,
    streams: Mapping[str, Mapping[str, Any]] | None = None,
    shuffle: bool = False,
    shuffle_seed: int = 9176,
    shuffle_block_size: int | None = None,
    epoch_size: int | str | None = None,
    drop_last: bool = True,
    evaluation: bool = False,
    vocab_size: int | None = None,
    tokenizer: Tokenizer | None = None,
    token_encoding_type: str = "int64",
    predownload: int | None = None,
    cache_limit: int | str | None = None,
    download_retry: int = 2,
    download_timeout: float = 60,
    validate_hash: str | None = None,
    keep_zip: bool = False,
    replication: int = 1,
) -> "TextDataset":
    """The data set of one folder (`local`, `remote`, `split`) or of several `streams`, named and weighted.

    Rank and world size are read from the environment, as StreamingDataset does (RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE). `replication` neighbouring ranks read the same samples and count as one rank: `global_batch_size`
    counts samples over all that read different ones, and must be a multiple of their number.

    With `evaluation`, samples come in file order, each exactly once, and the last batch is filled up with rows of
    `PAD_TOKEN`, so that every rank sees equally many batches of equal size.

    Raises `DataError` for everything that is wrong with the data or with the arguments.
    """
    described = {name: dict(stream) for name, stream in (streams or {}).items()}
    if bool(described) == bool(local or remote):
        raise DataError(
            "a data set is either `streams` or one folder (`local`, and `remote` if it is to be downloaded); "
            + ("both are set" if described else "neither is set")
        )
    if not described:
        described = {"": {"local": local, "remote": remote}}

    defaults = {
        "split": split,
        "download_retry": download_retry,
        "download_timeout": download_timeout,
        "validate_hash": validate_hash,
        "keep_zip": keep_zip,
    }
    return TextDataset(
        streams=_build_streams({name: defaults | stream for name, stream in described.items()}),
        max_seq_len=max_seq_len,
        global_batch_size=global_batch_size,
        shuffle=shuffle and not evaluation,
        shuffle_seed=shuffle_seed,
        window_samples=shuffle_block_size or DEFAULT_WINDOW_SAMPLES,
        epoch_size=epoch_size,
        drop_last=drop_last and not evaluation,
        same_every_epoch=evaluation,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        token_encoding_type=token_encoding_type,
        predownload=predownload,
        cache_limit=cache_limit,
        replication=replication,
    )


def collate(rows_t: Sequence[Tensor]) -> dict[str, Tensor]:
    """Rows [t] -> {"input_ids": [b, t]}."""
    return {"input_ids": torch.stack(list(rows_t))}


def batch_digest(tokens_bt: Tensor) -> int:
    """A number that two batches share if and only if they hold the same rows, in any order (padding rows count 0).

    The sum, modulo 2**64, of each row's xxh3_64 over its little-endian int64 bytes: summing the numbers of all ranks
    modulo 2**64 (int64 tensors wrap around just so) gives the digest of the global batch.
    """
    rows_bt = np.ascontiguousarray(tokens_bt.detach().cpu().numpy(), "<i8")
    return sum(xxhash.xxh3_64_intdigest(row_t.tobytes()) for row_t in rows_bt if (row_t >= 0).any()) % 2**64


def format_digest(digest: int) -> str:
    """16 hex digits; a digest that went through a signed int64 is understood too."""
    return f"{digest % 2**64:016x}"


def _stay_with_the_rank(worker: int) -> None:
    _outlive_preemption()
    _leave_with_the_rank()


def _outlive_preemption() -> None:
    """Serve the rank until it has saved: SLURM sends a signal to every process of a step, not to the ranks alone.

    Only the first SIGTERM is passed over. torch and multiprocessing end workers that way, each with one of its own.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _leave_with_the_rank() -> None:
    """End a DataLoader worker soon after its rank was killed.

    torch's workers look for their parent only between two batches; one that waits at StreamingDataset's barrier, for
    others that were killed as well, would wait, and hold on to its shared memory, for ever.
    """
    rank = multiprocessing.parent_process()
    assert rank is not None
    # A process of the fork server is not a child of the rank; one of `fork` may hold the pipe by which another would
    # see the rank end.
    is_child = multiprocessing.get_start_method() != "forkserver"

    def watch() -> None:
        while rank.is_alive() and (os.getppid() == rank.pid or not is_child):
            sleep(1)
        os._exit(1)

    Thread(target=watch, daemon=True).start()


class TextLoader(DataLoader):
    """torch's DataLoader, except that an error of a worker arrives as the one line it was raised with."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        try:
            yield from super().__iter__()
        except DataError as error:
            # torch wraps it as "Caught DataError in DataLoader worker process 0.\nOriginal Traceback …DataError: line",
            # and its traceback is part of a reference cycle, which keeps the iterator alive until the garbage
            # collector takes its queues apart before its workers: two processes that wait 5 s each.
            error.with_traceback(None)
            raise DataError(str(error).rsplit("DataError: ", 1)[-1].strip()) from None


class TextDataset(StreamingDataset):
    """StreamingDataset with the order of `SampleOrder` and a state that knows nothing of nodes, ranks or workers.

    Yields rows [t] of int64 token ids. Use `build_text_dataset`, which checks and names things for the user.
    """

    def __init__(
        self,
        *,
        streams: Sequence[Stream],
        max_seq_len: int,
        global_batch_size: int,
        shuffle: bool,
        shuffle_seed: int,
        window_samples: int = DEFAULT_WINDOW_SAMPLES,
        epoch_size: int | str | None = None,
        drop_last: bool = True,
        same_every_epoch: bool = False,
        vocab_size: int | None = None,
        tokenizer: Tokenizer | None = None,
        token_encoding_type: str = "int64",
        predownload: int | None = None,
        cache_limit: int | str | None = None,
        replication: int = 1,
    ) -> None:
        world_size = get_world_size() // replication
        if global_batch_size % world_size:
            raise DataError(
                f"a global batch of {global_batch_size} samples cannot be split evenly over {world_size} ranks; "
                f"use a multiple of {world_size}, or a number of ranks that divides {global_batch_size}"
            )
        self.max_seq_len = max_seq_len
        self.global_batch_size = global_batch_size
        self.device_batch_size = global_batch_size // world_size
        self.same_every_epoch = same_every_epoch
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self.token_dtype = np.dtype(token_encoding_type)
        self._background_error: Exception | None = None
        self._verified_shards: set[int] = set()
        # [epoch, sample_in_epoch] to begin with. Shared with the DataLoader's workers, persistent ones included, and
        # anonymous: StreamingDataset's own block is found by its name, and when that is gone (unlinked by the
        # resource tracker of a killed run) it starts over from sample 0 without a word.
        self._resume_state = torch.tensor([-1, 0]).share_memory_()

        initialised_dist = maybe_init_dist()
        try:
            with one_start_at_a_time() if get_local_rank() == 0 else nullcontext():
                if get_local_rank() == 0:
                    clean_stale_shared_memory()
                    wait_for_folders([_folder(stream) for stream in streams if stream.remote])
                barrier()
                super().__init__(
                    streams=streams,
                    batch_size=self.device_batch_size,
                    shuffle=shuffle,
                    shuffle_seed=shuffle_seed,
                    num_canonical_nodes=1,  # unused, but named, or StreamingDataset logs what it guesses
                    shuffle_block_size=window_samples,
                    epoch_size=epoch_size,
                    predownload=predownload,
                    cache_limit=cache_limit,
                    replication=replication,
                )
        except DataError:
            raise
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            if is_lost_peer(error):
                raise
            folders = ", ".join(stream.remote or _folder(stream) for stream in streams)
            raise DataError(f"cannot open the data set {folders}: {_one_line(error)}") from error
        finally:
            if initialised_dist:
                torch.distributed.destroy_process_group()

        self._check_columns()
        self._check_hashes()
        self.order = SampleOrder(
            shard_sizes_per_stream=[
                self.samples_per_shard[begin : begin + count]
                for begin, count in zip(self.shard_offset_per_stream, self.shards_per_stream, strict=True)
            ],
            choose_per_stream=[int(stream.choose) for stream in streams],
            num_lanes=global_batch_size,
            seed=shuffle_seed,
            shuffle=shuffle,
            drop_last=drop_last,
            window_samples=window_samples,
        )
        if not self.order.num_batches:
            raise DataError(
                f"an epoch of {self.order.num_samples} samples is smaller than one global batch of "
                f"{global_batch_size}; use a smaller batch, more data, or streams that repeat"
            )

    # Where we are ----------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Rows that this rank yields in an epoch, so that `len(loader)` is the number of global batches."""
        return self.order.num_batches * self.device_batch_size

    def state_dict(self, num_samples: int, from_beginning: bool) -> dict[str, Any]:
        """The place in the data, as Composer asks for it: `num_samples` is counted over all ranks that read different
        ones.

        Counted from the start of the epoch, or, if not `from_beginning`, from where this launch took it up.
        """
        resume_epoch, resume_sample = self._resume_state.tolist()
        # next_epoch moves on when an epoch begins; until then, what was loaded is where we are.
        epoch = max(self.next_epoch if self.next_epoch == resume_epoch else self.next_epoch - 1, 0)
        offset = resume_sample if epoch == resume_epoch and not from_beginning else 0
        return {
            "epoch": epoch,
            "sample_in_epoch": num_samples + offset,
            "seed": self.order.seed,
            "global_batch_size": self.global_batch_size,
            "order": self.order.fingerprint,
        }

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        """Begin the next epoch at the place that `state_dict` described, on whatever world that was."""
        missing = [key for key in ("epoch", "sample_in_epoch", "seed", "global_batch_size", "order") if key not in obj]
        if missing:
            raise DataError(
                f"the data state of the checkpoint lacks {', '.join(missing)} (it has {', '.join(sorted(obj))}); "
                "a state saved by StreamingDataset's own order cannot be carried on"
            )
        for key, now, name in (
            ("global_batch_size", self.global_batch_size, "global_train_batch_size"),
            ("seed", self.order.seed, "train_loader.dataset.shuffle_seed"),
        ):
            if obj[key] != now:
                raise DataError(
                    f"{name} is {now}, but the checkpoint was trained with {obj[key]}, and the order of the samples "
                    f"depends on it; set {name}={obj[key]} to carry on"
                )
        if obj["order"] != self.order.fingerprint:
            raise DataError(
                f"the data (shards, streams, epoch size) or the shuffling is not what the checkpoint was trained with "
                f"(order {obj['order']} there, {self.order.fingerprint} here): carrying on would repeat and skip "
                "samples; restore the data set and its settings"
            )
        if obj["sample_in_epoch"] % self.global_batch_size:
            raise DataError(
                f"the checkpoint stands at sample {obj['sample_in_epoch']} of its epoch, which is not between two "
                f"global batches of {self.global_batch_size}"
            )
        self._resume_state[:] = torch.tensor([obj["epoch"], obj["sample_in_epoch"]])
        self.next_epoch = obj["epoch"]

    def _resume(self, world: World, epoch: int) -> tuple[int, int]:
        """StreamingDataset's hook: the epoch that begins now, and how many of its samples are done already."""
        resume_epoch, resume_sample = self._resume_state.tolist()
        return epoch, resume_sample if epoch == resume_epoch else 0

    # Which samples ---------------------------------------------------------------------------------------------------

    def _get_work(self, epoch: int, sample_in_epoch: int) -> "_WorkerSampleIds":  # pyright: ignore[reportIncompatibleMethodOverride]
        """StreamingDataset's hook: the sample ids of this worker for the rest of the epoch."""
        # Nobody leaves before the local leader has moved next_epoch on, or a worker without work might begin the
        # next epoch under the number of this one.
        self._shared_barrier(self._unique_worker_world.workers_per_node)
        world = self._parallel_worker_world
        lanes, steps = share_of_worker(
            self.order,
            rank=world.rank,
            world_size=world.num_ranks,
            worker=world.worker_of_rank,
            num_workers=world.workers_per_rank,
            first_batch=sample_in_epoch // self.global_batch_size,
        )
        epoch_order = self.order.epoch(0 if self.same_every_epoch else epoch)
        last_ids_l = epoch_order.sample_ids(lanes, steps[-1:])
        self._num_padding_rows = int((last_ids_l == NO_SAMPLE).sum())
        return _WorkerSampleIds(epoch_order, lanes, steps)

    def __iter__(self) -> Iterator[Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """This worker's rows, batch after batch; padding rows fill up the last batch of an epoch that has them."""
        # StreamingDataset passes over NO_SAMPLE, and ends early, without an error, when one of its threads fails.
        iterator = None
        try:
            for row_t in super().__iter__():
                iterator = self._iterator
                yield row_t  # pyright: ignore[reportReturnType]
        finally:
            # Its threads would go on polling when the reader stops before the end, and it keeps every past iterator.
            if iterator:
                iterator.non_blocking_exit()
                iterator.sample_ids.forget()  # pyright: ignore[reportAttributeAccessIssue]
        if self._background_error:
            raise self._background_error
        for _ in range(self._num_padding_rows):
            yield torch.full((self.max_seq_len,), PAD_TOKEN)

    # Reading ---------------------------------------------------------------------------------------------------------

    def get_item(self, sample_id: int, retry: int = 7) -> Tensor:
        """Row [t] of a sample; downloads its shard if need be."""
        try:
            sample = super().get_item(sample_id, retry)
        except DataError:
            raise
        except Exception as error:
            if self._background_error:
                raise self._background_error from None
            self._verify_shard(sample_id)  # a damaged file explains whatever went wrong
            raise DataError(f"{self._place(sample_id)}: {_one_line(error)}") from error
        self._verify_shard(sample_id)
        try:
            return torch.from_numpy(self._row_of(sample))
        except Exception as error:
            raise DataError(f"{self._place(sample_id)}: {_one_line(error)}") from error

    def _row_of(self, sample: dict[str, Any]) -> NDArray[np.int64]:
        if "tokens" not in sample:
            assert self.tokenizer is not None
            tokens = np.asarray(self.tokenizer.encode(sample["text"])[: self.max_seq_len], np.int64)
            self._check_vocabulary(tokens)
            return np.pad(tokens, (0, self.max_seq_len - len(tokens)), constant_values=PAD_TOKEN)

        tokens = sample["tokens"]
        if isinstance(tokens, bytes):
            if len(tokens) % self.token_dtype.itemsize:
                raise DataError(
                    f"{len(tokens)} bytes of tokens are not whole {self.token_dtype} numbers; "
                    "set token_encoding_type to the type they were written with"
                )
            tokens = np.frombuffer(tokens, self.token_dtype)
        if not (isinstance(tokens, np.ndarray) and tokens.ndim == 1 and tokens.dtype.kind in "iu"):
            raise DataError(f"column tokens holds {type(tokens).__name__}, not a row of whole numbers")
        if len(tokens) < self.max_seq_len:
            raise DataError(
                f"the sample has {len(tokens)} tokens, but max_seq_len is {self.max_seq_len}; set max_seq_len="
                f"{len(tokens)}, or prepare the data again with --max-seq-len {self.max_seq_len}"
            )
        tokens = tokens[: self.max_seq_len].astype(np.int64)
        self._check_vocabulary(tokens)
        return tokens

    def _check_vocabulary(self, tokens: NDArray[np.int64]) -> None:
        if self.vocab_size is None or not len(tokens):
            return
        for token_id in (int(tokens.max()), int(tokens.min())):
            if not 0 <= token_id < self.vocab_size:
                raise DataError(
                    f"token id {token_id} is outside the vocabulary of {self.vocab_size}: the tokenizer does not "
                    "match the one the data was prepared with, or the shard is damaged"
                )

    def _verify_shard(self, sample_id: int) -> None:
        """Once for each shard, and each worker: is the file what the index says it is?"""
        shard_id, _ = self.spanner[sample_id]
        path = self._path(shard_id)
        if shard_id in self._verified_shards or not os.path.exists(path):
            return
        shard, stream = self.shards[shard_id], self.streams[self.stream_per_shard[shard_id]]
        expected_bytes, actual_bytes = shard.raw_data.bytes, os.path.getsize(path)  # pyright: ignore
        if actual_bytes != expected_bytes:
            raise DataError(
                f"{path} is damaged: it has {actual_bytes} bytes, {expected_bytes} according to its index.json; "
                + _remedy(stream)
            )
        # What is downloaded has been checked on arrival; what was here all along has not.
        if stream.validate_hash and not stream.remote:
            with open(path, "rb") as file:
                actual_hash = get_hash(stream.validate_hash, file.read())
            if actual_hash != shard.raw_data.hashes[stream.validate_hash]:  # pyright: ignore
                raise DataError(
                    f"{path} is damaged: its {stream.validate_hash} is not the one in index.json; {_remedy(stream)}"
                )
        self._verified_shards.add(shard_id)

    def _place(self, sample_id: int) -> str:
        shard_id, sample_in_shard = self.spanner[sample_id]
        return f"{self._path(shard_id)}, sample {sample_in_shard}"

    def _path(self, shard_id: int) -> str:
        stream = self.streams[self.stream_per_shard[shard_id]]
        return os.path.join(_folder(stream), self.shards[shard_id].raw_data.basename)  # pyright: ignore

    def _check_columns(self) -> None:
        for stream_id, stream in enumerate(self.streams):
            shard = self.shards[self.shard_offset_per_stream[stream_id]]
            columns = list(getattr(shard, "column_names", []))
            if "tokens" not in columns and "text" not in columns:
                raise DataError(
                    f"{_folder(stream)} has no column tokens or text, only {', '.join(columns)}; "
                    "prepare it with `llmfoundry-lite data prepare`, or write one of the two columns"
                )
            if "tokens" not in columns and self.tokenizer is None:
                raise DataError(f"{_folder(stream)} holds text, not tokens: name a tokenizer to read it")

    def _check_hashes(self) -> None:
        for stream_id, stream in enumerate(self.streams):
            hashes = self.shards[self.shard_offset_per_stream[stream_id]].raw_data.hashes  # pyright: ignore
            if stream.validate_hash and stream.validate_hash not in hashes:
                raise DataError(
                    f"validate_hash is {stream.validate_hash}, but the index.json of {_folder(stream)} has "
                    f"{', '.join(hashes) or 'no hashes'}; leave validate_hash out, or name one that is there"
                )

    # Failures of the threads that download ---------------------------------------------------------------------------

    def prepare_shard(self, shard_id: int, blocking: bool = True) -> None:
        """Download a shard. A failure is met by everybody who needs the shard; nobody is left waiting for ever."""
        # Asked once for every sample, by a thread that competes with the reader; StreamingDataset takes a file lock
        # each time (0.2 ms). Should the shard be evicted this very moment, get_item downloads it again.
        if not blocking and shard_id in self._verified_shards and self._shard_states[shard_id] == _ShardState.LOCAL:
            self._shard_access_times[shard_id] = time_ns()
            return
        try:
            super().prepare_shard(shard_id, blocking)
        except Exception as error:
            # Threads of other workers wait until the shard is there, and the DataLoader waits for those workers. So say
            # it is: they go to read it, find no file, and try the download themselves, with the same error to show.
            if self._shard_states[shard_id] == _ShardState.PREPARING:
                self._shard_states[shard_id] = _ShardState.LOCAL
            if self._cache_filelock.is_locked:
                self._cache_filelock.release(force=True)
            stream = self.streams[self.stream_per_shard[shard_id]]
            if "Checksum failure" in str(error) and os.path.exists(self._path(shard_id)):
                os.remove(self._path(shard_id))  # or the next run would take it for a good one
            raise DataError(f"cannot get {self._path(shard_id)} from {stream.remote}: {_one_line(error)}") from error

    # StreamingDataset only logs what its two threads fail of, and then waits for ever for both to report their exit.

    def _prepare_thread(self, it: Any) -> None:
        try:
            super()._prepare_thread(it)
        except Exception as error:
            self._end_iteration(it, error)

    def _ready_thread(self, it: Any) -> None:
        try:
            super()._ready_thread(it)
        except Exception as error:
            self._end_iteration(it, error)

    def _end_iteration(self, it: Any, error: Exception) -> None:
        self._background_error = error  # for `__iter__` to raise
        self._event.set()
        it.on_exit()


class _WorkerSampleIds:
    """The sample ids that one worker yields in an epoch: an array in all but memory.

    StreamingDataset's three threads index it, each a little ahead of the next, so the last few pieces are kept. A run
    resumes at once wherever it stands, and no process ever holds the order of a whole epoch.
    """

    _NUM_PIECES_KEPT = 4

    def __init__(self, epoch_order: EpochOrder, lanes: range, steps: range) -> None:
        self._epoch_order, self._lanes, self._steps = epoch_order, lanes, steps
        # One shuffled block is the least that can be worked out, unless that is very little or very much.
        steps_per_block = epoch_order.order.block_samples // steps.step
        self._steps_per_piece = min(max(steps_per_block, (1 << 14) // len(lanes), 1), -(-(1 << 20) // len(lanes)))
        self._pieces: dict[int, NDArray[np.int64]] = {}
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._steps) * len(self._lanes)

    def __getitem__(self, index: int) -> int:
        piece, index_in_piece = divmod(index, self._steps_per_piece * len(self._lanes))
        with self._lock:
            if piece not in self._pieces:
                first_step = piece * self._steps_per_piece
                steps = self._steps[first_step : first_step + self._steps_per_piece]
                self._pieces[piece] = self._epoch_order.sample_ids(self._lanes, steps).ravel()
                if len(self._pieces) > self._NUM_PIECES_KEPT:
                    del self._pieces[min(self._pieces)]
            return int(self._pieces[piece][index_in_piece])

    def forget(self) -> None:
        """Free the memory. (Whoever still asks gets the same answers, worked out anew.)"""
        with self._lock:
            self._pieces.clear()


class _ShardBounds:
    """Sample id -> (shard, sample in shard), by bisection.

    StreamingDataset's Spanner does the same by way of an array of all samples: for C4 (170 M samples in 42,000 shards),
    4 s and 1.4 GB in every rank.
    """

    def __init__(self, shard_sizes: NDArray[np.int64]) -> None:
        self._bounds = [0, *np.cumsum(shard_sizes).tolist()]

    def __getitem__(self, sample_id: int) -> tuple[int, int]:
        if not 0 <= sample_id < self._bounds[-1]:
            raise IndexError(f"sample {sample_id} of {self._bounds[-1]}")
        shard = bisect_right(self._bounds, sample_id) - 1
        return shard, int(sample_id) - self._bounds[shard]


streaming.base.dataset.Spanner = _ShardBounds  # made in the middle of StreamingDataset's constructor


def _build_streams(described: Mapping[str, Mapping[str, Any]]) -> list[Stream]:
    """StreamingDataset's streams, after checking what it would report late, obscurely or not at all."""
    streams, names_by_folder = [], {}
    for name, description in described.items():
        where = f"stream {name}: " if name else ""
        local, remote = description.get("local"), description.get("remote")
        if not local:
            raise DataError(f"{where}`local` is not set; name the folder that {remote or 'the data'} is to be kept in")
        if remote == local:
            description = {**description, "remote": None}
        try:
            stream = Stream(**description)
        except (TypeError, ValueError) as error:
            raise DataError(f"{where}{_one_line(error)}") from error
        if not stream.remote:
            _check_local_folder(_folder(stream), where)
        other = names_by_folder.setdefault(os.path.realpath(_folder(stream)), name)
        if other != name:
            raise DataError(f"streams {other} and {name} both use the folder {_folder(stream)}; give each its own")
        streams.append(stream)
    return streams


def _check_local_folder(folder: str, where: str) -> None:
    index = os.path.join(folder, "index.json")
    if not os.path.isdir(folder):
        raise DataError(
            f"{where}there is no data folder {folder}; make it with `llmfoundry-lite data prepare --out …`, "
            "or correct `local` and `split`, or set `remote` to download it"
        )
    if not os.path.exists(index):
        splits = sorted(entry.name for entry in os.scandir(folder) if os.path.exists(f"{entry.path}/index.json"))
        raise DataError(
            f"{where}{folder} has no index.json, so it is not a finished MDS data set; "
            + (f"set `split` to one of: {', '.join(splits)}" if splits else "prepare the data again")
        )
    try:
        with open(index, encoding="utf-8") as file:
            content = json.load(file)
    except ValueError as error:
        raise DataError(f"{where}{index} is not JSON ({_one_line(error)}); prepare the data again") from error
    if not isinstance(content, dict) or content.get("version") != 2 or not content.get("shards"):
        raise DataError(f"{where}{index} lists no shards of MDS version 2; prepare the data again")


def _folder(stream: Stream) -> str:
    return os.path.join(stream.local, stream.split) if stream.split else stream.local


def _remedy(stream: Stream) -> str:
    return "delete it, and it is downloaded again" if stream.remote else "prepare the data again"


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
