"""The manifest of a portable checkpoint: everything but the arrays, and how each array lies in the files. No torch.

`decode` guarantees that the chunks of every tensor cover it once, and lie in files that the manifest names.
docs/checkpoint-format.md describes the JSON, and the rule for versions.
"""

import dataclasses
import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import xxhash

from llmfoundry_lite.checkpoint.grid import ITEM_BYTES, Chunk, Extra, Grid
from llmfoundry_lite.config.changes import Change
from llmfoundry_lite.errors import CheckpointError, DamagedCheckpointError, NewerFormatError, is_secret_name
from llmfoundry_lite.ranks.codec import Item, encode_value, fits, parse_json, shorten, write_json

FORMAT = "llmfoundry_lite checkpoint"
VERSION = 2
"""The major version of the format that this release writes."""
MANIFEST = "manifest.json"
HIDDEN = "***"
"""Text in the place of a secret."""
DCP_STATE = "torch.distributed.checkpoint"
"""Key of `scalars` in checkpoints that DCP has saved: the `values` that are no tensors, and the `paths` in the nested
state dict, by name."""
NO_STATE: dict[str, Any] = {"values": {}, "paths": {}}
HEAD_BYTES = 4096
"""First bytes of a manifest, which a listing reads."""
MAX_BYTES = 64 << 20
"""Limit of a manifest: a hundred times that of MPT-70B on 4,096 ranks. Parsing so many bytes takes at most 1.6 GB."""

