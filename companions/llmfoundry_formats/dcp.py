"""torch.distributed.checkpoint (DCP) in the portable format: hashed safetensors and JSON instead of pickles.

    dcp.save(state_dict, storage_writer=PortableStorageWriter("runs/a/ba200"))
    dcp.load(state_dict, storage_reader=PortableStorageReader("runs/a/ba200"))

DCP decides which rank saves and loads what, and calls the collectives; this module writes and reads the files. A save
is committed in the same way as a run's own checkpoint. A tensor `model.<name>` of a state dict is `model/<name>` in
the checkpoint; other names are kept. Values that are not tensors are in the manifest, as typed JSON.

DCP calls a writer's methods in the order in which they are below: the coordinator (rank 0) calls `prepare_global_plan`
and `finish`, and every rank the others. DCP raises `CheckpointException` on every rank, which is a BaseException.
"""

import dataclasses
import datetime
import itertools
import math
import os
from collections.abc import Mapping, Sequence
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
    ReadItem,
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
from llmfoundry_lite.checkpoint.save import file_name
from llmfoundry_lite.checkpoint.shards import BLOCK_BYTES, build_header, file_order, write_shard
from llmfoundry_lite.checkpoint.staging import as_bytes
from llmfoundry_lite.checkpoint.state import DTYPE_NAMES, DTYPES
from llmfoundry_lite.checkpoint.state_digest import format_digest, sum_keyed
from llmfoundry_lite.checkpoint.store import CheckpointStore, Lease, open_checkpoint
from llmfoundry_lite.errors import CheckpointError
from llmfoundry_lite.ranks.codec import encode_value

CheckpointId = str | os.PathLike[str]
"""DCP's name for the place of a checkpoint. Here it is a path or a URL that ends in `ba` and a number of batches."""


class WrittenChunk(NamedTuple):
    """A chunk of a tensor that one rank has written to a file."""

    chunk: Chunk
    tensor_shape: tuple[int, ...]
    """Shape of the whole tensor."""
    file: FileRecord
    digest: int
    """The chunk's part of the state's digest."""


class ChunkInMemory(NamedTuple):
    """A chunk of a tensor that is about to be written."""

    chunk: Chunk
    tensor_shape: tuple[int, ...]
    """Shape of the whole tensor."""
    tensor: torch.Tensor
    """The chunk's values: on the CPU and contiguous."""


class Box(NamedTuple):
    """A box of a tensor in the checkpoint."""

    tensor: str
    """The tensor's name in the checkpoint, with aliases resolved."""
    offsets: tuple[int, ...]
    """Index of the box's first element."""
    lengths: tuple[int, ...]


class StagedRead(NamedTuple):
    """A part of a tensor that a rank asks for, and the memory into which it is read before the state dict changes."""

    item: ReadItem
    target: torch.Tensor
    """Where the values go in the end: a view of a tensor of the state dict."""
    staging: torch.Tensor
    """Values from the checkpoint, on the CPU and in the checkpoint's dtype."""


# ------------------------------------------------------------------------------------------------------- writing


