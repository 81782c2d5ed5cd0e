"""How the documents of one unit are read.

Owns files and lines. Leaves the kinds of units, and what makes a row a document, to `units.py`, tables to `tables.py`,
finding documents and cutting them into units to `sources.py`, compression and encodings to `contents.py`.

    read_documents(unit)  ->  Document, Document, …

| files                          | documents            | units                                              |
|--------------------------------|----------------------|----------------------------------------------------|
| .txt .md                       | one per file         | runs of small files                                |
| .jsonl .json .ndjson           | one per line         | byte ranges; a line belongs to where it starts     |
| .parquet                       | one per row          | row groups                                         |
| .arrow                         | one per row          | runs of record batches                             |
| JSON lines, .gz .zst or no UTF-8 | one per line       | pieces cut at line ends while decompressing        |
| .csv .tsv, a Hub data set      | one per row          | runs of rows                                       |
"""

import codecs
import json
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

from llmfoundry_lite.prepare.contents import LARGEST_DOCUMENT_BYTES, READ_BYTES, read_document
from llmfoundry_lite.prepare.tables import read_arrow_batches, read_row_group
from llmfoundry_lite.prepare.units import (
    ArrowBatches,
    Document,
    LinePiece,
    LineRange,
    Problem,
    RowGroup,
    RowPiece,
    Skipped,
    Unit,
    WholeFiles,
    document_of,
    split_key,
    value_of,
)

STDLIB_HASH_SEED = 187
"""Chosen by what it holds out on Python 3.11 to 3.13: modules of ordinary code (`argparse`, `pathlib`, `pickle`, …),
5 % of the text, none of them much larger than the others."""


def read_documents(
    unit: Unit, *, text_keys: tuple[str, ...], on_error: str, skipped: Skipped, encoding: str | None = None
) -> Iterator[Document]:
    """The documents of a unit, in order. Notes in `skipped` what it leaves out.

    With `on_error="stop"` a bad document raises DataError, which names its file and line or row. `encoding` is that
    of whole files; None is UTF-8.
    """
    problem = Problem(on_error, skipped)
    match unit:
        case WholeFiles():
            documents = read_whole_files(unit, encoding, problem)
        case LineRange() | LinePiece():
            documents = read_lines(unit, text_keys, problem)
        case RowGroup():
            documents = read_row_group(unit, text_keys, problem)
        case ArrowBatches():
            documents = read_arrow_batches(unit, text_keys, problem)
        case RowPiece():
            documents = read_rows(unit, problem)
    for document in documents:
        if document.num_bytes == 0:
            skipped.counts["empty"] += 1
        else:
            yield document


TOO_LARGE = (
    f" decompresses to more than {LARGEST_DOCUMENT_BYTES // 2**20} MiB, the most that one document of a compressed "
    "file may have (decompress the file if that is meant)"
)

OTHER_ENCODING = "; --encoding names another encoding"


def read_whole_files(unit: WholeFiles, encoding: str | None, problem: Problem) -> Iterator[Document]:
    for index, path in enumerate(unit.paths):
        where = path.__str__
        content = read_document(path)
        if content is None:
            problem("too_large", where, TOO_LARGE)
            continue
        try:
            if encoding is None:
                content = content.removeprefix(codecs.BOM_UTF8)
                text = content.decode("utf-8")
            else:
                text = content.decode(encoding).removeprefix("\ufeff")
                content = text.encode("utf-8")
        except UnicodeError as error:
            if unit.modules:  # nobody can repair the standard library
                problem.skipped.counts["invalid_utf8"] += 1
            else:
                problem("invalid_utf8", where, f" is not valid {encoding or 'UTF-8'}{position(error)}{OTHER_ENCODING}")
            continue
        key = split_key(unit.modules[index].encode(), STDLIB_HASH_SEED) if unit.modules else split_key(content)
        yield Document(text, len(content), key)


def position(error: UnicodeError) -> str:
    return f" (byte {error.start})" if isinstance(error, UnicodeDecodeError) else ""


def read_lines(unit: LineRange | LinePiece, text_keys: tuple[str, ...], problem: Problem) -> Iterator[Document]:
    if isinstance(unit, LineRange):
        lines = lines_starting_in(unit)

        def line_number(offset: int) -> int:  # only ever asked for the sake of a message
            return count_lines(unit.path, offset) + 1

    else:
        lines = lines_of(unit.lines)

        def line_number(offset: int) -> int:
            return unit.first_line + unit.lines.count(b"\n", 0, offset)

        if unit.too_large:
            problem("too_large", lambda: f"{unit.path}, line {unit.first_line}", TOO_LARGE)

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
            problem("invalid_utf8", where, f" is not valid UTF-8 (byte {error.start} of the line){OTHER_ENCODING}")
            continue
        except (ValueError, RecursionError) as error:  # a ValueError alone: a number of more than 4,300 digits
            reason = "too deep" if isinstance(error, RecursionError) else str(error).partition(";")[0]
            if isinstance(error, json.JSONDecodeError):
                reason = f"{error.msg}, column {error.colno}"
            problem("invalid_json", where, f" does not parse as JSON ({reason}); expected one object per line")
            continue
        if not isinstance(row, dict):
            problem("invalid_json", where, f" holds a JSON {type(row).__name__}, expected an object")
            continue
        yield from document_of(value_of(row, text_keys), where, problem)


def lines_starting_in(unit: LineRange) -> Iterator[tuple[int, bytes]]:
    """The lines of a byte range with their offsets in the file; the last may reach beyond the end of the range."""
    with unit.path.open("rb") as file:
        offset = unit.start
        if unit.start > 0:  # a line that starts before belongs to the range before
            file.seek(unit.start - 1)
            # No further than the range: a file of one long line would be read once for each of its ranges.
            offset += len(file.readline(unit.end - unit.start + 1)) - 1
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


def read_rows(unit: RowPiece, problem: Problem) -> Iterator[Document]:
    for row_number, value in enumerate(unit.values, start=unit.first_row + 1):

        def where(row_number: int = row_number) -> str:
            return f"{unit.origin}, row {row_number}"

        yield from document_of(value, where, problem)
