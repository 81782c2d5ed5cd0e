"""The list of input files: expansion of the paths, folders and globs of `--source`.

A file with several names is read under the first one; a name that is no link comes before links. A link to a folder is
followed once, after the folders beside it, so that a circle of links ends.
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

SUFFIXES = {
    "whole": (".txt", ".md"),
    "lines": (".jsonl", ".json", ".ndjson"),
    "csv": (".csv", ".tsv"),
    "table": (".parquet", ".arrow"),
}
READABLE = (
    "{.txt, .md, .jsonl, .json, .ndjson, .csv, .tsv}, plain, .gz or .zst; .parquet; or .arrow, as datasets saves it"
)

DATASET_FILES = ("dataset_info.json", "state.json")
"""Names of the files that `datasets` writes beside its .arrow files."""
SPLITS_FILE = "dataset_dict.json"
"""Name of the file that `datasets` writes above the folders of several splits."""


@dataclass(kw_only=True, slots=True)
class Listing:
    """The files to read, in their order, and those that were left out."""

    split: str = "train"
    on_error: str = "stop"
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
        """Do the same for a folder that cannot be listed."""
        self.leave_out(Path(error.filename), error.strerror or str(error))


def list_files(sources: Sequence[str], *, split: str, on_error: str) -> Listing:
    """List the files of paths, folders (recursively) and globs, in the order given; within a folder or glob by path.

    Hidden files and folders are skipped unless they are named. Raises DataError where there is nothing to read, and
    with `on_error` stop for a file or folder that cannot be read.
    """
    found = Listing(split=split, on_error=on_error)
    names: dict[tuple[int, int], Path] = {}
    for source in sources:
        num_ignored, chosen = found.num_ignored, list[tuple[Path, int]]()
        paths = sorted(expand(source, found), key=lambda path: (os.path.islink(path), path.as_posix()))
        for path in paths:
            if not os.path.exists(path):
                is_link = os.path.islink(path)
                found.leave_out(path, f"it is {dead_link(path)}" if is_link else "No such file or directory")
            elif not is_readable_kind(path):
                found.num_ignored += 1
            elif not os.access(path, os.R_OK):
                found.leave_out(path, "Permission denied")
            elif (status := path.stat()).st_size == 0 and path.suffix in COMPRESSED_SUFFIXES:
                found.leave_out(path, f"it has 0 bytes, so it is no whole {path.suffix} file")
            elif (first := names.setdefault((status.st_dev, status.st_ino), path)) != path:
                found.repeated.append(f"{path} is the same file as {first}")
            elif path not in found.files:
                chosen.append((path, status.st_size))
        if not any(map(is_readable_kind, paths)) and not found.unreadable:
            is_empty = not paths and found.num_ignored == num_ignored
            raise DataError(
                f"{source} is an empty folder; expected files: {READABLE}"
                if is_empty
                else f"{source}: nothing here can be read; expected {READABLE}"
            )
        found.files |= sorted(chosen, key=lambda item: item[0].as_posix())
    if not found.files:
        raise DataError(f"{' '.join(sources)}: no file can be read ({'; '.join(found.unreadable[:3])})")
    return found


def kind_of(path: Path) -> str | None:
    """Return the key of SUFFIXES that a file belongs to; None for files that are not read, like a compressed table."""
    is_compressed = path.suffix in COMPRESSED_SUFFIXES
    suffix = path.with_suffix("").suffix if is_compressed else path.suffix
    kind = next((kind for kind, suffixes in SUFFIXES.items() if suffix in suffixes), None)
    return None if is_compressed and kind == "table" else kind


def is_readable_kind(path: Path) -> bool:
    """Return whether a path is a regular file of a kind that is read."""
    return kind_of(path) is not None and os.path.isfile(path)


def expand(source: str, found: Listing) -> Iterable[Path]:
    """Return all files, pipes and the like, but no folders, that a path, folder or glob leads to."""
    path = Path(os.path.expanduser(source))
    if os.path.isdir(path):
        return walk(path, found)
    if os.path.isfile(path):
        return [path]
    if os.path.islink(path):
        raise DataError(f"{source} is {dead_link(path)}")
    # The part of the path that exists as a folder is no pattern: `run[1]/*.txt` never means run1.
    folder = next((parent for parent in path.parents if os.path.isdir(parent)), Path())
    pattern = Path(glob.escape(str(folder))) / path.relative_to(folder)
    for closed, reason in closed_folders(pattern).items():
        found.leave_out(closed, reason)
    # A matching folder is read as if it were named, unless `**` already goes through its files.
    matches = [Path(name) for name in glob.glob(str(pattern), recursive=True)]
    matches = [match for match in matches if "**" not in pattern.parts or not os.path.isdir(match)]
    if not matches:
        raise DataError(f"{source}: {'no file matches' if glob.has_magic(source) else 'no such file or folder'}")
    matches = filter(os.path.lexists, matches)  # names in closed folders do not exist for us
    return [path for match in matches for path in (walk(match, found) if os.path.isdir(match) else [match])]


def closed_folders(pattern: Path) -> dict[Path, str]:
    """Find folders that a glob needs to read and cannot, each with the reason, because `glob` skips them silently."""
    parts, reasons = pattern.parts, dict[Path, str]()
    for depth in range(1 if pattern.is_absolute() else 0, len(parts) + (parts[-1] == "**")):
        has_to_list = depth == len(parts) or glob.has_magic(parts[depth])
        for name in sorted(glob.glob(os.path.join(*parts[:depth], ""), recursive=True)) if depth else [os.curdir]:
            try:
                os.stat(os.path.join(name, os.curdir))
                if has_to_list:
                    os.scandir(name).close()
            except OSError as error:
                reasons.setdefault(Path(name), error.strerror or str(error))
    return reasons


def walk(folder: Path, found: Listing) -> Iterator[Path]:
    """Yield all files below a folder, pipes and the like too. Links to folders come after the folders beside them."""
    seen: dict[str, str] = {}
    for place, folders, names in os.walk(folder, onerror=found.leave_out_folder, followlinks=True):
        first = seen.setdefault(os.path.realpath(place), place)
        if first != place:
            found.repeated.append(f"{place} is the same folder as {first}")
            folders.clear()
            continue
        chosen, left_out = saved_data_set(Path(place), [*folders, *names], found.split)
        found.num_ignored += sum(num_files(Path(place, name)) for name in left_out if not name.startswith("."))
        chosen = [name for name in sorted(chosen) if not name.startswith(".")]
        beside = set(folders)
        yield from (Path(place, name) for name in chosen if name not in beside)
        folders[:] = sorted(beside.intersection(chosen), key=lambda name: (os.path.islink(Path(place, name)), name))


def dead_link(path: Path) -> str:
    return f"a link to {os.readlink(path)}, which does not exist or cannot be reached"


def saved_data_set(place: Path, names: list[str], split: str) -> tuple[list[str], list[str]]:
    """Divide the names in a folder into those that hold data, and those that `datasets` saved beside them."""
    if SPLITS_FILE in names:
        splits = read_object(place / SPLITS_FILE).get("splits")
        if isinstance(splits, list):
            if split not in splits:
                there = ", ".join(map(str, splits))
                raise DataError(f"{place} has no split {split!r}; there are: {there} (choose one with --split)")
            return [split], [name for name in names if name not in (SPLITS_FILE, *splits)]
    if "state.json" in names:
        state = read_object(place / "state.json")
        if isinstance(state.get("_data_files"), list):
            if any(value for key, value in state.items() if key.startswith("_indices")):
                raise DataError(
                    f"{place} was saved with a choice of its rows beside them, by an old release of datasets; load "
                    "and save it again with a new one"
                )
            files = [str(file["filename"]) for file in state["_data_files"]]
            return files, [name for name in names if name not in (*DATASET_FILES, *files)]
    if any(name.endswith(".arrow") for name in names):
        return [name for name in names if name not in DATASET_FILES], []
    return names, []


def num_files(path: Path) -> int:
    """Return 1 for a file; for a folder, the number of files below it that are not hidden."""
    if not path.is_dir() or path.is_symlink():
        return 1
    return sum(not name.startswith(".") for _, _, names in os.walk(path) for name in names)


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty if the file has none."""
    try:
        content = read_json(path, "a JSON file")
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
