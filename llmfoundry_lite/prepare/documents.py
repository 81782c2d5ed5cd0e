"""Units of a source, and the documents in them.

A unit is the part of a source that one worker reads at a time. A unit of files has only their names and the range of
bytes or row groups. A unit of a stream has its content, because a stream cannot be read from an arbitrary position.
`sources.py` cuts sources into units, and `read_documents` reads one.

| kind  | files                          | a document is | a unit is                                          |
|-------|--------------------------------|---------------|----------------------------------------------------|
| whole | .txt .md                       | a file        | small files in a row                               |
| lines | .jsonl .json .ndjson           | a line        | a byte range; a line belongs to where it starts    |
| lines | the same, .gz .zst or no UTF-8 | a line        | lines, cut while decompressing                     |
| table | .parquet .arrow                | a row         | row groups or record batches                       |
| rows  | .csv .tsv, a Hub data set      | a row         | texts of rows                                      |

The kind of files for a reader of the user's own is its import path, `python:…`. A unit is files in a row.
"""

import codecs
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import xxhash

from llmfoundry_lite import companions
from llmfoundry_lite.errors import DataError, list_names
from llmfoundry_lite.own_code import is_own
from llmfoundry_lite.prepare.contents import (
    BLOCK_BYTES,
    ENCODING_ADVICE,
    MAX_PLAIN_BYTES,
    TOO_LARGE_PLAIN,
    InputFile,
    RefusedFileError,
    RemoteFile,
    UnreadableText,
    open_input_file,
    read_text,
)
from llmfoundry_lite.prepare.own_readers import read_with
from llmfoundry_lite.prepare.request import PrepareRequest

T = TypeVar("T")

STDLIB_HASH_SEED = 187
"""Seed of the standard library's split keys. It was chosen on Python 3.11 to 3.13, so that modules of ordinary code
(`argparse`, `pathlib`, `pickle`, …) with 5 % of the text are held out, none of them much larger than the others."""

SKIP_REASONS = (
    "empty",
    "invalid_utf8",
    "invalid_json",
    "missing_text_key",
    "not_text",
    "invalid_csv",
    "too_large",
    "unreadable",
)
"""Reasons to skip a document. Empty documents are always skipped, others only with `--on-error skip`."""

MAX_EXAMPLES_PER_UNIT = 10
"""Number of skipped documents of a unit that are described; the others are only counted."""

FIELD_SEPARATOR = "\n\n"
"""Text between the values of several text keys."""

MAX_DOCUMENTS_OF_FILE = 2**40
"""In a unit for a reader of the user's own, the first document of file N has the index N times this."""

MISSING = object()
"""Stands for the value of a key that a row does not have. None is the value of a key that is null."""


