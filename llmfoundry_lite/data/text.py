"""MDS shards -> rows of token ids, the same global batches on every world.

Owns the data set: reading samples, what can be wrong with them, and its place in an epoch. Leaves the order itself to
`order.py`, folders to `streams.py`, batches and workers to `loader.py`, left-over shared memory to `shared_memory.py`,
making shards to `prepare.py`, and labels and loss to the training adapter. Downloading, caching and eviction are
StreamingDataset's.

Shapes: t = max_seq_len.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from time import time_ns
from typing import Any, Protocol

import numpy as np
import streaming.base.dataset
import torch
from numpy.typing import NDArray
from streaming import Stream, StreamingDataset
from streaming.base.dataset import _ShardState
from streaming.base.distributed import barrier, get_local_rank, get_world_size, maybe_init_dist
from streaming.base.hashing import get_hash
from streaming.base.world import World
from torch import Tensor

from llmfoundry_lite.data.lazy_arrays import ShardBounds, WorkerSampleIds
from llmfoundry_lite.data.order import DEFAULT_WINDOW_SAMPLES, NO_SAMPLE, SampleOrder, share_of_worker
from llmfoundry_lite.data.shared_memory import clean_stale_shared_memory, one_start_at_a_time, wait_for_folders
from llmfoundry_lite.data.streams import build_streams, folder_of, one_line, remedy
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.launch import is_lost_peer

PAD_TOKEN = -100
"""Stands where there is no token: it is neither an input nor a target. (The number is cross-entropy's ignore_index.)"""

streaming.base.dataset.Spanner = ShardBounds  # made in the middle of StreamingDataset's constructor


class Tokenizer(Protocol):
    """What is needed of a tokenizer to read shards of text."""

    def encode(self, text: str) -> list[int]: ...


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
        streams=build_streams({name: defaults | stream for name, stream in described.items()}),
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
                    wait_for_folders([folder_of(stream) for stream in streams if stream.remote])
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
            folders = ", ".join(stream.remote or folder_of(stream) for stream in streams)
            raise DataError(f"cannot open the data set {folders}: {one_line(error)}") from error
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

    def _get_work(self, epoch: int, sample_in_epoch: int) -> WorkerSampleIds:  # pyright: ignore[reportIncompatibleMethodOverride]
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
        return WorkerSampleIds(epoch_order, lanes, steps)

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
            raise DataError(f"{self._place(sample_id)}: {one_line(error)}") from error
        self._verify_shard(sample_id)
        try:
            return torch.from_numpy(self._row_of(sample))
        except Exception as error:
            raise DataError(f"{self._place(sample_id)}: {one_line(error)}") from error

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
                + remedy(stream)
            )
        # What is downloaded has been checked on arrival; what was here all along has not.
        if stream.validate_hash and not stream.remote:
            with open(path, "rb") as file:
                actual_hash = get_hash(stream.validate_hash, file.read())
            if actual_hash != shard.raw_data.hashes[stream.validate_hash]:  # pyright: ignore
                raise DataError(
                    f"{path} is damaged: its {stream.validate_hash} is not the one in index.json; {remedy(stream)}"
                )
        self._verified_shards.add(shard_id)

    def _place(self, sample_id: int) -> str:
        shard_id, sample_in_shard = self.spanner[sample_id]
        return f"{self._path(shard_id)}, sample {sample_in_shard}"

    def _path(self, shard_id: int) -> str:
        stream = self.streams[self.stream_per_shard[shard_id]]
        return os.path.join(folder_of(stream), self.shards[shard_id].raw_data.basename)  # pyright: ignore

    def _check_columns(self) -> None:
        for stream_id, stream in enumerate(self.streams):
            shard = self.shards[self.shard_offset_per_stream[stream_id]]
            columns = list(getattr(shard, "column_names", []))
            if "tokens" not in columns and "text" not in columns:
                raise DataError(
                    f"{folder_of(stream)} has no column tokens or text, only {', '.join(columns)}; "
                    "prepare it with `llmfoundry-lite data prepare`, or write one of the two columns"
                )
            if "tokens" not in columns and self.tokenizer is None:
                raise DataError(f"{folder_of(stream)} holds text, not tokens: name a tokenizer to read it")

    def _check_hashes(self) -> None:
        for stream_id, stream in enumerate(self.streams):
            hashes = self.shards[self.shard_offset_per_stream[stream_id]].raw_data.hashes  # pyright: ignore
            if stream.validate_hash and stream.validate_hash not in hashes:
                raise DataError(
                    f"validate_hash is {stream.validate_hash}, but the index.json of {folder_of(stream)} has "
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
            raise DataError(f"cannot get {self._path(shard_id)} from {stream.remote}: {one_line(error)}") from error

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
