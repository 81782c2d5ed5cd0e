"""`index.json` of every stream -> one table of shards, parsed once on a node and mapped by all of its processes.

Owns reading `index.json` at any size and the digest of what it says. Leaves finding and downloading it to `streams.py`.

The index of 100 TB describes 1.5 million shards in 500 MB of JSON, of which Python would make gigabytes of objects. Its
records are all alike, so records of one length are compared with the first of them, byte by byte, in columns; what
differs elsewhere than in a name, a hash or a number is read one at a time.
"""

import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from streaming.base.format.mds.encodings import is_mds_encoding_safe
from streaming.base.hashing import is_hash

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import open_regular

Column = NDArray[Any]

_CHUNK_BYTES = 1 << 20
"""Fits into a core's cache, which is what this takes its speed from."""
_FASTEST_HASHES = ("xxh3_64", "xxh3_128", "xxh128", "xxh64", "xxh32")
_OPENING, _SEPARATOR = b'{"shards": [', b", "
_DIGITS = b"0123456789"
_PLAIN = bytes(byte for byte in range(0x20, 0x7F) if byte not in b'"\\')


@dataclass(frozen=True)
class StreamTable:
    """One stream's part of the table, apart from the columns."""

    num_shards: int
    content: str
    """Digest of what the shards hold, in their order: samples, bytes and hashes, not names or compression."""


class ShardTable:
    """Columns with a row for each shard: samples, ends, kind, raw_name, raw_bytes, raw_hash, and the same with zip.

    `ends` counts samples up to and including the shard. `zip_name` is empty where a shard is not compressed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        content = np.memmap(path, np.uint8, "r")
        size = int(content[:8].view(np.int64)[0])
        header = json.loads(content[8:size].tobytes())
        self.streams = [StreamTable(**stream) for stream in header["streams"]]
        self.kinds: list[dict[str, Any]] = header["kinds"]
        """Facts that many shards share: columns, encodings, compression and `hash_name`. The latter is the algorithm of
        `raw_hash` and `zip_hash`, empty where there is none."""
        self.columns: dict[str, Column] = {
            name: np.ndarray(length, np.dtype(dtype), content, offset)
            for name, (dtype, length, offset) in header["columns"].items()
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardTable, (self.path,)

    def __len__(self) -> int:
        return len(self.columns["samples"])

    @property
    def begins(self) -> list[int]:
        """The number of each stream's first shard."""
        return np.cumsum([0, *(stream.num_shards for stream in self.streams)])[:-1].tolist()

    def of_stream(self, stream: int, column: str) -> Column:
        begin = self.begins[stream]
        return self.columns[column][begin : begin + self.streams[stream].num_shards]

    def text(self, column: str, shard: int) -> str:
        return self.columns[column][shard].decode()


