"""Shard files: safetensors, written and read in one pass over their bytes, which hashes them block by block. No torch.

The last tensor, HASHES, has the hashes of all blocks before it: a file is streamed from its first byte to its last, and
stays plain safetensors. The manifest has one digest for header and hashes, which a reader checks first.
"""

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import xxhash

from llmfoundry_lite.checkpoint.folders import Buffer, Folder, Source, T, retry_on_damage, unreadable
from llmfoundry_lite.checkpoint.manifest import HASH_BYTES, ITEM_BYTES, FileRecord, Manifest
from llmfoundry_lite.errors import DamagedCheckpointError
from llmfoundry_lite.ranks.codec import write_json

ALIGNMENT = 4096
"""Data starts at a multiple of it, and each slice at one of its item size, so that a file can be mapped."""
BLOCK_BYTES = 1 << 20
CHUNK_BYTES = 8 << 20
"""Bytes that one thread writes or reads at a time."""
NUM_THREADS = 4
MAX_HEADER_BYTES = 100_000_000
"""The limit of safetensors."""
HASHES = "__hashes__"


class Entry(NamedTuple):
    """A slice in a file's header."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


class Stored(NamedTuple):
    """A slice as its file's header has it, from byte `begin` of the file to `end`."""

    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Want(NamedTuple):
    """A byte range of a file and where it should go."""

    begin: int
    end: int
    target: np.ndarray[Any, Any]
    """uint8, end - begin of them."""
    tensor: str
    """Its name, for messages."""


Run = tuple[int, int]
"""Begin and end of whole blocks that are read at once."""


# ------------------------------------------------------------------------------------------------------- writing


def file_order(entries: Iterable[Entry]) -> list[Entry]:
    """Put wide items first: each slice then starts at a multiple of its item size without holes, which are not
    allowed."""
    return sorted(entries, key=lambda entry: (-ITEM_BYTES[entry.dtype], entry.key))


