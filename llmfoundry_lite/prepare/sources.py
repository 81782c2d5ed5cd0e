"""Sources of documents: the Python standard library and local files. A companion opens data sets of the Hub.

    open_source(["logs/*.jsonl.gz"])  ->  Source  ->  units()  ->  Unit, Unit, …

A source is cut into units of work that are the same in every launch and on every machine. `listing.py` finds the files;
`documents.py` says what a unit is, and reads it.
"""

import hashlib
import itertools
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmfoundry_lite import companions
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import guess_url
from llmfoundry_lite.prepare.contents import COMPRESSED_SUFFIXES, Bad, read_lines
from llmfoundry_lite.prepare.documents import Unit, group_by_size
from llmfoundry_lite.prepare.listing import Listing, kind_of, list_files
from llmfoundry_lite.prepare.request import PrepareRequest

PYTHON_STDLIB = "python-stdlib"
HUB_PREFIX = "hf:"
TABLES = ("csv", "table")
"""Kinds of files that a companion reads."""

# Unit sizes depend on the input alone, never on the number of workers, so that every launch makes the same units.
MIN_UNIT_BYTES = 256 * 1024
MAX_UNIT_BYTES = 8 * 1024 * 1024
TARGET_UNITS = 64
MAX_ROWS_PER_UNIT = 65536

STDLIB_VAL_FRACTION = 0.05
DEFAULT_VAL_FRACTION = 0.005

# Third-party code, tests (some are not UTF-8 or not Python on purpose), a bundled grammar package with bad data,
# tables of characters (a seventh of all bytes, with nothing to learn from), and generated files that record paths of
# the machine on which Python was built.
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
class Source:
    """Documents in a fixed order, cut into units."""

    units: Callable[[], Iterator[Unit]]
    """Function that yields the units. Each call starts from the beginning and yields the same ones."""
    identify: Callable[[], dict[str, str | int]]
    """Function that reads the input's current state, which must be unchanged for a preparation to be resumed."""
    total_bytes: int | None
    """Bytes on disk; None for a stream, whose length is unknown."""
    val_fraction: float
    """The fraction held out for validation unless the user says otherwise."""
    listing: Listing = field(default_factory=Listing)
    """Local files, and those that were left out."""


def _check_spelling(source: str) -> None:
    """Raise DataError for a URL, also a misspelt one, unless it is the name of something here."""
    url = guess_url(source) or source
    hub_folder = source.removeprefix(HUB_PREFIX)  # `hf:` may name a folder here, by its absolute path too
    exists = os.path.exists(source) or os.path.exists(hub_folder)
    if "://" not in url or exists:
        return
    if url.startswith("hf://"):
        raise DataError(f"{source}: no such file or folder; did you mean {HUB_PREFIX}{url.removeprefix('hf://')}?")
    raise DataError(f"{source}: a URL given, expected files and folders of this machine, or {HUB_PREFIX}NAME")


def open_source(request: PrepareRequest) -> Source:
    """Find the documents that `--source` names. Raises DataError when there are none, ConfigError for a companion."""
    sources = [source for source in request.sources if source]
    if not sources:
        raise DataError(f"no source given; expected {PYTHON_STDLIB}, {HUB_PREFIX}NAME, or files, folders and globs")
    for source in sources:
        _check_spelling(source)

    # The standard library, or a data set of the Hub, must stand alone.
    not_files = [source for source in sources if source == PYTHON_STDLIB or source.startswith(HUB_PREFIX)]
    if not_files and len(sources) > 1:
        raise DataError(f"{not_files[0]} cannot be prepared together with other sources; prepare them into two folders")
    if sources == [PYTHON_STDLIB]:
        return open_standard_library()
    if not_files:
        open_hub = companions.load("llmfoundry_formats.hub_texts:open_hub", not_files[0])
        return open_hub(not_files[0].removeprefix(HUB_PREFIX), request)

    listing = list_files(sources, split=request.split, on_error=request.on_error)
    for path in listing.files:
        if kind_of(path) in TABLES:
            companions.require("llmfoundry_formats", f"{path}: rows of CSV, parquet and arrow")  # raises at once
            break
    return Source(
        units=lambda: file_units(listing, request),
        identify=lambda: inventory((path.as_posix(), path, True) for path in listing.files),
        total_bytes=sum(listing.files.values()),
        val_fraction=DEFAULT_VAL_FRACTION,
        listing=listing,
    )


