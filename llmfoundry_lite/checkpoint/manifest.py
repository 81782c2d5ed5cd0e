"""The manifest of a portable checkpoint: everything but the arrays, and how each array lies in the files. No torch.

The dataclasses at the top are the content. `encode` writes a `Manifest` as JSON in an envelope with a checksum, and
`decode` reads it back. `read_head` reads the few facts that a listing of checkpoints shows, from the file's first
bytes. `check_manifest` makes sure of what all other code relies on: the chunks of every tensor cover it once, and lie
in files that the manifest names. It runs before every write and after every read.

docs/checkpoint-format.md describes the JSON, and the rule for versions. This module does no I/O: `commit` and `store`
read and write the file.
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
"""Key of `scalars` in checkpoints that torch.distributed.checkpoint (DCP) has saved. It has the `values` that are not
tensors, and the `paths` of all values in the nested state dict, both by name."""
NO_STATE: dict[str, Any] = {"values": {}, "paths": {}}
"""Value of `DCP_STATE` for a checkpoint without such values."""
HEAD_BYTES = 4096
"""A listing reads this many bytes from the beginning of each manifest."""
MAX_BYTES = 64 << 20
"""The largest manifest that is read or written: a hundred times the size for MPT-70B on 4,096 ranks. Parsing it takes
at most 1.6 GB of memory."""
MAX_DIMENSIONS = 32
"""The most dimensions that a tensor may have."""
MIN_BLOCK_BYTES = 4096
"""The smallest block that a file may be hashed in, so that hashes take at most 0.4 % of a file."""
MAX_BLOCK_BYTES = 1 << 30
"""The largest block that a file may be hashed in. A reader holds a whole block in memory."""
MIN_HEADER_BYTES = 10
"""The shortest safetensors header: its length in 8 bytes, and `{}`."""

ALGORITHM = "xxh3_128"
"""The hash of blocks, headers and manifests: XXH3 with 128 bits."""
HASH_BYTES = 16
HASH_CHARACTERS = 2 * HASH_BYTES
"""Length of a hash in hexadecimal."""


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
    """Where one span of batches ran, and how they were computed.

    Each launch of a run adds a segment, so a run's history is a list that only ever grows. Fields that a launch does
    not know are None.
    """

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
        """Facts that a report shows because the numbers may depend on them, such as `torch 2.9.1` or `microbatch 4`.

        In this order: local steps, changed configuration keys, releases and kernels, environment variables. Facts that
        are not known are left out.
        """
        runtime_label = {"nvidia": "CUDA ", "amd": "ROCm "}.get(self.vendor or "", "")
        compile_options = None
        if self.compile_config is not None:
            compile_options = str(self.compile_config or "")  # without options, only the label is shown
        labelled_facts = {
            "torch ": self.torch,
            runtime_label: self.runtime,
            "driver ": self.driver,
            "attention ": self.attention,
            "gradients summed after ": self.reduction,
            "compiled ": compile_options,
            "microbatch ": self.device_train_microbatch_size,
        }

        facts = []
        if self.sync:
            facts.append(self.sync)
        for key, before_and_after in self.changes.items():
            facts.append(str(Change(key, *before_and_after)))
        for label, fact in labelled_facts.items():
            if fact is not None:
                facts.append(f"{label}{fact}".strip())
        for variable, text in self.environment.items():
            facts.append(f"{variable}={text}")
        return facts


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
    """A shard file: its size, and the digest from which all its bytes can be verified.

    The file ends with a hash of each of its blocks, and `digest` covers these hashes.
    """

    name: str
    """Path relative to the manifest."""
    num_bytes: int
    algorithm: str = ALGORITHM
    block_bytes: int
    header_bytes: int
    """Bytes before the file's first tensor."""
    digest: str
    """Hash of the file's header followed by the hashes at its end, in hexadecimal."""

    @property
    def num_blocks(self) -> int:
        """The number of hashed blocks, from the file's size: each block has `block_bytes` (the last may have fewer) and
        adds a hash at the end of the file."""
        return -(-self.num_bytes // (self.block_bytes + HASH_BYTES))

    @property
    def hashed_bytes(self) -> int:
        """The number of bytes before the hashes."""
        return self.num_bytes - HASH_BYTES * self.num_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPart:
    """A file that holds a part of the run's log. The log of a checkpoint is its parts, one after the other."""

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
    """A checkpoint without its arrays.

    Rank 0 makes it when all ranks have written their shard files, and a restore on any number of ranks starts from it.
    """

    save_id: str
    """Unique name of this save: `e<lease_epoch>-ba<batch>-<hex digits>`."""
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
        """Yield the chunks of a tensor that have elements in common with a box, each with the index of its file in
        `files`. `tensor` is the tensor's name; the box begins at `offset` and has `lengths`."""
        record = self.tensors[tensor]
        for file, box in record.grid.overlapping(record.shape, offset, lengths):
            yield file, Chunk(tensor, record.dtype, *box)

    @property
    def dcp_state(self) -> dict[str, Any] | None:
        """The `values` and `paths` described at DCP_STATE if torch.distributed.checkpoint has saved this checkpoint;
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
    """Facts of a manifest that a listing shows. They are in the first HEAD_BYTES of the file."""

    save_id: str
    lease_epoch: int
    batch: int
    num_tokens: int
    written_at: str | None
    num_bytes: int


def read_head(raw: bytes) -> Head | None:
    """Read the facts for a listing from the beginning of a manifest, so that a large manifest is not read whole.

    `raw` has at least the first HEAD_BYTES of the file, or all of it. Returns None if only the whole manifest can tell:
    if its JSON is formatted in another way, if another version of the format has written it, or if a byte has changed.

    The checksum covers the whole manifest and cannot be checked here. A changed byte is noticed because lease epoch and
    batch are there twice: the `save_id` is `e<lease_epoch>-ba<batch>-<hex digits>`.
    """
    fields = {}
    try:
        # The first line is the envelope, and the last one may be cut off. Each line between them is one key and value.
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
    has_right_types = all(fits(getattr(head, name), annotation) for name, annotation in Head.__annotations__.items())
    if not has_right_types:
        return None
    expected_save_id = rf"e{head.lease_epoch}-ba{head.batch}-[0-9a-f]+"
    if not re.fullmatch(expected_save_id, head.save_id):
        return None
    return head


# ---------------------------------------------------------------------------------------------------- types -> JSON

HEAD_FIELDS = ("save_id", "parent_save_id", "lease_epoch", "run_name", "written_at")
"""Fields that come first in the JSON, for `read_head`."""
PLAIN_FIELDS = (*HEAD_FIELDS, "fingerprints", "config", "scalars", "optimizer", "aliases")
"""Fields of a `Manifest` that the JSON has under the same names, as typed values (`ranks/codec.py`)."""
KNOWN_FIELDS = (
    *("format", "version", *PLAIN_FIELDS, "timestamp", "num_bytes", "state_digest", "segments"),
    *("files", "log", "layouts", "tensors"),
)
"""All keys of the JSON object. Others become the manifest's `extra`."""


def encode(manifest: Manifest) -> bytes:
    """Write a manifest as JSON, with a line for each key, in an envelope that has its checksum.

    Returns the bytes of manifest.json. The lines are for `read_head`, and for people who look at the file with `head`
    and `diff`. Raises CheckpointError if `decode` would refuse the result: if the manifest contradicts itself, if a
    value has a type that the format does not have, or if it is longer than MAX_BYTES.
    """
    check_manifest(manifest, manifest.save_id)
    plain_values = {name: encode_value(getattr(manifest, name), name) for name in PLAIN_FIELDS}
    layouts, layout_of_grid = _encode_layouts(manifest)

    # First what `read_head` reads. These keys have to fit into HEAD_BYTES, so that everything long comes later.
    content: dict[str, Any] = {"format": FORMAT, "version": VERSION}
    content |= {name: plain_values.pop(name) for name in HEAD_FIELDS}
    content["timestamp"] = encode_record(manifest.timestamp)
    content["num_bytes"] = manifest.num_bytes

    # Then the state of the run, the files, and where each tensor lies in them.
    if manifest.state_digest is not None:
        content["state_digest"] = manifest.state_digest
    content["segments"] = [encode_record(segment) for segment in manifest.segments]
    content |= plain_values
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
            "read back; save from fewer ranks (a smaller shard degree under HYBRID_SHARD); older checkpoints are "
            "not affected"
        )
    return raw