ALGORITHM = "xxh3_128"
HASH_BYTES = 16
HASH_CHARACTERS = 2 * HASH_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Timestamp:
    """How far the run had come: batches done, and the epoch it is in."""

    epoch: int = 0
    batch: int
    sample: int = 0
    token: int = 0
    extra: Extra = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Where one span of batches ran. The history of a run is a list of these, only ever added to."""

    first_batch: int
    last_batch: int
    """Inclusive; both count from 1."""
    vendor: str | None = None
    device: str | None = None
    num_devices: int | None = None
    driver: str | None = None
    runtime: str | None = None
    """CUDA's or ROCm's release."""
    torch: str | None = None
    world_size: int | None = None
    sharding: str | None = None
    shard_degree: int | None = None
    """HYBRID_SHARD: devices that share one copy of the model."""
    tensor_parallel_degree: int | None = None
    """Devices that divide each layer among them; None: one has the whole layer."""
    context: str | None = None
    """How many devices divide each sample's tokens among them, and how; None: each has whole samples."""
    pipeline: str | None = None
    """How many stages divide the blocks among them, and their schedule; None: all blocks are on each device."""
    device_train_microbatch_size: int | None = None
    precision: str | None = None
    attention: str | None = None
    reduction: str | None = None
    """When devices sum gradients: `each microbatch`, `each batch` or, for exact sums at any time, `each batch,
    exactly`."""
    compile_config: dict[str, Any] | None = None
    """None: not compiled."""
    num_threads: int | None = None
    """Threads of each rank, on a CPU."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that the hardware overlay sets, such as NCCL's, as the processes had them."""
    tokens_per_second: float | None = None
    save_interval_seconds: float | None = None
    """The last interval of a run that saves by time, chosen or asked for."""
    changes: dict[str, list[Any]] = field(default_factory=dict)
    """Key of the configuration -> [before this segment, in it], for keys whose changes are allowed and logged."""
    islands: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Each island that trained it: its device, their number, torch's release and its rows."""
    sync: str | None = None
    """`local steps, every 100`: islands trained alone between exchanges of weights. None: as one world trains."""
    extra: Extra = field(default_factory=dict)

    @property
    def span(self) -> str:
        return f"{self.first_batch}-{self.last_batch}"

    @property
    def sharding_in_words(self) -> str | None:
        words = f"{self.sharding} of {self.shard_degree}" if self.shard_degree else self.sharding
        words = f"{words}, tensor parallel over {self.tensor_parallel_degree}" if self.tensor_parallel_degree else words
        words = f"{words}, context parallel over {self.context}" if self.context else words
        return f"{words}, pipeline of {self.pipeline}" if self.pipeline else words

    @property
    def computed_with(self) -> list[str]:
        """Return changes, releases, kernels and environment in words."""
        brand = {"nvidia": "CUDA ", "amd": "ROCm "}.get(self.vendor or "", "")
        words = {
            "torch ": self.torch,
            brand: self.runtime,
            "driver ": self.driver,
            "attention ": self.attention,
            "gradients summed after ": self.reduction,
            "compiled ": None if self.compile_config is None else str(self.compile_config or ""),
            "microbatch ": self.device_train_microbatch_size,
        }
        known = [f"{name}{value}".strip() for name, value in words.items() if value is not None]
        changed = [str(Change(key, *values)) for key, values in self.changes.items()]
        changed = [self.sync, *changed] if self.sync else changed
        return changed + known + [f"{name}={value}" for name, value in self.environment.items()]


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """A tensor's dtype, shape and chunks."""

    dtype: str
    """A key of ITEM_BYTES."""
    shape: tuple[int, ...]
    grid: Grid
    """Shared by tensors that are cut alike."""
    extra: Extra = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def num_chunks(self) -> int:
        return self.grid.num_chunks(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A shard: its size, and the hash from which all its bytes can be verified."""

    name: str
    """Path from the manifest."""
    num_bytes: int
    algorithm: str = ALGORITHM
    block_bytes: int
    header_bytes: int
    """Bytes before its first tensor."""
    digest: str
    """Hash of its header and its table of hashes, one after the other."""

    @property
    def num_blocks(self) -> int:
        """Number of hashed blocks: those before the table."""
        return -(-self.num_bytes // (self.block_bytes + HASH_BYTES))

    @property
    def hashed_bytes(self) -> int:
        """Number of bytes before the table of hashes."""
        return self.num_bytes - HASH_BYTES * self.num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPart:
    """A part of the run's log."""

    name: str
    """Path from the folder that the checkpoint is in."""
    num_bytes: int
    algorithm: str = ALGORITHM
    block_bytes: int
    block_hashes: str
    """HASH_CHARACTERS for each block; the last block may be short."""
    extra: Extra = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint without its arrays."""

    save_id: str
    parent_save_id: str | None = None
    """The save this run was at when it made this one: the previous save, or the one it was restored from."""
    lease_epoch: int = 0
    run_name: str | None = None
    timestamp: Timestamp
    written_at: str | None = None
    """Wall clock, for people; nothing is ever ordered by it."""
    state_digest: str | None = None
    """Digest of all tensors, however they are divided: see `state_digest.py`. None: saved by an earlier release."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Tokenizer -> its fingerprint, which must not change under a run unasked."""
    config: Any = None
    """The resolved configuration."""
    segments: tuple[Segment, ...] = ()
    scalars: dict[str, Any] = field(default_factory=dict)
    """Run state without arrays and optimizer: clocks, place in the data, loss scaler, seed, callbacks."""
    optimizer: dict[str, Any] | None = None
    """The optimizer's class, parameter groups by parameter name, and the slots that are single numbers."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Second names of tied tensors -> the name they are stored under."""
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    files: tuple[FileRecord, ...] = ()
    """Shards; all have the same block size."""
    log: tuple[LogPart, ...] = ()
    """The run's log so far, in parts that later checkpoints share."""
    files_extra: Extra = field(default_factory=dict)
    extra: Extra = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in self.files)

    def overlapping(self, tensor: str, offset: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, Chunk]]:
        """Yield the chunks of a tensor that reach into a box, each with the index of its file in `files`."""
        record = self.tensors[tensor]
        for file, box in record.grid.overlapping(record.shape, offset, lengths):
            yield file, Chunk(tensor, record.dtype, *box)

    @property
    def dcp_state(self) -> dict[str, Any] | None:
        """The `values` that are no tensors, and all `paths`, if DCP has saved this checkpoint; else None."""
        return self.scalars.get(DCP_STATE)

    @property
    def head(self) -> "Head":
        stamp = self.timestamp
        return Head(self.save_id, self.lease_epoch, stamp.batch, stamp.token, self.written_at, self.num_bytes)


class Head(NamedTuple):
    """Facts that a listing needs of a manifest."""

    save_id: str
    lease_epoch: int
    batch: int
    num_tokens: int
    written_at: str | None
    num_bytes: int


