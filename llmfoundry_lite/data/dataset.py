"""MDS shards -> rows of token ids, the same global batches on every world.

Owns the data set: which samples come when, its place in an epoch, reading a row, and what can be wrong with it. Leaves
the order itself to `order.py`, the shards to `shard_cache.py`, batches and workers to `loader.py`, making shards to
`prepare/`, and labels and loss to the training adapter. Iteration is StreamingDataset's.

Shapes: t = max_seq_len.
"""

import os
import socket
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from streaming import Stream
from streaming.base.distributed import get_rank, get_world_size, maybe_init_dist
from streaming.base.util import number_abbrev_to_int
from streaming.base.world import World
from torch import Tensor

from llmfoundry_lite.data.agreement import check_alike, failing_together, one_line
from llmfoundry_lite.data.lazy_arrays import WorkerSampleIds
from llmfoundry_lite.data.order import (
    DEFAULT_WINDOW_SAMPLES,
    MOST_UNITS,
    ORDER_VERSION,
    EpochOrder,
    SampleOrder,
    share_of_worker,
)
from llmfoundry_lite.data.shard_cache import CachedShards
from llmfoundry_lite.data.streams import folder_of
from llmfoundry_lite.errors import DataError, TransientDataError
from llmfoundry_lite.ranks.exchange import all_gather_json
from llmfoundry_lite.ranks.memory import return_freed_memory

TOKEN_TYPES = ("int64", "int32", "uint16", "uint8")
"""Types of tokens in rows of bytes, the widest first."""

MOST_TOKENS = 1 << 24
"""Limit of token ids where the vocabulary is not known."""

