"""torch.distributed.checkpoint (DCP) in the portable format: hashed safetensors and JSON instead of pickles.

    dcp.save(state_dict, storage_writer=PortableStorageWriter("runs/a/ba200"))
    dcp.load(state_dict, storage_reader=PortableStorageReader("runs/a/ba200"))

DCP plans and calls collectives; this module writes and reads. A save is committed as a run's own are. A tensor
`model.<name>` of a state dict is `model/<name>` in the checkpoint; others keep their names. Values that are no tensors
stand in the manifest as typed JSON. DCP raises `CheckpointException` on every rank, which is a BaseException.
"""

import dataclasses
import datetime
import itertools
import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from llmfoundry_lite.checkpoint.commit import COMMITTED, SAVE_ID, Checkpoint, batch_of, committed_name, head_of
from llmfoundry_lite.checkpoint.grid import Chunk, Grid
from llmfoundry_lite.checkpoint.manifest import (
    DCP_STATE,
    MANIFEST,
    NO_STATE,
    FileRecord,
    Manifest,
    TensorRecord,
    Timestamp,
)
from llmfoundry_lite.checkpoint.paths import check_outside_checkpoints
from llmfoundry_lite.checkpoint.restore import ChunkRead, read_files, read_of_overlap
from llmfoundry_lite.checkpoint.save import as_bytes, file_name
from llmfoundry_lite.checkpoint.shards import BLOCK_BYTES, build_header, file_order, write_shard
from llmfoundry_lite.checkpoint.state import DTYPE_NAMES, DTYPES
from llmfoundry_lite.checkpoint.state_digest import format_digest, sum_keyed
from llmfoundry_lite.checkpoint.store import CheckpointStore, Lease, open_checkpoint
from llmfoundry_lite.errors import CheckpointError
from llmfoundry_lite.ranks.codec import encode_value

Id = str | os.PathLike[str]


class Written(NamedTuple):
    """A chunk that one rank has written."""

    chunk: Chunk
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    file: FileRecord
    digest: int
    """The chunk's part of the state's digest."""


class Held(NamedTuple):
    """A chunk in memory."""

    chunk: Chunk
    shape: tuple[int, ...]
    tensor: torch.Tensor


# ------------------------------------------------------------------------------------------------------- writing


class PortableStorageWriter(StorageWriter):
    """Writer of the checkpoint `<folder>/ba<number of batches>`, a path or an fsspec URL.

    Only `overwrite` replaces an existing checkpoint, in one step once the new one is whole. A folder has one save at a
    time: a second one ends the first. Errors are CheckpointError, inside DCP's CheckpointException.
    """

    def __init__(self, checkpoint_id: Id, *, overwrite: bool = False):
        self.checkpoint_id, self.overwrite = os.fspath(checkpoint_id), overwrite
        self.rank, self.save_id = 0, ""
        self.lease: Lease | None = None

    def reset(self, checkpoint_id: Id | None = None) -> None:
        self.checkpoint_id = os.fspath(checkpoint_id or self.checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Id) -> bool:
        return COMMITTED.fullmatch(_split(checkpoint_id)[1]) is not None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("use_collectives", True):
            raise CheckpointError(f"{self.checkpoint_id}: use_collectives=False given; leave it out: ranks must agree")
        self.rank = kwargs.get("rank") or 0
        store, name = open_store(self.checkpoint_id)
        if is_coordinator:
            check_is_free(store, name, overwrite=self.overwrite)
            self.lease = store.acquire()
            # Again, because acquiring has cleared up a failed save, and put back the checkpoint that it had moved away.
            check_is_free(store, name, overwrite=self.overwrite)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        if not plan.usable:  # DCP would reuse the plan of the previous save, which names that save's draft
            raise CheckpointError(f"{self.checkpoint_id}: enable_plan_caching=True given to the planner; leave it out")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        store, name = open_store(self.checkpoint_id)
        assert self.lease is not None, "the coordinator has a lease"
        self.save_id = store.new_save_id(self.lease, batch_of(name))
        return [dataclasses.replace(plan, storage_data=self.save_id) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results, held = [], {}
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                results.append(WriteResult(item.index, 0, _value_of(item, planner)))
            else:
                data, tensor = item.tensor_data, planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor) and data is not None
                held[item.index] = hold(item.index.fqn, tensor, data.chunk.offsets, data.size)
        if held:
            store, _ = open_store(self.checkpoint_id)
            pieces = write_chunks(store, plan.storage_data, file_name(self.rank), list(held.values()))
            for index, piece in zip(held, pieces, strict=True):
                results.append(WriteResult(index, piece.chunk.num_bytes, piece))
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        store, _ = open_store(self.checkpoint_id)
        written = [(one.index.fqn, one.storage_data) for of_rank in results for one in of_rank]
        pieces = [found for _, found in written if isinstance(found, Written)]
        values = {fqn: found for fqn, found in written if not isinstance(found, Written)}
        paths = {fqn: list(path) for fqn, path in (metadata.planner_data or {}).items()}
        assert self.lease is not None, "the coordinator has a lease"
        publish(store, self.lease, self.save_id, pieces, {DCP_STATE: {"values": values, "paths": paths}})
        store.release(self.lease)  # each save takes one of its own


