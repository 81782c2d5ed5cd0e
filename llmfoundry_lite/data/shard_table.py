"""`index.json` of every stream -> one table of shards, read once on a node and mapped by all of its processes.

The index of 1.5 million shards (100 TB) takes about 12 s and 1.2 GB to read. Its table takes 100 bytes for each shard.
"""

import hashlib
import json
import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from streaming.base.format import FileInfo
from streaming.base.format.mds import MDSReader
from streaming.base.format.mds.encodings import is_mds_encoding_safe
from streaming.base.hashing import is_hash

from llmfoundry_lite.bounded import MAX_INDEX_BYTES, too_large
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import open_regular
from llmfoundry_lite.ranks.lean_imports import no_collection

FASTEST_HASHES = ("xxh3_64", "xxh3_128", "xxh128", "xxh64", "xxh32")
NODE_COLUMNS = (
    ("state", np.uint8),
    ("is_copy", np.bool_),
    ("verified_status", np.uint64),
    ("last_read_ns", np.int64),
)
"""Columns that the processes of a node share about a shard's file: see `cache.py`."""
SHARED = ("column_encodings", "column_names", "column_sizes", "compression", "format", "version")
"""Keys of a shard's record whose value most shards share."""
NO_FILE = {"basename": "", "bytes": 0, "hashes": {}}
MAX_QUOTED = 60
RAW_NAME = re.compile(r"([^/.\0][^/\0]*/)*[^/.\0][^/\0]*\.mds")
ZIP_NAME = re.compile(RAW_NAME.pattern + r"\.(br|bz2|gz|snappy|zstd)")
"""Names of files beside an index, or in folders there, as in a merged one. Since they become paths that are written, no
part may begin with a dot."""


class ShardTable:
    """Rows for the shards of a data set, and facts that many shards share.

    `rows` has the columns samples, kind, raw_name, raw_bytes, raw_hash, the same three with zip (empty where a shard is
    not compressed), and `NODE_COLUMNS`.
    """

    def __init__(self, rows: NDArray[Any], facts: dict[str, Any]) -> None:
        self.rows = rows
        self.kinds: list[dict[str, Any]] = facts["kinds"]
        """Kinds of shards: columns, encodings, compression, and `hash_name`, the algorithm of hashes (or empty)."""
        self.contents: list[str] = facts["contents"]
        """Digests of each stream's shards, in order: samples, bytes and hashes, not names."""
        self.bounds: list[int] = np.cumsum([0, *facts["num_shards"]]).tolist()
        """Index of the first shard of each stream, and at the end the number of all shards."""

    def __len__(self) -> int:
        return self.bounds[-1]

    def of_stream(self, stream: int) -> NDArray[Any]:
        return self.rows[self.bounds[stream] : self.bounds[stream + 1]]

    def stream_of(self, shard: int) -> int:
        return bisect_right(self.bounds, shard) - 1

    def columns_of_stream(self, stream: int) -> list[list[str]]:
        """Name the columns of a stream's shards, for each kind of shard that it has."""
        return [self.kinds[kind]["column_names"] for kind in np.unique(self.of_stream(stream)["kind"])]

    def token_types_of_stream(self, stream: int) -> set[str]:
        """Return the types of the column `tokens`, as the index names them."""
        kinds = [self.kinds[kind] for kind in np.unique(self.of_stream(stream)["kind"])]
        types = [dict(zip(kind["column_names"], kind["column_encodings"], strict=True)) for kind in kinds]
        return {names["tokens"] for names in types if "tokens" in names}

    def name(self, shard: int) -> str:
        return self.rows["raw_name"][shard].decode()

    def reader(self, shard: int, folder: str) -> MDSReader:
        row = self.rows[shard]
        kind = dict(self.kinds[row["kind"]])
        hash_name = kind.pop("hash_name")

        def file(part: str) -> FileInfo:
            digest = row[f"{part}_hash"].decode()
            hashes = {hash_name: digest} if digest else {}
            return FileInfo(basename=row[f"{part}_name"].decode(), bytes=int(row[f"{part}_bytes"]), hashes=hashes)

        return MDSReader(
            dirname=folder,
            split="",
            **kind,
            hashes=[],
            raw_data=file("raw"),
            zip_data=file("zip") if kind["compression"] else None,
            samples=int(row["samples"]),
            size_limit=None,
        )