def read_head(raw: bytes) -> Head | None:
    """Read a head from a manifest's first HEAD_BYTES. Returns None if the whole manifest must be decoded: other JSON
    formatting, a newer format or a changed byte. Epoch and batch are in it twice, to notice a changed byte."""
    lines = {}
    try:
        for line in raw[:HEAD_BYTES].split(b"\n")[1:-1]:
            lines.update(json.loads(b"{" + line.removesuffix(b",") + b"}"))
            if "num_bytes" in lines:
                break
        stamp = lines["timestamp"]
        beyond = lines["written_at"], lines["num_bytes"]
        head = Head(lines["save_id"], lines["lease_epoch"], stamp["batch"], stamp["token"], *beyond)
        is_known = lines["format"] == FORMAT and lines["version"] == VERSION
        kinds = {"lease_epoch": int, "batch": int, "num_tokens": int, "written_at": str | None, "num_bytes": int}
        agrees = all(fits(getattr(head, name), kind) for name, kind in kinds.items())
        agrees = agrees and re.fullmatch(rf"e{head.lease_epoch}-ba{head.batch}-[0-9a-f]+", head.save_id) is not None
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None
    return head if is_known and agrees else None


# ---------------------------------------------------------------------------------------------------- types -> JSON

HEAD_FIELDS = ("save_id", "parent_save_id", "lease_epoch", "run_name", "written_at")
PLAIN_FIELDS = (*HEAD_FIELDS, "fingerprints", "config", "scalars", "optimizer", "aliases")
"""Fields of a manifest that stand in JSON under their names, as typed values."""
KNOWN = (
    *("format", "version", *PLAIN_FIELDS, "timestamp", "num_bytes", "state_digest", "segments"),
    *("files", "log", "layouts", "tensors"),
)


def encode(manifest: Manifest) -> bytes:
    """Write a manifest as JSON. Raises CheckpointError if it could not be read back."""
    check(manifest, manifest.save_id)
    places: dict[int, int] = {}
    layouts: dict[bytes, int] = {}
    for grid in [record.grid for record in manifest.tensors.values()]:
        if id(grid) not in places:
            strides = {} if grid.strides is None else {"strides": grid.strides}
            plain_grid = {"chunks": grid.chunks, "files": grid.files, **strides} | grid.extra
            places[id(grid)] = layouts.setdefault(write_json(plain_grid), len(layouts))
    plain = {name: encode_value(getattr(manifest, name), name) for name in PLAIN_FIELDS}
    content = {
        "format": FORMAT,
        "version": VERSION,
        **{name: plain.pop(name) for name in HEAD_FIELDS},
        "timestamp": encode_record(manifest.timestamp),
        "num_bytes": manifest.num_bytes,
        **({} if manifest.state_digest is None else {"state_digest": manifest.state_digest}),
        "segments": [encode_record(segment) for segment in manifest.segments],
        **plain,
        "files": {
            "algorithm": ALGORITHM,
            "block_bytes": manifest.files[0].block_bytes if manifest.files else 0,
            "names": [file.name for file in manifest.files],
            "num_bytes": [file.num_bytes for file in manifest.files],
            "header_bytes": [file.header_bytes for file in manifest.files],
            "digests": "".join(file.digest for file in manifest.files),
            **manifest.files_extra,
        },
        "log": [encode_record(part) for part in manifest.log],
        "layouts": [json.loads(layout) for layout in layouts],
        "tensors": {
            name: {"dtype": t.dtype, "shape": t.shape, "layout": places[id(t.grid)], **t.extra}
            for name, t in manifest.tensors.items()
        },
        **manifest.extra,
    }
    # A line for each key, for `read_head` and for those who look at it with `head` and `diff`.
    inside = b"{" + b",".join(b"\n" + write_json(key) + b":" + write_json(value) for key, value in content.items())
    inside += b"\n}"
    raw = _envelope(inside) + inside + b"}\n"
    if len(raw) > MAX_BYTES:
        raise CheckpointError(
            f"{manifest.save_id}: its manifest would have {len(raw):,} bytes, more than the {MAX_BYTES:,} that can be "
            "read back; save from fewer ranks (a smaller shard degree under HYBRID_SHARD); older checkpoints stand"
        )
    return raw


def encode_record(record: Timestamp | Segment | LogPart) -> dict[str, Any]:
    fields = {name: getattr(record, name) for name in _names(type(record))}
    return encode_value(fields, type(record).__name__) | record.extra


