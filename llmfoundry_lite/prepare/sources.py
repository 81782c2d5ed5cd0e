"""Sources of documents: the Python standard library and local files. Companions open buckets and data sets of the Hub.

    open_source(["logs/*.jsonl.gz"])  ->  Source  ->  pieces()  ->  Piece, Piece, …  ->  units()  ->  Unit, Unit, …

A source is a list of pieces, which follows from the list of files alone. Reading a piece shows of which units it
consists. Pieces and units are the same in every launch and on every machine, so several machines can each tokenise some
pieces. `listing.py` finds the files. `documents.py` defines a unit, and reads it.

| piece                                          | units                        |
|------------------------------------------------|------------------------------|
| small text files in a row                      | one                          |
| files in a row, for a reader of the user's own | one                          |
| a byte range of a plain file of lines          | one                          |
| a file of lines, compressed or not in UTF-8    | one or more, with its lines  |
| a table: csv, parquet, arrow                   | one or more                  |
| a data set of the Hub                          | one or more, with its texts  |
"""

import hashlib
import itertools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from llmfoundry_lite import companions
from llmfoundry_lite.errors import DataError, mask_urls
from llmfoundry_lite.files import guess_url
from llmfoundry_lite.own_code import is_own
from llmfoundry_lite.prepare.contents import COMPRESSED_SUFFIXES, InputFile, UnreadableText, read_lines
from llmfoundry_lite.prepare.documents import Unit, group_by_size, input_name, text_if_refused
from llmfoundry_lite.prepare.listing import Listing, file_kind, list_files
from llmfoundry_lite.prepare.own_readers import import_readers
from llmfoundry_lite.prepare.request import PrepareRequest

PYTHON_STDLIB = "python-stdlib"
HUB_PREFIX = "hf:"
HUB_FILES = "hf://datasets/"
"""Beginning of the URLs of files in a data set of the Hub."""
TABLES = ("csv", "table")
"""Kinds of files, of those in `listing.SUFFIXES`, that a companion reads."""

# Unit sizes depend only on the input, and not on the number of workers, so that every launch has the same units.
MIN_UNIT_BYTES = 256 * 1024
MAX_UNIT_BYTES = 8 * 1024 * 1024
TARGET_UNITS = 64
MAX_ROWS_PER_UNIT = 65536

STDLIB_VAL_FRACTION = 0.05
DEFAULT_VAL_FRACTION = 0.005

# Excluded are third-party code; tests, some of which are deliberately not UTF-8 or not Python; a bundled grammar
# package with unsuitable data; tables of characters, a seventh of all bytes; and generated files with paths of the
# machine on which Python was built.
STDLIB_EXCLUDED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "lib2to3",
    "encodings",
    "__pycache__",
}
STDLIB_EXCLUDED_MODULES = ("_sysconfigdata", "sitecustomize", "usercustomize")


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of a source that is known from the list of files, before anything is read. See the module's table."""

    num_bytes: int
    """Bytes on disk; 0 for a stream, whose length is unknown."""
    units: Callable[[], Iterable[Unit]]
    """Function that reads the piece and yields its units, in order. Each call yields the same ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Documents in a fixed order, cut into pieces, and these into units."""

    pieces: Callable[[], Iterator[Piece]]
    """Function that yields the pieces. Each call starts from the beginning and yields the same ones."""
    describe_state: Callable[[], dict[str, str | int]]
    """Function that describes the current state of the input. A preparation is resumed only if it is unchanged."""
    total_bytes: int | None
    """Bytes on disk; None for a stream, whose length is unknown."""
    val_fraction: float
    """Fraction that is held out for validation by default."""
    listing: Listing = field(default_factory=Listing)
    """Local files, and records of those that are not read."""
    store_list: Callable[[Path], None] = lambda path: None
    """Function that writes the list of the input to a file, from which other parts open the same source. It does
    nothing for sources that each part lists."""

    def units(self) -> Iterator[Unit]:
        """Yield the units of all pieces, in order."""
        for piece in self.pieces():
            yield from piece.units()


