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
    """Why values were not compared (only in one, other shape); else empty."""
    num_different: int = 0
    max_absolute: float = 0.0
    """NaN if an element is NaN in one tensor only."""
    max_relative: float = 0.0
    """The largest |a - b| / max(|a|, |b|)."""


def load_full_tensors(url: Url, *, prefix: str = "model/") -> Tensors:
    """Return all tensors under `prefix`, which is taken off their names, on the CPU; tied ones under each of their
    names. Raises CheckpointError."""
    checkpoint = open_checkpoint(url)
    tensors = read_full(checkpoint, [name for name in checkpoint.manifest.tensors if name.startswith(prefix)])
    for alias, name in checkpoint.manifest.aliases.items():
        if name in tensors:
            tensors[alias] = tensors[name]
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def read_full(checkpoint: Checkpoint, names: list[str]) -> Tensors:
    records = {name: checkpoint.manifest.tensors[name] for name in names}
    like = {name: torch.empty(r.shape, dtype=DTYPES[r.dtype], device="meta") for name, r in records.items()}
    return read_tensors(checkpoint, like)


def diff(a: Url, b: Url) -> Iterator[Difference]:
    """Compare each tensor of either checkpoint, in order of name; two tensors in memory at a time."""
    first, second = open_checkpoint(a), open_checkpoint(b)
    for name in sorted(first.manifest.tensors.keys() | second.manifest.tensors.keys()):
        here, there = first.manifest.tensors.get(name), second.manifest.tensors.get(name)
        if here is None or there is None:
            yield Difference(name, f"only in {'a' if here else 'b'}")
        elif here.shape != there.shape:
            yield Difference(name, f"shape {list(here.shape)} and {list(there.shape)}")
        else:
            note = "" if here.dtype == there.dtype else f"dtype {here.dtype} and {there.dtype}"
            yield compare(name, note, read_full(first, [name])[name], read_full(second, [name])[name])


def compare(name: str, note: str, a: torch.Tensor, b: torch.Tensor) -> Difference:
    """Return the largest differences of two tensors of one shape; `note` is passed on."""
    if a.dtype == b.dtype and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)):
        return Difference(name, note)
    exactly = (a == b) if a.dtype == b.dtype else True  # different large integers may be equal as float64
    a, b = a.double(), b.double()
    same = ((a == b) & exactly) | (a.isnan() & b.isnan())
    if bool(same.all()):
        return Difference(name, note)
    absolute = torch.where(same, 0.0, (a - b).abs())
    scale = torch.maximum(a.abs(), b.abs()).clamp_min(torch.finfo(torch.float64).tiny)
    relative = torch.where(same, 0.0, absolute / scale)
    return Difference(name, note, int((~same).sum()), float(absolute.max()), float(relative.max()))


def diff_scalars(a: Manifest, b: Manifest) -> list[tuple[str, object, object]]:
    """Return path, value in a and value in b of everything that differs and is not an array."""
    here, there = (dict(_flatten({"scalars": m.scalars, "optimizer": m.optimizer}, "")) for m in (a, b))
    both = ((path, *(side.get(path, "<missing>") for side in (here, there))) for path in sorted(here | there))
    return [(path, x, y) for path, x, y in both if repr(x) != repr(y)]


def consolidate(url: Url, target: Url, *, everything: bool = False) -> Path:
    """Write one safetensors file: weights under their names in the model, or with `everything` all tensors under
    their names in the checkpoint. Return its path.

    An earlier consolidation is replaced when the new one is complete. Raises CheckpointError for any other file at
    `target`, for a target in a checkpoint, and when the disk fails.
    """
    checkpoint, path = open_checkpoint(url), Path(target)
    check_outside_checkpoints(path)
    if os.path.lexists(path) and not _is_consolidated(path):
        raise CheckpointError(f"{path}: exists and is not an earlier consolidation; give another name, or remove it")
    manifest = checkpoint.manifest
    names = {
        name if everything else name.removeprefix("model/"): name
        for name in manifest.tensors
        if everything or name.startswith("model/")
    }
    if not names:
        raise CheckpointError(
            f"{checkpoint.url}: none of its tensors is named model/…; --everything writes all of them"
        )
    records = file_order({short: manifest.tensors[name] for short, name in names.items()})
    metadata = {"format": "pt", "save_id": manifest.save_id, "aliases": json.dumps(manifest.aliases)}
    draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(draft, "wb") as file:
            file.write(build_header(records, metadata))
            for short, record in records.items():
                if math.prod(record.shape):
                    tensor = read_full(checkpoint, [names[short]])[names[short]]
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
    if not path.is_file():  # a pipe would make its reader wait for ever
        return False
    with contextlib.suppress(OSError, SafetensorError), safe_open(path, framework="pt") as file:
        return {"save_id", "aliases"} <= (file.metadata() or {}).keys()
    return False


def _flatten(value: object, path: str) -> Iterator[tuple[str, object]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _flatten(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, (list, tuple)) and value:
        for i, item in enumerate(value):
            yield from _flatten(item, f"{path}[{i}]")
    else:
        yield path, value
