"""Safetensors shards -> a model and its optimizer, on any number of ranks; all of it verified, or nothing changed.

    manifest = load(url, model, optimizer)                      one checkpoint; every rank calls
    restored = load_newest(store, model, optimizer)             the newest intact one

Every rank reads into memory of its own, verifies just the blocks it reads, and all ranks agree, before any of them
touches the model. Rank 0 judges a file that another rank alone cannot read as it was written: it looks at the file
itself, and then either the checkpoint is at fault, or that rank's node, which is named. DCP's load planner says which
boxes of which slices a rank needs; see `format` for why its planners are called directly.
"""

import math
import os
import socket
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.distributed.checkpoint import DefaultLoadPlanner, StorageReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.optim import Optimizer

from llmfoundry_lite.checkpoint import exchange, state
from llmfoundry_lite.checkpoint.exchange import Group
from llmfoundry_lite.checkpoint.manifest import ITEM_BYTES, Manifest, Slice, decode, encode
from llmfoundry_lite.checkpoint.places import open_place
from llmfoundry_lite.checkpoint.shards import Want, read_wanted, verify_file
from llmfoundry_lite.checkpoint.state import DTYPE_NAMES, DTYPES, Tensors, describe_keys, is_ignored, local_part
from llmfoundry_lite.checkpoint.store import Checkpoint, CheckpointStore, Lease, open_checkpoint
from llmfoundry_lite.checkpoint.verify import check_readable
from llmfoundry_lite.errors import (
    CheckpointError,
    DamagedCheckpointError,
    IncompleteCheckpointError,
    UnsoundCheckpointError,
)

MAX_JUDGED = 16
"""Files that rank 0 reads again when others complain; a node that has lost its disk complains of many."""

Check = Callable[[Manifest], None]


def accept(manifest: Manifest) -> None:
    """No objections."""


class Restored(NamedTuple):
    manifest: Manifest | None
    """Of what was loaded; None if there was nothing to load."""
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
    verify: bool = True,
    check: Check = accept,
    num_threads: int = 4,
    group: Group = None,
) -> Manifest:
    """Restore weights, and with `optimizer` its whole state, from one checkpoint folder.

    Without `optimizer` only weights are asked for. `ignore_keys` are patterns (`model/transformer.wpe.*`) of tensors to
    leave as they are; a parameter of which anything is left starts with no optimizer state. `cast` permits another
    dtype. `check` is shown the manifest first and may raise CheckpointError.
    Raises CheckpointError on all ranks, and then nothing has changed.
    """
    checkpoint, error = None, None
    if exchange.rank_and_size(group)[0] == 0:
        try:
            checkpoint = open_checkpoint(url)
        except CheckpointError as caught:
            error = caught
    exchange.agree(error, group)
    return _load_together(checkpoint, model, optimizer, cast, ignore_keys, verify, check, num_threads, group)


def load_newest(
    store: CheckpointStore,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    lease: Lease | None = None,
    cast: bool = False,
    ignore_keys: Sequence[str] = (),
    verify: bool = True,
    check: Check = accept,
    num_threads: int = 4,
    group: Group = None,
) -> Restored:
    """Restore from the newest intact checkpoint of a run; damaged ones are set aside if rank 0 has the `lease`.

    Only what rank 0 sees itself counts: what is wrong for another rank alone raises, naming its host and the file.

    A checkpoint that is whole but does not fit this run raises: an older one would not fit better.
    """
    is_main = exchange.rank_and_size(group)[0] == 0
    notes: list[str] = []
    passed: set[str] = set()
    while True:
        checkpoint, error = None, None
        if is_main:
            try:
                search = store.newest_intact(check_readable, quarantine=lease, skip=passed)
                checkpoint = search.checkpoint
                notes += search.notes
                passed.update(search.passed)
            except CheckpointError as caught:
                error = caught
        exchange.agree(error, group)
        name = exchange.tell_all(checkpoint.name if checkpoint else None, group)
        if name is None:
            return Restored(None, store.root.url, exchange.tell_all(notes, group))
        try:
            manifest = _load_together(
                checkpoint, model, optimizer, cast, ignore_keys, verify, check, num_threads, group
            )
            return Restored(manifest, store.root.child(name).url, exchange.tell_all(notes, group))
        except (DamagedCheckpointError, IncompleteCheckpointError) as fault:
            passed.add(name)
            if is_main:
                notes.append(store.set_aside(name, fault, lease))


