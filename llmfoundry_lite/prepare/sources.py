"""Where documents come from: the Python standard library, local files, data sets of the Hugging Face Hub.

Owns how a source is cut into *units*: pieces of work that are the same on every run and every machine. Leaves the kinds
of units to `units.py`, how the documents of one are read to `documents.py`, and tokens, samples, processes and resuming
to `prepare.py`.

    open_source(["logs/*.jsonl.gz"])  ->  Source  ->  units()  ->  Unit, Unit, …
"""

import csv
import hashlib
import io
import itertools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import without_magic
from llmfoundry_lite.prepare.contents import (
    BLOCK_BYTES,
    COMPRESSED_SUFFIXES,
    LARGEST_DOCUMENT_BYTES,
    BlockReader,
    blocks,
    utf8_blocks,
)
from llmfoundry_lite.prepare.listing import Listing, kind_of, list_files
from llmfoundry_lite.prepare.tables import check_one_of_each, damaged_table, open_arrow, open_parquet
from llmfoundry_lite.prepare.units import (
    ArrowBatches,
    Bad,
    LinePiece,
    LineRange,
    RowGroup,
    RowPiece,
    Unit,
    WholeFiles,
    value_of,
)

PYTHON_STDLIB = "python-stdlib"
HUB_PREFIX = "hf:"

# Unit sizes depend on the input alone, never on the number of workers, so that every run makes the same units.
SMALLEST_UNIT_BYTES = 256 * 1024
LARGEST_UNIT_BYTES = 8 * 1024 * 1024
UNITS_AIMED_FOR = 64

STDLIB_VAL_FRACTION = 0.05
DEFAULT_VAL_FRACTION = 0.005

