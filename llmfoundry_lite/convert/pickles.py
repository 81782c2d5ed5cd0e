"""Other programs' pickles -> tensors and plain values. The one module of this package that unpickles anything.

LLM Foundry's and Composer's checkpoints, and Hugging Face weights older than safetensors, exist as pickles only. A
pickle is a program that may call whatever Python can import. Without `--trust-pickle` torch's own weights-only reader
alone is asked, for files of weights. With it, what that reader refuses is read again with everything but tensors and
plain containers replaced by `StandIn`s, which do nothing. So the classes a checkpoint mentions need not be installed,
and none of them is ever imported or called.
"""

import collections
import dataclasses
import enum
import io
import os
import pickle
import re
import types
import zipfile
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, NamedTuple

import torch
import torch._utils
import torch.distributed.checkpoint.filesystem as dcp_files
import torch.distributed.checkpoint.metadata as dcp
from torch.distributed._shard.sharded_tensor import metadata as older_dcp

from llmfoundry_lite.errors import CheckpointError


class Unpickled(NamedTuple):
    content: Any
    refused: str | None
    """The name that torch's weights-only reader would not touch; None if it read everything."""


def read_torch_file(source: Path | bytes, where: str, *, is_trusted: bool) -> Unpickled:
    """Read what `torch.save` was given: a file, memory-mapped where its layout allows, or bytes. Tensors on the CPU.

    `where` names it in errors. Raises CheckpointError; unless `is_trusted`, also for what torch's weights-only reader
    refuses.
    """
    is_zip = zipfile.is_zipfile(io.BytesIO(source) if isinstance(source, bytes) else source)
    head = source[:1] if isinstance(source, bytes) else _first_byte(source)
    if not is_zip and head != b"\x80":
        raise CheckpointError(f"{where}: not a file of torch.save, or cut off; if it is compressed, unpack it first")
    is_mapped = is_zip and not isinstance(source, bytes)

    def file() -> Any:
        return io.BytesIO(source) if isinstance(source, bytes) else str(source)

    try:
        try:
            return Unpickled(torch.load(file(), map_location="cpu", mmap=is_mapped, weights_only=True), None)
        except pickle.UnpicklingError as error:
            named = re.search(r"GLOBAL ([\w.]+)", str(error))
            refused = named[1] if named else "something in it"
            if not is_trusted:
                raise CheckpointError(
                    f"{where}: a pickle that holds more than tensors ({refused}); if you trust where it comes from, "
                    "make a checkpoint of its folder: llmfoundry-lite checkpoint import FOLDER OUT --trust-pickle"
                ) from None
            # Not torch's unpickler but ours, which imports and calls nothing.
            content = torch.load(
                file(), map_location="cpu", mmap=is_mapped, weights_only=False, pickle_module=_TensorsOnlyModule
            )
            return Unpickled(content, refused)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged or hostile pickle raises whatever it likes
        raise CheckpointError(f"{where}: cannot be read: {_first_line(error)}") from None


def read_dcp_metadata(path: Path) -> dcp.Metadata:
    """The `.metadata` of a checkpoint of torch.distributed.checkpoint. Raises CheckpointError."""
    try:
        with open(path, "rb") as file:
            metadata = TensorsOnly(file).load()
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be read: {_first_line(error)}") from None
    if not isinstance(metadata, dcp.Metadata):
        raise CheckpointError(f"{path}: not the metadata of a sharded checkpoint")
    return metadata


class StandIn:
    """Takes the place of every class and function that tensors are not made of; accepts anything, does nothing."""

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> "StandIn":
        return self

    __setstate__ = __setitem__ = append = extend = add = __init__


RECORDS = (
    *(dcp.Metadata, dcp.MetadataIndex, dcp.TensorStorageMetadata, dcp.BytesStorageMetadata),
    *(dcp.ChunkStorageMetadata, dcp.TensorProperties, dcp.StorageMeta),
    *(dcp_files._StorageInfo, older_dcp.TensorProperties),
)
"""Dataclasses that a sharded checkpoint's metadata consists of: an instance of these may be given its fields."""


def _allowed() -> dict[tuple[str, str], Any]:
    things = {
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("torch", "Size"): torch.Size,
        ("torch", "device"): torch.device,
        ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    }
    for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter"):
        things["torch._utils", name] = getattr(torch._utils, name)
    for name, value in vars(torch).items():
        if isinstance(value, torch.dtype):
            things["torch", name] = value
    things |= {
        (cls.__module__, cls.__qualname__): cls
        for cls in (*RECORDS, dcp._MEM_FORMAT_ENCODING, older_dcp.MEM_FORMAT_ENCODING)
    }
    # How Python 3.11's first releases write a member of an enumeration.
    things["builtins", "getattr"] = _member
    return things


def _member(owner: Any, name: str) -> Any:
    """A member of one of the enumerations above, by name; of anything else, nothing."""
    return owner[name] if isinstance(owner, enum.EnumMeta) else StandIn()


ALLOWED = _allowed()


class TensorsOnly(pickle._Unpickler):
    """Never imports: a name is looked up in ALLOWED or stands for nothing.

    Sets no attributes but the fields of torch's records. In Python, because the unpickler in C lets nobody say what
    may be set.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        return ALLOWED.get((module, name), StandIn)

    def load_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) in (StandIn, collections.OrderedDict):  # of a state_dict its `_metadata`, which no one reads
            return
        if type(target) not in RECORDS:
            raise pickle.UnpicklingError(f"it sets attributes of {_name_of(target)}, which no checkpoint needs")
        if hasattr(target, "__setstate__"):
            target.__setstate__(state)
        elif isinstance(state, dict):
            fields = {field.name for field in dataclasses.fields(target)}
            vars(target).update({name: value for name, value in state.items() if name in fields})
        else:
            raise pickle.UnpicklingError(f"the state of {_name_of(target)} is no dict of its fields")

    dispatch[pickle.BUILD[0]] = load_build


def _name_of(target: Any) -> str:
    kind = target if isinstance(target, type | types.FunctionType) else type(target)
    return f"{kind.__module__}.{kind.__qualname__}"


class _TensorsOnlyModule:
    """TensorsOnly in the shape in which torch.load takes another unpickler."""

    Unpickler = TensorsOnly

    @staticmethod
    def load(file: BinaryIO, **options: Any) -> Any:
        return TensorsOnly(file, **options).load()


def _first_byte(path: Path) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(1)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or os.fspath(path)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).split("\n")[0]
