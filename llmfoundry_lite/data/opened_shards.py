"""Opening the shards of a data set on all ranks together: folders, the table of shards, the cache, the sample orders.

`OpenedShards` does that when it is constructed, and a `TextDataset` reads what it has opened. Its methods are in the
order in which they are called. The checks that all ranks make together are at the end.
"""

import os
import secrets
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import IO, Any, BinaryIO

import numpy as np
from streaming import Stream
from streaming.base.util import bytes_to_int, number_abbrev_to_int

from llmfoundry_lite.config.data_schema import TextDatasetConfig
from llmfoundry_lite.data.cache import ShardCache
from llmfoundry_lite.data.folder_locks import hold_folder, shared_memory_folder
from llmfoundry_lite.data.order import DEFAULT_WINDOW_SAMPLES, MAX_UNITS, SampleOrder
from llmfoundry_lite.data.rows import check_length, tokens_per_sample
from llmfoundry_lite.data.shard_table import read_indexes
from llmfoundry_lite.data.stages import StagedOrder
from llmfoundry_lite.data.streams import ShardFolder, build_stages
from llmfoundry_lite.errors import DataError, UserError, list_names, one_line
from llmfoundry_lite.ranks.exchange import all_gather_json, broadcast_json, raising_on_all_ranks
from llmfoundry_lite.ranks.rank import this_rank


