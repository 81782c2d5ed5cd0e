"""The documents of one unit: what a unit of a source is, and how it is read.

Owns the kinds of units, the fields that make a document's text, and what becomes of a document that cannot be read.
Leaves finding documents and cutting them into units to `sources.py`, compression and encodings to `contents.py`.

    read_documents(unit)  ->  Document, Document, …

| files                          | documents            | units                                              |
|--------------------------------|----------------------|----------------------------------------------------|
| .txt .md                       | one per file         | runs of small files                                |
| .jsonl .json .ndjson           | one per line         | byte ranges; a line belongs to where it starts     |
| .parquet                       | one per row          | row groups                                         |
| .arrow                         | one per row          | runs of record batches                             |
| JSON lines, .gz .zst or no UTF-8 | one per line       | pieces cut at line ends while decompressing        |
| .csv .tsv, a Hub data set      | one per row          | runs of rows                                       |

A unit is read by one worker. Units that can be found again (files, byte ranges, row groups) carry only their
place; pieces of a stream carry their content, because nobody but the reader of the stream can get at it.
"""

import codecs
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import xxhash

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.prepare.contents import (
    COMPRESSED_SUFFIXES,
    LARGEST_DOCUMENT_BYTES,
    READ_BYTES,
    decompressed_copy,
    read_document,
)

STDLIB_HASH_SEED = 187
"""Chosen by what it holds out on Python 3.11 to 3.13: modules of ordinary code (`argparse`, `pathlib`, `pickle`, …),
5 % of the text, none of them much larger than the others."""

SKIP_REASONS: tuple[str, ...] = (
    *("empty", "invalid_utf8", "invalid_json", "missing_text_key", "not_text", "invalid_csv", "too_large"),
)
"""Why a document was left out. `empty` is always left out; the others only with `--on-error skip`."""

NAMED_PER_UNIT = 10
"""Documents left out in one unit that are named; the others are only counted."""

FIELD_SEPARATOR = "\n\n"
"""Between the values of several text keys."""


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
    """Whole lines of a file that is read as a stream, as UTF-8."""

    path: Path
    first_line: int
    lines: bytes = field(repr=False)
    num_bytes: int
    too_large: bool = False
    """In place of one line that is longer than LARGEST_DOCUMENT_BYTES."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowGroup:
    """One row group of a parquet file; all of it when the file is compressed as a whole."""

    path: Path
    index: int | None
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrowBatches:
    """Record batches [first, end) of an arrow file."""

    path: Path
    first: int
    end: int
    first_row: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPiece:
    """Consecutive rows of a stream: the text of each, or a Bad."""

    origin: str
    first_row: int
    values: tuple[Any, ...] = field(repr=False)
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Bad:
    """Stands for the text of a row that has none."""

    reason: str
    """One of SKIP_REASONS."""
    sentence: str
    """Continues the name of its place."""


Unit: TypeAlias = WholeFiles | LineRange | LinePiece | RowGroup | ArrowBatches | RowPiece


def place_of(unit: Unit) -> str:
    """Names what a unit reads: the same for the same unit in another launch, another for any other unit."""
    match unit:
        case WholeFiles():
            digest = xxhash.xxh3_64_hexdigest("\0".join(map(str, unit.paths)).encode(errors="surrogateescape"))
            return f"{len(unit.paths)} files {digest}"
        case LineRange():
            return f"{unit.path} bytes {unit.start}-{unit.end}"
        case LinePiece():
            return f"{unit.path} from line {unit.first_line} {xxhash.xxh3_64_hexdigest(unit.lines)}"
        case RowGroup():
            return f"{unit.path} row group {unit.index}"
        case ArrowBatches():
            return f"{unit.path} batches {unit.first}-{unit.end}"
        case RowPiece():
            num_characters = sum(len(value) for value in unit.values if isinstance(value, str))
            return f"{unit.origin} from row {unit.first_row}: {len(unit.values)} rows, {num_characters} characters"


@dataclass(slots=True)
class Skipped:
    """The documents of a unit that were left out."""

    counts: Counter[str] = field(default_factory=Counter)
    """By SKIP_REASONS."""
    named: list[str] = field(default_factory=list)
    """A sentence for each of the first NAMED_PER_UNIT, those that are merely empty aside."""


Where: TypeAlias = Callable[[], str]
"""Names a document's place; asked only for a message, because it may have to count lines."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What to do with a bad document: count and name it, or raise."""

    on_error: str
    skipped: Skipped

    def __call__(self, reason: str, where: Where, sentence: str, *, documents: int = 1) -> None:
        """`reason` is one of SKIP_REASONS; `sentence` continues the document's place. Raises DataError."""
        if self.on_error == "stop":
            raise DataError(f"{where()}{sentence}; repair it, or leave such documents out with --on-error skip")
        self.skipped.counts[reason] += documents
        if len(self.skipped.named) < NAMED_PER_UNIT:
            self.skipped.named.append(f"{where()}{sentence}")


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


