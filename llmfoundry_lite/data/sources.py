"""Where documents come from: the Python standard library, local files, data sets of the Hugging Face Hub.

Owns how a source is cut into *units*: pieces of work that are the same on every run and every machine. Leaves what the
kinds of units are and how the documents of one are read to `documents.py`, and tokens, samples, processes and resuming
to `prepare.py`.

    open_source(["logs/*.jsonl.gz"])  ->  Source  ->  units()  ->  Unit, Unit, …
"""

import glob
import hashlib
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmfoundry_lite.data.documents import (
    COMPRESSED_SUFFIXES,
    Absent,
    LinePiece,
    LineRange,
    RowGroup,
    RowPiece,
    Unit,
    WholeFiles,
    decompressed_blocks,
    open_parquet,
)
from llmfoundry_lite.errors import DataError

PYTHON_STDLIB = "python-stdlib"
HUB_PREFIX = "hf:"

WHOLE_FILE_SUFFIXES = (".txt", ".md")
LINE_SUFFIXES = (".jsonl", ".json", ".ndjson")
PARQUET_SUFFIX = ".parquet"
READABLE = "{.txt, .md, .jsonl, .json, .ndjson, .parquet}, plain, .gz or .zst"

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
    identity: dict[str, str | int]
    """What has to be unchanged for a resumed preparation to read the same documents."""
    total_bytes: int | None
    """On disk; None for a stream, whose end is not known beforehand."""
    val_fraction: float
    """The fraction held out for validation unless the user says otherwise."""
    num_ignored_files: int = 0
    """Files in the folders given whose suffix is none we read."""


