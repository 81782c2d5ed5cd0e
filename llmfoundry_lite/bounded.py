"""Readers of bytes that somebody else wrote: only from regular files, and only up to a stated size.

A small file may unpack to any size, a line may never end, and a name may lead to a pipe, which `files.open_regular`
refuses.
"""

import io
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import open_regular

BLOCK_BYTES = 1 << 20
MAX_NOTE_BYTES = 1 << 20
"""Most bytes of a file with a few facts, such as status.json. The limits below count bytes too."""
MAX_YAML_BYTES = 4 << 20
"""Bytes of a YAML file: 10,000 streams have 2 MB, and PyYAML reads half a MB a second."""
MAX_JSON_BYTES = 128 << 20
"""Bytes of a JSON document: an index of 300,000 tensors has 40 MB. As objects it takes up to twenty times as much."""
MAX_INDEX_BYTES = 1 << 30
"""Bytes of an MDS split's index: one of 1.5 million shards (100 TB), compressed and hashed, has 650 MB."""
MAX_TOKENIZER_BYTES = 256 << 20
"""Bytes of a file of a tokenizer: one of 256,000 tokens has 33 MB."""
MAX_LINE_BYTES = 256 << 20
"""Bytes of a line, or of a text: the longest document that `data prepare` takes."""
MAX_LOG_BYTES = 4 << 30
"""Bytes of a file that is read line by line: metrics.jsonl of 6 million batches."""
ANOTHER = "give another file"
CODECS = {"br": "brotli", "bz2": "bz2", "gz": "gzip", "zst": "zstd", "zstd": "zstd"}
"""Name in an index or suffix -> name in Arrow, which refuses windows of more than 128 MiB, as zstd does."""


class TooLargeError(OSError, DataError):
    """A file has more bytes than are read of its kind. As an OSError, it is handled where a file may be unreadable."""


def too_large(path: str | Path, max_bytes: int, kind: str, remedy: str = ANOTHER) -> TooLargeError:
    """Return the error for a file of more than `max_bytes`, of a kind that a message names: `a log`, `an index`."""
    reason = f"has more than {max_bytes:,} bytes, the most that are read of {kind}"
    error = TooLargeError(f"{path} {reason}; {remedy}")
    error.strerror = reason  # for callers that handle it as any OSError
    return error


def read_at_most(path: str | Path, max_bytes: int, kind: str, remedy: str = ANOTHER) -> bytes:
    """Read a whole regular file that somebody else may have written.

    `kind` and `remedy` are for the message: `a log`, `give another file`. Raises OSError, of which TooLargeError, for
    more than `max_bytes`, is a subclass.
    """
    with open(path, "rb", opener=open_regular) as file:
        return read_file_at_most(file, max_bytes, str(path), kind, remedy)


def read_json(path: str | Path, kind: str) -> Any:
    """Read a JSON document of at most MAX_JSON_BYTES that somebody else may have written.

    `kind` names it in messages: `an index`. Raises OSError, TooLargeError, and ValueError for bad JSON or one that is
    nested too deeply.
    """
    return parse_json(read_at_most(path, MAX_JSON_BYTES, kind))