def is_bucket_url(source: str) -> bool:
    """Return whether a source is a URL such as s3://bucket/folder, and not a local path of this name.

    Raises DataError, which suggests the right spelling, for a URL that is misspelt.
    """
    url = guess_url(source) or source
    path_after_prefix = source.removeprefix(HUB_PREFIX)  # `hf:` may also be followed by a local folder
    exists = os.path.exists(source) or os.path.exists(path_after_prefix)
    if "://" not in url or exists:
        return False
    if url.startswith("hf://") and not url.startswith(HUB_FILES):
        raise DataError(f"{source}: no such file or folder; did you mean {HUB_PREFIX}{url.removeprefix('hf://')}?")
    if url != source:
        raise DataError(f"{source}: no such file or folder; did you mean {url}?")
    return True


def open_source(request: PrepareRequest, stored_list: Path | None = None) -> Source:
    """Open the sources of a request: the standard library, a data set of the Hub, local files, or a bucket.

    `request.sources` is ("python-stdlib",), one name such as ("hf:allenai/c4:en",), or files, folders and globs, either
    all of this machine or all by URLs. Files are listed here, and read only when the units of a piece are asked for.
    `stored_list` is a file that `Source.store_list` may have written, by which a bucket need not be listed.

    Raises DataError if there is nothing to read, and ConfigError if a companion that is needed is not installed.
    """
    import_readers(request.reader_of_suffix.values())
    sources = [source for source in request.sources if source]
    if not sources:
        raise DataError(f"no source given; expected {PYTHON_STDLIB}, {HUB_PREFIX}NAME, or files, folders and globs")
    urls = [source for source in sources if is_bucket_url(source)]

    # The standard library, data sets of the Hub and buckets cannot be combined with other sources.
    special_sources = [source for source in sources if source == PYTHON_STDLIB or source.startswith(HUB_PREFIX)]
    if urls and len(urls) == len(sources):
        open_bucket = companions.load("llmfoundry_engines.bucket_source:open_bucket", mask_urls(urls[0]))
        return open_bucket(urls, request, stored_list)
    special_sources += urls
    if special_sources and len(sources) > 1:
        raise DataError(
            f"{special_sources[0]} cannot be prepared together with other sources; prepare them into two folders"
        )
    if sources == [PYTHON_STDLIB]:
        return open_standard_library()
    if special_sources:
        open_hub = companions.load("llmfoundry_formats.hub_texts:open_hub", special_sources[0])
        return open_hub(special_sources[0].removeprefix(HUB_PREFIX), request)

    # Local files.
    readers = request.reader_of_suffix
    listing = list_files(sources, split=request.split, on_error=request.on_error, readers=readers)
    check_can_read_tables(listing.files, readers)
    total_bytes = sum(listing.files.values())
    return Source(
        pieces=lambda: file_pieces(listing.files.items(), total_bytes, request),
        describe_state=lambda: summarize_files((path.as_posix(), path, True) for path in listing.files),
        total_bytes=total_bytes,
        val_fraction=DEFAULT_VAL_FRACTION,
        listing=listing,
    )


def check_can_read_tables(files: Iterable[InputFile], readers: Mapping[str, str]) -> None:
    """Raise ConfigError if there are tables, and the companion that reads them is not installed.

    `readers` are the user's own readers by suffix, which may read such files instead.
    A worker would raise it later.
    """
    for file in files:
        if file_kind(file, readers) in TABLES:
            companions.require("llmfoundry_formats", f"{file}: rows of CSV, parquet and arrow")
            return


def summarize_files(files: Iterable[tuple[str, Path, bool]]) -> dict[str, str | int]:
    """Summarize the state of files: their number, total bytes, and a digest of names, sizes and modification times.

    files: (name, path, whether the modification time is part of the digest) of each.

    Returns for instance {"files": 2, "bytes": 4096, "digest": "0f3a9c…"}. Two summaries are equal only if no file has
    changed its name, size or time; the content of files is not read. Raises DataError for a file that no longer exists.
    """
    digest = hashlib.sha256()
    num_files = 0
    total_bytes = 0
    for name, path, with_time in files:
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(f"{path} was there when the preparation began and is not now: {error.strerror}") from error
        modified_ns = status.st_mtime_ns if with_time else 0
        digest.update(os.fsencode(f"{name}\0{status.st_size}\0{modified_ns}\n"))
        num_files += 1
        total_bytes += status.st_size
    return {"files": num_files, "bytes": total_bytes, "digest": digest.hexdigest()[:16]}


