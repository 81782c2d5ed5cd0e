"""Restores a model and its optimizer from safetensors shards, on any number of ranks.

Each rank reads into new memory and verifies the blocks that it reads. No rank changes its model before all ranks have
agreed that everything was read.
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

MAX_FILES_READ_AGAIN = 16
"""How many of the files that other ranks could not read rank 0 reads again. A node whose disk has failed may report
every file, and one damaged file is enough to decide."""

ManifestCheck = Callable[[Manifest], None]
"""Raises CheckpointError if the run cannot carry on from a checkpoint with this manifest."""


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
    check: ManifestCheck = lambda manifest: None,
) -> Manifest:
    """Restore a model's weights, and the whole state of its `optimizer` if there is one, from one checkpoint folder.

    Collective. `cast` permits tensors whose dtype differs from the checkpoint's, and converts them. `ignore_keys` are
    patterns (`model/transformer.wpe.*`) of tensors that are left as they are; a parameter for which any tensor is left
    as it is starts with no optimizer state. `check` is called with the manifest first, and may raise CheckpointError.

    Returns the checkpoint's manifest. Raises CheckpointError on all ranks, in which case nothing has changed.
    """
    checkpoint = None
    with exchange.raising_on_all_ranks():
        rank, _ = exchange.rank_and_size()
        if rank == 0:
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
    check: ManifestCheck = lambda manifest: None,
) -> Restored:
    """Restore a model and its optimizer from the newest intact checkpoint of a run.

    Collective. Damaged and incomplete checkpoints are passed over; if rank 0 passes the run's `lease`, damaged ones are
    also renamed. Other arguments are those of `load`.

    Only rank 0 decides that a checkpoint is damaged. If another rank alone cannot read a file, this raises
    CheckpointError with that rank's host and the file. It also raises if the newest intact checkpoint does not fit this
    run, because an older one would not fit better.
    """
    rank, _ = exchange.rank_and_size()
    passed_over: dict[str, str] = {}  # on rank 0: name of a checkpoint -> the line that says why
    while True:
        checkpoint = None
        with exchange.raising_on_all_ranks():
            if rank == 0:
                search = store.newest_intact(check_present, quarantine=lease, skip=passed_over)
                checkpoint = search.checkpoint
                passed_over |= search.passed_over

        name = exchange.broadcast_json(checkpoint.name if checkpoint else None)
        if name is None:
            return Restored(None, store.root.url, exchange.broadcast_json([*passed_over.values()]))
        try:
            manifest = _load_together(checkpoint, model, optimizer, cast, ignore_keys, check)
        except (DamagedCheckpointError, IncompleteCheckpointError) as error:
            if rank == 0:
                passed_over[name] = store.set_aside(name, error, lease)
        else:
            return Restored(manifest, store.root.child(name).url, exchange.broadcast_json([*passed_over.values()]))


def _load_together(
    checkpoint: Checkpoint | None,
    model: nn.Module,
    optimizer: Optimizer | None,
    cast: bool,
    ignore_keys: Sequence[str],
    check: ManifestCheck,
) -> Manifest:
    """Restore one checkpoint on all ranks, and return its manifest; the arguments are those of `load`.

    Collective. Only rank 0 passes a `checkpoint`. The others get the manifest's bytes from rank 0, so that all work
    from the same one even if their views of the disk differ. Raises CheckpointError on all ranks before any rank
    changes its model.
    """
    url = exchange.broadcast_json(checkpoint.url if checkpoint else None)
    raw_manifest = exchange.broadcast_bytes(checkpoint.manifest_bytes if checkpoint else b"")
    with exchange.raising_on_all_ranks():  # a node may lack a package that the URL needs
        if checkpoint is None:
            checkpoint = Checkpoint(url, open_folder(url), decode(raw_manifest, url))
    assert checkpoint is not None

    names = gather_names(model, optimizer)
    targets = None
    stored_tensors: Tensors = {}
    # A rank that raised at once would leave the others waiting in the next collective, so an error is kept until then.
    error = None
    try:
        check(checkpoint.manifest)
        targets = find_targets(checkpoint, model, optimizer, names, cast=cast, ignore=ignore_keys)
        stored_tensors = read_tensors(checkpoint, targets.tensors, targets.row_orders)
    except Exception as caught:
        error = caught
    error = _blame_file_or_node(error, checkpoint)
    exchange.raise_on_all_ranks(error)

    assert targets is not None
    targets.write(stored_tensors)
    return checkpoint.manifest


class ReadFailure(NamedTuple):
    """Report of a rank that could not read a file, for the other ranks. Travels as a JSON list."""

    file: str
    host: str
    message: str
    is_transient: bool


def _blame_file_or_node(error: Exception | None, checkpoint: Checkpoint) -> Exception | None:
    """Decide whether a file that some rank could not read is damaged, or whether that rank's node is at fault.

    Collective: every rank passes the error that it met while reading, or None. Rank 0 reads the reported files again.
    If one is damaged for rank 0 too, the checkpoint is at fault. If all are sound, the reporting rank's node is.

    Returns the error that this rank should raise, or None. On rank 0 that is its own error, or the decision.
    """
    has_unsound_file = isinstance(error, UnsoundCheckpointError)
    if not any(exchange.all_reduce_max([int(has_unsound_file)])):
        return error
    own_failure = None
    if isinstance(error, UnsoundCheckpointError):
        own_failure = ReadFailure(error.file, socket.gethostname(), str(error), error.is_transient)
    gathered = exchange.all_gather_json(own_failure)  # None for each rank that read everything

    rank, _ = exchange.rank_and_size()
    if rank != 0 or error is not None:
        return error  # rank 0 decides, if it could read everything itself

    failures = {rank: ReadFailure(*failure) for rank, failure in enumerate(gathered) if failure is not None}
    reported_names = {failure.file for failure in failures.values()}
    reported_files = [file for file in checkpoint.manifest.files if file.name in reported_names]
    for file in reported_files[:MAX_FILES_READ_AGAIN]:
        try:
            verify_file(checkpoint.folder, file)
        except UnsoundCheckpointError as damage:
            return damage

    failed_rank = min(failures)
    failure = failures[failed_rank]
    node_error = CheckpointError(
        f"rank {failed_rank} on host {failure.host}: {failure.message}; rank 0 on host {socket.gethostname()} finds "
        f"this file sound, so nothing is wrong with the checkpoint: see on {failure.host} whether the disk is mounted, "
        "may be read and works, then run the same command again"
    )
    if failure.is_transient:
        node_error.__cause__ = TransientError(failure.message)
    return node_error


# ------------------------------------------------------------------------------- matching a checkpoint with a model


class Targets(NamedTuple):
    """The tensors and numbers of this rank that a checkpoint restores."""

    tensors: Tensors
    """Key in the checkpoint -> a tensor of the model, or one like the optimizer slot to restore."""
    row_orders: dict[str, RowRanges]
    """Key -> the order in which ranks hold the tensor's rows, if it is not the tensor's own."""
    optimizer: Optimizer | None
    """None if no optimizer is restored; the other fields below are then empty."""
    parameters: dict[str, nn.Parameter]
    """The optimizer's parameters by name."""
    saved_optimizer: dict[str, Any]
    """The optimizer's class, groups and numbers, as in the manifest, for the parameters that are restored."""

    def write(self, stored_tensors: Tensors) -> None:
        """Copy what was read into the model and the optimizer. `stored_tensors` has this rank's part of each target."""
        with torch.no_grad():
            for key, tensor in self.tensors.items():
                if key.startswith("model/"):
                    local_tensor(tensor).copy_(stored_tensors[key])
            if self.optimizer is not None:
                slots = {key: tensor for key, tensor in stored_tensors.items() if key.startswith("optim/")}
                state.write_optimizer(self.optimizer, self.parameters, self.saved_optimizer, slots, self.tensors)


