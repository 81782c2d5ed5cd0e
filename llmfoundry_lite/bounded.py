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


def too_large(where: str | Path, max_bytes: int, what: str, remedy: str = ANOTHER) -> TooLargeError:
    reason = f"has more than {max_bytes:,} bytes, the most that are read of {what}"
    error = TooLargeError(f"{where} {reason}; {remedy}")
    error.strerror = reason
    return error


def read_at_most(path: str | Path, max_bytes: int, what: str, remedy: str = ANOTHER) -> bytes:
    """Read a whole regular file. Raises OSError: TooLargeError, for more than `max_bytes`, is one too."""
    with open(path, "rb", opener=open_regular) as file:
        return read_file_at_most(file, max_bytes, str(path), what, remedy)


def read_json(path: str | Path, what: str) -> Any:
    """Read a JSON document. Raises OSError, TooLargeError, and ValueError for bad JSON or one nested too deeply."""
    return parse_json(read_at_most(path, MAX_JSON_BYTES, what))


def parse_json(content: str | bytes) -> Any:
    """Parse JSON. Raises ValueError, even for a thousand brackets, where Python's parser raises RecursionError."""
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def read_file_at_most(file: IO[bytes], max_bytes: int, where: str, what: str, remedy: str = ANOTHER) -> bytes:
    """Read the rest of an open file, such as one of an archive. Raises TooLargeError for more than `max_bytes`."""
    content = read_up_to(file, max_bytes + 1)
    if len(content) > max_bytes:
        raise too_large(where, max_bytes, what, remedy)
    return content


def read_up_to(file: IO[bytes], num_bytes: int) -> bytes:
    """Read at most `num_bytes`, a piece at a time. A single read would allocate all of it, even for one byte."""
    content = io.BytesIO()
    while (room := num_bytes - content.tell()) and (piece := file.read(min(room, BLOCK_BYTES))):
        content.write(piece)
    return content.getvalue()


def read_lines_at_most(path: str | Path, max_bytes: int, what: str, begin: int = 0) -> Iterator[bytes]:
    """Yield the lines of a regular file from an offset on, with their line ends. Raises OSError: TooLargeError, for a
    line of more than MAX_LINE_BYTES or for more than `max_bytes` in all, is one too."""
    number, room = 0, max_bytes
    with open(path, "rb", opener=open_regular) as file:
        file.seek(begin)
        while line := file.readline(MAX_LINE_BYTES + 1):
            number, room = number + 1, room - len(line)
            if len(line) > MAX_LINE_BYTES:
                raise too_large(f"{path}, line {number}", MAX_LINE_BYTES, "a line")
            if room < 0:
                raise too_large(path, max_bytes, what)
            yield line


@contextmanager
def open_unpacked(file: IO[bytes], compression: str) -> Iterator[BinaryIO]:
    """Yield the content of a compressed file, a piece at a time. Reading it raises OSError where it is damaged."""
    import pyarrow as pa

    with pa.CompressedInputStream(pa.PythonFile(file, mode="r"), CODECS[compression]) as content:
        yield io.BufferedReader(content, BLOCK_BYTES)  # pyright: ignore[reportArgumentType]


def unpack_at_most(source: str | Path, compression: str, target: str | Path, max_bytes: int) -> None:
    """Unpack a file into a new one. `compression` is named as in an index: `zstd:9`, `gz`, `snappy`.

    Raises DataError as soon as there are more than `max_bytes`, ValueError or OSError where it does not unpack; then
    the new file is gone.
    """
    try:
        with open(source, "rb", opener=open_regular) as packed, open(target, "xb") as unpacked:
            if compression == "snappy":
                unpacked.write(_from_snappy(packed.read(), max_bytes, source))
                return
            with open_unpacked(packed, compression.partition(":")[0]) as content:
                while piece := content.read(BLOCK_BYTES):
                    if unpacked.tell() + len(piece) > max_bytes:
                        raise _unpacks_to_more(source, max_bytes)
                    unpacked.write(piece)
    except BaseException:
        Path(target).unlink(missing_ok=True)
        raise


def _from_snappy(packed: bytes, max_bytes: int, source: str | Path) -> bytes:
    """Unpack raw snappy, which cannot be read in pieces. It begins with its size (seven bits a byte), checked first."""
    import snappy

    size = 0
    for place, byte in enumerate(packed[:5]):
        size |= (byte & 127) << 7 * place
        if byte < 128:
            break
    if size > max_bytes:
        raise _unpacks_to_more(source, max_bytes)
    return cast(bytes, snappy.decompress(packed))


def _unpacks_to_more(source: str | Path, max_bytes: int) -> DataError:
    return DataError(f"{source} unpacks to more than {max_bytes:,} bytes, its size according to index.json")
