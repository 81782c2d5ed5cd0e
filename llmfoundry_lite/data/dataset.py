"""MDS shards -> rows of token ids: the same global batches on every number of nodes, ranks and workers.

`order.py` says which samples come when, `cache.py` brings and reads shards, `rows.py` decodes a sample, and `loader.py`
makes batches.
"""

import os
import secrets
import socket
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from tempfile import TemporaryFile
from typing import IO, Any, BinaryIO, NoReturn

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
    share_of_worker,
)
from llmfoundry_lite.data.rows import PAD_TOKEN, RowReader, Tokenizer, check_length, length_in
from llmfoundry_lite.data.shard_table import read_indexes
from llmfoundry_lite.data.stages import StagedOrder
from llmfoundry_lite.data.streams import build_stages
from llmfoundry_lite.errors import DataError, OtherDataError, TransientDataError, UserError, list_names, one_line
from llmfoundry_lite.ranks.exchange import all_gather_json, broadcast_json, raising_on_all_ranks
from llmfoundry_lite.ranks.rank import return_freed_memory, this_rank

NUM_FETCHING_THREADS = 2


class TextDataset(IterableDataset):
    """Yields this rank's rows [max_seq_len] of int64 token ids, in the order of `SampleOrder`.

    Its state knows nothing of nodes, ranks or workers.
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
        """Open the data on all ranks together.

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
        self.same_every_epoch, self.max_samples = evaluation, max_samples
        self.reader = RowReader(
            self.max_seq_len, vocab_size, tokenizer, config.token_encoding_type, config.allow_truncation
        )
        self.predownload = config.predownload if config.predownload is not None else 8 * self.device_batch_size
        self._row_indices: Sequence[int] | None = None
        self._again: tuple[Sequence[int], int] = ((), 0)
        self._laid_out: tuple[int, EpochOrder] | None = None
        self._next = (0, 0)
        """Epoch, and number of its samples that are done, at which the next iteration begins."""
        self._epoch = 0
        # Beginning of the current iteration, shared with the loader's workers, which may outlive an epoch.
        self._begin = torch.tensor(self._next).share_memory_()

        self.first_batches = first_batches(
            config, "train_loader.dataset", max_duration, global_batch_size, self.max_seq_len
        )
        self._locks: list[BinaryIO] = []
        try:
            self._open(drop_last=drop_last and not evaluation)
        except BaseException:
            for lock in self._locks:  # at once, since the error may keep this object alive
                lock.close()
            raise

    def _open(self, *, drop_last: bool) -> None:
        what = "cannot open the data set"
        with failing_together(what):
            self.folders, streams_of_stages = build_stages(self.config)
            limit = self.config.cache_limit
            cache_limit = bytes_to_int(limit) if isinstance(limit, str) else limit
        what += " " + ", ".join(folder.remote or folder.path for folder in self.folders)
        launch_id, note, table = broadcast_json(secrets.token_hex(8)), None, None
        with failing_together(what):
            if self.rank.local_rank == 0:
                self._hold_folders(launch_id, alone=True)
                table, facts = self._write_table()
                note = f"/proc/{os.getpid()}/fd/{table.fileno()}", facts
        notes = all_gather_json(note)
        with failing_together(what):
            if self.rank.local_rank > 0:
                self._hold_folders(launch_id, alone=False)
            path, facts = note or notes[self.rank.rank - self.rank.local_rank]
            self.cache = ShardCache(self.folders, path, facts, cache_limit)
            if self.rank.local_rank == 0:
                self.cache.check_limit()
                self.cache.find_present()
            self._check_columns()
            orders = [self._build_order(streams, drop_last) for streams in streams_of_stages]
            self.stages = StagedOrder(orders, self.first_batches)
            self._shard_begins = max(orders, key=lambda order: len(order.shard_begins)).shard_begins
        check_alike(all_gather_json(self._describe()))
        if table is not None:
            table.close()  # all ranks of the node have it open

    def _hold_folders(self, launch_id: str, *, alone: bool) -> None:
        """Lock all folders as long as this data set lives. `alone` excludes other launches where this one downloads."""
        for folder in sorted(self.folders, key=lambda folder: os.path.realpath(folder.path)):  # so that no two deadlock
            os.makedirs(folder.path, exist_ok=True)
            lock = hold_folder(folder.path, launch_id, alone=alone and bool(folder.remote))
            self._locks += [lock] if lock else []

    def _write_table(self) -> tuple[IO[bytes], dict[str, Any]]:
        """Write the table of shards into shared memory, as a file without a name, so that no kill leaves it behind."""
        rows, facts = read_indexes(
            [folder.fetch_index() for folder in self.folders],
            [folder.stream.validate_hash for folder in self.folders],
            allow_unhashed_shards=self.config.allow_unhashed_shards,
        )
        try:
            table = TemporaryFile(dir=shared_memory_folder())  # noqa: SIM115 (until all ranks have opened it)
            np.save(table, rows)
            table.flush()
        except OSError:
            raise DataError(
                f"no space left in {shared_memory_folder()} for the table of shards, about 150 bytes for each; "
                "make it larger (a container's with --shm-size, or --ipc=host)"
            ) from None
        return table, facts

    def _build_order(self, streams: dict[int, Stream], drop_last: bool) -> SampleOrder:
        """Build the order of a stage. Its fingerprint ignores streams that only later stages have."""
        choose_per_stream = self._choose_samples(streams)
        order = SampleOrder(
            shard_sizes_per_stream=[self._sizes(i) for i in range(len(choose_per_stream))],
            choose_per_stream=choose_per_stream,
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
        order.shard_begins.setflags(write=False)  # computed before the fork, so that workers share it
        return order

    def _sizes(self, stream: int) -> np.ndarray:
        return np.ascontiguousarray(self.cache.table.of_stream(stream)["samples"])

    def _choose_samples(self, streams: dict[int, Stream]) -> list[int]:
        """Count the samples of each folder in an epoch, by its stream's weight, up to the last folder that is used."""
        samples_per_stream = np.array([self._sizes(i).sum() for i in streams])
        for i, num_samples in zip(streams, samples_per_stream, strict=True):
            if not num_samples:
                raise DataError(f"{self.folders[i].path} holds no samples; prepare the data again")
        size = self.config.epoch_size
        epoch_samples = number_abbrev_to_int(size) if size else None
        if epoch_samples and epoch_samples > 10**18:
            raise DataError(f"epoch_size is {size}, expected at most 10^18 samples")
        Stream.apply_weights(list(streams.values()), samples_per_stream, epoch_samples, self.config.shuffle_seed)
        return [int(streams[i].choose) if i in streams else 0 for i in range(max(streams) + 1)]

    def _check_columns(self) -> None:
        for i, folder in enumerate(self.folders):
            for columns in self.cache.table.columns_of_stream(i):
                if "tokens" not in columns and "text" not in columns:
                    raise DataError(
                        f"{folder.path} has no column tokens or text, only {list_names(columns)}; "
                        "prepare it with `llmfoundry-lite data prepare`, or write one of the two columns"
                    )
                if "tokens" not in columns and self.reader.tokenizer is None:
                    raise DataError(f"{folder.path} holds text, not tokens: name a tokenizer to read it")
            for token_type in self.cache.table.token_types_of_stream(i):
                if (length := length_in(token_type)) is not None:
                    allow = self.config.allow_truncation
                    check_length(length, self.max_seq_len, f"samples of {folder.path} have", allow_truncation=allow)

    def _describe(self) -> dict[str, Any]:
        """Describe the data that must be the same on all nodes, and its place on this one."""
        node = f"node {self.rank.rank // self.rank.local_world_size} ({socket.gethostname()})"
        streams = []
        for i, (folder, content) in enumerate(zip(self.folders, self.cache.table.contents, strict=True)):
            sizes, place = self._sizes(i), folder.remote or os.path.abspath(folder.path)
            text = f"{place} on {node} has {sizes.sum()} samples in {len(sizes)} shards ({content})"
            streams.append({"name": folder.name, "content": content, "text": text})
        order = [self.first_batches, [order.fingerprint for order in self.stages.orders]]
        return {"node": node, "order": order, "streams": streams}

    # State and epochs -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the rows that this rank yields in an epoch, so that `len(loader)` is the number of global batches.

        Raises TypeError where there are stages, because their epochs differ in length.
        """
        if len(self.first_batches) > 1:
            raise TypeError("epochs of different stages have different lengths")
        return self.order.num_batches * self.device_batch_size

    def state_dict(self, num_samples: int, from_beginning: bool = True, *, epoch: int | None = None) -> dict[str, Any]:
        """Return the place in the data, in the form that Composer asks for: `num_samples` are done over all parts.

        `epoch` is the one under way by default.
        """
        assert from_beginning
        epoch = self._epoch if epoch is None else epoch
        batch = self.stages.batch_at(epoch, num_samples // self.global_batch_size)
        num_streams = self.stages.num_streams(batch)
        stages = {"batch": batch, "stages": self.stages.begun(batch)} if len(self.first_batches) > 1 else {}
        return {
            "epoch": epoch,
            "sample_in_epoch": num_samples,
            "seed": self.order.seed,
            "global_batch_size": self.global_batch_size,
            "order": self.order.fingerprint,
            "order_version": ORDER_VERSION,
            "streams": [folder.name for folder in self.folders[:num_streams]],
            "content": self.cache.table.contents[:num_streams],
            **stages,
        }

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        """Begin the next epoch at the place that a `state_dict` of any number of ranks describes. Raises DataError."""
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
        if obj.get("order_version", 1) != ORDER_VERSION:
            raise DataError(
                f"the checkpoint was trained in version {obj['order_version']} of the sample order, this release has "
                f"version {ORDER_VERSION}; carry on with the release that saved it"
            )
        steps = obj["sample_in_epoch"] // self.global_batch_size
        batch = obj.get("batch", obj["epoch"] * self.order.num_batches + steps)
        here, there = self.stages.begun(batch), obj.get("stages", [[0, obj["order"]]])
        if [begin for begin, _ in here] != [begin for begin, _ in there]:
            self._refuse_stages(batch, there)
        self._check_content(obj, self.stages.num_streams(batch))
        if here != [list(stage) for stage in there]:
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
        if self.stages.batch_at(obj["epoch"], steps) != batch or steps > self.stages.num_batches(obj["epoch"]):
            self._refuse_stages(batch, there)
        self.begin_at(obj["epoch"], obj["sample_in_epoch"])

    def _refuse_stages(self, batch: int, there: list[list[Any]]) -> NoReturn:
        now, then = (" and ".join(map(str, begins)) for begins in (self.first_batches, [begin for begin, _ in there]))
        raise DataError(
            f"train_loader.dataset.stages: here they begin after batch {now}; the checkpoint, of batch {batch}, was "
            f"trained with beginnings after batch {then}; only stages that begin after {batch} may be added or moved"
        )

    def _check_content(self, state: dict[str, Any], num_streams: int) -> None:
        """Raise DataError unless a checkpoint was trained with this data. (First releases kept only shard sizes.)"""
        here = self.cache.table.contents[:num_streams]
        there = state.get("content", here)
        if there == here:
            return
        names = [repr(name) if name else "the data" for name in state["streams"]]
        if sorted(there) == sorted(here):
            what = f"the streams stand in another order: {', '.join(names)} in the checkpoint"
        elif len(there) != len(here):
            what = f"{len(here)} streams here, {len(there)} in the checkpoint: {', '.join(names)}"
        else:
            what = "; ".join(
                f"{folder.path} holds {ours}, {name} in the checkpoint was {theirs}"
                for folder, ours, name, theirs in zip(self.folders, here, names, there, strict=True)
                if ours != theirs
            )
        raise OtherDataError(
            f"the data is not what the checkpoint was trained with: {what}; restore the data, "
            "or begin a new run (load_weights_only=true takes the weights along)",
            difference=what,
        )

    def continue_with(
        self, indices: Sequence[int], epoch: int, sample_in_epoch: int, again: Sequence[int] = (), num_back: int = 0
    ) -> None:
        """Begin the next iteration at this place, with these row indices, not with an even share of all.

        Each batch also has the row indices `again` of the batch `num_back` before it, which is in the same epoch.
        """
        self._row_indices, self._again = indices, (again, num_back)
        self.device_batch_size = len(indices) + len(again)
        self.begin_at(epoch, sample_in_epoch)

    def begin_at(self, epoch: int, sample_in_epoch: int) -> None:
        """Begin the next iteration at this place."""
        self._epoch, self._next = epoch, (epoch, sample_in_epoch)

    def begin_epoch(self, *, forks_workers: bool) -> None:
        """Fix where the next iteration begins. With `forks_workers`, also lay out the epoch, so that workers share it.

        The memory that reading the indexes took is returned to the system before the fork.
        """
        self._begin[:] = torch.tensor(self._next)
        self._epoch = self._next[0]
        self._next = (self._epoch + 1, 0)
        if forks_workers:
            self._lay_out(self._epoch)
            return_freed_memory()

    def _lay_out(self, epoch: int) -> EpochOrder:
        epoch = 0 if self.same_every_epoch else epoch
        if self._laid_out is None or self._laid_out[0] != epoch:
            self._laid_out = epoch, self.stages.epoch(epoch)
        return self._laid_out[1]

    @property
    def order(self) -> SampleOrder:
        """The order of the first stage, or of all epochs."""
        return self.stages.orders[0]

    # Reading ----------------------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Tensor]:
        """Yield this worker's rows, batch after batch. A last batch that is kept is filled up with padding rows, so
        that a microbatch has the same rows on any number of ranks."""
        return self._rows(*self._begin.tolist())  # the place is read now, not with the first row

    def _rows(self, epoch: int, sample_in_epoch: int) -> Iterator[Tensor]:
        ids = self._sample_ids(epoch, sample_in_epoch)
        try:
            for shard, sample in self._read_ahead(ids):
                if shard == NO_SAMPLE:
                    yield torch.full((self.max_seq_len,), PAD_TOKEN)
                    continue
                yield self.read_sample(shard, sample)
        except DataError as error:
            if not error.is_transient:
                raise
            raise TransientDataError(str(error)) from error  # or a worker would not pass on its cause

    def locate(self, sample_id: int) -> tuple[int, int]:
        """Return shard and place in it of a sample."""
        shard = int(self._shard_begins.searchsorted(sample_id, "right")) - 1
        return shard, sample_id - int(self._shard_begins[shard])

    def read_sample(self, shard: int, sample: int) -> Tensor:
        """Return a row [max_seq_len], bringing its shard if needed. Raises DataError."""
        columns = self.cache.read(shard, sample)
        try:
            return torch.from_numpy(self.reader.read(columns))
        except Exception as error:
            raise DataError(f"{self.cache.path(shard)}, sample {sample}: {one_line(error)}") from error

    def _sample_ids(self, epoch: int, sample_in_epoch: int) -> Iterator[int]:
        """Yield this worker's sample ids for the rest of the epoch, computed piece by piece."""
        worker, epoch_order = get_worker_info(), self._lay_out(epoch)
        indices, steps = share_of_worker(
            epoch_order.order,
            rank=self.data_rank,
            world_size=self.num_data_ranks,
            worker=worker.id if worker else 0,
            num_workers=worker.num_workers if worker else 1,
            first_batch=sample_in_epoch // self.global_batch_size,
            num_batches=self.order.num_batches if self.same_every_epoch else self.stages.num_batches(epoch),
        )
        indices, (again, num_back) = indices if self._row_indices is None else self._row_indices, self._again
        width = max(len(indices), 1)
        # Whole shuffled blocks, as a part of one costs as much; but neither tiny pieces nor huge ones.
        steps_per_block = epoch_order.order.block_samples // steps.step
        steps_per_piece = min(max(steps_per_block, (1 << 14) // width, 1), -(-(1 << 20) // width))
        for first in range(0, len(steps), steps_per_piece):
            piece = steps[first : first + steps_per_piece]
            ids = epoch_order.sample_ids(indices, piece)
            if again:
                before = range(piece.start - num_back, piece.stop - num_back, piece.step)
                ids = np.hstack([ids, epoch_order.sample_ids(again, before)])
            yield from ids.ravel().tolist()

    def _read_ahead(self, ids: Iterator[int]) -> Iterator[tuple[int, int]]:
        """Yield shard and place in it of each sample, while threads bring the shards of the next `predownload`."""
        pool = ThreadPoolExecutor(NUM_FETCHING_THREADS, thread_name_prefix="shard-fetch")
        ahead: deque[tuple[int, int, Future[None] | None]] = deque()

        def next_sample() -> tuple[int, int]:
            shard, sample, coming = ahead.popleft()
            if coming is not None:
                coming.result()  # raises the thread's error
            return shard, sample

        try:
            for sample_id in ids:
                if sample_id == NO_SAMPLE:
                    ahead.append((NO_SAMPLE, 0, None))
                else:
                    shard, sample = self.locate(sample_id)
                    coming = None if self.cache.is_ready(shard) else pool.submit(self.cache.bring, shard)
                    ahead.append((shard, sample, coming))
                if len(ahead) > self.predownload:
                    yield next_sample()
            while ahead:
                yield next_sample()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


# Checks that all ranks make together ----------------------------------------------------------------------------------


@contextmanager
def failing_together(what: str) -> Iterator[None]:
    """Raise an error of one rank on every rank, so that nobody waits for a rank that has left.

    An error that a disk, a remote or a setting may cause becomes a DataError that begins with `what`. A bug keeps its
    own error on the rank that has it.
    """
    with raising_on_all_ranks():
        try:
            yield
        except UserError:
            raise
        except (OSError, RuntimeError, ValueError, KeyError, OverflowError) as error:
            raise DataError(f"{what}: {one_line(error)}") from error


def check_alike(notes: Sequence[dict[str, Any]]) -> None:
    """Raise DataError on every rank unless all have the same data in the same order. It names a node that differs."""
    kinds = [(note["order"], [stream["content"] for stream in note["streams"]]) for note in notes]
    usual = max(kinds, key=kinds.count)
    there = notes[kinds.index(usual)]
    here = next((note for note, kind in zip(notes, kinds, strict=True) if kind != usual), None)
    if here is None:
        return
    differing = [
        f"{stream['name'] or 'the data'}: {ours['text']}, but {stream['text']}"
        for stream, ours in zip(there["streams"], here["streams"], strict=False)
        if stream["content"] != ours["content"]
    ]
    what = "; ".join(differing) or "the same shards, but other streams, weights, seed, batch size or shuffling"
    raise DataError(
        f"{here['node']} reads other data than {there['node']}: {what}; give every node the same data and configuration"
    )