def open_standard_library(folder: Path | None = None) -> Source:
    """Open the source code of this interpreter's standard library, which is text that needs no download.

    Files are ordered by their path within the library (in `folder`), so neither the order nor the split depends on
    where Python is installed. Documents of one top-level module, such as `json` with all its files, are held out
    together, because files of a module resemble each other.

    Raises DataError if Python was installed without its source code.
    """
    # List the files.
    folder = Path(folder or sysconfig.get_path("stdlib"))
    files: list[Path] = []
    if folder.is_dir():
        all_files = [path.relative_to(folder) for path in folder.rglob("*.py")]
        files = sorted(filter(is_library_source, all_files), key=Path.as_posix)
    if not files:
        raise DataError(f"this Python ({sys.executable}) comes without the source of its standard library")

    # Find their sizes and modules: `json/decoder.py` is in the module json, and `ast.py` is the module ast.
    sizes = {folder / path: (folder / path).stat().st_size for path in files}
    total_bytes = sum(sizes.values())
    modules = {str(folder / path): path.parts[0].removesuffix(".py") for path in files}

    def describe_state() -> dict[str, str | int]:
        """Return the version of Python and a summary of the library's files."""
        version = ".".join(map(str, sys.version_info[:3]))
        # Modification times are left out, because they change when the same Python is installed elsewhere.
        return {"python": version, **summarize_files((path.as_posix(), folder / path, False) for path in files)}

    return Source(
        pieces=lambda: whole_pieces(sizes.items(), choose_unit_bytes(total_bytes), modules),
        describe_state=describe_state,
        total_bytes=total_bytes,
        val_fraction=STDLIB_VAL_FRACTION,
    )


def is_library_source(path: Path) -> bool:
    """Return whether a file of the standard library is read, by its path within the library."""
    folders = path.parts[:-1]
    return not STDLIB_EXCLUDED_FOLDERS.intersection(folders) and not path.name.startswith(STDLIB_EXCLUDED_MODULES)


# Pieces and units


