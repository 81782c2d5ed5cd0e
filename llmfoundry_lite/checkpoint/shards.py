"""Shard files: safetensors, written and read in one pass over their bytes, which also hashes them block by block.

A file is plain safetensors, which other tools read:

    header        its length in 8 bytes, JSON with the place of each chunk, and spaces up to a multiple of 4096 bytes
    chunks        their bytes, the largest item size first
    __hashes__    a tensor with the XXH3-128 of each block before it; blocks are cut without regard to chunks

Because the hashes come last, a file is written from its first byte to its last. The manifest has one digest of each
file's header and hashes. A reader checks that digest first, and can then verify any block alone. `write_shard` writes a
file; `open_shard` gives a `Shard` to read from; byte ranges are at the end of this module. No torch.
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
"""A safetensors file begins with the length of its JSON header, in this many bytes, little-endian."""
BLOCK_BYTES = 1 << 20
"""Size of the blocks that are hashed. The last block of a file may be shorter."""
TRANSFER_BYTES = 8 << 20
"""Bytes that one thread writes or reads at a time."""
NUM_THREADS = 4
"""Threads that write or read a file at once."""
HASHES = "__hashes__"
"""Name of the tensor that holds the hashes of a file's blocks."""

Entry = TypeVar("Entry", Chunk, TensorRecord)
"""Content of a file: chunks of sharded tensors in a checkpoint, or whole tensors in a consolidated file."""


class ReadRequest(NamedTuple):
    """A byte range of a file and the memory to read it into."""

    begin: int
    end: int
    target: np.ndarray[Any, Any]
    """uint8 [end - begin]"""
    tensor: str
    """The tensor's name, for messages."""


BlockRange = tuple[int, int]
"""First byte of a range of whole blocks, and the byte after its last. One thread reads the range at once."""


# ------------------------------------------------------------------------------------------------------- writing


def file_order(entries: Mapping[str, Entry]) -> dict[str, Entry]:
    """Sort chunks or whole tensors, given by key, into the order in which a file holds them.

    Those with the largest items come first (F64, then F32, then BF16 …), and equal ones are in order of key. Each then
    starts at a multiple of its item size without a gap before it, as safetensors requires.
    """

    def item_size_and_key(key_and_entry: tuple[str, Entry]) -> tuple[int, str]:
        key, entry = key_and_entry
        return -ITEM_BYTES[entry.dtype], key

    return dict(sorted(entries.items(), key=item_size_and_key))


