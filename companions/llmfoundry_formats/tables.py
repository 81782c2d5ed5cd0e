"""Rows of tables, for `data prepare`: CSV, parquet and arrow.

`cut_table` cuts a file into units, the parts that one worker reads at a time. A unit of parquet or arrow has only the
range of its row groups or record batches, and `read_table` reads these. A unit of CSV contains its texts, because a CSV
file cannot be read from an arbitrary position.
"""

import csv
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Any, NamedTuple

from llmfoundry_lite import companions
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.prepare.contents import (
    MAX_DOCUMENT_BYTES,
    InputFile,
    RemoteFile,
    UnreadableText,
    encoding_errors_as_data_errors,
    open_content,
)
from llmfoundry_lite.prepare.documents import Unit, group_by_size, input_name, text_of_row
from llmfoundry_lite.prepare.request import PrepareRequest
from llmfoundry_lite.prepare.sources import stream_units

COLUMN_BUFFER_BYTES = 8 << 20
"""Bytes that are requested at a time of a column in a bucket."""


def cut_table(
    kind: str, path: InputFile, size_bytes: int, target_bytes: int, request: PrepareRequest
) -> Iterator[Unit]:
    """Yield the units of a file, of about `target_bytes` each. The last unit may be smaller.

    `kind` is "csv", or "table" for parquet and arrow. `size_bytes` is the size of the file. Raises DataError.
    """
    is_remote_arrow = isinstance(path, RemoteFile) and path.suffix == ".arrow"
    if kind == "table" and not is_remote_arrow:
        yield from table_units(path, size_bytes, target_bytes)
        return
    if is_remote_arrow:
        # A part of a stream can only be read after all parts before it, so the rows are read once, here.
        rows_and_positions = ((row, 0) for row in read_table(path, 0, sys.maxsize, request.text_keys))
    else:
        rows_and_positions = read_csv(path, request.encoding, request.text_keys)
    texts = ((text_of_row(row, request.text_keys), bytes_read) for row, bytes_read in rows_and_positions)
    yield from stream_units("rows", str(path), texts, target_bytes, size_bytes)


# -------------------------------------------------------------------------------------------------------------- CSV


def read_csv(
    path: InputFile, encoding: str | None, wanted_columns: Sequence[str]
) -> Iterator[tuple[Mapping[str, str] | UnreadableText, int]]:
    """Yield the rows below the header, each with the number of bytes read from disk so far.

    A row that does not parse, or has another number of fields than the header, is yielded as an UnreadableText. Raises
    DataError if the rows cannot be told apart, or if a wanted column has the same name as another.
    """
    csv.field_size_limit(MAX_DOCUMENT_BYTES)
    delimiter = "\t" if ".tsv" in path.suffixes[-2:] else ","  # data.tsv, or data.tsv.gz
    with open_content(path) as (file, position), encoding_errors_as_data_errors(path, encoding):
        text = io.TextIOWrapper(file, encoding or "utf-8", "surrogateescape", newline="")
        lines = CsvLines(path, text)
        rows = csv.reader(lines, delimiter=delimiter, strict=True)
        header = next_row(rows, lines)
        if isinstance(header, UnreadableText):
            raise DataError(f"{path}: its header{header.description}; repair the file")
        check_names_differ(path, header or [], wanted_columns)
        if header is None:
            return

        while True:
            row = next_row(rows, lines)
            if row is None:
                return
            if isinstance(row, UnreadableText):
                yield row, position()
            elif len(row) == len(header):
                yield dict(zip(header, row, strict=True)), position()
            elif row:  # an empty line has no fields, and is not a row
                sentence = f" has {len(row)} fields, expected the {len(header)} of the header"
                yield UnreadableText("invalid_csv", sentence), position()


