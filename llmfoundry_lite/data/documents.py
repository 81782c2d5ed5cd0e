"""The documents of one unit: what a unit of a source is, and how it is read.

Owns the kinds of units, files that are compressed, and what becomes of a document that cannot be read. Leaves finding
documents and cutting them into units to `sources.py`.

    read_documents(unit)  ->  Document, Document, …

| files                         | documents            | units                                              |
|-------------------------------|----------------------|----------------------------------------------------|
| .txt .md                      | one per file         | runs of small files                                |
| .jsonl .json .ndjson          | one per line         | byte ranges; a line belongs to where it starts     |
| .parquet                      | one per row          | row groups                                         |
| .gz .zst of JSON lines        | one per line         | pieces cut at line ends while decompressing        |
| rows of a Hub data set        | one per row          | runs of rows                                       |

A unit is read by one worker. Units that can be found again (files, byte ranges, row groups) carry only their
place; pieces of a stream carry their content, because nobody but the reader of the stream can get at it.
"""

import codecs
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import xxhash
import zstandard

from llmfoundry_lite.errors import DataError

COMPRESSED_SUFFIXES = (".gz", ".zst")
READ_BYTES = 1024 * 1024

STDLIB_HASH_SEED = 187
"""Chosen by what it holds out on Python 3.11 to 3.13: modules of ordinary code (`argparse`, `pathlib`, `pickle`, …),
5 % of the text, none of them much larger than the others."""

SKIP_REASONS: tuple[str, ...] = ("empty", "invalid_utf8", "invalid_json", "missing_text_key", "not_text")
"""Why a document was left out. `empty` is always left out; the others only with `--on-error skip`."""


