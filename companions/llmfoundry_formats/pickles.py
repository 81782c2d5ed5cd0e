"""Reader of pickles that other programs wrote. The one module here that unpickles anything.

LLM Foundry's and Composer's checkpoints, and Hugging Face weights older than safetensors, exist as pickles only. A
pickle is a program that may call whatever Python can import. torch's own weights-only reader is tried first. With
`--trust-pickle`, a file that it refuses is read by `TensorsOnly`, which builds tensors and plain containers and
replaces everything else by `StandIn`s, which do nothing. So the classes that a checkpoint mentions need not be
installed, and none of them is ever imported or called.
"""

import collections
import dataclasses
import enum
import io
import pickle
import re
import types
import zipfile
from pathlib import Path
from typing import IO, Any, BinaryIO, ClassVar, NamedTuple

import torch
import torch._utils
import torch.distributed.checkpoint.filesystem as dcp_files
import torch.distributed.checkpoint.metadata as dcp
from torch.distributed._shard.sharded_tensor import metadata as older_dcp

from llmfoundry_lite.errors import CheckpointError, ExportError
from llmfoundry_lite.files import open_regular
from llmfoundry_lite.retry import first_line

STOOD_IN = "read with stand-ins for everything but tensors and plain values; nothing in it was run"
MAX_REPEATED_BYTES = 1 << 20
"""Bytes that a tensor may have beyond those stored, such as a mask that was expanded."""


class Unpickled(NamedTuple):
    """Content of a pickle."""

    content: Any
    refused: str | None
    """The name that torch's weights-only reader refused; None if it read everything."""

    def describe(self, name: str) -> str:
        if self.refused is None:
            return f"{name} was read by torch's weights-only reader"
        return f"{name} holds {self.refused}, so it was {STOOD_IN}"


def read_weights_file(path: Path, *, is_trusted: bool) -> tuple[dict[str, torch.Tensor], str]:
    """Read a pytorch_model.bin: its tensors, and how it was read. Raises CheckpointError or ExportError."""
    found = read_torch_file(path, str(path), is_trusted=is_trusted)
    content = found.content
    if not isinstance(content, dict) or not all(isinstance(value, torch.Tensor) for value in content.values()):
        raise ExportError(f"{path}: expected tensors by name and nothing else")
    return content, found.describe(path.name)


def read_torch_file(source: Path | bytes, where: str, *, is_trusted: bool) -> Unpickled:
    """Read a file of `torch.save`, memory-mapped where its layout allows, or its bytes. Tensors are on the CPU.

    `where` names it in errors. Raises CheckpointError; unless `is_trusted`, also for what torch's weights-only reader
    refuses.
    """
    try:
        with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb", opener=open_regular) as file:
            first_byte, is_zip = file.read(1), zipfile.is_zipfile(file)
            packed = _packed_member(file) if is_zip else None
    except OSError as error:
        raise CheckpointError(f"{where}: cannot be read: {error.strerror or error}") from error
    if not is_zip and first_byte != b"\x80":
        raise CheckpointError(f"{where}: not a file of torch.save, or cut off; if it is compressed, unpack it first")
    if packed is not None:  # torch would read packed bytes as a tensor's values, and unpack other members to any size
        raise CheckpointError(f"{where}: {packed} in it is packed, which torch.save never does; save it again")

    is_mapped = is_zip and not isinstance(source, bytes)
    try:
        try:
            content = torch.load(_reopen(source), map_location="cpu", mmap=is_mapped, weights_only=True)
            return Unpickled(_with_stored_values(content, where), None)
        except pickle.UnpicklingError as error:
            named = re.search(r"GLOBAL ([\w.]+)", str(error))
            refused = named[1] if named else "something in it"
            if not is_trusted:
                raise CheckpointError(
                    f"{where}: a pickle that holds more than tensors ({refused}); if you trust where it comes from, "
                    "make a checkpoint of its folder: llmfoundry-lite checkpoint import FOLDER OUT --trust-pickle"
                ) from None
            # With --trust-pickle: not torch's unpickler but ours, which imports and calls nothing.
            ours: Any = _TensorsOnlyModule
            options = {"mmap": is_mapped, "weights_only": False, "pickle_module": ours}
            content = torch.load(_reopen(source), map_location="cpu", **options)
            return Unpickled(_with_stored_values(content, where), refused)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged or hostile pickle raises whatever it likes
        raise CheckpointError(f"{where}: cannot be read: {first_line(error)}") from None