class Document(NamedTuple):
    """One document: its text, and the key that decides its split.

    A document is in the validation split if its `split_key`, a 64-bit hash, is below a threshold. The key is the hash
    of the text, so that equal texts are in the same split. For the standard library it is the hash of the top-level
    module's name, so that whole modules are held out.
    """

    text: str
    num_bytes: int
    """Length of the text in UTF-8."""
    split_key: int
    text_hash: int
    """Hash of the text, 128 bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A part of a source: files and a range in a file or, for a stream, the content that was read from it."""

    kind: str
    """How documents are read: `whole`, `lines`, `table`, `rows` or `python:…`. The module's table explains them."""
    names: tuple[str | RemoteFile, ...]
    """Paths of files, objects in a bucket, or the name of a stream."""
    num_bytes: int
    """Bytes on disk, by which the progress bar advances."""
    start: int = 0
    end: int = 0
    """`start` and `end` delimit bytes of a plain file of lines, or row groups or record batches of a table."""
    first_number: int = 1
    """Number of the first line in `content`, or of the first row."""
    content: tuple[Any, ...] | None = field(default=None, repr=False)
    """Lines as bytes, or texts. An UnreadableText stands for one that cannot be read. None for files."""
    modules: tuple[str, ...] = ()
    """Top-level module of each file of the standard library; empty for other sources. The library's files that are not
    UTF-8 are skipped without an error."""

    def digest(self) -> str:
        """Return a hash of the unit, the same in every launch, by which its token file is recognized.

        It contains the names and the range of files, but not their content.
        """
        fields = (self.kind, self.names, self.start, self.end, self.first_number, self.content)
        return xxhash.xxh3_128_hexdigest(repr(fields).encode(errors="backslashreplace"))

    def describe_location(self, index: int) -> str:
        """Describe where a document is, for an error: its file and line or row.

        `index` is the number that `read_values` yields with the document: an offset in a byte range of lines, and
        otherwise a position in the unit.
        """
        if self.kind == "whole":
            return str(self.names[index])
        if is_own(self.kind):
            file_number, number = divmod(index, MAX_DOCUMENTS_OF_FILE)
            return f"{self.names[file_number]}, document {number + 1}"
        if self.kind != "lines":
            return f"{self.names[0]}, row {self.first_number + index}"
        if self.content is not None:
            return f"{self.names[0]}, line {self.first_number + index}"

        # In a byte range, the index is an offset. An object is not read from its beginning to count lines.
        file = input_file(self.names[0])
        if isinstance(file, RemoteFile):
            return f"{file}, the line at byte {index}"
        lines_before = count_lines(file, index)
        return f"{self.names[0]}, line {lines_before + 1}"


def input_file(name: str | RemoteFile) -> InputFile:
    """Return the file that a name in `Unit.names` stands for."""
    return Path(name) if isinstance(name, str) else name


def input_name(file: InputFile) -> str | RemoteFile:
    """Return the name of a file for `Unit.names`."""
    return str(file) if isinstance(file, Path) else file


@dataclass(slots=True)
class Skipped:
    """Counts and examples of the documents in a unit that were skipped."""

    counts: Counter[str] = field(default_factory=Counter)
    """Reason in SKIP_REASONS -> number of documents."""
    examples: list[str] = field(default_factory=list)
    """A sentence for each of the first MAX_EXAMPLES_PER_UNIT documents. Empty documents have none."""


def read_documents(unit: Unit, request: PrepareRequest, skipped: Skipped) -> Iterator[Document]:
    """Yield the documents of a unit, in order, and add those that are skipped to `skipped`.

    Empty documents are always skipped. With the request's `on_error="stop"`, a document that cannot be read raises
    DataError, which says where it is. With "skip", it is counted in `skipped`, and the first ones are described there.
    """
    for index, text in read_values(unit, request.text_keys, request.encoding):
        content = b""
        if isinstance(text, str):
            try:
                content = text.encode("utf-8")
            except UnicodeEncodeError:  # JSON can spell half a surrogate pair, which no encoding can write
                description = ": its text contains half of a surrogate pair, which is not valid Unicode"
                text = UnreadableText("invalid_utf8", description)

        # A document that can be read. Files of the standard library have the split key of their module.
        if isinstance(text, str) and content:
            module = unit.modules[index].encode() if unit.modules else b""
            key = split_key(module, STDLIB_HASH_SEED) if module else split_key(content)
            yield Document(text, len(content), key, xxhash.xxh3_128_intdigest(content))
            continue

        # A document that is skipped.
        if not isinstance(text, UnreadableText):
            skipped.counts["empty"] += 1
            continue
        skipped.counts[text.reason] += 1
        if not unit.modules:  # a user cannot repair the standard library
            sentence = f"{unit.describe_location(index)}{text.description}"
            if request.on_error == "stop":
                raise DataError(f"{sentence}; repair it, or leave such documents out with --on-error skip")
            if len(skipped.examples) < MAX_EXAMPLES_PER_UNIT:
                skipped.examples.append(sentence)