def _encode_layouts(manifest: Manifest) -> tuple[list[Any], dict[int, int]]:
    """Return the JSON list of the layouts that a manifest's tensors refer to, and which layout each grid has.

    A layout is a grid as JSON, such as `{"chunks": [13], "files": [0], "strides": [1]}`. Grids with the same content
    share one, so a model with a thousand tensors has a handful. The second result has, by the `id` of a grid, the
    index of its layout in the list.
    """
    layout_indices: dict[bytes, int] = {}  # JSON text of a layout -> its index
    layout_of_grid: dict[int, int] = {}
    for tensor in manifest.tensors.values():
        grid = tensor.grid
        if id(grid) in layout_of_grid:
            continue
        layout = {"chunks": grid.chunks, "files": grid.files}
        if grid.strides is not None:
            layout["strides"] = grid.strides
        layout_text = write_json(layout | grid.extra)
        layout_of_grid[id(grid)] = layout_indices.setdefault(layout_text, len(layout_indices))
    return [json.loads(layout_text) for layout_text in layout_indices], layout_of_grid


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
    """Return a record as a JSON object of typed values, with the fields in `extra` that a later release has added."""
    fields = {name: getattr(record, name) for name in _field_names(type(record))}
    return encode_value(fields, type(record).__name__) | record.extra