def read_indexes(
    indexes: Sequence[Path], hash_names: Sequence[str | None], *, allow_unhashed_shards: bool = False
) -> tuple[NDArray[Any], dict[str, Any]]:
    """Read the index of each stream. Returns the rows of a `ShardTable`, and its facts. Raises DataError.

    `hash_names` are the algorithms asked for. None takes the fastest one that all shards of an index have, or else the
    fastest of each shard. Where other shards have a hash, one without is refused unless `allow_unhashed_shards`.
    """
    tables: list[dict[str, NDArray[Any]]] = []
    facts: dict[str, Any] = {"kinds": [], "contents": [], "num_shards": []}
    for path, hash_name in zip(indexes, hash_names, strict=True):
        index = _Index(path)
        found = index.choose_hashes(None, allow_unhashed_shards=allow_unhashed_shards)
        checked = index.choose_hashes(hash_name, allow_unhashed_shards=allow_unhashed_shards) if hash_name else found
        tables.append(index.columns(checked, len(facts["kinds"])))
        facts["contents"].append(index.digest(found))
        facts["num_shards"].append(len(index.records))
        for kind, name in zip(index.kinds, checked, strict=True):
            facts["kinds"].append({key: kind[key] for key in SHARED[:4]} | {"hash_name": name})
    arrays = {name: np.concatenate([table.pop(name) for table in tables]) for name in list(tables[0])}
    dtype = np.dtype([*((name, array.dtype) for name, array in arrays.items()), *NODE_COLUMNS], align=True)
    rows = np.zeros(sum(facts["num_shards"]), dtype)
    for name, array in arrays.items():
        rows[name] = array
    return rows, facts


class _Record(NamedTuple):
    """Record of a shard in an index. Hashes are in the order of its kind's algorithms."""

    samples: int
    kind: int
    raw_name: bytes
    raw_bytes: int
    raw_hashes: tuple[bytes, ...]
    zip_name: bytes
    zip_bytes: int
    zip_hashes: tuple[bytes, ...]


