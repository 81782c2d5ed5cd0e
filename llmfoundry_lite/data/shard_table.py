"""`index.json` of every stream -> one table of shards, read once on a node and mapped by all of its processes.

The index of 1.5 million shards (100 TB) takes about 12 s and 1.2 GB to read. Its table takes 100 bytes for each shard.

`read_indexes` makes the rows of the table, and facts that many shards share, through one `_Index` for each stream. A
`ShardTable` is the view of both, in the process that read them and in all others of the node.
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
READER_KEYS = ("column_encodings", "column_names", "column_sizes", "compression")
"""Keys of a shard's record that MDSReader takes, and whose value most shards share."""
SHARED = (*READER_KEYS, "format", "version")
"""All keys of a shard's record whose value most shards share."""
NO_FILE = {"basename": "", "bytes": 0, "hashes": {}}
"""Description of the packed file of a shard that is not compressed."""
MAX_QUOTED = 60
"""Characters of a bad name that an error quotes."""
MAX_SAMPLES_BITS = 32
MAX_RAW_BITS = 32
"""Places in a shard are 32-bit numbers."""
MAX_ZIP_BITS = 33
"""Compressing a shard that cannot be compressed makes it larger."""
RAW_NAME = re.compile(r"([^/.\0][^/\0]*/)*[^/.\0][^/\0]*\.mds")
ZIP_NAME = re.compile(RAW_NAME.pattern + r"\.(br|bz2|gz|snappy|zstd)")
"""Names of files beside an index, or in folders there, as in a merged one. Since they become paths that are written, no
part may begin with a dot."""


class ShardTable:
    """Rows for the shards of a data set, and facts that many shards share.

    `rows` has the columns samples, kind, raw_name, raw_bytes, raw_hash, the same three with zip (empty where a shard is
    not compressed), and `NODE_COLUMNS`. Shards are numbered through all streams.
    """

    def __init__(self, rows: NDArray[Any], facts: dict[str, Any]) -> None:
        """Take what `read_indexes` returned. `rows` may be mapped from a file."""
        self.rows = rows
        self.kinds: list[dict[str, Any]] = facts["kinds"]
        """Kinds of shards: `READER_KEYS`, and `hash_name`, the algorithm of hashes (or empty)."""
        self.content_digests: list[str] = facts["content_digests"]
        """Digests of each stream's shards, in order: samples, bytes and hashes, not names."""
        self.bounds: list[int] = np.cumsum([0, *facts["num_shards"]]).tolist()
        """Index of the first shard of each stream, and at the end the number of all shards."""

    def __len__(self) -> int:
        """Return the number of shards."""
        return self.bounds[-1]

    def rows_of_stream(self, stream: int) -> NDArray[Any]:
        """Return a view of the rows of a stream's shards: writing into it changes the table."""
        return self.rows[self.bounds[stream] : self.bounds[stream + 1]]

    def stream_of(self, shard: int) -> int:
        """Return the index of the stream that a shard belongs to."""
        return bisect_right(self.bounds, shard) - 1

    def columns_of_stream(self, stream: int) -> list[list[str]]:
        """Name the columns of a stream's shards, for each kind of shard that it has."""
        return [kind["column_names"] for kind in self._kinds_of_stream(stream)]

    def token_types_of_stream(self, stream: int) -> set[str]:
        """Return the types of the column `tokens`, as the index names them, such as `ndarray:uint16`."""
        token_types = set()
        for kind in self._kinds_of_stream(stream):
            types = dict(zip(kind["column_names"], kind["column_encodings"], strict=True))
            if "tokens" in types:
                token_types.add(types["tokens"])
        return token_types

    def _kinds_of_stream(self, stream: int) -> list[dict[str, Any]]:
        """Return the kinds of shards that a stream has, each once."""
        return [self.kinds[kind] for kind in np.unique(self.rows_of_stream(stream)["kind"])]

    def name(self, shard: int) -> str:
        """Return the name of a shard's raw file, relative to its folder."""
        return self.rows["raw_name"][shard].decode()

    def reader(self, shard: int, folder: str) -> MDSReader:
        """Build mosaicml-streaming's reader of a shard whose raw file is, or will be, in `folder`."""
        row = self.rows[shard]
        kind = dict(self.kinds[row["kind"]])
        hash_name = kind.pop("hash_name")
        return MDSReader(
            dirname=folder,
            split="",
            **kind,
            hashes=[],
            raw_data=_file_info(row, "raw", hash_name),
            zip_data=_file_info(row, "zip", hash_name) if kind["compression"] else None,
            samples=int(row["samples"]),
            size_limit=None,
        )


