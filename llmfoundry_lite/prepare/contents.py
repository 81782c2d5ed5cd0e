"""Readers of one input file: whole text, and lines. A companion reads the rows of CSV, parquet and arrow.

A small file may decompress to any size, so no document of a compressed file may exceed MAX_DOCUMENT_BYTES. A text that
cannot be read is returned as a `Bad`, so that the caller decides whether to stop or to leave it out.
"""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from llmfoundry_lite.bounded import BLOCK_BYTES, MAX_LINE_BYTES, MAX_LOG_BYTES, open_unpacked
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import open_regular

COMPRESSED_SUFFIXES = (".gz", ".zst")
MAX_DOCUMENT_BYTES = MAX_LINE_BYTES
"""Most bytes of one document in a compressed file: 60 KB of .zst can hold gigabytes of the same letter."""
MAX_PLAIN_BYTES = MAX_LOG_BYTES
"""Most bytes of one document in a file that is not compressed. It is read whole."""
OTHER_ENCODING = "; --encoding names another encoding"
"""End of a sentence about a text that is not valid."""


class Bad(NamedTuple):
    """Placeholder for a text that cannot be read."""

    reason: str
    """One of `documents.SKIP_REASONS`."""
    sentence: str
    """Sentence that continues the name of the document."""


TOO_LARGE = Bad(
    "too_large",
    f" decompresses to more than {MAX_DOCUMENT_BYTES // 2**20} MiB, the most that one document of a compressed "
    "file may have (decompress the file if that is meant)",
)

TOO_LARGE_PLAIN = Bad("too_large", f" has more than {MAX_PLAIN_BYTES // 2**30} GiB, the most that a document may have")


@contextmanager
def open_content(path: Path) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """Open a file, decompressed if its suffix says so. Yields it, and a function that tells the bytes read from disk.

    Raises DataError for a compressed file that is damaged or cut short.
    """
    with open(path, "rb", opener=open_regular) as file:
        try:
            if path.suffix == ".gz":
                with gzip.open(file) as content:
                    yield io.BufferedReader(content, BLOCK_BYTES), file.tell  # pyright: ignore[reportArgumentType]
            elif path.suffix == ".zst":
                with open_unpacked(file, "zst") as content:
                    yield content, file.tell
            else:
                yield file, file.tell
        except (EOFError, OSError, ValueError, zlib.error) as error:
            is_plain = path.suffix not in COMPRESSED_SUFFIXES
            is_of_content = isinstance(error, DataError | UnicodeError)  # raised by the caller while it reads
            is_of_disk = getattr(error, "errno", None) is not None
            if is_plain or is_of_content or is_of_disk:
                raise
            raise decompression_error(path, error) from error


def decompression_error(path: Path, error: Exception) -> DataError:
    """Return the error for a compressed file, from the words that its library has for the fault."""
    if "too much memory" in str(error):
        return DataError(
            f"{path} was compressed with a longer window than can be read here; decompress it, or compress it "
            "anew with zstd --long=27 or less"
        )
    if isinstance(error, EOFError) or "Truncated" in str(error):
        return DataError(f"{path} is cut short: the compressed data ends in the middle; copy the file again")
    return DataError(f"{path} is damaged: it does not decompress ({error})")


def read_text(path: Path, encoding: str | None) -> str | Bad:
    """Read a whole file as text, without its byte order mark. None for the encoding is UTF-8."""
    is_compressed = path.suffix in COMPRESSED_SUFFIXES
    max_bytes = MAX_DOCUMENT_BYTES + 1 if is_compressed else -1
    with open_content(path) as (file, _):
        if not is_compressed and path.stat().st_size > MAX_PLAIN_BYTES:
            return TOO_LARGE_PLAIN
        content = file.read(max_bytes)
    if is_compressed and len(content) > MAX_DOCUMENT_BYTES:
        return TOO_LARGE
    try:
        return content.decode(encoding or "utf-8").removeprefix("\ufeff")
    except UnicodeError as error:
        position = f" (byte {error.start})" if isinstance(error, UnicodeDecodeError) else ""
        return Bad("invalid_utf8", f" is not valid {encoding or 'UTF-8'}{position}{OTHER_ENCODING}")


def read_lines(path: Path, encoding: str | None) -> Iterator[tuple[bytes | Bad, int]]:
    """Read a file's lines as UTF-8, each with the number of bytes read from disk so far.

    A byte that the encoding does not know becomes half of a surrogate pair. That is no valid UTF-8, so the line is
    reported as damaged later. A line of more than MAX_DOCUMENT_BYTES is yielded as TOO_LARGE.
    """
    with open_content(path) as (file, bytes_read), named_encoding(path, encoding):
        text = io.TextIOWrapper(file, encoding, "surrogateescape", newline="\n") if encoding else None
        is_within_line = False  # which was too large; its rest is dropped, block by block
        while True:
            limit = BLOCK_BYTES if is_within_line else MAX_DOCUMENT_BYTES
            if text is not None:
                line = text.readline(limit).encode("utf-8", "surrogatepass")
            else:
                line = file.readline(limit)
            if not line:
                return
            is_whole = line.endswith(b"\n") or len(line) < limit
            if not is_within_line:
                yield line if is_whole else TOO_LARGE, bytes_read()
            is_within_line = not is_whole


@contextmanager
def named_encoding(path: Path, encoding: str | None) -> Iterator[None]:
    """Raise DataError, in one sentence, for a stream that the encoding cannot read at all."""
    try:
        yield
    except UnicodeError as error:
        name = encoding or "utf-8"
        raise DataError(f"{path} is not valid {name} ({error}); name its encoding with --encoding") from error
