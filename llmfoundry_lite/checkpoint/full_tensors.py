"""Full tensors of a checkpoint, read by one process without a process group: to export, compare or consolidate.

`load_full_tensors` returns them, `diff` and `diff_scalars` compare two checkpoints, and `consolidate` writes one
safetensors file. `restore` does the reading; the sharding of the run that saved does not matter here.
"""

import contextlib
import json
import math
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from llmfoundry_lite.checkpoint.manifest import Manifest
from llmfoundry_lite.checkpoint.paths import check_outside_checkpoints
from llmfoundry_lite.checkpoint.restore import read_tensors
from llmfoundry_lite.checkpoint.shards import build_header, file_order
from llmfoundry_lite.checkpoint.state import DTYPES, Tensors
from llmfoundry_lite.checkpoint.store import Checkpoint, open_checkpoint
from llmfoundry_lite.errors import CheckpointError

Url = str | os.PathLike[str]


class Difference(NamedTuple):
    """How two tensors of the same name differ."""

    name: str
    note: str
    """Why values were not compared, such as another shape, or that dtypes differ. Empty: neither."""
    num_different: int = 0
    """Number of elements that are not equal. 0 also if values were not compared."""
    max_absolute: float = 0.0
    """NaN if an element is NaN in one tensor only."""
    max_relative: float = 0.0
    """The largest |a - b| / max(|a|, |b|)."""


def load_full_tensors(url: Url, *, prefix: str = "model/") -> Tensors:
    """Load the full tensors of a checkpoint whose keys begin with `prefix`, onto the CPU.

    url: one checkpoint, such as `runs/mpt/checkpoints/ba200` or `s3://bucket/run/ba200`.

    Returns the tensors by key without the prefix; by default that is the model's state dict. A tied tensor is returned
    under each of its names, as the same object. Raises CheckpointError if the checkpoint is absent or damaged.
    """
    checkpoint = open_checkpoint(url)
    keys = [key for key in checkpoint.manifest.tensors if key.startswith(prefix)]
    tensors = read_full(checkpoint, keys)
    for alias, stored_key in checkpoint.manifest.aliases.items():
        if stored_key in tensors:
            tensors[alias] = tensors[stored_key]
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items()}


def read_full(checkpoint: Checkpoint, keys: list[str]) -> Tensors:
    """Read full tensors of a checkpoint into new CPU memory, by key (`model/wte.weight`), and verify what is read.

    Raises UnsoundCheckpointError if a file is absent, unreadable or damaged.
    """
    # A tensor that is not a DTensor asks `read_tensors` for all of it. On the meta device, it takes no memory.
    like = {}
    for key in keys:
        record = checkpoint.manifest.tensors[key]
        like[key] = torch.empty(record.shape, dtype=DTYPES[record.dtype], device="meta")
    return read_tensors(checkpoint, like)


def diff(a: Url, b: Url) -> Iterator[Difference]:
    """Compare two checkpoints tensor by tensor, in order of key, and yield a `Difference` for each, equal ones
    included.

    `a` and `b` are URLs of checkpoints. Two tensors are in memory at a time. Raises CheckpointError if a checkpoint is
    absent or damaged.
    """
    checkpoint_a = open_checkpoint(a)
    checkpoint_b = open_checkpoint(b)
    records_a = checkpoint_a.manifest.tensors
    records_b = checkpoint_b.manifest.tensors
    for key in sorted(records_a.keys() | records_b.keys()):
        record_a = records_a.get(key)
        record_b = records_b.get(key)
        if record_a is None or record_b is None:
            yield Difference(key, f"only in {'a' if record_a else 'b'}")
            continue
        if record_a.shape != record_b.shape:
            yield Difference(key, f"shape {list(record_a.shape)} and {list(record_b.shape)}")
            continue

        note = ""
        if record_a.dtype != record_b.dtype:
            note = f"dtype {record_a.dtype} and {record_b.dtype}"
        tensor_a = read_full(checkpoint_a, [key])[key]
        tensor_b = read_full(checkpoint_b, [key])[key]
        yield compare(key, note, tensor_a, tensor_b)


