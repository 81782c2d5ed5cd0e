"""The content of an input file: decompressed, as UTF-8, block by block.

Owns compression, encodings of text, and the bound on memory: a small file may decompress to any size, so no block is
larger than BLOCK_BYTES and no document larger than LARGEST_DOCUMENT_BYTES. Leaves documents to `documents.py`.
"""

import codecs
import errno
import io
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from llmfoundry_lite.errors import DataError

COMPRESSED_SUFFIXES = (".gz", ".zst")
READ_BYTES = 1024 * 1024
BLOCK_BYTES = 1024 * 1024
LARGEST_DOCUMENT_BYTES = 256 * 1024 * 1024
"""Bytes of one document in a compressed file: 60 KB of .zst can hold gigabytes of the same letter."""


def read_document(path: Path) -> bytes | None:
    """A file's content, decompressed; None if that would be more than LARGEST_DOCUMENT_BYTES."""
    if path.suffix not in COMPRESSED_SUFFIXES:
        return path.read_bytes()
    content = bytearray()
    for block, _ in decompressed_blocks(path):
        content += block
        if len(content) > LARGEST_DOCUMENT_BYTES:
            return None
    return bytes(content)


def decompressed_copy(path: Path) -> BinaryIO:
    """A file without a name that holds the content of a compressed file."""
    copy: Any = tempfile.TemporaryFile()  # noqa: SIM115 - the caller's, and gone when it is
    try:
        for block, _ in decompressed_blocks(path):
            copy.write(block)
        copy.seek(0)
    except OSError as error:
        copy.close()
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataError(
            f"{path}: no space left in {tempfile.gettempdir()} to decompress it; free some, or set TMPDIR"
        ) from error
    return copy


def utf8_blocks(path: Path, encoding: str | None) -> Iterator[tuple[bytes, int]]:
    """The content of a file as UTF-8, with the number of bytes read so far. `encoding` None is UTF-8 already.

    A byte that the encoding does not know becomes half of a surrogate pair, which is no UTF-8: the line is then found
    and counted like any other that is damaged.
    """
    if encoding is None:
        yield from blocks(path)
        return
    decoder = codecs.getincrementaldecoder(encoding)(errors="surrogateescape")
    try:
        begun = False
        for block, read_bytes in blocks(path):
            text = decoder.decode(block)
            if text and not begun:
                text, begun = text.removeprefix("\ufeff"), True
            yield text.encode("utf-8", "surrogatepass"), read_bytes
        yield decoder.decode(b"", final=True).encode("utf-8", "surrogatepass"), path.stat().st_size
    except UnicodeError as error:
        raise DataError(f"{path} is not valid {encoding} ({error}); name its encoding with --encoding") from error


def blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """The content of a file in blocks, decompressed, with the number of bytes read from disk so far."""
    if path.suffix in COMPRESSED_SUFFIXES:
        yield from decompressed_blocks(path)
        return
    read_bytes = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            read_bytes += len(block)
            yield block, read_bytes


def decompressed_blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """The content of a .gz or .zst file, block by block, with the number of compressed bytes read so far.

    A file that stops in the middle is an error here; the usual stream readers return what they have and say nothing.
    """
    return ungzipped(path) if path.suffix == ".gz" else unzstandard(path)


def ungzipped(path: Path) -> Iterator[tuple[bytes, int]]:
    member = None
    read_bytes = num_members = 0
    try:
        with path.open("rb") as file:
            while block := file.read(READ_BYTES):
                read_bytes += len(block)
                while block:
                    if member is None and num_members:
                        block = block.lstrip(b"\0")  # as tapes and block devices pad files
                        if not block:
                            break
                    if member is None:
                        member = zlib.decompressobj(wbits=31)
                        num_members += 1
                    content = member.decompress(block, BLOCK_BYTES)
                    if content:
                        yield content, read_bytes
                    block = member.unused_data if member.eof else member.unconsumed_tail
                    member = None if member.eof else member
    except zlib.error as error:
        raise damaged(path, error) from error
    if member is not None:
        raise cut_short(path)


def unzstandard(path: Path) -> Iterator[tuple[bytes, int]]:
    """By arrow's reader: it bounds what one call returns, and tells a stream that ends from one that is cut."""
    import pyarrow as pa

    with path.open("rb") as file:
        try:
            with pa.CompressedInputStream(pa.PythonFile(file, mode="r"), "zstd") as stream:
                while content := stream.read(BLOCK_BYTES):
                    yield content, file.tell()
        except (pa.ArrowInvalid, OSError) as error:
            if getattr(error, "errno", None) is not None:
                raise  # the disk's, not the content's
            if "too much memory" in str(error):
                raise DataError(
                    f"{path} was compressed with a longer window than can be read here; decompress it, or compress it "
                    "anew with zstd --long=27 or less"
                ) from error
            raise (cut_short(path) if "Truncated" in str(error) else damaged(path, error)) from error


def damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is damaged: it does not decompress ({error})")


def cut_short(path: Path) -> DataError:
    return DataError(f"{path} is cut short: the compressed data ends in the middle; copy the file again")


class BlockReader(io.RawIOBase):
    """Blocks as a file to read from."""

    def __init__(self, source: Iterator[tuple[bytes, int]]) -> None:
        self.source = source
        self.block = memoryview(b"")
        self.read_bytes = 0
        """From disk so far."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.block:
            block, self.read_bytes = next(self.source, (None, self.read_bytes))
            if block is None:
                return 0
            self.block = memoryview(block)
        count = min(len(buffer), len(self.block))
        buffer[:count] = self.block[:count]
        self.block = self.block[count:]
        return count