def choose_unit_bytes(total_bytes: int) -> int:
    """Choose the target size of units, so that small inputs have enough units for all workers.

    Units are TARGET_UNITS parts of the input, but have at least MIN_UNIT_BYTES and at most MAX_UNIT_BYTES. An input of
    64 MiB has 64 units of 1 MiB, and one of 1 MiB has 4 units of 256 KiB.
    """
    return min(MAX_UNIT_BYTES, max(MIN_UNIT_BYTES, total_bytes // TARGET_UNITS))


def file_pieces(files: Iterable[tuple[InputFile, int]], total_bytes: int, request: PrepareRequest) -> Iterator[Piece]:
    """Cut files into pieces, in their order, without reading them.

    files: the files, and the size in bytes of each.
    total_bytes: size of all files.

    Several small text files share a piece, and so do files for a reader of the user's own. A plain UTF-8 file of lines
    is cut into byte ranges. Every other file is a piece of its own, because only reading it shows where it can be cut.

    Consecutive files of one kind are cut together, so that text files share pieces only with those beside them.
    """
    target = choose_unit_bytes(total_bytes)
    readers = request.reader_of_suffix
    for kind, files_of_kind in itertools.groupby(files, key=lambda item: file_kind(item[0], readers)):
        if kind == "whole" or is_own(kind):
            yield from whole_pieces(files_of_kind, target, kind=str(kind))
            continue
        for path, size in files_of_kind:
            is_cut_when_read = kind in TABLES or path.suffix in COMPRESSED_SUFFIXES or request.encoding
            if is_cut_when_read:
                yield Piece(num_bytes=size, units=partial(file_units, str(kind), path, size, target, request))
            else:
                yield from range_pieces(path, size, target)


def file_units(kind: str, path: InputFile, size: int, target: int, request: PrepareRequest) -> Iterator[Unit]:
    """Yield the units of a file that has to be read to cut it. `kind` is that of `listing.file_kind`.

    A companion cuts tables. A file of lines is read here, and its units have its lines as content: a compressed file
    has no offsets, and another encoding may have other line ends.
    """
    if kind in TABLES:
        cut_table = companions.load("llmfoundry_formats.tables:cut_table", str(path))
        units = cut_table(kind, path, size, target, request)
    else:
        units = stream_units("lines", str(path), read_lines(path, request.encoding), target, size)

    def unit_of_refused(text: UnreadableText) -> Unit:
        return Unit(kind="rows", names=(str(path),), content=(text,), num_bytes=0)

    yield from text_if_refused(units, unit_of_refused)


def range_pieces(path: InputFile, size: int, target_bytes: int) -> Iterator[Piece]:
    """Cut a plain file of lines, of `size` bytes, into byte ranges of `target_bytes`. The last one may be shorter."""
    for start in range(0, size, target_bytes):
        end = min(size, start + target_bytes)
        unit = Unit(kind="lines", names=(input_name(path),), start=start, end=end, num_bytes=end - start)
        yield piece_of_one_unit(unit)


def whole_pieces(
    files: Iterable[tuple[InputFile, int]],
    target_bytes: int,
    modules: Mapping[str, str] | None = None,
    kind: str = "whole",
) -> Iterator[Piece]:
    """Group consecutive files that are read whole into pieces of at least `target_bytes`. The last one may be smaller.

    `files` are files and their sizes in bytes, and `kind` is the kind of their units. `modules` are the top-level
    modules of the files of the standard library, by path.
    """
    for group, group_bytes in group_by_size(files, lambda file: file[1], target_bytes):
        names = tuple(input_name(path) for path, _ in group)
        unit_modules = tuple(modules[str(name)] for name in names) if modules else ()
        unit = Unit(kind=kind, names=names, num_bytes=group_bytes, modules=unit_modules)
        yield piece_of_one_unit(unit)


def piece_of_one_unit(unit: Unit) -> Piece:
    """Return a piece that consists of a single unit, which is known without reading."""
    return Piece(num_bytes=unit.num_bytes, units=lambda: [unit])


def stream_units(
    kind: str, name: str, values: Iterable[tuple[Any, int]], target: int, size_bytes: int = 0
) -> Iterator[Unit]:
    """Cut a stream of lines or texts into units that contain them.

    kind, name: `kind` and the name in `names` of the units.
    values: lines or texts, each with the number of bytes read from disk so far.
    target: bytes or characters of a unit, from which on it ends. It has at most MAX_ROWS_PER_UNIT values.
    size_bytes: size of the file, if it is known. The last unit gets all bytes that are left, so that the progress bar
        reaches its end.

    Lines of 30, 40, 20 and 50 bytes with a target of 60 make a unit of the lines 1 and 2, and one of the lines 3 and 4.
    """
    first_number = 1  # of the first line in the group
    bytes_before = 0  # read from disk for earlier groups
    for group, length in group_by_size(values, _length_of_value, target, max_items=MAX_ROWS_PER_UNIT):
        _, bytes_read = group[-1]
        is_last = length < target and len(group) < MAX_ROWS_PER_UNIT
        if is_last:
            bytes_read = max(size_bytes, bytes_read)
        content = tuple(value for value, _ in group)
        yield Unit(
            kind=kind, names=(name,), first_number=first_number, content=content, num_bytes=bytes_read - bytes_before
        )
        first_number += len(group)
        bytes_before = bytes_read


def _length_of_value(value: tuple[Any, int]) -> int:
    """Return the length of the line or text in a value of `stream_units`; 0 if it cannot be read."""
    content, _ = value
    return 0 if isinstance(content, UnreadableText) else len(content)
