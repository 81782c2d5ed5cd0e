"""What a unit of a source is, and what makes a row a document.

Owns the kinds of units, the fields that make a document's text, and what becomes of a document that cannot be read.

A unit is read by one worker. Units that can be found again (files, byte ranges, row groups) carry only their
place; pieces of a stream carry their content, because nobody but the reader of the stream can get at it.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import xxhash

from llmfoundry_lite.errors import DataError

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