def inventory(files: Iterable[tuple[str, Path, bool]]) -> dict[str, str | int]:
    """Return facts on all files to compare and show: their number, bytes, and a digest of names, sizes and times.

    `files` are names, paths, and whether the time of modification counts. Raises DataError for a file that is gone.
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
    """Open the source code of this interpreter's standard library: real text that is always there.

    The order is by path within the library; neither order nor split depends on where Python is installed.
    """
    folder = Path(folder or sysconfig.get_path("stdlib"))
    files: list[Path] = []
    if folder.is_dir():
        all_files = [path.relative_to(folder) for path in folder.rglob("*.py")]
        files = sorted(filter(is_library_source, all_files), key=Path.as_posix)
    if not files:
        raise DataError(f"this Python ({sys.executable}) comes without the source of its standard library")

    sizes = {folder / path: (folder / path).stat().st_size for path in files}
    total_bytes = sum(sizes.values())
    modules = {str(folder / path): path.parts[0].removesuffix(".py") for path in files}

    def identify() -> dict[str, str | int]:
        version = ".".join(map(str, sys.version_info[:3]))
        # Times do not count, because installing the same Python elsewhere changes them.
        return {"python": version, **inventory((path.as_posix(), folder / path, False) for path in files)}

    return Source(
        units=lambda: whole_units(sizes.items(), unit_bytes(total_bytes), modules),
        identify=identify,
        total_bytes=total_bytes,
        val_fraction=STDLIB_VAL_FRACTION,
    )


def is_library_source(path: Path) -> bool:
    """Return whether a file, by its path within the library, is part of the corpus."""
    folders = path.parts[:-1]
    return not STDLIB_EXCLUDED_FOLDERS.intersection(folders) and not path.name.startswith(STDLIB_EXCLUDED_MODULES)


# Units


def unit_bytes(total_bytes: int) -> int:
    """Choose the size of units, so that small inputs have enough for all workers, and large ones not too many files."""
    return min(MAX_UNIT_BYTES, max(MIN_UNIT_BYTES, total_bytes // TARGET_UNITS))


def file_units(listing: Listing, request: PrepareRequest) -> Iterator[Unit]:
    """Cut local files into units, in the order of the listing.

    Small whole files share a unit. Files of lines are cut by bytes where their lines can be found by offset, and read
    through otherwise: a compressed file has no offsets, and another encoding may have other line ends.
    """
    encoding = request.encoding
    target = unit_bytes(sum(listing.files.values()))
    for kind, files in itertools.groupby(listing.files.items(), key=lambda item: kind_of(item[0])):
        if kind == "whole":
            yield from whole_units(files, target)
            continue
        for path, size in files:
            if kind in TABLES:
                cut_table = companions.load("llmfoundry_formats.tables:cut_table", str(path))
                yield from cut_table(kind, path, size, target, request)
            elif path.suffix in COMPRESSED_SUFFIXES or encoding:
                yield from stream_units("lines", str(path), read_lines(path, encoding), target, size)
            else:
                yield from range_units(path, size, target)


def range_units(path: Path, size: int, target_bytes: int) -> Iterator[Unit]:
    """Cut a plain file of lines into ranges of `target_bytes`; the last may have less."""
    for start in range(0, size, target_bytes):
        end = min(size, start + target_bytes)
        yield Unit(kind="lines", names=(str(path),), start=start, end=end, num_bytes=end - start)


def whole_units(
    files: Iterable[tuple[Path, int]], target_bytes: int, modules: Mapping[str, str] | None = None
) -> Iterator[Unit]:
    """Yield groups of consecutive files of at least `target_bytes`; the last may have less.

    `files` are paths and sizes. `modules` are the top-level modules of the standard library's files, by path.
    """
    for group, group_bytes in group_by_size(files, lambda file: file[1], target_bytes):
        names = tuple(str(path) for path, _ in group)
        unit_modules = tuple(modules[name] for name in names) if modules else ()
        yield Unit(kind="whole", names=names, num_bytes=group_bytes, modules=unit_modules)


def stream_units(
    kind: str, name: str, values: Iterable[tuple[Any, int]], target: int, size_bytes: int = 0
) -> Iterator[Unit]:
    """Cut a stream of values into units of about `target` bytes or characters, or of MAX_ROWS_PER_UNIT values.

    `values` are lines or texts, each with the bytes that have been read from disk so far. `size_bytes` is the size of
    the file, which the last unit makes up for, so that the progress bar ends at its end.
    """
    first_row = 1
    bytes_before = 0
    for group, length in group_by_size(values, _length_of_value, target, max_items=MAX_ROWS_PER_UNIT):
        _, bytes_read = group[-1]
        is_last = length < target and len(group) < MAX_ROWS_PER_UNIT
        if is_last:
            bytes_read = max(size_bytes, bytes_read)
        content = tuple(value for value, _ in group)
        yield Unit(kind=kind, names=(name,), first=first_row, content=content, num_bytes=bytes_read - bytes_before)
        first_row += len(group)
        bytes_before = bytes_read


def _length_of_value(value: tuple[Any, int]) -> int:
    """Return the length of a line or text of a stream; 0 for one that cannot be read."""
    content, _ = value
    return 0 if isinstance(content, Bad) else len(content)
