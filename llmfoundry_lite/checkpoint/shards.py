"""Shard files: safetensors, written and read in one pass over their bytes, which hashes them block by block. No torch.

The last tensor, HASHES, has the hashes of all blocks before it: a file is streamed from its first byte to its last, and
stays plain safetensors. The manifest has one digest for header and hashes, which a reader checks first.
"""

import json
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import xxhash

from llmfoundry_lite.checkpoint.folder import Buffer, Folder, Source
from llmfoundry_lite.checkpoint.grid import ITEM_BYTES, Chunk
from llmfoundry_lite.checkpoint.manifest import HASH_BYTES, FileRecord, LogPart, TensorRecord
from llmfoundry_lite.checkpoint.open_folder import unreadable
from llmfoundry_lite.errors import DamagedCheckpointError
from llmfoundry_lite.ranks.codec import write_json
from llmfoundry_lite.retry import T, retry_on_damage

ALIGNMENT = 4096
"""Data starts at a multiple of this, and each chunk at one of its item size, so that files can be memory-mapped."""
BLOCK_BYTES = 1 << 20
TRANSFER_BYTES = 8 << 20
"""Bytes that one thread writes or reads at a time."""
NUM_THREADS = 4
HASHES = "__hashes__"


E = TypeVar("E", Chunk, TensorRecord)


class ReadRequest(NamedTuple):
    """A byte range of a file and the memory to read it into."""

    begin: int
    end: int
    target: np.ndarray[Any, Any]
    """uint8 [end - begin]"""
    tensor: str
    """The tensor's name, for messages."""


BlockRange = tuple[int, int]
"""First byte and end of whole blocks that are read at once."""


# ------------------------------------------------------------------------------------------------------- writing


def file_order(entries: Mapping[str, E]) -> dict[str, E]:
    """Sort by item size, the largest first: each chunk then starts at a multiple of its item size without gaps, which
    safetensors forbids."""
    return dict(sorted(entries.items(), key=lambda item: (-ITEM_BYTES[item[1].dtype], item[0])))