class Names(NamedTuple):
    """Names of the state that all ranks hold together. With pipeline parallelism each rank holds some of it."""

    keys: set[str]
    """Keys of the model's tensors, `model/<name>`."""
    groups: list[set[str]]
    """The names of the parameters in each group of the optimizer."""


def gather_names(model: nn.Module, optimizer: Optimizer | None) -> Names:
    """Gather the names of tensors and of optimizer parameters over all ranks.

    Collective. Raises CheckpointError on all ranks if a rank's optimizer does not belong to its model.
    """
    with exchange.raising_on_all_ranks():
        own_groups = []
        if optimizer is not None:
            parameter_names = state.parameter_names(model, optimizer)
            for group in optimizer.param_groups:
                own_groups.append(sorted({parameter_names[id(parameter)] for parameter in group["params"]}))
        own_names = [sorted(state.read_state(model).tensors), own_groups]

    distinct_names = [names for names, _ in exchange.all_gather_distinct(own_names)]
    _, first_groups = distinct_names[0]
    all_keys: set[str] = set()
    all_groups: list[set[str]] = [set() for _ in first_groups]
    for keys, groups in distinct_names:
        all_keys.update(keys)
        for joined_group, group in zip(all_groups, groups, strict=False):
            joined_group.update(group)
    return Names(all_keys, all_groups)


