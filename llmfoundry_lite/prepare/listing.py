"""The list of input files: expansion of the paths, folders and globs of `--source`.

A file that has several names is read once, under a name that is not a link if there is one. Links to folders are
followed after the folders beside them, and each folder is read once, so a circle of links ends.

`list_files` builds a `Listing`. It expands each source (`expand_source`, `walk_folder`), and checks each file
(`_check_file`). The functions below it record in the listing which files are not read, and why. In a folder that the
`datasets` library has saved, `separate_data_names` finds the data files.
"""

import glob
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmfoundry_lite.bounded import read_json
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.prepare.contents import COMPRESSED_SUFFIXES, InputFile

MAX_REASONS = 3
"""Number of unreadable files that an error names if no file can be read."""
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
"""Name of the file in which `datasets` lists the .arrow files."""
SPLITS_FILE = "dataset_dict.json"
"""Name of the file that `datasets` writes above the folders of several splits."""


@dataclass(kw_only=True, slots=True)
class Listing:
    """The files to read, in the order of reading, and records of those that are not read."""

    split: str = "train"
    """The split to read of a data set that was saved by `datasets`."""
    on_error: str = "stop"
    """Policy for a file that cannot be read: `stop` with an error, or `skip` and record it."""
    readers: Mapping[str, str] = field(default_factory=dict)
    """Suffix -> the user's own reader of such files."""
    files: dict[Path, int] = field(default_factory=dict)
    """Path -> size in bytes."""
    num_ignored: int = 0
    """Number of files that are of an unsupported kind, or beside a saved data set without being part of it."""
    repeated: list[str] = field(default_factory=list)
    """A sentence for each further name of a file or folder that is read under another name."""
    unreadable: list[str] = field(default_factory=list)
    """With `on_error` skip, a sentence for each file or folder that cannot be read."""

    def record_unreadable(self, path: Path, reason: str) -> None:
        """Record a file or folder that cannot be read, with the reason. With `on_error="stop"`, raises DataError."""
        if self.on_error == "stop":
            raise DataError(
                f"{path} cannot be read: {reason}; repair it, or leave such places out with --on-error skip"
            )
        self.unreadable.append(f"{path}: {reason}")

    def record_unreadable_folder(self, error: OSError) -> None:
        """Record a folder that cannot be listed, or raise DataError. `os.walk` calls this with the error."""
        self.record_unreadable(Path(error.filename), error.strerror or str(error))


def list_files(
    sources: Sequence[str], *, split: str, on_error: str, readers: Mapping[str, str] | None = None
) -> Listing:
    """List the files that paths, folders (recursively) and globs refer to, in the order in which they are read.

    That is the order of `sources`, and within a folder or glob the order of paths. Hidden files and folders are ignored
    unless a source names them.

    split: the split to read of data sets that were saved by `datasets`.
    on_error: "stop" to raise DataError for a file or folder that cannot be read, or "skip" to record it.
    readers: the user's own readers, by suffix.

    Returns a listing of at least one file. Raises DataError if a source has nothing to read.
    """
    listing = Listing(split=split, on_error=on_error, readers=readers or {})
    path_of_inode: dict[tuple[int, int], Path] = {}  # (device, inode) -> path under which the file is read
    for source in sources:
        # Check the files of the source. Links come last, so that a file is read under its own name.
        num_ignored_before = listing.num_ignored
        paths = sorted(expand_source(source, listing), key=lambda path: (os.path.islink(path), path.as_posix()))
        new_files: list[tuple[Path, int]] = []
        for path in paths:
            size = _check_file(path, listing, path_of_inode)
            if size is not None and path not in listing.files:
                new_files.append((path, size))

        # Each source must have something to read.
        has_readable = any(is_readable_kind(path, listing.readers) for path in paths)
        if not has_readable and not listing.unreadable:
            readable = describe_readable(listing.readers)
            is_empty = not paths and listing.num_ignored == num_ignored_before
            if is_empty:
                raise DataError(f"{source} is an empty folder; expected files: {readable}")
            raise DataError(f"{source}: nothing here can be read; expected {readable}")
        listing.files |= sorted(new_files, key=lambda item: item[0].as_posix())

    if not listing.files:
        reasons = "; ".join(listing.unreadable[:MAX_REASONS])
        raise DataError(f"{' '.join(sources)}: no file can be read ({reasons})")
    return listing


