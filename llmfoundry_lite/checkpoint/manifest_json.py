"""The manifest of a portable checkpoint as JSON.

Owns the format, and every check that needs nothing but the manifest itself: whoever holds a `Manifest` from `decode`
may rely on full, disjoint coverage of every tensor by slices in the files it names. Bounded work on hostile input:
size and number of values are capped before anything is built from them. No torch.

    raw = encode(manifest)          what manifest.json holds; refuses what `decode` would refuse
    manifest = decode(raw, where)   DamagedCheckpointError names the item; NewerFormatError for a newer format

manifest.json is `{"checksum":"xxh3_128:<hex>","manifest":{…}}`, the checksum being that of the inner object's bytes.
docs/checkpoint-format.md has all of it for those who write a reader.

Format 2 describes a tensor by its layout (see `layouts`), which many tensors share, and leaves to each file its header
and the hashes of its blocks, for which it vouches with one digest. Format 1 listed every slice and every hash: 56 MB
for MPT-70B on 512 ranks, where format 2 needs 0.5 on 4,096. Format 1 is read and no longer written.

Versions. The inner object begins with `"format"` and `"version"`, a whole number: the major version. A release that
adds what readers may ignore keeps the number. It adds a field, at the top level, in a segment, the timestamp, a file
list, a layout or a tensor; readers that do not know it keep it in `extra` and write it again. A release that changes
what a field means, or adds what a reader must understand, raises the number. A reader that meets a higher number
raises NewerFormatError: such a checkpoint is sound, so it is not renamed, replaced or passed over. Every past version
stays readable; `tests/checkpoint/fixtures` holds files of each. (The number is whole, and the envelope the same for
ever, because releases that read format 1 alone must find a number in `version` to say that a newer one is needed.)
"""

import contextlib
import dataclasses
import json
import math
import re
from itertools import pairwise
from typing import Any, NamedTuple

import xxhash

from llmfoundry_lite.checkpoint.layouts import Boxes, Extra, Grid, Layout, Slice
from llmfoundry_lite.checkpoint.manifest import (
    ALGORITHM,
    HASH_CHARACTERS,
    ITEM_BYTES,
    VERSION,
    FileRecord,
    Manifest,
    Segment,
    Stored,
    TensorRecord,
    Timestamp,
)
from llmfoundry_lite.config.recorded import in_words_of_today
from llmfoundry_lite.errors import CheckpointError, DamagedCheckpointError, NewerFormatError
from llmfoundry_lite.ranks.codec import Item, count_values, decode_value, encode_value, parse_json, shorten, write_json

FORMAT = "llmfoundry_lite checkpoint"
MANIFEST = "manifest.json"
MAX_BYTES = 256 << 20
MAX_VALUES = 80_000_000
"""Format 1 lists every slice, in three bytes or more for each value: whatever a past release has published is within
this and MAX_BYTES. More is an attack."""
LISTED_FILE = ("name", "num_bytes", "algorithm", "block_bytes", "block_hashes")
KNOWN = (
    *("format", "version", "save_id", "parent_save_id", "lease_epoch", "run_name", "timestamp", "written_at"),
    *("num_bytes", "fingerprints", "segments", "config", "scalars", "optimizer", "aliases"),
    *("files", "attachments", "log", "layouts", "tensors"),
)
"""Fields of the top level."""


class Head(NamedTuple):
    """What a listing needs of a manifest, read from its first HEAD_BYTES."""

    save_id: str
    lease_epoch: int
    batch: int
    num_tokens: int
    written_at: str | None
    num_bytes: int | None
    """None: format 1 does not say it there."""


HEAD_BYTES = 4096


def read_head(raw: bytes) -> Head | None:
    """Without decoding the rest. None when it must be decoded to know: another way to write JSON, a newer format, a
    changed byte (epoch and batch stand there twice, so that one is noticed)."""
    lines = {}
    for line in raw[:HEAD_BYTES].split(b"\n")[1:-1]:
        try:
            lines.update(json.loads(b"{" + line.removesuffix(b",") + b"}"))
        except (ValueError, RecursionError):
            return None
        if "num_bytes" in lines:
            break
    try:
        stamp = lines["timestamp"]
        beyond = lines.get("written_at"), lines.get("num_bytes")
        head = Head(lines["save_id"], lines["lease_epoch"], stamp["batch"], stamp["token"], *beyond)
        is_known = lines["format"] == FORMAT and 1 <= lines["version"] <= VERSION
        numbers = [head.lease_epoch, head.batch, head.num_tokens, *([] if head.num_bytes is None else [head.num_bytes])]
        agrees = all(type(number) is int and 0 <= number < 2**63 for number in numbers)
        agrees = agrees and re.fullmatch(rf"e{head.lease_epoch}-ba{head.batch}-[0-9a-f]+", head.save_id) is not None
        agrees &= isinstance(head.written_at, str | None)
    except (KeyError, TypeError, AttributeError):
        return None
    return head if is_known and agrees else None


