"""Index files of every stream -> one table of shards, read once on a node and mapped by all of its processes.

The index of 1.5 million shards (100 TB) takes about 12 s and 1.2 GB to read. Its table takes 100 bytes for each shard.

Shards that agree in columns, encodings, compression and hash algorithms have one *schema*, which is stored once. The
rows of the table refer to it by its index.

`read_indexes` reads the index files of each stream through an `_Index`, and returns the rows of the table and its
metadata. A `ShardTable` is the view of both, in the process that read them and in all others of the node.
"""

import hashlib
import json
import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from streaming.base.format import FileInfo
from streaming.base.format.mds import MDSReader
from streaming.base.format.mds.encodings import is_mds_encoding_safe
from streaming.base.hashing import is_hash

from llmfoundry_lite.bounded import MAX_INDEX_BYTES, too_large
from llmfoundry_lite.data.index_files import INDEX, IndexFiles
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
"""Keys of a shard's record in the index that `MDSReader` takes as arguments, and that belong to its schema."""
SCHEMA_KEYS = (*READER_KEYS, "format", "version")
"""All keys of a shard's record in the index that belong to its schema."""
NO_FILE = {"basename": "", "bytes": 0, "hashes": {}}
"""Stands for the compressed file of a shard that is not compressed."""
MAX_QUOTED = 60
"""Characters of a bad name that an error quotes."""
MAX_SAMPLES_BITS = 32
MAX_RAW_BITS = 32
"""Offsets within a shard are 32-bit numbers."""
MAX_ZIP_BITS = 33
"""One more than MAX_RAW_BITS, because compressing incompressible data makes it slightly larger."""
RAW_NAME = re.compile(r"([^/.\0][^/\0]*/)*[^/.\0][^/\0]*\.mds")
ZIP_NAME = re.compile(RAW_NAME.pattern + r"\.(br|bz2|gz|snappy|zstd)")
"""Names of shard files, relative to the index. A merged index has folders in them. Since files are written under these
names, no part may begin with a dot."""


class ShardTable:
    """Table with a row for each shard of a data set, and the metadata that many shards share.

    `rows` has the columns samples, schema (an index in `schemas`), raw_name, raw_bytes, raw_hash, zip_name, zip_bytes,
    zip_hash (the last three empty where a shard is not compressed), and `NODE_COLUMNS`. Shards are numbered
    consecutively through all streams.
    """

    def __init__(self, rows: NDArray[Any], metadata: dict[str, Any]) -> None:
        """Take the rows and metadata that `read_indexes` returned. `rows` may be a memory-mapped file."""
        self.rows = rows
        self.schemas: list[dict[str, Any]] = metadata["schemas"]
        """Schemas of shards: `READER_KEYS`, and `hash_name`, the algorithm that checks the shards (or empty)."""
        self.content_digests: list[str] = metadata["content_digests"]
        """Digest of the samples, bytes and hashes of all shards, for each stream. File names are not part of it."""
        self.index_bytes: list[int] = metadata["index_bytes"]
        """Size of the index files of each stream."""
        self.stream_bounds: list[int] = np.cumsum([0, *metadata["num_shards"]]).tolist()
        """Index of the first shard of each stream, with the total number of shards as the last element."""

    def __len__(self) -> int:
        """Return the number of shards."""
        return self.stream_bounds[-1]

    def rows_of_stream(self, stream: int) -> NDArray[Any]:
        """Return the rows of a stream's shards, as a view: writing into it changes the table."""
        return self.rows[self.stream_bounds[stream] : self.stream_bounds[stream + 1]]

    def stream_of(self, shard: int) -> int:
        """Return the index of the stream that a shard belongs to."""
        return bisect_right(self.stream_bounds, shard) - 1

    def columns_of_stream(self, stream: int) -> list[list[str]]:
        """Return the column names of a stream's shards, one list for each schema that they have."""
        return [schema["column_names"] for schema in self._schemas_of_stream(stream)]

    def token_types_of_stream(self, stream: int) -> set[str]:
        """Return the types of the column `tokens` in a stream's shards, in MDS notation, such as `ndarray:uint16`."""
        token_types = set()
        for schema in self._schemas_of_stream(stream):
            types = dict(zip(schema["column_names"], schema["column_encodings"], strict=True))
            if "tokens" in types:
                token_types.add(types["tokens"])
        return token_types

    def _schemas_of_stream(self, stream: int) -> list[dict[str, Any]]:
        """Return the schemas that a stream's shards have, each once."""
        return [self.schemas[index] for index in np.unique(self.rows_of_stream(stream)["schema"])]

    def name(self, shard: int) -> str:
        """Return the name of a shard's uncompressed file, relative to the folder of its stream."""
        return self.rows["raw_name"][shard].decode()

    def reader(self, shard: int, folder: str) -> MDSReader:
        """Build mosaicml-streaming's reader of a shard. For each sample it opens the raw file in `folder`."""
        row = self.rows[shard]
        schema = dict(self.schemas[row["schema"]])
        hash_name = schema.pop("hash_name")
        return MDSReader(
            dirname=folder,
            split="",
            **schema,
            hashes=[],
            raw_data=_file_info(row, "raw", hash_name),
            zip_data=_file_info(row, "zip", hash_name) if schema["compression"] else None,
            samples=int(row["samples"]),
            size_limit=None,
        )