def compare(name: str, note: str, a: torch.Tensor, b: torch.Tensor) -> Difference:
    """Compare two CPU tensors of the same shape, whose dtypes may differ.

    name, note: text for the result.

    Returns how many elements differ and the largest differences, computed in float64. Elements that are NaN in both
    tensors are equal.
    """
    # Most tensors have the same bytes, which is quick to find out and needs no memory.
    have_same_dtype = a.dtype == b.dtype
    if have_same_dtype:
        bytes_a = a.reshape(-1).view(torch.uint8)
        bytes_b = b.reshape(-1).view(torch.uint8)
        if torch.equal(bytes_a, bytes_b):
            return Difference(name, note)

    # Find equal elements. Different large integers may be equal as float64, so they are compared before as well.
    is_equal_before = (a == b) if have_same_dtype else True
    a = a.double()
    b = b.double()
    is_equal = ((a == b) & is_equal_before) | (a.isnan() & b.isnan())
    if bool(is_equal.all()):
        return Difference(name, note)

    # Differences of equal elements are set to 0, because infinity minus infinity would be NaN. The smallest normal
    # number in the denominator avoids 0 / 0.
    absolute = torch.where(is_equal, 0.0, (a - b).abs())
    larger_magnitude = torch.maximum(a.abs(), b.abs()).clamp_min(torch.finfo(torch.float64).tiny)
    relative = torch.where(is_equal, 0.0, absolute / larger_magnitude)
    return Difference(name, note, int((~is_equal).sum()), float(absolute.max()), float(relative.max()))


def diff_scalars(a: Manifest, b: Manifest) -> list[tuple[str, object, object]]:
    """Compare everything in two checkpoints that is not a tensor: run state, and the optimizer's options and numbers.

    Returns a (path, value in `a`, value in `b`) for each value that differs, in order of path, such as
    `("optimizer.groups[0].options.lr", 0.001, 0.002)`. A value that one of them lacks is `<missing>`.
    """
    values_a = dict(_flatten({"scalars": a.scalars, "optimizer": a.optimizer}, ""))
    values_b = dict(_flatten({"scalars": b.scalars, "optimizer": b.optimizer}, ""))
    differences = []
    for path in sorted(values_a | values_b):
        value_a = values_a.get(path, "<missing>")
        value_b = values_b.get(path, "<missing>")
        if repr(value_a) != repr(value_b):  # by `repr`, NaN equals NaN, and 1 does not equal 1.0
            differences.append((path, value_a, value_b))
    return differences


def consolidate(url: Url, target: Url, *, everything: bool = False) -> Path:
    """Write a checkpoint's tensors to one safetensors file at `target`, and return its path.

    url: the checkpoint.
    everything: write all tensors, under their keys in the checkpoint (`model/…`, `optim/…`). By default only the
        weights are written, under their names in the model.

    The file appears when it is complete, and replaces an earlier consolidation. One tensor is in memory at a time.

    Raises CheckpointError if there is any other file at `target`, if `target` lies in a checkpoint, if the checkpoint
    is damaged, or if the disk fails.
    """
    checkpoint = open_checkpoint(url)
    path = Path(target)
    check_outside_checkpoints(path)
    if os.path.lexists(path) and not _is_consolidated(path):
        raise CheckpointError(f"{path}: exists and is not an earlier consolidation; give another name, or remove it")

    # Choose the tensors, and their names in the new file.
    manifest = checkpoint.manifest
    key_of_name = {}  # name in the new file -> key in the checkpoint
    for key in manifest.tensors:
        if everything:
            key_of_name[key] = key
        elif key.startswith("model/"):
            key_of_name[key.removeprefix("model/")] = key
    if not key_of_name:
        raise CheckpointError(
            f"{checkpoint.url}: none of its tensors is named model/…; --everything writes all of them"
        )

    # Write a draft beside the target, and rename it when it is on the disk.
    records = file_order({name: manifest.tensors[key] for name, key in key_of_name.items()})
    metadata = {"format": "pt", "save_id": manifest.save_id, "aliases": json.dumps(manifest.aliases)}
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(draft, "wb") as file:
            file.write(build_header(records, metadata))
            for name, record in records.items():
                has_elements = math.prod(record.shape) > 0
                if has_elements:
                    key = key_of_name[name]
                    tensor = read_full(checkpoint, [key])[key]
                    file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        raise CheckpointError(f"{path}: not written: {error.strerror or error}") from error
    finally:
        with contextlib.suppress(OSError):  # a read-only disk raises even if there is no draft
            draft.unlink(missing_ok=True)
    return path


def _is_consolidated(path: Path) -> bool:
    """Return whether a file was written by `consolidate`, as its metadata shows, so that it may be replaced."""
    if not path.is_file():  # a read from a pipe would never end
        return False
    with contextlib.suppress(OSError, SafetensorError), safe_open(path, framework="pt") as file:
        metadata = file.metadata() or {}
        return "save_id" in metadata and "aliases" in metadata
    return False


def _flatten(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield the path and the value of each leaf of nested dicts, lists and tuples. Empty containers are leaves.

    `path` is the path of `value` itself. With the path `scalars`, `{"clock": [5, 7]}` yields `("scalars.clock[0]", 5)`
    and `("scalars.clock[1]", 7)`.
    """
    if isinstance(value, dict) and value:
        for key, child in value.items():
            child_path = f"{path}.{key}" if path else str(key)
            yield from _flatten(child, child_path)
    elif isinstance(value, (list, tuple)) and value:
        for i, child in enumerate(value):
            yield from _flatten(child, f"{path}[{i}]")
    else:
        yield path, value