def read_log_parts(raw: bytes) -> set[str] | None:
    """Names of the files that the `log` of a manifest lists, without decoding the rest; None: decode it to know."""
    line = next((line for line in raw.split(b"\n") if line.startswith(b'"log":')), None)
    with contextlib.suppress(ValueError, RecursionError, TypeError, KeyError, AttributeError):
        if line is not None:
            return {part["name"].rpartition("/")[2] for part in json.loads(line.removeprefix(b'"log":').rstrip(b","))}
    return None


def encode(manifest: Manifest) -> bytes:
    check(manifest, manifest.save_id)
    places: dict[int, int] = {}
    layouts: dict[bytes, int] = {}
    for record in manifest.tensors.values():
        if id(record.layout) not in places:
            places[id(record.layout)] = layouts.setdefault(write_json(_plain_layout(record.layout)), len(layouts))
    content = {
        "format": FORMAT,
        "version": VERSION,
        "save_id": manifest.save_id,
        "parent_save_id": manifest.parent_save_id,
        "lease_epoch": manifest.lease_epoch,
        "run_name": manifest.run_name,
        "timestamp": _plain(manifest.timestamp),
        "written_at": manifest.written_at,
        "num_bytes": manifest.num_bytes,
        "fingerprints": manifest.fingerprints,
        "segments": [encode_segment(segment) for segment in manifest.segments],
        "config": encode_value(manifest.config, "config"),
        "scalars": encode_value(manifest.scalars, "scalars"),
        "optimizer": encode_value(manifest.optimizer, "optimizer"),
        "aliases": manifest.aliases,
        "files": {
            "algorithm": ALGORITHM,
            "block_bytes": manifest.files[0].block_bytes if manifest.files else 0,
            "names": [file.name for file in manifest.files],
            "num_bytes": [file.num_bytes for file in manifest.files],
            "header_bytes": [file.header_bytes for file in manifest.files],
            "digests": "".join(file.digest for file in manifest.files),
            **manifest.files_extra,
        },
        "attachments": [_plain_file(file) for file in manifest.attachments],
        "log": [_plain_file(file) for file in manifest.log],
        "layouts": [json.loads(layout) for layout in layouts],
        "tensors": {
            name: {"dtype": t.dtype, "shape": t.shape, "layout": places[id(t.layout)], **t.extra}
            for name, t in manifest.tensors.items()
        },
        **manifest.extra,
    }
    # A line for each key, for those who look at it with `head` and `diff`.
    inside = b"{" + b",".join(b"\n" + write_json(key) + b":" + write_json(value) for key, value in content.items())
    inside += b"\n}"
    raw = _envelope(inside) + inside + b"}\n"
    if problem := _too_large(raw):
        raise CheckpointError(
            f"{manifest.save_id}: its manifest would have {problem} that can be read back; save from fewer ranks "
            "(a smaller shard degree under HYBRID_SHARD); older checkpoints stand"
        )
    return raw


def _too_large(raw: bytes) -> str | None:
    """What is too much about a manifest. `encode` and `decode` both ask, so that none is written and then refused."""
    if len(raw) > MAX_BYTES:
        return f"{len(raw):,} bytes, more than the {MAX_BYTES:,}"
    if (num_values := count_values(raw)) > MAX_VALUES:
        return f"{num_values:,} values, more than the {MAX_VALUES:,}"
    return None


def encode_segment(segment: Segment) -> dict[str, Any]:
    return _plain(segment)


def _plain(record: Any) -> dict[str, Any]:
    """A record's fields as JSON, those that this release does not know among them."""
    fields = {name: getattr(record, name) for name in _names(type(record))}
    return encode_value(fields, type(record).__name__) | record.extra


def _plain_file(file: FileRecord) -> dict[str, Any]:
    return {name: getattr(file, name) for name in LISTED_FILE} | file.extra


def _plain_layout(layout: Layout) -> dict[str, Any]:
    if isinstance(layout, Boxes):
        return {"boxes": layout.cells} | layout.extra
    strides = {} if layout.strides is None else {"strides": layout.strides}
    return {"chunks": layout.chunks, "files": layout.files, **strides} | layout.extra