# Third-party code, tests (some are not UTF-8 or not Python on purpose), a bundled grammar package with bad data,
# tables of characters (a seventh of all bytes, and nothing to learn from), and generated files that record the paths
# of the machine Python was built on.
STDLIB_EXCLUDED_FOLDERS = {
    *("site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "encodings", "__pycache__"),
}
STDLIB_EXCLUDED_MODULES = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Documents in a fixed order, cut into units."""

    units: Callable[[], Iterator[Unit]]
    """Starts from the beginning on every call and yields the same units."""
    identify: Callable[[], dict[str, str | int]]
    """What has to be unchanged for a resumed preparation to read the same documents; looks again on every call."""
    total_bytes: int | None
    """On disk; None for a stream, whose end is not known beforehand."""
    val_fraction: float
    """The fraction held out for validation unless the user says otherwise."""
    num_ignored_files: int = 0
    """Files in the folders given whose suffix is none we read, or beside a saved data set and no part of it."""
    repeated: tuple[str, ...] = ()
    """A sentence for each name of something that is read under another name."""
    unreadable: tuple[str, ...] = ()
    """A sentence for each file or folder that cannot be read, with `on_error` skip."""


def open_source(
    sources: Sequence[str],
    *,
    text_keys: tuple[str, ...] = ("text",),
    split: str = "train",
    encoding: str | None = None,
    on_error: str = "stop",
) -> Source:
    """Find the documents that `--source` names. Raises DataError when there are none.

    `sources` is `["python-stdlib"]`, `["hf:NAME"]`, `["hf:NAME:CONFIG"]`, or any number of files, folders and
    globs. `split` is the split of a Hub data set, or of one that `datasets` saved. `encoding` is that of text, JSON
    lines and CSV; None is UTF-8.
    """
    sources = [source for source in sources if source]
    if not sources:
        raise DataError(f"no source given; expected {PYTHON_STDLIB}, {HUB_PREFIX}NAME, or files, folders and globs")
    special = [source for source in sources if source == PYTHON_STDLIB or source.startswith(HUB_PREFIX)]
    if special and len(sources) > 1:
        raise DataError(f"{special[0]} cannot be prepared together with other sources; prepare them into two folders")
    if sources == [PYTHON_STDLIB]:
        return open_standard_library()
    if special:
        return open_hub(special[0].removeprefix(HUB_PREFIX), text_keys=text_keys, split=split)
    listing = list_files(sources, split=split, on_error=on_error)
    return open_files(listing, text_keys=text_keys, encoding=encoding)


# The Python standard library


def open_standard_library(folder: Path | None = None) -> Source:
    """The source code of the running interpreter's standard library: real text that is always there.

    The order is by path within the library; neither order nor split depends on where Python is installed.
    """
    folder = Path(folder or sysconfig.get_path("stdlib"))
    found = [path.relative_to(folder) for path in folder.rglob("*.py")] if folder.is_dir() else []
    files = sorted((path for path in found if is_library_source(path)), key=Path.as_posix)
    if not files:
        raise DataError(f"this Python ({sys.executable}) comes without the source of its standard library")
    sizes = [(folder / path).stat().st_size for path in files]
    total_bytes = sum(sizes)

    def identify() -> dict[str, str | int]:
        sizes = ((path.as_posix(), stat_of(folder / path).st_size, 0) for path in files)
        return {"python": ".".join(map(str, sys.version_info[:3])), **inventory(sizes)}

    def units() -> Iterator[Unit]:
        for run in runs_of(list(zip(files, sizes, strict=True)), unit_bytes(total_bytes)):
            yield WholeFiles(
                paths=tuple(folder / path for path, _ in run),
                num_bytes=sum(size for _, size in run),
                modules=tuple(path.parts[0].removesuffix(".py") for path, _ in run),
            )

    return Source(
        units=units,
        identify=identify,
        total_bytes=total_bytes,
        val_fraction=STDLIB_VAL_FRACTION,
    )


def is_library_source(path: Path) -> bool:
    """Whether a file, by its path within the library, is part of the corpus."""
    folders = path.parts[:-1]
    return not STDLIB_EXCLUDED_FOLDERS.intersection(folders) and not path.name.startswith(STDLIB_EXCLUDED_MODULES)


# Local files


def open_files(listing: Listing, *, text_keys: tuple[str, ...], encoding: str | None) -> Source:
    """The documents of local files, in the order of the listing."""
    sizes = {path: status.st_size for path, status in listing.files.items()}
    total_bytes = sum(sizes.values())

    def units() -> Iterator[Unit]:
        target_bytes = unit_bytes(total_bytes)
        waiting: list[tuple[Path, int]] = []
        for path, size in sizes.items():
            kind = kind_of(path)
            if kind == "whole":
                waiting.append((path, size))
                continue
            yield from whole_file_units(waiting, target_bytes)
            waiting = []
            if kind == "parquet":
                yield from row_groups(path, size)
            elif kind == "arrow":
                yield from arrow_batches(path, size, target_bytes)
            elif kind == "table":
                content = BlockReader(blocks(path))
                texts = csv_texts(path, content, encoding, text_keys)
                yield from row_pieces(texts, str(path), read_bytes=lambda content=content: content.read_bytes)
            elif path.suffix in COMPRESSED_SUFFIXES or encoding:
                yield from line_pieces(path, size, target_bytes, encoding)
            else:
                for start in range(0, size, target_bytes):
                    yield LineRange(path=path, start=start, end=min(size, start + target_bytes))
        yield from whole_file_units(waiting, target_bytes)

    def identify() -> dict[str, str | int]:
        stats = ((path, stat_of(path)) for path in listing.files)
        return inventory((path.as_posix(), stat.st_size, stat.st_mtime_ns) for path, stat in stats)

    return Source(
        units=units,
        identify=identify,
        total_bytes=total_bytes,
        val_fraction=DEFAULT_VAL_FRACTION,
        num_ignored_files=listing.num_ignored,
        repeated=tuple(listing.repeated),
        unreadable=tuple(listing.unreadable),
    )


def stat_of(path: Path) -> os.stat_result:
    """A file that was there a moment ago."""
    try:
        return path.stat()
    except OSError as error:
        raise DataError(f"{path} was there when the preparation began and is not now: {error.strerror}") from error


def whole_file_units(files: list[tuple[Path, int]], target_bytes: int) -> Iterator[WholeFiles]:
    """Small files in runs, large ones alone."""
    for run in runs_of(files, target_bytes):
        yield WholeFiles(paths=tuple(path for path, _ in run), num_bytes=sum(size for _, size in run))


def row_groups(path: Path, size_bytes: int) -> Iterator[RowGroup]:
    """The row groups of a parquet file, from its footer alone."""
    if path.suffix in COMPRESSED_SUFFIXES:
        yield RowGroup(path=path, index=None, num_bytes=size_bytes)
        return
    num_groups = open_parquet(path).num_row_groups
    for index in range(num_groups):
        share = size_bytes * (index + 1) // num_groups - size_bytes * index // num_groups
        yield RowGroup(path=path, index=index, num_bytes=share)


def arrow_batches(path: Path, size_bytes: int, target_bytes: int) -> Iterator[ArrowBatches]:
    """Runs of record batches of at least `target_bytes`; only the descriptions of the batches are read."""
    import pyarrow as pa

    first = first_row = num_rows = run_bytes = consumed_bytes = index = 0
    try:
        _, batches = open_arrow(path)
        for index, batch in enumerate(batches, start=1):
            num_rows += batch.num_rows
            run_bytes += batch.nbytes
            if run_bytes >= target_bytes:
                share = min(run_bytes, size_bytes - consumed_bytes)
                yield ArrowBatches(path=path, first=first, end=index, first_row=first_row, num_bytes=share)
                consumed_bytes += share
                first, first_row, run_bytes = index, num_rows, 0
    except (pa.ArrowInvalid, OSError) as error:
        raise damaged_table(path, error) from error
    if index > first:
        rest = size_bytes - consumed_bytes
        yield ArrowBatches(path=path, first=first, end=index, first_row=first_row, num_bytes=rest)


def line_pieces(path: Path, size_bytes: int, target_bytes: int, encoding: str | None = None) -> Iterator[LinePiece]:
    """A file of lines, decompressed and as UTF-8, in pieces of at least `target_bytes` that end where a line ends."""
    lines = bytearray()
    first_line = 1
    consumed_bytes = 0
    in_large_line = False

    def piece(end: int, read_bytes: int, *, too_large: bool = False) -> LinePiece:
        nonlocal first_line, consumed_bytes
        content, share = bytes(lines[:end]), read_bytes - consumed_bytes
        del lines[:end]
        made = LinePiece(path=path, first_line=first_line, lines=content, num_bytes=share, too_large=too_large)
        first_line += content.count(b"\n")
        consumed_bytes = read_bytes
        return made

    for block, read_bytes in utf8_blocks(path, encoding):
        if in_large_line:
            line_end = block.find(b"\n") + 1
            if line_end == 0:
                continue
            in_large_line = False
            first_line += 1
            block = block[line_end:]
        lines += block
        if len(lines) >= target_bytes and b"\n" in block:
            yield piece(lines.rindex(b"\n") + 1, read_bytes)
        if len(lines) > LARGEST_DOCUMENT_BYTES:
            if b"\n" in lines:
                yield piece(lines.rindex(b"\n") + 1, read_bytes)
            if len(lines) > LARGEST_DOCUMENT_BYTES:
                lines.clear()
                in_large_line = True
                yield piece(0, read_bytes, too_large=True)
    yield piece(len(lines), size_bytes)


def csv_texts(path: Path, content: BlockReader, encoding: str | None, text_keys: tuple[str, ...]) -> Iterator[Any]:
    """The text of each row of a file with a header, or a Bad. Raises DataError where the rows cannot be told apart."""
    csv.field_size_limit(LARGEST_DOCUMENT_BYTES)
    delimiter = "\t" if ".tsv" in path.suffixes[-2:] else ","
    rows = csv.reader(text_lines(path, content, encoding), delimiter=delimiter, strict=True)
    header = next_row(rows, path)
    if header is None:
        return
    if isinstance(header, Bad):  # without it no row can be read
        raise DataError(f"{path}: its header{header.sentence}; repair the file")
    check_one_of_each(path, header, text_keys)
    while (row := next_row(rows, path)) is not None:
        if isinstance(row, Bad):
            yield row
        elif len(row) == len(header):
            yield value_of(dict(zip(header, row, strict=True)), text_keys)
        elif row:  # an empty line is none
            yield Bad("invalid_csv", f" has {len(row)} fields, expected the {len(header)} of the header")


def next_row(rows: Any, path: Path) -> "list[str] | Bad | None":
    first_line = rows.line_num + 1
    try:
        return next(rows, None)
    except csv.Error as error:
        if "unexpected end" in str(error) or "field limit" in str(error):
            raise DataError(
                f"{path}: a quote that opens in line {first_line} or after is never closed ({error}); repair the file"
            ) from error
        return Bad("invalid_csv", f" (line {rows.line_num}) does not parse as CSV ({error})")


def text_lines(path: Path, content: BlockReader, encoding: str | None) -> Iterator[str]:
    """The lines of a text file with their ends. A byte that the encoding does not know becomes half a surrogate."""
    name = encoding or "utf-8"
    text = io.TextIOWrapper(
        io.BufferedReader(content, BLOCK_BYTES), encoding=name, errors="surrogateescape", newline=""
    )
    try:
        lines = iter(lambda: text.readline(LARGEST_DOCUMENT_BYTES), "")
        for number, line in enumerate(lines, start=1):
            if len(line) == LARGEST_DOCUMENT_BYTES:
                raise DataError(f"{path}, line {number} is longer than {LARGEST_DOCUMENT_BYTES // 2**20} MiB")
            yield line.removeprefix("\ufeff") if number == 1 else line
    except UnicodeError as error:
        raise DataError(f"{path} is not valid {name} ({error}); name its encoding with --encoding") from error


# Data sets of the Hugging Face Hub


def open_hub(name_and_config: str, *, text_keys: tuple[str, ...], split: str) -> Source:
    """A data set by its Hub name (or a local data set folder), streamed: nothing is downloaded ahead of time.

    The revision is pinned when the name is resolved, so that a resumed preparation reads the same rows.
    """
    is_folder = Path(name_and_config).is_dir()  # whose name may have a colon
    name, _, config = (name_and_config, "", "") if is_folder else name_and_config.partition(":")
    if not name:
        raise DataError(f"{HUB_PREFIX} needs the name of a data set, as in {HUB_PREFIX}allenai/c4:en")
    local = Path(name).is_dir()
    revision = None if local else hub_revision(name)

    def identify() -> dict[str, str | int]:
        if revision is not None:
            return {"revision": revision}
        files = sorted(file for file in Path(name).rglob("*") if file.is_file())
        stats = ((file.relative_to(name).as_posix(), stat_of(file)) for file in files)
        return inventory((file, stat.st_size, stat.st_mtime_ns) for file, stat in stats)

    def units() -> Iterator[Unit]:
        origin = f"{HUB_PREFIX}{name_and_config}, split {split}"
        with open_plainly(name) as plain:
            rows = stream_hub(plain, config or None, split, revision, told_as=name)
            yield from row_pieces((value_of(row, text_keys) for row in rows_of(rows, origin)), origin)

    return Source(units=units, identify=identify, total_bytes=None, val_fraction=DEFAULT_VAL_FRACTION)


def hub_revision(name: str) -> str:
    """The commit a data set's name stands for at this moment."""
    import huggingface_hub
    from huggingface_hub import errors

    try:
        revision = huggingface_hub.HfApi().dataset_info(name, timeout=20).sha
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise DataError(
            f"{HUB_PREFIX}{name}: no such data set on the Hugging Face Hub, or none that you may read; "
            "check the spelling, or run `hf auth login`"
        ) from error
    except Exception as error:  # the HTTP client's own errors have no common ancestor that is ours to name
        raise DataError(
            f"{HUB_PREFIX}{name}: the Hugging Face Hub cannot be reached ({type(error).__name__}); "
            "download the data set elsewhere and give its files or folder instead"
        ) from error
    assert revision is not None, "the Hub names the revision of every data set"
    return revision


@contextmanager
def open_plainly(name: str) -> Iterator[str]:
    """Wrap `files.without_magic`; its error is one sentence."""
    with ExitStack() as stack:
        try:
            plain = stack.enter_context(without_magic(name))
        except OSError as error:
            raise DataError(f"{HUB_PREFIX}{name}: links to its files cannot be made: {error}") from error
        yield plain


def stream_hub(
    name: str, config: str | None, split: str, revision: str | None, *, told_as: str
) -> Iterable[dict[str, Any]]:
    """The rows of one split, in order."""
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split, revision=revision, streaming=True)
    except Exception as error:  # `datasets` raises a dozen unrelated types; its message says what was wrong
        reason = " ".join(str(error).replace(name, told_as).split())
        raise DataError(f"{HUB_PREFIX}{told_as}: the data set cannot be opened: {reason}") from error


