"""Shard files: safetensors, written and read in one pass over their bytes, which also hashes them block by block.

The last tensor, HASHES, has the hashes of all blocks before it. So a file is written from its first byte to its last,
and stays plain safetensors. The manifest has one digest of each file's header and hashes, which a reader checks first.
No torch.
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
from llmfoundry_lite.checkpoint.open_folder import unreadable_file_error
from llmfoundry_lite.errors import DamagedCheckpointError
from llmfoundry_lite.ranks.codec import write_json
from llmfoundry_lite.retry import T, retry_on_damage

ALIGNMENT = 4096
"""Data starts at a multiple of this, and each chunk at one of its item size, so that files can be memory-mapped."""
LENGTH_BYTES = 8
"""A safetensors file begins with the length of its JSON header, in this many bytes."""
BLOCK_BYTES = 1 << 20
"""Bytes that share a hash."""
TRANSFER_BYTES = 8 << 20
"""Bytes that one thread writes or reads at a time."""
NUM_THREADS = 4
HASHES = "__hashes__"


Entry = TypeVar("Entry", Chunk, TensorRecord)


class ReadRequest(NamedTuple):
    """A byte range of a file and the memory to read it into."""

    begin: int
    end: int
    target: np.ndarray[Any, Any]
    """uint8 [end - begin]"""
    tensor: str
    """The tensor's name, for messages."""


BlockRange = tuple[int, int]
"""Where a range of whole blocks begins and ends, in bytes. One thread reads it at once."""


# ------------------------------------------------------------------------------------------------------- writing