def decode(raw: bytes, where: str) -> Manifest:
    """`where` names the manifest in errors."""
    if problem := _too_large(raw):
        _refuse_newer(_announced_version(raw), where)
        raise DamagedCheckpointError(f"{where}: {problem} a manifest may have")
    start = len(_envelope(b""))
    inside = raw[start:-2]
    if not raw.startswith(b'{"checksum":"') or not raw.endswith(b"}}\n") or raw[:start] != _envelope(inside):
        raise DamagedCheckpointError(f"{where}: the checksum does not match: it was cut off or changed after writing")
    _refuse_newer(_announced_version(raw), where)
    item = Item(parse_json(inside, where), where)
    if item.get("format").value != FORMAT:
        raise DamagedCheckpointError(f"{where}: format {shorten(item.get('format').value)}, expected {FORMAT!r}")
    version = item.get("version").integer()
    item.get("version").expect(version >= 1, "1 or more")
    _refuse_newer(version, where)
    files, files_extra, tensors = _decode_format_1(item) if version == 1 else _decode_format_2(item)
    config, scalars = decode_value(item.get("config").value, f"{where}: config"), _decode_dict(item.get("scalars"))
    manifest = Manifest(
        save_id=item.get("save_id").string(),
        parent_save_id=item.get("parent_save_id").optional_string(),
        lease_epoch=item.get("lease_epoch").integer(),
        run_name=item.get("run_name").optional_string(),
        timestamp=_decode_timestamp(item.get("timestamp")),
        written_at=item.get("written_at").optional_string(),
        fingerprints=item.get("fingerprints").strings(),
        config=in_words_of_today(config, is_imported="imported_from" in scalars),
        segments=tuple(decode_segment(segment) for segment in item.get("segments").items()),
        scalars=scalars,
        optimizer=None if item.get("optimizer").value is None else _decode_dict(item.get("optimizer")),
        aliases=item.get("aliases").strings(),
        tensors=tensors,
        files=files,
        attachments=tuple(_decode_file(file) for file in item.get("attachments").items()),
        log=tuple(_decode_file(file) for file in item.get("log").items()) if version > 1 else (),
        version=version,
        files_extra=files_extra,
        extra=item.besides(*KNOWN),
    )
    if version > 1 and item.get("num_bytes").integer() != manifest.num_bytes:
        raise DamagedCheckpointError(f"{where}: num_bytes is not the sum of its files'")
    check(manifest, where)
    return manifest


def _announced_version(raw: bytes) -> int:
    """The version in a manifest's first bytes, for one that cannot be parsed; 0 if there is none."""
    start = rb'\{"checksum":"[^"]*","manifest":\{\s*"format":\s*"[^"]*",\s*"version":\s*(\d{1,9})\b'
    match = re.match(start, raw[:1000])
    return int(match[1]) if match else 0


def _refuse_newer(version: int, where: str) -> None:
    if version > VERSION:
        raise NewerFormatError(
            f"{where}: written by a newer release (format {version}; this one reads up to {VERSION}): install a newer "
            "release"
        )


# ------------------------------------------------------------------------------------------------ what must hold


def check(manifest: Manifest, where: str) -> None:
    """Raises DamagedCheckpointError unless every tensor is covered once, by files that are listed once."""
    for files in ((*manifest.files, *manifest.attachments), manifest.log):
        names = [file.name for file in files]
        if len(set(names)) != len(names):
            raise DamagedCheckpointError(f"{where}: a file is listed twice")
    for file in (*manifest.files, *manifest.attachments, *manifest.log):
        _check_file(file, f"{where}: file {shorten(file.name)}")
    for file in manifest.files:
        if not file.name.endswith(".safetensors"):
            raise DamagedCheckpointError(f"{where}: file {shorten(file.name)}: expected a .safetensors file")
        if manifest.version > 1 and not (file.digest and 10 <= file.header_bytes <= file.hashed_bytes):
            raise DamagedCheckpointError(
                f"{where}: file {shorten(file.name)}: a header of {file.header_bytes} bytes in {file.num_bytes:,}"
            )
    sound: set[int] = set()
    for name, tensor in manifest.tensors.items():
        if tensor.dtype not in ITEM_BYTES:
            raise DamagedCheckpointError(f"{where}: tensor {name}: unknown dtype {tensor.dtype!r}")
        if any(n < 0 for n in tensor.shape) or len(tensor.shape) > 32:
            raise DamagedCheckpointError(f"{where}: tensor {name}: shape {tensor.shape}")
        problem = None if id(tensor.layout) in sound else tensor.layout.problem(len(manifest.files))
        problem = problem or tensor.layout.problem_with(tensor.shape, len(manifest.files))
        if problem:
            raise DamagedCheckpointError(f"{where}: tensor {name}: {problem}")
        sound.add(id(tensor.layout))
    needed, there = (sum(one.num_bytes for one in these) for these in (manifest.tensors.values(), manifest.files))
    if needed > there:
        raise DamagedCheckpointError(f"{where}: tensors of {needed:,} bytes in files of {there:,}")
    for alias, name in manifest.aliases.items():
        if name not in manifest.tensors or alias in manifest.tensors:
            raise DamagedCheckpointError(f"{where}: alias {alias} of {name}, which is not there or is stored as well")