def _file_info(row: Any, prefix: str, hash_name: str) -> FileInfo:
    """Return the name, size and hash of a shard's file from its row in the table.

    `prefix` is "raw" for the uncompressed file and "zip" for the compressed one. `hash_name` is the algorithm; the
    result has no hash where the row has none.
    """
    digest = row[f"{prefix}_hash"].decode()
    hashes = {hash_name: digest} if digest else {}
    return FileInfo(basename=row[f"{prefix}_name"].decode(), bytes=int(row[f"{prefix}_bytes"]), hashes=hashes)


def read_indexes(
    indexes: Sequence[IndexFiles], hash_names: Sequence[str | None], *, allow_unhashed_shards: bool = False
) -> tuple[NDArray[Any], dict[str, Any]]:
    """Read the index files of each stream. Returns the rows and the metadata of a `ShardTable`.

    `hash_names` are the hash algorithms that the user requires for each stream. None takes the fastest algorithm that
    all shards of an index have, or else the fastest of each shard.

    Raises DataError for an index that cannot be read, for hashes that are missing, and for a shard without a hash among
    shards that have one, unless `allow_unhashed_shards`.
    """
    tables: list[dict[str, NDArray[Any]]] = []
    metadata: dict[str, Any] = {"schemas": [], "content_digests": [], "num_shards": [], "index_bytes": []}
    for files, hash_name in zip(indexes, hash_names, strict=True):
        index = _Index(files)
        # Checkpoints keep the digest of the content, so it must not depend on the hash that the user requires.
        fastest_hashes = index.choose_hashes(None, allow_unhashed_shards=allow_unhashed_shards)
        chosen_hashes = fastest_hashes
        if hash_name:
            chosen_hashes = index.choose_hashes(hash_name, allow_unhashed_shards=allow_unhashed_shards)

        tables.append(index.build_columns(chosen_hashes, first_schema=len(metadata["schemas"])))
        metadata["content_digests"].append(index.digest(fastest_hashes))
        metadata["num_shards"].append(len(index.records))
        metadata["index_bytes"].append(index.num_bytes)
        for schema, chosen_hash in zip(index.schemas, chosen_hashes, strict=True):
            reader_options = {key: schema[key] for key in READER_KEYS}
            metadata["schemas"].append(reader_options | {"hash_name": chosen_hash})

    # All columns together may take a gigabyte, so they are joined one at a time, and `pop` frees the parts.
    columns = {name: np.concatenate([table.pop(name) for table in tables]) for name in list(tables[0])}
    column_types = [(name, column.dtype) for name, column in columns.items()]
    rows = np.zeros(sum(metadata["num_shards"]), np.dtype([*column_types, *NODE_COLUMNS], align=True))
    for name, column in columns.items():
        rows[name] = column
    return rows, metadata