class CsvLines:
    """Lines of a CSV file, for csv.reader, with a limit on the size of a row.

    A row may have several lines, because a quoted field may contain line ends. The reader of a row sets
    `row_characters` to 0 before. Iteration raises DataError for a longer row than MAX_DOCUMENT_BYTES characters.
    """

    def __init__(self, path: InputFile, text: io.TextIOWrapper) -> None:
        self.path = path
        self._text = text
        self._line_number = 0
        self.row_characters = 0
        """Number of characters in the row so far."""

    def __iter__(self) -> "CsvLines":
        return self

    def __next__(self) -> str:
        self._line_number += 1
        line = self._text.readline(MAX_DOCUMENT_BYTES)
        if not line:
            raise StopIteration
        self.row_characters += len(line)
        if self.row_characters >= MAX_DOCUMENT_BYTES:
            raise DataError(f"{self.path}, line {self._line_number} is longer than {MAX_DOCUMENT_BYTES // 2**20} MiB")
        return line.removeprefix("\ufeff") if self._line_number == 1 else line


def next_row(rows: Any, lines: CsvLines) -> list[str] | UnreadableText | None:
    """Return the fields of the next row of a csv.reader over `lines`; None at the end of the file.

    Returns an UnreadableText for a row that does not parse, if the next row can still be found. Raises DataError if it
    cannot, because a quote is never closed.
    """
    first_line = rows.line_num + 1
    lines.row_characters = 0
    try:
        return next(rows, None)
    except csv.Error as error:
        # Such a field goes on until the file or the limit ends, and contains all rows that follow.
        is_never_closed = "unexpected end" in str(error) or "field limit" in str(error)
        if is_never_closed:
            raise DataError(
                f"{lines.path}: a quote that opens in line {first_line} or after is never closed ({error}); repair the "
                "file"
            ) from error
        return UnreadableText("invalid_csv", f" (line {rows.line_num}) does not parse as CSV ({error})")


def check_names_differ(path: InputFile, names: list[str], wanted_columns: Sequence[str]) -> None:
    """Raise DataError if several columns have the name of a wanted one. A key `a.b` means the field b of a column a."""
    for key in wanted_columns:
        name = key if key in names else key.partition(".")[0]
        num_columns = names.count(name)
        if num_columns > 1:
            raise DataError(f"{path} has {num_columns} columns named {name!r}; rename all but one")


# ------------------------------------------------------------------------------------------------ parquet and arrow


class TablePart(NamedTuple):
    """A row group of a parquet file, or a record batch of an arrow file: the smallest part that is read by itself."""

    num_rows: int
    num_bytes: int
    """In a parquet file, an equal share of the file's bytes."""


def table_units(path: InputFile, size_bytes: int, target_bytes: int) -> Iterator[Unit]:
    """Yield units of consecutive parts, of at least `target_bytes` together. Raises DataError for a damaged file.

    The bytes of a unit advance the progress bar. All units together have the file's `size_bytes`, although the
    batches of a compressed arrow file have more.
    """
    start = 0
    consumed_bytes = 0
    first_row_number = 1
    parts = table_parts(path, size_bytes)
    for group, group_bytes in group_by_size(parts, lambda part: part.num_bytes, target_bytes):
        end = start + len(group)
        remaining_bytes = size_bytes - consumed_bytes
        is_last = group_bytes < target_bytes
        unit_bytes = remaining_bytes if is_last else min(group_bytes, remaining_bytes)
        yield Unit(
            kind="table",
            names=(input_name(path),),
            start=start,
            end=end,
            first_number=first_row_number,
            num_bytes=unit_bytes,
        )
        start = end
        consumed_bytes += unit_bytes
        first_row_number += sum(part.num_rows for part in group)


def table_parts(path: InputFile, size_bytes: int) -> Iterator[TablePart]:
    """Yield the row groups or record batches of a file. Of a parquet file, only the metadata is read.

    `size_bytes` is the size of the file. Raises DataError if it is damaged.
    """
    if path.suffix == ".arrow":
        with arrow_errors(path, "is damaged"):
            _, batches = open_arrow(path)
            for batch in batches:
                yield TablePart(batch.num_rows, batch.nbytes)
        return

    metadata = open_parquet(path).metadata
    num_groups = metadata.num_row_groups
    for index in range(num_groups):
        # Shares of the file, rounded so that they add up to it.
        begin_bytes = size_bytes * index // num_groups
        end_bytes = size_bytes * (index + 1) // num_groups
        yield TablePart(metadata.row_group(index).num_rows, end_bytes - begin_bytes)


