"""The manifest of a portable checkpoint: everything but the arrays, and where each slice of each array lies.

Owns the types, their JSON, and every check that needs nothing but the manifest itself: whoever holds a `Manifest`
from `decode` may rely on full, disjoint coverage of every tensor by byte ranges inside the files it names. Bounded
work on hostile input: size and number of values are capped before anything is built from them. No torch.

    raw = encode(manifest)          what manifest.json holds; refuses what `decode` would refuse
    manifest = decode(raw, where)   DamagedCheckpointError names the item; CheckpointError for a newer format

manifest.json is `{"checksum":"xxh3_128:<hex>","manifest":{…}}`, the checksum being that of the inner object's bytes.
"""

import dataclasses
import math
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import xxhash

from llmfoundry_lite.checkpoint.codec import decode_value, encode_value, parse_json, shorten, write_json
from llmfoundry_lite.errors import CheckpointError, DamagedCheckpointError

FORMAT = "llmfoundry_lite checkpoint"
VERSION = 1
MANIFEST = "manifest.json"
MAX_BYTES = 256 << 20
ALGORITHM = "xxh3_128"
HASH_CHARACTERS = 32

ITEM_BYTES = {
    **dict.fromkeys(("F64", "I64", "U64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 1),
}
"""dtypes in safetensors' spelling."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timestamp:
    """How far the run had come: batches done, and the epoch it is in."""

    epoch: int = 0
    batch: int
    sample: int = 0
    token: int = 0


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
    device_train_microbatch_size: int | None = None
    precision: str | None = None
    attention: str | None = None
    reduction: str | None = None
    """`each microbatch` or `each batch`: when gradients are summed over devices."""
    compile_config: dict[str, Any] | None = None
    """None: not compiled."""
    environment: dict[str, str] = field(default_factory=dict)
    """What the hardware overlay sets, such as NCCL's variables, as the processes had it."""
    tokens_per_second: float | None = None
    changes: dict[str, list[Any]] = field(default_factory=dict)
    """Key of the configuration -> [before this segment, in it], of those that change by being said."""

    @property
    def span(self) -> str:
        return f"{self.first_batch}-{self.last_batch}"

    @property
    def sharding_in_words(self) -> str | None:
        words = f"{self.sharding} of {self.shard_degree}" if self.shard_degree else self.sharding
        return f"{words}, tensor parallel over {self.tensor_parallel_degree}" if self.tensor_parallel_degree else words

    @property
    def computed_with(self) -> list[str]:
        """In words: releases, kernels, environment."""
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
        changed = [f"{key} {before} -> {now}" for key, (before, now) in self.changes.items()]
        return changed + known + [f"{name}={value}" for name, value in self.environment.items()]


@dataclass(frozen=True, slots=True)
class Slice:
    """A box of a tensor, and the bytes of a file that hold it, row-major."""

    file: int
    """Index into `Manifest.files`."""
    begin: int
    end: int
    offset: tuple[int, ...]
    shape: tuple[int, ...]

    def key(self, tensor: str) -> str:
        """Its name inside the safetensors file."""
        return f"{tensor}@{','.join(map(str, self.offset))}"


@dataclass(frozen=True, slots=True)
class TensorRecord:
    dtype: str
    """A key of ITEM_BYTES."""
    shape: tuple[int, ...]
    slices: tuple[Slice, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class FileRecord:
    name: str
    """Relative to the manifest."""
    num_bytes: int
    algorithm: str
    block_bytes: int
    block_hashes: str
    """One after the other, HASH_CHARACTERS each; the last block may be short."""

    @property
    def num_blocks(self) -> int:
        return -(-self.num_bytes // self.block_bytes)

    def block_hash(self, block: int) -> str:
        return self.block_hashes[block * HASH_CHARACTERS : (block + 1) * HASH_CHARACTERS]


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    save_id: str
    parent_save_id: str | None = None
    """The save this run was at when it made this one: the previous save, or the one it was restored from."""
    lease_epoch: int = 0
    run_name: str | None = None
    timestamp: Timestamp
    written_at: str | None = None
    """Wall clock, for people; nothing is ever ordered by it."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Of model configuration, tokenizer, data set: what must not change under a run unasked."""
    config: Any = None
    """The resolved configuration."""
    segments: tuple[Segment, ...] = ()
    scalars: dict[str, Any] = field(default_factory=dict)
    """Everything to restore that is neither array nor optimizer: scheduler, data state, loss scaler, callbacks."""
    optimizer: dict[str, Any] | None = None
    """Its class, parameter groups by parameter name, and the slots that are single numbers."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Second names of tied tensors -> the name they are stored under."""
    tensors: dict[str, TensorRecord] = field(default_factory=dict)
    files: tuple[FileRecord, ...] = ()
    attachments: tuple[FileRecord, ...] = ()
    """Files without tensors that belong to this state, such as the run's log so far; hashed like the others."""

    @property
    def num_bytes(self) -> int:
        return sum(file.num_bytes for file in (*self.files, *self.attachments))

    @property
    def order(self) -> tuple[int, int]:
        """Newest is highest: by lease, then by batch. See `store` for why."""
        return self.lease_epoch, self.timestamp.batch


def encode(manifest: Manifest) -> bytes:
    check(manifest, manifest.save_id)
    content = {
        "format": FORMAT,
        "version": VERSION,
        "save_id": manifest.save_id,
        "parent_save_id": manifest.parent_save_id,
        "lease_epoch": manifest.lease_epoch,
        "run_name": manifest.run_name,
        "timestamp": dataclasses.asdict(manifest.timestamp),
        "written_at": manifest.written_at,
        "fingerprints": manifest.fingerprints,
        "segments": [encode_value(dataclasses.asdict(segment), "segments") for segment in manifest.segments],
        "config": encode_value(manifest.config, "config"),
        "scalars": encode_value(manifest.scalars, "scalars"),
        "optimizer": encode_value(manifest.optimizer, "optimizer"),
        "aliases": manifest.aliases,
        "files": [dataclasses.asdict(file) for file in manifest.files],
        "attachments": [dataclasses.asdict(file) for file in manifest.attachments],
        "tensors": {
            name: {
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "slices": [[s.file, s.begin, s.end, s.offset, s.shape] for s in tensor.slices],
            }
            for name, tensor in manifest.tensors.items()
        },
    }
    # A line for each key, for those who look at it with `head` and `diff`.
    inside = b"{" + b",".join(b"\n" + write_json(key) + b":" + write_json(value) for key, value in content.items())
    inside += b"\n}"
    raw = _envelope(inside) + inside + b"}\n"
    if len(raw) > MAX_BYTES:
        raise CheckpointError(
            f"{manifest.save_id}: its manifest would take {len(raw):,} bytes, more than {MAX_BYTES:,}"
        )
    return raw


def decode(raw: bytes, where: str) -> Manifest:
    """`where` names the manifest in errors."""
    if len(raw) > MAX_BYTES:
        raise DamagedCheckpointError(f"{where}: {len(raw):,} bytes, more than the {MAX_BYTES:,} a manifest may have")
    start = len(_envelope(b""))
    inside = raw[start:-2]
    if not raw.startswith(b'{"checksum":"') or not raw.endswith(b"}}\n") or raw[:start] != _envelope(inside):
        raise DamagedCheckpointError(f"{where}: the checksum does not match: it was cut off or changed after writing")
    content = parse_json(inside, where)
    item = _Item(content, where)
    if item.get("format").value != FORMAT:
        raise DamagedCheckpointError(f"{where}: format {shorten(item.get('format').value)}, expected {FORMAT!r}")
    if (version := item.get("version").integer()) != VERSION:
        raise CheckpointError(f"{where}: format version {version}, this release reads {VERSION}; install a newer one")
    item.keys("format", "version", *(f.name for f in dataclasses.fields(Manifest)))
    manifest = Manifest(
        save_id=item.get("save_id").string(),
        parent_save_id=item.get("parent_save_id").optional_string(),
        lease_epoch=item.get("lease_epoch").integer(),
        run_name=item.get("run_name").optional_string(),
        timestamp=_decode_timestamp(item.get("timestamp")),
        written_at=item.get("written_at").optional_string(),
        fingerprints=item.get("fingerprints").strings(),
        config=decode_value(item.get("config").value, f"{where}: config"),
        segments=tuple(_decode_segment(segment) for segment in item.get("segments").items()),
        scalars=_decode_dict(item.get("scalars")),
        optimizer=None if item.get("optimizer").value is None else _decode_dict(item.get("optimizer")),
        aliases=item.get("aliases").strings(),
        tensors={name: _decode_tensor(tensor) for name, tensor in item.get("tensors").entries()},
        files=tuple(_decode_file(file) for file in item.get("files").items()),
        attachments=tuple(_decode_file(file) for file in item.get("attachments").items()),
    )
    check(manifest, where)
    return manifest


# ------------------------------------------------------------------------------------------------ what must hold


def check(manifest: Manifest, where: str) -> None:
    """Raises DamagedCheckpointError unless every tensor is covered once, by bytes that exist once."""
    names = [file.name for file in (*manifest.files, *manifest.attachments)]
    if len(set(names)) != len(names):
        raise DamagedCheckpointError(f"{where}: a file is listed twice")
    for file in (*manifest.files, *manifest.attachments):
        _check_file(file, f"{where}: file {shorten(file.name)}")
    for file in manifest.files:
        if not file.name.endswith(".safetensors") or file.num_bytes < 8:
            raise DamagedCheckpointError(f"{where}: file {shorten(file.name)}: expected a .safetensors file")
    ranges: list[list[tuple[int, int, str]]] = [[] for _ in manifest.files]
    for name, tensor in manifest.tensors.items():
        _check_tensor(name, tensor, manifest, f"{where}: tensor {name}")
        for part in tensor.slices:
            ranges[part.file].append((part.begin, part.end, name))
    for file, used in zip(manifest.files, ranges, strict=True):
        used.sort()
        for (_, end, name), (begin, _, other) in pairwise(used):
            if begin < end:
                raise DamagedCheckpointError(f"{where}: {name} and {other} share bytes of {file.name}")
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
    if len(file.block_hashes) != file.num_blocks * HASH_CHARACTERS:
        raise DamagedCheckpointError(f"{where}: block hashes for another size than {file.num_bytes} bytes")


def _check_tensor(name: str, tensor: TensorRecord, manifest: Manifest, where: str) -> None:
    if tensor.dtype not in ITEM_BYTES:
        raise DamagedCheckpointError(f"{where}: unknown dtype {tensor.dtype!r}")
    if any(n < 0 for n in tensor.shape) or len(tensor.shape) > 32:
        raise DamagedCheckpointError(f"{where}: shape {tensor.shape}")
    for part in tensor.slices:
        if not 0 <= part.file < len(manifest.files):
            raise DamagedCheckpointError(f"{where}: slice in file number {part.file}, which is not there")
        if len(part.offset) != len(tensor.shape) or len(part.shape) != len(tensor.shape):
            raise DamagedCheckpointError(f"{where}: slice at {part.offset} of shape {part.shape} in {tensor.shape}")
        for offset, length, whole in zip(part.offset, part.shape, tensor.shape, strict=True):
            if offset < 0 or length <= 0 or offset + length > whole:
                raise DamagedCheckpointError(
                    f"{where}: slice at {part.offset} of shape {part.shape} reaches out of {tensor.shape}"
                )
        file = manifest.files[part.file]
        if not 8 <= part.begin <= part.end <= file.num_bytes:
            raise DamagedCheckpointError(f"{where}: bytes {part.begin} to {part.end} are not inside {file.name}")
        if part.end - part.begin != math.prod(part.shape) * ITEM_BYTES[tensor.dtype]:
            raise DamagedCheckpointError(f"{where}: {part.end - part.begin} bytes for a slice of shape {part.shape}")
    _check_disjoint(tensor, where)
    volume, whole = sum(math.prod(part.shape) for part in tensor.slices), math.prod(tensor.shape)
    if volume != whole:
        raise DamagedCheckpointError(f"{where}: {volume:,} of its {whole:,} values are there; a slice is missing")


def _check_disjoint(tensor: TensorRecord, where: str) -> None:
    """Sweep along the most divided dimension; slices cut one way are compared with their neighbour alone."""
    if len(tensor.slices) < 2:
        return
    if not tensor.shape:
        raise DamagedCheckpointError(f"{where}: slices overlap")
    cuts = [len({part.offset[d] for part in tensor.slices}) for d in range(len(tensor.shape))]
    dim = cuts.index(max(cuts))
    active: list[Slice] = []
    comparisons = 0
    for part in sorted(tensor.slices, key=lambda part: part.offset[dim]):
        active = [other for other in active if other.offset[dim] + other.shape[dim] > part.offset[dim]]
        comparisons += len(active)
        if any(_overlap(part, other) for other in active):
            raise DamagedCheckpointError(f"{where}: slices overlap at {part.offset}")
        if comparisons > 20_000_000:
            raise DamagedCheckpointError(f"{where}: {len(tensor.slices)} slices, cut in a way no run produces")
        active.append(part)


def _overlap(a: Slice, b: Slice) -> bool:
    return all(x < y + m and y < x + n for x, n, y, m in zip(a.offset, a.shape, b.offset, b.shape, strict=True))


# ---------------------------------------------------------------------------------------------------- JSON -> types


def _envelope(inside: bytes) -> bytes:
    return b'{"checksum":"%s:%s","manifest":' % (ALGORITHM.encode(), xxhash.xxh3_128_hexdigest(inside).encode())


class _Item:
    """A JSON value and its place in the manifest, for errors that name it."""

    def __init__(self, value: Any, where: str):
        self.value = value
        self.where = where

    def get(self, key: str) -> "_Item":
        if not isinstance(self.value, dict) or key not in self.value:
            raise DamagedCheckpointError(f"{self.where}: no {key!r}")
        return _Item(self.value[key], f"{self.where}: {key}")

    def keys(self, *expected: str) -> None:
        for key in self.object():
            if key not in expected:
                raise DamagedCheckpointError(f"{self.where}: {shorten(key)} is not part of the format")

    def object(self) -> dict[str, Any]:
        return self.expect(isinstance(self.value, dict), "an object")

    def entries(self) -> list[tuple[str, "_Item"]]:
        return [(key, _Item(value, f"{self.where} {shorten(key)}")) for key, value in self.object().items()]

    def items(self) -> list["_Item"]:
        self.expect(isinstance(self.value, list), "a list")
        return [_Item(value, f"{self.where}[{i}]") for i, value in enumerate(self.value)]

    def strings(self) -> dict[str, str]:
        return {key: item.string() for key, item in self.entries()}

    def string(self) -> str:
        return self.expect(isinstance(self.value, str), "a string")

    def optional_string(self) -> str | None:
        return self.expect(self.value is None or isinstance(self.value, str), "a string or null")

    def integer(self) -> int:
        return self.expect(type(self.value) is int and 0 <= self.value < 2**63, "a whole number")

    def integers(self) -> tuple[int, ...]:
        ok = isinstance(self.value, list) and all(type(n) is int and 0 <= n < 2**63 for n in self.value)
        return tuple(self.expect(ok, "a list of whole numbers"))

    def expect(self, ok: bool, what: str) -> Any:
        if not ok:
            raise DamagedCheckpointError(f"{self.where}: {shorten(self.value)} given, expected {what}")
        return self.value


def _decode_timestamp(item: _Item) -> Timestamp:
    names = [f.name for f in dataclasses.fields(Timestamp)]
    item.keys(*names)
    return Timestamp(**{name: item.get(name).integer() for name in names})


def _decode_segment(item: _Item) -> Segment:
    fields = {f.name: f for f in dataclasses.fields(Segment)}
    item.keys(*fields)
    content = decode_value(item.object(), item.where)
    for name, value in content.items():
        kinds = {"compile_config": (dict, type(None)), "tokens_per_second": (int, float, type(None))}
        numbers = (
            *("num_devices", "world_size", "shard_degree", "tensor_parallel_degree"),
            "device_train_microbatch_size",
        )
        kind = kinds.get(name, (int, type(None)) if name in numbers else (str, type(None)))
        kind = (int,) if name in ("first_batch", "last_batch") else kind
        if name == "environment":
            item.get(name).strings()
        elif name == "changes":
            pairs = value.values() if isinstance(value, dict) else [None]
            item.expect(all(isinstance(pair, list) and len(pair) == 2 for pair in pairs), "changes as [before, now]")
        elif not isinstance(value, kind) or isinstance(value, bool):
            raise DamagedCheckpointError(f"{item.where}: {name} {shorten(value)}")
    if "first_batch" not in content or "last_batch" not in content:
        raise DamagedCheckpointError(f"{item.where}: no span of batches")
    return Segment(**content)


def _decode_dict(item: _Item) -> dict[str, Any]:
    return _Item(decode_value(item.object(), item.where), item.where).object()


def _decode_tensor(item: _Item) -> TensorRecord:
    item.keys("dtype", "shape", "slices")
    return TensorRecord(
        item.get("dtype").string(),
        item.get("shape").integers(),
        tuple(_decode_slice(part) for part in item.get("slices").items()),
    )


def _decode_slice(item: _Item) -> Slice:
    item.expect(isinstance(item.value, list) and len(item.value) == 5, "[file, begin, end, offset, shape]")
    file, begin, end, offset, shape = (_Item(value, item.where) for value in item.value)
    return Slice(file.integer(), begin.integer(), end.integer(), offset.integers(), shape.integers())


def _decode_file(item: _Item) -> FileRecord:
    names = [f.name for f in dataclasses.fields(FileRecord)]
    item.keys(*names)
    return FileRecord(
        name=item.get("name").string(),
        num_bytes=item.get("num_bytes").integer(),
        algorithm=item.get("algorithm").string(),
        block_bytes=item.get("block_bytes").integer(),
        block_hashes=item.get("block_hashes").string(),
    )
