"""The list of input files: expansion of the paths, folders and globs of `--source`.

A file with several names is read under the first one; a name that is no link comes before links. A link to a folder is
followed once, after the folders beside it, so that a circle of links ends.

`list_files` makes a `Listing`, to which the functions below it add what they leave out.
"""

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmfoundry_lite.bounded import read_json
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.prepare.contents import COMPRESSED_SUFFIXES

MAX_REASONS = 3
"""Files that an error names where none can be read."""
SUFFIXES = {
    "whole": (".txt", ".md"),
    "lines": (".jsonl", ".json", ".ndjson"),
    "csv": (".csv", ".tsv"),
    "table": (".parquet", ".arrow"),
}
"""Kind of file -> its suffixes; see the table in `documents.py`."""
READABLE = (
    "{.txt, .md, .jsonl, .json, .ndjson, .csv, .tsv}, plain, .gz or .zst; .parquet; or .arrow, as datasets saves it"
)

DATASET_FILES = ("dataset_info.json", "state.json")
"""Names of the files that `datasets` writes beside its .arrow files."""
STATE_FILE = "state.json"
"""Name of the one of them that lists the .arrow files."""
SPLITS_FILE = "dataset_dict.json"
"""Name of the file that `datasets` writes above the folders of several splits."""


@dataclass(kw_only=True, slots=True)
class Listing:
    """The files to read, in their order, and those that were left out."""

    split: str = "train"
    """The split to read of a data set that `datasets` saved."""
    on_error: str = "stop"
    """Policy for a file that cannot be read: `stop`, or `skip`, which records it."""
    files: dict[Path, int] = field(default_factory=dict)
    """Path -> size in bytes."""
    num_ignored: int = 0
    """Number of files that are of no kind we read, or lie beside a saved data set without being part of it."""
    repeated: list[str] = field(default_factory=list)
    """A sentence for each name of a file or folder that is read under another name."""
    unreadable: list[str] = field(default_factory=list)
    """With `on_error` skip, a sentence for each file or folder that cannot be read."""

    def leave_out(self, path: Path, reason: str) -> None:
        """Record a file or folder that cannot be read. With `on_error` stop, raises DataError."""
        if self.on_error == "stop":
            raise DataError(
                f"{path} cannot be read: {reason}; repair it, or leave such places out with --on-error skip"
            )
        self.unreadable.append(f"{path}: {reason}")

    def leave_out_folder(self, error: OSError) -> None:
        """Record a folder that cannot be listed, by the error of trying it. `os.walk` calls this."""
        self.leave_out(Path(error.filename), error.strerror or str(error))


def list_files(sources: Sequence[str], *, split: str, on_error: str) -> Listing:
    """List the files of paths, folders (recursively) and globs, in the order given; within a folder or glob by path.

    Hidden files and folders are skipped unless they are named. Raises DataError where there is nothing to read, and
    with `on_error` stop for a file or folder that cannot be read.
    """
    listing = Listing(split=split, on_error=on_error)
    first_paths: dict[tuple[int, int], Path] = {}  # of each file, by device and inode
    for source in sources:
        num_ignored_before = listing.num_ignored
        # Names that are no links come first, so that a file is read under its own name.
        paths = sorted(expand(source, listing), key=lambda path: (os.path.islink(path), path.as_posix()))
        new_files: list[tuple[Path, int]] = []
        for path in paths:
            size = _size_to_read(path, listing, first_paths)
            if size is not None and path not in listing.files:
                new_files.append((path, size))

        if not any(map(is_readable_kind, paths)) and not listing.unreadable:
            is_empty = not paths and listing.num_ignored == num_ignored_before
            if is_empty:
                raise DataError(f"{source} is an empty folder; expected files: {READABLE}")
            raise DataError(f"{source}: nothing here can be read; expected {READABLE}")
        listing.files |= sorted(new_files, key=lambda item: item[0].as_posix())

    if not listing.files:
        reasons = "; ".join(listing.unreadable[:MAX_REASONS])
        raise DataError(f"{' '.join(sources)}: no file can be read ({reasons})")
    return listing


def _size_to_read(path: Path, listing: Listing, first_paths: dict[tuple[int, int], Path]) -> int | None:
    """Return the bytes of a file that is to be read; None for one that is left out, as the listing then records.

    `first_paths` are the paths under which files have been found so far. This one is added, if its file is new.
    """
    if not os.path.exists(path):
        is_link = os.path.islink(path)
        listing.leave_out(path, f"it is {describe_dead_link(path)}" if is_link else "No such file or directory")
        return None
    if not is_readable_kind(path):
        listing.num_ignored += 1
        return None
    if not os.access(path, os.R_OK):
        listing.leave_out(path, "Permission denied")
        return None

    status = path.stat()
    if status.st_size == 0 and path.suffix in COMPRESSED_SUFFIXES:
        listing.leave_out(path, f"it has 0 bytes, so it is no whole {path.suffix} file")
        return None
    first_path = first_paths.setdefault((status.st_dev, status.st_ino), path)
    if first_path != path:
        listing.repeated.append(f"{path} is the same file as {first_path}")
        return None
    return status.st_size


def kind_of(path: Path) -> str | None:
    """Return the key of SUFFIXES that a file belongs to; None for files that are not read, like a compressed table."""
    is_compressed = path.suffix in COMPRESSED_SUFFIXES
    suffix = path.with_suffix("").suffix if is_compressed else path.suffix
    for kind, suffixes in SUFFIXES.items():
        if suffix in suffixes:
            return None if is_compressed and kind == "table" else kind
    return None


def is_readable_kind(path: Path) -> bool:
    """Return whether a path is a regular file of a kind that is read."""
    return kind_of(path) is not None and os.path.isfile(path)