def _check_file(file: FileRecord, where: str) -> None:
    parts = file.name.split("/")
    if any(part in ("", ".", "..") for part in parts) or any(c in file.name for c in "\\:\0"):
        raise DamagedCheckpointError(f"{where}: the name leads out of the checkpoint's folder")
    if file.algorithm != ALGORITHM:
        raise DamagedCheckpointError(f"{where}: hash algorithm {file.algorithm!r}, expected {ALGORITHM!r}")
    if not 4096 <= file.block_bytes <= 1 << 30:
        raise DamagedCheckpointError(f"{where}: {file.num_bytes} bytes in blocks of {file.block_bytes}")
    if not file.digest and len(file.block_hashes) != file.num_blocks * HASH_CHARACTERS:
        raise DamagedCheckpointError(f"{where}: block hashes for another size than {file.num_bytes} bytes")


# ---------------------------------------------------------------------------------------------------- JSON -> types


def _decode_format_2(item: Item) -> tuple[tuple[FileRecord, ...], Extra, dict[str, TensorRecord]]:
    listed = item.get("files")
    columns = ("names", "num_bytes", "header_bytes")
    names, sizes, headers = (listed.get(column).items() for column in columns)
    digests = listed.get("digests").string()
    listed.expect(
        len(names) == len(sizes) == len(headers) and len(digests) == len(names) * HASH_CHARACTERS,
        "as many names as sizes, headers and digests",
    )
    if not re.fullmatch(r"[0-9a-f]*", digests):
        raise DamagedCheckpointError(f"{listed.where}: digests are not hexadecimal")
    algorithm, block_bytes = listed.get("algorithm").string(), listed.get("block_bytes").integer()
    files = tuple(
        FileRecord(
            name=name.string(),
            num_bytes=size.integer(),
            algorithm=algorithm,
            block_bytes=block_bytes,
            header_bytes=header.integer(),
            digest=digests[i * HASH_CHARACTERS : (i + 1) * HASH_CHARACTERS],
        )
        for i, (name, size, header) in enumerate(zip(names, sizes, headers, strict=True))
    )
    layouts = [_decode_layout(layout) for layout in item.get("layouts").items()]
    tensors = {}
    for name, tensor in item.get("tensors").entries():
        folder = tensor.get("layout").integer()
        tensor.expect(folder < len(layouts), f"one of the {len(layouts)} layouts")
        tensors[name] = TensorRecord(
            tensor.get("dtype").string(),
            tensor.get("shape").integers(),
            layouts[folder],
            tensor.besides("dtype", "shape", "layout"),
        )
    return files, listed.besides("algorithm", "block_bytes", "digests", *columns), tensors


def _decode_layout(item: Item) -> Layout:
    if "boxes" in item.object():
        cells = []
        for box in item.get("boxes").items():
            box.expect(isinstance(box.value, list) and len(box.value) == 3, "[file, offset, shape]")
            file, offset, shape = box.items()
            cells.append(Slice(file.integer(), offset.integers(), shape.integers()))
        return Boxes(tuple(cells), item.besides("boxes"))
    chunks = [c.integers() if isinstance(c.value, list) else c.integer() for c in item.get("chunks").items()]
    strides = None
    if "strides" in item.object():
        strides = tuple(
            stride.expect(type(stride.value) is int and abs(stride.value) < 2**31, "a whole number")
            for stride in item.get("strides").items()
        )
    return Grid(tuple(chunks), item.get("files").integers(), strides, item.besides("chunks", "files", "strides"))