class _ShardRecord(NamedTuple):
    """Record of a shard in an index. Its hashes are in the order of its schema's algorithms.

    The names of the fields are columns of the table, except that it has one hash of each file instead of several.
    """

    samples: int
    schema: int
    """Index in `_Index.schemas`."""
    raw_name: bytes
    raw_bytes: int
    raw_hashes: tuple[bytes, ...]
    zip_name: bytes
    """Empty for a shard that is not compressed, as the next two fields are."""
    zip_bytes: int
    zip_hashes: tuple[bytes, ...]


class _Index:
    """The content of the index files of a stream: the records of its shards, and the schemas that they refer to."""

    def __init__(self, files: IndexFiles) -> None:
        """Read and check all files. They are untrusted, since anybody may have written them. Raises DataError."""
        self.path = files.label
        """Path for messages: of the file that is being read, later of the folder if there are several files."""
        self.num_bytes = 0
        """Size of all files."""
        self.schemas: list[dict[str, Any]] = []
        """Each schema of shards: `SCHEMA_KEYS`, and `hashes`, a list of algorithms. `_read_object` adds to it."""
        self.records: list[_ShardRecord] = []
        self._prefix = b""
        """Folder of the file that is being read, relative to the stream's folder, with a slash at the end."""
        with no_collection():
            for name in files.names:
                self.path = str(files.folder / name)
                self._prefix = name.removesuffix(INDEX).encode()
                self.records += self._read_file()
        self.path = files.label

        if not self.records:
            raise self._error("is not an index of MDS version 2, or lists no shards")
        names = [record.raw_name for record in self.records]
        if len(set(names)) < len(names):
            [(name, _)] = Counter(names).most_common(1)
            raise self._error(f"lists {name.decode()} twice, so that its samples would be read twice")

    def _read_file(self) -> list["_ShardRecord"]:
        """Read the records of one file, at `self.path`. Raises DataError."""
        try:
            with open(self.path, encoding="utf-8", opener=open_regular) as file:
                self.num_bytes += os.fstat(file.fileno()).st_size
                if self.num_bytes > MAX_INDEX_BYTES:
                    raise too_large(self.path, MAX_INDEX_BYTES, "an index")
                # Each record is converted to a tuple as soon as it is parsed. Dictionaries would take gigabytes.
                content = json.load(file, object_hook=self._read_object)
            records: list[_ShardRecord] = content["shards"]
            is_index = content["version"] == 2 and all(isinstance(record, _ShardRecord) for record in records)
        except DataError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise self._error(f"is not an index of MDS version 2 ({error!r})") from error
        if not is_index:
            raise self._error("is not an index of MDS version 2")
        return records

    def choose_hashes(self, hash_name: str | None, *, allow_unhashed_shards: bool) -> list[str]:
        """Choose the hash algorithm by which the shards of each schema are checked.

        With `hash_name`, all shards that have hashes must have this one. Otherwise it is the fastest algorithm that all
        schemas have, or the fastest of each schema if they have none in common.

        Returns an algorithm for each of `schemas`; empty where its shards have no hash. Raises DataError for a
        `hash_name` that is missing, and for shards without a hash among others, unless `allow_unhashed_shards`.
        """
        # List the algorithms of each schema that this library knows, the fastest first.
        algorithms = [sorted(filter(is_hash, schema["hashes"]), key=_speed_rank) for schema in self.schemas]
        common = [name for name in algorithms[0] if all(name in names for names in algorithms)]
        unhashed_schemas = [index for index, names in enumerate(algorithms) if not names]

        # Refuse shards without a hash among others.
        has_some_hashes = len(unhashed_schemas) < len(algorithms)
        if unhashed_schemas and has_some_hashes and not allow_unhashed_shards:
            shard = next(record for record in self.records if record.schema == unhashed_schemas[0])
            raise DataError(
                f"{self.path}: {shard.raw_name.decode()} has no hash, and other shards have one, so that damage to it "
                "would pass unseen; write the shards again with hashes=[...], or load it all the same: "
                "allow_unhashed_shards: true"
            )

        # Refuse an index that lacks the algorithm which the user requires.
        if hash_name is not None:
            algorithms_without_it = [names for names in algorithms if names and hash_name not in names]
            if algorithms_without_it or not has_some_hashes:
                offered = common
                if not offered and algorithms_without_it:
                    offered = algorithms_without_it[0]
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

    def build_columns(self, hash_names: Sequence[str], first_schema: int) -> dict[str, NDArray[Any]]:
        """Return the columns of the table for this index, one array [num_shards] for each.

        `hash_names` has the algorithm for each of `schemas`, as `choose_hashes` returns it; only its hashes are kept.
        Schemas are numbered from `first_schema` on, because other indexes have the numbers below.
        """
        transposed = zip(*self.records, strict=True)
        columns: dict[str, Sequence[Any]] = dict(zip(_ShardRecord._fields, transposed, strict=True))
        schema_of_shards = columns["schema"]
        columns["raw_hash"] = self._select_hashes(schema_of_shards, columns.pop("raw_hashes"), hash_names)
        columns["zip_hash"] = self._select_hashes(schema_of_shards, columns.pop("zip_hashes"), hash_names)

        arrays = {name: np.array(column) for name, column in columns.items()}
        arrays["schema"] = (first_schema + arrays["schema"]).astype(np.uint32)
        return arrays

    def _select_hashes(
        self, schema_of_shards: Sequence[int], hashes_of_shards: Sequence[tuple[bytes, ...]], hash_names: Sequence[str]
    ) -> list[bytes]:
        """Select one hash of each shard: that of the algorithm which `hash_names` has for the shard's schema.

        `schema_of_shards` are indices in `schemas`, and `hashes_of_shards` all hashes of each shard. Returns a hash for
        each shard; empty where the schema's algorithm is.
        """
        # A shard's hashes are in the order of its schema's algorithms, so the position depends on the schema alone.
        hash_positions = []
        for schema, hash_name in zip(self.schemas, hash_names, strict=True):
            hash_positions.append(schema["hashes"].index(hash_name) if hash_name else None)

        selected = []
        for schema_index, hashes in zip(schema_of_shards, hashes_of_shards, strict=True):
            position = hash_positions[schema_index]
            selected.append(b"" if position is None else hashes[position])
        return selected

    def digest(self, hash_names: Sequence[str]) -> str:
        """Return a digest of the samples, bytes and hashes of all shards, by which checkpoints recognize their data.

        The algorithm must never change, because checkpoints store the result. `hash_names` has the hash algorithm for
        each of `schemas`. The result begins with it, such as `xxh64:0f3a…`; with `mixed` if schemas have different
        ones; and with `sizes` if no shard has a hash.
        """
        # The numbers of all shards come first, then the hashes, for each group of consecutive shards with one schema.
        label = hash_names[0] if len(set(hash_names)) == 1 else "mixed"
        digest = hashlib.blake2b(digest_size=16)
        digest.update(np.array([record.samples for record in self.records], "<i8").tobytes())
        digest.update(np.array([record.raw_bytes for record in self.records], "<i8").tobytes())
        for schema_index, records in groupby(self.records, key=lambda record: record.schema):
            hash_name = hash_names[schema_index]
            if hash_name:
                position = self.schemas[schema_index]["hashes"].index(hash_name)
                hashes = [record.raw_hashes[position] for record in records]
            else:
                hashes = [b"" for _ in records]
            if label == "mixed":  # the digest has to tell hashes of different algorithms apart
                digest.update(f"{hash_name} of {len(hashes)}:".encode())
            digest.update(b"".join(hashes))
        return f"{label or 'sizes'}:{digest.hexdigest()}"

    def _read_object(self, record: dict[str, Any]) -> Any:
        """Convert a JSON object that describes a shard to a `_ShardRecord`. Other objects are returned unchanged.

        The JSON parser calls this for every object, innermost first. Adds the shard's schema to `self.schemas` if it is
        new. Raises DataError or ValueError for a description that is not valid.
        """
        if "raw_data" not in record:
            return record
        raw = record["raw_data"]
        compressed = record["zip_data"] or NO_FILE

        # Check sizes and names, since anybody may have written the index.
        _check_size("samples", record["samples"], MAX_SAMPLES_BITS)
        _check_size("raw_data.bytes", raw["bytes"], MAX_RAW_BITS)
        _check_size("zip_data.bytes", compressed["bytes"], MAX_ZIP_BITS)
        self._check_name(raw["basename"], RAW_NAME)
        if compressed is not NO_FILE:
            self._check_name(compressed["basename"], ZIP_NAME)

        # Bring the hashes of both files into the same order.
        raw_hashes = raw["hashes"]
        if not all(raw_hashes.values()):  # an empty string stands for no hash
            raw_hashes = {}
        if compressed["hashes"]:
            compressed_hashes = tuple([compressed["hashes"].get(name, "").encode() for name in raw_hashes])
        else:
            compressed_hashes = (b"",) * len(raw_hashes)
        return _ShardRecord(
            record["samples"],
            self._schema_index(record, [*raw_hashes]),
            self._prefix + raw["basename"].encode(),
            raw["bytes"],
            tuple(map(str.encode, raw_hashes.values())),
            self._prefix + compressed["basename"].encode() if compressed is not NO_FILE else b"",
            compressed["bytes"],
            compressed_hashes,
        )

    def _check_name(self, name: str, pattern: re.Pattern[str]) -> None:
        """Raise DataError unless the name of a shard's file matches `pattern`, which is RAW_NAME or ZIP_NAME."""
        if not pattern.fullmatch(name):
            raise self._error(
                f"names a shard {name[:MAX_QUOTED]!r}, expected a file beside it that ends in .mds, or in .mds and "
                "the name of a compression"
            )

    def _schema_index(self, record: dict[str, Any], hash_names: list[str]) -> int:
        """Return the index in `self.schemas` of a shard's schema, which is checked and added if it is new.

        `record` is the shard's JSON object, and `hash_names` are the algorithms of its hashes. Raises DataError for a
        format that is not supported, and for column types that could run code when they are read.
        """
        schema = {name: record[name] for name in SCHEMA_KEYS}
        schema["hashes"] = hash_names
        if schema in self.schemas:  # a linear search is fast enough, because there are few schemas
            return self.schemas.index(schema)
        if record["version"] != 2 or record["format"] != "mds":
            raise self._error(f"describes shards of {record['format']} version {record['version']}, not MDS version 2")
        for key in ("column_names", "column_encodings"):
            _check_texts(key, record[key])
        for name, encoding in zip(record["column_names"], record["column_encodings"], strict=True):
            if not is_mds_encoding_safe(encoding):
                raise DataError(f"{self.path}: column {name} is of type {encoding}, which may run code when it is read")
        self.schemas.append(schema)
        return len(self.schemas) - 1

    def _error(self, problem: str) -> DataError:
        """Return an error that says what is wrong with the index; `problem` follows its path."""
        return DataError(f"{self.path} {problem}; prepare the data again")


def _check_size(name: str, value: Any, bits: int) -> None:
    """Raise ValueError unless a value of an index is an integer of at least 0 that fits into `bits` bits."""
    if type(value) is not int or not 0 <= value < 2**bits:
        raise ValueError(f"{name} is {value!r}, expected a whole number of at least 0 and below 2^{bits}")


def _check_texts(name: str, value: Any) -> None:
    """Raise ValueError unless a value of an index is a list of texts."""
    is_list_of_texts = isinstance(value, list) and all(isinstance(element, str) for element in value)
    if not is_list_of_texts:
        raise ValueError(f"{name} is no list of texts")


def _speed_rank(hash_name: str) -> tuple[int, str]:
    """Return a sort key for hash algorithms: the fastest first, and those of unknown speed last, by name."""
    if hash_name in FASTEST_HASHES:
        return FASTEST_HASHES.index(hash_name), hash_name
    return len(FASTEST_HASHES), hash_name