def read_values(
    unit: Unit, text_keys: tuple[str, ...], encoding: str | None
) -> Iterator[tuple[int, str | UnreadableText]]:
    """Yield the index and text of each document in a unit, or an UnreadableText for one that cannot be read.

    text_keys: the fields of JSON objects, or the columns of tables, that contain the text.
    encoding: encoding of text files; None is UTF-8.

    The index is for `Unit.describe_location`. In a byte range it is the line's offset in the file, otherwise the
    position in the unit. Lines of white space are ignored.
    """
    match unit.kind:
        case "whole":
            yield from enumerate(read_texts(unit, encoding))
        case "lines":
            lines_of_range = text_if_refused(read_line_range(unit), lambda text: (unit.start, text))
            indexed_lines = lines_of_range if unit.content is None else enumerate(unit.content)
            for index, line in indexed_lines:
                if isinstance(line, UnreadableText):
                    yield index, line
                    continue
                if index == 0:  # a file may begin with a byte order mark
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line and not line.isspace():
                    yield index, text_of_line(line, text_keys)
        case "table":
            read_table = companions.load("llmfoundry_formats.tables:read_table", "rows of parquet and arrow")
            rows = read_table(input_file(unit.names[0]), unit.start, unit.end, text_keys)
            rows = text_if_refused(rows, lambda text: text)
            yield from enumerate(text_of_row(row, text_keys) for row in rows)
        case kind if is_own(kind):
            documents = read_with(kind, [input_file(name) for name in unit.names])
            for file_number, number, text in text_if_refused(documents, lambda text: (0, 0, text)):
                yield file_number * MAX_DOCUMENTS_OF_FILE + number, text
        case _:  # "rows", whose texts have been read already
            yield from enumerate(unit.content or ())


def text_if_refused(values: Iterable[T], value_of: Callable[[UnreadableText], T]) -> Iterator[T]:
    """Yield values that are read from a file and, where a store refuses it, one that `value_of` makes of the reason."""
    try:
        yield from values
    except RefusedFileError as error:
        yield value_of(error.as_text())


def read_texts(unit: Unit, encoding: str | None) -> Iterator[str | UnreadableText]:
    """Yield the text of each file in a unit. Objects are read by several threads, because each takes a round trip."""
    files = [input_file(name) for name in unit.names]
    if any(isinstance(file, RemoteFile) for file in files):
        read_ahead = companions.load("llmfoundry_engines.bucket_files:read_ahead", str(files[0]))
        yield from read_ahead(lambda file: read_text(file, encoding), files)
        return
    for file in files:
        yield read_text(file, encoding)


def read_line_range(unit: Unit) -> Iterator[tuple[int, bytes | UnreadableText]]:
    """Yield the lines that start in the unit's byte range [start, end), each with its offset in the file.

    The last line may extend beyond the range. In a file "ab\\ncd\\nef\\n", the range [1, 4) has only the line at offset
    3, because "ab" starts before it. A line of more than MAX_PLAIN_BYTES is yielded as an UnreadableText.
    """
    with open_input_file(input_file(unit.names[0]), max(0, unit.start - 1), unit.end) as file:
        # Skip the end of a line that starts in the previous range. Reading begins at the byte before the range: if that
        # is a line end, a line starts at the beginning of the range, and nothing is skipped.
        offset = unit.start
        if unit.start > 0:
            file.seek(unit.start - 1)
            # Read no further than the range, or one long line would be read again for each of its ranges.
            offset += len(file.readline(unit.end - unit.start + 1)) - 1

        # Yield lines until one starts beyond the range.
        while offset < unit.end:
            line = file.readline(MAX_PLAIN_BYTES + 1)
            if not line:
                return
            if len(line) > MAX_PLAIN_BYTES:
                yield offset, TOO_LARGE_PLAIN
                return  # the range ends within this line
            yield offset, line
            offset += len(line)


def count_lines(path: Path, end: int) -> int:
    """Count the line ends in a file before the byte offset `end`."""
    num_lines = 0
    bytes_left = end
    with path.open("rb") as file:
        while bytes_left > 0:
            block = file.read(min(bytes_left, BLOCK_BYTES))
            if not block:  # the file has become shorter
                break
            num_lines += block.count(b"\n")
            bytes_left -= len(block)
    return num_lines


