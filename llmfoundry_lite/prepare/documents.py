"""Units of a source, and the documents in them.

A unit is read by one worker. Units that can be found again (files, byte ranges, row groups) carry only their place.
Units of a stream carry their content, because only the reader of the stream can get at it. `sources.py` makes units;
`read_documents` reads one.

| kind  | files                          | a document is | a unit is                                          |
|-------|--------------------------------|---------------|----------------------------------------------------|
| whole | .txt .md                       | a file        | small files in a row                               |
| lines | .jsonl .json .ndjson           | a line        | a byte range; a line belongs to where it starts    |
| lines | the same, .gz .zst or no UTF-8 | a line        | lines, cut while decompressing                     |
| table | .parquet .arrow                | a row         | row groups or record batches                       |
| rows  | .csv .tsv, a Hub data set      | a row         | texts of rows                                      |
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
from llmfoundry_lite.files import open_regular
from llmfoundry_lite.prepare.contents import (
    BLOCK_BYTES,
    MAX_PLAIN_BYTES,
    OTHER_ENCODING,
    TOO_LARGE_PLAIN,
    Bad,
    read_text,
)
from llmfoundry_lite.prepare.request import PrepareRequest

T = TypeVar("T")

STDLIB_HASH_SEED = 187
"""Seed chosen by its split on Python 3.11 to 3.13. It holds out modules of ordinary code (`argparse`, `pathlib`,
`pickle`, …) with 5 % of the text, none much larger than the others."""

SKIP_REASONS = ("empty", "invalid_utf8", "invalid_json", "missing_text_key", "not_text", "invalid_csv", "too_large")
"""Reasons to leave a document out. `empty` is always left out; the others only with `--on-error skip`."""

MAX_NAMED_PER_UNIT = 10
"""Number of left-out documents of a unit that are named; the others are only counted."""

FIELD_SEPARATOR = "\n\n"
"""Text between the values of several text keys."""

MISSING = object()
"""Value of a key that a row does not have. None is the value of a key that is null."""


class Document(NamedTuple):
    """One document: its text, and what decides its split.

    `split_key` is a 64-bit hash, so a document is in the validation split when its key is below a threshold. It
    hashes the text itself (the same text never sits in both splits) or, for the standard library, the name of the
    top-level module (whole modules are held out).
    """

    text: str
    num_bytes: int
    """Length of the text in UTF-8."""
    split_key: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Unit:
    """A piece of a source: a place in files or, for a stream, what was read from it."""

    kind: str
    """Kind in the table above."""
    names: tuple[str, ...]
    """Paths of files, or the name of a stream."""
    num_bytes: int
    """Bytes on disk: the unit's share of the progress bar."""
    start: int = 0
    end: int = 0
    """`start` and `end` delimit bytes of a plain file of lines, or row groups or record batches of a table."""
    first: int = 1
    """Number of the first line of `content`, or of the first row."""
    content: tuple[Any, ...] | None = field(default=None, repr=False)
    """Lines as bytes, or texts, with a Bad for each that cannot be read."""
    modules: tuple[str, ...] = ()
    """Top-level module of each file, for the standard library, whose files that are not UTF-8 are left out."""

    def digest(self) -> str:
        """Return a name for the unit, which is the same in every launch, and different for any other unit."""
        fields = (self.kind, self.names, self.start, self.end, self.first, self.content)
        return xxhash.xxh3_128_hexdigest(repr(fields).encode(errors="backslashreplace"))

    def place(self, index: int) -> str:
        """Name the document that `read_values` yields with the number `index`, for a sentence about it."""
        if self.kind == "whole":
            return self.names[index]
        if self.kind != "lines":
            return f"{self.names[0]}, row {self.first + index}"
        if self.content is not None:
            return f"{self.names[0]}, line {self.first + index}"
        lines_before = count_lines(Path(self.names[0]), index)  # in a byte range, the number is an offset
        return f"{self.names[0]}, line {lines_before + 1}"


@dataclass(slots=True)
class Skipped:
    """Record of a unit's documents that were left out."""

    counts: Counter[str] = field(default_factory=Counter)
    """Reason in SKIP_REASONS -> number of documents."""
    named: list[str] = field(default_factory=list)
    """A sentence for each of the first MAX_NAMED_PER_UNIT documents. Empty documents are not named."""


def read_documents(unit: Unit, request: PrepareRequest, skipped: Skipped) -> Iterator[Document]:
    """Yield the documents of a unit, in order. Adds those that it leaves out to `skipped`.

    Empty documents are always left out. With `on_error="stop"` a document that cannot be read raises DataError, which
    names its file and line or row.
    """
    for index, value in read_values(unit, request.text_keys, request.encoding):
        content = b""
        if isinstance(value, str):
            try:
                content = value.encode("utf-8")
            except UnicodeEncodeError:  # JSON can spell half a surrogate pair, which no encoding can write
                sentence = ": its text contains half of a surrogate pair, which is not valid Unicode"
                value = Bad("invalid_utf8", sentence)

        if isinstance(value, str) and content:
            module = unit.modules[index].encode() if unit.modules else b""
            key = split_key(module, STDLIB_HASH_SEED) if module else split_key(content)
            yield Document(value, len(content), key)
            continue

        if not isinstance(value, Bad):
            skipped.counts["empty"] += 1
            continue
        skipped.counts[value.reason] += 1
        if not unit.modules:  # a user cannot repair the standard library
            sentence = f"{unit.place(index)}{value.sentence}"
            if request.on_error == "stop":
                raise DataError(f"{sentence}; repair it, or leave such documents out with --on-error skip")
            if len(skipped.named) < MAX_NAMED_PER_UNIT:
                skipped.named.append(sentence)


