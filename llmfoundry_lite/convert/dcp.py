"""A folder of torch.distributed.checkpoint (`.metadata`, `*.distcp`): its pieces, and its import as it is.

torchtitan and plain FSDP scripts write such folders. Nothing in their pickles is run: see `pickles.py`.
"""

import math
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from llmfoundry_lite.checkpoint.dcp import Held, hold, publish, write_pieces
from llmfoundry_lite.checkpoint.manifest import DCP_STATE
from llmfoundry_lite.checkpoint.save import file_name
from llmfoundry_lite.checkpoint.store import Checkpoint, CheckpointStore
from llmfoundry_lite.convert.pickles import read_torch_file
from llmfoundry_lite.errors import CheckpointError
from llmfoundry_lite.ranks.codec import encode_value

FILE_BYTES = 4 << 30
"""Tensors of one file, more for a larger tensor. They are in memory together."""


def is_composers(metadata: Metadata) -> bool:
    """Return whether Composer's Trainer has written it."""
    paths = metadata.planner_data
    if not isinstance(paths, dict):
        return False
    return any(isinstance(path, tuple) and path[:2] == ("state", "model") for path in paths.values())


def import_state(
    folder: Path, metadata: Metadata, store: CheckpointStore, origin: dict[str, str]
) -> tuple[Checkpoint, list[str]]:
    """Publish every tensor and value as `ba0`. Returns a line for each value that is not carried.

    Raises CheckpointError, and then nothing is published.
    """
    lease = store.acquire()
    save_id = store.new_save_id(lease, 0)
    held: list[Held] = []
    held_bytes = 0
    pieces, values, notes = [], {}, []

    def write() -> None:
        if held:
            files = {piece.file.name for piece in pieces}
            pieces.extend(write_pieces(store, save_id, file_name(len(files)), held))
            held.clear()

    try:
        for key, record in metadata.state_dict_metadata.items():
            if isinstance(record, TensorStorageMetadata):
                tensor = read_tensor(folder, metadata, key)
                held.append(hold(key, tensor, (0,) * tensor.ndim, tensor.shape))
                held_bytes += tensor.nbytes
                if held_bytes >= FILE_BYTES:
                    write()
                    held_bytes = 0
                continue
            value = read_item(folder, metadata, MetadataIndex(key))
            try:
                encode_value(value, key)
                values[key] = value
            except CheckpointError:
                notes.append(f"{key} is not carried: it holds more than plain values")
        write()
        paths = {key: list(path) for key, path in (metadata.planner_data or {}).items()}
        scalars = {"imported_from": origin, DCP_STATE: {"values": values, "paths": paths}}
        return publish(store, lease, save_id, pieces, scalars), notes
    except BaseException as error:
        store.abandon(save_id)
        if isinstance(error, CheckpointError) or not isinstance(error, Exception):
            raise
        raise damaged(folder, error) from None


def damaged(folder: Path, error: Exception) -> CheckpointError:
    """Return what to raise for metadata that makes torch or Python raise whatever they like."""
    words = str(error).split("\n")[0]
    return CheckpointError(f"{folder}: damaged: {type(error).__name__} {words}")


def read_tensor(folder: Path, metadata: Metadata, key: str) -> Any:
    """Read a tensor from its pieces; None for what is no tensor. Raises CheckpointError if values are missing."""
    record = metadata.state_dict_metadata[key]
    if not isinstance(record, TensorStorageMetadata):
        return None
    tensor = torch.empty(record.size, dtype=record.properties.dtype)
    num_read = 0
    for chunk in record.chunks:
        box = tensor
        for dim, (offset, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            box = box.narrow(dim, offset, length)
        piece = read_item(folder, metadata, MetadataIndex(key, chunk.offsets))
        if not isinstance(piece, torch.Tensor) or (piece.shape, piece.dtype) != (box.shape, box.dtype):
            raise CheckpointError(f"{folder}: {key}: the piece at {list(chunk.offsets)} is not a tensor of its shape")
        box.copy_(piece)
        num_read += math.prod(chunk.sizes)
    if num_read != tensor.numel():
        raise CheckpointError(f"{folder}: {key}: {num_read:,} of its {tensor.numel():,} values are there")
    return tensor


def read_item(folder: Path, metadata: Metadata, index: MetadataIndex) -> Any:
    """Read a piece of a tensor, or a value. Raises CheckpointError."""
    place = metadata.storage_data[index]
    name = place.relative_path
    if getattr(place, "transform_descriptors", None):
        raise CheckpointError(f"{folder}/{name}: compressed by an extension; save it without, or as one file")
    if Path(name).name != name or not (folder / name).is_file():
        raise CheckpointError(f"{folder}/{name}: missing; all files of the checkpoint must be in one folder")
    with open(folder / name, "rb") as file:
        file.seek(place.offset)
        raw = file.read(place.length)  # os.pread would stop at 2 GiB
    return read_torch_file(raw, f"{folder}/{name}: {index.fqn}", is_trusted=True).content
