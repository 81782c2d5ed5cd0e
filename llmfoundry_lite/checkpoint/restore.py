"""Restores a model and its optimizer from safetensors shards, on any number of ranks.

`load` restores one checkpoint and `load_newest` the newest intact one of a run. Both have these steps:

1. Rank 0 reads the manifest, and the others get it from rank 0.
2. Ranks exchange the names of their tensors, and each matches its own with the manifest (`find_targets`).
3. Each rank reads its parts into new memory, and verifies the blocks that it reads (`read_tensors`).
4. Ranks agree that everything was read, or all of them raise. Only then does any rank change its model.

`state` names tensors and writes the optimizer's state, `planning` says which parts a rank holds, and `shards` reads
files.
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
from llmfoundry_lite.checkpoint.manifest import Manifest
from llmfoundry_lite.checkpoint.manifest_json import decode
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
    """Restore a model's weights, and the state of its optimizer if one is given, from one checkpoint.

    Collective: every rank passes the same arguments, with its own model and optimizer.

    url: the checkpoint, such as `runs/mpt/checkpoints/ba200`. It may come from any number of ranks.
    cast: whether a tensor may have another dtype than in the checkpoint; it is then converted.
    ignore_keys: patterns of keys, such as `model/transformer.wpe.*`, of tensors that are left as they are. If any
    tensor
        of a parameter is left out, the parameter starts without optimizer state.
    check: called with the manifest before anything else is read. It may raise CheckpointError.

    Returns the checkpoint's manifest. Raises CheckpointError on all ranks if the checkpoint is absent, is damaged or
    does not fit; model and optimizer are then unchanged.
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
    """Restore a model and its optimizer from the newest intact checkpoint of a run, in its second place too.

    Collective. Damaged and incomplete checkpoints are passed over, and the next older one is tried. `lease` is the
    run's lease, on rank 0: with it, damaged checkpoints are also renamed. The other arguments are those of `load`.

    Returns the checkpoint, or no manifest if the run has none; the model is then unchanged. Raises CheckpointError on
    all ranks if the newest intact checkpoint does not fit this run, because an older one would not fit better. Only
    rank 0 decides that a checkpoint is damaged: if another rank alone cannot read a file, that rank's host is at fault,
    and the error names it.
    """
    rank, _ = exchange.rank_and_size()
    passed_over: dict[str, str] = {}  # on rank 0: URL of a checkpoint -> the line that says why
    while True:
        # Rank 0 searches by manifests and file sizes alone.
        checkpoint = None
        with exchange.raising_on_all_ranks():
            if rank == 0:
                search = store.newest_intact(check_present, quarantine=lease, skip=passed_over)
                checkpoint = search.checkpoint
                passed_over |= search.passed_over
        url = exchange.broadcast_json(checkpoint.url if checkpoint else None)
        if url is None:
            notes = exchange.broadcast_json([*passed_over.values()])
            return Restored(None, store.root.url, notes)

        # All ranks read. If the content turns out to be damaged, all ranks raise the same error, and search again.
        try:
            manifest = _load_together(checkpoint, model, optimizer, cast, ignore_keys, check)
        except (DamagedCheckpointError, IncompleteCheckpointError) as error:
            if checkpoint is not None:  # on rank 0
                place = store.place_of(checkpoint.folder)
                passed_over[url] = place.set_aside(checkpoint.name, error, lease)
        else:
            notes = exchange.broadcast_json([*passed_over.values()])
            return Restored(manifest, url, notes)


def _load_together(
    checkpoint: Checkpoint | None,
    model: nn.Module,
    optimizer: Optimizer | None,
    cast: bool,
    ignore_keys: Sequence[str],
    check: ManifestCheck,
) -> Manifest:
    """Restore one checkpoint on all ranks, and return its manifest.

    Collective. `checkpoint` is the one that rank 0 has opened, and None on all other ranks; the other arguments are
    those of `load`. Raises CheckpointError on all ranks, before any rank changes its model.
    """
    # All ranks get the manifest's bytes from rank 0, so that they agree even if their views of the disk differ.
    url = exchange.broadcast_json(checkpoint.url if checkpoint else None)
    raw_manifest = exchange.broadcast_bytes(checkpoint.manifest_bytes if checkpoint else b"")
    with exchange.raising_on_all_ranks():  # a node may lack a package that the URL needs
        if checkpoint is None:
            checkpoint = Checkpoint(url, open_folder(url), decode(raw_manifest, url))
    assert checkpoint is not None
    names = gather_names(model, optimizer)

    # Each rank reads its parts. Nothing in this block is collective. A rank that raised at once would leave the others
    # waiting in the next collective, so an error is kept until then.
    targets = None
    stored_tensors: Tensors = {}
    error = None
    try:
        check(checkpoint.manifest)
        targets = find_targets(checkpoint, model, optimizer, names, cast=cast, ignore=ignore_keys)
        stored_tensors = read_tensors(checkpoint, targets.tensors, targets.row_orders)
    except Exception as caught:
        error = caught
    error = _blame_file_or_node(error, checkpoint)
    exchange.raise_on_all_ranks(error)

    # Every rank has read everything.
    assert targets is not None
    targets.write(stored_tensors)
    return checkpoint.manifest


