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
"""A listing reads this many bytes from the beginning of each manifest."""
MAX_BYTES = 64 << 20
"""The largest manifest: a hundred times that of MPT-70B on 4,096 ranks. Parsing it takes at most 1.6 GB of memory."""
MAX_DIMENSIONS = 32
"""The most dimensions that a tensor may have."""
MIN_BLOCK_BYTES = 4096
MAX_BLOCK_BYTES = 1 << 30
MIN_HEADER_BYTES = 10
"""The shortest safetensors header: its length in 8 bytes, and `{}`."""

ALGORITHM = "xxh3_128"
HASH_BYTES = 16
HASH_CHARACTERS = 2 * HASH_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Timestamp:
    """How far a run had come: the epoch that it is in, and the batches, samples and tokens that it has trained."""

    epoch: int = 0
    batch: int
    sample: int = 0
    token: int = 0
    extra: Extra = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Where one span of batches ran, and how they were computed. A run's history is a list of segments that only ever
    grows."""

    first_batch: int
    last_batch: int
    """Inclusive. Both count from 1."""
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
    """Devices that divide each layer among them. None: one device has the whole layer."""
    context: str | None = None
    """How many devices divide each sample's tokens among them, and how. None: each device has whole samples."""
    pipeline: str | None = None
    """How many stages divide the blocks among them, and their schedule. None: all blocks are on each device."""
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
    """The last interval of a run that saves by time. `save_interval: auto` chose it, or the user set it."""
    changes: dict[str, list[Any]] = field(default_factory=dict)
    """Key of the configuration -> [before this segment, in it], for keys whose changes are allowed and logged."""
    islands: dict[str, dict[str, Any]] = field(default_factory=dict)
    """The islands that trained these batches, each with its device, number of devices, torch release and rows."""
    sync: str | None = None
    """`local steps, every 100`: islands trained alone between exchanges of weights. None: as one world trains."""
    extra: Extra = field(default_factory=dict)

    @property
    def span(self) -> str:
        """First and last batch, such as `1-200`."""
        return f"{self.first_batch}-{self.last_batch}"

    @property
    def sharding_in_words(self) -> str | None:
        """How devices divided the model, such as `HYBRID_SHARD of 8, tensor parallel over 2`."""
        words = self.sharding
        if self.shard_degree:
            words = f"{words} of {self.shard_degree}"
        if self.tensor_parallel_degree:
            words = f"{words}, tensor parallel over {self.tensor_parallel_degree}"
        if self.context:
            words = f"{words}, context parallel over {self.context}"
        if self.pipeline:
            words = f"{words}, pipeline of {self.pipeline}"
        return words

    @property
    def computed_with(self) -> list[str]:
        """Facts that the numbers may depend on, in words: changed keys, releases, kernels and environment variables."""
        runtime_name = {"nvidia": "CUDA ", "amd": "ROCm "}.get(self.vendor or "", "")
        compiled_with = None
        if self.compile_config is not None:
            compiled_with = str(self.compile_config or "")
        values = {
            "torch ": self.torch,
            runtime_name: self.runtime,
            "driver ": self.driver,
            "attention ": self.attention,
            "gradients summed after ": self.reduction,
            "compiled ": compiled_with,
            "microbatch ": self.device_train_microbatch_size,
        }

        words = [] if not self.sync else [self.sync]
        words += [str(Change(key, *before_and_after)) for key, before_and_after in self.changes.items()]
        words += [f"{name}{value}".strip() for name, value in values.items() if value is not None]
        words += [f"{name}={value}" for name, value in self.environment.items()]
        return words


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
        """The tensor's size in all its files together."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    @property
    def num_chunks(self) -> int:
        """The number of its chunks. A tensor without elements has none."""
        return self.grid.num_chunks(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileRecord:
    """A shard file: its size, and the digest from which all its bytes can be verified."""

    name: str
    """Path relative to the manifest."""
    num_bytes: int
    algorithm: str = ALGORITHM
    block_bytes: int
    header_bytes: int
    """Bytes before the file's first tensor."""
    digest: str
    """Digest of the file's header and of the hashes at its end, one after the other, in hexadecimal."""

    @property
    def num_blocks(self) -> int:
        """The number of hashed blocks. Each has `block_bytes`, though the last may be short, and a hash."""
        return -(-self.num_bytes // (self.block_bytes + HASH_BYTES))

    @property
    def hashed_bytes(self) -> int:
        """The number of bytes before the hashes."""
        return self.num_bytes - HASH_BYTES * self.num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPart:
    """A file that holds a part of the run's log."""

    name: str
    """Path relative to the folder that the checkpoint is in."""
    num_bytes: int
    algorithm: str = ALGORITHM
    block_bytes: int
    block_hashes: str
    """HASH_CHARACTERS for each block. The last block may be short."""
    extra: Extra = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """A checkpoint without its arrays."""

    save_id: str
    parent_save_id: str | None = None
    """The save before this one, or the one that the run was restored from."""
    lease_epoch: int = 0
    run_name: str | None = None
    timestamp: Timestamp
    written_at: str | None = None
    """Wall clock, for people. Nothing is ever ordered by it."""
    state_digest: str | None = None
    """Digest of all tensors, however they are divided: see `state_digest.py`. None: saved by an earlier release."""
    fingerprints: dict[str, str] = field(default_factory=dict)
    """Such as the tokenizer's, which must not change in a run unless the user says so."""
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
    """The shard files. All have the same block size."""
    log: tuple[LogPart, ...] = ()
    """The run's log so far, in parts that later checkpoints share."""
    files_extra: Extra = field(default_factory=dict)
    extra: Extra = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Bytes of all shard files together."""
        return sum(file.num_bytes for file in self.files)

    def overlapping(self, tensor: str, offset: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, Chunk]]:
        """Yield the chunks of a tensor that overlap the box at `offset` with `lengths`, each with the index of its file
        in `files`."""
        record = self.tensors[tensor]
        for file, box in record.grid.overlapping(record.shape, offset, lengths):
            yield file, Chunk(tensor, record.dtype, *box)

    @property
    def dcp_state(self) -> dict[str, Any] | None:
        """The `values` that are no tensors, and all `paths`, if torch.distributed.checkpoint has saved this checkpoint;
        else None."""
        return self.scalars.get(DCP_STATE)

    @property
    def head(self) -> "Head":
        """The facts that a listing shows."""
        return Head(
            save_id=self.save_id,
            lease_epoch=self.lease_epoch,
            batch=self.timestamp.batch,
            num_tokens=self.timestamp.token,
            written_at=self.written_at,
            num_bytes=self.num_bytes,
        )


class Head(NamedTuple):
    """Facts of a manifest that a listing shows. They stand in its first HEAD_BYTES."""

    save_id: str
    lease_epoch: int
    batch: int
    num_tokens: int
    written_at: str | None
    num_bytes: int


def read_head(raw: bytes) -> Head | None:
    """Read a manifest's head from its first HEAD_BYTES, without a checksum. Each key of the JSON begins a line.

    Returns None if the whole manifest must be decoded to know more: if its JSON is formatted in another way, if a newer
    release has written it, or if a byte has changed. A changed byte is noticed because epoch and batch are there twice:
    a `save_id` is `e<lease_epoch>-ba<batch>-<hex digits>`.
    """
    fields = {}
    try:
        for line in raw[:HEAD_BYTES].split(b"\n")[1:-1]:
            fields.update(json.loads(b"{" + line.removesuffix(b",") + b"}"))
            if "num_bytes" in fields:
                break
        head = Head(
            save_id=fields["save_id"],
            lease_epoch=fields["lease_epoch"],
            batch=fields["timestamp"]["batch"],
            num_tokens=fields["timestamp"]["token"],
            written_at=fields["written_at"],
            num_bytes=fields["num_bytes"],
        )
        is_known_format = fields["format"] == FORMAT and fields["version"] == VERSION
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        return None

    if not is_known_format:
        return None
    if not all(fits(getattr(head, name), kind) for name, kind in Head.__annotations__.items()):
        return None
    expected_save_id = rf"e{head.lease_epoch}-ba{head.batch}-[0-9a-f]+"
    return head if re.fullmatch(expected_save_id, head.save_id) else None


# ---------------------------------------------------------------------------------------------------- types -> JSON

HEAD_FIELDS = ("save_id", "parent_save_id", "lease_epoch", "run_name", "written_at")
"""Fields that come first in the JSON, for `read_head`."""
PLAIN_FIELDS = (*HEAD_FIELDS, "fingerprints", "config", "scalars", "optimizer", "aliases")
"""Fields of a manifest that stand in the JSON under their own names, as typed values."""
KNOWN_FIELDS = (
    *("format", "version", *PLAIN_FIELDS, "timestamp", "num_bytes", "state_digest", "segments"),
    *("files", "log", "layouts", "tensors"),
)


def encode(manifest: Manifest) -> bytes:
    """Write a manifest as JSON, with a line for each key.

    The lines are for `read_head`, and for people who look at it with `head` and `diff`. Raises CheckpointError if the
    result could not be read back.
    """
    check_manifest(manifest, manifest.save_id)
    values = {name: encode_value(getattr(manifest, name), name) for name in PLAIN_FIELDS}
    layouts, layout_of_grid = _encode_layouts(manifest)

    content: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    content |= {name: values.pop(name) for name in HEAD_FIELDS}
    content["timestamp"] = encode_record(manifest.timestamp)
    content["num_bytes"] = manifest.num_bytes
    if manifest.state_digest is not None:
        content["state_digest"] = manifest.state_digest
    content["segments"] = [encode_record(segment) for segment in manifest.segments]
    content |= values
    content["files"] = _encode_files(manifest)
    content["log"] = [encode_record(part) for part in manifest.log]
    content["layouts"] = layouts
    content["tensors"] = {
        name: {"dtype": tensor.dtype, "shape": tensor.shape, "layout": layout_of_grid[id(tensor.grid)], **tensor.extra}
        for name, tensor in manifest.tensors.items()
    }
    content |= manifest.extra

    lines = [b"\n" + write_json(key) + b":" + write_json(value) for key, value in content.items()]
    inner_object = b"{" + b",".join(lines) + b"\n}"
    raw = _envelope_start(inner_object) + inner_object + b"}\n"
    if len(raw) > MAX_BYTES:
        raise CheckpointError(
            f"{manifest.save_id}: its manifest would have {len(raw):,} bytes, more than the {MAX_BYTES:,} that can be "
            "read back; save from fewer ranks (a smaller shard degree under HYBRID_SHARD); older checkpoints stand"
        )
    return raw


def _encode_layouts(manifest: Manifest) -> tuple[list[Any], dict[int, int]]:
    """Return the distinct layouts of a manifest's tensors as JSON, and for the id of each tensor's grid the number of
    its layout. Grids of equal content share a layout."""
    number_of_layout: dict[bytes, int] = {}
    number_of_grid: dict[int, int] = {}
    for tensor in manifest.tensors.values():
        grid = tensor.grid
        if id(grid) in number_of_grid:
            continue
        layout = {"chunks": grid.chunks, "files": grid.files}
        if grid.strides is not None:
            layout["strides"] = grid.strides
        encoded = write_json(layout | grid.extra)
        number_of_grid[id(grid)] = number_of_layout.setdefault(encoded, len(number_of_layout))
    return [json.loads(encoded) for encoded in number_of_layout], number_of_grid


def _encode_files(manifest: Manifest) -> dict[str, Any]:
    """Return a manifest's shard files as JSON: a list for each field, which keeps the manifest of many ranks short."""
    return {
        "algorithm": ALGORITHM,
        "block_bytes": manifest.files[0].block_bytes if manifest.files else 0,
        "names": [file.name for file in manifest.files],
        "num_bytes": [file.num_bytes for file in manifest.files],
        "header_bytes": [file.header_bytes for file in manifest.files],
        "digests": "".join(file.digest for file in manifest.files),
        **manifest.files_extra,
    }


def encode_record(record: Timestamp | Segment | LogPart) -> dict[str, Any]:
    """Return a record as typed JSON values, by field, with the fields that a later release has added."""
    fields = {name: getattr(record, name) for name in _field_names(type(record))}
    return encode_value(fields, type(record).__name__) | record.extra


def _field_names(record_type: Any) -> list[str]:
    """Return the names of a dataclass's fields that the format defines."""
    return [one.name for one in dataclasses.fields(record_type) if one.name != "extra"]


def _envelope_start(inner_object: bytes) -> bytes:
    """Return the bytes of a manifest before its inner object: the key and value of the checksum, and the next key."""
    checksum = xxhash.xxh3_128_hexdigest(inner_object)
    return f'{{"checksum":"{ALGORITHM}:{checksum}","manifest":'.encode()


# ---------------------------------------------------------------------------------------------------- JSON -> types


def decode(raw: bytes, source: str) -> Manifest:
    """Read a manifest. `source` names it in errors.

    Raises DamagedCheckpointError if it is not as it was written, or if what it says cannot be; NewerFormatError if a
    newer release has written it.
    """
    if len(raw) > MAX_BYTES:
        _refuse_newer(raw, source)
        raise DamagedCheckpointError(f"{source}: {len(raw):,} bytes, more than the {MAX_BYTES:,} a manifest may have")

    start = len(_envelope_start(b""))
    inner_object = raw[start:-2]
    has_envelope = raw.startswith(b'{"checksum":"') and raw.endswith(b"}}\n")
    if not has_envelope or raw[:start] != _envelope_start(inner_object):
        raise DamagedCheckpointError(f"{source}: the checksum does not match: it was cut off or changed after writing")
    _refuse_newer(raw, source)

    item = Item(parse_json(inner_object, source), source)
    for key, expected in (("format", FORMAT), ("version", VERSION)):
        item.get(key).expect(item.get(key).value == expected, str(expected))
    state_digest = None
    if "state_digest" in item.object():
        state_digest = item.get("state_digest").string()
    files, files_extra = _decode_files(item.get("files"))
    manifest = Manifest(
        **item.fields(Manifest, PLAIN_FIELDS),
        state_digest=state_digest,
        timestamp=_decode_record(Timestamp, item.get("timestamp"), _field_names(Timestamp)),
        segments=tuple(decode_segment(segment) for segment in item.get("segments").items()),
        tensors=_decode_tensors(item),
        files=files,
        log=tuple(_decode_record(LogPart, part, _field_names(LogPart)) for part in item.get("log").items()),
        files_extra=files_extra,
        extra=item.besides(*KNOWN_FIELDS),
    )
    if item.get("num_bytes").integer() != manifest.num_bytes:
        raise DamagedCheckpointError(f"{source}: num_bytes is not the sum of its files'")
    check_manifest(manifest, source)
    return manifest


def decode_segment(item: Item) -> Segment:
    """Return a segment from its JSON, with secrets hidden. Raises DamagedCheckpointError.

    Earlier releases recorded the values of all environment variables. A secret must reach no report and no later save.
    """
    segment = _decode_record(Segment, item)
    item.expect(all(len(pair) == 2 for pair in segment.changes.values()), "changes as [before, now]")
    environment = {name: _hide_secret(name, value) for name, value in segment.environment.items()}
    return dataclasses.replace(segment, environment=environment)


def _hide_secret(name: str, value: str) -> str:
    """Return the value of an environment variable, or HIDDEN if its name is that of a secret. A reference such as
    `${oc.env:KEY}` is shown, because it does not contain the secret itself."""
    is_shown = not is_secret_name(name) or value.startswith("${oc.")
    return value if is_shown else HIDDEN


def _refuse_newer(raw: bytes, source: str) -> None:
    """Raise NewerFormatError if a newer release has written this manifest. `source` names it in errors.

    Only the first bytes are read, because every version of the format begins with the same fields.
    """
    start = rb'\{"checksum":"[^"]*","manifest":\{\s*"format":\s*"[^"]*",\s*"version":\s*(\d{1,9})\b'
    match = re.match(start, raw[:1000])
    version = int(match[1]) if match else 0
    if version > VERSION:
        raise NewerFormatError(
            f"{source}: written by a newer release (format {version}; this one reads up to {VERSION}): install a newer "
            "release"
        )


def _decode_record(record_type: Any, item: Item, required: Sequence[str] = ()) -> Any:
    """Return a record from its JSON; fields that this release does not know become its `extra`.

    All fields in `required` must be there, or by default those without a default value. Raises DamagedCheckpointError.
    """
    fields = item.fields(record_type, required)
    return record_type(**fields, extra=item.besides(*(required or _field_names(record_type))))


def _decode_files(files: Item) -> tuple[tuple[FileRecord, ...], Extra]:
    """Return the shard files from their JSON, and fields that this release does not know. Raises
    DamagedCheckpointError unless all lists have the same length."""
    names = [name.string() for name in files.get("names").items()]
    sizes = files.get("num_bytes").integers()
    header_sizes = files.get("header_bytes").integers()
    all_digests = files.get("digests").string()
    digests = re.findall(f"[0-9a-f]{{{HASH_CHARACTERS}}}", all_digests)
    has_equal_lengths = len(names) == len(sizes) == len(header_sizes) == len(digests)
    files.expect(
        "".join(digests) == all_digests and has_equal_lengths,
        "as many names as sizes, headers and hexadecimal digests",
    )

    algorithm = files.get("algorithm").string()
    block_bytes = files.get("block_bytes").integer()
    records = tuple(
        FileRecord(
            name=name,
            num_bytes=size,
            algorithm=algorithm,
            block_bytes=block_bytes,
            header_bytes=header_size,
            digest=digest,
        )
        for name, size, header_size, digest in zip(names, sizes, header_sizes, digests, strict=True)
    )
    return records, files.besides("names", "num_bytes", "header_bytes", "algorithm", "block_bytes", "digests")


def _decode_tensors(item: Item) -> dict[str, TensorRecord]:
    """Return the tensors of a manifest's JSON by name. Raises DamagedCheckpointError."""
    layouts = [_decode_layout(layout) for layout in item.get("layouts").items()]
    tensors = {}
    for name, tensor in item.get("tensors").entries():
        layout_number = tensor.get("layout").integer()
        tensor.expect(layout_number < len(layouts), f"one of the {len(layouts)} layouts")
        dtype = tensor.get("dtype").string()
        shape = tensor.get("shape").integers()
        extra = tensor.besides("dtype", "shape", "layout")
        tensors[name] = TensorRecord(dtype, shape, layouts[layout_number], extra)
    return tensors


def _decode_layout(item: Item) -> Grid:
    """Return a grid from its JSON, such as `{"chunks": [13], "files": [0], "strides": [1]}`. Raises
    DamagedCheckpointError."""
    chunks = []
    for chunk in item.get("chunks").items():
        chunks.append(chunk.integers() if isinstance(chunk.value, list) else chunk.integer())
    strides = None
    if "strides" in item.object():
        strides = tuple(
            stride.expect(type(stride.value) is int and abs(stride.value) < 2**31, "a whole number")
            for stride in item.get("strides").items()
        )
    return Grid(tuple(chunks), item.get("files").integers(), strides, item.besides("chunks", "files", "strides"))


# ------------------------------------------------------------------------------------------------ what must hold


def check_manifest(manifest: Manifest, source: str) -> None:
    """Raise DamagedCheckpointError unless the manifest agrees with itself; `source` names it in errors.

    The chunks of every tensor must cover it once and lie in files that are listed once.
    """
    problem = next(_find_problems(manifest), None)
    if problem is not None:
        raise DamagedCheckpointError(f"{source}: {problem}")


def _find_problems(manifest: Manifest) -> Iterator[str]:
    """Yield what cannot be right in a manifest. Each check relies on those before it, so only the first one counts."""
    for files in (manifest.files, manifest.log):
        names = [file.name for file in files]
        if len(set(names)) != len(names):
            yield "a file is listed twice"
        for file in files:
            for problem in _find_problems_of_file(file):
                yield f"file {shorten(file.name)}: {problem}"

    dcp_state = manifest.dcp_state or NO_STATE
    if not isinstance(dcp_state, dict) or not all(isinstance(dcp_state.get(key), dict) for key in NO_STATE):
        yield f"scalars: {DCP_STATE}: expected values and paths"

    yield from _find_problems_of_tensors(manifest)

    tensor_bytes = sum(tensor.num_bytes for tensor in manifest.tensors.values())
    if tensor_bytes > manifest.num_bytes:
        yield f"tensors of {tensor_bytes:,} bytes in files of {manifest.num_bytes:,}"
    for alias, name in manifest.aliases.items():
        if name not in manifest.tensors or alias in manifest.tensors:
            yield f"alias {alias} of {name}, which is not there or is stored as well"


def _find_problems_of_tensors(manifest: Manifest) -> Iterator[str]:
    """Yield what cannot be right in the dtypes, shapes and grids of a manifest's tensors."""
    checked: set[Any] = set()  # many tensors share a grid and a shape
    for name, tensor in manifest.tensors.items():
        if tensor.dtype not in ITEM_BYTES:
            yield f"tensor {name}: unknown dtype {tensor.dtype!r}"
        if any(length < 0 for length in tensor.shape) or len(tensor.shape) > MAX_DIMENSIONS:
            yield f"tensor {name}: shape {tensor.shape}"
        grid_and_shape = (id(tensor.grid), tensor.shape)
        if grid_and_shape not in checked:
            checked.add(grid_and_shape)
            problem = tensor.grid.problem(tensor.shape, len(manifest.files))
            if problem:
                yield f"tensor {name}: {problem}"


def _find_problems_of_file(file: FileRecord | LogPart) -> Iterator[str]:
    """Yield what cannot be right in the record of a file. A name must not lead out of the checkpoint's folder."""
    has_odd_part = any(part in ("", ".", "..") for part in file.name.split("/"))
    if has_odd_part or any(character in file.name for character in "\\:\0"):
        yield "the name leads out of the checkpoint's folder"
    if file.algorithm != ALGORITHM:
        yield f"hash algorithm {file.algorithm!r}, expected {ALGORITHM!r}"
    if not MIN_BLOCK_BYTES <= file.block_bytes <= MAX_BLOCK_BYTES:
        yield f"{file.num_bytes} bytes in blocks of {file.block_bytes}"
    elif isinstance(file, LogPart):
        num_blocks = -(-file.num_bytes // file.block_bytes)
        if len(file.block_hashes) != num_blocks * HASH_CHARACTERS:
            yield f"block hashes for another size than {file.num_bytes} bytes"
    elif not file.name.endswith(".safetensors"):
        yield "expected a .safetensors file"
    elif not MIN_HEADER_BYTES <= file.header_bytes <= file.hashed_bytes:
        yield f"a header of {file.header_bytes} bytes in {file.num_bytes:,}"