def find_targets(
    checkpoint: Checkpoint,
    model: nn.Module,
    optimizer: Optimizer | None,
    names: Names,
    *,
    cast: bool,
    ignore: Sequence[str],
) -> Targets:
    """Match a checkpoint's tensors with this rank's model and optimizer, by name, shape and dtype.

    `names` are those of all ranks, so that every rank finds the same missing names. `cast` permits other dtypes.
    Tensors that match a pattern in `ignore` are left out on both sides.

    Returns what to restore on this rank. Raises CheckpointError that names the tensors which differ.
    """
    manifest = checkpoint.manifest
    model_tensors = state.read_state(model).tensors
    _check_ignore_patterns(checkpoint, names, ignore)
    tensors = {key: tensor for key, tensor in model_tensors.items() if not is_ignored(key, ignore)}
    _check_model_keys(checkpoint, names, ignore)
    _check_shapes_and_dtypes(checkpoint, tensors, cast=cast)
    if optimizer is None:
        return Targets(tensors, state.row_orders(model, tensors), None, {}, {})

    if manifest.optimizer is None:
        raise CheckpointError(
            f"{checkpoint.url}: holds no optimizer state; load_weights_only: true starts a new optimizer"
        )
    state.check_optimizer(optimizer, names.groups, manifest.optimizer, checkpoint.url)
    without_state = state.parameters_without_state(manifest, ignore)
    slots, parameters = state.optimizer_targets(model, optimizer, manifest, without_state)
    tensors |= slots
    numbers = {name: slots for name, slots in manifest.optimizer["state"].items() if name not in without_state}
    saved_optimizer = manifest.optimizer | {"state": numbers}
    return Targets(tensors, state.row_orders(model, tensors), optimizer, parameters, saved_optimizer)


def _check_ignore_patterns(checkpoint: Checkpoint, names: Names, ignore: Sequence[str]) -> None:
    """Raise CheckpointError for a pattern in `ignore` that matches no tensor of the checkpoint or of the run."""
    for pattern in ignore:
        if not any(is_ignored(key, [pattern]) for key in (*names.keys, *checkpoint.manifest.tensors)):
            raise CheckpointError(
                f"{checkpoint.url}: load_ignore_keys: {pattern} is no tensor, neither there nor in this run; names are "
                f"such as {min(names.keys, default='model/…')} and may have * in them"
            )


def _check_model_keys(checkpoint: Checkpoint, names: Names, ignore: Sequence[str]) -> None:
    """Raise CheckpointError unless checkpoint and run have model tensors of the same names, apart from `ignore`."""
    saved_keys = {key for key in checkpoint.manifest.tensors if key.startswith("model/")}
    saved_keys = {key for key in saved_keys if not is_ignored(key, ignore)}
    needed_keys = {key for key in names.keys if not is_ignored(key, ignore)}
    if saved_keys != needed_keys:
        difference = describe_keys(saved_keys - needed_keys, needed_keys - saved_keys)
        raise CheckpointError(
            f"{checkpoint.url}: {difference}; is this the same model? load_ignore_keys leaves tensors out"
        )


def _check_shapes_and_dtypes(checkpoint: Checkpoint, tensors: Tensors, *, cast: bool) -> None:
    """Raise CheckpointError if a model tensor has another shape than in the checkpoint, or another dtype, which `cast`
    permits."""
    for key, tensor in tensors.items():
        saved = checkpoint.manifest.tensors[key]
        dtype = DTYPE_NAMES[tensor.dtype]
        if tuple(tensor.shape) != saved.shape:
            raise CheckpointError(
                f"{checkpoint.url}: {key} is {list(saved.shape)}, this run needs {list(tensor.shape)}"
            )
        if dtype != saved.dtype and not cast:
            raise CheckpointError(
                f"{checkpoint.url}: {key} is {saved.dtype}, this run keeps {dtype}; load_cast=true converts"
            )


# ------------------------------------------------------------------------------------------------------------ reading


class ChunkRead(NamedTuple):
    """A rectangular part of a stored chunk, and the memory to read it into."""

    chunk: Chunk
    offset: tuple[int, ...]
    """Where the part begins in the chunk, in each dimension."""
    target: torch.Tensor
    """CPU memory of the part's shape. It may be strided."""


def read_tensors(checkpoint: Checkpoint, like: Tensors, row_orders: Mapping[str, RowRanges] = NO_ORDERS) -> Tensors:
    """Read this rank's parts of tensors from a checkpoint into new CPU memory, in the stored dtypes.

    `like` has, by key, a tensor that is sharded as the result has to be. `row_orders` has the order in which ranks hold
    the rows of a tensor, if it is not the tensor's own.

    Raises UnsoundCheckpointError if a file is absent, unreadable or damaged.
    """
    tensors, reads_by_file = find_reads(checkpoint.manifest, like, row_orders)
    read_files(checkpoint, reads_by_file)
    return tensors