def _decode_format_1(item: Item) -> tuple[tuple[FileRecord, ...], Extra, dict[str, TensorRecord]]:
    """Every slice and every hash is listed. What format 2 leaves to the files' headers becomes `contents`."""
    contents: list[dict[str, Stored]] = []
    files = []
    for file in item.get("files").items():
        record = _decode_file(file)
        file.expect(record.num_bytes >= 8, "a .safetensors file")
        contents.append({})
        files.append(dataclasses.replace(record, contents=contents[-1]))
    tensors = {}
    for name, tensor in item.get("tensors").entries():
        dtype, cells = tensor.get("dtype").string(), []
        tensor.expect(dtype in ITEM_BYTES, f"a known dtype, not {shorten(dtype)}")
        for part in tensor.get("slices").items():
            part.expect(isinstance(part.value, list) and len(part.value) == 5, "[file, begin, end, offset, shape]")
            index, begin, end, offset, shape = part.items()
            cell = Slice(index.integer(), offset.integers(), shape.integers())
            stored = Stored(dtype, cell.shape, begin.integer(), end.integer())
            if not cell.file < len(files):
                raise DamagedCheckpointError(f"{tensor.where}: slice in file number {cell.file}, which is not there")
            _check_stored(stored, files[cell.file], tensor.where)
            if contents[cell.file].setdefault(cell.key(name), stored) is not stored:
                raise DamagedCheckpointError(f"{tensor.where}: slices overlap at {cell.offset}")
            cells.append(cell)
        tensors[name] = TensorRecord(
            dtype,
            tensor.get("shape").integers(),
            Boxes(tuple(cells)),
            tensor.besides("dtype", "shape", "slices"),
        )
    for file, inside in zip(files, contents, strict=True):
        used = sorted((stored.begin, stored.end, key) for key, stored in inside.items())
        for (_, end, key), (begin, _, other) in pairwise(used):
            if begin < end:
                raise DamagedCheckpointError(f"{item.where}: {key} and {other} share bytes of {file.name}")
    return tuple(files), {}, tensors


def _check_stored(stored: Stored, file: FileRecord, where: str) -> None:
    if not 8 <= stored.begin <= stored.end <= file.num_bytes:
        raise DamagedCheckpointError(f"{where}: bytes {stored.begin} to {stored.end} are not inside {file.name}")
    if stored.end - stored.begin != math.prod(stored.shape) * ITEM_BYTES[stored.dtype]:
        raise DamagedCheckpointError(f"{where}: {stored.end - stored.begin} bytes for a slice of shape {stored.shape}")


def _decode_file(item: Item) -> FileRecord:
    """Of a list in which each file has its hashes."""
    return FileRecord(
        name=item.get("name").string(),
        num_bytes=item.get("num_bytes").integer(),
        algorithm=item.get("algorithm").string(),
        block_bytes=item.get("block_bytes").integer(),
        block_hashes=item.get("block_hashes").string(),
        extra=item.besides(*LISTED_FILE),
    )


def _envelope(inside: bytes) -> bytes:
    return b'{"checksum":"%s:%s","manifest":' % (ALGORITHM.encode(), xxhash.xxh3_128_hexdigest(inside).encode())


def _names(kind: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(kind) if f.name != "extra"]


def _decode_timestamp(item: Item) -> Timestamp:
    names = _names(Timestamp)
    return Timestamp(**{name: item.get(name).integer() for name in names}, extra=item.besides(*names))


def decode_segment(item: Item) -> Segment:
    """What `encode_segment` gave. Raises DamagedCheckpointError."""
    names = _names(Segment)
    content = {key: value for key, value in item.object().items() if key in names}
    content = decode_value(content, item.where)
    for name, value in content.items():
        number = (int, float, type(None))
        kinds = {
            "compile_config": (dict, type(None)),
            "tokens_per_second": number,
            "save_interval_seconds": number,
        }
        numbers = (
            *("num_devices", "world_size", "shard_degree", "tensor_parallel_degree"),
            "device_train_microbatch_size",
        )
        kind = kinds.get(name, (int, type(None)) if name in numbers else (str, type(None)))
        kind = (int,) if name in ("first_batch", "last_batch") else kind
        if name == "environment":
            item.get(name).strings()
        elif name == "islands":
            item.expect(isinstance(value, dict) and all(isinstance(one, dict) for one in value.values()), "objects")
        elif name == "changes":
            pairs = value.values() if isinstance(value, dict) else [None]
            item.expect(all(isinstance(pair, list) and len(pair) == 2 for pair in pairs), "changes as [before, now]")
        elif not isinstance(value, kind) or isinstance(value, bool):
            raise DamagedCheckpointError(f"{item.where}: {name} {shorten(value)}")
    if "first_batch" not in content or "last_batch" not in content:
        raise DamagedCheckpointError(f"{item.where}: no span of batches")
    return Segment(**content, extra=item.besides(*names))


def _decode_dict(item: Item) -> dict[str, Any]:
    return Item(decode_value(item.object(), item.where), item.where).object()