def parse_json(content: str | bytes) -> Any:
    """Parse JSON. Raises ValueError for any bad content.

    That includes a thousand nested brackets, for which Python's parser raises RecursionError.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_file_at_most(file: IO[bytes], max_bytes: int, path: str, kind: str, remedy: str = ANOTHER) -> bytes:
    """Read the rest of an open file, such as a member of an archive. `path`, `kind` and `remedy` are for the message.

    Raises TooLargeError if there are more than `max_bytes`.
    """
    content = read_up_to(file, max_bytes + 1)
    if len(content) > max_bytes:
        raise too_large(path, max_bytes, kind, remedy)
    return content


def read_up_to(file: IO[bytes], max_bytes: int) -> bytes:
    """Read `max_bytes` of an open file, or all that it has if that is less.

    It is read in blocks, because a single read would allocate `max_bytes` of memory even for a file of one byte.
    """
    content = io.BytesIO()
    while content.tell() < max_bytes:
        block = file.read(min(max_bytes - content.tell(), BLOCK_BYTES))
        if not block:
            break
        content.write(block)
    return content.getvalue()


def read_lines_at_most(path: str | Path, max_bytes: int, kind: str, begin: int = 0) -> Iterator[bytes]:
    """Yield the lines of a regular file, with their line ends, from the byte offset `begin` on.

    `kind` names the file in messages: `a log`. Raises OSError, of which TooLargeError is a subclass: for a line of more
    than MAX_LINE_BYTES, or when the lines have more than `max_bytes` in all.
    """
    num_lines = 0
    num_bytes = 0
    with open(path, "rb", opener=open_regular) as file:
        file.seek(begin)
        while line := file.readline(MAX_LINE_BYTES + 1):
            num_lines += 1
            num_bytes += len(line)
            if len(line) > MAX_LINE_BYTES:
                raise too_large(f"{path}, line {num_lines}", MAX_LINE_BYTES, "a line")
            if num_bytes > max_bytes:
                raise too_large(path, max_bytes, kind)
            yield line


@contextmanager
def open_unpacked(packed: IO[bytes], compression: str) -> Iterator[BinaryIO]:
    """Open a compressed file, and yield a file of its uncompressed content, which is unpacked while it is read.

    `compression` is a key of CODECS, such as `zstd` or `gz`. Reading raises OSError where the file is damaged.
    """
    import pyarrow as pa

    with pa.CompressedInputStream(pa.PythonFile(packed, mode="r"), CODECS[compression]) as content:
        yield io.BufferedReader(content, BLOCK_BYTES)  # pyright: ignore[reportArgumentType]


def unpack_at_most(source: str | Path, compression: str, target: str | Path, max_bytes: int) -> None:
    """Unpack the file `source` into a new file `target` of at most `max_bytes`.

    `compression` is as an index of a data set names it: `zstd:9` with a level, `gz`, `snappy`.

    Raises DataError as soon as there are more than `max_bytes`, and ValueError or OSError if `source` is damaged or
    `target` exists. After an error there is no `target`.
    """
    try:
        with open(source, "rb", opener=open_regular) as packed, open(target, "xb") as unpacked:
            if compression == "snappy":
                unpacked.write(_unpack_snappy(packed.read(), max_bytes, source))
                return

            codec, _, _ = compression.partition(":")
            with open_unpacked(packed, codec) as content:
                while block := content.read(BLOCK_BYTES):
                    if unpacked.tell() + len(block) > max_bytes:
                        raise _unpacks_to_more(source, max_bytes)
                    unpacked.write(block)
    except BaseException:  # Ctrl-C too
        Path(target).unlink(missing_ok=True)
        raise


def _unpack_snappy(packed: bytes, max_bytes: int, source: str | Path) -> bytes:
    """Unpack raw snappy, which cannot be read in blocks. Raises DataError if it has more than `max_bytes`.

    The format begins with the unpacked size, so the size is checked before any memory is allocated for it. It has seven
    bits in each byte, the lowest first, and the eighth bit says that another byte follows: five bytes for 32 bits.
    """
    import snappy

    size = 0
    for position, byte in enumerate(packed[:5]):
        size |= (byte & 0x7F) << (7 * position)
        is_last = byte < 0x80
        if is_last:
            break
    if size > max_bytes:
        raise _unpacks_to_more(source, max_bytes)
    return cast(bytes, snappy.decompress(packed))


def _unpacks_to_more(source: str | Path, max_bytes: int) -> DataError:
    """Return the error for a file that has more content than its data set's index says."""
    return DataError(f"{source} unpacks to more than {max_bytes:,} bytes, its size according to index.json")