def _field_names(record_type: Any) -> list[str]:
    """Return the names of a dataclass's fields that the format defines: all except `extra`."""
    return [
        dataclass_field.name for dataclass_field in dataclasses.fields(record_type) if dataclass_field.name != "extra"
    ]


def _envelope_start(inner_object: bytes) -> bytes:
    """Return the bytes of a manifest before its inner object: `{"checksum":"xxh3_128:<hash>","manifest":`. They have
    the same length for every object."""
    checksum = xxhash.xxh3_128_hexdigest(inner_object)
    return f'{{"checksum":"{ALGORITHM}:{checksum}","manifest":'.encode()


# ---------------------------------------------------------------------------------------------------- JSON -> types


def decode(raw: bytes, source: str) -> Manifest:
    """Read a manifest from the bytes of manifest.json, and check everything that other code relies on.

    `source` names the manifest in errors, usually by its URL. Raises NewerFormatError if a newer release has written
    it, and DamagedCheckpointError if its bytes have changed or its content contradicts itself.
    """
    if len(raw) > MAX_BYTES:
        _refuse_newer(raw, source)  # a newer format may allow more
        raise DamagedCheckpointError(f"{source}: {len(raw):,} bytes, more than the {MAX_BYTES:,} a manifest may have")

    # The envelope is `{"checksum":"…","manifest":<inner object>}` and a line feed.
    start_bytes = len(_envelope_start(b""))
    inner_object = raw[start_bytes:-2]
    has_envelope = raw.startswith(b'{"checksum":"') and raw.endswith(b"}}\n")
    if not has_envelope or raw[:start_bytes] != _envelope_start(inner_object):
        raise DamagedCheckpointError(f"{source}: the checksum does not match: it was cut off or changed after writing")
    _refuse_newer(raw, source)

    # Decode each key. A value of another type raises DamagedCheckpointError with the key's path.
    content = Item(parse_json(inner_object, source), source)
    for key, expected in (("format", FORMAT), ("version", VERSION)):
        content.get(key).expect(content.get(key).value == expected, str(expected))
    state_digest = None
    if "state_digest" in content.object():
        state_digest = content.get("state_digest").string()
    files, files_extra = _decode_files(content.get("files"))
    log_parts = [_decode_record(LogPart, part, _field_names(LogPart)) for part in content.get("log").items()]
    manifest = Manifest(
        **content.fields(Manifest, PLAIN_FIELDS),
        state_digest=state_digest,
        timestamp=_decode_record(Timestamp, content.get("timestamp"), _field_names(Timestamp)),
        segments=tuple(decode_segment(segment) for segment in content.get("segments").items()),
        tensors=_decode_tensors(content),
        files=files,
        log=tuple(log_parts),
        files_extra=files_extra,
        extra=content.besides(*KNOWN_FIELDS),
    )

    # A correct checksum only means that the bytes are as they were written, so the content is checked as well.
    if content.get("num_bytes").integer() != manifest.num_bytes:
        raise DamagedCheckpointError(f"{source}: num_bytes is not the sum of its files'")
    check_manifest(manifest, source)
    return manifest


def decode_segment(item: Item) -> Segment:
    """Return a segment from its JSON object, with the values of secret environment variables replaced by HIDDEN.

    Earlier releases recorded the values of all environment variables. A secret must reach no report and no later save.
    Raises DamagedCheckpointError if a field has another type.
    """
    segment = _decode_record(Segment, item)
    has_before_and_after = all(len(before_and_after) == 2 for before_and_after in segment.changes.values())
    item.expect(has_before_and_after, "changes as [before, now]")
    environment = {name: _hide_secret(name, text) for name, text in segment.environment.items()}
    return dataclasses.replace(segment, environment=environment)


def _hide_secret(name: str, value: str) -> str:
    """Return the value of an environment variable, or HIDDEN if the variable's name says that it is a secret.

    A reference such as `${oc.env:KEY}` is returned, because it does not contain the secret itself.
    """
    is_shown = not is_secret_name(name) or value.startswith("${oc.")
    return value if is_shown else HIDDEN