class _Index:
    """The records of one `index.json`, and their kinds: columns, encodings, compression and algorithms of hashes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kinds: list[dict[str, Any]] = []
        try:
            with no_collection(), open(path, encoding="utf-8", opener=open_regular) as file:
                if os.fstat(file.fileno()).st_size > MAX_INDEX_BYTES:
                    raise too_large(path, MAX_INDEX_BYTES, "an index")
                # Each record becomes a tuple as soon as it is parsed, because dictionaries would take gigabytes.
                content = json.load(file, object_hook=self._read_object)
            self.records: list[_Record] = content["shards"]
            is_index = content["version"] == 2 and all(isinstance(record, _Record) for record in self.records)
        except DataError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._wrong(f"is not an index of MDS version 2 ({error!r})") from error
        if not is_index or not self.records:
            raise self._wrong("is not an index of MDS version 2, or lists no shards")
        names = [record.raw_name for record in self.records]
        if len(set(names)) < len(names):
            [(name, _)] = Counter(names).most_common(1)
            raise self._wrong(f"lists {name.decode()} twice, so that its samples would be read twice")

    def choose_hashes(self, hash_name: str | None, *, allow_unhashed_shards: bool) -> list[str]:
        """Choose the algorithm that checks the shards of each kind; empty where they have no hash. Raises DataError."""
        names = [sorted(filter(is_hash, kind["hashes"]), key=_hash_rank) for kind in self.kinds]
        common = [name for name in names[0] if all(name in others for others in names)]
        unhashed = [kind for kind, others in enumerate(names) if not others]
        if unhashed and len(unhashed) < len(names) and not allow_unhashed_shards:
            shard = next(record for record in self.records if record.kind == unhashed[0])
            raise DataError(
                f"{self.path}: {shard.raw_name.decode()} has no hash, and other shards have one, so that damage to it "
                "would pass unseen; write the shards again with hashes=[...], or load it all the same: "
                "allow_unhashed_shards: true"
            )
        lacking = [others for others in names if others and hash_name not in others]
        if hash_name is not None and (lacking or len(unhashed) == len(names)):
            raise DataError(
                f"validate_hash is {hash_name}, but {self.path} has "
                f"{', '.join(common) or ', '.join(lacking[0] if lacking else []) or 'no hashes'}; "
                "leave validate_hash out, or name one that is there"
            )
        return [hash_name or (common or others)[0] if others else "" for others in names]

    def columns(self, hash_names: Sequence[str], first_kind: int) -> dict[str, NDArray[Any]]:
        """Return the columns of the table. Kinds count from `first_kind`."""
        places = [
            kind["hashes"].index(name) if name else None for kind, name in zip(self.kinds, hash_names, strict=True)
        ]
        columns: dict[str, Sequence[Any]] = dict(zip(_Record._fields, zip(*self.records, strict=True), strict=True))
        for name in ("raw_hash", "zip_hash"):
            chosen = zip(columns["kind"], columns.pop(f"{name}es"), strict=True)
            columns[name] = [b"" if (place := places[kind]) is None else hashes[place] for kind, hashes in chosen]
        arrays = {name: np.array(column) for name, column in columns.items()}
        return arrays | {"kind": (first_kind + arrays["kind"]).astype(np.uint32)}

    def digest(self, hash_names: Sequence[str]) -> str:
        """Digest samples, bytes and hashes. This must never change, because checkpoints keep the result."""
        label = hash_names[0] if len(set(hash_names)) == 1 else "mixed"
        digest = hashlib.blake2b(digest_size=16)
        digest.update(np.array([record.samples for record in self.records], "<i8").tobytes())
        digest.update(np.array([record.raw_bytes for record in self.records], "<i8").tobytes())
        for kind, neighbours in groupby(self.records, key=lambda record: record.kind):
            name = hash_names[kind]
            place = self.kinds[kind]["hashes"].index(name) if name else 0
            hashes = [record.raw_hashes[place] if name else b"" for record in neighbours]
            if label == "mixed":  # algorithms differ, so the digest names them
                digest.update(f"{name} of {len(hashes)}:".encode())
            digest.update(b"".join(hashes))
        return f"{label or 'sizes'}:{digest.hexdigest()}"

    def _read_object(self, record: dict[str, Any]) -> Any:
        """Turn an object of JSON that describes a shard into a `_Record`. Other objects stay as they are."""
        if "raw_data" not in record:
            return record
        raw, zipped = record["raw_data"], record["zip_data"] or NO_FILE
        hashes, zip_hashes = raw["hashes"], zipped["hashes"]
        if not all(hashes.values()):  # an empty text is no hash
            hashes = {}
        sizes = record["samples"], raw["bytes"], zipped["bytes"]
        for name, value, bits in zip(("samples", "raw_data.bytes", "zip_data.bytes"), sizes, (32, 32, 33), strict=True):
            if type(value) is not int or not 0 <= value < 2**bits:  # places in a shard are 32-bit numbers
                raise ValueError(f"{name} is {value!r}, expected a whole number of at least 0 and below 2^{bits}")
        names = [(RAW_NAME, raw["basename"]), *([(ZIP_NAME, zipped["basename"])] if zipped is not NO_FILE else ())]
        for pattern, name in names:
            if not pattern.fullmatch(name):
                raise self._wrong(
                    f"names a shard {name[:MAX_QUOTED]!r}, expected a file beside it that ends in .mds, or in .mds and "
                    "the name of a compression"
                )
        return _Record(
            sizes[0],
            self._number_of_kind(record, [*hashes]),
            raw["basename"].encode(),
            sizes[1],
            tuple(map(str.encode, hashes.values())),
            zipped["basename"].encode(),
            sizes[2],
            tuple([zip_hashes.get(name, "").encode() for name in hashes]) if zip_hashes else (b"",) * len(hashes),
        )

    def _number_of_kind(self, record: dict[str, Any], hash_names: list[str]) -> int:
        kind = {name: record[name] for name in SHARED} | {"hashes": hash_names}
        if kind in self.kinds:  # a slow search, but there are few
            return self.kinds.index(kind)
        if record["version"] != 2 or record["format"] != "mds":
            raise self._wrong(f"describes shards of {record['format']} version {record['version']}, not MDS version 2")
        for name, encoding in zip(record["column_names"], record["column_encodings"], strict=True):
            if not is_mds_encoding_safe(encoding):
                raise DataError(f"{self.path}: column {name} is of type {encoding}, which may run code when it is read")
        self.kinds.append(kind)
        return len(self.kinds) - 1

    def _wrong(self, what: str) -> DataError:
        return DataError(f"{self.path} {what}; prepare the data again")


def _hash_rank(name: str) -> tuple[int, str]:
    return FASTEST_HASHES.index(name) if name in FASTEST_HASHES else len(FASTEST_HASHES), name
