"""Restoring: safetensors shards -> a model and its optimizer, on any number of ranks.

Each rank reads into new memory and verifies the blocks that it reads. All ranks agree before any changes its model.
"""

import math
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from llmfoundry_lite.checkpoint import state
from llmfoundry_lite.checkpoint.grid import ITEM_BYTES, Chunk
from llmfoundry_lite.checkpoint.manifest import Manifest, decode
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.planning import NO_ORDERS, boxes_of
from llmfoundry_lite.checkpoint.shards import NUM_THREADS, ReadRequest, open_shard, verify_file
from llmfoundry_lite.checkpoint.state import DTYPE_NAMES, DTYPES, Tensors, describe_keys, is_ignored, local_tensor
from llmfoundry_lite.checkpoint.store import Checkpoint, CheckpointStore, Lease, open_checkpoint
from llmfoundry_lite.checkpoint.verify import check_present
from llmfoundry_lite.config.layout import RowRanges
from llmfoundry_lite.errors import (
    CheckpointError,
    DamagedCheckpointError,
    IncompleteCheckpointError,
    TransientError,
    UnsoundCheckpointError,
)
from llmfoundry_lite.ranks import exchange

MAX_JUDGED = 16
"""Files that rank 0 reads again when others report them; a node that has lost its disk reports many."""

Check = Callable[[Manifest], None]


class Restored(NamedTuple):
    """The checkpoint that a run carries on from."""

    manifest: Manifest | None
    """None if there was nothing to load."""
    url: str
    notes: list[str]
    """A line for each checkpoint that was passed over. The same on all ranks."""


def load(
    url: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    cast: bool = False,
    ignore_keys: Sequence[str] = (),
    check: Check = lambda manifest: None,
) -> Manifest:
    """Restore weights, and with `optimizer` its whole state, from one checkpoint folder.

    `ignore_keys` are patterns (`model/transformer.wpe.*`) of tensors to leave as they are; a parameter of which
    anything is left starts with no optimizer state. `cast` permits another dtype. `check` is shown the manifest first
    and may raise CheckpointError. Raises CheckpointError on all ranks, and then nothing has changed.
    """
    checkpoint = None
    with exchange.raising_on_all_ranks():
        if exchange.rank_and_size()[0] == 0:
            checkpoint = open_checkpoint(url)
    return _load_together(checkpoint, model, optimizer, cast, ignore_keys, check)


def load_newest(
    store: CheckpointStore,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    lease: Lease | None = None,
    cast: bool = False,
    ignore_keys: Sequence[str] = (),
    check: Check = lambda manifest: None,
) -> Restored:
    """Restore from the newest intact checkpoint of a run; damaged ones are set aside if rank 0 has the `lease`.

    Only what rank 0 sees itself counts: what is wrong for another rank alone raises, naming its host and the file.
    A checkpoint that is whole but does not fit this run raises: an older one would not fit better.
    """
    is_main = exchange.rank_and_size()[0] == 0
    passed: dict[str, str] = {}
    while True:
        checkpoint = None
        with exchange.raising_on_all_ranks():
            if is_main:
                search = store.newest_intact(check_present, quarantine=lease, skip=passed)
                checkpoint = search.checkpoint
                passed |= search.passed
        name = exchange.broadcast_json(checkpoint.name if checkpoint else None)
        if name is None:
            return Restored(None, store.root.url, exchange.broadcast_json([*passed.values()]))
        try:
            manifest = _load_together(checkpoint, model, optimizer, cast, ignore_keys, check)
            return Restored(manifest, store.root.child(name).url, exchange.broadcast_json([*passed.values()]))
        except (DamagedCheckpointError, IncompleteCheckpointError) as fault:
            if is_main:
                passed[name] = store.set_aside(name, fault, lease)


def _load_together(
    checkpoint: Checkpoint | None,
    model: nn.Module,
    optimizer: Optimizer | None,
    cast: bool,
    ignore_keys: Sequence[str],
    check: Check,
) -> Manifest:
    """Restore on all ranks. Only rank 0 passes a `checkpoint`; the others get the manifest that rank 0 has read."""
    url = exchange.broadcast_json(checkpoint.url if checkpoint else None)
    raw = exchange.broadcast_bytes(checkpoint.raw if checkpoint else b"")
    with exchange.raising_on_all_ranks():  # one node may lack a package
        checkpoint = checkpoint or Checkpoint(url, open_folder(url), decode(raw, url))
    assert checkpoint is not None
    names = gather_names(model, optimizer)
    targets, staging, error = None, {}, None
    try:
        check(checkpoint.manifest)
        targets = find_targets(checkpoint, model, optimizer, names, cast=cast, ignore=ignore_keys)
        staging = read_tensors(checkpoint, targets.tensors, targets.row_orders)
    except Exception as caught:
        error = caught
    error = _judge(error, checkpoint)
    exchange.raise_on_all_ranks(error)
    assert targets is not None
    targets.write(staging)
    return checkpoint.manifest