def build_header(entries: Sequence[Entry], metadata: dict[str, str], *, block_bytes: int = 0) -> bytes:
    """Return the first bytes of a file that has `entries` in this order. With `block_bytes` the file ends with the
    hashes of its blocks."""
    ends = [0, *accumulate(entry.num_bytes for entry in entries)]
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    for entry, (begin, end) in zip(entries, pairwise(ends), strict=True):
        header[entry.key] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [begin, end]}
    start, is_settled = 8, False
    text = b""
    while not is_settled:  # how long the table is depends on how long the header is that says so
        if block_bytes:
            table = HASH_BYTES * -(-(start + ends[-1]) // block_bytes)
            header[HASHES] = {"dtype": "U8", "shape": [table], "data_offsets": [ends[-1], ends[-1] + table]}
        text = write_json(header)
        text += b" " * (-(8 + len(text)) % ALIGNMENT)
        is_settled = not block_bytes or start == 8 + len(text)
        start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text


def write_shard(
    folder: Folder,
    name: str,
    header: bytes,
    pieces: Sequence[Buffer],
    *,
    num_threads: int = NUM_THREADS,
    block_bytes: int = BLOCK_BYTES,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> FileRecord:
    """Hash and write, in one pass, a header that `build_header` made for these blocks, `pieces` (uint8) and the hashes.
    Durable on return. Whatever goes wrong in a thread is raised here, and then the file is worthless.
    """
    views = [memoryview(piece).cast("B") for piece in (header, *pieces) if len(piece)]
    starts = [0, *accumulate(len(view) for view in views)]
    size = starts[-1]
    hashes = [b""] * -(-size // block_bytes)
    sink = folder.sink(name, size + HASH_BYTES * len(hashes))
    chunk_bytes = _chunk_bytes(block_bytes)

    def write(begin: int) -> None:
        end = min(begin + chunk_bytes, size)
        for block in range(begin // block_bytes, -(-end // block_bytes)):
            stop = min((block + 1) * block_bytes, end)
            hashes[block] = hash_pieces(_cut(views, starts, block * block_bytes, stop))
        sink.write_at(begin, _cut(views, starts, begin, end))
        if begin <= size // 2 < end:
            on_phase("half a shard")

    try:
        _for_each(write, range(0, size, chunk_bytes), num_threads if sink.any_order else 1)
        table = b"".join(hashes)
        sink.write_at(size, [table])
    except BaseException:
        sink.abandon()
        raise
    sink.close()
    on_phase("shard synced")
    return FileRecord(
        name=name,
        num_bytes=size + len(table),
        block_bytes=block_bytes,
        header_bytes=len(header),
        digest=hash_pieces([header, table]).hex(),
    )


def hash_blocks(content: bytes, block_bytes: int) -> bytes:
    return b"".join(hash_pieces([content[i : i + block_bytes]]) for i in range(0, len(content), block_bytes))


def hash_pieces(pieces: Sequence[Buffer]) -> bytes:
    if len(pieces) == 1:
        return xxhash.xxh3_128_digest(pieces[0])
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
    return state.digest()


# ------------------------------------------------------------------------------------------------------- reading


class Shard:
    """A file open for reading, of which header and hashes are known to be what was written."""

    def __init__(self, folder: Folder, file: FileRecord, source: Source):
        self.folder, self.file, self.source = folder, file, source
        self.hashes = bytes.fromhex(file.block_hashes)
        self.contents: dict[str, Stored] = {}
        if file.digest:
            self.hashes, self.contents = self._look(self._read_header)
        elif file.name.endswith(".safetensors"):  # of format 1
            self.contents = self._read_hashed_header()

    def _read_header(self, source: Source) -> tuple[bytes, dict[str, Stored]]:
        file = self.file
        header = _read_bytes(source, 0, file.header_bytes)
        hashes = _read_bytes(source, file.hashed_bytes, file.num_bytes - file.hashed_bytes)
        if hash_pieces([header, hashes]).hex() != file.digest:
            raise self.damage("its header or its hashes are not what was written")
        return hashes, parse_header(header, self)

    def _read_hashed_header(self) -> dict[str, Stored]:
        length = self._look(lambda source: int.from_bytes(_read_bytes(source, 0, 8), "little"))
        if not 2 <= length <= min(MAX_HEADER_BYTES, self.file.num_bytes - 8):
            raise self.damage(f"its header claims {length:,} bytes")
        header = np.empty(8 + length, np.uint8)
        self.read([Want(0, 8 + length, header, "header")])
        return parse_header(header.tobytes(), self)

    def damage(self, text: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{self.folder.url}/{self.file.name}: {text}", self.file.name)

    def _look(self, read: Callable[[Source], T]) -> T:
        """Return what `read` finds; with a source of its own if it finds damage, which must be there twice."""

        def once(bypass_cache: bool) -> T:
            source = _open_once(self.folder, self.file, bypass_cache=True) if bypass_cache else self.source
            try:
                return read(source)
            except EOFError as error:
                raise self.damage(str(error)) from None
            except OSError as error:
                raise unreadable(self.folder, self.file.name, error) from error
            finally:
                if bypass_cache:
                    source.close()

        return retry_on_damage(once)

    def find(self, key: str, dtype: str, shape: Sequence[int]) -> Stored:
        """Return where a slice lies. Raises DamagedCheckpointError when the file has it otherwise, or not."""
        stored = self.contents.get(key)
        if stored is None or stored.dtype != dtype or stored.shape != tuple(shape):
            found = "missing" if stored is None else f"{stored.dtype} {list(stored.shape)}"
            raise self.damage(f"{key} is {found} in its header and {dtype} {list(shape)} in the manifest")
        return stored

    def read(self, wants: Sequence[Want], *, num_threads: int = NUM_THREADS) -> None:
        """Fill each target; verify every block touched, once, in the same pass.

        Raises UnsoundCheckpointError naming the file and a tensor. Targets are then undefined.
        """
        wants = sorted((want for want in wants if want.end > want.begin), key=lambda want: want.begin)
        if any(a.end > b.begin for a, b in pairwise(wants)):
            raise self.damage("slices share bytes")
        begins, ends = [want.begin for want in wants], [want.end for want in wants]

        def read(run: Run) -> None:
            inside = wants[bisect_right(ends, run[0]) : bisect_left(begins, run[1])]
            self._read_run(run, inside, [(want.begin, want.end, want.tensor) for want in inside])

        _for_each(read, _runs(self.file, wants), num_threads)

    def verify(self, on_read: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Hash all blocks. Raises UnsoundCheckpointError naming the file and a tensor in the damaged block."""
        named = [(stored.begin, stored.end, key.partition("@")[0]) for key, stored in self.contents.items()]

        def read(run: Run) -> None:
            self._read_run(run, (), named)
            on_read(run[1] - run[0])

        _for_each(read, _cut_run(0, self.file.hashed_bytes, self.file.block_bytes), NUM_THREADS)

    def _read_run(self, run: Run, wants: Sequence[Want], named: Sequence[tuple[int, int, str]]) -> None:
        """Read straight into the targets; into scratch memory what no one wants but must be hashed."""
        pieces: list[Buffer] = []
        first, last = run
        position = first
        for want in wants:
            start, stop = max(want.begin, position), min(want.end, last)
            if start > position:
                pieces.append(np.empty(start - position, np.uint8))
            pieces.append(want.target[start - want.begin : stop - want.begin])
            position = stop
        if position < last:
            pieces.append(np.empty(last - position, np.uint8))

        def read(source: Source) -> None:
            source.read_into(first, pieces)
            self._check_blocks(run, pieces, named)

        self._look(read)

    def _check_blocks(self, run: Run, pieces: Sequence[Buffer], named: Sequence[tuple[int, int, str]]) -> None:
        block_bytes = self.file.block_bytes
        starts = [run[0], *(run[0] + n for n in accumulate(len(piece) for piece in pieces))]
        for first in range(*run, block_bytes):
            last = min(first + block_bytes, run[1])
            at = first // block_bytes * HASH_BYTES
            if hash_pieces(_cut(pieces, starts, first, last)) != self.hashes[at : at + HASH_BYTES]:
                hit = sorted({name for begin, end, name in named if begin < last and end > first})
                more = f" and {len(hit) - 1} more" if len(hit) > 1 else ""
                inside = f" (in {hit[0]}{more})" if hit else ""
                raise self.damage(f"bytes {first:,} to {last:,} are not what was written{inside}")


@contextmanager
def open_shard(folder: Folder, file: FileRecord) -> Iterator[Shard]:
    """Raises UnsoundCheckpointError for a file that is gone, has another size, or another header or other hashes."""
    source = retry_on_damage(lambda bypass_cache: _open_once(folder, file, bypass_cache))
    try:
        yield Shard(folder, file, source)
    finally:
        source.close()


def read_verified(folder: Folder, file: FileRecord) -> bytes:
    """Return the content of a file that is no shard. Raises UnsoundCheckpointError."""
    with open_shard(folder, file) as opened:  # the size first: the memory for one that lies may not be there
        content = np.empty(file.num_bytes, np.uint8)
        opened.read([Want(0, file.num_bytes, content, file.name)])
    return content.tobytes()


def verify_file(folder: Folder, file: FileRecord, on_read: Callable[[int], None] = lambda num_bytes: None) -> None:
    with open_shard(folder, file) as opened:
        opened.verify(on_read)


# ------------------------------------------------------------------------------------------------------- headers


def parse_header(raw: bytes, shard: Shard) -> dict[str, Stored]:
    """Return the slices of a safetensors header, without the hashes. Raises DamagedCheckpointError unless they lie one
    after the other, each as long as its shape says."""
    try:
        if int.from_bytes(raw[:8], "little") != len(raw) - 8:
            raise ValueError
        header = json.loads(raw[8:])
        header.pop("__metadata__", None)
        header.pop(HASHES, None)
        contents = {
            key: Stored(str(entry["dtype"]), tuple(entry["shape"]), *(len(raw) + int(n) for n in entry["data_offsets"]))
            for key, entry in header.items()
        }
        end = len(raw)
        for stored in sorted(contents.values(), key=lambda stored: (stored.begin, stored.end)):
            size = math.prod(stored.shape) * ITEM_BYTES[stored.dtype]
            if stored.begin != end or stored.end != end + size:
                raise ValueError
            end = stored.end
        if end > shard.file.hashed_bytes:
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise shard.damage("its header is not that of a safetensors file") from None
    return contents


def check_headers(folder: Folder, manifest: Manifest) -> None:
    """Raises UnsoundCheckpointError unless all headers together have every slice of every tensor, and nothing else."""
    seen = dict.fromkeys(manifest.tensors, 0)
    for index, file in enumerate(manifest.files):
        with open_shard(folder, file) as shard:
            for key, stored in shard.contents.items():
                name, _, offset = key.rpartition("@")
                record = manifest.tensors.get(name)
                cell = None if record is None else record.layout.at(record.shape, _numbers(offset))
                found = (index, stored.shape, stored.dtype)
                if record is None or cell is None or (cell.file, cell.shape, record.dtype) != found:
                    raise shard.damage(f"{key} is {stored.dtype} {list(stored.shape)} in its header alone")
                seen[name] += 1
    for name, count in seen.items():
        if count != manifest.tensors[name].num_slices:
            raise DamagedCheckpointError(
                f"{folder.url}: {name} has {manifest.tensors[name].num_slices} slices in the manifest and {count} in "
                "the files' headers"
            )


# ------------------------------------------------------------------------------------------------------ the insides


def _cut(views: Sequence[Buffer], starts: Sequence[int], begin: int, end: int) -> list[Buffer]:
    """Return bytes begin to end of all views laid one after the other."""
    result = []
    index = bisect_right(starts, begin) - 1
    while begin < end:
        stop = min(end, starts[index + 1])
        result.append(views[index][begin - starts[index] : stop - starts[index]])
        begin, index = stop, index + 1
    return result


def _runs(file: FileRecord, wants: Sequence[Want]) -> list[Run]:
    """Return the blocks that sorted `wants` reach into, in pieces that are read at once."""
    spans: list[tuple[int, int]] = []
    for want in wants:
        begin = want.begin // file.block_bytes * file.block_bytes
        end = min(-(-want.end // file.block_bytes) * file.block_bytes, file.hashed_bytes)
        if spans and begin <= spans[-1][1]:
            before = spans.pop()
            begin, end = before[0], max(end, before[1])
        spans.append((begin, end))
    return [run for begin, end in spans for run in _cut_run(begin, end, file.block_bytes)]


def _cut_run(begin: int, end: int, block_bytes: int) -> list[Run]:
    step = _chunk_bytes(block_bytes)
    return [(at, min(at + step, end)) for at in range(begin, end, step)]


def _chunk_bytes(block_bytes: int) -> int:
    return max(block_bytes, CHUNK_BYTES // block_bytes * block_bytes)


def _open_once(folder: Folder, file: FileRecord, bypass_cache: bool) -> Source:
    try:
        source = folder.source(file.name, bypass_cache=bypass_cache)
    except OSError as error:
        raise unreadable(folder, file.name, error) from error
    if source.num_bytes != file.num_bytes:
        source.close()
        sizes = f"{source.num_bytes:,} bytes, expected {file.num_bytes:,}"
        raise DamagedCheckpointError(f"{folder.url}/{file.name}: has {sizes}", file.name)
    return source


def _read_bytes(source: Source, offset: int, size: int) -> bytes:
    buffer = bytearray(size)
    source.read_into(offset, [memoryview(buffer)])
    return bytes(buffer)


def _numbers(text: str) -> list[int]:
    return [int(n) if n.isdecimal() else -1 for n in text.split(",")] if text else []


def _for_each(work: Callable[[Any], None], items: Sequence[Any], num_threads: int) -> None:
    """Work in several threads; the first failure is raised here once all have stopped, and the rest is cancelled."""
    if min(num_threads, len(items)) <= 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(min(num_threads, len(items)), thread_name_prefix="checkpoint") as pool:
        list(pool.map(work, items))