def _check_file(path: Path, listing: Listing, path_of_inode: dict[tuple[int, int], Path]) -> int | None:
    """Return the size of a file in bytes if it is to be read. Otherwise record the reason in the listing, return None.

    path_of_inode: device and inode of each file found so far -> its path. A new file is added. A file that is there
        under another path is not read again.

    Raises DataError for a file that cannot be read if the listing's policy is to stop.
    """
    # The file must be there, of a supported kind, and readable.
    if not os.path.exists(path):
        is_link = os.path.islink(path)
        listing.record_unreadable(path, f"it is {describe_dead_link(path)}" if is_link else "No such file or directory")
        return None
    if not is_readable_kind(path, listing.readers):
        listing.num_ignored += 1
        return None
    if not os.access(path, os.R_OK):
        listing.record_unreadable(path, "Permission denied")
        return None

    # It must have content that has not been read under another name.
    status = path.stat()
    if status.st_size == 0 and path.suffix in COMPRESSED_SUFFIXES:
        listing.record_unreadable(path, f"it has 0 bytes, so it is no whole {path.suffix} file")
        return None
    first_path = path_of_inode.setdefault((status.st_dev, status.st_ino), path)
    if first_path != path:
        listing.repeated.append(f"{path} is the same file as {first_path}")
        return None
    return status.st_size


def file_kind(path: InputFile, readers: Mapping[str, str]) -> str | None:
    """Return the kind of a file by its suffix: "whole", "lines", "csv" or "table", as in SUFFIXES.

    `readers` are the user's own readers by suffix. The kind of a file that one of them reads is its import path.
    `log.jsonl` and `log.jsonl.gz` are "lines". Returns None for files that are not supported, including compressed
    tables such as `rows.parquet.gz`.
    """
    is_compressed = path.suffix in COMPRESSED_SUFFIXES
    suffix = "".join(path.suffixes[-2:-1]) if is_compressed else path.suffix
    if suffix in readers:
        return readers[suffix]
    for kind, suffixes in SUFFIXES.items():
        if suffix in suffixes:
            return None if is_compressed and kind == "table" else kind
    return None


def is_readable_kind(path: Path, readers: Mapping[str, str]) -> bool:
    """Return whether a path is a regular file of a supported kind. `readers` are as in `file_kind`."""
    return file_kind(path, readers) is not None and os.path.isfile(path)


def describe_readable(readers: Mapping[str, str]) -> str:
    """Return the kinds of files that can be read, for errors. `readers` are as in `file_kind`."""
    return "; ".join([READABLE, *(f"{suffix} by {name}" for suffix, name in readers.items())])


def expand_source(source: str, listing: Listing) -> Iterable[Path]:
    """Return the paths of all files that a path, folder or glob refers to, including pipes and other special files.

    `data` is a folder, of which all files are returned, also those in folders within it. `data/*.txt` is a glob, and
    `data/**` one that matches at any depth. A folder that a glob matches is read like one that is named.

    Folders that cannot be read are recorded in the listing. Raises DataError if nothing is found.
    """
    # A path that exists is taken literally, even if it contains characters of a glob.
    path = Path(os.path.expanduser(source))
    if os.path.isdir(path):
        return walk_folder(path, listing)
    if os.path.isfile(path):
        return [path]
    if os.path.islink(path):
        raise DataError(f"{source} is {describe_dead_link(path)}")

    # Otherwise it is a glob.
    folder, parts = split_glob(path)
    pattern = Path(glob.escape(str(folder)), *parts)
    for folder_path, reason in find_unreadable_folders(pattern).items():
        listing.record_unreadable(folder_path, reason)
    matches = [Path(name) for name in glob.glob(str(pattern), recursive=True)]
    if "**" in pattern.parts:  # `**` matches the files in these folders too
        matches = [match for match in matches if not os.path.isdir(match)]
    if not matches:
        raise DataError(f"{source}: {'no file matches' if glob.has_magic(source) else 'no such file or folder'}")

    # A matching folder is read as if it were named.
    paths = []
    for match in matches:
        if os.path.isdir(match):
            paths.extend(walk_folder(match, listing))
        elif os.path.lexists(match):  # false for names in folders that may not be entered
            paths.append(match)
    return paths


def split_glob(path: Path) -> tuple[Path, tuple[str, ...]]:
    """Divide the path of a glob into the part that exists as a folder, and the parts after it.

    The folder is taken literally: `run[1]/*.txt` does not match run1.
    """
    folder = next((parent for parent in path.parents if os.path.isdir(parent)), Path())
    return folder, path.relative_to(folder).parts


