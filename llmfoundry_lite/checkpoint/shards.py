"""Shard files: safetensors, written and read in one pass over their bytes, which hashes them block by block.

Owns the layout of a file and the hashing; what the bytes mean is `format`'s, where they lie is the manifest's. Data
starts at a multiple of 4096 and each slice at a multiple of its item size, so that a file can be mapped. No torch.
"""

import json
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import xxhash

from llmfoundry_lite.checkpoint.codec import write_json
from llmfoundry_lite.checkpoint.manifest import ALGORITHM, ITEM_BYTES, FileRecord, Manifest
from llmfoundry_lite.checkpoint.places import Buffer, Place, Source, unreadable, wrong_twice
from llmfoundry_lite.errors import DamagedCheckpointError

BLOCK_BYTES = 1 << 20
CHUNK_BYTES = 8 << 20
"""What one thread writes or reads at a time."""
ALIGNMENT = 4096
MAX_HEADER_BYTES = 100_000_000
"""As safetensors has it."""


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


def build_header(entries: Sequence[Entry], metadata: dict[str, str]) -> tuple[bytes, list[tuple[int, int]]]:
    """The file's first bytes, and where in the file each of `entries` (in `file_order`) lies."""
    ends = list(accumulate(entry.num_bytes for entry in entries))
    ranges = [(end - entry.num_bytes, end) for entry, end in zip(entries, ends, strict=True)]
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    for entry, (begin, end) in zip(entries, ranges, strict=True):
        header[entry.key] = {"dtype": entry.dtype, "shape": entry.shape, "data_offsets": [begin, end]}
    text = write_json(header)
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, [(start + begin, start + end) for begin, end in ranges]