TOO_LARGE = (
    f" decompresses to more than {LARGEST_DOCUMENT_BYTES // 2**20} MiB, the most that one document of a compressed "
    "file may have (decompress the file if that is meant)"
)
OTHER_ENCODING = "; --encoding names another encoding"


def position(error: UnicodeError) -> str:
    return f" (byte {error.start})" if isinstance(error, UnicodeDecodeError) else ""


# Lines


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


# Rows


def read_row_group(unit: RowGroup, text_keys: tuple[str, ...], problem: Problem) -> Iterator[Document]:
    import pyarrow as pa

    parquet = open_parquet(unit.path)
    groups = list(range(parquet.num_row_groups)) if unit.index is None else [unit.index]
    first_row = sum(parquet.metadata.row_group(index).num_rows for index in range(groups[0] if groups else 0))
    num_rows = sum(parquet.metadata.row_group(index).num_rows for index in groups)
    check_one_of_each(unit.path, parquet.schema_arrow, text_keys)
    columns = [column_of(key, parquet.schema_arrow) for key in text_keys]
    if not all(columns):
        yield from without_column(unit.path, parquet.schema_arrow, text_keys, num_rows, problem)
        return
    try:
        wanted = [".".join(column) for column in columns if column]
        batches = parquet.iter_batches(batch_size=1024, row_groups=groups, columns=wanted)
        yield from rows_of_batches(unit.path, batches, first_row, num_rows, text_keys, problem)
    except (pa.ArrowInvalid, OSError) as error:
        raise damaged_table(unit.path, error) from error


def read_arrow_batches(unit: ArrowBatches, text_keys: tuple[str, ...], problem: Problem) -> Iterator[Document]:
    import pyarrow as pa

    try:
        schema, batches = open_arrow(unit.path)
        check_one_of_each(unit.path, schema, text_keys)
        wanted = [batch for index, batch in enumerate(batches) if unit.first <= index < unit.end]
        num_rows = sum(batch.num_rows for batch in wanted)
        if not all(column_of(key, schema) for key in text_keys):
            yield from without_column(unit.path, schema, text_keys, num_rows, problem)
            return
        yield from rows_of_batches(unit.path, iter(wanted), unit.first_row, num_rows, text_keys, problem)
    except (pa.ArrowInvalid, OSError) as error:
        raise damaged_table(unit.path, error) from error


def rows_of_batches(
    path: Path, batches: Iterator[Any], first_row: int, num_rows: int, text_keys: tuple[str, ...], problem: Problem
) -> Iterator[Document]:
    """The documents in record batches."""
    row_number = first_row
    for batch in batches:
        columns = [text_column(batch, key) for key in text_keys]
        for key, column in zip(text_keys, columns, strict=True):
            if isinstance(column, str):
                sentence = f": column {key} holds {column}, expected strings"
                problem("not_text", path.__str__, sentence, documents=num_rows - (row_number - first_row))
                return
        for values in zip(*(column.to_pylist() for column in columns), strict=True):
            row_number += 1

            def where(row_number: int = row_number) -> str:
                return f"{path}, row {row_number}"

            texts: list[Any] = []
            try:
                texts = [value if value is None else value.decode("utf-8") for value in values]
            except UnicodeDecodeError as error:
                problem("invalid_utf8", where, f" is not valid UTF-8 (byte {error.start} of the text)")
                continue
            yield from document_of(join_texts(text_keys, texts), where, problem)


def column_of(key: str, schema: Any) -> tuple[str, ...] | None:
    """A column by its name, or by the names on the way to it; None when it is not there."""
    import pyarrow as pa

    if key in schema.names:
        return (key,)
    names = tuple(key.split("."))
    if names[0] not in schema.names:
        return None
    kind = schema.field(names[0]).type
    for name in names[1:]:
        if not pa.types.is_struct(kind) or kind.get_field_index(name) < 0:
            return None
        kind = kind.field(name).type
    return names


def check_one_of_each(path: Path, header: Any, text_keys: tuple[str, ...]) -> None:
    """Raises DataError where several columns bear the name of one that is wanted. `header`: names or a schema."""
    names = header if isinstance(header, list) else header.names
    for key in text_keys:
        name = key if key in names else key.partition(".")[0]
        if (count := names.count(name)) > 1:
            raise DataError(f"{path} has {count} columns named {name!r}; rename all but one")