class ReadFailure(NamedTuple):
    """Report of a rank that could not read a file, for the other ranks. It is sent as a JSON list."""

    file: str
    """Name of the file, as in the manifest."""
    host: str
    """Host of the rank."""
    message: str
    is_transient: bool
    """Whether the error may pass, so that the same command may succeed later."""


def _blame_file_or_node(error: Exception | None, checkpoint: Checkpoint) -> Exception | None:
    """Decide whether a file that some rank could not read is damaged, or whether that rank's node is at fault.

    Collective: every rank passes the error that it met while reading, or None. Rank 0 reads the reported files again.
    If one is damaged for rank 0 too, the checkpoint is at fault. If all are sound, the reporting rank's node is.

    Returns the error that this rank passes to `raise_on_all_ranks`, or None. That function raises the error of the
    lowest rank that has one, so the decision is made by rank 0: it returns its own error or, if it has none, the damage
    that it found or an error that names the node. The other ranks return their own.
    """
    is_file_unsound = isinstance(error, UnsoundCheckpointError)
    is_unsound_on_a_rank = exchange.all_reduce_max([int(is_file_unsound)])[0]
    if not is_unsound_on_a_rank:
        return error  # all ranks leave here
    failure_of_this_rank = None
    if isinstance(error, UnsoundCheckpointError):
        failure_of_this_rank = ReadFailure(error.file, socket.gethostname(), str(error), error.is_transient)
    gathered_failures = exchange.all_gather_json(failure_of_this_rank)  # None from each rank that read everything

    # Only rank 0 goes on from here, if it could read everything itself. Nothing below is collective.
    rank, _ = exchange.rank_and_size()
    if rank != 0 or error is not None:
        return error

    # Read the reported files again, all of their blocks. If one is damaged, the checkpoint is at fault.
    failures: dict[int, ReadFailure] = {}  # by rank
    for failed_rank, failure in enumerate(gathered_failures):
        if failure is not None:
            failures[failed_rank] = ReadFailure(*failure)
    reported_names = {failure.file for failure in failures.values()}
    reported_files = [file for file in checkpoint.manifest.files if file.name in reported_names]
    for file in reported_files[:MAX_FILES_READ_AGAIN]:
        try:
            verify_file(checkpoint.folder, file)
        except UnsoundCheckpointError as damage:
            return damage

    # All files are sound here, so the node of the first rank that failed is at fault.
    first_failed_rank = min(failures)
    first_failure = failures[first_failed_rank]
    node_error = CheckpointError(
        f"rank {first_failed_rank} on host {first_failure.host}: {first_failure.message}; rank 0 on host "
        f"{socket.gethostname()} finds this file sound, so nothing is wrong with the checkpoint: see on "
        f"{first_failure.host} whether the disk is mounted, may be read and works, then run the same command again"
    )
    if first_failure.is_transient:
        node_error.__cause__ = TransientError(first_failure.message)
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
        """Copy what was read into the model, and replace the state of the optimizer.

        `stored_tensors` has this rank's part of each target, by key, on the CPU and in the checkpoint's dtype.
        """
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
    """Gather the names of model tensors and of optimizer parameters over all ranks.

    Collective. Every rank gets the same result, so that all find the same names missing in a checkpoint. `optimizer`
    None gives no groups. Raises CheckpointError on all ranks if a rank's optimizer does not belong to its model.
    """
    with exchange.raising_on_all_ranks():
        groups_of_this_rank = []
        if optimizer is not None:
            parameter_names = state.parameter_names(model, optimizer)
            for group in optimizer.param_groups:
                names_in_group = {parameter_names[id(parameter)] for parameter in group["params"]}
                groups_of_this_rank.append(sorted(names_in_group))
        keys_of_this_rank = sorted(state.read_state(model).tensors)

    # Ranks have the same names unless pipeline parallelism gives them different tensors. Join those that differ.
    gathered = exchange.all_gather_distinct([keys_of_this_rank, groups_of_this_rank])
    distinct_names = [keys_and_groups for keys_and_groups, _ in gathered]
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

    names: the names that all ranks hold together, from `gather_names`. They must be the checkpoint's.
    cast: whether a tensor may have another dtype than in the checkpoint.
    ignore: patterns of keys that are left out on both sides.

    Returns what to restore on this rank; nothing is read or changed. Raises CheckpointError, which names tensors that
    differ. Not collective, so only some ranks may raise, for instance about a shape.
    """
    # The model's tensors.
    manifest = checkpoint.manifest
    _check_ignore_patterns(checkpoint, names, ignore)
    _check_model_keys(checkpoint, names, ignore)
    model_tensors = state.read_state(model).tensors
    tensors = {key: tensor for key, tensor in model_tensors.items() if not is_ignored(key, ignore)}
    _check_shapes_and_dtypes(checkpoint, tensors, cast=cast)
    if optimizer is None:
        return Targets(tensors, state.row_orders(model, tensors), None, {}, {})

    # The optimizer's slots and numbers, except those of parameters from which a tensor is left out.
    if manifest.optimizer is None:
        raise CheckpointError(
            f"{checkpoint.url}: holds no optimizer state; load_weights_only: true starts a new optimizer"
        )
    state.check_optimizer(optimizer, names.groups, manifest.optimizer, checkpoint.url)
    without_state = state.parameters_without_state(manifest, ignore)
    slots, parameters = state.optimizer_targets(model, optimizer, manifest, without_state)
    tensors |= slots
    saved_numbers = manifest.optimizer["state"]
    numbers = {name: records for name, records in saved_numbers.items() if name not in without_state}
    saved_optimizer = manifest.optimizer | {"state": numbers}
    return Targets(tensors, state.row_orders(model, tensors), optimizer, parameters, saved_optimizer)


def _check_ignore_patterns(checkpoint: Checkpoint, names: Names, ignore: Sequence[str]) -> None:
    """Raise CheckpointError for a pattern in `ignore` that matches no tensor of the checkpoint or of the run, because
    it is misspelt then."""
    all_keys = (*names.keys, *checkpoint.manifest.tensors)
    for pattern in ignore:
        if not any(is_ignored(key, [pattern]) for key in all_keys):
            raise CheckpointError(
                f"{checkpoint.url}: load_ignore_keys: {pattern} is no tensor, neither there nor in this run; names are "
                f"such as {min(names.keys, default='model/…')} and may have * in them"
            )


def _check_model_keys(checkpoint: Checkpoint, names: Names, ignore: Sequence[str]) -> None:
    """Raise CheckpointError unless checkpoint and run have the same model tensors, by name.

    `names` are those of all ranks. Keys that match a pattern in `ignore` may be on one side only.
    """
    saved_keys = {key for key in checkpoint.manifest.tensors if key.startswith("model/")}
    saved_keys = {key for key in saved_keys if not is_ignored(key, ignore)}
    needed_keys = {key for key in names.keys if not is_ignored(key, ignore)}
    if saved_keys != needed_keys:
        difference = describe_keys(saved_keys - needed_keys, needed_keys - saved_keys)
        raise CheckpointError(
            f"{checkpoint.url}: {difference}; is this the same model? load_ignore_keys leaves tensors out"
        )


def _check_shapes_and_dtypes(checkpoint: Checkpoint, tensors: Tensors, *, cast: bool) -> None:
    """Raise CheckpointError if a model tensor has another shape than in the checkpoint, or another dtype unless `cast`.

    `tensors` are this rank's, by key; all of them are in the checkpoint.
    """
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
    """Read this rank's parts of tensors from a checkpoint into new CPU memory, and verify what is read.

    like: by key, a tensor with the shape and sharding of the result. A DTensor stands for this rank's part, and any
        other tensor for the whole. Its dtype, device and values do not matter.
    row_orders: by key, the order in which ranks hold a tensor's rows, if it is not the tensor's own.

    Returns the parts by key, in the dtypes of the checkpoint. Not collective. Raises UnsoundCheckpointError if a file
    is absent, unreadable or damaged.
    """
    tensors, reads_by_file = find_reads(checkpoint.manifest, like, row_orders)
    read_files(checkpoint, reads_by_file)
    return tensors


def read_files(checkpoint: Checkpoint, reads_by_file: Mapping[int, Sequence[ChunkRead]]) -> None:
    """Fill the targets of reads, which are grouped by the index of their file in the manifest.

    Several files are read at once, each by one or more threads. Raises UnsoundCheckpointError if a file is absent,
    unreadable or damaged.
    """
    # The folder limits how many files are open. If that leaves threads over, each file gets several.
    num_files_at_once = min(len(reads_by_file), checkpoint.folder.max_open_files)
    num_files_at_once = max(num_files_at_once, 1)
    threads_per_file = max(NUM_THREADS // num_files_at_once, 1)

    def read_file(file_index: int) -> None:
        read_shard(checkpoint, file_index, reads_by_file[file_index], threads_per_file)

    with ThreadPoolExecutor(num_files_at_once, thread_name_prefix="checkpoint") as pool:
        list(pool.map(read_file, sorted(reads_by_file)))  # `list` raises what a thread has raised


def find_reads(
    manifest: Manifest, like: Tensors, row_orders: Mapping[str, RowRanges] = NO_ORDERS
) -> tuple[Tensors, dict[int, list[ChunkRead]]]:
    """Find which parts of stored chunks make up this rank's parts of tensors. Nothing is read yet.

    manifest: the checkpoint's, which knows the chunks of each tensor.
    like, row_orders: as for `read_tensors`.

    Returns uninitialised CPU memory for this rank's part of each tensor, by key, and the reads that fill it, by the
    index of their file in the manifest. A tensor that was saved by four ranks and is restored on one has four reads.
    """
    tensors: Tensors = {}
    reads_by_file: dict[int, list[ChunkRead]] = {}
    for key, tensor in like.items():
        local_part = local_tensor(tensor)
        boxes = boxes_of(tensor, row_orders.get(key))
        num_elements_in_boxes = sum(math.prod(box.lengths) for box in boxes)
        assert num_elements_in_boxes == local_part.numel(), f"{key}: {boxes}"

        memory = torch.empty(local_part.shape, dtype=DTYPES[manifest.tensors[key].dtype], device="cpu")
        tensors[key] = memory
        for box in boxes:
            box_memory = memory
            if key in row_orders:  # there may be several boxes, one after the other along the rows
                box_memory = memory.narrow(0, box.first_row, box.lengths[0])
            for file_index, chunk in manifest.overlapping(key, box.offset, box.lengths):
                read = read_of_overlap(chunk, box.offset, box.lengths, box_memory)
                reads_by_file.setdefault(file_index, []).append(read)
    return tensors, reads_by_file


def read_of_overlap(chunk: Chunk, offset: Sequence[int], lengths: Sequence[int], target: torch.Tensor) -> ChunkRead:
    """Return the read that fills the part of a box which a chunk has. Box and chunk belong to one tensor and overlap.

    offset, lengths: the box, with its offset in the tensor.
    target: the box's memory. The target of the read is a view of the part that the chunk fills.

    For a vector, a chunk with elements [4, 8) and a box with elements [6, 12) overlap in [6, 8): the read begins at
    offset 2 of the chunk, and fills the first two elements of the target.
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
    """Read parts of chunks from one shard file into their targets, and verify the blocks that are touched.

    index: the file's index in the manifest.
    reads: the parts, all from chunks of this file. Their ranges in the file must not overlap.
    num_threads: threads that read the file.

    Raises UnsoundCheckpointError if the file is absent, unreadable or damaged. The targets then have undefined content.
    """
    requests = []
    copies_from_scratch: list[tuple[torch.Tensor, torch.Tensor]] = []  # each target, and a view of scratch memory
    with open_shard(checkpoint.folder, checkpoint.manifest.files[index]) as shard:
        for chunk, offset, target in reads:
            # A file is read in contiguous ranges: find the shortest one that has the whole part.
            first_item, num_items = enclosing_range(chunk.shape, offset, target.shape)
            item_bytes = ITEM_BYTES[chunk.dtype]
            begin = shard.begin_of(chunk) + first_item * item_bytes
            end = begin + num_items * item_bytes

            has_nothing_between = num_items == target.numel()
            if has_nothing_between and target.is_contiguous():
                # The range is exactly the part, in the order of its target: read it in place.
                memory = target.reshape(-1).view(torch.uint8).numpy()
            else:
                # Read the range into scratch memory, and view the part there with the strides of the chunk.
                memory = np.empty(end - begin, np.uint8)
                items = torch.from_numpy(memory).view(DTYPES[chunk.dtype])
                strides_in_chunk = [math.prod(chunk.shape[dim + 1 :]) for dim in range(len(chunk.shape))]
                copies_from_scratch.append((target, items.as_strided(target.shape, strides_in_chunk)))
            requests.append(ReadRequest(begin, end, memory, chunk.tensor))
        shard.read(requests, num_threads=num_threads)

    for target, part_in_scratch in copies_from_scratch:
        target.copy_(part_in_scratch)


def enclosing_range(shape: Sequence[int], offset: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    """Return the shortest contiguous range of a row-major array's items that includes a box, as first item and count.

    shape: the array's. offset, lengths: the box, which must have items.

    >>> enclosing_range((4, 10), (1, 2), (2, 3))  # rows 1 and 2, columns 2 to 4: items 12 to 24
    (12, 13)
    """
    first_item = 0  # row-major index of the box's first item, built one dimension at a time
    last_item = 0
    for dim_size, begin, length in zip(shape, offset, lengths, strict=True):
        first_item = first_item * dim_size + begin
        last_item = last_item * dim_size + begin + length - 1
    return first_item, last_item - first_item + 1
