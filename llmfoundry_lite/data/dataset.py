"""MDS shards -> rows of token ids: the same global batches on every number of nodes, ranks and workers.

`order.py` decides the order of samples, `cache.py` fetches and reads shards, `rows.py` decodes a sample, and
`loader.py` makes batches. A `TextDataset` combines them. Its methods are in the order in which they are called: opening
on all ranks, state and epochs, reading in a worker. The checks that all ranks make together are at the end.

A run's position in its data is the epoch, and the number of samples of that epoch that the run has trained on. These
are counted over all ranks, so they are a multiple of the global batch size.
"""

import os
import secrets
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import IO, Any, BinaryIO

import numpy as np
import torch
from streaming import Stream
from streaming.base.util import bytes_to_int, number_abbrev_to_int
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from llmfoundry_lite.config.data_schema import TextDatasetConfig
from llmfoundry_lite.config.data_stages import first_batches
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.data.cache import ShardCache
from llmfoundry_lite.data.folder_locks import hold_folder, shared_memory_folder
from llmfoundry_lite.data.order import (
    DEFAULT_WINDOW_SAMPLES,
    MAX_UNITS,
    NO_SAMPLE,
    ORDER_VERSION,
    EpochOrder,
    SampleOrder,
    ceil_divide,
    rows_and_steps_of_worker,
)
from llmfoundry_lite.data.rows import PAD_TOKEN, RowReader, Tokenizer, check_length, tokens_per_sample
from llmfoundry_lite.data.shard_table import read_indexes
from llmfoundry_lite.data.stages import StagedOrder
from llmfoundry_lite.data.streams import build_stages
from llmfoundry_lite.errors import DataError, OtherDataError, TransientDataError, UserError, list_names, one_line
from llmfoundry_lite.ranks.exchange import all_gather_json, broadcast_json, raising_on_all_ranks
from llmfoundry_lite.ranks.rank import return_freed_memory, this_rank

NUM_FETCHING_THREADS = 2
DEFAULT_PREDOWNLOAD_BATCHES = 8
"""How many batches ahead of the current one a worker fetches shards by default, as in StreamingDataset."""

# A worker computes its sample ids in pieces. A piece is usually one shuffled block, because a part of a block costs as
# much as all of it. Where blocks are tiny or huge, these are the bounds of a piece.
MIN_PIECE_SAMPLES = 1 << 14
MAX_PIECE_SAMPLES = 1 << 20