class Document(NamedTuple):
    """One document: its text, the length of the text in UTF-8 bytes, and what decides its split.

    `split_key` is a 64-bit hash, so a document is in the validation split when its key is below a threshold. It
    hashes the text itself (the same text never sits in both splits) or, for the standard library, the name of the
    top-level module (whole modules are held out).
    """

    text: str
    num_bytes: int
    split_key: int


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeFiles:
    """A run of files, one document each."""

    paths: tuple[Path, ...]
    num_bytes: int
    """Bytes on disk: the unit's share of the progress bar. So for every unit."""
    modules: tuple[str, ...] = ()
    """For the standard library: the top-level module of each file. Files that are not UTF-8 are then left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LineRange:
    """The lines of a plain file that start at a byte offset in [start, end)."""

    path: Path
    start: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class LinePiece:
    """Whole lines of a compressed file, decompressed."""

    path: Path
    first_line: int
    lines: bytes = field(repr=False)
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGroup:
    """One row group of a parquet file; all of it when the file is compressed as a whole."""

    path: Path
    index: int | None
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPiece:
    """Consecutive rows of a Hub data set: the value of the text column, or the names of the columns that are there."""

    origin: str
    first_row: int
    values: tuple[Any, ...] = field(repr=False)
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Absent:
    """Stands in a RowPiece for a row without the text column."""

    columns: tuple[str, ...]


Unit: TypeAlias = WholeFiles | LineRange | LinePiece | RowGroup | RowPiece
Problem: TypeAlias = Callable[[str, str], None]
"""What to do with a bad document: called with one of SKIP_REASONS and a sentence, it counts it or raises."""


def read_documents(unit: Unit, *, text_key: str, on_error: str, skipped: Counter[str]) -> Iterator[Document]:
    """The documents of a unit, in order. Counts in `skipped` what it leaves out, by SKIP_REASONS.

    With `on_error="stop"` a bad document raises DataError, which names its file and line or row.
    """

    def problem(reason: str, sentence: str) -> None:
        if on_error == "stop":
            raise DataError(f"{sentence}; repair it, or leave such documents out with --on-error skip")
        skipped[reason] += 1

    match unit:
        case WholeFiles():
            documents = read_whole_files(unit, problem, skipped)
        case LineRange() | LinePiece():
            documents = read_lines(unit, text_key, problem)
        case RowGroup():
            documents = read_row_group(unit, text_key, problem)
        case RowPiece():
            documents = read_rows(unit, text_key, problem)
    for document in documents:
        if document.num_bytes == 0:
            skipped["empty"] += 1
        else:
            yield document


def read_whole_files(unit: WholeFiles, problem: Problem, skipped: Counter[str]) -> Iterator[Document]:
    for index, path in enumerate(unit.paths):
        content = read_file(path).removeprefix(codecs.BOM_UTF8)
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            if unit.modules:  # nobody can repair the standard library
                skipped["invalid_utf8"] += 1
            else:
                problem("invalid_utf8", f"{path} is not valid UTF-8 (byte {error.start})")
            continue
        key = split_key(unit.modules[index].encode(), STDLIB_HASH_SEED) if unit.modules else split_key(content)
        yield Document(text, len(content), key)


# Lines


def read_lines(unit: LineRange | LinePiece, text_key: str, problem: Problem) -> Iterator[Document]:
    if isinstance(unit, LineRange):
        lines = lines_starting_in(unit)

        def line_number(offset: int) -> int:  # only ever asked for the sake of a message
            return count_lines(unit.path, offset) + 1

    else:
        lines = lines_of(unit.lines)

        def line_number(offset: int) -> int:
            return unit.first_line + unit.lines.count(b"\n", 0, offset)

    for offset, line in lines:
        if offset == 0:
            line = line.removeprefix(codecs.BOM_UTF8)
        if not line or line.isspace():
            continue

        def where(offset: int = offset) -> str:
            return f"{unit.path}, line {line_number(offset)}"

        try:
            row = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError as error:
            problem("invalid_utf8", f"{where()} is not valid UTF-8 (byte {error.start} of the line)")
            continue
        except (json.JSONDecodeError, RecursionError) as error:
            reason = f"{error.msg}, column {error.colno}" if isinstance(error, json.JSONDecodeError) else "too deep"
            problem("invalid_json", f"{where()} does not parse as JSON ({reason}); expected one object per line")
            continue
        if not isinstance(row, dict):
            problem("invalid_json", f"{where()} holds a JSON {type(row).__name__}, expected an object")
            continue
        value = row.get(text_key, Absent(tuple(row)))
        yield from document_of(value, text_key, where, problem)


def lines_starting_in(unit: LineRange) -> Iterator[tuple[int, bytes]]:
    """The lines of a byte range with their offsets in the file; the last may reach beyond the end of the range."""
    with unit.path.open("rb") as file:
        offset = unit.start
        if unit.start > 0:  # a line that starts before belongs to the range before
            file.seek(unit.start - 1)
            offset += len(file.readline()) - 1
        while offset < unit.end:
            line = file.readline()
            if not line:
                return
            yield offset, line
            offset += len(line)


def lines_of(content: bytes) -> Iterator[tuple[int, bytes]]:
    """The lines of a piece with their offsets in it."""
    offset = 0
    for line in BytesIO(content):
        yield offset, line
        offset += len(line)


def count_lines(path: Path, end: int) -> int:
    """The number of line ends before a byte offset."""
    count = 0
    with path.open("rb") as file:
        while end > 0 and (block := file.read(min(end, READ_BYTES))):
            count += block.count(b"\n")
            end -= len(block)
    return count


# Rows


def read_row_group(unit: RowGroup, text_key: str, problem: Problem) -> Iterator[Document]:
    import pyarrow as pa

    parquet = open_parquet(unit.path)
    columns = parquet.schema_arrow.names
    if text_key not in columns:
        raise DataError(missing_text_key(str(unit.path), text_key, columns))
    groups = None if unit.index is None else [unit.index]
    row_number = 0
    for index in range(unit.index or 0):
        row_number += parquet.metadata.row_group(index).num_rows
    try:
        for batch in parquet.iter_batches(batch_size=1024, row_groups=groups, columns=[text_key]):
            column = batch.column(0)
            if pa.types.is_dictionary(column.type):
                column = column.dictionary_decode()
            if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
                raise DataError(f"{unit.path}: column {text_key} holds {column.type}, expected strings")
            # As bytes, because arrow does not check its strings and a single bad one would spoil the batch.
            binary = pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary()
            for value in column.cast(binary).to_pylist():
                row_number += 1

                def where(row_number: int = row_number) -> str:
                    return f"{unit.path}, row {row_number}"

                if value is not None:
                    try:
                        value = value.decode("utf-8")
                    except UnicodeDecodeError as error:
                        problem("invalid_utf8", f"{where()} is not valid UTF-8 (byte {error.start} of the text)")
                        continue
                yield from document_of(value, text_key, where, problem)
    except (pa.ArrowInvalid, OSError) as error:
        raise DataError(f"{unit.path} is damaged: {' '.join(str(error).split())}") from error


def open_parquet(path: Path) -> Any:
    """A parquet file, its footer read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(BytesIO(read_file(path)) if path.suffix in COMPRESSED_SUFFIXES else path)
    except pa.ArrowInvalid as error:
        raise DataError(f"{path} is not a parquet file: {' '.join(str(error).split())}") from error