def find_unreadable_folders(pattern: Path) -> dict[Path, str]:
    """Find the folders that a glob would have to read but cannot, because `glob` ignores them silently.

    Returns the reason for each. For the pattern `data/*/a.txt`, `data` must be listed and each folder in it entered. If
    `data/b` may not be entered, the result is {Path("data/b"): "Permission denied"}.
    """
    # The folders at depth N match the first N parts of the pattern. Their own names are parts of it, too.
    parts = pattern.parts
    first_depth = 1 if pattern.is_absolute() else 0
    last_depth = len(parts) if parts[-1] == "**" else len(parts) - 1
    reasons: dict[Path, str] = {}
    for depth in range(first_depth, last_depth + 1):
        must_be_listed = depth == len(parts) or glob.has_magic(parts[depth])
        folders = [os.curdir]
        if depth > 0:
            folders = sorted(glob.glob(os.path.join(*parts[:depth], ""), recursive=True))

        # Try what `glob` would do: enter the folder, and list it if the next part is a pattern.
        for folder in folders:
            try:
                os.stat(os.path.join(folder, os.curdir))
                if must_be_listed:
                    os.scandir(folder).close()
            except OSError as error:
                reasons.setdefault(Path(folder), error.strerror or str(error))
    return reasons


def walk_folder(folder: Path, listing: Listing) -> Iterator[Path]:
    """Yield the paths of all files below a folder, including pipes and other special files, without hidden ones.

    Links to folders are followed after the folders beside them. Folders that cannot be read or have been read already,
    and files that are ignored, are recorded in the listing.
    """
    first_paths: dict[str, str] = {}  # real path of a folder -> the path under which it was found first
    for path, folders, files in os.walk(folder, onerror=listing.record_unreadable_folder, followlinks=True):
        # Links to folders may lead in a circle, so each folder is read once.
        first_path = first_paths.setdefault(os.path.realpath(path), path)
        if first_path != path:
            listing.repeated.append(f"{path} is the same folder as {first_path}")
            folders.clear()  # so that `os.walk` does not enter them
            continue

        # In a saved data set, count the files that are not part of it.
        data_names, ignored_names = separate_data_names(Path(path), [*folders, *files], listing.split)
        for name in ignored_names:
            if not name.startswith("."):
                listing.num_ignored += count_files(Path(path, name))

        # Yield the files of this folder.
        all_folders = set(folders)
        visible_names = [name for name in sorted(data_names) if not name.startswith(".")]
        for name in visible_names:
            if name not in all_folders:
                yield Path(path, name)

        # Tell `os.walk` which folders to enter next, in this order. It reads the list that it has passed.
        data_folders = all_folders.intersection(visible_names)
        folders[:] = sorted(data_folders, key=lambda name: (os.path.islink(Path(path, name)), name))


def describe_dead_link(path: Path) -> str:
    """Describe a link to a path that does not exist, for an error."""
    return f"a link to {os.readlink(path)}, which does not exist or cannot be reached"


def separate_data_names(folder: Path, names: list[str], split: str) -> tuple[list[str], list[str]]:
    """Divide the names in a folder into those to read and those to ignore.

    In a folder that the `datasets` library has saved, only its data files are read, and of several splits only `split`.
    In any other folder, all names are read. The library's description files, and other splits, are in neither list.

    A saved data set of one split has for instance data-0.arrow, dataset_info.json and state.json, and the latter lists
    data-0.arrow. If the user has put notes.txt beside them, the result is (["data-0.arrow"], ["notes.txt"]).

    Returns the names to read, and the names to ignore. Raises DataError if there is no such split, and for a data set
    whose selection of rows was saved separately, because that is not supported.
    """
    # A folder of several splits, each in a subfolder of its own.
    if SPLITS_FILE in names:
        splits = read_json_object(folder / SPLITS_FILE).get("splits")
        if isinstance(splits, list):
            if split not in splits:
                offered = ", ".join(map(str, splits))
                raise DataError(f"{folder} has no split {split!r}; there are: {offered} (choose one with --split)")
            return [split], [name for name in names if name not in (SPLITS_FILE, *splits)]

    # The folder of one split, whose state file lists the data files.
    if STATE_FILE in names:
        state = read_json_object(folder / STATE_FILE)
        if isinstance(state.get("_data_files"), list):
            has_indices = any(value for key, value in state.items() if key.startswith("_indices"))
            if has_indices:
                raise DataError(
                    f"{folder} was saved by an old release of datasets, with a selection of its rows stored beside the "
                    "data; load and save it again with a new release"
                )
            files = [str(file["filename"]) for file in state["_data_files"]]
            return files, [name for name in names if name not in (*DATASET_FILES, *files)]

    # A folder with .arrow files, but without a state file that lists them.
    if any(name.endswith(".arrow") for name in names):
        return [name for name in names if name not in DATASET_FILES], []
    return names, []


def count_files(path: Path) -> int:
    """Count the files below a folder that are not hidden. A path that is a file or a link counts as 1."""
    if not path.is_dir() or path.is_symlink():
        return 1
    num_files = 0
    for _, _, names in os.walk(path):
        num_files += sum(not name.startswith(".") for name in names)
    return num_files


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a file with a JSON object. Returns an empty one if the file is missing or damaged, or has another value."""
    try:
        content = read_json(path, "a JSON file")
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