class PortableStorageWriter(StorageWriter):
    """Writer of the checkpoint `<folder>/ba<number of batches>`, a path or an fsspec URL.

    An existing checkpoint is replaced only with `overwrite`, in one step once the new one is whole. A folder has one
    save at a time: a second one ends the first. Errors are CheckpointError, inside DCP's CheckpointException.
    """

    def __init__(self, checkpoint_id: CheckpointId, *, overwrite: bool = False):
        self.checkpoint_id = os.fspath(checkpoint_id)
        self.overwrite = overwrite
        self.rank = 0
        self.save_id = ""
        """Name of the draft that this save writes. Set on the coordinator by `prepare_global_plan`."""
        self.lease: Lease | None = None
        """The right to write to the folder. Set on the coordinator by `set_up_storage_writer`."""

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin a new save, to `checkpoint_id` if one is given. DCP calls this first."""
        self.checkpoint_id = os.fspath(checkpoint_id or self.checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Return whether the last part of the path or URL is the name of a checkpoint, such as `ba200`."""
        _, name = _split(checkpoint_id)
        return COMMITTED.fullmatch(name) is not None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Note this rank. The coordinator also acquires the folder's lease.

        Raises CheckpointError if the name is invalid or taken, and for a save without collectives.
        """
        if not kwargs.get("use_collectives", True):
            raise CheckpointError(f"{self.checkpoint_id}: use_collectives=False given; leave it out: ranks must agree")
        self.rank = kwargs.get("rank") or 0
        store, name = open_store(self.checkpoint_id)
        if is_coordinator:
            # Look first, because acquiring the lease ends the save of another process.
            check_is_free(store, name, overwrite=self.overwrite)
            self.lease = store.acquire()
            # Look again: acquiring has cleared up a failed save, and put back the checkpoint that it had moved away.
            check_is_free(store, name, overwrite=self.overwrite)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return this rank's plan unchanged. Raises CheckpointError if the planner caches plans."""
        if not plan.usable:  # DCP would reuse the plan of the previous save, which names that save's draft
            raise CheckpointError(f"{self.checkpoint_id}: enable_plan_caching=True given to the planner; leave it out")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose the draft on the coordinator, and send its name to every rank with its plan."""
        store, name = open_store(self.checkpoint_id)
        assert self.lease is not None, "the coordinator has a lease"
        self.save_id = store.new_save_id(self.lease, batch_of(name))
        return [dataclasses.replace(plan, storage_data=self.save_id) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's tensors to one file of the draft, and return a result for each item of its plan.

        A result's storage_data is a WrittenChunk for a tensor. For any other value it is the value itself, which
        `finish` writes into the manifest. Raises CheckpointError.
        """
        results = []
        chunks = {}
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                results.append(WriteResult(item.index, 0, _value_of(item, planner)))
            else:
                tensor = planner.resolve_data(item)
                assert isinstance(tensor, torch.Tensor) and item.tensor_data is not None
                offset = item.tensor_data.chunk.offsets
                chunks[item.index] = chunk_in_memory(item.index.fqn, tensor, offset, item.tensor_data.size)

        # A rank without tensors writes no file.
        if chunks:
            store, _ = open_store(self.checkpoint_id)
            written_chunks = write_chunks(store, plan.storage_data, file_name(self.rank), list(chunks.values()))
            for index, written in zip(chunks, written_chunks, strict=True):
                results.append(WriteResult(index, written.chunk.num_bytes, written))
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Publish the checkpoint, and give the lease back. Called on the coordinator, with the results of every rank.

        Raises CheckpointError, and then there is no checkpoint.
        """
        written_chunks = []
        values = {}
        for result in itertools.chain.from_iterable(results):
            if isinstance(result.storage_data, WrittenChunk):
                written_chunks.append(result.storage_data)
            else:
                values[result.index.fqn] = result.storage_data
        state_paths = {fqn: list(keys) for fqn, keys in (metadata.planner_data or {}).items()}

        store, _ = open_store(self.checkpoint_id)
        assert self.lease is not None, "the coordinator has a lease"
        scalars = {DCP_STATE: {"values": values, "paths": state_paths}}
        publish(store, self.lease, self.save_id, written_chunks, scalars)
        store.release(self.lease)  # the next save acquires a new one


def open_store(checkpoint_id: CheckpointId) -> tuple[CheckpointStore, str]:
    """Return the folder of checkpoints, and the checkpoint's name in it.

    "runs/a/ba200" gives the store of runs/a, and "ba200". Raises CheckpointError for any other form of name.
    """
    parent, name = _split(checkpoint_id)
    if not COMMITTED.fullmatch(name) or name != f"ba{batch_of(name)}":  # ba007 would be saved as ba7
        raise CheckpointError(
            f"{checkpoint_id}: the name of a checkpoint is ba and its number of batches, such as {parent}/ba200"
        )
    return CheckpointStore(parent), name


def _split(checkpoint_id: CheckpointId) -> tuple[str, str]:
    """Split off the last part of a path or URL: "runs/a/ba200/" -> ("runs/a", "ba200"), "ba200" -> (".", "ba200")."""
    parent, slash, name = os.fspath(checkpoint_id).rstrip("/").rpartition("/")
    return parent or slash or ".", name


def check_is_free(store: CheckpointStore, name: str, *, overwrite: bool) -> None:
    """Raise CheckpointError if a checkpoint cannot be saved under this name.

    The name may be unused. An empty folder may be there, or on an object store one with nothing but drafts; with
    `overwrite`, also a readable checkpoint. Anything else is somebody's data and is not touched.
    """
    folder = store.root.child(name)
    local_root = store.root.path_here
    if local_root is not None:
        check_outside_checkpoints(local_root)
        if (local_root / name).is_file():
            raise CheckpointError(f"{folder.url}: a file; give another name, or remove it")

    try:
        names = folder.names()
        if MANIFEST in names and overwrite:
            head_of(folder)
    except OSError as error:
        raise CheckpointError(f"{folder.url}: cannot be read: {error.strerror or error}") from error

    if MANIFEST in names:
        if overwrite:
            return
        raise CheckpointError(f"{folder.url}: already exists; give another name, or pass overwrite=True to replace it")
    # On an object store, drafts are in the checkpoint's own folder.
    for foreign_name in names:
        is_draft = store.commits.drafts_in_place and SAVE_ID.fullmatch(foreign_name) is not None
        if not is_draft:
            raise CheckpointError(
                f"{folder.url}: holds {foreign_name} and is not a checkpoint; give another name, or remove it"
            )


def _value_of(item: WriteItem, planner: SavePlanner) -> Any:
    """Return a value that is not a tensor, before the planner pickles it.

    Raises CheckpointError for a value that JSON cannot hold.
    """
    look_up: Any = getattr(planner, "lookup_object", None)
    if look_up is None:
        raise CheckpointError(f"{type(planner).__name__} given, expected a planner derived from DefaultSavePlanner")
    value = look_up(item.index)
    encode_value(value, item.index.fqn)
    return value


def _set_value(planner: LoadPlanner, fqn: str, value: Any) -> None:
    """Put a value that is not a tensor into the state dict that is being loaded.

    This does what DefaultLoadPlanner's `load_bytes` does, which takes a pickle. Raises CheckpointError for a planner
    with a `load_bytes` of its own, because that would not be called.
    """
    if not isinstance(planner, DefaultLoadPlanner) or type(planner).load_bytes is not DefaultLoadPlanner.load_bytes:
        raise CheckpointError(
            f"{type(planner).__name__} given, expected a planner derived from DefaultLoadPlanner, with its load_bytes"
        )
    if planner.flatten_state_dict:
        set_element(planner.original_state_dict, planner.mappings[fqn], value)
    else:
        planner.state_dict[fqn] = value


def chunk_in_memory(
    fqn: str, tensor: torch.Tensor, offset: Sequence[int], tensor_shape: Sequence[int]
) -> ChunkInMemory:
    """Copy a chunk of the tensor `fqn` to the CPU, ready to be written.

    tensor: the chunk's values, on any device.
    offset: index of its first element in the whole tensor, which has the shape `tensor_shape`.

    Raises CheckpointError if the format cannot describe the tensor: by its dtype, its name, or because it is sparse.
    """
    dtype = DTYPE_NAMES.get(tensor.dtype)
    if dtype is None or tensor.layout != torch.strided:
        raise CheckpointError(
            f"{fqn}: {tensor.dtype}, {tensor.layout} given, expected a dense tensor of a dtype that safetensors names"
        )
    chunk = Chunk(stored_name(fqn), dtype, tuple(offset), tuple(tensor.shape))
    return ChunkInMemory(chunk, tuple(tensor_shape), tensor.detach().to("cpu").contiguous())


def stored_name(fqn: str) -> str:
    """Return the name of a tensor in the checkpoint: `model.<name>` of a state dict is stored as `model/<name>`.

    Raises CheckpointError for a name that would be read back as a different one.
    """
    name = f"model/{fqn.removeprefix('model.')}" if fqn.startswith("model.") else fqn
    if fqn_of(name) != fqn:
        raise CheckpointError(f"{fqn}: names must not begin with model/; write model.…")
    return name


def fqn_of(name: str) -> str:
    """Undo `stored_name`."""
    return f"model.{name.removeprefix('model/')}" if name.startswith("model/") else name


def write_chunks(
    store: CheckpointStore, save_id: str, name: str, chunks: Sequence[ChunkInMemory]
) -> list[WrittenChunk]:
    """Write chunks to the file `name` of the draft `save_id`. Returns them in the order in which they were given.

    Raises CheckpointError, and then leaves no file.
    """
    folder, _ = store.open_draft(save_id)
    # A chunk without elements has no bytes in the file, but the manifest has a record of its tensor.
    stored_chunks = {item.chunk.key: item.chunk for item in chunks if item.chunk.num_bytes}
    entries = file_order(stored_chunks)
    header = build_header(entries, {"save_id": save_id}, block_bytes=BLOCK_BYTES)
    tensors = {item.chunk.key: item.tensor for item in chunks}
    try:
        file = write_shard(folder, name, header, [as_bytes(tensors[key]) for key in entries])
    except (OSError, EOFError) as error:
        raise CheckpointError(f"{folder.url}/{name}: not written: {getattr(error, 'strerror', '') or error}") from error

    written_chunks = []
    for chunk, tensor_shape, tensor in chunks:
        digest = sum_keyed(chunk.tensor, tensor, chunk.offset, tensor_shape)
        written_chunks.append(WrittenChunk(chunk, tensor_shape, file, digest))
    return written_chunks


def publish(
    store: CheckpointStore, lease: Lease, save_id: str, chunks: Sequence[WrittenChunk], scalars: dict[str, Any]
) -> Checkpoint:
    """Commit a draft whose files are written, and return the checkpoint.

    `chunks` are the chunks of all ranks, and `scalars` are further fields of the manifest. Raises CheckpointError
    unless the chunks cover each tensor exactly once.
    """
    _, prefix = store.open_draft(save_id)
    files = {written.file.name: written.file for written in chunks}
    file_numbers = {name: number for number, name in enumerate(files)}
    manifest = Manifest(
        save_id=save_id,
        lease_epoch=lease.epoch,
        timestamp=Timestamp(batch=batch_of(committed_name(save_id))),
        written_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        scalars=scalars,
        tensors=describe_tensors(chunks, file_numbers),
        files=tuple(dataclasses.replace(file, name=prefix + file.name) for file in files.values()),
        state_digest=format_digest(sum(written.digest for written in chunks)),
    )
    return store.publish(manifest, lease)


def describe_tensors(written_chunks: Sequence[WrittenChunk], file_numbers: dict[str, int]) -> dict[str, TensorRecord]:
    """Return name -> record in the manifest of each tensor, from the chunks that all ranks have written.

    `file_numbers` has the number of each file in the manifest, by the file's name. Tensors that are cut alike share a
    grid, which keeps the manifest small.

    Raises CheckpointError if ranks disagree about a tensor, or if its chunks are not a grid that covers it once.
    """
    chunks_by_tensor: dict[str, list[WrittenChunk]] = {}
    for written in written_chunks:
        chunks_by_tensor.setdefault(written.chunk.tensor, []).append(written)

    grids: dict[Any, Grid] = {}
    records: dict[str, TensorRecord] = {}
    for name, chunks_of_tensor in chunks_by_tensor.items():
        dtype = chunks_of_tensor[0].chunk.dtype
        shape = chunks_of_tensor[0].tensor_shape
        for written in chunks_of_tensor:
            if (written.chunk.dtype, written.tensor_shape) != (dtype, shape):
                other = f"{written.chunk.dtype} {list(written.tensor_shape)}"
                raise CheckpointError(f"{name} is {other} on one rank and {dtype} {list(shape)} on another")

        # Chunks without elements are in no file.
        chunks = [(file_numbers[item.file.name], item.chunk) for item in chunks_of_tensor if item.chunk.num_bytes]
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
    Example: chunks at (0, 0), (0, 3), (2, 0) and (2, 3) of a tensor of shape (4, 6) form one if each has shape (2, 3).
    """
    # Each chunk lies within the tensor.
    for _, chunk in chunks:
        if len(chunk.offset) != len(shape) or len(chunk.shape) != len(shape):
            return f"chunk at {chunk.offset} of shape {chunk.shape} in {shape}"
        for begin, length, whole_length in zip(chunk.offset, chunk.shape, shape, strict=True):
            if length <= 0 or begin + length > whole_length:
                return f"chunk at {chunk.offset} of shape {chunk.shape} reaches out of {shape}"

    # Together they have as many elements as the tensor.
    num_covered = sum(math.prod(chunk.shape) for _, chunk in chunks)
    num_elements = math.prod(shape)
    if num_covered != num_elements:
        return f"{num_covered:,} of its {num_elements:,} values are there; a chunk is missing or chunks overlap"
    if num_elements == 0:
        return Grid((), (0,))

    # The offsets at which chunks begin along each dimension make a grid of cells. One chunk must begin in each cell.
    # The number of cells is compared first, because it may be huge if the chunks do not form a grid.
    no_grid = "chunks overlap, or are not cut as a grid"
    begins = [sorted({chunk.offset[dim] for _, chunk in chunks}) for dim in range(len(shape))]
    num_cells = math.prod(map(len, begins))
    if num_cells != len(chunks):
        return no_grid
    cells = list(itertools.product(*begins))
    file_by_offset = {chunk.offset: number for number, chunk in chunks}
    if sorted(file_by_offset) != cells:
        return no_grid

    # Each chunk has exactly the size of its cell.
    cuts = tuple(tuple(begins_of_dim[1:]) for begins_of_dim in begins)
    grid = Grid(cuts, tuple(file_by_offset[cell] for cell in cells))
    cells_of_grid = {box for _, box in grid.overlapping(shape, (0,) * len(shape), shape)}
    if cells_of_grid != {(chunk.offset, chunk.shape) for _, chunk in chunks}:
        return no_grid
    return grid