def open_store(checkpoint_id: Id) -> tuple[CheckpointStore, str]:
    """Return the folder of checkpoints, and the checkpoint's name in it. Raises CheckpointError."""
    parent, name = _split(checkpoint_id)
    if not COMMITTED.fullmatch(name) or name != f"ba{batch_of(name)}":  # ba007 would be saved as ba7
        raise CheckpointError(
            f"{checkpoint_id}: the name of a checkpoint is ba and its number of batches, such as {parent}/ba200"
        )
    return CheckpointStore(parent), name


def _split(checkpoint_id: Id) -> tuple[str, str]:
    parent, slash, name = os.fspath(checkpoint_id).rstrip("/").rpartition("/")
    return parent or slash or ".", name


def check_is_free(store: CheckpointStore, name: str, *, overwrite: bool) -> None:
    """Raise CheckpointError if the name is taken. With `overwrite`, a readable checkpoint may be there."""
    folder, path = store.root.child(name), store.root.path_here
    if path is not None:
        check_outside_checkpoints(path)
    if path is not None and (path / name).is_file():
        raise CheckpointError(f"{folder.url}: a file; give another name, or remove it")
    try:
        names = folder.names()
        if MANIFEST in names and overwrite:
            head_of(folder)
    except OSError as error:
        raise CheckpointError(f"{folder.url}: cannot be read: {error.strerror or error}") from error
    if MANIFEST in names:
        if not overwrite:
            raise CheckpointError(
                f"{folder.url}: already exists; give another name, or pass overwrite=True to replace it"
            )
    elif foreign := next((one for one in names if not store.commits.drafts_in_place or not SAVE_ID.fullmatch(one)), ""):
        raise CheckpointError(f"{folder.url}: holds {foreign} and is not a checkpoint; give another name, or remove it")


def _value_of(item: WriteItem, planner: SavePlanner) -> Any:
    """Return a value that is no tensor, before the planner pickles it. Raises CheckpointError unless JSON holds it."""
    look_up: Any = getattr(planner, "lookup_object", None)
    if look_up is None:
        raise CheckpointError(f"{type(planner).__name__} given, expected a planner derived from DefaultSavePlanner")
    value = look_up(item.index)
    encode_value(value, item.index.fqn)
    return value


def _set_value(planner: LoadPlanner, fqn: str, value: Any) -> None:
    """Put a value that is no tensor where DefaultLoadPlanner's `load_bytes`, which takes a pickle, would put it."""
    if not isinstance(planner, DefaultLoadPlanner) or type(planner).load_bytes is not DefaultLoadPlanner.load_bytes:
        raise CheckpointError(
            f"{type(planner).__name__} given, expected a planner derived from DefaultLoadPlanner, with its load_bytes"
        )
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[fqn], value)
    else:
        planner.state_dict[fqn] = value


def hold(fqn: str, tensor: torch.Tensor, offset: Sequence[int], shape: Sequence[int]) -> Held:
    """Return a chunk on the host, contiguous. Raises CheckpointError for one that the format cannot describe."""
    dtype = DTYPE_NAMES.get(tensor.dtype)
    if dtype is None or tensor.layout != torch.strided:
        raise CheckpointError(
            f"{fqn}: {tensor.dtype}, {tensor.layout} given, expected a dense tensor of a dtype that safetensors names"
        )
    one = Chunk(stored_name(fqn), dtype, tuple(offset), tuple(tensor.shape))
    return Held(one, tuple(shape), tensor.detach().to("cpu").contiguous())


def stored_name(fqn: str) -> str:
    """Return a tensor's name in the checkpoint. Raises CheckpointError for one that reads back as another."""
    name = f"model/{fqn.removeprefix('model.')}" if fqn.startswith("model.") else fqn
    if fqn_of(name) != fqn:
        raise CheckpointError(f"{fqn}: names must not begin with model/; write model.…")
    return name


def fqn_of(name: str) -> str:
    """Undo `stored_name`."""
    return f"model.{name.removeprefix('model/')}" if name.startswith("model/") else name