def write_table(
    path: Path, indexes: Sequence[Path], hash_names: Sequence[str | None], *, allow_unhashed_shards: bool = False
) -> None:
    """Parse the index of each stream and write the table of them all. Raises DataError for what is wrong with one.

    `hash_names` are the algorithms asked for. None takes the fastest that all shards of an index have, else the fastest
    of each shard. A shard without a hash beside others with one is refused unless `allow_unhashed_shards`.
    """
    parts, streams, kinds = [], [], {}
    for index, hash_name in zip(indexes, hash_names, strict=True):
        rows = _Rows(index)
        parts.append(rows.columns(kinds, hash_name, allow_unhashed_shards=allow_unhashed_shards))
        streams.append(rows.stream)
    columns = {name: _concatenate([part.pop(name) for part in parts]) for name in list(parts[0])}
    columns["ends"] = np.cumsum(columns["samples"])

    shapes, offset = {}, 0
    for name, column in columns.items():
        shapes[name] = (column.dtype.str, len(column), offset)
        offset += -(-column.nbytes // 64) * 64

    def header(begin: int) -> bytes:
        places = {name: (dtype, length, begin + at) for name, (dtype, length, at) in shapes.items()}
        content = {"streams": [asdict(stream) for stream in streams], "kinds": list(kinds.values()), "columns": places}
        return json.dumps(content).encode()

    begin = -(-(len(header(0)) + 20 * len(shapes) + 8) // 64) * 64
    with open(path, "xb") as file:
        file.write(np.int64(begin).tobytes() + header(begin).ljust(begin - 8))
        for name, column in columns.items():
            file.seek(begin + shapes[name][2])
            file.write(column.data)
        file.truncate(begin + offset)


class _Rows:
    """The records of one index, gathered in columns."""

    def __init__(self, index: Path) -> None:
        self.index = index
        self.parts: list[tuple[dict[str, Any], dict[str, Column]]] = []
        """What the records of a part share, and the columns that differ, such as `raw_data.bytes`."""
        try:
            self._read()
        except DataError:
            raise
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._wrong(f"is not an index of MDS version 2 ({error!r})") from error
        if not self.parts:
            raise self._wrong("lists no shards of MDS version 2")

    def _wrong(self, what: str) -> DataError:
        return DataError(f"{self.index} {what}; prepare the data again")

    def columns(
        self, kinds: dict[str, dict[str, Any]], hash_name: str | None, *, allow_unhashed_shards: bool
    ) -> dict[str, Column]:
        """The table's columns; new kinds are added to `kinds`."""
        names = [
            sorted(filter(is_hash, record["raw_data"]["hashes"]), key=_hash_rank) if _has_hashes(columns) else []
            for record, columns in self.parts
        ]
        common = [name for name in names[0] if all(name in others for others in names)]
        is_unhashed = [not others for others in names]
        if any(is_unhashed) and not all(is_unhashed) and not allow_unhashed_shards:
            shard = self.parts[is_unhashed.index(True)][1]["raw_data.basename"][0].decode()
            raise DataError(
                f"{self.index}: {shard} has no hash, and other shards have one, so that damage to it would pass "
                "unseen; write the shards again with hashes=[...], or load it all the same: allow_unhashed_shards: true"
            )
        lacking = [others for others in names if others and hash_name not in others]
        if hash_name is not None and (lacking or all(is_unhashed)):
            raise DataError(
                f"validate_hash is {hash_name}, but {self.index} has "
                f"{', '.join(common) or ', '.join(lacking[0] if lacking else []) or 'no hashes'}; "
                "leave validate_hash out, or name one that is there"
            )
        checked_by = [hash_name or (common or others)[0] if others else "" for others in names]
        self.stream = StreamTable(
            num_shards=sum(len(columns["samples"]) for _, columns in self.parts),
            content=self._content([(common or others)[0] if others else "" for others in names]),
        )
        gathered: dict[str, list[Column]] = {}
        for (record, columns), hash_name in zip(self.parts, checked_by, strict=True):
            kind = {key: record[key] for key in ("column_encodings", "column_names", "column_sizes", "compression")}
            kind["hash_name"] = hash_name
            key = json.dumps(kind)
            kinds.setdefault(key, kind)
            num_rows, no_text = len(columns["samples"]), np.zeros(len(columns["samples"]), "S1")
            made = {
                "samples": columns["samples"],
                "kind": np.full(num_rows, list(kinds).index(key), np.uint32),
            }
            for part in ("raw", "zip"):
                made[f"{part}_name"] = columns.get(f"{part}_data.basename", no_text)
                made[f"{part}_bytes"] = columns.get(f"{part}_data.bytes", np.zeros(num_rows, np.int64))
                made[f"{part}_hash"] = columns.get(f"{part}_data.hashes.{hash_name}", no_text)
            for name, column in made.items():
                gathered.setdefault(name, []).append(column)
        found = {name: _concatenate(columns) for name, columns in gathered.items()}
        if repeated := _find_repeated(found["raw_name"]):
            raise self._wrong(f"lists {repeated.decode()} twice, so that its samples would be read twice")
        return found

    def _content(self, hash_names: Sequence[str]) -> str:
        """`hash_names` has one for each part. Shards that have none count with their sizes."""
        label = hash_names[0] if len(set(hash_names)) == 1 else "mixed"
        digest = hashlib.blake2b(digest_size=16)
        for name in ("samples", "raw_data.bytes"):
            for _, columns in self.parts:
                digest.update(columns[name].astype("<i8").tobytes())
        for (_, columns), hash_name in zip(self.parts, hash_names, strict=True):
            if label == "mixed":  # the algorithm is part of what a shard's hash says
                digest.update(f"{hash_name} of {len(columns['samples'])}:".encode())
            if hash_name:
                digest.update(_joined(columns[f"raw_data.hashes.{hash_name}"]))
        return f"{label or 'sizes'}:{digest.hexdigest()}"

    def _read(self) -> None:
        with open(self.index, "rb", opener=open_regular) as file:
            if file.read(len(_OPENING)) == _OPENING and self._read_regular(file):
                return
            file.seek(0)
            content = json.load(file)
        if not isinstance(content, dict) or content.get("version") != 2:
            raise self._wrong("lists no shards of MDS version 2")
        self.parts = []
        self._add(content["shards"])

    def _read_regular(self, file: Any) -> bool:
        """Read an index as MDSWriter lays it out, in chunks; False if this one is laid out otherwise."""
        rest = b""
        while chunk := file.read(_CHUNK_BYTES):
            raw = rest + chunk
            ends = [match.end() for match in re.finditer(rb"\}\], \"version\": 2\}\s*\Z", raw[-64:])]
            cut = raw.rfind(b'}, {"column_encodings": ') + 1
            if ends and file.tell() == os.fstat(file.fileno()).st_size:
                cut, rest = raw.rfind(b'], "version": 2}'), b""
            elif cut == 0:
                rest = raw  # no whole record yet
                continue
            else:
                rest = raw[cut + len(_SEPARATOR) :]
            if not self._read_chunk(np.frombuffer(raw, np.uint8)[:cut], raw):
                return False
        return rest == b"" and bool(self.parts)

    def _read_chunk(self, bytes_n: NDArray[np.uint8], raw: bytes) -> bool:
        """Whole records with a separator between each two."""
        first, size = json.JSONDecoder().raw_decode(raw[: 1 << 16].decode("latin-1"))
        if not isinstance(first, dict):
            return False
        # Mostly all have one length, so that nobody has to look for where each begins.
        stride = size + len(_SEPARATOR)
        if len(bytes_n) >= size and (len(bytes_n) - size) % stride == 0:
            window_nb = np.lib.stride_tricks.sliding_window_view(bytes_n, size)[::stride]
            separators = np.stack([bytes_n[at::stride] for at in range(size, stride)])
            if _are_separators(separators) and self._read_columns(window_nb):
                return True
        braces = np.flatnonzero(bytes_n == ord("{"))
        braces_of_record = json.dumps(first).count("{")
        if len(braces) % braces_of_record:
            return False
        begins = braces[::braces_of_record]
        sizes = np.diff(begins, append=len(bytes_n) + len(_SEPARATOR)) - len(_SEPARATOR)
        separators = np.stack([bytes_n[begins[1:] - 2], bytes_n[begins[1:] - 1]])
        if begins[0] != 0 or not _are_separators(separators):
            return False
        # Neighbours of one length are read together, so that the shards stay in their order.
        changes = np.flatnonzero(np.diff(sizes)) + 1
        if len(changes) > 64 + len(begins) // 64:
            return False
        for begin, end in zip([0, *changes], [*changes, len(begins)], strict=True):
            window_nb = np.lib.stride_tricks.sliding_window_view(bytes_n, int(sizes[begin]))
            self._read_alike(window_nb[begins[begin:end]])
        return True

    def _read_alike(self, rows_nb: NDArray[np.uint8]) -> None:
        """Records of one length [n, b]."""
        if not self._read_columns(rows_nb):
            self._add([json.loads(row_b.tobytes()) for row_b in rows_nb])

    def _read_columns(self, rows_nb: NDArray[np.uint8]) -> bool:
        """Records of one length [n, b] as columns; False if they differ elsewhere than in names, hashes and numbers."""
        text = rows_nb[0].tobytes().decode("latin-1")
        record = json.loads(text.encode("latin-1"))
        columns: dict[str, Column] = {}
        alike_nb = rows_nb.copy()
        for name, begin, end in _fields(text):
            if begin == end:
                return False  # numpy has no view of no bytes
            field_nb, first = np.ascontiguousarray(rows_nb[:, begin:end]), text[begin:end]
            alike_nb[:, begin:end] = field_nb[0]
            is_text = text[begin - 1] == '"'
            columns[name] = field_nb.view(f"S{end - begin}").ravel()
            if field_nb.tobytes() == first.encode("latin-1") * len(rows_nb):  # sizes, mostly
                columns[name] = columns[name] if is_text else np.full(len(rows_nb), int(first))
            elif field_nb.tobytes().translate(None, _PLAIN if is_text else _DIGITS):
                return False
            elif not is_text:
                columns[name] = columns[name].astype(np.int64)
        is_alike = columns.keys() == _flatten(record).keys()  # escapes in a name hide it
        if not is_alike or alike_nb.tobytes() != rows_nb[0].tobytes() * len(rows_nb):
            return False
        self._keep(record, columns)
        return True

    def _add(self, records: Sequence[dict[str, Any]]) -> None:
        """Records one at a time: neighbours of one kind become a part."""
        alike: list[dict[str, Any]] = []
        for record in [*records, None]:
            if alike and (record is None or _shape_of(record) != _shape_of(alike[0])):
                flat = [_flatten(each) for each in alike]
                columns = {
                    name: np.array([row[name] for row in flat], np.int64 if isinstance(value, int) else np.bytes_)
                    for name, value in flat[0].items()
                }
                self._keep(alike[0], columns)
                alike = []
            if record is not None:
                alike.append(record)

    def _keep(self, record: dict[str, Any], columns: dict[str, Column]) -> None:
        _shape_of(record)  # which no record can lack
        if record["version"] != 2 or record["format"] != "mds":
            raise self._wrong(f"describes shards of {record['format']} version {record['version']}, not MDS version 2")
        for name, encoding in zip(record["column_names"], record["column_encodings"], strict=True):
            if not is_mds_encoding_safe(encoding):
                raise DataError(
                    f"{self.index}: column {name} is of type {encoding}, which may run code when it is read"
                )
        for name in ("raw_data.basename", "zip_data.basename"):
            if name not in columns:
                continue
            first_n = columns[name].view(np.uint8).reshape(len(columns[name]), -1)[:, 0]
            if b".." in _joined(columns[name]) or (first_n == ord("/")).any():
                raise self._wrong("names shards outside of its own folder")
        self.parts.append((record, columns))


def _has_hashes(columns: dict[str, Column]) -> bool:
    """Whether the hashes of a part are there to compare with; an empty text is none."""
    return all((column != b"").all() for name, column in columns.items() if name.startswith("raw_data.hashes."))


def _are_separators(separators: NDArray[np.uint8]) -> bool:
    """Their first bytes, their second bytes."""
    return bool((separators == np.frombuffer(_SEPARATOR, np.uint8)[:, None]).all())


def _fields(text: str) -> Iterator[tuple[str, int, int]]:
    """Where in a record's text its names, hashes and numbers stand."""
    place, depth = "", 0
    for match in re.finditer(r'"(raw_data|zip_data|hashes)": [{\[]|"(\w+)": ("[^"\\]*"|\d+)|[{}\]]', text):
        if match[1]:
            depth += match[0].endswith("{")
            place = f"{match[1]}." if match[1] != "hashes" else f"{place}hashes." if match[0].endswith("{") else place
        elif match[2] is None:
            if match[0] == "}":
                place = place.removesuffix("hashes.") if place.endswith("hashes.") else ""
        elif match[2] in ("basename", "bytes", "samples") or place.endswith("hashes."):
            quote = match[3].startswith('"')
            yield place + match[2], match.start(3) + quote, match.end(3) - quote


def _flatten(record: dict[str, Any]) -> dict[str, int | bytes]:
    """As `_fields` names them. Raises ValueError for a number that is none."""
    flat: dict[str, int | bytes] = {"samples": record["samples"]}
    for part in ("raw_data", "zip_data"):
        if record[part] or part == "raw_data":
            flat[f"{part}.basename"] = record[part]["basename"].encode()
            flat[f"{part}.bytes"] = record[part]["bytes"]
            flat |= {f"{part}.hashes.{name}": value.encode() for name, value in record[part]["hashes"].items()}
    for name, value in flat.items():
        if not (isinstance(value, bytes) or (type(value) is int and 0 <= value < 2**62)):
            raise ValueError(f"{name} is {value!r}, expected a whole number of at least 0")
    return flat


def _shape_of(record: dict[str, Any]) -> tuple[Any, ...]:
    kind = [
        record[key] for key in ("column_encodings", "column_names", "column_sizes", "compression", "format", "version")
    ]
    return kind, sorted(_flatten(record))


def _concatenate(columns: Sequence[Column]) -> Column:
    """One alone is not copied."""
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


def _find_repeated(names: Column) -> bytes:
    """A name that stands there twice; empty if none does. Compares 64-bit mixtures first: names take ten times as long
    to sort."""
    width = -(-names.dtype.itemsize // 8)
    mixed_n = np.zeros(len(names), np.uint64)
    for word_n in names.astype(f"S{8 * width}").view(np.uint64).reshape(-1, width).T:
        mixed_n = (mixed_n ^ word_n) * np.uint64(0x9E3779B97F4A7C15)
        mixed_n ^= mixed_n >> np.uint64(29)
    mixed_n.sort()
    if not (mixed_n[1:] == mixed_n[:-1]).any():
        return b""
    return next((name for name, count in Counter(names.tolist()).items() if count > 1), b"")


def _joined(column: Column) -> bytes:
    return column.tobytes()


def _hash_rank(name: str) -> tuple[int, str]:
    return _FASTEST_HASHES.index(name) if name in _FASTEST_HASHES else len(_FASTEST_HASHES), name