# ------------------------------------------------------------------------------------------------------- reading


class PortableStorageReader(StorageReader):
    """Reader of a portable checkpoint: one that PortableStorageWriter wrote, or a run's, which has only its weights.

    The weights of a run are `model.<name>`. What a rank reads is verified before its state dict changes. With `cast`,
    values are converted to the dtypes of the state dict; without it, another dtype is an error. Errors are
    CheckpointError, inside DCP's CheckpointException, and name the file and the tensor.
    """

    def __init__(self, checkpoint_id: CheckpointId, *, cast: bool = False):
        self.checkpoint_id = os.fspath(checkpoint_id)
        self.cast = cast
        self.checkpoint: Checkpoint | None = None
        """Set by `read_metadata`, which every rank calls."""

    def reset(self, checkpoint_id: CheckpointId | None = None) -> None:
        """Begin to load anew, from `checkpoint_id` if one is given. DCP calls this first."""
        self.checkpoint_id = os.fspath(checkpoint_id or self.checkpoint_id)
        self.checkpoint = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: CheckpointId) -> bool:
        """Return whether the last part of the path or URL is the name of a checkpoint, such as `ba200`."""
        _, name = _split(checkpoint_id)
        return COMMITTED.fullmatch(name) is not None

    # If it took `**kwargs`, DCP would treat an unreadable manifest as a sign that each rank has its own.
    def read_metadata(self) -> Metadata:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Open the checkpoint, and describe its tensors and values in DCP's terms. Raises CheckpointError."""
        self.checkpoint = open_checkpoint(self.checkpoint_id)
        manifest = self.checkpoint.manifest

        # Tied weights are stored once; their other names are aliases.
        stored_names = {name: name for name in manifest.tensors} | manifest.aliases
        described: dict[str, Any] = {}
        for name, tensor_name in stored_names.items():
            record = manifest.tensors[tensor_name]
            size = torch.Size(record.shape)
            # One chunk for the whole tensor: its files are looked up when it is read.
            whole = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            described[fqn_of(name)] = TensorStorageMetadata(TensorProperties(dtype=DTYPES[record.dtype]), size, [whole])

        dcp_state = manifest.dcp_state or NO_STATE
        return Metadata(
            state_dict_metadata=described | {fqn: BytesStorageMetadata() for fqn in dcp_state["values"]},
            planner_data={fqn: tuple(keys) for fqn, keys in dcp_state["paths"].items()},
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Do nothing: `read_metadata` has opened the checkpoint."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add to this rank's plan which save it has opened, for `prepare_global_plan`."""
        return dataclasses.replace(plan, storage_data=self._open.manifest.save_id)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raise CheckpointError on the coordinator if ranks have opened different saves under the same name."""
        if len({plan.storage_data for plan in plans}) > 1:
            raise CheckpointError(f"{self.checkpoint_id}: replaced while ranks were opening it; load it again")
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all that this rank's plan asks for, and then copy it into the state dict.

        Everything is read and verified first, so that an error leaves the state dict as it was. Raises CheckpointError.
        """
        staged = self._stage_reads(plan, planner)
        for read in staged:
            read.target.copy_(read.staging)
            planner.commit_tensor(read.item, read.target)

        values = (self._open.manifest.dcp_state or NO_STATE)["values"]
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                _set_value(planner, item.dest_index.fqn, values[item.storage_index.fqn])
        return _done(None)

    def _stage_reads(self, plan: LoadPlan, planner: LoadPlanner) -> list[StagedRead]:
        """Read the tensors that a plan asks for into memory beside the state dict. Raises CheckpointError.

        Two names of a tied weight may ask for the same box of one tensor; it is read once.
        """
        manifest = self._open.manifest
        staging_by_box: dict[Box, torch.Tensor] = {}
        staged: list[StagedRead] = []
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                continue

            name = stored_name(item.storage_index.fqn)
            name = manifest.aliases.get(name, name)
            dtype = DTYPES[manifest.tensors[name].dtype]
            target = planner.resolve_tensor(item).detach()
            if target.dtype != dtype and not self.cast:
                raise CheckpointError(
                    f"{self.checkpoint_id}: {item.storage_index.fqn} is {dtype}, the state dict's is "
                    f"{target.dtype}; cast=True converts"
                )

            box = Box(name, tuple(item.storage_offsets), tuple(item.lengths))
            if box not in staging_by_box:
                staging_by_box[box] = torch.empty(box.lengths, dtype=dtype)
            staged.append(StagedRead(item, target, staging_by_box[box]))

        self._read_boxes(staging_by_box)
        return staged

    def _read_boxes(self, staging_by_box: Mapping[Box, torch.Tensor]) -> None:
        """Read boxes of tensors into the memory that is given for each. Raises CheckpointError.

        `read_files` takes a tensor's bytes once at a time, and boxes of one tensor may overlap. So the first box of
        each tensor is read in the first round, the second box of each in the second round, and so on.
        """
        boxes_by_tensor: dict[str, list[Box]] = {}
        for box in staging_by_box:
            boxes_by_tensor.setdefault(box.tensor, []).append(box)

        for boxes_of_round in itertools.zip_longest(*boxes_by_tensor.values()):
            reads_by_file: dict[int, list[ChunkRead]] = {}
            for box in boxes_of_round:
                if box is None:
                    continue  # this tensor has fewer boxes
                for file, chunk in self._open.manifest.overlapping(box.tensor, box.offsets, box.lengths):
                    read = read_of_overlap(chunk, box.offsets, box.lengths, staging_by_box[box])
                    reads_by_file.setdefault(file, []).append(read)
            read_files(self._open, reads_by_file)

    @property
    def _open(self) -> Checkpoint:
        """The opened checkpoint."""
        assert self.checkpoint is not None, "read_metadata is called first"
        return self.checkpoint


def _done(result: Any) -> Future[Any]:
    """Return a future that is already done, because DCP expects one where a backend may write in the background."""
    future: Future[Any] = Future()
    future.set_result(result)
    return future