PAD_TOKEN = -100
"""Stands where there is no token: it is neither an input nor a target. (The number is cross-entropy's ignore_index.)"""


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
    allow_unhashed_shards: bool = False,
    keep_zip: bool = False,
    share: tuple[int, int] | None = None,
) -> "TextDataset":
    """The data set of one folder (`local`, `remote`, `split`) or of several `streams`, named and weighted.

    Rank and world size are read from the environment, as StreamingDataset does (RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE). `share` is this rank's part of each batch and the number of parts, where some ranks read the same
    samples; `global_batch_size` must be a multiple of that number.

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
        streams={name: defaults | stream for name, stream in described.items()},
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
        allow_unhashed_shards=allow_unhashed_shards,
        share=share,
    )


class TextDataset(CachedShards):
    """StreamingDataset with the order of `SampleOrder` and a state that knows nothing of nodes, ranks or workers.

    Yields rows [t] of int64 token ids. Use `build_text_dataset`, which checks and names things for the user.
    """

    def __init__(
        self,
        *,
        streams: Mapping[str, Mapping[str, Any]],
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
        allow_unhashed_shards: bool = False,
        share: tuple[int, int] | None = None,
    ) -> None:
        part, world_size = share or (get_rank(), get_world_size())
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
        self._laid_out: EpochOrder | None = None
        self._lanes: range | None = None
        self.predownload = predownload if predownload is not None else 8 * self.device_batch_size
        self.replication = get_world_size() // world_size
        self._unique_rank_world = World.detect()
        self._parallel_rank_world = World(
            num_nodes=1, ranks_per_node=world_size, workers_per_rank=1, worker=part
        )  # which of them are on one node is nobody's business here
        # [epoch, sample_in_epoch] to begin with. Shared with the DataLoader's workers, persistent ones included, and
        # anonymous: StreamingDataset's own block is found by its name, and when that is gone (unlinked by the
        # resource tracker of a killed run) it starts over from sample 0 without a word.
        self._resume_state = torch.tensor([-1, 0]).share_memory_()

        initialised_dist = maybe_init_dist()
        try:
            self._open(streams, cache_limit, allow_unhashed_shards=allow_unhashed_shards)
            with failing_together(self._cannot_open):
                self._choose_samples(epoch_size, shuffle_seed)
                self.order = SampleOrder(
                    shard_sizes_per_stream=[self.table.of_stream(i, "samples") for i in range(self.num_streams)],
                    choose_per_stream=[int(stream.choose) for stream in self.streams],
                    num_lanes=global_batch_size,
                    seed=shuffle_seed,
                    shuffle=shuffle,
                    drop_last=drop_last,
                    window_samples=window_samples,
                )
                self._check_size()
                self._check_columns()
                self.order.shard_begins.setflags(write=False)  # worked out before workers are forked, who share it
            # Whoever comes back from here knows that the other ranks have opened the blocks as well.
            check_alike(all_gather_json(self._describe()))
        except BaseException:
            self.__del__()  # lets go of the folders; the error may keep this object alive
            raise
        finally:
            if initialised_dist:
                torch.distributed.destroy_process_group()

    def _choose_samples(self, epoch_size: int | str | None, seed: int) -> None:
        """How many samples an epoch takes from each stream, by its weight."""
        samples_per_stream = np.array([self.table.of_stream(i, "samples").sum() for i in range(self.num_streams)])
        for stream, num_samples in zip(self.streams, samples_per_stream, strict=True):
            if not num_samples:
                raise DataError(f"{folder_of(stream)} holds no samples; prepare the data again")
        epoch_samples = number_abbrev_to_int(epoch_size) if epoch_size else None
        if epoch_samples and epoch_samples > 10**18:
            raise DataError(f"epoch_size is {epoch_size}, expected at most 10^18 samples")
        self.epoch_size = Stream.apply_weights(self.streams, samples_per_stream, epoch_samples, seed)

    def _check_size(self) -> None:
        if not self.order.num_batches:
            raise DataError(
                f"an epoch of {self.order.num_samples} samples is smaller than one global batch of "
                f"{self.global_batch_size}; use a smaller batch, more data, or streams that repeat"
            )
        if self.order.most_units > MOST_UNITS:
            raise DataError(
                f"an epoch of {self.order.num_samples} samples reads {self.num_shards} shards so often that "
                f"{self.order.most_units} pieces would have to be shuffled, at most {MOST_UNITS} can be; use a smaller "
                "epoch_size or repeat, and more epochs"
            )

    def _describe(self) -> dict[str, Any]:
        """What all nodes must have alike, and where this one has it."""
        return {
            "node": f"node {self._unique_rank_world.node} ({socket.gethostname()})",
            "order": self.order.fingerprint,
            "streams": [
                {
                    "name": stream.name,
                    "folder": stream.remote or os.path.abspath(folder_of(stream)),
                    "shards": part.num_shards,
                    "samples": int(self.table.of_stream(i, "samples").sum()),
                    "content": part.content,
                }
                for i, (stream, part) in enumerate(zip(self.streams, self.table.streams, strict=True))
            ],
        }

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
            "order_version": ORDER_VERSION,
            "streams": [stream.name for stream in self.streams],
            "content": [part.content for part in self.table.streams],
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
        if obj.get("order_version", 1) != ORDER_VERSION:
            raise DataError(
                f"the checkpoint was trained in version {obj['order_version']} of the sample order, this release has "
                f"version {ORDER_VERSION}; carry on with the release that saved it"
            )
        self._check_content(obj)
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

    def continue_with(self, lanes: range, epoch: int, sample_in_epoch: int) -> None:
        """Begin the next iteration at this place, with these lanes instead of an even share of all.

        Every rank of a node must call this before any begins to read.
        """
        self._lanes, self.device_batch_size = lanes, len(lanes)
        self._resume_state[:] = torch.tensor([epoch, sample_in_epoch])
        self.next_epoch = epoch

    def _check_content(self, state: dict[str, Any]) -> None:
        """Is it the data that the checkpoint was trained with? (Its first releases kept the sizes of shards alone.)"""
        here = [part.content for part in self.table.streams]
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
                f"{folder_of(stream)} holds {ours}, {name} in the checkpoint was {theirs}"
                for stream, ours, name, theirs in zip(self.streams, here, names, there, strict=True)
                if ours != theirs
            )
        raise DataError(
            f"the data is not what the checkpoint was trained with: {what}; restore the data, "
            "or begin a new run (load_weights_only=true takes the weights along)"
        )

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
        lanes = self._lanes or lanes
        self._num_padding_rows = self.order.num_missing(lanes, steps[-1]) if steps else 0
        return WorkerSampleIds(self._lay_out(epoch), lanes, steps)

    def lay_out_next_epoch(self) -> None:
        """Work out here what each of the workers would: those that are forked from this process share it.

        What reading the indexes took, 90 MB for 1.5 million shards, goes back before they do.
        """
        self._laid_out = self._lay_out(self.next_epoch)
        return_freed_memory()

    def _lay_out(self, epoch: int) -> EpochOrder:
        epoch = 0 if self.same_every_epoch else epoch
        laid_out, self._laid_out = self._laid_out, None
        return laid_out if laid_out is not None and laid_out.epoch == epoch else self.order.epoch(epoch)

    def __iter__(self) -> Iterator[Tensor]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """This worker's rows, batch after batch; padding rows fill up the last batch of an epoch that has them."""
        try:
            yield from self._rows()
        except DataError as error:
            if not error.is_transient:
                raise
            raise TransientDataError(str(error)) from error  # what led to it would stay in a worker process

    def _rows(self) -> Iterator[Tensor]:
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
        shard_id, _ = self.spanner[sample_id]
        is_whole = self._verify_shard(shard_id)
        try:
            sample = super().get_item(sample_id, retry)
        except DataError:
            raise
        except Exception as error:
            if self._background_error:
                raise self._background_error from self._background_error.__cause__
            self._verified[shard_id] = 0
            self._verify_shard(shard_id)  # a damaged file explains whatever went wrong
            raise DataError(f"{self._place(sample_id)}: {one_line(error)}") from error
        if not is_whole:
            self._verify_shard(shard_id)
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
            tokens = self._numbers_of(tokens)
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

    def _numbers_of(self, raw: bytes) -> NDArray[np.integer]:
        """The numbers that a row's bytes are, as token_encoding_type says. Bytes carry no type: a row that is plainly
        of another one is refused, with its name."""
        dtype, vocab_size = self.token_dtype, self.vocab_size or MOST_TOKENS
        if len(raw) % dtype.itemsize:
            found, tokens = f"{len(raw)} bytes of tokens are not whole {dtype} numbers", None
        else:
            tokens = np.frombuffer(raw, dtype)
            outside = tokens[(tokens < 0) | (tokens >= vocab_size)]
            # Of another type most are; a damaged one alone is for `_check_vocabulary`.
            found = f"token id {outside[0]} is outside the vocabulary" if 2 * len(outside) > len(tokens) else ""
        if found:
            fitting = [name for name in TOKEN_TYPES if _could_be(raw, name, vocab_size, self.max_seq_len)]
        else:
            # By chance no row of narrow numbers is one of wide ones that are all so small.
            most = min(vocab_size, (8 if self.vocab_size else 1) << 8 * dtype.itemsize)
            fitting = [name for name in TOKEN_TYPES if np.dtype(name).itemsize > dtype.itemsize]
            fitting = [name for name in fitting if _could_be(raw, name, most, 2)]
        if fitting:
            found = f"{found}: " if found else ""
            raise DataError(
                f"{found}the bytes of a row are {fitting[0]} numbers, and are read as {dtype}; set "
                f"token_encoding_type: {fitting[0]} in the loader's dataset"
            )
        if tokens is None:
            raise DataError(f"{found}; set token_encoding_type to the type they were written with")
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

    def _place(self, sample_id: int) -> str:
        shard_id, sample_in_shard = self.spanner[sample_id]
        return f"{self._path(shard_id)}, sample {sample_in_shard}"

    def _check_columns(self) -> None:
        for i, stream in enumerate(self.streams):
            for kind in np.flatnonzero(np.bincount(self.table.of_stream(i, "kind"))):
                columns = self.table.kinds[kind]["column_names"]
                if "tokens" not in columns and "text" not in columns:
                    raise DataError(
                        f"{folder_of(stream)} has no column tokens or text, only {', '.join(columns)}; "
                        "prepare it with `llmfoundry-lite data prepare`, or write one of the two columns"
                    )
                if "tokens" not in columns and self.tokenizer is None:
                    raise DataError(f"{folder_of(stream)} holds text, not tokens: name a tokenizer to read it")


def _could_be(raw: bytes, name: str, vocab_size: int, least: int) -> bool:
    """Whether a row's bytes may be `least` or more numbers of this type: of the vocabulary, and not mostly the zeros of
    padding."""
    if len(raw) % np.dtype(name).itemsize:
        return False
    tokens = np.frombuffer(raw, name)
    if len(tokens) < least or int(tokens.min()) < 0 or int(tokens.max()) >= vocab_size:
        return False
    return 2 * int(np.count_nonzero(tokens)) > len(tokens)
