"""Rows of tables, for `data prepare`: CSV, parquet and arrow."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.prepare.contents import (
    MAX_DOCUMENT_BYTES,
    UnreadableText,
    encoding_errors_as_data_errors,
    open_content,
)
from llmfoundry_lite.prepare.documents import Unit, group_by_size, text_of_row
from llmfoundry_lite.prepare.request import PrepareRequest
from llmfoundry_lite.prepare.sources import stream_units


def cut_table(kind: str, path: Path, size_bytes: int, target_bytes: int, request: PrepareRequest) -> Iterator[Unit]:
    """Yield the units of a file, of at least `target_bytes` each but for the last. `kind` is csv or table."""
    if kind == "table":
        yield from table_units(path, size_bytes, target_bytes)
        return
    keys = request.text_keys
    rows = ((text_of_row(row, keys), read) for row, read in read_csv(path, request.encoding, keys))
    yield from stream_units("rows", str(path), rows, target_bytes, size_bytes)


# CSV


def read_csv(
    path: Path, encoding: str | None, wanted: Sequence[str]
) -> Iterator[tuple[Mapping[str, str] | UnreadableText, int]]:
    """Read the rows below the header, each with the number of bytes read from disk so far.

    Raises DataError where the rows cannot be separated, or if two columns have the same name and it is `wanted`.
    """
    csv.field_size_limit(MAX_DOCUMENT_BYTES)
    with open_content(path) as (file, position), encoding_errors_as_data_errors(path, encoding):
        text = io.TextIOWrapper(file, encoding or "utf-8", "surrogateescape", newline="")
        rows = csv.reader(
            lines := CsvLines(path, text), delimiter="\t" if ".tsv" in path.suffixes[-2:] else ",", strict=True
        )
        header = next_row(rows, lines)
        if isinstance(header, UnreadableText):
            raise DataError(f"{path}: its header{header.description}; repair the file")
        check_names_differ(path, header or [], wanted)
        while header is not None and (row := next_row(rows, lines)) is not None:
            if isinstance(row, UnreadableText):
                yield row, position()
            elif len(row) == len(header):
                yield dict(zip(header, row, strict=True)), position()
            elif row:  # an empty line is none
                sentence = f" has {len(row)} fields, expected the {len(header)} of the header"
                yield UnreadableText("invalid_csv", sentence), position()


class CsvLines:
    """Lines of a CSV file, as an iterator. A row may have several, because a quoted field may contain line ends."""

    def __init__(self, path: Path, text: io.TextIOWrapper) -> None:
        self.path, self._text, self._number = path, text, 0
        self.row_characters = 0
        """Number of characters in the row so far."""

    def __iter__(self) -> "CsvLines":
        return self

    def __next__(self) -> str:
        self._number += 1
        if not (line := self._text.readline(MAX_DOCUMENT_BYTES)):
            raise StopIteration
        self.row_characters += len(line)
        if self.row_characters >= MAX_DOCUMENT_BYTES:
            raise DataError(f"{self.path}, line {self._number} is longer than {MAX_DOCUMENT_BYTES // 2**20} MiB")
        return line.removeprefix("\ufeff") if self._number == 1 else line


def next_row(rows: Any, lines: CsvLines) -> list[str] | UnreadableText | None:
    first_line, path, lines.row_characters = rows.line_num + 1, lines.path, 0
    try:
        return next(rows, None)
    except csv.Error as error:
        if "unexpected end" in str(error) or "field limit" in str(error):
            raise DataError(
                f"{path}: a quote that opens in line {first_line} or after is never closed ({error}); repair the file"
            ) from error
        return UnreadableText("invalid_csv", f" (line {rows.line_num}) does not parse as CSV ({error})")


def check_names_differ(path: Path, names: list[str], wanted: Sequence[str]) -> None:
    """Raise DataError if several columns have the name of a wanted one."""
    for key in wanted:
        name = key if key in names else key.partition(".")[0]
        if (count := names.count(name)) > 1:
            raise DataError(f"{path} has {count} columns named {name!r}; rename all but one")


# Parquet and arrow


def table_units(path: Path, size_bytes: int, target_bytes: int) -> Iterator[Unit]:
    """Yield consecutive row groups or record batches of at least `target_bytes` together."""
    start = consumed_bytes = num_rows = 0
    for group, group_bytes in group_by_size(table_parts(path, size_bytes), lambda part: part[1], target_bytes):
        left = size_bytes - consumed_bytes
        share, end = left if group_bytes < target_bytes else min(group_bytes, left), start + len(group)
        yield Unit(kind="table", names=(str(path),), start=start, end=end, first_number=1 + num_rows, num_bytes=share)
        start, consumed_bytes = end, consumed_bytes + share
        num_rows += sum(rows for rows, _ in group)


def table_parts(path: Path, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the numbers of rows and bytes in each row group or record batch. Reads only metadata.

    The bytes of a row group are an equal share of the file's.
    """
    if path.suffix == ".arrow":
        with arrow_errors(path, "is damaged"):
            yield from ((batch.num_rows, batch.nbytes) for batch in open_arrow(path)[1])
    else:
        metadata = open_parquet(path).metadata
        for index in range(count := metadata.num_row_groups):
            share = size_bytes * (index + 1) // count - size_bytes * index // count
            yield metadata.row_group(index).num_rows, share


