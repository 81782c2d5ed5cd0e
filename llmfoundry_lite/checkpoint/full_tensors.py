"""Full tensors of a checkpoint, read by one process without a process group: to export, compare or consolidate."""

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
    """The largest differences between two tensors of the same name."""

    name: str
    note: str
    """Why values were not compared, such as another shape, or that dtypes differ. Empty: neither."""
    num_different: int = 0
    max_absolute: float = 0.0
    """NaN if an element is NaN in one tensor only."""
    max_relative: float = 0.0
    """The largest |a - b| / max(|a|, |b|)."""


def load_full_tensors(url: Url, *, prefix: str = "model/") -> Tensors:
    """Return all tensors of a checkpoint whose names begin with `prefix`, which is taken off, on the CPU.

    Tied tensors are there under each of their names. Raises CheckpointError.
    """
    checkpoint = open_checkpoint(url)
    tensors = read_full(checkpoint, [name for name in checkpoint.manifest.tensors if name.startswith(prefix)])
    for alias, name in checkpoint.manifest.aliases.items():
        if name in tensors:
            tensors[alias] = tensors[name]
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def read_full(checkpoint: Checkpoint, names: list[str]) -> Tensors:
    """Return whole tensors of a checkpoint by name, on the CPU. Raises UnsoundCheckpointError."""
    like = {}
    for name in names:
        record = checkpoint.manifest.tensors[name]
        like[name] = torch.empty(record.shape, dtype=DTYPES[record.dtype], device="meta")
    return read_tensors(checkpoint, like)


def diff(a: Url, b: Url) -> Iterator[Difference]:
    """Compare each tensor that checkpoint `a` or `b` has, in order of name. Two tensors are in memory at a time.

    Raises CheckpointError.
    """
    checkpoint_a = open_checkpoint(a)
    checkpoint_b = open_checkpoint(b)
    tensors_a = checkpoint_a.manifest.tensors
    tensors_b = checkpoint_b.manifest.tensors
    for name in sorted(tensors_a.keys() | tensors_b.keys()):
        record_a = tensors_a.get(name)
        record_b = tensors_b.get(name)
        if record_a is None or record_b is None:
            yield Difference(name, f"only in {'a' if record_a else 'b'}")
        elif record_a.shape != record_b.shape:
            yield Difference(name, f"shape {list(record_a.shape)} and {list(record_b.shape)}")
        else:
            note = "" if record_a.dtype == record_b.dtype else f"dtype {record_a.dtype} and {record_b.dtype}"
            yield compare(name, note, read_full(checkpoint_a, [name])[name], read_full(checkpoint_b, [name])[name])


def compare(name: str, note: str, a: torch.Tensor, b: torch.Tensor) -> Difference:
    """Return the largest differences of two CPU tensors of one shape, in float64. `name` and `note` go into the result.

    Elements that are NaN in both tensors are equal.
    """
    # Most tensors have the same bits, which is quick to see, and needs no memory.
    has_one_dtype = a.dtype == b.dtype
    if has_one_dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
        return Difference(name, note)

    # Different large integers may be equal as float64, so they are compared before.
    is_exactly_same = (a == b) if has_one_dtype else True
    a = a.double()
    b = b.double()
    is_same = ((a == b) & is_exactly_same) | (a.isnan() & b.isnan())
    if bool(is_same.all()):
        return Difference(name, note)

    # Equal infinities would give NaN, so equal elements are 0 here.
    absolute = torch.where(is_same, 0.0, (a - b).abs())
    scale = torch.maximum(a.abs(), b.abs()).clamp_min(torch.finfo(torch.float64).tiny)
    relative = torch.where(is_same, 0.0, absolute / scale)
    return Difference(name, note, int((~is_same).sum()), float(absolute.max()), float(relative.max()))


def diff_scalars(a: Manifest, b: Manifest) -> list[tuple[str, object, object]]:
    """Return path, value in `a` and value in `b` of everything that differs between two checkpoints and is no tensor.

    A value that one of them lacks is `<missing>`.
    """
    values_a = dict(_flatten({"scalars": a.scalars, "optimizer": a.optimizer}, ""))
    values_b = dict(_flatten({"scalars": b.scalars, "optimizer": b.optimizer}, ""))
    differences = []
    for path in sorted(values_a | values_b):
        value_a = values_a.get(path, "<missing>")
        value_b = values_b.get(path, "<missing>")
        if repr(value_a) != repr(value_b):  # NaN equals NaN then, and 1 does not equal 1.0
            differences.append((path, value_a, value_b))
    return differences


def consolidate(url: Url, target: Url, *, everything: bool = False) -> Path:
    """Write a checkpoint's tensors to one safetensors file, and return its path.

    These are the weights, under their names in the model, or with `everything` all tensors, under their names in the
    checkpoint. An earlier consolidation is replaced when the new one is complete. One tensor is in memory at a time.

    Raises CheckpointError if there is any other file at `target`, if `target` lies in a checkpoint, and if the disk
    fails.
    """
    checkpoint = open_checkpoint(url)
    path = Path(target)
    check_outside_checkpoints(path)
    if os.path.lexists(path) and not _is_consolidated(path):
        raise CheckpointError(f"{path}: exists and is not an earlier consolidation; give another name, or remove it")

    manifest = checkpoint.manifest
    if everything:
        stored_names = {name: name for name in manifest.tensors}
    else:
        stored_names = {name.removeprefix("model/"): name for name in manifest.tensors if name.startswith("model/")}
    if not stored_names:
        raise CheckpointError(
            f"{checkpoint.url}: none of its tensors is named model/…; --everything writes all of them"
        )
    records = file_order({name: manifest.tensors[stored_name] for name, stored_name in stored_names.items()})
    metadata = {"format": "pt", "save_id": manifest.save_id, "aliases": json.dumps(manifest.aliases)}
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(draft, "wb") as file:
            file.write(build_header(records, metadata))
            for name, record in records.items():
                if math.prod(record.shape):
                    stored_name = stored_names[name]
                    tensor = read_full(checkpoint, [stored_name])[stored_name]
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
    """Return whether `consolidate` has written this file."""
    if not path.is_file():  # a read from a pipe would never end
        return False
    with contextlib.suppress(OSError, SafetensorError), safe_open(path, framework="pt") as file:
        return {"save_id", "aliases"} <= (file.metadata() or {}).keys()
    return False


def _flatten(value: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield the path and value of each leaf of nested dicts, lists and tuples, such as `scalars.clock[0]`. `path` is
    that of `value`. Empty containers are leaves."""
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flatten(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and value:
        for i, item in enumerate(value):
            yield from _flatten(item, f"{path}[{i}]")
    else:
        yield path, value