def _judge(error: Exception | None, checkpoint: Checkpoint) -> Exception | None:
    """Return this rank's error or, on a rank 0 that has none, its decision on files that others could not read. It
    verifies them itself: either the checkpoint is at fault, or that rank's node, which is named. Collective."""
    is_unsound = isinstance(error, UnsoundCheckpointError)
    if not any(exchange.all_reduce_max([int(is_unsound)])):
        return error
    report = None
    if isinstance(error, UnsoundCheckpointError):
        report = [error.file, socket.gethostname(), str(error), error.is_transient]
    reports = exchange.all_gather_json(report)
    if error is not None or exchange.rank_and_size()[0] != 0:
        return error
    complaints = [(rank, *report) for rank, report in enumerate(reports) if report is not None]
    accused = {name for _, name, *_ in complaints}
    for file in [file for file in checkpoint.manifest.files if file.name in accused][:MAX_JUDGED]:
        try:
            verify_file(checkpoint.folder, file)
        except UnsoundCheckpointError as found:
            return found
    rank, _, host, text, may_pass = complaints[0]
    seen = CheckpointError(
        f"rank {rank} on host {host}: {text}; rank 0 on host {socket.gethostname()} finds this file sound, so nothing "
        f"is wrong with the checkpoint: see on {host} whether the disk is mounted, may be read and works, then run the "
        "same command again"
    )
    seen.__cause__ = TransientError(text) if may_pass else None
    return seen


# ----------------------------------------------------------------------------------------------------- what is wanted


class Targets(NamedTuple):
    """Where a checkpoint's tensors belong on this rank."""

    tensors: Tensors
    row_orders: dict[str, RowRanges]
    optimizer: Optimizer | None
    parameters: dict[str, nn.Parameter]
    numbers: dict[str, Any]

    def write(self, staging: Tensors) -> None:
        """Copy local tensors to model and optimizer."""
        with torch.no_grad():
            for key, tensor in self.tensors.items():
                if key.startswith("model/"):
                    local_tensor(tensor).copy_(staging[key])
            if self.optimizer is not None:
                slots = {key: tensor for key, tensor in staging.items() if key.startswith("optim/")}
                state.write_optimizer(self.optimizer, self.parameters, self.numbers, slots, self.tensors)


class Names(NamedTuple):
    """Names of the state that all ranks hold together; under a pipeline each holds some of it."""

    keys: set[str]
    groups: list[set[str]]
    """The names of the parameters in each group of the optimizer."""


def gather_names(model: nn.Module, optimizer: Optimizer | None) -> Names:
    """Gather names over all ranks. Raises CheckpointError on all of them when an optimizer is not of its model."""
    with exchange.raising_on_all_ranks():
        groups = []
        if optimizer is not None:
            names = state.parameter_names(model, optimizer)
            groups = [sorted({names[id(p)] for p in group["params"]}) for group in optimizer.param_groups]
        mine = [sorted(state.read_state(model).tensors), groups]
    held = [value for value, _ in exchange.all_gather_distinct(mine)]
    groups = [set().union(*(names[i] for _, names in held)) for i in range(len(held[0][1]))]
    return Names(set().union(*(keys for keys, _ in held)), groups)


def find_targets(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: Optimizer | None,
    names: Names,
    *,
    cast: bool,
    ignore: Sequence[str],
) -> Targets:
    """Match keys, shapes and dtypes of both sides. Raises CheckpointError naming those that differ."""
    manifest, where = checkpoint.manifest, checkpoint.url
    everything = state.read_state(model).tensors
    for pattern in ignore:
        if not any(is_ignored(key, [pattern]) for key in (*names.keys, *manifest.tensors)):
            raise CheckpointError(
                f"{where}: load_ignore_keys: {pattern} is no tensor, neither there nor in this run; names are such as "
                f"{min(names.keys, default='model/…')} and may have * in them"
            )
    tensors = {key: t for key, t in everything.items() if not is_ignored(key, ignore)}
    there = {key for key in manifest.tensors if key.startswith("model/") and not is_ignored(key, ignore)}
    needed = {key for key in names.keys if not is_ignored(key, ignore)}
    if there != needed:
        raise CheckpointError(
            f"{where}: {describe_keys(there - needed, needed - there)}; is this the same model? "
            "load_ignore_keys leaves tensors out"
        )
    for key, tensor in tensors.items():
        record = manifest.tensors[key]
        if tuple(tensor.shape) != record.shape:
            raise CheckpointError(f"{where}: {key} is {list(record.shape)}, this run needs {list(tensor.shape)}")
        if DTYPE_NAMES[tensor.dtype] != record.dtype and not cast:
            raise CheckpointError(
                f"{where}: {key} is {record.dtype}, this run keeps {DTYPE_NAMES[tensor.dtype]}; load_cast=true converts"
            )
    if optimizer is None:
        return Targets(tensors, state.row_orders(model, tensors), None, {}, {})
    if manifest.optimizer is None:
        raise CheckpointError(f"{where}: holds no optimizer state; load_weights_only: true starts a new optimizer")
    state.check_optimizer(optimizer, names.groups, manifest.optimizer, where)
    without_state = state.without_slots(manifest, ignore)
    slots, parameters = state.optimizer_targets(model, optimizer, manifest, without_state)
    numbers = {name: kept for name, kept in manifest.optimizer["state"].items() if name not in without_state}
    tensors |= slots
    orders = state.row_orders(model, tensors)
    return Targets(tensors, orders, optimizer, parameters, manifest.optimizer | {"state": numbers})