def _refuse_newer(raw: bytes, source: str) -> None:
    """Raise NewerFormatError if a newer release has written this manifest. `source` names it in errors.

    Every version of the format begins with the checksum, the format's name and the version, so that any release can
    read these. Bytes that begin in another way raise nothing here.
    """
    start_pattern = rb'\{"checksum":"[^"]*","manifest":\{\s*"format":\s*"[^"]*",\s*"version":\s*(\d{1,9})\b'
    match = re.match(start_pattern, raw[:1000])
    version = int(match[1]) if match else 0
    if version > VERSION:
        raise NewerFormatError(
            f"{source}: written by a newer release (format {version}; this one reads up to {VERSION}): install a newer "
            "release"
        )


def _decode_record(record_type: Any, item: Item, required: Sequence[str] = ()) -> Any:
    """Return a record of this type (a dataclass with a field `extra`) from its JSON object.

    required: fields that the object must have. Empty: those without a default value must be there; others may be.
    Fields that this release does not know become the record's `extra`. Raises DamagedCheckpointError if a field is
    missing or has another type.
    """
    fields = item.fields(record_type, required)
    known_names = required or _field_names(record_type)
    return record_type(**fields, extra=item.besides(*known_names))


def _decode_files(files: Item) -> tuple[tuple[FileRecord, ...], Extra]:
    """Return the records of the shard files from their JSON, and the fields that this release does not know.

    The JSON has a list for each field, such as `{"names": ["shard-00000.safetensors"], "num_bytes": [8192], …}`, and
    all digests in one string. Raises DamagedCheckpointError unless there are as many of each.
    """
    names = [name.string() for name in files.get("names").items()]
    sizes_bytes = files.get("num_bytes").integers()
    headers_bytes = files.get("header_bytes").integers()
    all_digests = files.get("digests").string()
    digests = re.findall(f"[0-9a-f]{{{HASH_CHARACTERS}}}", all_digests)

    # `findall` skips whatever is not a digest, so joining the digests shows whether the string has anything else.
    has_only_digests = "".join(digests) == all_digests
    has_equal_lengths = len(names) == len(sizes_bytes) == len(headers_bytes) == len(digests)
    files.expect(has_only_digests and has_equal_lengths, "as many names as sizes, headers and hexadecimal digests")

    algorithm = files.get("algorithm").string()
    block_bytes = files.get("block_bytes").integer()
    records = []
    for name, num_bytes, header_bytes, digest in zip(names, sizes_bytes, headers_bytes, digests, strict=True):
        record = FileRecord(
            name=name,
            num_bytes=num_bytes,
            algorithm=algorithm,
            block_bytes=block_bytes,
            header_bytes=header_bytes,
            digest=digest,
        )
        records.append(record)
    extra = files.besides("names", "num_bytes", "header_bytes", "algorithm", "block_bytes", "digests")
    return tuple(records), extra


def _decode_tensors(content: Item) -> dict[str, TensorRecord]:
    """Return the tensors by name, from the keys `layouts` and `tensors` of the whole manifest's JSON object.

    A tensor's `layout` is an index in the list `layouts`. Tensors with the same layout get the same `Grid` object.
    Raises DamagedCheckpointError if a layout does not exist or a value has another type.
    """
    grids = [_decode_layout(layout) for layout in content.get("layouts").items()]
    tensors = {}
    for name, tensor in content.get("tensors").entries():
        layout_index = tensor.get("layout").integer()
        tensor.expect(layout_index < len(grids), f"one of the {len(grids)} layouts")
        dtype = tensor.get("dtype").string()
        shape = tensor.get("shape").integers()
        extra = tensor.besides("dtype", "shape", "layout")
        tensors[name] = TensorRecord(dtype, shape, grids[layout_index], extra)
    return tensors


def _decode_layout(layout: Item) -> Grid:
    """Return a grid from its JSON, such as `{"chunks": [13], "files": [0], "strides": [1]}`.

    Only the types of values are checked here, because what a grid may be depends on a tensor's shape (`Grid.problem`).
    Raises DamagedCheckpointError.
    """
    cuts = []
    for cut in layout.get("chunks").items():
        is_list_of_places = isinstance(cut.value, list)
        cuts.append(cut.integers() if is_list_of_places else cut.integer())

    strides = None
    if "strides" in layout.object():
        strides = []
        for stride in layout.get("strides").items():
            # Strides may be negative, unlike all other whole numbers of the format.
            is_valid = type(stride.value) is int and abs(stride.value) < 2**31
            strides.append(stride.expect(is_valid, "a whole number"))
        strides = tuple(strides)
    files = layout.get("files").integers()
    return Grid(tuple(cuts), files, strides, layout.besides("chunks", "files", "strides"))


