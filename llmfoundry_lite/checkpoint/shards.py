"""Shard files: safetensors, written and read in one pass over their bytes, which hashes them block by block.

Owns the layout of a file and the hashing; what the bytes mean is `save`'s, which tensors it has is the manifest's.
Data starts at a multiple of 4096 and each slice at a multiple of its item size, so that a file can be mapped. No torch.

The hashes of a shard's blocks are its own last tensor, HASHES: 16 bytes for each block of all bytes before it. So a
file can be streamed from its first byte to its last, needs no second file, and stays plain safetensors. The manifest
has one digest for header and table together. A reader fetches these two, checks them, and can then trust the byte
ranges of the one and the hashes of the other.
"""

import json
import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import xxhash

from llmfoundry_lite.checkpoint.folders import Buffer, Folder, Source, retry_on_damage, unreadable
from llmfoundry_lite.checkpoint.manifest import ALGORITHM, HASH_BYTES, ITEM_BYTES, FileRecord, Manifest, Stored
from llmfoundry_lite.errors import DamagedCheckpointError
from llmfoundry_lite.ranks.codec import write_json

BLOCK_BYTES = 1 << 20
CHUNK_BYTES = 8 << 20
"""What one thread writes or reads at a time."""
ALIGNMENT = 4096
MAX_HEADER_BYTES = 100_000_000
"""As safetensors has it."""
HASHES = "__hashes__"
T = TypeVar("T")