def build_header(entries: Mapping[str, E], metadata: dict[str, str], *, block_bytes: int = 0) -> bytes:
    """Return the first bytes of a file that has chunks or whole tensors, by key, in this order. With `block_bytes` the
    file ends with the hashes of its blocks."""
    ends = [*accumulate((entry.num_bytes for entry in entries.values()), initial=0)]
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    for (key, entry), (begin, end) in zip(entries.items(), pairwise(ends), strict=True):
        header[key] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [begin, end]}
    start, is_settled = 8, False
    text = b""
    while not is_settled:  # the table's length depends on the length of the header that states it
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
    buffers: Sequence[Buffer],
    *,
    num_threads: int = NUM_THREADS,
    block_bytes: int = BLOCK_BYTES,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> FileRecord:
    """Hash and write, in one pass, a header that `build_header` made for these blocks, `buffers` (uint8) and hashes.
    Durable on return. Raises what any thread raises; the file is then incomplete.
    """
    views = [memoryview(buffer).cast("B") for buffer in (header, *buffers) if len(buffer)]
    starts = [0, *accumulate(len(view) for view in views)]
    size = starts[-1]
    hashes = [b""] * -(-size // block_bytes)
    sink = folder.sink(name, size + HASH_BYTES * len(hashes))
    transfer_bytes = _transfer_bytes(block_bytes)

    def write(begin: int) -> None:
        end = min(begin + transfer_bytes, size)
        for block in range(begin // block_bytes, -(-end // block_bytes)):
            stop = min((block + 1) * block_bytes, end)
            hashes[block] = hash_buffers(_cut_buffers(views, starts, block * block_bytes, stop))
        sink.write_at(begin, _cut_buffers(views, starts, begin, end))
        if begin <= size // 2 < end:
            on_phase("half a shard")

    try:
        _for_each(write, range(0, size, transfer_bytes), num_threads if sink.any_order else 1)
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
        digest=hash_buffers([header, table]).hex(),
    )


def hash_blocks(content: bytes, block_bytes: int) -> bytes:
    return b"".join(hash_buffers([content[i : i + block_bytes]]) for i in range(0, len(content), block_bytes))


def hash_buffers(buffers: Sequence[Buffer]) -> bytes:
    state = xxhash.xxh3_128()
    for buffer in buffers:
        state.update(buffer)
    return state.digest()


# ------------------------------------------------------------------------------------------------------- reading


class Shard:
    """A file open for reading, whose header and hashes have been verified."""

    def __init__(self, folder: Folder, file: FileRecord, source: Source):
        self.folder, self.file, self.source = folder, file, source
        self.hashes, self.contents = self._read(self._read_header)
        """Hashes of all blocks, and the first byte of each chunk."""

    def _read_header(self, source: Source) -> tuple[bytes, dict[Chunk, int]]:
        file = self.file
        header = read_bytes(source, 0, file.header_bytes)
        hashes = read_bytes(source, file.hashed_bytes, file.num_bytes - file.hashed_bytes)
        if hash_buffers([header, hashes]).hex() != file.digest:
            raise self.damage("its header or its hashes are not what was written")
        return hashes, parse_header(header, self)

    def damage(self, text: str) -> DamagedCheckpointError:
        return DamagedCheckpointError(f"{self.folder.url}/{self.file.name}: {text}", self.file.name)

    def _read(self, read: Callable[[Source], T]) -> T:
        return read_file(self.folder, self.file, read, self.source)

    def find(self, chunk: Chunk) -> int:
        """Return a chunk's first byte. Raises DamagedCheckpointError if it is absent or has another dtype or shape."""
        if chunk not in self.contents:
            other = next((one for one in self.contents if one.key == chunk.key), None)
            found = "missing" if other is None else f"{other.dtype} {list(other.shape)}"
            expected = f"{chunk.dtype} {list(chunk.shape)}"
            raise self.damage(f"{chunk.key} is {found} in its header and {expected} in the manifest")
        return self.contents[chunk]

    def read(self, requests: Sequence[ReadRequest], *, num_threads: int = NUM_THREADS) -> None:
        """Fill each target; verify every block touched, once, in the same pass. Raises UnsoundCheckpointError naming
        the file and a tensor; the targets are then undefined."""
        requests = sorted((one for one in requests if one.end > one.begin), key=lambda one: one.begin)
        if any(a.end > b.begin for a, b in pairwise(requests)):
            raise self.damage("chunks share bytes")
        begins, ends = [request.begin for request in requests], [request.end for request in requests]

        def read(blocks: BlockRange) -> None:
            self._read_range(blocks, requests[bisect_right(ends, blocks[0]) : bisect_left(begins, blocks[1])])

        _for_each(read, _block_ranges(self.file, requests), num_threads)

    def verify(self, on_read: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Hash all blocks. Raises UnsoundCheckpointError naming the file and a tensor in the damaged block."""

        def read(blocks: BlockRange) -> None:
            self._read_range(blocks, ())
            on_read(blocks[1] - blocks[0])

        _for_each(read, _split_range(0, self.file.hashed_bytes, self.file.block_bytes), NUM_THREADS)

    def _read_range(self, blocks: BlockRange, requests: Sequence[ReadRequest]) -> None:
        """Read requested bytes into the targets, and others, which must be hashed too, into scratch memory."""
        buffers: list[Buffer] = []
        first, last = blocks
        position = first
        for request in requests:
            start, stop = max(request.begin, position), min(request.end, last)
            if start > position:
                buffers.append(np.empty(start - position, np.uint8))
            buffers.append(request.target[start - request.begin : stop - request.begin])
            position = stop
        if position < last:
            buffers.append(np.empty(last - position, np.uint8))

        starts = [*accumulate((len(buffer) for buffer in buffers), initial=first)]

        def read(source: Source) -> None:
            source.read_into(first, buffers)
            for begin in range(first, last, self.file.block_bytes):
                end, at = min(begin + self.file.block_bytes, last), begin // self.file.block_bytes * HASH_BYTES
                if hash_buffers(_cut_buffers(buffers, starts, begin, end)) != self.hashes[at : at + HASH_BYTES]:
                    inside = self._tensors_in(begin, end, requests)
                    raise self.damage(f"bytes {begin:,} to {end:,} are not what was written{inside}")

        self._read(read)

    def _tensors_in(self, begin: int, end: int, requests: Sequence[ReadRequest]) -> str:
        """Name the tensors with bytes in a range, for a message: those requested, if any are."""
        named = [(one.tensor, one.begin, one.end) for one in requests]
        named = named or [(one.tensor, at, at + one.num_bytes) for one, at in self.contents.items()]
        hit = sorted({tensor for tensor, its_begin, its_end in named if its_begin < end and its_end > begin})
        more = f" and {len(hit) - 1} more" if len(hit) > 1 else ""
        return f" (in {hit[0]}{more})" if hit else ""


@contextmanager
def open_shard(folder: Folder, file: FileRecord) -> Iterator[Shard]:
    """Open a shard. Raises UnsoundCheckpointError if it is absent, or has another size, header or hashes."""
    source = retry_on_damage(lambda bypass_cache: _open_once(folder, file, bypass_cache))
    try:
        yield Shard(folder, file, source)
    finally:
        source.close()


def read_file(
    folder: Folder, file: FileRecord | LogPart, read: Callable[[Source], T], opened: Source | None = None
) -> T:
    """Return what `read` finds in a file, which may be `opened` already. Damage counts only if a second read, past the
    cache, finds it again. Raises UnsoundCheckpointError."""

    def once(bypass_cache: bool) -> T:
        source = _open_once(folder, file, bypass_cache) if bypass_cache or opened is None else opened
        try:
            return read(source)
        except EOFError as error:
            raise DamagedCheckpointError(f"{folder.url}/{file.name}: {error}", file.name) from None
        except OSError as error:
            raise unreadable(folder, file.name, error) from error
        finally:
            if source is not opened:
                source.close()

    return retry_on_damage(once)


def verify_file(folder: Folder, file: FileRecord, on_read: Callable[[int], None] = lambda num_bytes: None) -> None:
    with open_shard(folder, file) as opened:
        opened.verify(on_read)


# ------------------------------------------------------------------------------------------------------- headers


def parse_header(raw: bytes, shard: Shard) -> dict[Chunk, int]:
    """Return the first byte of each chunk, as a safetensors header says; the hashes are left out. Raises
    DamagedCheckpointError unless chunks follow each other without gaps, each as long as its shape says."""
    begins: dict[Chunk, int] = {}
    try:
        if int.from_bytes(raw[:8], "little") != len(raw) - 8:
            raise ValueError
        header = json.loads(raw[8:])
        header.pop("__metadata__", None)
        header.pop(HASHES, None)
        end = len(raw)
        for key, entry in sorted(header.items(), key=lambda item: [*map(int, item[1]["data_offsets"])]):
            tensor, _, offset = key.rpartition("@")
            box = tuple(map(int, offset.split(","))) if offset else (), tuple(entry["shape"])
            chunk = Chunk(tensor, entry["dtype"], *box)
            if [end, end + chunk.num_bytes] != [len(raw) + at for at in entry["data_offsets"]] or chunk.key != key:
                raise ValueError
            begins[chunk], end = end, end + chunk.num_bytes
        if end > shard.file.hashed_bytes:
            raise ValueError
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        raise shard.damage("its header is not that of a safetensors file") from None
    return begins


# ----------------------------------------------------------------------------------------------------------- details


def _cut_buffers(views: Sequence[Buffer], starts: Sequence[int], begin: int, end: int) -> list[Buffer]:
    """Return bytes `begin` to `end` of the concatenated `views`, whose first bytes are at `starts`."""
    result = []
    index = bisect_right(starts, begin) - 1
    while begin < end:
        stop = min(end, starts[index + 1])
        result.append(views[index][begin - starts[index] : stop - starts[index]])
        begin, index = stop, index + 1
    return result


def _block_ranges(file: FileRecord, requests: Sequence[ReadRequest]) -> list[BlockRange]:
    """Return the blocks that sorted `requests` reach into, in ranges that are read at once."""
    spans: list[tuple[int, int]] = []
    for request in requests:
        begin = request.begin // file.block_bytes * file.block_bytes
        end = min(-(-request.end // file.block_bytes) * file.block_bytes, file.hashed_bytes)
        if spans and begin <= spans[-1][1]:
            before = spans.pop()
            begin, end = before[0], max(end, before[1])
        spans.append((begin, end))
    return [blocks for begin, end in spans for blocks in _split_range(begin, end, file.block_bytes)]


def _split_range(begin: int, end: int, block_bytes: int) -> list[BlockRange]:
    step = _transfer_bytes(block_bytes)
    return [(at, min(at + step, end)) for at in range(begin, end, step)]


def _transfer_bytes(block_bytes: int) -> int:
    return max(block_bytes, TRANSFER_BYTES // block_bytes * block_bytes)


def _open_once(folder: Folder, file: FileRecord | LogPart, bypass_cache: bool) -> Source:
    try:
        source = folder.source(file.name, bypass_cache=bypass_cache)
    except OSError as error:
        raise unreadable(folder, file.name, error) from error
    if source.num_bytes != file.num_bytes:
        source.close()
        sizes = f"{source.num_bytes:,} bytes, expected {file.num_bytes:,}"
        raise DamagedCheckpointError(f"{folder.url}/{file.name}: has {sizes}", file.name)
    return source


def read_bytes(source: Source, offset: int, size: int) -> bytes:
    buffer = bytearray(size)
    source.read_into(offset, [memoryview(buffer)])
    return bytes(buffer)


def _for_each(work: Callable[[Any], None], items: Sequence[Any], num_threads: int) -> None:
    """Call `work` for each item in several threads. Raises the first failure, once all threads have stopped."""
    with ThreadPoolExecutor(num_threads, thread_name_prefix="checkpoint") as pool:
        list(pool.map(work, items))