# ------------------------------------------------------------------------------------------------------------ reading


class ChunkRead(NamedTuple):
    """A part of a chunk, to be read."""

    chunk: Chunk
    offset: tuple[int, ...]
    """Within the chunk."""
    target: torch.Tensor
    """Memory of the part's shape, to read into."""


def read_tensors(checkpoint: Checkpoint, like: Tensors, row_orders: Mapping[str, RowRanges] = NO_ORDERS) -> Tensors:
    """Return the local tensors of `like` as stored, on the host. Raises UnsoundCheckpointError."""
    staging, by_file = find_reads(checkpoint.manifest, like, row_orders)
    read_files(checkpoint, by_file)
    return staging


def read_files(checkpoint: Checkpoint, by_file: Mapping[int, Sequence[ChunkRead]]) -> None:
    """Read parts of chunks, grouped by the index of their file. Raises UnsoundCheckpointError."""
    at_once = max(min(len(by_file), checkpoint.folder.max_open_files), 1)
    threads = max(NUM_THREADS // at_once, 1)
    with ThreadPoolExecutor(at_once, thread_name_prefix="checkpoint") as pool:
        list(pool.map(lambda index: read_shard(checkpoint, index, by_file[index], threads), sorted(by_file)))


def find_reads(
    manifest: Manifest, like: Tensors, row_orders: Mapping[str, RowRanges] = NO_ORDERS
) -> tuple[Tensors, dict[int, list[ChunkRead]]]:
    """Return memory for the local tensors of `like`, and the reads that fill it, by the index of the file."""
    staging: Tensors = {}
    by_file: dict[int, list[ChunkRead]] = {}
    for name, tensor in like.items():
        record = manifest.tensors[name]
        boxes = boxes_of(tensor, row_orders.get(name))
        assert sum(math.prod(lengths) for (_, lengths), _ in boxes) == local_tensor(tensor).numel(), f"{name}: {boxes}"
        staging[name] = torch.empty(local_tensor(tensor).shape, dtype=DTYPES[record.dtype], device="cpu")
        for (offset, lengths), at in boxes:
            target = staging[name].narrow(0, at, lengths[0]) if name in row_orders else staging[name]
            for file, chunk in manifest.overlapping(name, offset, lengths):
                by_file.setdefault(file, []).append(read_of(chunk, offset, lengths, target))
    return staging, by_file


def read_of(chunk: Chunk, offset: Sequence[int], lengths: Sequence[int], target: torch.Tensor) -> ChunkRead:
    """Return the read of a chunk's overlap with a box of its tensor; `target` is the box's memory."""
    within = []
    for dim, (begin, length, its_begin, its_length) in enumerate(
        zip(offset, lengths, chunk.offset, chunk.shape, strict=True)
    ):
        first = max(begin, its_begin)
        within.append(first - its_begin)
        target = target.narrow(dim, first - begin, min(begin + length, its_begin + its_length) - first)
    return ChunkRead(chunk, tuple(within), target)


def read_shard(checkpoint: Checkpoint, index: int, reads: Sequence[ChunkRead], num_threads: int) -> None:
    """Read parts of one file's chunks. Raises UnsoundCheckpointError."""
    requests, gathers = [], []
    with open_shard(checkpoint.folder, checkpoint.manifest.files[index]) as shard:
        for chunk, offset, target in reads:
            first, count = hull(chunk.shape, offset, target.shape)
            begin = shard.find(chunk) + first * ITEM_BYTES[chunk.dtype]
            end = begin + count * ITEM_BYTES[chunk.dtype]
            if count == target.numel() and target.is_contiguous():
                memory = target.reshape(-1).view(torch.uint8).numpy()
            else:
                memory = np.empty(end - begin, np.uint8)
                strides = [math.prod(chunk.shape[dim + 1 :]) for dim in range(len(chunk.shape))]
                gathers.append((target, torch.from_numpy(memory).view(DTYPES[chunk.dtype]), strides))
            requests.append(ReadRequest(begin, end, memory, chunk.tensor))
        shard.read(requests, num_threads=num_threads)
    for target, values, strides in gathers:
        target.copy_(values.as_strided(target.shape, strides))


def hull(shape: Sequence[int], offset: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    """Return first item and number of items of the shortest contiguous range around a box of a row-major array."""
    first = last = 0
    for size, begin, length in zip(shape, offset, lengths, strict=True):
        first = first * size + begin
        last = last * size + begin + length - 1
    return first, last - first + 1