def _names(kind: Any) -> list[str]:
    return [f.name for f in dataclasses.fields(kind) if f.name != "extra"]


def _envelope(inside: bytes) -> bytes:
    return b'{"checksum":"%s:%s","manifest":' % (ALGORITHM.encode(), xxhash.xxh3_128_hexdigest(inside).encode())


# ---------------------------------------------------------------------------------------------------- JSON -> types


def decode(raw: bytes, where: str) -> Manifest:
    """Read a manifest; `where` names it in errors. Raises DamagedCheckpointError and NewerFormatError."""
    if len(raw) > MAX_BYTES:
        _refuse_newer(raw, where)
        raise DamagedCheckpointError(f"{where}: {len(raw):,} bytes, more than the {MAX_BYTES:,} a manifest may have")
    start = len(_envelope(b""))
    inside = raw[start:-2]
    if not raw.startswith(b'{"checksum":"') or not raw.endswith(b"}}\n") or raw[:start] != _envelope(inside):
        raise DamagedCheckpointError(f"{where}: the checksum does not match: it was cut off or changed after writing")
    _refuse_newer(raw, where)
    item = Item(parse_json(inside, where), where)
    for key, expected in (("format", FORMAT), ("version", VERSION)):
        item.get(key).expect(item.get(key).value == expected, str(expected))
    files, files_extra = _decode_files(item.get("files"))
    manifest = Manifest(
        **item.fields(Manifest, PLAIN_FIELDS),
        state_digest=item.get("state_digest").string() if "state_digest" in item.object() else None,
        timestamp=_decode_record(Timestamp, item.get("timestamp"), _names(Timestamp)),
        segments=tuple(decode_segment(segment) for segment in item.get("segments").items()),
        tensors=_decode_tensors(item),
        files=files,
        log=tuple(_decode_record(LogPart, part, _names(LogPart)) for part in item.get("log").items()),
        files_extra=files_extra,
        extra=item.besides(*KNOWN),
    )
    if item.get("num_bytes").integer() != manifest.num_bytes:
        raise DamagedCheckpointError(f"{where}: num_bytes is not the sum of its files'")
    check(manifest, where)
    return manifest


def decode_segment(item: Item) -> Segment:
    segment = _decode_record(Segment, item)
    item.expect(all(len(pair) == 2 for pair in segment.changes.values()), "changes as [before, now]")
    # Earlier releases recorded the values of all variables. A secret goes into no report, and into no later save.
    shown = {name: _hide_secret(name, value) for name, value in segment.environment.items()}
    return dataclasses.replace(segment, environment=shown)


def _hide_secret(name: str, value: str) -> str:
    return value if not is_secret_name(name) or value.startswith("${oc.") else HIDDEN


def _refuse_newer(raw: bytes, where: str) -> None:
    """Read the version from the first bytes, which every version has alike. Raises NewerFormatError."""
    start = rb'\{"checksum":"[^"]*","manifest":\{\s*"format":\s*"[^"]*",\s*"version":\s*(\d{1,9})\b'
    match = re.match(start, raw[:1000])
    if match and (version := int(match[1])) > VERSION:
        raise NewerFormatError(
            f"{where}: written by a newer release (format {version}; this one reads up to {VERSION}): install a newer "
            "release"
        )


def _decode_record(kind: Any, item: Item, needed: Sequence[str] = ()) -> Any:
    """Read a record. All fields in `needed` must be there, or by default those without a default value."""
    return kind(**item.fields(kind, needed), extra=item.besides(*(needed or _names(kind))))


def _decode_files(listed: Item) -> tuple[tuple[FileRecord, ...], Extra]:
    names = [name.string() for name in listed.get("names").items()]
    sizes, headers = listed.get("num_bytes").integers(), listed.get("header_bytes").integers()
    digests = re.findall(f"[0-9a-f]{{{HASH_CHARACTERS}}}", listed.get("digests").string())
    is_whole = "".join(digests) == listed.get("digests").value and len(names) == len(sizes) == len(headers)
    listed.expect(is_whole and len(names) == len(digests), "as many names as sizes, headers and hexadecimal digests")
    shared = {"algorithm": listed.get("algorithm").string(), "block_bytes": listed.get("block_bytes").integer()}
    files = tuple(
        FileRecord(name=name, num_bytes=size, header_bytes=header, digest=digest, **shared)
        for name, size, header, digest in zip(names, sizes, headers, digests, strict=True)
    )
    return files, listed.besides("names", "num_bytes", "header_bytes", "algorithm", "block_bytes", "digests")