def write_chunks(store: CheckpointStore, save_id: str, name: str, held: Sequence[Held]) -> list[Written]:
    """Write chunks to one file of a draft. Raises CheckpointError, and leaves no file then."""
    folder, _ = store.open_draft(save_id)
    # Tensors without elements have no chunk in a file. The others are in the file's order.
    tensors = {one.chunk.key: one.tensor for one in held}
    entries = file_order({one.chunk.key: one.chunk for one in held if one.chunk.num_bytes})
    header = build_header(entries, {"save_id": save_id}, block_bytes=BLOCK_BYTES)
    try:
        record = write_shard(folder, name, header, [as_bytes(tensors[key]) for key in entries])
    except (OSError, EOFError) as error:
        raise CheckpointError(f"{folder.url}/{name}: not written: {getattr(error, 'strerror', '') or error}") from error
    return [
        Written(one.chunk, one.shape, record, sum_keyed(one.chunk.tensor, one.tensor, one.chunk.offset, one.shape))
        for one in held
    ]


def publish(
    store: CheckpointStore, lease: Lease, save_id: str, pieces: Sequence[Written], scalars: dict[str, Any]
) -> Checkpoint:
    """Commit a draft whose files are written. Raises CheckpointError unless the pieces cover each tensor once."""
    _, prefix = store.open_draft(save_id)
    files = {piece.file.name: piece.file for piece in pieces}
    manifest = Manifest(
        save_id=save_id,
        lease_epoch=lease.epoch,
        timestamp=Timestamp(batch=batch_of(committed_name(save_id))),
        written_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        scalars=scalars,
        tensors=describe_tensors(pieces, {name: number for number, name in enumerate(files)}),
        files=tuple(dataclasses.replace(file, name=prefix + file.name) for file in files.values()),
        state_digest=format_digest(sum(piece.digest for piece in pieces)),
    )
    return store.publish(manifest, lease)


def describe_tensors(pieces: Sequence[Written], file_numbers: dict[str, int]) -> dict[str, TensorRecord]:
    """Return name -> record in the manifest of each tensor, from the chunks that all ranks have written.

    `file_numbers` has the number of each file in the manifest, by the file's name. Tensors that are cut alike share a
    grid, which keeps the manifest small.

    Raises CheckpointError if ranks disagree about a tensor, or if its chunks are not a grid that covers it once.
    """
    pieces_by_tensor: dict[str, list[Written]] = {}
    for piece in pieces:
        pieces_by_tensor.setdefault(piece.chunk.tensor, []).append(piece)

    grids: dict[Any, Grid] = {}
    records: dict[str, TensorRecord] = {}
    for name, pieces_of_tensor in pieces_by_tensor.items():
        dtype = pieces_of_tensor[0].chunk.dtype
        shape = pieces_of_tensor[0].shape
        for piece in pieces_of_tensor:
            if (piece.chunk.dtype, piece.shape) != (dtype, shape):
                other = f"{piece.chunk.dtype} {list(piece.shape)}"
                raise CheckpointError(f"{name} is {other} on one rank and {dtype} {list(shape)} on another")

        # Chunks without elements are in no file.
        chunks = [(file_numbers[piece.file.name], piece.chunk) for piece in pieces_of_tensor if piece.chunk.num_bytes]
        boxes_and_files = tuple((number, chunk.offset, chunk.shape) for number, chunk in chunks)
        key = (boxes_and_files, shape)
        if key not in grids:
            grid = find_grid(chunks, shape)
            if isinstance(grid, str):
                raise CheckpointError(f"{name}: {grid}; this sharding cannot be saved")
            grids[key] = grid
        records[name] = TensorRecord(dtype, shape, grids[key])
    return records


def find_grid(chunks: Sequence[tuple[int, Chunk]], shape: tuple[int, ...]) -> Grid | str:
    """Return the grid that a tensor's chunks form, or a text that says why they form none.

    chunks: the chunks that have elements, each with the number of its file in the manifest.
    shape: shape of the whole tensor.

    The chunks form a grid if each dimension is cut at the same places everywhere, and if they cover the tensor once.
    """
    for _, chunk in chunks:
        if len(chunk.offset) != len(shape) or len(chunk.shape) != len(shape):
            return f"chunk at {chunk.offset} of shape {chunk.shape} in {shape}"
        for begin, length, whole_length in zip(chunk.offset, chunk.shape, shape, strict=True):
            if length <= 0 or begin + length > whole_length:
                return f"chunk at {chunk.offset} of shape {chunk.shape} reaches out of {shape}"

    num_covered = sum(math.prod(chunk.shape) for _, chunk in chunks)
    num_elements = math.prod(shape)
    if num_covered != num_elements:
        return f"{num_covered:,} of its {num_elements:,} values are there; a chunk is missing or chunks overlap"
    if num_elements == 0:
        return Grid((), (0,))

    # The offsets at which chunks begin along each dimension make a grid of cells. Each cell must be one chunk.
    no_grid = "chunks overlap, or are not cut as a grid"
    begins = [sorted({chunk.offset[dim] for _, chunk in chunks}) for dim in range(len(shape))]
    file_by_offset = {chunk.offset: number for number, chunk in chunks}
    cells = list(itertools.product(*begins)) if math.prod(map(len, begins)) == len(chunks) else []
    if sorted(file_by_offset) != cells:
        return no_grid

    cuts = tuple(tuple(begins_of_dim[1:]) for begins_of_dim in begins)
    grid = Grid(cuts, tuple(file_by_offset[cell] for cell in cells))
    cells_of_grid = {box for _, box in grid.overlapping(shape, (0,) * len(shape), shape)}
    if cells_of_grid != {(chunk.offset, chunk.shape) for _, chunk in chunks}:
        return no_grid  # a chunk is longer or shorter than its cell
    return grid


