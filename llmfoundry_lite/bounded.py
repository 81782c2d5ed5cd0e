"""Readers of files that somebody else wrote: only regular files, and only up to a stated size.

Such a file may unpack to any size, have a line that never ends, or be a pipe, which `files.open_regular` refuses. There
are readers for whole files (`read_at_most`, `read_json`), for lines (`read_lines_at_most`), and for compressed files
(`open_unpacked`, `unpack_at_most`). The constants say how much is read of each kind of file.
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
"""Bytes that are read at a time."""
MAX_NOTE_BYTES = 1 << 20
"""Maximum size of a file with a few facts, such as status.json. The limits below are in bytes too."""
MAX_YAML_BYTES = 4 << 20
"""Maximum size of a YAML file. 10,000 streams take 2 MB, and PyYAML parses half a MB per second."""
MAX_JSON_BYTES = 128 << 20
"""Maximum size of a JSON file. An index of 300,000 tensors has 40 MB. As objects it takes up to 20 times as much."""
MAX_INDEX_BYTES = 1 << 30
"""Maximum size of an MDS split's index. One of 1.5 million shards (100 TB), compressed and hashed, has 650 MB."""
MAX_TOKENIZER_BYTES = 256 << 20
"""Maximum size of a tokenizer's file. One of 256,000 tokens has 33 MB."""
MAX_LINE_BYTES = 256 << 20
"""Maximum size of a line, or of a text: the longest document that `data prepare` takes."""
MAX_LOG_BYTES = 4 << 30
"""Maximum size of a file that is read line by line. The metrics.jsonl of 6 million batches has this size."""
ANOTHER = "give another file"
"""Usual remedy in the error about a file that is too large."""
CODECS = {"br": "brotli", "bz2": "bz2", "gz": "gzip", "zst": "zstd", "zstd": "zstd"}
"""Compression, as an index or a file's suffix names it -> the codec's name in Arrow. Arrow refuses frames of zstd whose
window is larger than 128 MiB, as the program `zstd` does by default."""


class TooLargeError(OSError, DataError):
    """A file has more bytes than are read of its kind.

    It is an OSError too, so that it is handled wherever a file may be unreadable.
    """


def too_large(path: str | Path, max_bytes: int, kind: str, remedy: str = ANOTHER) -> TooLargeError:
    """Return, but do not raise, the error for a file of more than `max_bytes`.

    `kind` is what the message calls such a file: `a log`, `an index`. `remedy` is the end of the message.
    """
    reason = f"has more than {max_bytes:,} bytes, the most that are read of {kind}"
    error = TooLargeError(f"{path} {reason}; {remedy}")
    error.strerror = reason  # for callers that handle it as any OSError
    return error


def read_at_most(path: str | Path, max_bytes: int, kind: str, remedy: str = ANOTHER) -> bytes:
    """Read a whole regular file that somebody else may have written.

    `kind` and `remedy` are for the message: `a log`, `give another file`. Raises OSError if the file cannot be read,
    and its subclass TooLargeError if it has more than `max_bytes`.
    """
    with open(path, "rb", opener=open_regular) as file:
        return read_file_at_most(file, max_bytes, str(path), kind, remedy)


def read_json(path: str | Path, kind: str) -> Any:
    """Read a JSON document of at most MAX_JSON_BYTES that somebody else may have written.

    `kind` names it in messages: `an index`. Raises OSError if the file cannot be read, its subclass TooLargeError, and
    ValueError if the content is not JSON or is nested too deeply.
    """
    return parse_json(read_at_most(path, MAX_JSON_BYTES, kind))


def parse_json(content: str | bytes) -> Any:
    """Parse JSON. Raises ValueError for any bad content.

    Bad content includes a thousand nested brackets, for which Python's parser raises RecursionError.
    """
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_file_at_most(file: IO[bytes], max_bytes: int, path: str, kind: str, remedy: str = ANOTHER) -> bytes:
    """Read the rest of an open file, such as a member of an archive. `path`, `kind` and `remedy` are for the message.

    Raises TooLargeError if there are more than `max_bytes`.
    """
    # One byte more than the limit shows that the file is too large, without reading all of it.
    content = read_up_to(file, max_bytes + 1)
    if len(content) > max_bytes:
        raise too_large(path, max_bytes, kind, remedy)
    return content


def read_up_to(file: IO[bytes], max_bytes: int) -> bytes:
    """Read `max_bytes` of an open file, or the whole rest of it if that is less.

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

    `kind` names the file in messages: `a log`. Raises OSError if the file cannot be read, and its subclass
    TooLargeError for a line of more than MAX_LINE_BYTES, or as soon as the lines have more than `max_bytes` in all.
    """
    num_lines = 0
    num_bytes = 0
    with open(path, "rb", opener=open_regular) as file:
        file.seek(begin)
        # A longer line would be returned in parts, and the first part already exceeds the limit.
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
                    # Checked before the block is written, so that the disk cannot fill up.
                    if unpacked.tell() + len(block) > max_bytes:
                        raise _unpacks_to_more(source, max_bytes)
                    unpacked.write(block)
    except BaseException:  # Ctrl-C too
        Path(target).unlink(missing_ok=True)
        raise


def _unpack_snappy(packed: bytes, max_bytes: int, source: str | Path) -> bytes:
    """Unpack raw snappy, which cannot be read in blocks. Raises DataError if it has more than `max_bytes`.

    The format begins with the unpacked size, so the size is checked before any memory is allocated for it. It is a
    varint of at most 32 bits: each byte has seven bits of the number, the lowest ones first, and its eighth bit says
    whether another byte follows. The bytes `ac 02` mean 0x2c + (2 << 7) = 300.
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
