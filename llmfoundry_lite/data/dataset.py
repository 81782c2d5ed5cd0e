"""MDS shards -> rows of token ids: the same global batches on every number of nodes, ranks and workers.

`order.py` says which samples come when, `cache.py` fetches and reads shards, `rows.py` decodes a sample, and
`loader.py` makes batches. A `TextDataset` puts them together. Its methods stand in the order in which they are used:
opening on all ranks, state and epochs, reading in a worker. The checks that all ranks make together are at the end.

Three numbers tell where a run is in its data: the epoch, the number of samples of that epoch that are done (over all
ranks, so a multiple of the global batch size), and the number of batches since the run began.
"""

import os
import secrets
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
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
"""Batches of a rank whose shards are fetched ahead by default, as StreamingDataset does."""

# Sample ids are computed in pieces, and a piece is mostly one shuffled block, since a part of a block costs as much as
# the whole. These are the bounds for blocks that are tiny or huge.
MIN_PIECE_SAMPLES = 1 << 14
MAX_PIECE_SAMPLES = 1 << 20


class TextDataset(IterableDataset):
    """Yields this rank's rows [max_seq_len] of int64 token ids, in the order of `SampleOrder`.

    Its state knows nothing of nodes, ranks or workers, so a run carries on with other numbers of them.
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
        share: tuple[int, int] | None = None,
        max_duration: Duration | None = None,
        max_samples: int | None = None,
    ) -> None:
        """Open the data on all ranks together. Collective.

        `share` is this rank's part of each batch and the number of parts, where some ranks read the same samples. With
        `evaluation`, samples come in file order, each exactly once, and rows of `PAD_TOKEN` fill up the last batch.
        `max_duration` is the run's, for a stage's `until: 0.8dur`. `max_samples` limits an evaluation to the first
        samples, on any number of ranks.

        Raises `DataError` for any fault of the data or of the arguments.
        """
        self.config = config
        self.rank = this_rank()
        self.data_rank, self.num_data_ranks = share or (self.rank.rank, self.rank.world_size)
        if global_batch_size % self.num_data_ranks:
            raise DataError(
                f"a global batch of {global_batch_size} samples cannot be split evenly over {self.num_data_ranks} "
                f"ranks; use a multiple of {self.num_data_ranks}, or a number of ranks that divides {global_batch_size}"
            )
        self.max_seq_len = config.max_seq_len or max_seq_len
        self.global_batch_size = global_batch_size
        self.device_batch_size = global_batch_size // self.num_data_ranks
        self.same_every_epoch = evaluation
        self.max_samples = max_samples
        self.reader = RowReader(
            self.max_seq_len, vocab_size, tokenizer, config.token_encoding_type, config.allow_truncation
        )
        self.predownload = DEFAULT_PREDOWNLOAD_BATCHES * self.device_batch_size
        """Samples of a worker whose shards are fetched ahead."""
        if config.predownload is not None:
            self.predownload = config.predownload

        # Rows of a batch, set by `continue_with`. None is an even share of all, which depends on the rank.
        self._assigned_rows: Sequence[int] | None = None
        self._earlier_rows: Sequence[int] = ()
        """Rows that each batch also has, of the batch `_num_batches_back` before it."""
        self._num_batches_back = 0

        self._laid_out: tuple[int, EpochOrder] | None = None
        """Number and order of the last epoch that was laid out. Workers inherit it when they are forked."""
        self._next_start = (0, 0)
        """Epoch, and number of its samples that are done, at which the next iteration begins."""
        self._epoch = 0
        """Epoch of the current iteration; before the first, the one that it begins in."""
        self._shared_start = torch.tensor(self._next_start).share_memory_()
        """Where the current iteration begins, as in `_next_start`. It is shared with the loader's workers, which may
        outlive an epoch."""

        self.first_batches = first_batches(
            config, "train_loader.dataset", max_duration, global_batch_size, self.max_seq_len
        )
        self._locks: list[BinaryIO] = []
        """Open files, whose locks keep other launches out of the folders as long as this object lives."""
        try:
            self._open(drop_last=drop_last and not evaluation)
        except BaseException:
            for lock in self._locks:  # at once, since the error may keep this object alive
                lock.close()
            raise

    def _open(self, *, drop_last: bool) -> None:
        """Open folders, table, cache and order. Sets `folders`, `cache`, `stages` and `_first_sample_of_shard`.

        Collective: each `data_errors_on_all_ranks` ends with an exchange, so that the error of one rank ends all. The
        first rank of each node reads the indexes and writes the node's table, and the others map it.
        """
        task = "cannot open the data set"
        with data_errors_on_all_ranks(task):
            self.folders, streams_of_stages = build_stages(self.config)
            cache_limit = self.config.cache_limit
            if isinstance(cache_limit, str):
                cache_limit = bytes_to_int(cache_limit)
        task += " " + ", ".join(folder.remote or folder.path for folder in self.folders)

        launch_id = broadcast_json(secrets.token_hex(8))
        is_first_of_node = self.rank.local_rank == 0
        table_file = None
        own_table = None
        with data_errors_on_all_ranks(task):
            if is_first_of_node:
                self._hold_folders(launch_id, alone=True)
                table_file, facts = self._write_table()
                own_table = (f"/proc/{os.getpid()}/fd/{table_file.fileno()}", facts)
        tables = all_gather_json(own_table)  # a path and facts from the first rank of each node, None from others

        with data_errors_on_all_ranks(task):
            if not is_first_of_node:
                self._hold_folders(launch_id, alone=False)
            first_rank_of_node = self.rank.rank - self.rank.local_rank
            table_path, facts = own_table or tables[first_rank_of_node]
            self.cache = ShardCache(self.folders, table_path, facts, cache_limit)
            if is_first_of_node:
                self.cache.check_limit()
                self.cache.find_present()
            self._check_columns()
            orders = [self._build_order(streams, drop_last) for streams in streams_of_stages]
            self.stages = StagedOrder(orders, self.first_batches)
            # Shards are numbered alike in all stages, so the order that has most of them numbers those of all.
            self._first_sample_of_shard = max(
                orders, key=lambda order: len(order.first_sample_of_shard)
            ).first_sample_of_shard

        check_same_on_all_ranks(all_gather_json(self._describe_data()))
        if table_file is not None:
            table_file.close()  # all ranks of the node have opened it by now

    def _hold_folders(self, launch_id: str, *, alone: bool) -> None:
        """Lock all folders as long as this data set lives. `alone` excludes other launches where this one downloads."""
        in_one_order = sorted(self.folders, key=lambda folder: os.path.realpath(folder.path))  # so that no two deadlock
        for folder in in_one_order:
            os.makedirs(folder.path, exist_ok=True)
            lock = hold_folder(folder.path, launch_id, alone=alone and bool(folder.remote))
            if lock is not None:
                self._locks.append(lock)

    def _write_table(self) -> tuple[IO[bytes], dict[str, Any]]:
        """Write the table of shards into shared memory, as a file without a name, so that no kill leaves it behind.

        Returns the file, which must stay open until all ranks of the node have opened it, and the facts that
        `ShardTable` needs beside it.
        """
        rows, facts = read_indexes(
            [folder.fetch_index() for folder in self.folders],
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
        return table_file, facts

    def _build_order(self, streams: dict[int, Stream], drop_last: bool) -> SampleOrder:
        """Build the order of a stage, whose streams are given by the index of their folder. Raises DataError.

        Streams that only later stages have are left out, so that they do not change its fingerprint.
        """
        epoch_samples_per_stream = self._choose_samples(streams)
        order = SampleOrder(
            shard_sizes_per_stream=[self._shard_sizes(stream) for stream in range(len(epoch_samples_per_stream))],
            epoch_samples_per_stream=epoch_samples_per_stream,
            batch_size=self.global_batch_size,
            seed=self.config.shuffle_seed,
            shuffle=self.config.shuffle and not self.same_every_epoch,
            drop_last=drop_last,
            max_samples=self.max_samples,
            window_samples=self.config.shuffle_block_size or DEFAULT_WINDOW_SAMPLES,
        )
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

    def _choose_samples(self, streams: dict[int, Stream]) -> list[int]:
        """Count the samples that an epoch takes from each folder, by the weight of its stream.

        Sets `choose` of every stream. Returns the counts up to the last folder that has a stream, with 0 for folders
        that only other stages read. Raises DataError.
        """
        samples_per_stream = np.array([self._shard_sizes(index).sum() for index in streams])
        for index, num_samples in zip(streams, samples_per_stream, strict=True):
            if not num_samples:
                raise DataError(f"{self.folders[index].path} holds no samples; prepare the data again")

        epoch_size = self.config.epoch_size
        epoch_samples = number_abbrev_to_int(epoch_size) if epoch_size else None
        Stream.apply_weights(list(streams.values()), samples_per_stream, epoch_samples, self.config.shuffle_seed)
        choose_per_folder = [0] * (max(streams) + 1)
        for index, stream in streams.items():
            choose_per_folder[index] = int(stream.choose)
        return choose_per_folder

    def _check_columns(self) -> None:
        """Raise DataError for shards that hold neither tokens nor text that can be tokenized, or of a wrong length."""
        for index, folder in enumerate(self.folders):
            for columns in self.cache.table.columns_of_stream(index):
                if "tokens" not in columns and "text" not in columns:
                    raise DataError(
                        f"{folder.path} has no column tokens or text, only {list_names(columns)}; "
                        "prepare it with `llmfoundry-lite data prepare`, or write one of the two columns"
                    )
                if "tokens" not in columns and self.reader.tokenizer is None:
                    raise DataError(f"{folder.path} holds text, not tokens: name a tokenizer to read it")
            for token_type in self.cache.table.token_types_of_stream(index):
                num_tokens = tokens_per_sample(token_type)
                if num_tokens is not None:
                    subject = f"samples of {folder.path} have"
                    allow_truncation = self.config.allow_truncation
                    check_length(num_tokens, self.max_seq_len, subject, allow_truncation=allow_truncation)

    def _describe_data(self) -> dict[str, Any]:
        """Describe the data that must be the same on all nodes, and its place on this one, as plain data."""
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
        """Return the rows that this rank yields in an epoch, so that `len(loader)` is the number of global batches.

        Raises TypeError where there are stages, because their epochs differ in length.
        """
        if len(self.first_batches) > 1:
            raise TypeError("epochs of different stages have different lengths")
        return self.order.num_batches * self.device_batch_size

    def state_dict(self, num_samples: int, from_beginning: bool = True, *, epoch: int | None = None) -> dict[str, Any]:
        """Return the place in the data, in the form that Composer asks for, and what the order of samples depends on.

        `num_samples` are those of the epoch that are done, over all ranks. `epoch` is the one under way by default.
        """
        assert from_beginning
        if epoch is None:
            epoch = self._epoch
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
        """Begin the next iteration at the place of a `state_dict`, of any number of ranks.

        Raises DataError unless this data set has the same order of samples up to there.
        """
        self._check_settings(state)

        # A state without stages is that of a run with one stage, which begins at batch 0.
        steps = state["sample_in_epoch"] // self.global_batch_size
        batch = state.get("batch", state["epoch"] * self.order.num_batches + steps)
        stages = self.stages.describe_begun_stages(batch)
        saved_stages = [list(stage) for stage in state.get("stages", [[0, state["order"]]])]
        if [first_batch for first_batch, _ in stages] != [first_batch for first_batch, _ in saved_stages]:
            raise self._stages_error(batch, saved_stages)

        self._check_content(state, self.stages.num_streams_read(batch))
        if stages != saved_stages:  # their orders differ
            raise DataError(
                f"the data (shards, streams, epoch size) or the shuffling is not what the checkpoint was trained with "
                f"(order {state['order']} there, {self.order.fingerprint} here): carrying on would repeat and skip "
                "samples; restore the data set and its settings"
            )
        if state["sample_in_epoch"] % self.global_batch_size:
            raise DataError(
                f"the checkpoint stands at sample {state['sample_in_epoch']} of its epoch, which is not between two "
                f"global batches of {self.global_batch_size}"
            )
        is_in_epoch = steps <= self.stages.num_batches(state["epoch"])
        if self.stages.batches_before(state["epoch"], steps) != batch or not is_in_epoch:
            raise self._stages_error(batch, saved_stages)
        self.begin_at(state["epoch"], state["sample_in_epoch"])

    def _check_settings(self, state: dict[str, Any]) -> None:
        """Raise DataError unless a state is one of ours, with this batch size, seed and version of the order."""
        needed = ("epoch", "sample_in_epoch", "seed", "global_batch_size", "order")
        missing = [key for key in needed if key not in state]
        if missing:
            raise DataError(
                f"the data state of the checkpoint lacks {', '.join(missing)} (it has {', '.join(sorted(state))}); "
                "a state saved by StreamingDataset's own order cannot be carried on"
            )
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
        """Return the error for a checkpoint of `batch` whose stages began after other batches than they do here."""
        begins = " and ".join(map(str, self.first_batches))
        saved_begins = " and ".join(str(first_batch) for first_batch, _ in saved_stages)
        return DataError(
            f"train_loader.dataset.stages: here they begin after batch {begins}; the checkpoint, of batch {batch}, was "
            f"trained with beginnings after batch {saved_begins}; only stages that begin after {batch} may be added or "
            "moved"
        )

    def _check_content(self, state: dict[str, Any], num_streams: int) -> None:
        """Raise OtherDataError unless a checkpoint was trained with the data of the first `num_streams` streams here.

        The error says how they differ. (First releases kept only shard sizes, which `order` has.)
        """
        digests = self.cache.table.content_digests[:num_streams]
        saved_digests = state.get("content", digests)
        if saved_digests == digests:
            return

        names = [repr(name) if name else "the data" for name in state["streams"]]
        if sorted(saved_digests) == sorted(digests):
            difference = f"the streams stand in another order: {', '.join(names)} in the checkpoint"
        elif len(saved_digests) != len(digests):
            difference = f"{len(digests)} streams here, {len(saved_digests)} in the checkpoint: {', '.join(names)}"
        else:
            differences = []
            for folder, digest, name, saved in zip(
                self.folders[:num_streams], digests, names, saved_digests, strict=True
            ):
                if digest != saved:
                    differences.append(f"{folder.path} holds {digest}, {name} in the checkpoint was {saved}")
            difference = "; ".join(differences)
        raise OtherDataError(
            f"the data is not what the checkpoint was trained with: {difference}; restore the data, "
            "or begin a new run (load_weights_only=true takes the weights along)",
            difference=difference,
        )

    def continue_with(
        self,
        row_indices: Sequence[int],
        epoch: int,
        sample_in_epoch: int,
        earlier_rows: Sequence[int] = (),
        num_batches_back: int = 0,
    ) -> None:
        """Begin the next iteration at this place, with these rows of each batch instead of an even share of all.

        Each batch also has `earlier_rows` of the batch `num_batches_back` before it, which is in the same epoch. A
        launch that trains with others does that to take over the rows that another one has lost.
        """
        self._assigned_rows = row_indices
        self._earlier_rows = earlier_rows
        self._num_batches_back = num_batches_back
        self.device_batch_size = len(row_indices) + len(earlier_rows)
        self.begin_at(epoch, sample_in_epoch)

    def begin_at(self, epoch: int, sample_in_epoch: int) -> None:
        """Begin the next iteration after `sample_in_epoch` samples of an epoch, counted over all ranks."""
        self._epoch = epoch
        self._next_start = (epoch, sample_in_epoch)

    def begin_epoch(self, *, forks_workers: bool) -> None:
        """Fix where the next iteration begins; the one after it begins with the next epoch. The loader calls this.

        With `forks_workers`, also lay out the epoch, so that workers share it. The memory that reading the indexes took
        is returned to the system before the fork.
        """
        self._shared_start[:] = torch.tensor(self._next_start)
        self._epoch, _ = self._next_start
        self._next_start = (self._epoch + 1, 0)
        if forks_workers:
            self._lay_out(self._epoch)
            return_freed_memory()

    def _lay_out(self, epoch: int) -> EpochOrder:
        """Lay out an epoch, unless it is the last one that was. In an evaluation, all epochs are the same."""
        if self.same_every_epoch:
            epoch = 0
        if self._laid_out is None or self._laid_out[0] != epoch:
            self._laid_out = (epoch, self.stages.build_epoch(epoch))
        return self._laid_out[1]

    @property
    def order(self) -> SampleOrder:
        """The order of the first stage, or of all epochs."""
        return self.stages.orders[0]

    # Reading ----------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Tensor]:
        """Yield this worker's rows, batch after batch, from where `begin_epoch` has said.

        A last batch that is kept is filled up with padding rows, so that a microbatch has the same rows on any number
        of ranks.
        """
        epoch, sample_in_epoch = self._shared_start.tolist()  # read now, not with the first row
        return self._read_rows(epoch, sample_in_epoch)

    def _read_rows(self, epoch: int, sample_in_epoch: int) -> Iterator[Tensor]:
        """Yield this worker's rows [max_seq_len] of an epoch, from a place in it on. Raises DataError."""
        sample_ids = self._sample_ids(epoch, sample_in_epoch)
        try:
            for shard, sample in self._read_ahead(sample_ids):
                if shard == NO_SAMPLE:
                    yield torch.full((self.max_seq_len,), PAD_TOKEN)
                else:
                    yield self.read_sample(shard, sample)
        except DataError as error:
            if not error.is_transient:
                raise
            raise TransientDataError(str(error)) from error  # or a worker would not pass on its cause

    def locate_sample(self, sample_id: int) -> tuple[int, int]:
        """Return the shard of a sample, and the sample's place in it."""
        shard = int(self._first_sample_of_shard.searchsorted(sample_id, "right")) - 1
        return shard, sample_id - int(self._first_sample_of_shard[shard])

    def read_sample(self, shard: int, sample: int) -> Tensor:
        """Return a row [max_seq_len], fetching its shard if needed. Raises DataError."""
        columns = self.cache.read(shard, sample)
        try:
            return torch.from_numpy(self.reader.read(columns))
        except Exception as error:
            raise DataError(f"{self.cache.path(shard)}, sample {sample}: {one_line(error)}") from error

    def _sample_ids(self, epoch: int, sample_in_epoch: int) -> Iterator[int]:
        """Yield this worker's sample ids for the rest of the epoch, computed piece by piece."""
        worker = 0
        num_workers = 1
        worker_info = get_worker_info()  # None in the rank itself
        if worker_info is not None:
            worker = worker_info.id
            num_workers = worker_info.num_workers

        num_batches = self.stages.num_batches(epoch)
        if self.same_every_epoch:
            num_batches = self.order.num_batches
        epoch_order = self._lay_out(epoch)
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

        samples_per_step = max(len(row_indices), 1)
        steps_per_block = epoch_order.order.block_samples // steps.step
        least_steps = max(MIN_PIECE_SAMPLES // samples_per_step, 1)
        most_steps = ceil_divide(MAX_PIECE_SAMPLES, samples_per_step)
        steps_per_piece = min(max(steps_per_block, least_steps), most_steps)
        for first in range(0, len(steps), steps_per_piece):
            some_steps = steps[first : first + steps_per_piece]
            ids_si = epoch_order.sample_ids(row_indices, some_steps)
            if self._earlier_rows:
                back = self._num_batches_back
                earlier_steps = range(some_steps.start - back, some_steps.stop - back, some_steps.step)
                ids_si = np.hstack([ids_si, epoch_order.sample_ids(self._earlier_rows, earlier_steps)])
            yield from ids_si.ravel().tolist()

    def _read_ahead(self, sample_ids: Iterator[int]) -> Iterator[tuple[int, int]]:
        """Yield shard and place in it of each sample, while threads fetch the shards of the next `predownload`.

        For `NO_SAMPLE` it yields (NO_SAMPLE, 0). Raises the error of a thread when the sample's turn has come.
        """
        pool = ThreadPoolExecutor(NUM_FETCHING_THREADS, thread_name_prefix="shard-fetch")
        # Samples whose turn comes: shard, place in it, and the fetch of the shard, unless it was ready.
        ahead: deque[tuple[int, int, Future[None] | None]] = deque()

        def next_sample() -> tuple[int, int]:
            """Wait until the shard of the next sample is here, and return both."""
            shard, sample, fetch = ahead.popleft()
            if fetch is not None:
                fetch.result()  # raises the thread's error
            return shard, sample

        try:
            for sample_id in sample_ids:
                if sample_id == NO_SAMPLE:
                    ahead.append((NO_SAMPLE, 0, None))
                else:
                    shard, sample = self.locate_sample(sample_id)
                    is_ready = self.cache.is_ready(shard)
                    fetch = None if is_ready else pool.submit(self.cache.ensure_present, shard)
                    ahead.append((shard, sample, fetch))
                if len(ahead) > self.predownload:
                    yield next_sample()
            while ahead:
                yield next_sample()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


# Checks that all ranks make together ----------------------------------------------------------------------------------


@contextmanager
def data_errors_on_all_ranks(task: str) -> Iterator[None]:
    """Raise an error of one rank on every rank, so that no rank waits for one that has left. Collective.

    An error that a disk, a remote or a setting may cause becomes a DataError that begins with `task`, such as "cannot
    open the data set". A bug keeps its own error on the rank that has it.
    """
    with raising_on_all_ranks():
        try:
            yield
        except UserError:
            raise
        except (OSError, RuntimeError, ValueError, KeyError, OverflowError) as error:
            raise DataError(f"{task}: {one_line(error)}") from error


def check_same_on_all_ranks(descriptions: Sequence[dict[str, Any]]) -> None:
    """Raise DataError unless all ranks have the same data in the same order.

    `descriptions` are those that `_describe_data` has made on each rank. Since every rank has all of them, every rank
    raises the same error. It compares the first rank that differs from most with the first that does not.
    """
    data_of_ranks = []
    for description in descriptions:
        contents = [stream["content"] for stream in description["streams"]]
        data_of_ranks.append((description["order"], contents))
    most_frequent = max(data_of_ranks, key=data_of_ranks.count)
    differing_ranks = [rank for rank, data in enumerate(data_of_ranks) if data != most_frequent]
    if not differing_ranks:
        return

    usual = descriptions[data_of_ranks.index(most_frequent)]
    other = descriptions[differing_ranks[0]]
    differences = []
    for usual_stream, other_stream in zip(usual["streams"], other["streams"], strict=False):
        if usual_stream["content"] != other_stream["content"]:
            name = usual_stream["name"] or "the data"
            differences.append(f"{name}: {other_stream['text']}, but {usual_stream['text']}")
    difference = "; ".join(differences) or "the same shards, but other streams, weights, seed, batch size or shuffling"
    raise DataError(
        f"{other['node']} reads other data than {usual['node']}: {difference}; give every node the same data and "
        "configuration"
    )