def _decode_tensors(item: Item) -> dict[str, TensorRecord]:
    layouts = [_decode_layout(layout) for layout in item.get("layouts").items()]
    tensors = {}
    for name, tensor in item.get("tensors").entries():
        number = tensor.get("layout").integer()
        tensor.expect(number < len(layouts), f"one of the {len(layouts)} layouts")
        dtype, shape = tensor.get("dtype").string(), tensor.get("shape").integers()
        tensors[name] = TensorRecord(dtype, shape, layouts[number], tensor.besides("dtype", "shape", "layout"))
    return tensors


def _decode_layout(item: Item) -> Grid:
    chunks = [c.integers() if isinstance(c.value, list) else c.integer() for c in item.get("chunks").items()]
    strides = None
    if "strides" in item.object():
        strides = tuple(
            stride.expect(type(stride.value) is int and abs(stride.value) < 2**31, "a whole number")
            for stride in item.get("strides").items()
        )
    return Grid(tuple(chunks), item.get("files").integers(), strides, item.besides("chunks", "files", "strides"))


# ------------------------------------------------------------------------------------------------ what must hold


def check(manifest: Manifest, where: str) -> None:
    """Raise DamagedCheckpointError unless every tensor is covered once, by files that are listed once."""
    if problem := next(_problems(manifest), None):
        raise DamagedCheckpointError(f"{where}: {problem}")


def _problems(manifest: Manifest) -> Iterator[str]:
    for files in (manifest.files, manifest.log):
        names = [file.name for file in files]
        if len(set(names)) != len(names):
            yield "a file is listed twice"
        for file in files:
            yield from (f"file {shorten(file.name)}: {problem}" for problem in _problems_of_file(file))
    state = manifest.dcp_state or NO_STATE
    if not isinstance(state, dict) or not all(isinstance(state.get(key), dict) for key in ("values", "paths")):
        yield f"scalars: {DCP_STATE}: expected values and paths"
    sound: set[Any] = set()
    for name, tensor in manifest.tensors.items():
        if tensor.dtype not in ITEM_BYTES:
            yield f"tensor {name}: unknown dtype {tensor.dtype!r}"
        if any(n < 0 for n in tensor.shape) or len(tensor.shape) > 32:
            yield f"tensor {name}: shape {tensor.shape}"
        if (kind := (id(tensor.grid), tensor.shape)) not in sound:
            if problem := tensor.grid.problem(tensor.shape, len(manifest.files)):
                yield f"tensor {name}: {problem}"
            sound.add(kind)
    needed, there = (sum(one.num_bytes for one in these) for these in (manifest.tensors.values(), manifest.files))
    if needed > there:
        yield f"tensors of {needed:,} bytes in files of {there:,}"
    for alias, name in manifest.aliases.items():
        if name not in manifest.tensors or alias in manifest.tensors:
            yield f"alias {alias} of {name}, which is not there or is stored as well"


def _problems_of_file(file: FileRecord | LogPart) -> Iterator[str]:
    if any(part in ("", ".", "..") for part in file.name.split("/")) or any(c in file.name for c in "\\:\0"):
        yield "the name leads out of the checkpoint's folder"
    if file.algorithm != ALGORITHM:
        yield f"hash algorithm {file.algorithm!r}, expected {ALGORITHM!r}"
    if not 4096 <= file.block_bytes <= 1 << 30:
        yield f"{file.num_bytes} bytes in blocks of {file.block_bytes}"
    elif isinstance(file, LogPart):
        if len(file.block_hashes) != -(-file.num_bytes // file.block_bytes) * HASH_CHARACTERS:
            yield f"block hashes for another size than {file.num_bytes} bytes"
    elif not file.name.endswith(".safetensors"):
        yield "expected a .safetensors file"
    elif not 10 <= file.header_bytes <= file.hashed_bytes:
        yield f"a header of {file.header_bytes} bytes in {file.num_bytes:,}"