def write_shard(
    place: Place,
    name: str,
    pieces: Sequence[Buffer],
    *,
    num_threads: int = 4,
    block_bytes: int = BLOCK_BYTES,
    on_phase: Callable[[str], None] = lambda phase: None,
) -> FileRecord:
    """Write `pieces` (uint8; header first) one after the other; hash and write in the same pass. Durable on return.

    Whatever goes wrong in a thread is raised here, and then the file is worthless.
    """
    views = [memoryview(piece).cast("B") for piece in pieces if len(piece)]
    starts = [0, *accumulate(len(view) for view in views)]
    size = starts[-1]
    hashes = [""] * -(-size // block_bytes)
    sink = place.sink(name, size)
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
    except BaseException:
        sink.abandon()
        raise
    sink.close()
    on_phase("shard synced")
    return FileRecord(name, size, ALGORITHM, block_bytes, "".join(hashes))


def read_wanted(
    place: Place, file: FileRecord, wants: Sequence[Want], *, verify: bool = True, num_threads: int = 4
) -> None:
    """Fill each target; verify every block touched, once, in the same pass.

    Raises UnsoundCheckpointError naming the file and a tensor. Targets are then undefined.
    """
    wants = sorted((want for want in wants if want.end > want.begin), key=lambda want: want.begin)
    if not wants:
        return
    assert all(a.end <= b.begin for a, b in pairwise(wants)), "no byte is wanted twice"
    source = _open(place, file)
    try:
        _for_each(
            lambda run: _read_run(source, place, file, run, run.wants, verify), _runs(file, wants, verify), num_threads
        )
    finally:
        source.close()


def read_verified(place: Place, file: FileRecord) -> bytes:
    """All of a file. Raises UnsoundCheckpointError."""
    _open(place, file).close()  # the size first: the memory for one that lies may not be there
    content = np.empty(file.num_bytes, np.uint8)
    read_wanted(place, file, [Want(0, file.num_bytes, content, file.name)])
    return content.tobytes()


def verify_file(place: Place, file: FileRecord, named: Sequence[Span] = (), *, num_threads: int = 2) -> None:
    """All blocks. Raises UnsoundCheckpointError naming the file and, from `named`, a tensor in the damaged block."""
    source = _open(place, file)
    chunk_bytes = max(file.block_bytes, CHUNK_BYTES // file.block_bytes * file.block_bytes)
    runs = [Run(begin, min(begin + chunk_bytes, file.num_bytes), []) for begin in range(0, file.num_bytes, chunk_bytes)]
    try:
        _for_each(lambda run: _read_run(source, place, file, run, named, True), runs, num_threads)
    finally:
        source.close()


def check_header(place: Place, manifest: Manifest, index: int) -> None:
    """That the file's own header says what the manifest says. Raises UnsoundCheckpointError."""
    wrong_twice(lambda is_anew: _check_header(place, manifest, index, is_anew))


def _check_header(place: Place, manifest: Manifest, index: int, is_anew: bool) -> None:
    file = manifest.files[index]
    where = f"{place.url}/{file.name}"
    source = _open_once(place, file, is_anew)
    try:
        length = int.from_bytes(_read_bytes(source, 0, 8), "little")
        if not 2 <= length <= min(MAX_HEADER_BYTES, file.num_bytes - 8):
            raise DamagedCheckpointError(f"{where}: its header claims {length:,} bytes", file.name)
        header = json.loads(_read_bytes(source, 8, length))
    except DamagedCheckpointError:
        raise
    except (ValueError, RecursionError, EOFError):
        raise DamagedCheckpointError(f"{where}: its header is not that of a safetensors file", file.name) from None
    except OSError as error:
        raise unreadable(place, file.name, error) from error
    finally:
        source.close()
    if not isinstance(header, dict):
        raise DamagedCheckpointError(f"{where}: its header is not that of a safetensors file", file.name)
    header.pop("__metadata__", None)
    expected = {
        part.key(name): {
            "dtype": tensor.dtype,
            "shape": list(part.shape),
            "data_offsets": [part.begin - 8 - length, part.end - 8 - length],
        }
        for name, tensor in manifest.tensors.items()
        for part in tensor.slices
        if part.file == index
    }
    for key in sorted(expected.keys() | header.keys()):
        if expected.get(key) != header.get(key):
            raise DamagedCheckpointError(
                f"{where}: {key} is {header.get(key, 'missing')} in its header and {expected.get(key, 'missing')} in "
                "the manifest",
                file.name,
            )


def hash_pieces(pieces: Sequence[Buffer]) -> str:
    if len(pieces) == 1:
        return xxhash.xxh3_128_hexdigest(pieces[0])
    state = xxhash.xxh3_128()
    for piece in pieces:
        state.update(piece)
    return state.hexdigest()


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
        end = min(-(-want.end // grain) * grain, file.num_bytes)
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


def _read_run(
    first_source: Source,
    place: Place,
    file: FileRecord,
    run: Run,
    named: Sequence[Want | Span],
    verify: bool,
) -> None:
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

    def read(is_anew: bool) -> None:
        source = _open_once(place, file, is_anew=True) if is_anew else first_source
        try:
            source.read_into(begin, pieces)
            if verify:
                _check_blocks(place, file, run, pieces, named)
        except EOFError as error:
            raise DamagedCheckpointError(f"{place.url}/{file.name}: {error}", file.name) from None
        except OSError as error:
            raise unreadable(place, file.name, error) from error
        finally:
            if is_anew:
                source.close()

    wrong_twice(read)


def _check_blocks(
    place: Place, file: FileRecord, run: Run, pieces: Sequence[Buffer], named: Sequence[Want | Span]
) -> None:
    begin, end = run.begin, run.end
    starts = [begin, *(begin + n for n in accumulate(len(piece) for piece in pieces))]
    for block in range(begin // file.block_bytes, -(-end // file.block_bytes)):
        first, last = block * file.block_bytes, min((block + 1) * file.block_bytes, end)
        if hash_pieces(_cut(pieces, starts, first, last)) != file.block_hash(block):
            raise DamagedCheckpointError(
                f"{place.url}/{file.name}: bytes {first:,} to {last:,} are not what was written"
                + _inside(named, first, last),
                file.name,
            )


def _inside(named: Sequence[Want | Span], first: int, last: int) -> str:
    hit = sorted({span.tensor for span in named if span.begin < last and span.end > first})
    if not hit:
        return ""
    return f" (in {hit[0]}" + (f" and {len(hit) - 1} more)" if len(hit) > 1 else ")")


def _open(place: Place, file: FileRecord) -> Source:
    return wrong_twice(lambda is_anew: _open_once(place, file, is_anew))


def _open_once(place: Place, file: FileRecord, is_anew: bool) -> Source:
    try:
        source = place.source(file.name, is_anew=is_anew)
    except OSError as error:
        raise unreadable(place, file.name, error) from error
    if source.num_bytes != file.num_bytes:
        source.close()
        raise DamagedCheckpointError(
            f"{place.url}/{file.name}: {source.num_bytes:,} bytes, written were {file.num_bytes:,}", file.name
        )
    return source


def _read_bytes(source: Source, offset: int, size: int) -> bytes:
    buffer = bytearray(size)
    source.read_into(offset, [memoryview(buffer)])
    return bytes(buffer)


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