def read_table(
    path: InputFile, start: int, end: int, wanted_columns: Sequence[str]
) -> Iterator[Mapping[str, Any] | UnreadableText]:
    """Yield the rows of the row groups or record batches [start, end) of a file.

    If the file has all wanted columns, a row has no others. If it lacks one, a row has all columns that there are, so
    that the error about it can list them. Raises DataError if the file is damaged, or has a wanted column twice.
    """
    with arrow_errors(path, "is damaged"):
        if path.suffix == ".arrow":
            schema, batches = open_arrow(path)
            batches = islice(batches, start, end)
        else:
            parquet = open_parquet(path)
            schema = parquet.schema_arrow
            row_groups = list(range(parquet.num_row_groups))[start:end]
            columns = list(wanted_columns) if has_all(schema, wanted_columns) else None
            batches = parquet.iter_batches(batch_size=1024, row_groups=row_groups, columns=columns)
        check_names_differ(path, schema.names, wanted_columns)

        # A field of a column is wanted with its column.
        top_columns = sorted({key if key in schema.names else key.partition(".")[0] for key in wanted_columns})
        for batch in batches:
            selected = batch.select(top_columns) if has_all(schema, wanted_columns) else batch
            yield from rows_of(selected)


def has_all(schema: Any, keys: Sequence[str]) -> bool:
    """Return whether every key names a column, or a field within one."""
    return all(key in schema.names or has_field(schema, key.split(".")) for key in keys)


def has_field(parent: Any, field_names: list[str]) -> bool:
    """Return whether a schema or struct type has a field under a path of names: ["a", "b"] is the field b of a."""
    import pyarrow as pa

    index = parent.get_field_index(field_names[0])
    if index < 0:
        return False
    nested_names = field_names[1:]
    if not nested_names:
        return True
    field_type = parent.field(index).type
    return pa.types.is_struct(field_type) and has_field(field_type, nested_names)


def rows_of(batch: Any) -> Iterator[Mapping[str, Any] | UnreadableText]:
    """Yield the rows of a record batch. A row with a string that is not UTF-8 is yielded as an UnreadableText.

    Arrow does not check strings, and converts a batch or fails on it as a whole. A batch that fails is converted again,
    one row at a time.
    """
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError as error:
        if batch.num_rows == 1:
            yield UnreadableText("invalid_utf8", f" is not valid UTF-8 (byte {error.start} of the text)")
            return
        for index in range(batch.num_rows):
            yield from rows_of(batch.slice(index, 1))
        return
    yield from rows


def open_parquet(path: InputFile) -> Any:
    """Open a parquet file and read its footer, which has the metadata. Raises DataError."""
    import pyarrow.parquet as pq

    with arrow_errors(path, "is not a parquet file"):
        if isinstance(path, RemoteFile):
            # Only the footer and the wanted columns are requested, of a large column a block at a time.
            return pq.ParquetFile(open_ranges(path), buffer_size=COLUMN_BUFFER_BYTES)
        return pq.ParquetFile(path)


def open_ranges(file: RemoteFile) -> Any:
    """Open an object of a bucket for reading at any position: each read is a request for exactly its bytes."""
    return companions.load("llmfoundry_engines.bucket_files:open_ranges", str(file))(file)


def open_arrow(path: InputFile) -> tuple[Any, Iterator[Any]]:
    """Map an arrow file into memory, or stream an object. Returns its schema and its record batches.

    Arrow has two formats, for streams and for files. `datasets` writes the former.
    """
    import pyarrow as pa

    is_remote = isinstance(path, RemoteFile)
    source = pa.PythonFile(open_ranges(path), mode="r") if is_remote else pa.memory_map(str(path))
    try:
        stream = pa.ipc.open_stream(source)
    except pa.ArrowInvalid:
        source.seek(0)
        file = pa.ipc.open_file(source)
        return file.schema, (file.get_batch(index) for index in range(file.num_record_batches))
    return stream.schema, iter(stream)


@contextmanager
def arrow_errors(path: InputFile, complaint: str) -> Iterator[None]:
    """Raise DataError for arrow's errors about a file's content. `complaint` follows the path: "is damaged"."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowInvalid, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise  # an error of the disk, not of the content
        raise DataError(f"{path} {complaint}: {' '.join(str(error).split())}") from error