def open_source(sources: Sequence[str], *, text_key: str = "text", split: str = "train") -> Source:
    """Find the documents that `--source` names. Raises DataError when there are none.

    `sources` is `["python-stdlib"]`, `["hf:NAME"]`, `["hf:NAME:CONFIG"]`, or any number of files, folders and
    globs. `split` is the split of a Hub data set and means nothing elsewhere.
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
        return open_hub(special[0].removeprefix(HUB_PREFIX), text_key=text_key, split=split)
    return open_files(sources)


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

    def units() -> Iterator[Unit]:
        for run in runs_of(list(zip(files, sizes, strict=True)), unit_bytes(total_bytes)):
            yield WholeFiles(
                paths=tuple(folder / path for path, _ in run),
                num_bytes=sum(size for _, size in run),
                modules=tuple(path.parts[0].removesuffix(".py") for path, _ in run),
            )

    return Source(
        units=units,
        identity={
            "python": ".".join(map(str, sys.version_info[:3])),
            **inventory((path.as_posix(), size, 0) for path, size in zip(files, sizes, strict=True)),
        },
        total_bytes=total_bytes,
        val_fraction=STDLIB_VAL_FRACTION,
    )


def is_library_source(path: Path) -> bool:
    """Whether a file, by its path within the library, is part of the corpus."""
    folders = path.parts[:-1]
    return not STDLIB_EXCLUDED_FOLDERS.intersection(folders) and not path.name.startswith(STDLIB_EXCLUDED_MODULES)


# Local files


def open_files(sources: Sequence[str]) -> Source:
    """Files, folders (searched recursively) and globs, in the order given; within a folder or glob by path.

    A file named twice is read once. Hidden files and folders are passed over unless named.
    """
    paths: dict[Path, None] = {}  # a dict keeps the order and drops repetitions
    num_ignored = 0
    for source in sources:
        candidates = expand(source)
        readable = [path for path in candidates if kind_of(path) is not None]
        num_ignored += len(candidates) - len(readable)
        if not readable:
            raise DataError(f"{source}: nothing here can be read; expected {READABLE}")
        paths.update(dict.fromkeys(readable))
    stats = [path.stat() for path in paths]
    sizes = dict(zip(paths, (stat.st_size for stat in stats), strict=True))
    total_bytes = sum(sizes.values())

    def units() -> Iterator[Unit]:
        target_bytes = unit_bytes(total_bytes)
        waiting: list[tuple[Path, int]] = []
        for path, size in sizes.items():
            if kind_of(path) == "whole":
                waiting.append((path, size))
                continue
            yield from whole_file_units(waiting, target_bytes)
            waiting = []
            if kind_of(path) == "parquet":
                yield from row_groups(path, size)
            elif path.suffix in COMPRESSED_SUFFIXES:
                yield from line_pieces(path, size, target_bytes)
            else:
                for start in range(0, size, target_bytes):
                    yield LineRange(path=path, start=start, end=min(size, start + target_bytes))
        yield from whole_file_units(waiting, target_bytes)

    return Source(
        units=units,
        identity=inventory(
            (path.as_posix(), stat.st_size, stat.st_mtime_ns) for path, stat in zip(paths, stats, strict=True)
        ),
        total_bytes=total_bytes,
        val_fraction=DEFAULT_VAL_FRACTION,
        num_ignored_files=num_ignored,
    )


def expand(source: str) -> list[Path]:
    """The files a path, folder or glob stands for, sorted by path."""
    path = Path(source).expanduser()
    if path.is_dir():
        files = (file for file in path.rglob("*") if file.is_file())
        found = [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]
        if not found:
            raise DataError(f"{source} is an empty folder; expected files: {READABLE}")
    elif path.is_file():
        found = [path]
    else:
        found = [Path(file) for file in glob.glob(str(path), recursive=True) if Path(file).is_file()]
        if not found:
            looks_like_glob = glob.has_magic(source)
            raise DataError(f"{source}: {'no file matches' if looks_like_glob else 'no such file or folder'}")
    return sorted(found, key=Path.as_posix)


def kind_of(path: Path) -> str | None:
    """`whole`, `lines` or `parquet` by suffix, looking through .gz and .zst; None for what we do not read."""
    suffix = path.with_suffix("").suffix if path.suffix in COMPRESSED_SUFFIXES else path.suffix
    if suffix in WHOLE_FILE_SUFFIXES:
        return "whole"
    if suffix in LINE_SUFFIXES:
        return "lines"
    return "parquet" if suffix == PARQUET_SUFFIX else None


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


def line_pieces(path: Path, size_bytes: int, target_bytes: int) -> Iterator[LinePiece]:
    """A compressed file of lines in pieces of at least `target_bytes` of text, each ending where a line ends."""
    pieces: list[bytes] = []
    first_line = 1
    consumed_bytes = 0
    for block, read_bytes in decompressed_blocks(path):
        pieces.append(block)
        if sum(map(len, pieces)) < target_bytes or b"\n" not in block:
            continue
        last_end = block.rindex(b"\n") + 1
        pieces[-1] = block[:last_end]
        lines = b"".join(pieces)
        yield LinePiece(path=path, first_line=first_line, lines=lines, num_bytes=read_bytes - consumed_bytes)
        first_line += lines.count(b"\n")
        consumed_bytes = read_bytes
        pieces = [block[last_end:]]
    yield LinePiece(path=path, first_line=first_line, lines=b"".join(pieces), num_bytes=size_bytes - consumed_bytes)


# Data sets of the Hugging Face Hub


def open_hub(name_and_config: str, *, text_key: str, split: str) -> Source:
    """A data set by its Hub name (or a local data set folder), streamed: nothing is downloaded ahead of time.

    The revision is pinned when the name is resolved, so that a resumed preparation reads the same rows.
    """
    name, _, config = name_and_config.partition(":")
    if not name:
        raise DataError(f"{HUB_PREFIX} needs the name of a data set, as in {HUB_PREFIX}allenai/c4:en")
    revision = None
    identity: dict[str, str | int]
    if Path(name).is_dir():
        files = sorted(file for file in Path(name).rglob("*") if file.is_file())
        stats = [file.stat() for file in files]
        identity = inventory(
            (file.relative_to(name).as_posix(), stat.st_size, stat.st_mtime_ns)
            for file, stat in zip(files, stats, strict=True)
        )
    else:
        revision = hub_revision(name)
        identity = {"revision": revision}

    def units() -> Iterator[Unit]:
        rows = stream_hub(name, config or None, split, revision)
        yield from row_pieces(rows, f"{HUB_PREFIX}{name_and_config}, split {split}", text_key)

    return Source(units=units, identity=identity, total_bytes=None, val_fraction=DEFAULT_VAL_FRACTION)


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


def stream_hub(name: str, config: str | None, split: str, revision: str | None) -> Iterable[dict[str, Any]]:
    """The rows of one split, in order."""
    import datasets

    try:
        return datasets.load_dataset(name, config, split=split, revision=revision, streaming=True)
    except Exception as error:  # `datasets` raises a dozen unrelated types; its message says what was wrong
        reason = " ".join(str(error).split())
        raise DataError(f"{HUB_PREFIX}{name}: the data set cannot be opened: {reason}") from error


def row_pieces(rows: Iterable[dict[str, Any]], origin: str, text_key: str) -> Iterator[RowPiece]:
    """Rows in pieces of about LARGEST_UNIT_BYTES / 4 characters."""
    values: list[Any] = []
    num_characters = 0
    first_row = row_number = 0
    iterator = iter(rows)
    while True:
        try:
            row = next(iterator, None)
        except Exception as error:  # a parser's, a file system's or the network's error, by way of `datasets`
            reason = " ".join(str(error).split())
            raise DataError(f"{origin}: reading stopped after row {row_number}: {reason}") from error
        if row is not None:
            value = row.get(text_key, Absent(tuple(row)))
            values.append(value)
            num_characters += len(value) if isinstance(value, str) else 0
            row_number += 1
        if values and (row is None or num_characters >= LARGEST_UNIT_BYTES // 4 or len(values) >= 65536):
            yield RowPiece(origin=origin, first_row=first_row, values=tuple(values))
            values, num_characters, first_row = [], 0, row_number
        if row is None:
            return


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
        digest.update(f"{path}\0{size_bytes}\0{modified_ns}\n".encode())
        num_files += 1
        total_bytes += size_bytes
    return {"files": num_files, "bytes": total_bytes, "digest": digest.hexdigest()[:16]}