def _load_together(
    checkpoint: Checkpoint | None,
    model: nn.Module,
    optimizer: Optimizer | None,
    cast: bool,
    ignore_keys: Sequence[str],
    verify: bool,
    check: Check,
    num_threads: int,
    group: Group,
) -> Manifest:
    """`checkpoint` is given on rank 0; the others work from the manifest that rank 0 has read."""
    told = [checkpoint.where, encode(checkpoint.manifest).decode()] if checkpoint else None
    url, raw = exchange.tell_all(told, group)
    manifest = checkpoint.manifest if checkpoint else decode(raw.encode(), url)
    checkpoint = checkpoint or Checkpoint(url, open_place(url), manifest)
    error: Exception | None = None
    targets, staging = None, {}
    try:
        check(manifest)
        targets = find_targets(checkpoint, model, optimizer, cast=cast, ignore=ignore_keys)
        staging = read_tensors(checkpoint, targets.tensors, verify=verify, num_threads=num_threads)
    except Exception as caught:
        error = caught
    exchange.agree(_judge(error, checkpoint, group), group)
    assert targets is not None
    targets.write(staging)
    return manifest


def _judge(error: Exception | None, checkpoint: Checkpoint, group: Group) -> Exception | None:
    """This rank's error, as rank 0 sees it: what others complain of becomes rank 0's own error, of whichever kind."""
    is_unsound = isinstance(error, UnsoundCheckpointError)
    if not any(exchange.max_of([int(is_unsound)], group)):
        return error
    report = [error.file, socket.gethostname(), str(error)] if isinstance(error, UnsoundCheckpointError) else None
    reports = exchange.gather_json(report, group)
    if error is not None or exchange.rank_and_size(group)[0] != 0:
        return error
    complaints = [(rank, *report) for rank, report in enumerate(reports) if report is not None]
    accused = {name for _, name, _, _ in complaints}
    for file in [file for file in checkpoint.manifest.files if file.name in accused][:MAX_JUDGED]:
        try:
            verify_file(checkpoint.place, file)
        except UnsoundCheckpointError as seen:
            return seen
    rank, _, host, text = complaints[0]
    return CheckpointError(
        f"rank {rank} on host {host}: {text}; rank 0 on host {socket.gethostname()} finds this file sound, so nothing "
        f"is wrong with the checkpoint: see on {host} whether the disk is mounted, may be read and works, then run the "
        "same command again"
    )


# ----------------------------------------------------------------------------------------------------- what is wanted


class Targets(NamedTuple):
    """Where a checkpoint's tensors belong on this rank."""

    tensors: Tensors
    optimizer: Optimizer | None
    parameters: dict[str, nn.Parameter]
    numbers: dict[str, Any]

    def write(self, staging: Tensors) -> None:
        """Local parts -> model and optimizer."""
        with torch.no_grad():
            for key, tensor in self.tensors.items():
                if key.startswith("model/"):
                    local_part(tensor).copy_(staging[key])
            if self.optimizer is not None:
                slots = {key: tensor for key, tensor in staging.items() if key.startswith("optim/")}
                state.write_optimizer(self.optimizer, self.parameters, self.numbers, slots, self.tensors)


def find_targets(
    checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer | None, *, cast: bool, ignore: Sequence[str]
) -> Targets:
    """The same keys on both sides, shapes and dtypes too. Raises CheckpointError naming those that differ."""
    manifest, where = checkpoint.manifest, checkpoint.where
    everything = state.model_tensors(model)[0]
    for pattern in ignore:
        if not any(is_ignored(key, [pattern]) for key in (*everything, *manifest.tensors)):
            raise CheckpointError(
                f"{where}: load_ignore_keys: {pattern} is no tensor, neither there nor in this run; names are such as "
                f"{min(everything, default='model/…')} and may have * in them"
            )
    tensors = {key: t for key, t in everything.items() if not is_ignored(key, ignore)}
    there = {key for key in manifest.tensors if key.startswith("model/") and not is_ignored(key, ignore)}
    if there != tensors.keys():
        raise CheckpointError(
            f"{where}: {describe_keys(there - tensors.keys(), tensors.keys() - there)}; is this the same model? "
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
        return Targets(tensors, None, {}, {})
    if manifest.optimizer is None:
        raise CheckpointError(f"{where}: holds no optimizer state; load_weights_only: true starts a new optimizer")
    names = state.parameter_names(model, optimizer)
    state.check_optimizer(optimizer, names, manifest.optimizer, where)
    anew = state.without_slots(manifest, ignore)
    slots, parameters = state.optimizer_targets(model, optimizer, manifest, anew)
    numbers = {name: kept for name, kept in manifest.optimizer["state"].items() if name not in anew}
    return Targets(tensors | slots, optimizer, parameters, manifest.optimizer | {"state": numbers})


# ------------------------------------------------------------------------------------------------------------ reading


def read_tensors(checkpoint: Checkpoint, like: Tensors, *, verify: bool = True, num_threads: int = 4) -> Tensors:
    """This rank's parts of `like`, as stored, on the host. Raises UnsoundCheckpointError."""
    reader = ShardReader(checkpoint, verify, num_threads)
    metadata = reader.read_metadata()
    planner = StagingPlanner(checkpoint.manifest)
    planner.set_up_planner(dict(like), metadata, is_coordinator=False)
    reader.set_up_storage_reader(metadata, is_coordinator=False)
    reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner)
    return planner.staging