def read_values(unit: Unit, text_keys: tuple[str, ...], encoding: str | None) -> Iterator[tuple[int, str | Bad]]:
    """Yield each document's number and text. In a byte range the number is an offset, otherwise it counts from 0.

    Numbers are for `Unit.place`. Lines of white space are no documents.
    """
    match unit.kind:
        case "whole":
            yield from enumerate(read_text(Path(name), encoding) for name in unit.names)
        case "lines":
            numbered_lines = lines_of_range(unit) if unit.content is None else enumerate(unit.content)
            for index, line in numbered_lines:
                if isinstance(line, Bad):
                    yield index, line
                    continue
                if index == 0:
                    line = line.removeprefix(codecs.BOM_UTF8)
                if line and not line.isspace():
                    yield index, text_of_line(line, text_keys)
        case "table":
            read_table = companions.load("llmfoundry_formats.tables:read_table", "rows of parquet and arrow")
            rows = read_table(Path(unit.names[0]), unit.start, unit.end, text_keys)
            yield from enumerate(text_of_row(row, text_keys) for row in rows)
        case _:
            yield from enumerate(unit.content or ())


def lines_of_range(unit: Unit) -> Iterator[tuple[int, bytes | Bad]]:
    """Yield the lines that start in [start, end) with their offsets in the file; the last may reach beyond the end.

    Of a file "ab\\ncd\\nef\\n", the range [1, 4) has the one line that starts at 3, since "ab" belongs to the range of
    its start.
    """
    with open(unit.names[0], "rb", opener=open_regular) as file:
        offset = unit.start
        if unit.start > 0:  # skip a line that starts in the previous range
            file.seek(unit.start - 1)
            # Read no further than the range, or one long line would be read again for each of its ranges.
            offset += len(file.readline(unit.end - unit.start + 1)) - 1
        while offset < unit.end:
            line = file.readline(MAX_PLAIN_BYTES + 1)
            if not line:
                return
            if len(line) > MAX_PLAIN_BYTES:
                yield offset, TOO_LARGE_PLAIN
                return  # this line takes the rest of the range
            yield offset, line
            offset += len(line)


def count_lines(path: Path, end: int) -> int:
    """Count the line ends before the byte offset `end`."""
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


def text_of_line(line: bytes, text_keys: tuple[str, ...]) -> str | Bad:
    """Return the text of a line of JSON, or the reason why it has none."""
    try:
        row = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        return Bad("invalid_utf8", f" is not valid UTF-8 (byte {error.start} of the line){OTHER_ENCODING}")
    except (ValueError, RecursionError) as error:
        if isinstance(error, json.JSONDecodeError):
            reason = f"{error.msg}, column {error.colno}"
        elif isinstance(error, RecursionError):
            reason = "too deep"
        else:  # a number of more than 4,300 digits
            reason, _, _ = str(error).partition(";")
        return Bad("invalid_json", f" does not parse as JSON ({reason}); expected one object per line")
    if not isinstance(row, dict):
        return Bad("invalid_json", f" holds a JSON {type(row).__name__}, expected an object")
    return text_of_row(row, text_keys)


def text_of_row(row: Mapping[str, Any] | Bad, text_keys: tuple[str, ...]) -> str | Bad:
    """Return the text of a row: the value of its key, or of several keys, with a blank line between them.

    Returns a Bad for a row without one of the keys, and for a value that is no text.
    """
    if isinstance(row, Bad):
        return row
    values = []
    for key in text_keys:
        value = value_of(row, key)
        if value is MISSING:
            names = list_names(name for column, item in row.items() for name in names_within(column, item))
            offered = f"there are: {names or 'none'} (choose one with --text-key)"
            return Bad("missing_text_key", f" has no {key!r}; {offered}")
        if not isinstance(value, str):
            kind = "null" if value is None else f"a {type(value).__name__}"
            return Bad("not_text", f": {list_names([key])} is {kind}, expected a string")
        values.append(value)
    return FIELD_SEPARATOR.join(values)


def value_of(row: Mapping[str, Any], key: str) -> Any:
    """Return the value of the key `a.b`, else of `b` in the object `a`; MISSING if there is neither."""
    if key in row:
        return row[key]
    value: Any = row
    for name in key.split("."):
        if not isinstance(value, Mapping) or name not in value:
            return MISSING
        value = value[name]
    return value


def names_within(name: str, value: Any) -> list[str]:
    """Return the keys by which a column can be read: its name, or `name.field` for each field of an object."""
    if isinstance(value, Mapping) and value:
        return [f"{name}.{field_name}" for field_name in value]
    return [name]


def group_by_size(
    items: Iterable[T], size_of: Callable[[T], int], target: int, *, max_items: int | None = None
) -> Iterator[tuple[list[T], int]]:
    """Yield groups of consecutive items, and the size of each group. The last group may be smaller than the others.

    A group ends as soon as its size is `target` or more, or when it has `max_items`. Items of sizes 3, 3, 9 and 1 with
    a target of 5 make groups of 6, 9 and 1.
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
    """Return a 64-bit hash that is the same on every machine and in every process."""
    return xxhash.xxh3_64_intdigest(content, seed=seed)
