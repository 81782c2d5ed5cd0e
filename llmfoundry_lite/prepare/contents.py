"""Readers of one input file, as a single text or as lines. A companion reads the rows of CSV, parquet and arrow.

An input file is a path of this machine, or an object in a bucket, which a companion opens (`open_input_file`).
`read_text` is for files that are one document, and `read_lines` for files of lines. Both use `open_content`, which
decompresses. A small file may decompress to any size, so no document of a compressed file may exceed
MAX_DOCUMENT_BYTES. For a text that cannot be read, an `UnreadableText` is returned, so that the caller decides whether
to stop or to skip it.
"""

import gzip
import io
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import BinaryIO, NamedTuple
from urllib.parse import urlsplit

from llmfoundry_lite import companions
from llmfoundry_lite.bounded import BLOCK_BYTES, MAX_LINE_BYTES, MAX_LOG_BYTES, open_unpacked
from llmfoundry_lite.errors import DataError, mask_urls
from llmfoundry_lite.files import open_regular

COMPRESSED_SUFFIXES = (".gz", ".zst")
MAX_DOCUMENT_BYTES = MAX_LINE_BYTES
"""Limit of one document in a compressed file, because 60 KB of .zst can decompress to gigabytes of the same letter."""
MAX_PLAIN_BYTES = MAX_LOG_BYTES
"""Limit of one document in a file that is not compressed. The document is read into memory as a whole."""
ENCODING_ADVICE = "; --encoding names another encoding"
"""End of an error about a text that is not valid in its encoding."""


class UnreadableText(NamedTuple):
    """Stands in place of a text that cannot be read, with the reason, for counts and errors."""

    reason: str
    """One of `documents.SKIP_REASONS`."""
    description: str
    """The end of a sentence that begins with the location of the document: " is not valid UTF-8"."""


TOO_LARGE = UnreadableText(
    "too_large",
    f" decompresses to more than {MAX_DOCUMENT_BYTES // 2**20} MiB, the most that one document of a compressed "
    "file may have (decompress the file if that is meant)",
)

TOO_LARGE_PLAIN = UnreadableText(
    "too_large", f" has more than {MAX_PLAIN_BYTES // 2**30} GiB, the most that a document may have"
)


class RefusedFileError(DataError):
    """A store refuses an object to this user, or cannot give it out, such as one in an archive."""

    def __init__(self, text: str, reason: str = ""):
        super().__init__(text)
        self.reason = reason
        """The end of the message, after the name of the object."""

    def as_text(self) -> UnreadableText:
        """Return what stands in place of the texts in the object."""
        return UnreadableText("unreadable", f" cannot be read: {self.reason}")


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """An object in a bucket, as it was listed. Reading it raises DataError if it is not that version any more."""

    url: str
    num_bytes: int
    version: str
    """Text that differs for every content: the ETag, the generation, or the time of the last change."""

    @property
    def suffixes(self) -> list[str]:
        """The suffixes of its name, as those of a path: [".jsonl", ".gz"]."""
        is_http = self.url.startswith(("http://", "https://"))
        path = urlsplit(self.url).path if is_http else self.url  # elsewhere, a name may contain `?` and `#`
        return PurePosixPath(path).suffixes

    @property
    def suffix(self) -> str:
        """The last suffix of its name; empty if it has none."""
        return "".join(self.suffixes[-1:])

    def __str__(self) -> str:
        """Return the URL, without credentials."""
        return mask_urls(self.url)


InputFile = Path | RemoteFile
"""A file that is read: of this machine, or in a bucket."""


def open_input_file(file: InputFile, begin: int = 0, end: int | None = None) -> BinaryIO:
    """Open an input file for reading, at its beginning.

    `begin` and `end` delimit the bytes that are needed, so that not much more of an object is transferred. Other bytes
    can be read, too. Raises OSError for a path, and DataError for an object, also while it is read.
    """
    if isinstance(file, Path):
        return open(file, "rb", opener=open_regular)
    open_object = companions.load("llmfoundry_engines.bucket_files:open_object", str(file))
    return open_object(file, begin, file.num_bytes if end is None else end)


def size_of(file: InputFile) -> int:
    """Return the number of bytes of an input file."""
    return file.stat().st_size if isinstance(file, Path) else file.num_bytes