def _file_info(row: Any, prefix: str, hash_name: str) -> FileInfo:
    """Return the description of a shard's raw or zip file, without hashes where its row has none."""
    digest = row[f"{prefix}_hash"].decode()
    hashes = {hash_name: digest} if digest else {}
    return FileInfo(basename=row[f"{prefix}_name"].decode(), bytes=int(row[f"{prefix}_bytes"]), hashes=hashes)


def read_indexes(
    indexes: Sequence[Path], hash_names: Sequence[str | None], *, allow_unhashed_shards: bool = False
) -> tuple[NDArray[Any], dict[str, Any]]:
    """Read the index of each stream. Returns the rows of a `ShardTable`, and its facts. Raises DataError.

    `hash_names` are the algorithms asked for. None takes the fastest one that all shards of an index have, or else the
    fastest of each shard. Where other shards have a hash, one without is refused unless `allow_unhashed_shards`.
    """
    tables: list[dict[str, NDArray[Any]]] = []
    facts: dict[str, Any] = {"kinds": [], "content_digests": [], "num_shards": []}
    for path, hash_name in zip(indexes, hash_names, strict=True):
        index = _Index(path)
        # The digest must not depend on the hash that the user asks for, since checkpoints keep it.
        fastest_hashes = index.choose_hashes(None, allow_unhashed_shards=allow_unhashed_shards)
        chosen_hashes = fastest_hashes
        if hash_name:
            chosen_hashes = index.choose_hashes(hash_name, allow_unhashed_shards=allow_unhashed_shards)

        tables.append(index.columns(chosen_hashes, first_kind=len(facts["kinds"])))
        facts["content_digests"].append(index.digest(fastest_hashes))
        facts["num_shards"].append(len(index.records))
        for kind, chosen_hash in zip(index.kinds, chosen_hashes, strict=True):
            reader_options = {key: kind[key] for key in READER_KEYS}
            facts["kinds"].append(reader_options | {"hash_name": chosen_hash})

    # Columns of all streams are joined one by one, and each is freed, since they may take a gigabyte together.
    columns = {name: np.concatenate([table.pop(name) for table in tables]) for name in list(tables[0])}
    column_types = [(name, column.dtype) for name, column in columns.items()]
    rows = np.zeros(sum(facts["num_shards"]), np.dtype([*column_types, *NODE_COLUMNS], align=True))
    for name, column in columns.items():
        rows[name] = column
    return rows, facts


class _Record(NamedTuple):
    """Record of a shard in an index. Hashes are in the order of its kind's algorithms."""

    samples: int
    kind: int
    """Index in `_Index.kinds`."""
    raw_name: bytes
    raw_bytes: int
    raw_hashes: tuple[bytes, ...]
    zip_name: bytes
    """Empty, as the next two, for a shard that is not compressed."""
    zip_bytes: int
    zip_hashes: tuple[bytes, ...]