def _reopen(source: Path | bytes) -> Any:
    return io.BytesIO(source) if isinstance(source, bytes) else str(source)


def _packed_member(file: IO[bytes]) -> str | None:
    """Name a compressed member of a ZIP archive; None if there is none, or the file is no whole archive."""
    try:
        with zipfile.ZipFile(file) as archive:
            return next((one.filename for one in archive.infolist() if one.compress_type != zipfile.ZIP_STORED), None)
    except zipfile.BadZipFile:
        return None


def _with_stored_values(content: Any, where: str) -> Any:
    """Return the content of a file. Raises CheckpointError for a tensor with far more values than the file stores: with
    a stride of 0, four bytes may have a shape of terabytes, and any copy needs those."""
    seen, waiting = set[int](), [content]
    while waiting:
        value = waiting.pop()
        if isinstance(value, torch.Tensor):
            if value.layout == torch.strided and value.nbytes > MAX_REPEATED_BYTES + value.untyped_storage().nbytes():
                size = f"{value.nbytes:,} bytes, and {value.untyped_storage().nbytes():,} are stored"
                raise CheckpointError(f"{where}: a tensor of shape {list(value.shape)} has {size}; save its values")
        elif isinstance(value, dict | list | tuple) and id(value) not in seen:
            seen.add(id(value))
            waiting.extend(value.values() if isinstance(value, dict) else value)
    return content


def read_dcp_metadata(path: Path) -> dcp.Metadata:
    """Read the `.metadata` of a checkpoint of torch.distributed.checkpoint. Raises CheckpointError."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            metadata = TensorsOnly(file).load()
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be read: {first_line(error)}") from None
    if not isinstance(metadata, dcp.Metadata):
        raise CheckpointError(f"{path}: not the metadata of a sharded checkpoint")
    return metadata


class StandIn:
    """Replacement of every class and function that no tensor needs. It accepts any call and does nothing."""

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
"""Dataclasses of a sharded checkpoint's metadata. Only fields of these may be set."""


def _member(owner: Any, name: str) -> Any:
    """Return a member of an enumeration in ALLOWED, by name; of anything else, a stand-in."""
    return owner[name] if isinstance(owner, enum.EnumMeta) else StandIn()


ALLOWED: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("torch", "Size"): torch.Size,
    ("torch", "device"): torch.device,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch._utils", "_rebuild_tensor"): torch._utils._rebuild_tensor,
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    # Python 3.11's first releases write a member of an enumeration in this way.
    ("builtins", "getattr"): _member,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{
        (cls.__module__, cls.__qualname__): cls
        for cls in (*RECORDS, dcp._MEM_FORMAT_ENCODING, older_dcp.MEM_FORMAT_ENCODING)
    },
}
"""Module and name in a pickle -> the object that is meant."""


class TensorsOnly(pickle._Unpickler):
    """Unpickler without imports: it knows the names in ALLOWED, and replaces all others by `StandIn`.

    It sets no attributes but the fields of RECORDS. Written in Python, because the unpickler in C cannot be told what
    may be set.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        return ALLOWED.get((module, name), StandIn)

    def load_build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        is_record = type(target) in RECORDS
        if is_record and hasattr(target, "__setstate__"):
            target.__setstate__(state)
        elif is_record and isinstance(state, dict):
            fields = {field.name for field in dataclasses.fields(target)}
            vars(target).update({name: value for name, value in state.items() if name in fields})
        elif type(target) not in (StandIn, collections.OrderedDict):  # a state_dict's `_metadata` is not needed
            kind = target if isinstance(target, type | types.FunctionType) else type(target)
            raise pickle.UnpicklingError(
                f"it sets attributes of {kind.__module__}.{kind.__qualname__}, which no checkpoint needs"
            )

    dispatch[pickle.BUILD[0]] = load_build
    del dispatch[pickle.BYTEARRAY8[0]]  # fills as much memory as its first bytes ask for, and no checkpoint has one


class _TensorsOnlyModule:
    """TensorsOnly as a module, which is how torch.load takes another unpickler."""

    Unpickler = TensorsOnly

    @staticmethod
    def load(file: BinaryIO, **options: Any) -> Any:
        return TensorsOnly(file, **options).load()