def text_of_line(line: bytes, text_keys: tuple[str, ...]) -> str | UnreadableText:
    """Return the text in a line of JSON, or an UnreadableText that says why there is none.

    `text_keys` are the fields that contain the text. With ("title", "body"), the line {"title": "A", "body": "b"} has
    the text "A\\n\\nb". The line {"title": 7} has an UnreadableText of the reason "not_text", and a line that is not a
    JSON object has one of the reason "invalid_json".
    """
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return UnreadableText("invalid_utf8", f" is not valid UTF-8 (byte {error.start} of the line){ENCODING_ADVICE}")
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg}, column {error.colno}"
        elif isinstance(error, RecursionError):
            reason = "too deep"
        else:  # a number of more than 4,300 digits, which Python refuses to parse
            reason, _, _ = str(error).partition(";")
        return UnreadableText("invalid_json", f" does not parse as JSON ({reason}); expected one object per line")
    if not isinstance(row, dict):
        return UnreadableText("invalid_json", f" holds a JSON {type(row).__name__}, expected an object")
    return text_of_row(row, text_keys)


def text_of_row(row: Mapping[str, Any] | UnreadableText, text_keys: tuple[str, ...]) -> str | UnreadableText:
    """Return the text of a row: the values of `text_keys`, with a blank line between them.

    row: field or column -> value, or an UnreadableText for a row that could not be read, which is returned unchanged.
    text_keys: names of fields or columns. `a.b` is also the field `b` of the object in `a`.

    Returns an UnreadableText for a row without one of the keys, and for a value that is not a string.
    """
    if isinstance(row, UnreadableText):
        return row
    values = []
    for key in text_keys:
        value = get_value(row, key)
        if value is MISSING:
            names = list_names(name for column, item in row.items() for name in list_keys(column, item))
            offered = f"there are: {names or 'none'} (choose one with --text-key)"
            return UnreadableText("missing_text_key", f" has no {key!r}; {offered}")
        if not isinstance(value, str):
            kind = "null" if value is None else f"a {type(value).__name__}"
            return UnreadableText("not_text", f": {list_names([key])} is {kind}, expected a string")
        values.append(value)
    return FIELD_SEPARATOR.join(values)


def get_value(row: Mapping[str, Any], key: str) -> Any:
    """Return the value of a key. If a row has no key `a.b`, that is the value of `b` in the object `a`.

    The key "meta.text" has the value 1 in {"meta.text": 1, "meta": {"text": 2}}, and 2 in {"meta": {"text": 2}}.
    Returns MISSING if there is neither.
    """
    if key in row:
        return row[key]
    value: Any = row
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return MISSING
        value = value[name]
    return value


def list_keys(name: str, value: Any) -> list[str]:
    """Return the keys by which a column can be read: its name, or `name.field` for each field of an object.

    `value` is the column's value in a row.
    """
    if isinstance(value, Mapping) and value:
        return [f"{name}.{field_name}" for field_name in value]
    return [name]


def group_by_size(
    items: Iterable[T], size_of: Callable[[T], int], target: int, *, max_items: int | None = None
) -> Iterator[tuple[list[T], int]]:
    """Yield groups of consecutive items, each with its size.

    A group ends as soon as its size is at least `target`, or when it has `max_items` items; only the last may be
    smaller. Items of sizes 3, 3, 9 and 1 with a target of 5 make groups of sizes 6, 9 and 1. `size_of` returns the size
    of an item.
    """
    group: list[T] = []
    size = 0
    for item in items:
        group.append(item)
        size += size_of(item)
        if size >= target or len(group) == max_items:
            yield group, size
            group = []
            size = 0
    if group:
        yield group, size


def split_key(content: bytes, seed: int = 0) -> int:
    """Return the 64-bit hash of a document that decides its split. It is the same on every machine."""
    return xxhash.xxh3_64_intdigest(content, seed=seed)