def rows_of(rows: Iterable[Mapping[str, Any]], origin: str) -> Iterator[Mapping[str, Any]]:
    """The rows of a stream, its errors in one sentence."""
    iterator = iter(rows)
    for number in itertools.count():
        try:
            row = next(iterator, None)
        except Exception as error:  # a parser's, a file system's or the network's error, by way of `datasets`
            reason = " ".join(str(error).split())
            raise DataError(f"{origin}: reading stopped after row {number}: {reason}") from error
        if row is None:
            return
        yield row


def row_pieces(texts: Iterable[Any], origin: str, read_bytes: Callable[[], int] = lambda: 0) -> Iterator[RowPiece]:
    """Texts of rows in pieces of about LARGEST_UNIT_BYTES / 4 characters; `read_bytes`: how many are read so far."""
    values: list[Any] = []
    num_characters = first_row = consumed_bytes = 0

    def piece() -> RowPiece:
        nonlocal values, num_characters, first_row, consumed_bytes
        share = read_bytes() - consumed_bytes
        made = RowPiece(origin=origin, first_row=first_row, values=tuple(values), num_bytes=share)
        first_row += len(values)
        consumed_bytes += share
        values, num_characters = [], 0
        return made

    for text in texts:
        values.append(text)
        num_characters += len(text) if isinstance(text, str) else 0
        if num_characters >= LARGEST_UNIT_BYTES // 4 or len(values) >= 65536:
            yield piece()
    if values:
        yield piece()


