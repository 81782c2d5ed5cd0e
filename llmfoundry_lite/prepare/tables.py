"""The documents of tables: parquet files and arrow files."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.prepare.contents import COMPRESSED_SUFFIXES, decompressed_copy
from llmfoundry_lite.prepare.units import (
    ArrowBatches,
    Document,
    Problem,
    RowGroup,
    document_of,
    join_texts,
    missing_text_key,
)


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