def expand(source: str, listing: Listing) -> Iterable[Path]:
    """Return all files, pipes and the like, but no folders, that a path, folder or glob leads to.

    Folders that cannot be read are recorded in the listing. Raises DataError where nothing is found.
    """
    path = Path(os.path.expanduser(source))
    if os.path.isdir(path):
        return walk(path, listing)
    if os.path.isfile(path):
        return [path]
    if os.path.islink(path):
        raise DataError(f"{source} is {describe_dead_link(path)}")

    # The part of the path that exists as a folder is no pattern: `run[1]/*.txt` never means run1.
    folder = next((parent for parent in path.parents if os.path.isdir(parent)), Path())
    pattern = Path(glob.escape(str(folder))) / path.relative_to(folder)
    for closed_folder, reason in find_closed_folders(pattern).items():
        listing.leave_out(closed_folder, reason)
    matches = [Path(name) for name in glob.glob(str(pattern), recursive=True)]
    if "**" in pattern.parts:  # it goes through the files of the folders that it matches
        matches = [match for match in matches if not os.path.isdir(match)]
    if not matches:
        raise DataError(f"{source}: {'no file matches' if glob.has_magic(source) else 'no such file or folder'}")

    # A matching folder is read as if it were named.
    paths = []
    for match in matches:
        if os.path.isdir(match):
            paths.extend(walk(match, listing))
        elif os.path.lexists(match):  # names in closed folders do not exist for us
            paths.append(match)
    return paths


def find_closed_folders(pattern: Path) -> dict[Path, str]:
    """Find folders that a glob needs to read and cannot, each with the reason, because `glob` skips them silently.

    For `data/*/a.txt`, `data` has to be listed, and each folder in it entered.
    """
    parts = pattern.parts
    first_depth = 1 if pattern.is_absolute() else 0
    last_depth = len(parts) if parts[-1] == "**" else len(parts) - 1
    reasons: dict[Path, str] = {}
    for depth in range(first_depth, last_depth + 1):
        has_to_list = depth == len(parts) or glob.has_magic(parts[depth])
        folders = [os.curdir]
        if depth > 0:
            folders = sorted(glob.glob(os.path.join(*parts[:depth], ""), recursive=True))
        for folder in folders:
            try:
                os.stat(os.path.join(folder, os.curdir))
                if has_to_list:
                    os.scandir(folder).close()
            except OSError as error:
                reasons.setdefault(Path(folder), error.strerror or str(error))
    return reasons


def walk(folder: Path, listing: Listing) -> Iterator[Path]:
    """Yield all files below a folder, pipes and the like too. Links to folders come after the folders beside them.

    Hidden names are skipped. What is left out, ignored or the same folder again is recorded in the listing.
    """
    first_paths: dict[str, str] = {}  # of each folder, by its real path
    for path, folders, files in os.walk(folder, onerror=listing.leave_out_folder, followlinks=True):
        first_path = first_paths.setdefault(os.path.realpath(path), path)
        if first_path != path:
            listing.repeated.append(f"{path} is the same folder as {first_path}")
            folders.clear()  # which keeps `os.walk` from entering them
            continue

        data_names, other_names = divide_names(Path(path), [*folders, *files], listing.split)
        for name in other_names:
            if not name.startswith("."):
                listing.num_ignored += count_files(Path(path, name))

        all_folders = set(folders)
        visible_names = [name for name in sorted(data_names) if not name.startswith(".")]
        for name in visible_names:
            if name not in all_folders:
                yield Path(path, name)
        # `os.walk` enters these next, in this order.
        data_folders = all_folders.intersection(visible_names)
        folders[:] = sorted(data_folders, key=lambda name: (os.path.islink(Path(path, name)), name))


def describe_dead_link(path: Path) -> str:
    """Describe a link that leads nowhere, for an error."""
    return f"a link to {os.readlink(path)}, which does not exist or cannot be reached"


def divide_names(folder: Path, names: list[str], split: str) -> tuple[list[str], list[str]]:
    """Divide the names in a folder into those that hold data, and those that `datasets` saved beside them.

    In a folder of several splits, `split` alone holds data. Raises DataError if it is not there, and for a data set
    whose rows cannot be read in their order.
    """
    if SPLITS_FILE in names:
        splits = read_object(folder / SPLITS_FILE).get("splits")
        if isinstance(splits, list):
            if split not in splits:
                offered = ", ".join(map(str, splits))
                raise DataError(f"{folder} has no split {split!r}; there are: {offered} (choose one with --split)")
            return [split], [name for name in names if name not in (SPLITS_FILE, *splits)]

    if STATE_FILE in names:
        state = read_object(folder / STATE_FILE)
        if isinstance(state.get("_data_files"), list):
            has_indices = any(value for key, value in state.items() if key.startswith("_indices"))
            if has_indices:
                raise DataError(
                    f"{folder} was saved with a choice of its rows beside them, by an old release of datasets; load "
                    "and save it again with a new one"
                )
            files = [str(file["filename"]) for file in state["_data_files"]]
            return files, [name for name in names if name not in (*DATASET_FILES, *files)]

    if any(name.endswith(".arrow") for name in names):
        return [name for name in names if name not in DATASET_FILES], []
    return names, []


def count_files(path: Path) -> int:
    """Return 1 for a file; for a folder, the number of files below it that are not hidden."""
    if not path.is_dir() or path.is_symlink():
        return 1
    num_files = 0
    for _, _, names in os.walk(path):
        num_files += sum(not name.startswith(".") for name in names)
    return num_files


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file has none."""
    try:
        content = read_json(path, "a JSON file")
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
