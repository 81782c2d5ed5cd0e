"""A checkpoint's manifest as JSON: its bytes are written, read back and verified here. No torch.

`encode` writes a `Manifest` in an envelope with a checksum, and `decode` reads it back. `read_head` reads the few facts
that a listing of checkpoints shows, from the file's first bytes.

docs/checkpoint-format.md describes the JSON, and the rule for versions. This module does no I/O: `commit` and `store`
read and write the file.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

import xxhash

from llmfoundry_lite.checkpoint.grid import Extra, Grid
from llmfoundry_lite.checkpoint.manifest import (
    ALGORITHM,
    FORMAT,
    HASH_CHARACTERS,
    HEAD_BYTES,
    HIDDEN,
    MAX_BYTES,
    VERSION,
    FileRecord,
    Head,
    LogPart,
    Manifest,
    Segment,
    TensorRecord,
    Timestamp,
    check_manifest,
)
from llmfoundry_lite.errors import CheckpointError, DamagedCheckpointError, NewerFormatError, is_secret_name
from llmfoundry_lite.ranks.codec import Item, encode_value, fits, parse_json, write_json

HEAD_FIELDS = ("save_id", "parent_save_id", "lease_epoch", "run_name", "written_at")
"""Fields that come first in the JSON, for `read_head`."""
PLAIN_FIELDS = (*HEAD_FIELDS, "fingerprints", "config", "scalars", "optimizer", "aliases")
"""Fields of a `Manifest` that the JSON has under the same names, as typed values (`ranks/codec.py`)."""
KNOWN_FIELDS = (
    *("format", "version", *PLAIN_FIELDS, "timestamp", "num_bytes", "state_digest", "segments"),
    *("files", "log", "layouts", "tensors"),
)
"""All keys of the JSON object. Others become the manifest's `extra`."""


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