def text_column(batch: Any, key: str) -> Any:
    """A column of a record batch as bytes, or the name of its type if that is no string.

    As bytes, because arrow does not check its strings and a single bad one would spoil the batch.
    """
    import pyarrow as pa
    import pyarrow.compute as pc

    names = column_of(key, batch.schema)
    assert names is not None, "the caller has looked"
    column = batch.column(names[0])
    if names[1:]:
        column = pc.struct_field(column, list(names[1:]))  # pyright: ignore[reportAttributeAccessIssue]
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if pa.types.is_string_view(column.type):
        return column.cast(pa.binary_view())
    if not (pa.types.is_string(column.type) or pa.types.is_large_string(column.type)):
        return str(column.type)
    return column.cast(pa.large_binary() if pa.types.is_large_string(column.type) else pa.binary())


def without_column(
    path: Path, schema: Any, text_keys: tuple[str, ...], num_rows: int, problem: Problem
) -> Iterator[Document]:
    """No documents, and a problem: a table without a text column."""
    missing = next(key for key in text_keys if column_of(key, schema) is None)
    problem("missing_text_key", path.__str__, missing_text_key(missing, field_names(schema)), documents=num_rows)
    return iter(())


def field_names(schema: Any) -> list[str]:
    """The columns of a table, and the fields within them, as --text-key takes them."""
    import pyarrow as pa

    names = []
    for column in schema:
        inner = [f"{column.name}.{part.name}" for part in column.type] if pa.types.is_struct(column.type) else []
        names += inner or [column.name]
    return names


def open_parquet(path: Path) -> Any:
    """A parquet file, its footer read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.ParquetFile(decompressed_copy(path) if path.suffix in COMPRESSED_SUFFIXES else path)
    except (pa.ArrowInvalid, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise  # the disk's, not the content's
        raise DataError(f"{path} is not a parquet file: {' '.join(str(error).split())}") from error


def open_arrow(path: Path) -> tuple[Any, Iterator[Any]]:
    """The schema and the record batches of an arrow file, of either kind. Nothing is read before it is asked for."""
    import pyarrow as pa

    source = pa.memory_map(str(path))
    try:
        stream = pa.ipc.open_stream(source)
    except pa.ArrowInvalid:
        source.seek(0)
        file = pa.ipc.open_file(source)
        return file.schema, (file.get_batch(index) for index in range(file.num_record_batches))
    return stream.schema, iter(stream)


def damaged_table(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} is damaged: {' '.join(str(error).split())}")


def read_rows(unit: RowPiece, problem: Problem) -> Iterator[Document]:
    for row_number, value in enumerate(unit.values, start=unit.first_row + 1):

        def where(row_number: int = row_number) -> str:
            return f"{unit.origin}, row {row_number}"

        yield from document_of(value, where, problem)


# One document


def value_of(row: Mapping[str, Any], text_keys: tuple[str, ...]) -> "str | Bad":
    """The text of a row: the value of its key, or of several keys, with a blank line between them."""
    values = []
    for key in text_keys:
        value = row.get(key, MISSING)
        if value is MISSING and "." in key:
            value = inner_value(row, key.split("."))
        if value is MISSING:
            names = (inner for name, item in row.items() for inner in names_within(name, item))
            return Bad("missing_text_key", missing_text_key(key, list(names)))
        values.append(value)
    return join_texts(text_keys, values)


MISSING = object()


def inner_value(row: Any, names: list[str]) -> Any:
    """What `a.b.c` names in objects within objects, or MISSING."""
    for name in names:
        if not isinstance(row, Mapping) or name not in row:
            return MISSING
        row = row[name]
    return row


def names_within(name: str, value: Any) -> list[str]:
    return [f"{name}.{inner}" for inner in value] if isinstance(value, Mapping) and value else [name]


def join_texts(text_keys: tuple[str, ...], values: list[Any]) -> "str | Bad":
    for key, value in zip(text_keys, values, strict=True):
        if not isinstance(value, str):
            return Bad("not_text", f": {key} is {describe(value)}, expected a string")
    return values[0] if len(values) == 1 else FIELD_SEPARATOR.join(values)


def document_of(value: "str | Bad", where: Where, problem: Problem) -> Iterator[Document]:
    """The document a row's text makes, or none and a problem."""
    if isinstance(value, Bad):
        problem(value.reason, where, value.sentence)
        return
    try:
        content = value.encode("utf-8")
    except UnicodeEncodeError:  # JSON can spell half a surrogate pair, which no encoding can write
        problem("invalid_utf8", where, ": its text contains half of a surrogate pair, which is not valid Unicode")
        return
    yield Document(value, len(content), split_key(content))


def describe(value: Any) -> str:
    return "null" if value is None else f"a {type(value).__name__}"


def missing_text_key(text_key: str, columns: list[str]) -> str:
    """The sentence for a text column that is not there; it names those that are."""
    return f" has no {text_key!r}; there are: {', '.join(columns) or 'none'} (choose one with --text-key)"


def split_key(content: bytes, seed: int = 0) -> int:
    """A 64-bit hash, the same on every machine and in every process."""
    return xxhash.xxh3_64_intdigest(content, seed=seed)