def read_table(path: Path, start: int, end: int, wanted: Sequence[str]) -> Iterator[Mapping[str, Any] | UnreadableText]:
    """Read the rows of row groups or record batches [start, end): the `wanted` columns, or all if one is missing."""
    with arrow_errors(path, "is damaged"):
        if path.suffix == ".arrow":
            schema, batches = open_arrow(path)
            batches = islice(batches, start, end)
        else:
            parquet = open_parquet(path)
            schema, groups = parquet.schema_arrow, list(range(parquet.num_row_groups))[start:end]
            columns = list(wanted) if has_all(schema, wanted) else None
            batches = parquet.iter_batches(batch_size=1024, row_groups=groups, columns=columns)
        check_names_differ(path, schema.names, wanted)
        columns = sorted({key if key in schema.names else key.partition(".")[0] for key in wanted})
        for batch in batches:
            yield from rows_of(batch.select(columns) if has_all(schema, wanted) else batch)


def has_all(schema: Any, keys: Sequence[str]) -> bool:
    """Return whether every key names a column, or a field within one."""
    return all(key in schema.names or has_field(schema, key.split(".")) for key in keys)


def has_field(parent: Any, names: list[str]) -> bool:
    """Return whether a schema or struct type has a field of this path of names."""
    import pyarrow as pa

    index = parent.get_field_index(names[0])
    if index < 0 or not names[1:]:
        return index >= 0
    kind = parent.field(index).type
    return pa.types.is_struct(kind) and has_field(kind, names[1:])


def rows_of(batch: Any) -> Iterator[Mapping[str, Any] | UnreadableText]:
    """Yield the rows of a record batch. A batch with a bad string, which Arrow does not check, is read row by row."""
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


def open_parquet(path: Path) -> Any:
    """Open a parquet file and read its footer."""
    import pyarrow.parquet as pq

    with arrow_errors(path, "is not a parquet file"):
        return pq.ParquetFile(path)


def open_arrow(path: Path) -> tuple[Any, Iterator[Any]]:
    """Map an arrow file of either format. Returns its schema and its record batches."""
    import pyarrow as pa

    source = pa.memory_map(str(path))
    try:
        stream = pa.ipc.open_stream(source)
    except pa.ArrowInvalid:
        source.seek(0)
        file = pa.ipc.open_file(source)
        return file.schema, (file.get_batch(index) for index in range(file.num_record_batches))
    return stream.schema, iter(stream)


@contextmanager
def arrow_errors(path: Path, what: str) -> Iterator[None]:
    """Raise DataError, in one sentence, for arrow's errors about a file's content."""
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowInvalid, OSError) as error:
        if getattr(error, "errno", None) is not None:
            raise  # an error of the disk, not of the content
        raise DataError(f"{path} {what}: {' '.join(str(error).split())}") from error