def read_rows(unit: RowPiece, text_key: str, problem: Problem) -> Iterator[Document]:
    for row_number, value in enumerate(unit.values, start=unit.first_row + 1):

        def where(row_number: int = row_number) -> str:
            return f"{unit.origin}, row {row_number}"

        yield from document_of(value, text_key, where, problem)


# One document


def document_of(value: Any, text_key: str, where: Callable[[], str], problem: Problem) -> Iterator[Document]:
    """The document a row's value makes, or none and a problem."""
    if isinstance(value, Absent):
        problem("missing_text_key", missing_text_key(where(), text_key, value.columns))
        return
    if not isinstance(value, str):
        problem("not_text", f"{where()}: {text_key} is {describe(value)}, expected a string")
        return
    try:
        content = value.encode("utf-8")
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair, which no encoding can write
        problem("invalid_utf8", f"{where()}: {text_key} contains half of a surrogate pair, which is not valid Unicode")
        return
    yield Document(value, len(content), split_key(content))


def describe(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def missing_text_key(where: str, text_key: str, columns: Iterable[str]) -> str:
    """The sentence for a text column that is not there; it names those that are."""
    there = ", ".join(columns) or "none"
    return f"{where} has no {text_key!r}; there are: {there} (choose one with --text-key)"


def split_key(content: bytes, seed: int = 0) -> int:
    """A 64-bit hash, the same on every machine and in every process."""
    return xxhash.xxh3_64_intdigest(content, seed=seed)


# Files


def read_file(path: Path) -> bytes:
    """A file's content, decompressed."""
    if path.suffix in COMPRESSED_SUFFIXES:
        return b"".join(block for block, _ in decompressed_blocks(path))
    return path.read_bytes()


def decompressed_blocks(path: Path) -> Iterator[tuple[bytes, int]]:
    """The content of a .gz or .zst file, block by block, with the number of compressed bytes read so far.

    A file that stops in the middle is an error here; the usual stream readers return what they have and say nothing.
    """

    def new_frame() -> Any:
        return zlib.decompressobj(wbits=31) if path.suffix == ".gz" else zstandard.ZstdDecompressor().decompressobj()

    frame = None
    read_bytes = 0
    try:
        with path.open("rb") as file:
            while block := file.read(READ_BYTES):
                read_bytes += len(block)
                while block:
                    frame = frame or new_frame()
                    content = frame.decompress(block)
                    if content:
                        yield content, read_bytes
                    block = frame.unused_data if frame.eof else b""
                    frame = None if frame.eof else frame
    except (zlib.error, zstandard.ZstdError) as error:
        raise DataError(f"{path} is damaged: it does not decompress ({error})") from error
    if frame is not None:
        raise DataError(f"{path} is cut short: the compressed data ends in the middle; copy the file again")