class OpenedShards:
    """Shards of a data set that this rank has opened together with all others, and the orders of their samples."""

    folders: list[ShardFolder]
    """The folders of all stages."""
    cache: ShardCache
    """The shards of these folders. It has the table that describes them."""
    stages: StagedOrder
    """The order of samples in each stage."""
    first_sample_of_shard: np.ndarray
    """Id of the first sample of each shard [num_shards]. All stages number shards and samples alike."""

    def __init__(
        self,
        config: TextDatasetConfig,
        *,
        max_seq_len: int,
        global_batch_size: int,
        first_batches: Sequence[int],
        drop_last: bool,
        evaluation: bool,
        has_tokenizer: bool,
        max_samples: int | None,
    ) -> None:
        """Open the shards. Collective.

        max_seq_len: tokens of a row.
        first_batches: the batches at which stages begin.
        drop_last: leave out samples at the end of an epoch that are too few for a global batch.
        evaluation: the samples are read in file order.
        has_tokenizer: there is one for shards of text.
        max_samples: limits the order to the first samples; None to all of them.

        Raises `DataError` for any fault of the data.
        """
        self.config = config
        self.rank = this_rank()
        self.max_seq_len = max_seq_len
        self.global_batch_size = global_batch_size
        self.first_batches = first_batches
        self.drop_last = drop_last
        self.is_evaluation = evaluation
        self.has_tokenizer = has_tokenizer
        self.max_samples = max_samples
        self._locks: list[BinaryIO] = []
        """Open lock files. While this object lives, other launches cannot download into the data folders."""
        try:
            self._open()
        except BaseException:
            for lock in self._locks:  # at once, since the error may keep this object alive
                lock.close()
            raise

    def _open(self) -> None:
        """Open the data folders, the table of shards, the cache and the sample orders. Collective.

        Sets the attributes that the class declares. The first rank of each node reads the indexes and writes the
        node's table of shards, which its other ranks map into memory. Each `data_errors_on_all_ranks` block ends with
        an exchange, so that an error on one rank is raised on all. Errors begin with `problem`.
        """
        # Read the configuration, without touching the data.
        problem = "cannot open the data set"
        with data_errors_on_all_ranks(problem):
            self.folders, streams_of_stages = build_stages(self.config)
            cache_limit = self.config.cache_limit
            if isinstance(cache_limit, str):
                cache_limit = bytes_to_int(cache_limit)
        problem += " " + ", ".join(folder.remote or folder.path for folder in self.folders)

        # The first rank of each node locks the folders, and writes the table of shards.
        launch_id = broadcast_json(secrets.token_hex(8))
        is_first_of_node = self.rank.local_rank == 0
        table_file = None
        table_of_this_rank = None
        with data_errors_on_all_ranks(problem):
            if is_first_of_node:
                self._hold_folders(launch_id, exclusive=True)
                table_file, metadata = self._write_table()
                table_of_this_rank = (f"/proc/{os.getpid()}/fd/{table_file.fileno()}", metadata)
        # A path and metadata from the first rank of each node, None from the others.
        tables_of_ranks = all_gather_json(table_of_this_rank)

        # Every rank opens the table of its node, and computes the order of samples from it.
        with data_errors_on_all_ranks(problem):
            if not is_first_of_node:
                self._hold_folders(launch_id, exclusive=False)
            first_rank_of_node = self.rank.rank - self.rank.local_rank
            table_path, metadata = table_of_this_rank or tables_of_ranks[first_rank_of_node]
            self.cache = ShardCache(self.folders, table_path, metadata, cache_limit)
            if is_first_of_node:
                self.cache.check_cache_limit()
                self.cache.find_present_shards()
            self._check_columns()
            orders = [self._build_order(streams) for streams in streams_of_stages]
            self.stages = StagedOrder(orders, self.first_batches)
            # All stages number shards and samples alike, so the stage with the most shards has the numbers of all.
            order_with_most_shards = max(orders, key=lambda order: len(order.first_sample_of_shard))
            self.first_sample_of_shard = order_with_most_shards.first_sample_of_shard

        # The nodes may have different copies of the data.
        check_same_on_all_ranks(all_gather_json(self._describe_data()))
        if table_file is not None:
            table_file.close()  # all ranks of the node have opened it by now

    def _hold_folders(self, launch_id: str, *, exclusive: bool) -> None:
        """Lock all data folders as long as this object lives.

        With `exclusive`, other launches are kept out of the folders that this one downloads into, and DataError is
        raised if another launch is already using one. Otherwise this rank only joins the lock that the first rank of
        its node holds. `launch_id` is the same on all ranks.
        """
        # Every launch locks in the same order, so that no two wait for each other.
        folders = sorted(self.folders, key=lambda folder: os.path.realpath(folder.path))
        for folder in folders:
            os.makedirs(folder.path, exist_ok=True)
            lock = hold_folder(folder.path, launch_id, exclusive=exclusive and bool(folder.remote))
            if lock is not None:
                self._locks.append(lock)

    def _write_table(self) -> tuple[IO[bytes], dict[str, Any]]:
        """Write this node's table of shards into shared memory. Runs on the first rank of each node.

        The file has no name, so that nothing is left behind if the process is killed. Returns the file, which must stay
        open until all ranks of the node have opened it, and the metadata that `ShardTable` needs together with it.
        """
        rows, metadata = read_indexes(
            [folder.fetch_indexes() for folder in self.folders],
            [folder.stream.validate_hash for folder in self.folders],
            allow_unhashed_shards=self.config.allow_unhashed_shards,
        )
        try:
            table_file = TemporaryFile(dir=shared_memory_folder())  # noqa: SIM115 (until all ranks have opened it)
            np.save(table_file, rows)
            table_file.flush()
        except OSError:
            raise DataError(
                f"no space left in {shared_memory_folder()} for the table of shards, about 150 bytes for each; "
                "make it larger (a container's with --shm-size, or --ipc=host)"
            ) from None
        return table_file, metadata

    def _build_order(self, streams: dict[int, Stream]) -> SampleOrder:
        """Build the sample order of one stage. Raises DataError if an epoch is too short or too long.

        `streams` are the stage's streams, by the index of their folder in `self.folders`. Folders that only later
        stages read are left out, so that they do not change this order's fingerprint.
        """
        epoch_samples_per_stream = self._count_epoch_samples(streams)
        order = SampleOrder(
            shard_sizes_per_stream=[self._shard_sizes(stream) for stream in range(len(epoch_samples_per_stream))],
            epoch_samples_per_stream=epoch_samples_per_stream,
            batch_size=self.global_batch_size,
            seed=self.config.shuffle_seed,
            shuffle=self.config.shuffle and not self.is_evaluation,
            drop_last=self.drop_last,
            max_samples=self.max_samples,
            window_samples=self.config.shuffle_block_size or DEFAULT_WINDOW_SAMPLES,
        )

        # An epoch must have at least a batch, and few enough units (shards or parts of shards) to be shuffled.
        if not order.num_batches:
            raise DataError(
                f"an epoch of {order.num_samples} samples is smaller than one global batch of {order.batch_size}; "
                "use a smaller batch, more data, or streams that repeat"
            )
        if order.max_units > MAX_UNITS:
            raise DataError(
                f"an epoch of {order.num_samples} samples reads {len(self.cache.table)} shards so often that "
                f"{order.max_units} pieces would have to be shuffled, at most {MAX_UNITS} can be; use a smaller "
                "epoch_size or repeat, and more epochs"
            )
        order.first_sample_of_shard.setflags(write=False)  # computed before the fork, so that workers share it
        return order

    def _shard_sizes(self, stream: int) -> np.ndarray:
        """Return the number of samples in each shard of a stream [num_shards]."""
        return np.ascontiguousarray(self.cache.table.rows_of_stream(stream)["samples"])

    def _count_epoch_samples(self, streams: dict[int, Stream]) -> list[int]:
        """Count the samples that an epoch takes from each folder, by the proportion, repeat or choose of its stream.

        `streams` are by the index of their folder; this sets `choose` of every one. Returns a count for each folder up
        to the last one in `streams`, with 0 for folders that only other stages read. Folder 0 with 100 samples that are
        repeated twice, and folder 2 with 50 samples, have the result [200, 0, 50].

        Raises DataError for a folder without samples.
        """
        samples_per_stream = np.array([self._shard_sizes(index).sum() for index in streams])
        for index, num_samples in zip(streams, samples_per_stream, strict=True):
            if not num_samples:
                raise DataError(f"{self.folders[index].path} holds no samples; prepare the data again")

        # StreamingDataset's function decides how many samples each stream contributes. `epoch_size` may be "10k".
        epoch_size = self.config.epoch_size
        epoch_samples = number_abbrev_to_int(epoch_size) if epoch_size else None
        Stream.apply_weights(list(streams.values()), samples_per_stream, epoch_samples, self.config.shuffle_seed)
        samples_per_folder = [0] * (max(streams) + 1)
        for index, stream in streams.items():
            samples_per_folder[index] = int(stream.choose)
        return samples_per_folder

    def _check_columns(self) -> None:
        """Check the columns of all shards, as their indexes describe them.

        Raises DataError for shards that hold neither tokens nor text, for text without a tokenizer, and for samples
        whose length does not fit `max_seq_len`.
        """
        for index, folder in enumerate(self.folders):
            # Each shard must have tokens, or text and a tokenizer to encode it.
            for columns in self.cache.table.columns_of_stream(index):
                if "tokens" not in columns and "text" not in columns:
                    raise DataError(
                        f"{folder.path} has no column tokens or text, only {list_names(columns)}; "
                        "prepare it with `llmfoundry-lite data prepare`, or write one of the two columns"
                    )
                if "tokens" not in columns and not self.has_tokenizer:
                    raise DataError(f"{folder.path} holds text, not tokens: name a tokenizer to read it")

            # If the type of the column has a length, as in `ndarray:uint16:2048`, all samples have it.
            for token_type in self.cache.table.token_types_of_stream(index):
                num_tokens = tokens_per_sample(token_type)
                if num_tokens is not None:
                    subject = f"samples of {folder.path} have"
                    allow_truncation = self.config.allow_truncation
                    check_length(num_tokens, self.max_seq_len, subject, allow_truncation=allow_truncation)

    def _describe_data(self) -> dict[str, Any]:
        """Describe the data as this rank sees it, for `check_same_on_all_ranks`.

        Returns JSON-compatible data: the node; the stages' first batches and order fingerprints; and for each stream
        its name, the digest of its content, and a text for an error.
        """
        node = f"node {self.rank.rank // self.rank.local_world_size} ({socket.gethostname()})"
        streams = []
        for index, folder in enumerate(self.folders):
            content = self.cache.table.content_digests[index]
            sizes = self._shard_sizes(index)
            source = folder.remote or os.path.abspath(folder.path)
            text = f"{source} on {node} has {sizes.sum()} samples in {len(sizes)} shards ({content})"
            streams.append({"name": folder.name, "content": content, "text": text})
        fingerprints = [order.fingerprint for order in self.stages.orders]
        return {"node": node, "order": [self.first_batches, fingerprints], "streams": streams}