def file_order(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Return chunks or whole tensors, by key, in the order of their file: by item size, the largest first.

    Each then starts at a multiple of its item size without a gap before it; safetensors forbids gaps.
    """
    return dict(sorted(entries.items(), key=lambda item: (-ITEM_BYTES[item[1].dtype], item[0])))


def build_header(entries: Mapping[str, Entry], metadata: dict[str, str], *, block_bytes: int = 0) -> bytes:
    """Return the safetensors header of a file that holds chunks or whole tensors, by key, in this order.

    With `block_bytes`, the header has an entry for the hashes of the file's blocks, which `write_shard` appends.
    Spaces at its end align what follows.
    """
    ends = [*accumulate((entry.num_bytes for entry in entries.values()), initial=0)]
    content_bytes = ends[-1]
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = metadata
    for (key, entry), (begin, end) in zip(entries.items(), pairwise(ends), strict=True):
        header[key] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [begin, end]}

    # The header states the length of the hashes. That depends on the number of blocks, and so on the header's own
    # length: it is built again until the length does not change.
    header_bytes = LENGTH_BYTES
    while True:
        if block_bytes:
            num_hash_bytes = HASH_BYTES * _ceil_div(header_bytes + content_bytes, block_bytes)
            offsets = [content_bytes, content_bytes + num_hash_bytes]
            header[HASHES] = {"dtype": "U8", "shape": [num_hash_bytes], "data_offsets": offsets}
        text = write_json(header)
        text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
        is_settled = header_bytes == LENGTH_BYTES + len(text)
        header_bytes = LENGTH_BYTES + len(text)
        if is_settled or not block_bytes:
            return len(text).to_bytes(LENGTH_BYTES, "little") + text


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
    """Write a header, the bytes of `buffers` and the hashes of all blocks to a file, and hash it in the same pass.

    `header` is what `build_header` returned for these blocks. `on_phase` is called with the name of each step that a
    crash could fall into. Returns the file's record when the file is durable. Raises what any thread raises, OSError
    for one; the file is then incomplete.
    """
    views = [memoryview(buffer).cast("B") for buffer in (header, *buffers) if len(buffer)]
    starts = [0, *accumulate(len(view) for view in views)]
    size = starts[-1]
    num_blocks = _ceil_div(size, block_bytes)
    transfer_bytes = _transfer_bytes(block_bytes)
    sink = folder.sink(name, size + HASH_BYTES * num_blocks)

    def write_and_hash(begin: int) -> bytes:
        """Write the transfer that begins at this byte. Returns the hashes of its blocks."""
        end = min(begin + transfer_bytes, size)
        hashes = []
        for block_begin in range(begin, end, block_bytes):
            block_end = min(block_begin + block_bytes, end)
            hashes.append(hash_buffers(_cut_buffers(views, starts, block_begin, block_end)))
        sink.write_at(begin, _cut_buffers(views, starts, begin, end))
        if begin <= size // 2 < end:
            on_phase("half a shard")
        return b"".join(hashes)

    try:
        transfers = range(0, size, transfer_bytes)
        hashes = b"".join(_map_in_threads(write_and_hash, transfers, num_threads if sink.any_order else 1))
        sink.write_at(size, [hashes])
    except BaseException:
        sink.abandon()
        raise
    sink.close()
    on_phase("shard synced")
    return FileRecord(
        name=name,
        num_bytes=size + len(hashes),
        block_bytes=block_bytes,
        header_bytes=len(header),
        digest=hash_buffers([header, hashes]).hex(),
    )


def hash_blocks(content: bytes, block_bytes: int) -> bytes:
    """Return the hashes of all blocks of `content`, one after the other: 16 bytes each."""
    blocks = [content[begin : begin + block_bytes] for begin in range(0, len(content), block_bytes)]
    return b"".join(hash_buffers([block]) for block in blocks)


def hash_buffers(buffers: Sequence[Buffer]) -> bytes:
    """Return the XXH3-128 of the bytes of all buffers together: 16 bytes."""
    hasher = xxhash.xxh3_128()
    for buffer in buffers:
        hasher.update(buffer)
    return hasher.digest()


# ------------------------------------------------------------------------------------------------------- reading


class Shard:
    """A shard file that is open for reading, and whose header and hashes have been verified."""

    def __init__(self, folder: Folder, file: FileRecord, source: Source):
        """Read and verify the header and the hashes of a file that is open as `source`. `file` is its record in the
        manifest. Raises UnsoundCheckpointError."""
        self.folder = folder
        self.file = file
        self.source = source
        self.hashes, self.chunk_begins = self._read(self._read_header)
        """The hashes of all blocks, and for each chunk its first byte in the file."""

    def _read_header(self, source: Source) -> tuple[bytes, dict[Chunk, int]]:
        """Return the file's hashes, and the first byte of each chunk. Raises DamagedCheckpointError if the manifest has
        another digest."""
        header = read_bytes(source, 0, self.file.header_bytes)
        hashes = read_bytes(source, self.file.hashed_bytes, self.file.num_bytes - self.file.hashed_bytes)
        if hash_buffers([header, hashes]).hex() != self.file.digest:
            raise self.damage_error("its header or its hashes are not what was written")
        return hashes, self.parse_header(header)

    def parse_header(self, raw: bytes) -> dict[Chunk, int]:
        """Return the first byte of each chunk, as the safetensors header says. The entry of the hashes is left out.

        Raises DamagedCheckpointError unless chunks follow each other without gaps, each as long as its shape says.
        """
        begins: dict[Chunk, int] = {}
        try:
            if int.from_bytes(raw[:LENGTH_BYTES], "little") != len(raw) - LENGTH_BYTES:
                raise ValueError
            header = json.loads(raw[LENGTH_BYTES:])
            header.pop("__metadata__", None)
            header.pop(HASHES, None)

            position = len(raw)
            by_offset = sorted(header.items(), key=lambda item: [*map(int, item[1]["data_offsets"])])
            for key, entry in by_offset:
                tensor, _, offset = key.rpartition("@")
                offset = tuple(map(int, offset.split(","))) if offset else ()
                chunk = Chunk(tensor, entry["dtype"], offset, tuple(entry["shape"]))
                bounds = [len(raw) + one for one in entry["data_offsets"]]
                if bounds != [position, position + chunk.num_bytes] or chunk.key != key:
                    raise ValueError
                begins[chunk] = position
                position += chunk.num_bytes
            if position > self.file.hashed_bytes:
                raise ValueError
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            raise self.damage_error("its header is not that of a safetensors file") from None
        return begins

    def damage_error(self, text: str) -> DamagedCheckpointError:
        """Return the error that this file is damaged; `text` says how."""
        return DamagedCheckpointError(f"{self.folder.url}/{self.file.name}: {text}", self.file.name)

    def _read(self, read: Callable[[Source], T]) -> T:
        """Return what `read` returns for the open file; see `read_file`."""
        return read_file(self.folder, self.file, read, self.source)

    def begin_of(self, chunk: Chunk) -> int:
        """Return a chunk's first byte. Raises DamagedCheckpointError if it is absent or has another dtype or shape."""
        if chunk not in self.chunk_begins:
            found = "missing"
            for other in self.chunk_begins:
                if other.key == chunk.key:
                    found = f"{other.dtype} {list(other.shape)}"
            expected = f"{chunk.dtype} {list(chunk.shape)}"
            raise self.damage_error(f"{chunk.key} is {found} in its header and {expected} in the manifest")
        return self.chunk_begins[chunk]

    def read(self, requests: Sequence[ReadRequest], *, num_threads: int = NUM_THREADS) -> None:
        """Fill the target of each request, and verify every block that is touched, once, in the same pass.

        Raises UnsoundCheckpointError that names the file and a tensor; the targets then have undefined content.
        """
        requests = sorted((request for request in requests if request.end > request.begin), key=lambda one: one.begin)
        if any(first.end > second.begin for first, second in pairwise(requests)):
            raise self.damage_error("chunks share bytes")
        begins = [request.begin for request in requests]
        ends = [request.end for request in requests]

        def read(blocks: BlockRange) -> None:
            """Read a range of blocks for the requests that overlap it."""
            first_byte, end = blocks
            overlapping = requests[bisect_right(ends, first_byte) : bisect_left(begins, end)]
            self._read_blocks(blocks, overlapping)

        _map_in_threads(read, _block_ranges(self.file, requests), num_threads)

    def verify(self, on_read: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Hash all blocks. `on_read` is called with the number of bytes of each range of blocks that has been verified.

        Raises UnsoundCheckpointError that names the file and a tensor in the damaged block.
        """

        def read(blocks: BlockRange) -> None:
            self._read_blocks(blocks, ())
            on_read(blocks[1] - blocks[0])

        _map_in_threads(read, _split_range(0, self.file.hashed_bytes, self.file.block_bytes), NUM_THREADS)

    def _read_blocks(self, blocks: BlockRange, requests: Sequence[ReadRequest]) -> None:
        """Read a range of whole blocks of the file, and verify the hash of each block.

        blocks: the first byte of the range and the byte after its end.
        requests: the parts of the file that are wanted, sorted and without overlaps. Their bytes go to their targets.
            All other bytes of the range have to be hashed as well, and go to temporary memory.

        Raises UnsoundCheckpointError, which names the file and a tensor in the damaged block.
        """
        first_byte, range_end = blocks
        buffers: list[Buffer] = []
        position = first_byte
        for request in requests:
            begin = max(request.begin, position)
            end = min(request.end, range_end)
            if begin > position:
                buffers.append(np.empty(begin - position, np.uint8))
            buffers.append(request.target[begin - request.begin : end - request.begin])
            position = end
        if position < range_end:
            buffers.append(np.empty(range_end - position, np.uint8))
        # The file is read into these buffers one after the other. `starts` has the byte at which each begins.
        starts = [*accumulate((len(buffer) for buffer in buffers), initial=first_byte)]

        def read(source: Source) -> None:
            """Fill the buffers, and compare the hash of each block."""
            source.read_into(first_byte, buffers)
            for begin in range(first_byte, range_end, self.file.block_bytes):
                end = min(begin + self.file.block_bytes, range_end)
                hash_begin = begin // self.file.block_bytes * HASH_BYTES
                expected = self.hashes[hash_begin : hash_begin + HASH_BYTES]
                if hash_buffers(_cut_buffers(buffers, starts, begin, end)) != expected:
                    tensors = self._name_tensors(begin, end, requests)
                    raise self.damage_error(f"bytes {begin:,} to {end:,} are not what was written{tensors}")

        self._read(read)

    def _name_tensors(self, begin: int, end: int, requests: Sequence[ReadRequest]) -> str:
        """Return ` (in <tensor> and <n> more)` for the tensors with bytes in a range, for a message.

        Only tensors that `requests` ask for are named, if there are requests. Empty if no tensor has bytes there.
        """
        if requests:
            ranges = [(request.tensor, request.begin, request.end) for request in requests]
        else:
            ranges = [(chunk.tensor, first, first + chunk.num_bytes) for chunk, first in self.chunk_begins.items()]
        named = sorted({tensor for tensor, first, last in ranges if first < end and last > begin})
        if not named:
            return ""
        others = f" and {len(named) - 1} more" if len(named) > 1 else ""
        return f" (in {named[0]}{others})"


@contextmanager
def open_shard(folder: Folder, file: FileRecord) -> Iterator[Shard]:
    """Open a shard file for the length of a `with` block.

    Raises UnsoundCheckpointError if it is absent or unreadable, or if its size, header or hashes are not as recorded.
    """
    source = retry_on_damage(lambda bypass_cache: _open_once(folder, file, bypass_cache))
    try:
        yield Shard(folder, file, source)
    finally:
        source.close()


def read_file(
    folder: Folder, file: FileRecord | LogPart, read: Callable[[Source], T], opened: Source | None = None
) -> T:
    """Return what `read` returns for a file, which may be `opened` already.

    `read` may raise DamagedCheckpointError. It is then called again with the file opened anew, past this machine's page
    cache, and the error counts only if that raises it again. Raises UnsoundCheckpointError if the file is damaged or
    cannot be read.
    """

    def read_once(bypass_cache: bool) -> T:
        """Call `read` with the opened file, or with the file opened anew to bypass the cache."""
        source = opened
        if bypass_cache or source is None:
            source = _open_once(folder, file, bypass_cache)
        try:
            return read(source)
        except EOFError as error:
            raise DamagedCheckpointError(f"{folder.url}/{file.name}: {error}", file.name) from None
        except OSError as error:
            raise unreadable_file_error(folder, file.name, error) from error
        finally:
            if source is not opened:
                source.close()

    return retry_on_damage(read_once)


def verify_file(folder: Folder, file: FileRecord, on_read: Callable[[int], None] = lambda num_bytes: None) -> None:
    """Hash all blocks of a shard file, as `Shard.verify`. Raises UnsoundCheckpointError."""
    with open_shard(folder, file) as opened:
        opened.verify(on_read)


def read_bytes(source: Source, offset: int, size: int) -> bytes:
    """Return `size` bytes of a file from `offset` on. Raises EOFError if the file ends before."""
    buffer = bytearray(size)
    source.read_into(offset, [memoryview(buffer)])
    return bytes(buffer)


def _open_once(folder: Folder, file: FileRecord | LogPart, bypass_cache: bool) -> Source:
    """Open a file. Raises UnsoundCheckpointError if it is absent or unreadable, or has another size than recorded."""
    try:
        source = folder.source(file.name, bypass_cache=bypass_cache)
    except OSError as error:
        raise unreadable_file_error(folder, file.name, error) from error
    if source.num_bytes != file.num_bytes:
        source.close()
        sizes = f"{source.num_bytes:,} bytes, expected {file.num_bytes:,}"
        raise DamagedCheckpointError(f"{folder.url}/{file.name}: has {sizes}", file.name)
    return source


# ---------------------------------------------------------------------------------------------------- byte ranges


def _cut_buffers(buffers: Sequence[Buffer], starts: Sequence[int], begin: int, end: int) -> list[Buffer]:
    """Return bytes `begin` to `end` of the concatenated buffers, as views, without a copy.

    `starts` has where each buffer begins in the concatenation, and the end of the last one.
    """
    views = []
    index = bisect_right(starts, begin) - 1
    while begin < end:
        stop = min(end, starts[index + 1])
        views.append(buffers[index][begin - starts[index] : stop - starts[index]])
        begin = stop
        index += 1
    return views


def _block_ranges(file: FileRecord, requests: Sequence[ReadRequest]) -> list[BlockRange]:
    """Return the blocks that `requests`, sorted by their begins, touch. Adjacent blocks are joined into ranges that are
    read at once."""
    # First join requests that touch the same or adjacent blocks; then split what is too long for one thread.
    spans: list[tuple[int, int]] = []
    for request in requests:
        begin = request.begin // file.block_bytes * file.block_bytes
        end = min(_ceil_div(request.end, file.block_bytes) * file.block_bytes, file.hashed_bytes)
        if spans and begin <= spans[-1][1]:
            previous_begin, previous_end = spans.pop()
            begin = previous_begin
            end = max(end, previous_end)
        spans.append((begin, end))

    ranges = []
    for begin, end in spans:
        ranges += _split_range(begin, end, file.block_bytes)
    return ranges


def _split_range(begin: int, end: int, block_bytes: int) -> list[BlockRange]:
    """Split a byte range that begins with a block into the ranges that one thread reads at once."""
    step = _transfer_bytes(block_bytes)
    return [(first, min(first + step, end)) for first in range(begin, end, step)]


def _transfer_bytes(block_bytes: int) -> int:
    """Return how many bytes one thread moves at a time: whole blocks, close to TRANSFER_BYTES, and at least one."""
    return max(block_bytes, TRANSFER_BYTES // block_bytes * block_bytes)


def _ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


Item = TypeVar("Item")


def _map_in_threads(work: Callable[[Item], T], items: Sequence[Item], num_threads: int) -> list[T]:
    """Return what `work` returns for each item, called in several threads. Raises the first failure, once all threads
    have stopped."""
    with ThreadPoolExecutor(num_threads, thread_name_prefix="checkpoint") as pool:
        return list(pool.map(work, items))