# ------------------------------------------------------------------------------------------------------- reading


class PortableStorageReader(StorageReader):
    """Reader of a portable checkpoint, whoever wrote it. A run's checkpoint gives its weights, as `model.<name>`.

    What a rank reads is verified before its state dict changes. Another dtype than the checkpoint's needs `cast`.
    Errors name the file and the tensor.
    """

    def __init__(self, checkpoint_id: Id, *, cast: bool = False):
        self.checkpoint_id, self.cast = os.fspath(checkpoint_id), cast
        self.checkpoint: Checkpoint | None = None

    def reset(self, checkpoint_id: Id | None = None) -> None:
        self.checkpoint_id, self.checkpoint = os.fspath(checkpoint_id or self.checkpoint_id), None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Id) -> bool:
        return COMMITTED.fullmatch(_split(checkpoint_id)[1]) is not None

    # If it took `**kwargs`, DCP would treat an unreadable manifest as a sign that each rank has its own.
    def read_metadata(self) -> Metadata:  # pyright: ignore[reportIncompatibleMethodOverride]
        self.checkpoint = open_checkpoint(self.checkpoint_id)
        manifest = self.checkpoint.manifest
        stored = {name: name for name in manifest.tensors} | manifest.aliases
        described: dict[str, Any] = {}
        for name, tensor in stored.items():
            record = manifest.tensors[tensor]
            size = torch.Size(record.shape)
            # One chunk for the whole tensor: its files are looked up when it is read.
            whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            described[fqn_of(name)] = TensorStorageMetadata(TensorProperties(dtype=DTYPES[record.dtype]), size, [whole])
        more = manifest.dcp_state or NO_STATE
        return Metadata(
            state_dict_metadata=described | {fqn: BytesStorageMetadata() for fqn in more["values"]},
            planner_data={fqn: tuple(path) for fqn, path in more["paths"].items()},
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return dataclasses.replace(plan, storage_data=self._open.manifest.save_id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        if len({plan.storage_data for plan in plans}) > 1:
            raise CheckpointError(f"{self.checkpoint_id}: replaced while ranks were opening it; load it again")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        checkpoint = self._open
        manifest, values = checkpoint.manifest, (checkpoint.manifest.dcp_state or NO_STATE)["values"]
        boxes: dict[Any, torch.Tensor] = {}
        rounds: list[dict[int, list[ChunkRead]]] = []
        """Each has a tensor at most once, because two names of one tensor may ask for the same bytes."""
        num_boxes: Counter[str] = Counter()
        staged = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                continue
            name = stored_name(item.storage_index.fqn)
            name = manifest.aliases.get(name, name)
            record, target = manifest.tensors[name], planner.resolve_tensor(item).detach()
            if target.dtype != DTYPES[record.dtype] and not self.cast:
                raise CheckpointError(
                    f"{self.checkpoint_id}: {item.storage_index.fqn} is {DTYPES[record.dtype]}, the state dict's is "
                    f"{target.dtype}; cast=True converts"
                )
            box = (name, *item.storage_offsets, *item.lengths)
            if box not in boxes:
                boxes[box] = torch.empty(tuple(item.lengths), dtype=DTYPES[record.dtype])
                rounds += [{}] * (num_boxes[name] == len(rounds))
                for file, chunk in manifest.overlapping(name, item.storage_offsets, item.lengths):
                    read = read_of_overlap(chunk, item.storage_offsets, item.lengths, boxes[box])
                    rounds[num_boxes[name]].setdefault(file, []).append(read)
                num_boxes[name] += 1
            staged.append((item, target, boxes[box]))
        for by_file in rounds:
            read_files(checkpoint, by_file)
        for item, target, staging in staged:
            target.copy_(staging)
            planner.commit_tensor(item, target)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                _set_value(planner, item.dest_index.fqn, values[item.storage_index.fqn])
        return _done(None)

    @property
    def _open(self) -> Checkpoint:
        assert self.checkpoint is not None, "read_metadata is called first"
        return self.checkpoint


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future
