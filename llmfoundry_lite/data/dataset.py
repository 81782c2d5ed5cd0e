"""MDS shards -> rows of token ids: the same global batches on every number of nodes, ranks and workers.

`opened_shards.py` opens the shards on all ranks together, `order.py` decides the order of samples, `cache.py` fetches
and reads shards, `rows.py` decodes a sample, and `loader.py` makes batches. A `TextDataset` combines them. Its methods
are in the order in which they are called: state and epochs, then reading in a worker.

A run's position in its data is the epoch, and the number of samples of that epoch that the run has trained on. These
are counted over all ranks, so they are a multiple of the global batch size.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from llmfoundry_lite.config.batch_schedule import PerBatch
from llmfoundry_lite.config.data_schema import TextDatasetConfig
from llmfoundry_lite.config.data_stages import first_batches
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.data.opened_shards import OpenedShards
from llmfoundry_lite.data.order import (
    NO_SAMPLE,
    ORDER_VERSION,
    EpochOrder,
    SampleOrder,
    ceil_divide,
    rows_and_steps_of_worker,
)
from llmfoundry_lite.data.rows import PAD_TOKEN, RowReader, Tokenizer
from llmfoundry_lite.errors import DataError, OtherDataError, TransientDataError, one_line
from llmfoundry_lite.ranks.rank import return_freed_memory, this_rank

NUM_FETCHING_THREADS = 2
DEFAULT_PREDOWNLOAD_BATCHES = 8
"""Number of batches ahead of the current one that a worker fetches shards for by default, as in StreamingDataset."""

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
        batch_sizes: PerBatch | None = None,
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
        batch_sizes: samples of each batch of the run, on all ranks together, multiples of `global_batch_size`. The data
            set itself only has batches of that size; `data/batches.py` joins them. None: all have that size.
        max_samples: limits an evaluation to the first samples in file order.

        Raises `DataError` for any fault of the data or of the arguments.
        """
        # The settings of a batch and of its rows.
        self.config = config
        rank = this_rank()
        self.data_rank, self.num_data_ranks = data_rank_and_size or (rank.rank, rank.world_size)
        if global_batch_size % self.num_data_ranks:
            raise DataError(
                f"a global batch of {global_batch_size} samples cannot be split evenly over {self.num_data_ranks} "
                f"ranks; use a multiple of {self.num_data_ranks}, or a number of ranks that divides {global_batch_size}"
            )
        self.max_seq_len = config.max_seq_len or max_seq_len
        self.global_batch_size = global_batch_size
        self.device_batch_size = global_batch_size // self.num_data_ranks
        self.is_evaluation = evaluation
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
        batch_sizes = batch_sizes or PerBatch.build(global_batch_size, None)
        self.parts_of_batches = batch_sizes.divided_by(global_batch_size)
        """Number of this data set's batches that each batch of the run consists of."""
        self.joins_batches = self.parts_of_batches.largest > 1
        """Batches of the run may consist of several batches of this data set."""
        batches_before_stages = first_batches(
            config, "train_loader.dataset", max_duration, batch_sizes, self.max_seq_len
        )
        self.first_batches = [self.parts_of_batches.sum_before(batch) for batch in batches_before_stages]
        self._opened = OpenedShards(  # kept, because it holds the locks of the folders
            config,
            max_seq_len=self.max_seq_len,
            global_batch_size=global_batch_size,
            first_batches=self.first_batches,
            drop_last=drop_last and not evaluation,
            evaluation=evaluation,
            has_tokenizer=tokenizer is not None,
            max_samples=max_samples,
        )
        self.folders = self._opened.folders
        self.cache = self._opened.cache
        self.stages = self._opened.stages
        self.first_sample_of_shard = self._opened.first_sample_of_shard

    # State and epochs -------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        """Return the number of rows that this rank yields in an epoch.

        Divided by the rank's batch size, as torch's DataLoader does for its own length, that is the number of global
        batches. Raises TypeError for a data set with stages, or of a run whose batches differ in size, because their
        epochs differ in length.
        """
        if len(self.first_batches) > 1 or self.joins_batches:
            raise TypeError("epochs have different numbers of batches")
        return self.order.num_batches * self.device_batch_size

    def position_after(self, batch: int, *, as_end: bool = False) -> tuple[int, int]:
        """Return the position in the data after the first `batch` batches of a run: epoch, and samples of it done.

        The end of an epoch is the beginning of the next one. With `as_end`, it is all samples of the epoch that ends,
        which is the position that Composer's clock has until it begins the next epoch.
        """
        epoch, step = self.stages.locate_batch(self.parts_of_batches.sum_before(batch))
        is_between_epochs = step == 0 and epoch > 0
        if as_end and is_between_epochs:
            epoch -= 1
            step = self.stages.num_batches(epoch)
        return epoch, step * self.global_batch_size

    def count_epochs(self, batch: int) -> float:
        """Return how many epochs the first `batch` batches of a run have read, such as 1.5 amid the second one."""
        epoch, sample_in_epoch = self.position_after(batch)
        return epoch + sample_in_epoch / (self.stages.num_batches(epoch) * self.global_batch_size)

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

    def check_position(self, state: dict[str, Any], batch: int) -> None:
        """Raise DataError if a `state_dict` is not the position that a run has after its first `batch` batches.

        A run whose batches differ in size computes its position from the number of the batch.
        """
        num_steps = state["sample_in_epoch"] // self.global_batch_size
        num_samples = self.stages.batches_before(state["epoch"], num_steps) * self.global_batch_size
        expected_samples = self.parts_of_batches.sum_before(batch) * self.global_batch_size
        if num_samples != expected_samples:
            raise DataError(
                f"the checkpoint has read {num_samples} samples, and batch_size_schedule has {expected_samples} in the "
                f"first {batch} batches; carry on with the checkpoint's own schedule"
            )

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

        `batch` is the number of this data set's batches that the checkpoint was trained on. `saved_stages` are its
        stages, each as [first batch, fingerprint]. The message has the batches of the run, as `until` counts them.
        """
        count_batches = self.parts_of_batches.count_batches
        begins = " and ".join(str(count_batches(first_batch)) for first_batch in self.first_batches)
        saved_begins = " and ".join(str(count_batches(first_batch)) for first_batch, _ in saved_stages)
        batch = count_batches(batch)
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
        shard = int(self.first_sample_of_shard.searchsorted(sample_id, "right")) - 1
        return shard, sample_id - int(self.first_sample_of_shard[shard])

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