# Units


def unit_bytes(total_bytes: int) -> int:
    """How large units should be: small inputs still make enough to share out, large ones not too many files."""
    return min(LARGEST_UNIT_BYTES, max(SMALLEST_UNIT_BYTES, total_bytes // UNITS_AIMED_FOR))


def runs_of(files: list[tuple[Path, int]], target_bytes: int) -> Iterator[list[tuple[Path, int]]]:
    """Consecutive files in runs of at least `target_bytes`, the last perhaps less."""
    run: list[tuple[Path, int]] = []
    run_bytes = 0
    for path, size in files:
        run.append((path, size))
        run_bytes += size
        if run_bytes >= target_bytes:
            yield run
            run, run_bytes = [], 0
    if run:
        yield run


def inventory(files: Iterable[tuple[str, int, int]]) -> dict[str, str | int]:
    """(path, bytes, modification time) of every file, condensed to what can be compared and shown."""
    digest = hashlib.sha256()
    num_files = total_bytes = 0
    for path, size_bytes, modified_ns in files:
        digest.update(os.fsencode(f"{path}\0{size_bytes}\0{modified_ns}\n"))
        num_files += 1
        total_bytes += size_bytes
    return {"files": num_files, "bytes": total_bytes, "digest": digest.hexdigest()[:16]}