class _Index:
    """The records of one `index.json`, and their kinds: columns, encodings, compression and algorithms of hashes."""

    def __init__(self, path: Path) -> None:
        """Read and check an index, which anybody may have written. Raises DataError."""
        self.path = path
        self.kinds: list[dict[str, Any]] = []
        """A dictionary with `SHARED`, and `hashes`, for each kind of shard. `_read_object` adds to it."""
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
            raise self._error(f"is not an index of MDS version 2 ({error!r})") from error
        if not is_index or not self.records:
            raise self._error("is not an index of MDS version 2, or lists no shards")

        names = [record.raw_name for record in self.records]
        if len(set(names)) < len(names):
            [(name, _)] = Counter(names).most_common(1)
            raise self._error(f"lists {name.decode()} twice, so that its samples would be read twice")

    def choose_hashes(self, hash_name: str | None, *, allow_unhashed_shards: bool) -> list[str]:
        """Choose the algorithm that checks the shards of each kind; empty where they have no hash. Raises DataError.

        With `hash_name`, all shards that have a hash must have this one. Otherwise it is the fastest that all have, or
        the fastest of each kind if they have none in common.
        """
        algorithms = [sorted(filter(is_hash, kind["hashes"]), key=_speed_rank) for kind in self.kinds]
        common = [name for name in algorithms[0] if all(name in names for names in algorithms)]
        unhashed_kinds = [kind for kind, names in enumerate(algorithms) if not names]

        has_some_hashes = len(unhashed_kinds) < len(algorithms)
        if unhashed_kinds and has_some_hashes and not allow_unhashed_shards:
            shard = next(record for record in self.records if record.kind == unhashed_kinds[0])
            raise DataError(
                f"{self.path}: {shard.raw_name.decode()} has no hash, and other shards have one, so that damage to it "
                "would pass unseen; write the shards again with hashes=[...], or load it all the same: "
                "allow_unhashed_shards: true"
            )

        if hash_name is not None:
            kinds_without_it = [names for names in algorithms if names and hash_name not in names]
            if kinds_without_it or not has_some_hashes:
                offered = common
                if not offered and kinds_without_it:
                    offered = kinds_without_it[0]
                raise DataError(
                    f"validate_hash is {hash_name}, but {self.path} has {', '.join(offered) or 'no hashes'}; "
                    "leave validate_hash out, or name one that is there"
                )

        chosen = []
        for names in algorithms:
            if not names:
                chosen.append("")
            else:
                chosen.append(hash_name or (common or names)[0])
        return chosen

    def columns(self, hash_names: Sequence[str], first_kind: int) -> dict[str, NDArray[Any]]:
        """Return the columns of the table, with the hash of each kind's algorithm. Kinds count from `first_kind`."""
        transposed = zip(*self.records, strict=True)
        columns: dict[str, Sequence[Any]] = dict(zip(_Record._fields, transposed, strict=True))
        kinds = columns["kind"]
        columns["raw_hash"] = self._choose_column(kinds, columns.pop("raw_hashes"), hash_names)
        columns["zip_hash"] = self._choose_column(kinds, columns.pop("zip_hashes"), hash_names)

        arrays = {name: np.array(column) for name, column in columns.items()}
        arrays["kind"] = (first_kind + arrays["kind"]).astype(np.uint32)
        return arrays

    def _choose_column(
        self, kinds: Sequence[int], hashes_of_shards: Sequence[tuple[bytes, ...]], hash_names: Sequence[str]
    ) -> list[bytes]:
        """Return the one hash of each shard that its kind's algorithm has made; empty where there is none."""
        positions = []
        for kind, hash_name in zip(self.kinds, hash_names, strict=True):
            positions.append(kind["hashes"].index(hash_name) if hash_name else None)

        column = []
        for kind, hashes in zip(kinds, hashes_of_shards, strict=True):
            position = positions[kind]
            column.append(b"" if position is None else hashes[position])
        return column

    def digest(self, hash_names: Sequence[str]) -> str:
        """Digest samples, bytes and hashes. This must never change, because checkpoints keep the result.

        The result begins with the algorithm of the hashes, such as `xxh64:0f3a…`. It begins with `mixed` where kinds
        have several, and with `sizes` where no shard has a hash.
        """
        label = hash_names[0] if len(set(hash_names)) == 1 else "mixed"
        digest = hashlib.blake2b(digest_size=16)
        digest.update(np.array([record.samples for record in self.records], "<i8").tobytes())
        digest.update(np.array([record.raw_bytes for record in self.records], "<i8").tobytes())
        for kind, neighbours in groupby(self.records, key=lambda record: record.kind):
            hash_name = hash_names[kind]
            if hash_name:
                position = self.kinds[kind]["hashes"].index(hash_name)
                hashes = [record.raw_hashes[position] for record in neighbours]
            else:
                hashes = [b"" for _ in neighbours]
            if label == "mixed":  # algorithms differ, so the digest names them
                digest.update(f"{hash_name} of {len(hashes)}:".encode())
            digest.update(b"".join(hashes))
        return f"{label or 'sizes'}:{digest.hexdigest()}"

    def _read_object(self, record: dict[str, Any]) -> Any:
        """Turn an object of JSON that describes a shard into a `_Record`. Other objects stay as they are.

        The JSON parser calls this for every object, innermost first. Adds the shard's kind to `self.kinds`.
        """
        if "raw_data" not in record:
            return record
        raw = record["raw_data"]
        packed = record["zip_data"] or NO_FILE

        _check_size("samples", record["samples"], MAX_SAMPLES_BITS)
        _check_size("raw_data.bytes", raw["bytes"], MAX_RAW_BITS)
        _check_size("zip_data.bytes", packed["bytes"], MAX_ZIP_BITS)
        self._check_name(raw["basename"], RAW_NAME)
        if packed is not NO_FILE:
            self._check_name(packed["basename"], ZIP_NAME)

        raw_hashes = raw["hashes"]
        if not all(raw_hashes.values()):  # an empty text is no hash
            raw_hashes = {}
        if packed["hashes"]:
            packed_hashes = tuple([packed["hashes"].get(name, "").encode() for name in raw_hashes])
        else:
            packed_hashes = (b"",) * len(raw_hashes)
        return _Record(
            record["samples"],
            self._find_kind(record, [*raw_hashes]),
            raw["basename"].encode(),
            raw["bytes"],
            tuple(map(str.encode, raw_hashes.values())),
            packed["basename"].encode(),
            packed["bytes"],
            packed_hashes,
        )

    def _check_name(self, name: str, pattern: re.Pattern[str]) -> None:
        """Raise DataError for a name of a file that does not match RAW_NAME or ZIP_NAME."""
        if not pattern.fullmatch(name):
            raise self._error(
                f"names a shard {name[:MAX_QUOTED]!r}, expected a file beside it that ends in .mds, or in .mds and "
                "the name of a compression"
            )

    def _find_kind(self, record: dict[str, Any], hash_names: list[str]) -> int:
        """Return the index of a shard's kind in `self.kinds`, adding and checking one that is new."""
        kind = {name: record[name] for name in SHARED}
        kind["hashes"] = hash_names
        if kind in self.kinds:  # a slow search, but there are few
            return self.kinds.index(kind)
        if record["version"] != 2 or record["format"] != "mds":
            raise self._error(f"describes shards of {record['format']} version {record['version']}, not MDS version 2")
        for name, encoding in zip(record["column_names"], record["column_encodings"], strict=True):
            if not is_mds_encoding_safe(encoding):
                raise DataError(f"{self.path}: column {name} is of type {encoding}, which may run code when it is read")
        self.kinds.append(kind)
        return len(self.kinds) - 1

    def _error(self, problem: str) -> DataError:
        """Return an error that says what is wrong with the index; `problem` follows its path."""
        return DataError(f"{self.path} {problem}; prepare the data again")


def _check_size(name: str, value: Any, bits: int) -> None:
    """Raise ValueError unless a value of an index is a whole number that fits into `bits` bits, without a sign."""
    if type(value) is not int or not 0 <= value < 2**bits:
        raise ValueError(f"{name} is {value!r}, expected a whole number of at least 0 and below 2^{bits}")


def _speed_rank(hash_name: str) -> tuple[int, str]:
    """Return a key that sorts algorithms of hashes by speed, and those of unknown speed last, by name."""
    if hash_name in FASTEST_HASHES:
        return FASTEST_HASHES.index(hash_name), hash_name
    return len(FASTEST_HASHES), hash_name
