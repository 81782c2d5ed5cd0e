"""Reader of pickles that other programs wrote. No other module of this package unpickles anything.

Checkpoints of LLM Foundry and Composer, and Hugging Face weights older than safetensors, exist as pickles only. A
pickle is a program that may call whatever Python can import. So a file is read in two steps:

1. torch's own weights-only reader, which is always tried first.
2. `TensorsOnly`, for a file that torch refuses, and only with `--trust-pickle`. It builds tensors and plain containers,
   and replaces everything else by a `StandIn`, which does nothing. DCP's `.metadata` is read by it at once.

The classes that a checkpoint mentions therefore need not be installed, and none of them is ever imported or called.
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
        """Return a sentence for the user about how the file `name` was read."""
        if self.refused is None:
            return f"{name} was read by torch's weights-only reader"
        return f"{name} holds {self.refused}, so it was {STOOD_IN}"


def read_weights_file(path: Path, *, is_trusted: bool) -> tuple[dict[str, torch.Tensor], str]:
    """Read a pytorch_model.bin. Returns its tensors by name, and a sentence about how they were read.

    `is_trusted` is as in `read_torch_file`. Raises CheckpointError if the file cannot be read, and ExportError if it
    contains more than tensors.
    """
    unpickled = read_torch_file(path, str(path), is_trusted=is_trusted)
    tensors = unpickled.content
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise ExportError(f"{path}: expected tensors by name and nothing else")
    return tensors, unpickled.describe(path.name)


def read_torch_file(source: Path | bytes, location: str, *, is_trusted: bool) -> Unpickled:
    """Read what `torch.save` wrote. Tensors are on the CPU.

    source: a file, which is memory-mapped if it is a ZIP archive, or the bytes of one.
    location: where the source is, for errors.
    is_trusted: whether a source that torch's weights-only reader refuses is read by `TensorsOnly`.

    Raises CheckpointError for a damaged source, for one whose tensors take more memory than it stores, and, unless it
    is trusted, for one that torch's reader refuses.
    """
    try:
        with io.BytesIO(source) if isinstance(source, bytes) else open(source, "rb", opener=open_regular) as file:
            first_byte = file.read(1)
            is_zip = zipfile.is_zipfile(file)
            compressed_member = _compressed_member(file) if is_zip else None
    except OSError as error:
        raise CheckpointError(f"{location}: cannot be read: {error.strerror or error}") from error

    # torch.save writes a ZIP archive or, in its old format, a pickle. Any pickle of today begins with the byte 0x80.
    if not is_zip and first_byte != b"\x80":
        raise CheckpointError(f"{location}: not a file of torch.save, or cut off; if it is compressed, unpack it first")
    # torch would read compressed bytes as a tensor's values, and unpack other members to any size.
    if compressed_member is not None:
        raise CheckpointError(
            f"{location}: {compressed_member} in it is packed, which torch.save never does; save it again"
        )

    is_mapped = is_zip and not isinstance(source, bytes)
    try:
        try:
            content = torch.load(_reopen(source), map_location="cpu", mmap=is_mapped, weights_only=True)
            refused = None
        except pickle.UnpicklingError as error:
            match = re.search(r"GLOBAL ([\w.]+)", str(error))
            refused = match[1] if match else "something in it"
            if not is_trusted:
                raise CheckpointError(
                    f"{location}: a pickle that holds more than tensors ({refused}); if you trust where it comes from, "
                    "make a checkpoint of its folder: llmfoundry-lite checkpoint import FOLDER OUT --trust-pickle"
                ) from None
            # `weights_only=False` is safe here, because the unpickler is ours, which imports and calls nothing.
            unpickler: Any = _TensorsOnlyModule
            options = {"mmap": is_mapped, "weights_only": False, "pickle_module": unpickler}
            content = torch.load(_reopen(source), map_location="cpu", **options)
        _check_stored_sizes(content, location)
        return Unpickled(content, refused)
    except CheckpointError:
        raise
    except Exception as error:  # a damaged or hostile pickle raises whatever it likes
        raise CheckpointError(f"{location}: cannot be read: {first_line(error)}") from None


def _reopen(source: Path | bytes) -> Any:
    """Return the source as torch.load takes it, from its beginning. torch maps only files that it opens by name."""
    return io.BytesIO(source) if isinstance(source, bytes) else str(source)


def _compressed_member(file: IO[bytes]) -> str | None:
    """Return the name of a compressed member of a ZIP archive; None if there is none, or the archive is not whole."""
    try:
        with zipfile.ZipFile(file) as archive:
            for member in archive.infolist():
                if member.compress_type != zipfile.ZIP_STORED:
                    return member.filename
    except zipfile.BadZipFile:
        return None
    return None


def _check_stored_sizes(content: Any, location: str) -> None:
    """Raise CheckpointError for a tensor with far more values than its file stores, anywhere in nested containers.

    With a stride of 0, four stored bytes can have a shape of terabytes, and any copy would take that much memory.
    """
    seen_ids: set[int] = set()
    pending = [content]
    while pending:
        value = pending.pop()
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided:
                continue
            stored_bytes = value.untyped_storage().nbytes()
            if value.nbytes > MAX_REPEATED_BYTES + stored_bytes:
                raise CheckpointError(
                    f"{location}: a tensor of shape {list(value.shape)} has {value.nbytes:,} bytes, and "
                    f"{stored_bytes:,} are stored; save its values"
                )
        elif isinstance(value, dict | list | tuple) and id(value) not in seen_ids:  # a container may contain itself
            seen_ids.add(id(value))
            pending.extend(value.values() if isinstance(value, dict) else value)


def read_dcp_metadata(path: Path) -> dcp.Metadata:
    """Read the `.metadata` of a checkpoint of torch.distributed.checkpoint.

    Raises CheckpointError if the file is damaged or contains anything else. Only its outermost type is checked, so that
    a hostile file may still have any value in any field.
    """
    try:
        with open(path, "rb", opener=open_regular) as file:
            metadata = TensorsOnly(file).load()
    except Exception as error:
        raise CheckpointError(f"{path}: cannot be read: {first_line(error)}") from None
    if not isinstance(metadata, dcp.Metadata):
        raise CheckpointError(f"{path}: not the metadata of a sharded checkpoint")
    return metadata


class StandIn:
    """Replacement of every class and function that no tensor needs. It accepts any call and does nothing.

    A pickle may call it, set its state or items, or append to it, as if it were a list, a set or a dictionary.
    """

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


def _enum_member_or_stand_in(owner: Any, name: str) -> Any:
    """Replace `getattr` in a pickle: return a member of an enumeration in ALLOWED, and otherwise a stand-in."""
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
    ("builtins", "getattr"): _enum_member_or_stand_in,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    **{
        (cls.__module__, cls.__qualname__): cls
        for cls in (*RECORDS, dcp._MEM_FORMAT_ENCODING, older_dcp.MEM_FORMAT_ENCODING)
    },
}
"""Module and name in a pickle -> the object that is meant."""


class TensorsOnly(pickle._Unpickler):
    """Unpickler without imports: it knows the names in ALLOWED, and replaces all others by `StandIn`.

    It sets no attributes but the fields of RECORDS. Its base is the standard library's unpickler in Python, because the
    one in C cannot be told what may be set.
    """

    stack: list[Any]
    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        """Return what a pickle means by a module and a name, without importing anything."""
        return ALLOWED.get((module, name), StandIn)

    def load_build(self) -> None:
        """Set the state of an object: the pickle's BUILD instruction, with the state on top of the stack.

        Only a record gets its state. The state of a stand-in, and a state_dict's `_metadata`, are dropped. Raises
        UnpicklingError for any other object, because setting attributes of a class or a function could change what
        later code does.
        """
        state = self.stack.pop()
        target = self.stack[-1]
        is_record = type(target) in RECORDS
        is_state_dropped = type(target) in (StandIn, collections.OrderedDict)
        if is_record and hasattr(target, "__setstate__"):
            target.__setstate__(state)
        elif is_record and isinstance(state, dict):
            field_names = {field.name for field in dataclasses.fields(target)}
            vars(target).update({name: value for name, value in state.items() if name in field_names})
        elif not is_state_dropped:
            owner = target if isinstance(target, type | types.FunctionType) else type(target)
            raise pickle.UnpicklingError(
                f"it sets attributes of {owner.__module__}.{owner.__qualname__}, and no checkpoint needs to do that"
            )

    dispatch[pickle.BUILD[0]] = load_build
    del dispatch[pickle.BYTEARRAY8[0]]  # fills as much memory as its first bytes ask for, and no checkpoint has one


class _TensorsOnlyModule:
    """TensorsOnly as a module, which is how torch.load takes another unpickler."""

    Unpickler = TensorsOnly

    @staticmethod
    def load(file: BinaryIO, **options: Any) -> Any:
        return TensorsOnly(file, **options).load()