def read_files(checkpoint: Checkpoint, reads_by_file: Mapping[int, Sequence[ChunkRead]]) -> None:
    """Read parts of chunks, several files at a time. `reads_by_file` has the reads by the index of their file.

    Raises UnsoundCheckpointError if a file is absent, unreadable or damaged.
    """
    num_files_at_once = max(min(len(reads_by_file), checkpoint.folder.max_open_files), 1)
    threads_per_file = max(NUM_THREADS // num_files_at_once, 1)

    def read(index: int) -> None:
        read_shard(checkpoint, index, reads_by_file[index], threads_per_file)

    with ThreadPoolExecutor(num_files_at_once, thread_name_prefix="checkpoint") as pool:
        list(pool.map(read, sorted(reads_by_file)))


def find_reads(
    manifest: Manifest, like: Tensors, row_orders: Mapping[str, RowRanges] = NO_ORDERS
) -> tuple[Tensors, dict[int, list[ChunkRead]]]:
    """Find the parts of stored chunks that make up this rank's parts of tensors. Nothing is read yet.

    `like` and `row_orders` are as for `read_tensors`. Returns uninitialised CPU memory for the local part of each
    tensor, and the reads that fill this memory, by the index of their file in the manifest.
    """
    tensors: Tensors = {}
    reads_by_file: dict[int, list[ChunkRead]] = {}
    for name, tensor in like.items():
        local_part = local_tensor(tensor)
        boxes = boxes_of(tensor, row_orders.get(name))
        assert sum(math.prod(box.lengths) for box in boxes) == local_part.numel(), f"{name}: {boxes}"

        memory = torch.empty(local_part.shape, dtype=DTYPES[manifest.tensors[name].dtype], device="cpu")
        tensors[name] = memory
        for box in boxes:
            target = memory
            if name in row_orders:  # there may be several boxes, one after the other along the rows
                target = memory.narrow(0, box.first_row, box.lengths[0])
            for file, chunk in manifest.overlapping(name, box.offset, box.lengths):
                reads_by_file.setdefault(file, []).append(read_of_overlap(chunk, box.offset, box.lengths, target))
    return tensors, reads_by_file


def read_of_overlap(chunk: Chunk, offset: Sequence[int], lengths: Sequence[int], target: torch.Tensor) -> ChunkRead:
    """Return the read of the part of a chunk that overlaps a box of the same tensor.

    The box begins at `offset` in the tensor and has `lengths`; `target` is the box's memory. The read's target is the
    part of it that the chunk fills.
    """
    offset_in_chunk = []
    for dim, (box_begin, box_length) in enumerate(zip(offset, lengths, strict=True)):
        chunk_begin = chunk.offset[dim]
        begin = max(box_begin, chunk_begin)
        end = min(box_begin + box_length, chunk_begin + chunk.shape[dim])
        offset_in_chunk.append(begin - chunk_begin)
        target = target.narrow(dim, begin - box_begin, end - begin)
    return ChunkRead(chunk, tuple(offset_in_chunk), target)


def read_shard(checkpoint: Checkpoint, index: int, reads: Sequence[ChunkRead], num_threads: int) -> None:
    """Read parts of chunks from the file with this index in the manifest, and verify the blocks that are touched.

    A file is read in contiguous ranges. If a part is contiguous in its chunk and in its target, it is read in place.
    Otherwise the shortest range around it is read into scratch memory, from which the part is copied at the end.

    Raises UnsoundCheckpointError if the file is absent, unreadable or damaged.
    """
    requests = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []
    with open_shard(checkpoint.folder, checkpoint.manifest.files[index]) as shard:
        for chunk, offset, target in reads:
            first_item, num_items = enclosing_range(chunk.shape, offset, target.shape)
            item_bytes = ITEM_BYTES[chunk.dtype]
            begin = shard.begin_of(chunk) + first_item * item_bytes
            end = begin + num_items * item_bytes

            if num_items == target.numel() and target.is_contiguous():
                memory = target.reshape(-1).view(torch.uint8).numpy()
            else:
                memory = np.empty(end - begin, np.uint8)
                items = torch.from_numpy(memory).view(DTYPES[chunk.dtype])
                strides_in_chunk = [math.prod(chunk.shape[dim + 1 :]) for dim in range(len(chunk.shape))]
                copies.append((target, items.as_strided(target.shape, strides_in_chunk)))
            requests.append(ReadRequest(begin, end, memory, chunk.tensor))
        shard.read(requests, num_threads=num_threads)

    for target, values in copies:
        target.copy_(values)


def enclosing_range(shape: Sequence[int], offset: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    """Return the shortest contiguous range of a row-major array's items that includes a box: first item, and count.

    >>> enclosing_range((4, 10), (1, 2), (2, 3))  # rows 1 and 2, columns 2 to 4: items 12 to 24
    (12, 13)
    """
    first = 0  # row-major index of the box's first item
    last = 0
    for size, begin, length in zip(shape, offset, lengths, strict=True):
        first = first * size + begin
        last = last * size + begin + length - 1
    return first, last - first + 1