# ------------------------------------------------------------------------------------------------ what must hold


def check_manifest(manifest: Manifest, source: str) -> None:
    """Raise DamagedCheckpointError if a manifest contradicts itself. `source` names it in errors.

    Afterwards other code may rely on this: names, sizes and numbers are possible, the chunks of every tensor cover it
    once, and they lie in files that are listed once, inside the checkpoint's folder.
    """
    problem = next(_find_problems(manifest), None)
    if problem is not None:
        raise DamagedCheckpointError(f"{source}: {problem}")


def _find_problems(manifest: Manifest) -> Iterator[str]:
    """Yield what is impossible in a manifest, as text for an error.

    A check may assume that the checks before it found nothing, so callers must stop at the first problem.
    """
    # Files: the shards, and the parts of the log.
    for files in (manifest.files, manifest.log):
        names = [file.name for file in files]
        if len(set(names)) != len(names):
            yield "a file is listed twice"
        for file in files:
            for problem in _find_problems_of_file(file):
                yield f"file {shorten(file.name)}: {problem}"

    # The state dict of torch.distributed.checkpoint, if there is one.
    dcp_state = manifest.dcp_state or NO_STATE
    if not isinstance(dcp_state, dict) or not all(isinstance(dcp_state.get(key), dict) for key in NO_STATE):
        yield f"scalars: {DCP_STATE}: expected values and paths"

    # Tensors, each alone and then all together.
    yield from _find_problems_of_tensors(manifest)
    tensor_bytes = sum(tensor.num_bytes for tensor in manifest.tensors.values())
    if tensor_bytes > manifest.num_bytes:
        yield f"tensors of {tensor_bytes:,} bytes in files of {manifest.num_bytes:,}"

    # A tied tensor is stored under exactly one of its names.
    for alias, stored_name in manifest.aliases.items():
        if stored_name not in manifest.tensors or alias in manifest.tensors:
            yield f"alias {alias} of {stored_name}, which is not there or is stored as well"


def _find_problems_of_tensors(manifest: Manifest) -> Iterator[str]:
    """Yield what is impossible in the dtypes, shapes and grids of a manifest's tensors, as text for an error."""
    checked_grids: set[Any] = set()
    for name, tensor in manifest.tensors.items():
        if tensor.dtype not in ITEM_BYTES:
            yield f"tensor {name}: unknown dtype {tensor.dtype!r}"
        has_negative_length = any(length < 0 for length in tensor.shape)
        if has_negative_length or len(tensor.shape) > MAX_DIMENSIONS:
            yield f"tensor {name}: shape {tensor.shape}"

        # Most tensors share their grid and shape with others, for which the grid's check need not run again.
        grid_and_shape = (id(tensor.grid), tensor.shape)
        if grid_and_shape in checked_grids:
            continue
        checked_grids.add(grid_and_shape)
        problem = tensor.grid.problem(tensor.shape, len(manifest.files))
        if problem:
            yield f"tensor {name}: {problem}"


def _find_problems_of_file(file: FileRecord | LogPart) -> Iterator[str]:
    """Yield what is impossible in the record of a shard file or of a part of the log, as text for an error."""
    # A name such as `../../x`, `C:x` or `a//b` could make a reader open a file outside of the checkpoint's folder.
    has_odd_part = any(part in ("", ".", "..") for part in file.name.split("/"))
    has_odd_character = any(character in file.name for character in "\\:\0")
    if has_odd_part or has_odd_character:
        yield "the name leads out of the checkpoint's folder"

    # Later checks divide by the size of a block.
    if file.algorithm != ALGORITHM:
        yield f"hash algorithm {file.algorithm!r}, expected {ALGORITHM!r}"
    if not MIN_BLOCK_BYTES <= file.block_bytes <= MAX_BLOCK_BYTES:
        yield f"{file.num_bytes} bytes in blocks of {file.block_bytes}"
        return

    if isinstance(file, LogPart):
        num_blocks = -(-file.num_bytes // file.block_bytes)
        if len(file.block_hashes) != num_blocks * HASH_CHARACTERS:
            yield f"block hashes for another size than {file.num_bytes} bytes"
    elif not file.name.endswith(".safetensors"):
        yield "expected a .safetensors file"
    elif not MIN_HEADER_BYTES <= file.header_bytes <= file.hashed_bytes:
        yield f"a header of {file.header_bytes} bytes in {file.num_bytes:,}"