@contextmanager
def open_content(path: InputFile) -> Iterator[tuple[BinaryIO, Callable[[], int]]]:
    """Context manager: open a file for reading, decompressed if its suffix is .gz or .zst.

    Yields the file, and a function that returns how many bytes have been read from disk so far, for a progress bar. In
    a compressed file, these are fewer than the bytes that have been read from the yielded file.

    Raises DataError for a compressed file that is damaged or truncated, in the block that reads it. Other errors in the
    block are raised unchanged.
    """
    with open_input_file(path) as file:
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
            # Tell errors of decompression from all others: they have no `errno`, and come from a compressed file.
            is_plain = path.suffix not in COMPRESSED_SUFFIXES
            is_raised_by_caller = isinstance(error, DataError | UnicodeError)  # in the `with` block
            is_disk_error = getattr(error, "errno", None) is not None
            if is_plain or is_raised_by_caller or is_disk_error:
                raise
            raise decompression_error(path, error) from error


def decompression_error(path: InputFile, error: Exception) -> DataError:
    """Return the error for a compressed file, by the error that the decompression library has raised."""
    if "too much memory" in str(error):
        return DataError(
            f"{path} was compressed with a longer window than can be read here; decompress it, or compress it "
            "anew with zstd --long=27 or less"
        )
    if isinstance(error, EOFError) or "Truncated" in str(error):
        return DataError(f"{path} is cut short: the compressed data ends in the middle; copy the file again")
    return DataError(f"{path} is damaged: it does not decompress ({error})")


def read_text(path: InputFile, encoding: str | None) -> str | UnreadableText:
    """Read a file as one text, without a byte order mark. `encoding` None is UTF-8.

    Returns an UnreadableText for a file that is too large, or not valid in the encoding, such as
    UnreadableText("invalid_utf8", " is not valid UTF-8 (byte 17); --encoding names another encoding").

    Raises DataError for a damaged compressed file, and OSError for one that cannot be read.
    """
    # Read it. Of a compressed file, one byte more than the limit shows that the text is too large.
    is_compressed = path.suffix in COMPRESSED_SUFFIXES
    max_bytes = MAX_DOCUMENT_BYTES + 1 if is_compressed else -1
    try:
        with open_content(path) as (file, _):
            if not is_compressed and size_of(path) > MAX_PLAIN_BYTES:
                return TOO_LARGE_PLAIN
            content = file.read(max_bytes)
    except RefusedFileError as error:
        return error.as_text()
    if is_compressed and len(content) > MAX_DOCUMENT_BYTES:
        return TOO_LARGE

    # Decode it.
    try:
        return content.decode(encoding or "utf-8").removeprefix("\ufeff")
    except UnicodeError as error:
        position = f" (byte {error.start})" if isinstance(error, UnicodeDecodeError) else ""
        return UnreadableText("invalid_utf8", f" is not valid {encoding or 'UTF-8'}{position}{ENCODING_ADVICE}")


def read_lines(path: InputFile, encoding: str | None) -> Iterator[tuple[bytes | UnreadableText, int]]:
    """Yield the lines of a file, converted to UTF-8, each with the number of bytes read from disk so far.

    Lines end with b"\\n", except perhaps the last one. `encoding` is the file's encoding; None is UTF-8. For a line of
    more than MAX_DOCUMENT_BYTES, TOO_LARGE is yielded.

    A byte that is not valid in the encoding becomes a surrogate, which is not valid UTF-8, so that decoding the line
    fails later, and the caller can name the line. Raises DataError for a file that cannot be decoded at all.
    """
    with open_content(path) as (file, bytes_read), encoding_errors_as_data_errors(path, encoding):
        decoded_file = io.TextIOWrapper(file, encoding, "surrogateescape", newline="\n") if encoding else None
        is_skipping_line = False  # whether the rest of a line that was too large is being skipped, block by block
        while True:
            # Read a line, or a part of it if it is longer than the limit.
            limit = BLOCK_BYTES if is_skipping_line else MAX_DOCUMENT_BYTES
            if decoded_file is not None:
                line = decoded_file.readline(limit).encode("utf-8", "surrogatepass")
            else:
                line = file.readline(limit)
            if not line:
                return

            # The first part of a line that is too large stands for the whole line, and further parts are skipped.
            is_line_end = line.endswith(b"\n") or len(line) < limit
            if not is_skipping_line:
                yield line if is_line_end else TOO_LARGE, bytes_read()
            is_skipping_line = not is_line_end


@contextmanager
def encoding_errors_as_data_errors(path: InputFile, encoding: str | None) -> Iterator[None]:
    """Context manager: turn a UnicodeError into a DataError that names the file and its encoding (None: UTF-8)."""
    try:
        yield
    except UnicodeError as error:
        name = encoding or "utf-8"
        raise DataError(f"{path} is not valid {name} ({error}); name its encoding with --encoding") from error