class Entry(NamedTuple):
    """A slice in a file's header."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int


class Want(NamedTuple):
    """A byte range of a file and where it should go."""

    begin: int
    end: int
    target: np.ndarray[Any, Any]
    """uint8, end - begin of them."""
    tensor: str
    """For messages."""


class Run(NamedTuple):
    """A byte range to read at once, and the wants that reach into it."""

    begin: int
    end: int
    wants: list[Want]


class Span(NamedTuple):
    """A byte range of a file and what lies there, for messages."""

    begin: int
    end: int
    tensor: str


def file_order(entries: Iterable[Entry]) -> list[Entry]:
    """Wide items first: each slice then starts at a multiple of its item size without holes, which are not allowed."""
    return sorted(entries, key=lambda entry: (-ITEM_BYTES[entry.dtype], entry.key))


def build_header(
    entries: Sequence[Entry], metadata: dict[str, str], *, block_bytes: int = 0
) -> tuple[bytes, list[tuple[int, int]]]:
    """The file's first bytes, and where in the file each of `entries` (in `file_order`) lies.

    With `block_bytes` the file ends with the hashes of its blocks.
    """
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
    return len(text).to_bytes(8, "little") + text, [(start + begin, start + end) for begin, end in pairwise(ends)]


def write_shard(
    folder: Folder,
    name: str,
    header: bytes,
    pieces: Sequence[Buffer],
    *,
    num_threads: int = 4,
    block_bytes: int = BLOCK_BYTES,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> FileRecord:
    """Write a header that `build_header` made for these blocks, `pieces` (uint8) and the hashes. Durable on return.

    Whatever goes wrong in a thread is raised here, and then the file is worthless.
    """
    size, table = _write(folder, name, [header, *pieces], num_threads, block_bytes, on_phase, with_table=True)
    return FileRecord(
        name=name,
        num_bytes=size + len(table),
        algorithm=ALGORITHM,
        block_bytes=block_bytes,
        header_bytes=len(header),
        digest=hash_pieces([header, table]).hex(),
    )


def write_file(folder: Folder, name: str, content: Buffer, *, block_bytes: int = BLOCK_BYTES) -> FileRecord:
    """A file that is no shard; its hashes are in the record. Durable on return."""
    size, table = _write(folder, name, [content], 1, block_bytes, lambda phase: None, with_table=False)
    return FileRecord(name=name, num_bytes=size, algorithm=ALGORITHM, block_bytes=block_bytes, block_hashes=table.hex())


def _write(
    folder: Folder,
    name: str,
    pieces: Sequence[Buffer],
    num_threads: int,
    block_bytes: int,
    on_phase: Callable[[str], None],
    *,
    with_table: bool,
) -> tuple[int, bytes]:
    """Hash and write in the same pass. Returns how many bytes there are before the table, and the table."""
    views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
    starts = [0, *accumulate(len(view) for view in views)]
    size = starts[-1]
    hashes = [b""] * -(-size // block_bytes)
    sink = folder.sink(name, size + HASH_BYTES * len(hashes))
    has_failed = threading.Event()

    def write(begin: int) -> None:
        if has_failed.is_set():
            return
        try:
            end = min(begin + chunk_bytes, size)
            for block in range(begin // block_bytes, -(-end // block_bytes)):
                stop = min((block + 1) * block_bytes, end)
                hashes[block] = hash_pieces(_cut(views, starts, block * block_bytes, stop))
            sink.write_at(begin, _cut(views, starts, begin, end))
            if begin <= size // 2 < end:
                on_phase("half a shard")
        except BaseException:
            has_failed.set()
            raise

    chunk_bytes = max(block_bytes, CHUNK_BYTES // block_bytes * block_bytes)
    try:
        _for_each(write, range(0, size, chunk_bytes), num_threads if sink.any_order else 1)
        table = b"".join(hashes)
        if with_table:
            sink.write_at(size, [table])
    except BaseException:
        sink.abandon()
        raise
    sink.close()
    on_phase("shard synced")
    return size, table


class Shard:
    """A file open for reading, of which header and hashes are known to be what was written."""

    def __init__(self, folder: Folder, file: FileRecord, source: Source, verify: bool):
        self.folder, self.file, self.source = folder, file, source
        self.where = f"{folder.url}/{file.name}"
        self.hashes = bytes.fromhex(file.block_hashes)
        self.contents = file.contents or {}
        if file.digest:
            self.hashes, self.contents = self._look(lambda source: self._read_header(source, verify))

    def _read_header(self, source: Source, verify: bool) -> tuple[bytes, dict[str, Stored]]:
        file = self.file
        header, hashes = _read_bytes(source, 0, file.header_bytes), b""
        if verify:
            hashes = _read_bytes(source, file.hashed_bytes, file.num_bytes - file.hashed_bytes)
            if hash_pieces([header, hashes]).hex() != file.digest:
                raise self.damage("its header or its hashes are not what was written")
        return hashes, parse_header(header, self)

    def damage(self, text: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{self.where}: {text}", self.file.name)

    def _look(self, read: Callable[[Source], T]) -> T:
        """What `read` finds; with a source of its own if it finds damage, which must be there twice."""

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
        """Where a slice lies. Raises DamagedCheckpointError when the file has it otherwise, or not."""
        stored = self.contents.get(key)
        if stored is None or stored.dtype != dtype or stored.shape != tuple(shape):
            found = "missing" if stored is None else f"{stored.dtype} {list(stored.shape)}"
            raise self.damage(f"{key} is {found} in its header and {dtype} {list(shape)} in the manifest")
        return stored

    def read(self, wants: Sequence[Want], *, verify: bool = True, num_threads: int = 4) -> None:
        """Fill each target; verify every block touched, once, in the same pass.

        Raises UnsoundCheckpointError naming the file and a tensor. Targets are then undefined.
        """
        wants = sorted((want for want in wants if want.end > want.begin), key=lambda want: want.begin)
        if any(a.end > b.begin for a, b in pairwise(wants)):
            raise self.damage("slices share bytes")
        _for_each(lambda run: self._read_run(run, run.wants, verify), _runs(self.file, wants, verify), num_threads)

    def verify(self, num_threads: int = 2) -> None:
        """All blocks. Raises UnsoundCheckpointError naming the file and a tensor in the damaged block."""
        file = self.file
        named = [Span(stored.begin, stored.end, key.partition("@")[0]) for key, stored in self.contents.items()]
        chunk_bytes = max(file.block_bytes, CHUNK_BYTES // file.block_bytes * file.block_bytes)
        cuts = [*range(0, file.hashed_bytes, chunk_bytes), file.hashed_bytes]
        runs = [Run(begin, end, []) for begin, end in pairwise(cuts)]
        _for_each(lambda run: self._read_run(run, named, True), runs, num_threads)

    def _read_run(self, run: Run, named: Sequence[Want | Span], verify: bool) -> None:
        """Straight into the targets; into scratch memory what no one wants but must be hashed. Twice if wrong."""
        begin, end = run.begin, run.end
        pieces: list[Buffer] = []
        position = begin
        for want in run.wants:
            start, stop = max(want.begin, position), min(want.end, end)
            if start >= stop:
                continue
            if start > position:
                pieces.append(np.empty(start - position, np.uint8))
            pieces.append(want.target[start - want.begin : stop - want.begin])
            position = stop
        if position < end:
            pieces.append(np.empty(end - position, np.uint8))

        def read(source: Source) -> None:
            source.read_into(begin, pieces)
            if verify:
                self._check_blocks(run, pieces, named)

        self._look(read)

    def _check_blocks(self, run: Run, pieces: Sequence[Buffer], named: Sequence[Want | Span]) -> None:
        begin, end = run.begin, run.end
        starts = [begin, *(begin + n for n in accumulate(len(piece) for piece in pieces))]
        for block in range(begin // self.file.block_bytes, -(-end // self.file.block_bytes)):
            first, last = block * self.file.block_bytes, min((block + 1) * self.file.block_bytes, end)
            expected = self.hashes[block * HASH_BYTES : (block + 1) * HASH_BYTES]
            if hash_pieces(_cut(pieces, starts, first, last)) != expected:
                raise self.damage(f"bytes {first:,} to {last:,} are not what was written" + _inside(named, first, last))


@contextmanager
def open_shard(folder: Folder, file: FileRecord, *, verify: bool = True) -> Iterator[Shard]:
    """Raises UnsoundCheckpointError for a file that is gone, has another size, or another header or other hashes."""
    source = _open(folder, file)
    try:
        yield Shard(folder, file, source, verify)
    finally:
        source.close()


def read_verified(folder: Folder, file: FileRecord) -> bytes:
    """All of a file that is no shard. Raises UnsoundCheckpointError."""
    with open_shard(folder, file) as opened:  # the size first: the memory for one that lies may not be there
        content = np.empty(file.num_bytes, np.uint8)
        opened.read([Want(0, file.num_bytes, content, file.name)])
    return content.tobytes()


def verify_file(folder: Folder, file: FileRecord, *, num_threads: int = 2) -> None:
    with open_shard(folder, file) as opened:
        opened.verify(num_threads)


def parse_header(raw: bytes, shard: Shard) -> dict[str, Stored]:
    """What a safetensors header says, less the hashes. Raises DamagedCheckpointError unless its slices lie one after
    the other, each as long as its shape says."""
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


def read_header(shard: Shard) -> dict[str, Stored]:
    """What the file's own header says, of any format. Raises UnsoundCheckpointError."""
    if shard.file.digest:
        return shard.contents

    def read(source: Source) -> dict[str, Stored]:
        length = int.from_bytes(_read_bytes(source, 0, 8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, shard.file.num_bytes - 8):
            raise shard.damage(f"its header claims {length:,} bytes")
        return parse_header(_read_bytes(source, 0, 8 + length), shard)

    return shard._look(read)


def check_headers(folder: Folder, manifest: Manifest) -> None:
    """That all headers together have every slice of every tensor, and nothing else. Raises UnsoundCheckpointError."""
    seen = dict.fromkeys(manifest.tensors, 0)
    for index, file in enumerate(manifest.files):
        with open_shard(folder, file) as shard:
            for key, stored in read_header(shard).items():
                if file.contents is not None and file.contents.get(key) != stored:
                    expected = file.contents.get(key, "missing")
                    raise shard.damage(f"{key} is {stored} in its header and {expected} in the manifest")
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


def hash_blocks(content: bytes, block_bytes: int) -> bytes:
    return b"".join(hash_pieces([content[i : i + block_bytes]]) for i in range(0, len(content), block_bytes))


def hash_pieces(pieces: Sequence[Buffer]) -> bytes:
    if len(pieces) == 1:
        return xxhash.xxh3_128_digest(pieces[0])
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
    return state.digest()


# ------------------------------------------------------------------------------------------------------ the insides


def _cut(views: Sequence[Buffer], starts: Sequence[int], begin: int, end: int) -> list[Buffer]:
    """Bytes begin to end of all views laid one after the other."""
    result = []
    index = bisect_right(starts, begin) - 1
    while begin < end:
        stop = min(end, starts[index + 1])
        result.append(views[index][begin - starts[index] : stop - starts[index]])
        begin, index = stop, index + 1
    return result


def _runs(file: FileRecord, wants: Sequence[Want], verify: bool) -> list[Run]:
    """Spans to read at a time, each with the wants that reach into it; whole blocks where they must be hashed."""
    grain = file.block_bytes if verify else 1
    limit = max(grain, CHUNK_BYTES // grain * grain)
    runs: list[Run] = []
    for want in wants:
        begin = want.begin // grain * grain
        end = min(-(-want.end // grain) * grain, file.hashed_bytes)
        if runs and begin < runs[-1].end:  # shares a block with the one before
            runs[-1].wants.append(want)
            begin = runs[-1].end
        elif runs and begin == runs[-1].end and runs[-1].end - runs[-1].begin < limit:
            grown = min(end, runs[-1].begin + limit)
            runs[-1] = Run(runs[-1].begin, grown, [*runs[-1].wants, want])
            begin = grown
        while begin < end:
            stop = min(begin + limit, end)
            runs.append(Run(begin, stop, [want]))
            begin = stop
    return runs


def _inside(named: Sequence[Want | Span], first: int, last: int) -> str:
    hit = sorted({span.tensor for span in named if span.begin < last and span.end > first})
    if not hit:
        return ""
    return f" (in {hit[0]}" + (f" and {len(hit) - 1} more)" if len(hit) > 1 else ")")


def _open(folder: Folder, file: FileRecord) -> Source:
    return retry_on_damage(lambda bypass_cache: _open_once(folder, file, bypass_cache))


def _open_once(folder: Folder, file: FileRecord, bypass_cache: bool) -> Source:
    try:
        source = folder.source(file.name, bypass_cache=bypass_cache)
    except OSError as error:
        raise unreadable(folder, file.name, error) from error
    if source.num_bytes != file.num_bytes:
        source.close()
        raise DamagedCheckpointError(
            f"{folder.url}/{file.name}: {source.num_bytes:,} bytes, written were {file.num_bytes:,}", file.name
        )
    return source


def _read_bytes(source: Source, offset: int, size: int) -> bytes:
    buffer = bytearray(size)
    source.read_into(offset, [memoryview(buffer)])
    return bytes(buffer)


def _numbers(text: str) -> list[int]:
    return [int(n) if n.isdecimal() else -1 for n in text.split(",")] if text else []


def _for_each(work: Callable[[Any], None], items: Sequence[Any], num_threads: int) -> None:
    """In several threads; the first failure is raised here once all have stopped."""
    if num_threads <= 1 or len(items) <= 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(min(num_threads, len(items)), thread_name_prefix="checkpoint") as pool:
        futures = [pool.submit(work, item) for item in items]
        for future in futures:
            future.result()