class StagingPlanner(DefaultLoadPlanner):
    """DCP's plan for a load, whose targets are fresh host tensors in the checkpoint's dtype."""

    def __init__(self, manifest: Manifest):
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.manifest = manifest
        self.staging: Tensors = {}

    def set_up_planner(self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        # Not torch's: it would give memory to tensors that are only there for their shape.
        self.state_dict, self.original_state_dict = state_dict, state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator
        for key, tensor in state_dict.items():
            dtype = DTYPES[self.manifest.tensors[key].dtype]
            self.staging[key] = torch.empty(local_part(tensor).shape, dtype=dtype, device="cpu")

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        target = self.staging[read_item.dest_index.fqn]
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, offset, length)
        return target


class ShardReader(StorageReader):
    """DCP's view of a checkpoint: metadata from the manifest, data from the shards, each block touched verified."""

    def __init__(self, checkpoint: Checkpoint, verify: bool = True, num_threads: int = 4):
        self.checkpoint = checkpoint
        self.verify = verify
        self.num_threads = num_threads
        self.slices: dict[MetadataIndex, Slice] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self) -> Metadata:
        return Metadata(
            {
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=DTYPES[tensor.dtype]),
                    size=torch.Size(tensor.shape),
                    chunks=[ChunkStorageMetadata(torch.Size(s.offset), torch.Size(s.shape)) for s in tensor.slices],
                )
                for name, tensor in self.checkpoint.manifest.tensors.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        for name, tensor in self.checkpoint.manifest.tensors.items():
            for part in tensor.slices:
                self.slices[MetadataIndex(name, part.offset)] = part

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, items=[item for item in plan.items if math.prod(item.lengths)])

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Any:
        by_file: dict[int, list[tuple[ReadItem, Slice]]] = {}
        for item in plan.items:
            part = self.slices[item.storage_index]
            by_file.setdefault(part.file, []).append((item, part))
        for index, pairs in sorted(by_file.items()):
            self._read_file(index, pairs, planner)
        result: torch.futures.Future[None] = torch.futures.Future()
        result.set_result(None)
        return result

    def _read_file(self, index: int, pairs: list[tuple[ReadItem, Slice]], planner: LoadPlanner) -> None:
        manifest = self.checkpoint.manifest
        wants, gathers = [], []
        for item, part in pairs:
            name = item.storage_index.fqn
            dtype = manifest.tensors[name].dtype
            first, count = hull(part.shape, item.storage_offsets, item.lengths)
            begin = part.begin + first * ITEM_BYTES[dtype]
            end = begin + count * ITEM_BYTES[dtype]
            target = planner.resolve_tensor(item)
            if count == math.prod(item.lengths) and target.is_contiguous():
                memory = target.reshape(-1).view(torch.uint8).numpy()
            else:
                memory = np.empty(end - begin, np.uint8)
                strides = [math.prod(part.shape[dim + 1 :]) for dim in range(len(part.shape))]
                gathers.append((target, torch.from_numpy(memory).view(DTYPES[dtype]), list(item.lengths), strides))
            wants.append(Want(begin, end, memory, name))
        read_wanted(
            self.checkpoint.place, manifest.files[index], wants, verify=self.verify, num_threads=self.num_threads
        )
        for target, values, lengths, strides in gathers:
            target.copy_(values.as_strided(lengths, strides))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def hull(shape: Sequence[int], offset: Sequence[int], lengths: Sequence[int]) -> tuple[int, int]:
    """First item, and number of items, of the shortest run that holds a box of a row-major array."""
    first = last = 0
    for size, begin, length in zip(shape, offset, lengths, strict=True):
        first = first * size + begin
        last = last * size + begin + length - 1
    return first, last - first + 1