@contextmanager
def data_errors_on_all_ranks(problem: str) -> Iterator[None]:
    """Context manager: raise an error that one rank meets in the block on every rank. Collective.

    Without it, the other ranks would wait forever for the one that has left. An error that a disk, a remote or a
    setting may cause becomes a DataError that begins with `problem`, such as "cannot open the data set". Any other
    error is a bug, and keeps its class on the rank that meets it.
    """
    with raising_on_all_ranks():
        try:
            yield
        except UserError:
            raise
        except (OSError, RuntimeError, ValueError, KeyError, OverflowError) as error:
            raise DataError(f"{problem}: {one_line(error)}") from error


def check_same_on_all_ranks(descriptions: Sequence[dict[str, Any]]) -> None:
    """Raise DataError unless all ranks have the same data in the same order.

    `descriptions` are the results of `OpenedShards._describe_data` on all ranks. Every rank has all of them, so every
    rank raises the same error. It names the first rank that differs from the majority, and the first of the majority.
    """
    # Find the ranks that differ from the majority.
    data_of_ranks = []
    for description in descriptions:
        contents = [stream["content"] for stream in description["streams"]]
        data_of_ranks.append((description["order"], contents))
    majority_data = max(data_of_ranks, key=data_of_ranks.count)
    differing_ranks = [rank for rank, data in enumerate(data_of_ranks) if data != majority_data]
    if not differing_ranks:
        return

    # Describe how the first of them differs. If all streams have the same content, their order does.
    majority = descriptions[data_of_ranks.index(majority_data)]
    other = descriptions[differing_ranks[0]]
    differences = []
    for majority_stream, other_stream in zip(majority["streams"], other["streams"], strict=False):
        if majority_stream["content"] != other_stream["content"]:
            name = majority_stream["name"] or "the data"
            differences.append(f"{name}: {other_stream['text']}, but {majority_stream['text']}")
    difference = "; ".join(differences) or "the same shards, but other streams, weights, seed, batch size or shuffling"
    raise DataError(
        f"{other['node']} reads other data than {majority['node']}: {difference}; give every node the same data and "
        "configuration"
    )