def build_header(entries: Mapping[str, Entry], metadata: dict[str, str], *, block_bytes: int = 0) -> bytes:
    """Return the header of a safetensors file: its length, its JSON, and spaces up to a multiple of ALIGNMENT.

    entries: the chunks or whole tensors that follow the header, by key, in the order of their bytes.
    metadata: text for the header's `__metadata__`, which other tools show.
    block_bytes: the size of the file's blocks; the header then has an entry for their hashes, which `write_shard`
        appends. 0: the file has no hashes.
    """
    # Offsets in the header count from the end of the header.
    offsets = [*accumulate((entry.num_bytes for entry in entries.values()), initial=0)]
    content_bytes = offsets[-1]
    header: dict[str, Any] = {}
    if metadata:
        header["__metadata__"] = metadata
    for (key, entry), begin_and_end in zip(entries.items(), pairwise(offsets), strict=True):
        header[key] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": begin_and_end}

    # The header states how long the hashes are. That depends on the number of blocks, and so on the length of the
    # header, which is part of the blocks: it is built again until its length does not change.
    header_bytes = LENGTH_BYTES
    while True:
        if block_bytes:
            num_hash_bytes = HASH_BYTES * _ceil_div(header_bytes + content_bytes, block_bytes)
            hash_offsets = [content_bytes, content_bytes + num_hash_bytes]
            header[HASHES] = {"dtype": "U8", "shape": [num_hash_bytes], "data_offsets": hash_offsets}
        text = write_json(header)
        text += b" " * (-(LENGTH_BYTES + len(text)) % ALIGNMENT)
        assumed_header_bytes = header_bytes
        header_bytes = LENGTH_BYTES + len(text)
        if header_bytes == assumed_header_bytes or not block_bytes:
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
    """Write a shard file in one pass: a header, the bytes of all buffers, and the hash of each block of these.

    folder, name: where to write. The folder exists, and may be local or remote.
    header: what `build_header` returned for this content and this `block_bytes`.
    buffers: the content, as one or more pieces of memory that are contiguous. They must not change meanwhile.
    num_threads: how many transfers are hashed and written at once, if the folder takes bytes in any order.
    on_phase: called with the name of a step, so that tests can crash there.

    Returns the file's record for the manifest, when the file is durable. Raises what a thread raises, such as OSError;
    the file is then incomplete.
    """
    # Treat header and content as one sequence of bytes, without copying them. `starts` has where each buffer begins.
    views = [memoryview(buffer).cast("B") for buffer in (header, *buffers) if len(buffer)]
    starts = [0, *accumulate(len(view) for view in views)]
    hashed_bytes = starts[-1]
    num_blocks = _ceil_div(hashed_bytes, block_bytes)
    transfer_bytes = _transfer_bytes(block_bytes)
    sink = folder.sink(name, hashed_bytes + HASH_BYTES * num_blocks)

    def write_and_hash(begin: int) -> bytes:
        """Write the transfer that begins at this byte, and return the hashes of its blocks. Runs in several threads."""
        end = min(begin + transfer_bytes, hashed_bytes)
        block_hashes = []
        for block_begin in range(begin, end, block_bytes):
            block_end = min(block_begin + block_bytes, end)
            block_hashes.append(hash_buffers(_cut_buffers(views, starts, block_begin, block_end)))
        sink.write_at(begin, _cut_buffers(views, starts, begin, end))
        if begin <= hashed_bytes // 2 < end:
            on_phase("half a shard")
        return b"".join(block_hashes)

    try:
        transfer_begins = range(0, hashed_bytes, transfer_bytes)
        num_writers = num_threads if sink.any_order else 1
        hashes = b"".join(_map_in_threads(write_and_hash, transfer_begins, num_writers))
        sink.write_at(hashed_bytes, [hashes])
    except BaseException:
        sink.abandon()
        raise
    sink.close()  # makes the file durable
    on_phase("shard synced")
    return FileRecord(
        name=name,
        num_bytes=hashed_bytes + len(hashes),
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
    """A shard file that is open for reading, and whose header and hashes have been verified.

    Use `open_shard` to make one. `begin_of` says where a chunk is, `read` reads byte ranges into memory, and `verify`
    reads the whole file without keeping it. All reads verify the blocks that they touch, and read once more, past the
    page cache, before they report damage.
    """

    def __init__(self, folder: Folder, file: FileRecord, source: Source):
        """Read and verify the header and the hashes of a file.

        folder: the folder that the file's name is relative to.
        file: the file's record in the manifest.
        source: the open file, which the caller closes.

        Raises UnsoundCheckpointError if the header or the hashes are damaged or cannot be read.
        """
        self.folder = folder
        self.file = file
        self.source = source
        self.hashes, self.chunk_begins = self._read_retrying(self._read_header)
        """The hashes of all blocks, and for each chunk its first byte in the file."""

    def _read_header(self, source: Source) -> tuple[bytes, dict[Chunk, int]]:
        """Read the hashes of all blocks, and the first byte of each chunk.

        Raises DamagedCheckpointError if header and hashes do not have the digest that the manifest records.
        """
        hashes_begin = self.file.hashed_bytes
        header = read_bytes(source, 0, self.file.header_bytes)
        hashes = read_bytes(source, hashes_begin, self.file.num_bytes - hashes_begin)
        if hash_buffers([header, hashes]).hex() != self.file.digest:
            raise self.damage_error("its header or its hashes are not what was written")
        return hashes, self.parse_header(header)

    def parse_header(self, raw: bytes) -> dict[Chunk, int]:
        """Return each chunk and its first byte in the file, from the file's safetensors header.

        `raw` is the whole header, its length included. An entry `"model/w@25,0": {"dtype": "F32", "shape": [25, 8],
        "data_offsets": [0, 800]}` is the chunk of `model/w` at offset (25, 0); its first byte is that after the header.
        The entries of metadata and hashes are left out.

        Raises DamagedCheckpointError unless chunks follow each other without gaps, each as long as its shape says.
        """
        chunk_begins: dict[Chunk, int] = {}
        try:
            if int.from_bytes(raw[:LENGTH_BYTES], "little") != len(raw) - LENGTH_BYTES:
                raise ValueError
            header = json.loads(raw[LENGTH_BYTES:])
            header.pop("__metadata__", None)
            header.pop(HASHES, None)

            position = len(raw)  # the byte at which the next chunk has to begin
            by_offset = sorted(header.items(), key=lambda item: [*map(int, item[1]["data_offsets"])])
            for key, entry in by_offset:
                tensor_name, _, offset_text = key.rpartition("@")
                offset = tuple(map(int, offset_text.split(","))) if offset_text else ()
                chunk = Chunk(tensor_name, entry["dtype"], offset, tuple(entry["shape"]))
                # Offsets in the header count from the header's end.
                begin_and_end = [len(raw) + data_offset for data_offset in entry["data_offsets"]]
                if begin_and_end != [position, position + chunk.num_bytes] or chunk.key != key:
                    raise ValueError
                chunk_begins[chunk] = position
                position += chunk.num_bytes
            if position > self.file.hashed_bytes:
                raise ValueError
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            raise self.damage_error("its header is not that of a safetensors file") from None
        return chunk_begins

    def damage_error(self, text: str) -> DamagedCheckpointError:
        """Return the error that this file is damaged; `text` says how."""
        return DamagedCheckpointError(f"{self.folder.url}/{self.file.name}: {text}", self.file.name)

    def _read_retrying(self, read: Callable[[Source], T]) -> T:
        """Return what `read` returns for the open file, and call it again on damage; see `read_file`."""
        return read_file(self.folder, self.file, read, self.source)

    def begin_of(self, chunk: Chunk) -> int:
        """Return the position of a chunk's first byte in the file.

        `chunk` is as the manifest describes it. Raises DamagedCheckpointError if the file has no such chunk, or has it
        with another dtype or shape.
        """
        if chunk in self.chunk_begins:
            return self.chunk_begins[chunk]

        in_header = "missing"
        for stored_chunk in self.chunk_begins:
            if stored_chunk.key == chunk.key:
                in_header = f"{stored_chunk.dtype} {list(stored_chunk.shape)}"
        in_manifest = f"{chunk.dtype} {list(chunk.shape)}"
        raise self.damage_error(f"{chunk.key} is {in_header} in its header and {in_manifest} in the manifest")

    def read(self, requests: Sequence[ReadRequest], *, num_threads: int = NUM_THREADS) -> None:
        """Read byte ranges of the file into the requests' targets, in several threads.

        Blocks are hashed whole, so a block that several requests touch is read and verified once. Requests may be in
        any order. Raises UnsoundCheckpointError, which names the file and a tensor, if a block is damaged, if requests
        overlap, or if the file cannot be read. The targets then have undefined content.
        """
        requests = [request for request in requests if request.end > request.begin]
        requests.sort(key=lambda request: request.begin)
        if any(first.end > second.begin for first, second in pairwise(requests)):
            raise self.damage_error("chunks share bytes")
        begins = [request.begin for request in requests]
        ends = [request.end for request in requests]

        def read_range(blocks: BlockRange) -> None:
            """Read a range of blocks for the requests that overlap it: those that end after its first byte and begin
            before its end. Runs in several threads."""
            range_begin, range_end = blocks
            overlapping = requests[bisect_right(ends, range_begin) : bisect_left(begins, range_end)]
            self._read_blocks(blocks, overlapping)

        _map_in_threads(read_range, _block_ranges(self.file, requests), num_threads)

    def verify(self, on_read: Callable[[int], None] = lambda num_bytes: None) -> None:
        """Read the whole file and compare every block with its hash, in several threads. Nothing is kept.

        `on_read` is called, in any of these threads, with the number of bytes that have been verified since its last
        call, for a progress bar. Raises UnsoundCheckpointError, which names the file and a tensor in the damaged block.
        """

        def verify_range(blocks: BlockRange) -> None:
            self._read_blocks(blocks, ())
            range_begin, range_end = blocks
            on_read(range_end - range_begin)

        _map_in_threads(verify_range, _split_range(0, self.file.hashed_bytes, self.file.block_bytes), NUM_THREADS)

    def _read_blocks(self, blocks: BlockRange, requests: Sequence[ReadRequest]) -> None:
        """Read a range of whole blocks, fill the targets that lie in it, and compare each block with its hash.

        blocks: the range, whose first byte begins a block.
        requests: those that overlap the range, sorted and without overlaps. Bytes of the range that no request wants
            have to be hashed as well, and go to temporary memory.

        Raises UnsoundCheckpointError, which names the file and a tensor in the damaged block.
        """
        # Line up memory for every byte of the range: parts of targets, with temporary memory in the gaps.
        range_begin, range_end = blocks
        buffers: list[Buffer] = []
        position = range_begin
        for request in requests:
            begin = max(request.begin, position)
            end = min(request.end, range_end)
            if begin > position:
                buffers.append(np.empty(begin - position, np.uint8))
            buffers.append(request.target[begin - request.begin : end - request.begin])
            position = end
        if position < range_end:
            buffers.append(np.empty(range_end - position, np.uint8))
        # `starts` has the byte of the file at which each buffer begins, and the end of the range.
        starts = [*accumulate((len(buffer) for buffer in buffers), initial=range_begin)]

        def read_and_verify(source: Source) -> None:
            """Fill the buffers from the file, and raise DamagedCheckpointError for a block with another hash."""
            source.read_into(range_begin, buffers)
            for begin in range(range_begin, range_end, self.file.block_bytes):
                end = min(begin + self.file.block_bytes, range_end)
                hash_begin = begin // self.file.block_bytes * HASH_BYTES
                expected_hash = self.hashes[hash_begin : hash_begin + HASH_BYTES]
                if hash_buffers(_cut_buffers(buffers, starts, begin, end)) != expected_hash:
                    tensors = self._name_tensors(begin, end, requests)
                    raise self.damage_error(f"bytes {begin:,} to {end:,} are not what was written{tensors}")

        self._read_retrying(read_and_verify)

    def _name_tensors(self, begin: int, end: int, requests: Sequence[ReadRequest]) -> str:
        """Name the tensors that a damaged byte range belongs to, for a message: ` (in model/w and 2 more)`.

        If there are requests, only their tensors are named. Returns an empty string if no tensor has bytes in the
        range, for instance because it is part of the header.
        """
        named = set()
        for request in requests:
            if request.begin < end and request.end > begin:
                named.add(request.tensor)
        if not requests:
            for chunk, chunk_begin in self.chunk_begins.items():
                if chunk_begin < end and chunk_begin + chunk.num_bytes > begin:
                    named.add(chunk.tensor)

        if not named:
            return ""
        others = f" and {len(named) - 1} more" if len(named) > 1 else ""
        return f" (in {min(named)}{others})"


@contextmanager
def open_shard(folder: Folder, file: FileRecord) -> Iterator[Shard]:
    """Open a shard file for the length of a `with` block, and verify its header and the hashes of its blocks.

    `file` is its record in the manifest, with a name relative to `folder`. Raises UnsoundCheckpointError if the file is
    absent or unreadable, or if its size, header or hashes are not as recorded. The blocks are verified when they are
    read.
    """
    source = retry_on_damage(lambda bypass_cache: _open_once(folder, file, bypass_cache))
    try:
        yield Shard(folder, file, source)
    finally:
        source.close()


def read_file(
    folder: Folder, file: FileRecord | LogPart, read: Callable[[Source], T], opened: Source | None = None
) -> T:
    """Call `read` with an open file, and once more if the file seems damaged; return what it returns.

    folder, file: the file's record, with its name relative to the folder.
    read: reads from the file and may raise DamagedCheckpointError. The damage may be in this machine's page cache
        alone, so `read` is then called again with the file opened anew, past the cache, and must fail again to count.
    opened: the file, if it is open already. It stays open; what this function opens it also closes.

    Raises UnsoundCheckpointError if the file is damaged (as when it ends too early), absent or unreadable.
    """

    def read_once(bypass_cache: bool) -> T:
        """Call `read` with the open file or, at the second attempt, with the file opened anew."""
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
    """Open a shard file, and compare its header and every block with their hashes; see `Shard.verify`.

    Raises UnsoundCheckpointError if it is absent, unreadable or damaged.
    """
    with open_shard(folder, file) as opened:
        opened.verify(on_read)


def read_bytes(source: Source, offset: int, size: int) -> bytes:
    """Return `size` bytes of a file from `offset` on. Raises EOFError if the file ends before."""
    buffer = bytearray(size)
    source.read_into(offset, [memoryview(buffer)])
    return bytes(buffer)


def _open_once(folder: Folder, file: FileRecord | LogPart, bypass_cache: bool) -> Source:
    """Open a file, and compare its size with the record. With `bypass_cache`, reads go past this machine's page cache.

    Raises UnsoundCheckpointError if the file is absent or unreadable, or has another size than recorded.
    """
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
    """Return views of the buffers that together are bytes `begin` to `end` of their concatenation, without a copy.

    `starts` has the position at which each buffer begins, and the end of the last one. Buffers of 4 and 6 bytes have
    starts [0, 4, 10]; bytes 2 to 7 of them are the last 2 bytes of the first and the first 3 of the second. Positions
    need not begin at 0.
    """
    views = []
    buffer_index = bisect_right(starts, begin) - 1  # the buffer that has the byte `begin`
    position = begin
    while position < end:
        buffer_start = starts[buffer_index]
        view_end = min(end, starts[buffer_index + 1])
        views.append(buffers[buffer_index][position - buffer_start : view_end - buffer_start])
        position = view_end
        buffer_index += 1
    return views


def _block_ranges(file: FileRecord, requests: Sequence[ReadRequest]) -> list[BlockRange]:
    """Return the ranges of whole blocks to read for some requests, which are sorted by their first bytes.

    Blocks that requests share or that are adjacent form one range, unless it is too long for one thread. With blocks of
    10 bytes, requests for bytes 3 to 5, 12 to 14 and 41 to 43 give the ranges [0, 20) and [40, 50).
    """
    # Extend each request to whole blocks, and join it with the span before if they touch.
    spans: list[BlockRange] = []
    for request in requests:
        begin = request.begin // file.block_bytes * file.block_bytes
        end = min(_ceil_div(request.end, file.block_bytes) * file.block_bytes, file.hashed_bytes)
        if spans and begin <= spans[-1][1]:
            previous_begin, previous_end = spans.pop()
            begin = previous_begin
            end = max(end, previous_end)
        spans.append((begin, end))

    # Split the spans into what one thread reads at once.
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
    """Divide, and round up: 7 by 2 is 4."""
    return -(-dividend // divisor)


Item = TypeVar("Item")


def _map_in_threads(work: Callable[[Item], T], items: Sequence[Item], num_threads: int) -> list[T]:
    """Call `work` for each item, in several threads, and return the results in the order of the items.

    Raises the exception of the first item that failed, once all threads have stopped.
    """
    with ThreadPoolExecutor(num_threads, thread_name_prefix="checkpoint") as pool:
        return list(pool.map(work, items))