class TextDataset(IterableDataset):
    """Data set that yields this rank's rows of token ids, int64 [max_seq_len], in the order of `SampleOrder`.

    Its state does not depend on the numbers of nodes, ranks or workers, so a run may resume with other ones.
    """

    def __init__(
        self,
        config: TextDatasetConfig,
        *,
        max_seq_len: int,
        global_batch_size: int,
        drop_last: bool = True,
        evaluation: bool = False,
        vocab_size: int | None = None,
        tokenizer: Tokenizer | None = None,
        data_rank_and_size: tuple[int, int] | None = None,
        max_duration: Duration | None = None,
        max_samples: int | None = None,
    ) -> None:
        """Open the data on all ranks together. Collective.

        max_seq_len: tokens of a row, unless `config` has its own.
        global_batch_size: samples of a batch on all ranks together, a multiple of the number of data ranks.
        evaluation: read samples in file order, each exactly once. Rows of `PAD_TOKEN` fill up the last batch.
        vocab_size: the model's, to check token ids; None does not check them.
        tokenizer: needed only for shards of text.
        data_rank_and_size: this rank's index among the ranks that divide a global batch, and their number. They are
            needed where several ranks read the same samples, as in tensor parallelism. None takes all ranks of the
            launch.
        max_duration: duration of the run, which a stage's `until: 0.8dur` refers to.
        max_samples: limits an evaluation to the first samples in file order.

        Raises `DataError` for any fault of the data or of the arguments.
        """
        # The settings of a batch and of its rows.
        self.config = config
        self.rank = this_rank()
        self.data_rank, self.num_data_ranks = data_rank_and_size or (self.rank.rank, self.rank.world_size)
        if global_batch_size % self.num_data_ranks:
            raise DataError(
                f"a global batch of {global_batch_size} samples cannot be split evenly over {self.num_data_ranks} "
                f"ranks; use a multiple of {self.num_data_ranks}, or a number of ranks that divides {global_batch_size}"
            )
        self.max_seq_len = config.max_seq_len or max_seq_len
        self.global_batch_size = global_batch_size
        self.device_batch_size = global_batch_size // self.num_data_ranks
        self.is_evaluation = evaluation
        self.max_samples = max_samples
        self.reader = RowReader(
            self.max_seq_len, vocab_size, tokenizer, config.token_encoding_type, config.allow_truncation
        )
        self.predownload = DEFAULT_PREDOWNLOAD_BATCHES * self.device_batch_size
        """Number of samples ahead of the one being read whose shards a worker fetches."""
        if config.predownload is not None:
            self.predownload = config.predownload

        # The rows of a batch that this rank reads, and the position, which the methods under "State and epochs" change.
        self._assigned_rows: Sequence[int] | None = None
        """Row indices of each global batch that this rank reads, as `resume_with_rows` sets them. None means an even
        part of all rows, which depends on the rank."""
        self._earlier_rows: Sequence[int] = ()
        """Row indices that this rank also reads, of the batch that is `_num_batches_back` before the current one."""
        self._num_batches_back = 0

        self._cached_epoch: tuple[int, EpochOrder] | None = None
        """The epoch whose order was computed last, and its order. Workers inherit it when they are forked."""
        self._next_position = (0, 0)
        """Epoch, and number of its samples that are done, at which the next iteration begins."""
        self._epoch = 0
        """Epoch of the current iteration; before the first iteration, the epoch in which it begins."""
        self._shared_position = torch.tensor(self._next_position).share_memory_()
        """Position at which the current iteration begins, as in `_next_position`. It is in memory shared with the
        loader's workers, because persistent workers live through several epochs."""

        # Open the data.
        self.first_batches = first_batches(
            config, "train_loader.dataset", max_duration, global_batch_size, self.max_seq_len
        )
        self._locks: list[BinaryIO] = []
        """Open lock files. While this object lives, other launches cannot download into the data folders."""
        try:
            self._open(drop_last=drop_last and not evaluation)
        except BaseException:
            for lock in self._locks:  # at once, since the error may keep this object alive
                lock.close()
            raise

    def _open(self, *, drop_last: bool) -> None:
        """Open the data folders, the table of shards, the cache and the sample order. Collective.

        Sets `folders`, `cache`, `stages` and `_first_sample_of_shard`. The first rank of each node reads the indexes
        and writes the node's table of shards, which its other ranks map into memory. Each `data_errors_on_all_ranks`
        block ends with an exchange, so that an error on one rank is raised on all. Errors begin with `problem`.
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
            orders = [self._build_order(streams, drop_last) for streams in streams_of_stages]
            self.stages = StagedOrder(orders, self.first_batches)
            # All stages number shards and samples alike, so the stage with the most shards has the numbers of all.
            order_with_most_shards = max(orders, key=lambda order: len(order.first_sample_of_shard))
            self._first_sample_of_shard = order_with_most_shards.first_sample_of_shard

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

    def _build_order(self, streams: dict[int, Stream], drop_last: bool) -> SampleOrder:
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
            drop_last=drop_last,
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
                if "tokens" not in columns and self.reader.tokenizer is None:
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

    # State and epochs -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of rows that this rank yields in an epoch.

        Divided by the rank's batch size, as torch's DataLoader does for its own length, that is the number of global
        batches. Raises TypeError for a data set with stages, because their epochs differ in length.
        """
        if len(self.first_batches) > 1:
            raise TypeError("epochs of different stages have different lengths")
        return self.order.num_batches * self.device_batch_size

    def state_dict(self, num_samples: int, from_beginning: bool = True, *, epoch: int | None = None) -> dict[str, Any]:
        """Return the position in the data for a checkpoint, and what the order of samples depends on.

        `num_samples` is the number of samples of `epoch` that the run has trained on, over all ranks. `epoch` is that
        of the current iteration by default. Composer prescribes the signature; it always passes `from_beginning` true.

        The result is JSON-compatible, and the same on every rank. Without stages, `batch` and `stages` are not in it.
        """
        assert from_beginning
        if epoch is None:
            epoch = self._epoch

        # Streams that only later stages read are left out, so that they may still be changed.
        batch = self.stages.batches_before(epoch, num_samples // self.global_batch_size)
        num_streams = self.stages.num_streams_read(batch)
        state = {
            "epoch": epoch,
            "sample_in_epoch": num_samples,
            "seed": self.order.seed,
            "global_batch_size": self.global_batch_size,
            "order": self.order.fingerprint,
            "order_version": ORDER_VERSION,
            "streams": [folder.name for folder in self.folders[:num_streams]],
            "content": self.cache.table.content_digests[:num_streams],
        }
        if len(self.first_batches) > 1:
            state["batch"] = batch
            state["stages"] = self.stages.describe_begun_stages(batch)
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iteration begin at the position of a `state_dict`, which any number of ranks may have saved.

        Raises DataError unless this data set has the same samples in the same order up to that position.
        """
        self._check_settings(state)

        # Compare where the stages begin. A state without stages comes from a run with a single stage, which begins at
        # batch 0.
        steps = state["sample_in_epoch"] // self.global_batch_size
        batch = state.get("batch", state["epoch"] * self.order.num_batches + steps)
        stages = self.stages.describe_begun_stages(batch)
        saved_stages = [list(stage) for stage in state.get("stages", [[0, state["order"]]])]
        if [first_batch for first_batch, _ in stages] != [first_batch for first_batch, _ in saved_stages]:
            raise self._stages_error(batch, saved_stages)

        # Compare the data, then the orders. Different data is the likelier reason of a different order.
        self._check_content(state, self.stages.num_streams_read(batch))
        if stages != saved_stages:  # their orders differ
            raise DataError(
                f"the data (shards, streams, epoch size) or the shuffling is not what the checkpoint was trained with "
                f"(order {state['order']} there, {self.order.fingerprint} here): carrying on would repeat and skip "
                "samples; restore the data set and its settings"
            )

        # Check the position itself, and take it.
        if state["sample_in_epoch"] % self.global_batch_size:
            raise DataError(
                f"the checkpoint stands at sample {state['sample_in_epoch']} of its epoch, which is not between two "
                f"global batches of {self.global_batch_size}"
            )
        is_in_epoch = steps <= self.stages.num_batches(state["epoch"])
        if self.stages.batches_before(state["epoch"], steps) != batch or not is_in_epoch:
            raise self._stages_error(batch, saved_stages)
        self.set_position(state["epoch"], state["sample_in_epoch"])

    def _check_settings(self, state: dict[str, Any]) -> None:
        """Raise DataError unless a `state_dict` is complete and has this batch size, seed and version of the order."""
        required_keys = ("epoch", "sample_in_epoch", "seed", "global_batch_size", "order")
        missing = [key for key in required_keys if key not in state]
        if missing:
            raise DataError(
                f"the data state of the checkpoint lacks {', '.join(missing)} (it has {', '.join(sorted(state))}); "
                "a state saved by StreamingDataset's own order cannot be carried on"
            )

        # Compare the settings: (key of the state, value here, key of the configuration).
        settings = (
            ("global_batch_size", self.global_batch_size, "global_train_batch_size"),
            ("seed", self.order.seed, "train_loader.dataset.shuffle_seed"),
        )
        for key, value, name in settings:
            if state[key] != value:
                raise DataError(
                    f"{name} is {value}, but the checkpoint was trained with {state[key]}, and the order of the "
                    f"samples depends on it; set {name}={state[key]} to carry on"
                )
        saved_version = state.get("order_version", 1)  # the first release did not save it
        if saved_version != ORDER_VERSION:
            raise DataError(
                f"the checkpoint was trained in version {saved_version} of the sample order, this release has "
                f"version {ORDER_VERSION}; carry on with the release that saved it"
            )

    def _stages_error(self, batch: int, saved_stages: list[list[Any]]) -> DataError:
        """Return the error for a checkpoint whose stages began after other batches than in this configuration.

        `batch` is the number of batches that the checkpoint was trained on. `saved_stages` are its stages, each as
        [first batch, fingerprint].
        """
        begins = " and ".join(map(str, self.first_batches))
        saved_begins = " and ".join(str(first_batch) for first_batch, _ in saved_stages)
        return DataError(
            f"train_loader.dataset.stages: here they begin after batch {begins}; the checkpoint, of batch {batch}, was "
            f"trained with beginnings after batch {saved_begins}; only stages that begin after {batch} may be added or "
            "moved"
        )

    def _check_content(self, state: dict[str, Any], num_streams: int) -> None:
        """Compare the data that a checkpoint was trained with, and the first `num_streams` streams of this data set.

        `state` is the checkpoint's `state_dict`. Raises OtherDataError, which says how the data differ. A state of the
        first releases has no digests of the content, and passes; its fingerprint of the order is compared elsewhere.
        """
        digests = self.cache.table.content_digests[:num_streams]
        saved_digests = state.get("content", digests)
        if saved_digests == digests:
            return

        # Say how they differ: other order of the streams, other number of streams, or other content of some.
        names = [repr(name) if name else "the data" for name in state["streams"]]
        if sorted(saved_digests) == sorted(digests):
            difference = f"the streams stand in another order: {', '.join(names)} in the checkpoint"
        elif len(saved_digests) != len(digests):
            difference = f"{len(digests)} streams here, {len(saved_digests)} in the checkpoint: {', '.join(names)}"
        else:
            differences = []
            folders = self.folders[:num_streams]
            for folder, digest, name, saved_digest in zip(folders, digests, names, saved_digests, strict=True):
                if digest != saved_digest:
                    differences.append(f"{folder.path} holds {digest}, {name} in the checkpoint was {saved_digest}")
            difference = "; ".join(differences)
        raise OtherDataError(
            f"the data is not what the checkpoint was trained with: {difference}; restore the data, "
            "or begin a new run (load_weights_only=true takes the weights along)",
            difference=difference,
        )

    def resume_with_rows(
        self,
        row_indices: Sequence[int],
        epoch: int,
        sample_in_epoch: int,
        earlier_rows: Sequence[int] = (),
        num_batches_back: int = 0,
    ) -> None:
        """Let the next iteration begin at a position, and read `row_indices` of each batch instead of an even part.

        Each batch of this rank also has `earlier_rows` of the global batch that is `num_batches_back` before, which
        must be in the same epoch. Launches that train one model together do that when one of them fails: the others
        train the rows that it was to train.
        """
        self._assigned_rows = row_indices
        self._earlier_rows = earlier_rows
        self._num_batches_back = num_batches_back
        self.device_batch_size = len(row_indices) + len(earlier_rows)
        self.set_position(epoch, sample_in_epoch)

    def set_position(self, epoch: int, sample_in_epoch: int) -> None:
        """Let the next iteration begin after `sample_in_epoch` samples of an epoch, counted over all ranks."""
        self._epoch = epoch
        self._next_position = (epoch, sample_in_epoch)

    def begin_epoch(self, *, forks_workers: bool) -> None:
        """Fix the position at which the next iteration begins. The iteration after it begins with the next epoch.

        The loader calls this in the rank's process before it starts an iteration. If it `forks_workers` then, the order
        of the epoch is computed here, so that all workers share its memory, and memory that is no longer used is
        returned to the operating system before the fork.
        """
        self._shared_position[:] = torch.tensor(self._next_position)
        self._epoch, _ = self._next_position
        self._next_position = (self._epoch + 1, 0)
        if forks_workers:
            self._epoch_order(self._epoch)
            return_freed_memory()

    def _epoch_order(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch, and keep it for the next call. In an evaluation, all epochs are the same."""
        if self.is_evaluation:
            epoch = 0
        if self._cached_epoch is None or self._cached_epoch[0] != epoch:
            self._cached_epoch = (epoch, self.stages.build_epoch(epoch))
        return self._cached_epoch[1]

    @property
    def order(self) -> SampleOrder:
        """The sample order of the first stage, which is that of the whole run if there are no stages."""
        return self.stages.orders[0]

    # Reading ----------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Tensor]:
        """Yield this worker's rows, batch after batch, from the position that `begin_epoch` has fixed.

        Runs in a loader worker, or in the rank if there are none. An incomplete last batch that is not dropped is
        filled up with padding rows, so that every rank has the same number of rows.
        """
        # Read now rather than with the first row, because the position may change before that.
        epoch, sample_in_epoch = self._shared_position.tolist()
        return self._read_rows(epoch, sample_in_epoch)

    def _read_rows(self, epoch: int, sample_in_epoch: int) -> Iterator[Tensor]:
        """Yield this worker's rows [max_seq_len] of an epoch, without its first `sample_in_epoch` samples.

        Raises DataError. A worker passes only the class and text of an error on to its rank, so a transient fault
        gets a class of its own.
        """
        sample_ids = self._worker_sample_ids(epoch, sample_in_epoch)
        try:
            for shard, sample in self._read_ahead(sample_ids):
                if shard == NO_SAMPLE:
                    yield torch.full((self.max_seq_len,), PAD_TOKEN)
                else:
                    yield self.read_sample(shard, sample)
        except DataError as error:
            if not error.is_transient:
                raise
            raise TransientDataError(str(error)) from error

    def locate_sample(self, sample_id: int) -> tuple[int, int]:
        """Return the index of the shard that contains a sample, and the sample's index in the shard."""
        shard = int(self._first_sample_of_shard.searchsorted(sample_id, "right")) - 1
        return shard, sample_id - int(self._first_sample_of_shard[shard])

    def read_sample(self, shard: int, sample: int) -> Tensor:
        """Return the token ids of a sample, int64 [max_seq_len], fetching its shard if needed. Raises DataError."""
        columns = self.cache.read(shard, sample)
        try:
            return torch.from_numpy(self.reader.read(columns))
        except Exception as error:
            raise DataError(f"{self.cache.path(shard)}, sample {sample}: {one_line(error)}") from error

    def _worker_sample_ids(self, epoch: int, sample_in_epoch: int) -> Iterator[int]:
        """Yield the ids of the samples that this worker reads in the rest of an epoch, in the order of reading.

        The first `sample_in_epoch` samples of the epoch, counted over all ranks, are left out. Ids are computed in
        pieces of many batches, because a shuffled block can only be computed as a whole.
        """
        worker = 0
        num_workers = 1
        worker_info = get_worker_info()  # None outside a loader worker
        if worker_info is not None:
            worker = worker_info.id
            num_workers = worker_info.num_workers

        # A stage may end within an epoch. An evaluation has no stages, and reads the same batches in every epoch.
        num_batches = self.stages.num_batches(epoch)
        if self.is_evaluation:
            num_batches = self.order.num_batches
        epoch_order = self._epoch_order(epoch)
        row_indices, steps = rows_and_steps_of_worker(
            epoch_order.order,
            rank=self.data_rank,
            world_size=self.num_data_ranks,
            worker=worker,
            num_workers=num_workers,
            first_batch=sample_in_epoch // self.global_batch_size,
            num_batches=num_batches,
        )
        if self._assigned_rows is not None:
            row_indices = self._assigned_rows

        # A piece is one shuffled block, unless that has too few or too many samples. The worker's steps are every
        # `steps.step`-th batch.
        samples_per_step = max(len(row_indices), 1)
        steps_per_block = epoch_order.order.block_samples // steps.step
        min_steps = max(MIN_PIECE_SAMPLES // samples_per_step, 1)
        max_steps = ceil_divide(MAX_PIECE_SAMPLES, samples_per_step)
        steps_per_piece = min(max(steps_per_block, min_steps), max_steps)
        for first in range(0, len(steps), steps_per_piece):
            piece_steps = steps[first : first + steps_per_piece]
            ids_si = epoch_order.sample_ids(row_indices, piece_steps)  # [steps, row indices]
            if self._earlier_rows:
                back = self._num_batches_back
                earlier_steps = range(piece_steps.start - back, piece_steps.stop - back, piece_steps.step)
                ids_si = np.hstack([ids_si, epoch_order.sample_ids(self._earlier_rows, earlier_steps)])
            yield from ids_si.ravel().tolist()

    def _read_ahead(self, sample_ids: Iterator[int]) -> Iterator[tuple[int, int]]:
        """Yield the shard of each sample and the sample's index in it, once the shard is in the cache.

        Meanwhile threads fetch the shards of the next `predownload` samples. If a fetch fails, its error is raised when
        the sample would be yielded. For `NO_SAMPLE`, yields (NO_SAMPLE, 0).
        """
        pool = ThreadPoolExecutor(NUM_FETCHING_THREADS, thread_name_prefix="shard-fetch")
        # Samples to be yielded next: shard, index in the shard, and the fetch of the shard if it was not in the cache.
        pending: deque[tuple[int, int, Future[None] | None]] = deque()

        def next_sample() -> tuple[int, int]:
            """Wait until the next sample's shard is in the cache. Return the shard and the sample's index in it."""
            shard, sample, fetch = pending.popleft()
            if fetch is not None and not fetch.done():
                with self.cache.reporting_a_long_wait(shard):
                    wait([fetch])
            if fetch is not None:
                fetch.result()  # raises the thread's error
            return shard, sample

        try:
            for sample_id in sample_ids:
                if sample_id == NO_SAMPLE:
                    pending.append((NO_SAMPLE, 0, None))
                else:
                    shard, sample = self.locate_sample(sample_id)
                    is_ready = self.cache.is_ready(shard)
                    fetch = None if is_ready else pool.submit(self.cache.ensure_present, shard)
                    pending.append((shard, sample, fetch))
                if len(pending) > self.predownload:
                    yield next_sample()
            while pending:
                yield next_sample()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


# Checks that all ranks make together ----------------------------------------------------------------------------------


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

    `descriptions` are the results of `TextDataset._describe_data` on all ranks. Every rank has all of them, so every
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
