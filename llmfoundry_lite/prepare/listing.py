"""Which files the paths, folders and globs of `--source` stand for.

Owns the walk through folders: links, names that lead to the same file, places that cannot be read, and folders that
Hugging Face `datasets` saved. Leaves cutting files into units to `sources.py`.

A folder's own files come before those that a link leads to, and a file with several names is read under the first. A
link to a folder is followed, once, so that a circle of links ends.
"""

import glob
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llmfoundry_lite.errors import DataError
from llmfoundry_lite.prepare.contents import COMPRESSED_SUFFIXES

SUFFIXES = {
    "whole": (".txt", ".md"),
    "lines": (".jsonl", ".json", ".ndjson"),
    "table": (".csv", ".tsv"),
    "parquet": (".parquet",),
    "arrow": (".arrow",),
}
READABLE = (
    "{.txt, .md, .jsonl, .json, .ndjson, .csv, .tsv, .parquet}, plain, .gz or .zst; or .arrow, as datasets saves it"
)

DATASET_FILES = ("dataset_info.json", "state.json")
"""What `datasets` writes beside its .arrow files."""
SPLITS_FILE = "dataset_dict.json"
"""What `datasets` writes above the folders of several splits."""


@dataclass(kw_only=True, slots=True)
class Listing:
    """The files to read, in their order, and what was left out."""

    files: dict[Path, os.stat_result] = field(default_factory=dict)
    num_ignored: int = 0
    """Files whose kind is none we read, or that are no part of the saved data set in whose folder they lie."""
    repeated: list[str] = field(default_factory=list)
    """A sentence for each name that leads to something that is read under another name."""
    unreadable: list[str] = field(default_factory=list)
    """A sentence for each file or folder that cannot be read, with `on_error` skip."""


def list_files(sources: Sequence[str], *, split: str, on_error: str) -> Listing:
    """Files, folders (searched recursively) and globs, in the order given; within a folder or glob by path.

    Hidden files and folders are passed over unless named. Raises DataError where there is nothing to read, and with
    `on_error` stop for a file or folder that cannot be read.
    """
    found = Listing()
    names: dict[tuple[int, int], Path] = {}

    def unreadable(path: Path, reason: str) -> None:
        if on_error == "stop":
            raise DataError(
                f"{path} cannot be read: {reason}; repair it, or leave such places out with --on-error skip"
            )
        found.unreadable.append(f"{path}: {reason}")

    for source in sources:
        own, linked, num_other = expand(source, split, unreadable, found.repeated)
        chosen: list[Path] = []
        for path in [*sorted(own, key=Path.as_posix), *sorted(linked, key=Path.as_posix)]:
            if kind_of(path) is None:
                num_other += 1
                continue
            if not os.access(path, os.R_OK):
                unreadable(path, "Permission denied")
                continue
            status = path.stat()
            if status.st_size == 0 and path.suffix in COMPRESSED_SUFFIXES:
                unreadable(path, f"it has 0 bytes, so it is no whole {path.suffix} file")
                continue
            first = names.setdefault((status.st_dev, status.st_ino), path)
            if first == path:
                chosen.append(path)
            else:
                found.repeated.append(f"{path} is the same file as {first}")
        if not chosen and not own and not linked and not num_other and not found.unreadable:
            raise DataError(f"{source} is an empty folder; expected files: {READABLE}")
        if not any(kind_of(path) for path in (*own, *linked)) and not found.unreadable:
            raise DataError(f"{source}: nothing here can be read; expected {READABLE}")
        found.num_ignored += num_other
        found.files |= {path: path.stat() for path in sorted(chosen, key=Path.as_posix) if path not in found.files}
    if not found.files:
        raise DataError(f"{' '.join(sources)}: no file can be read ({'; '.join(found.unreadable[:3])})")
    return found


def kind_of(path: Path) -> str | None:
    """The key of SUFFIXES that a file belongs to, looking through .gz and .zst; None for what we do not read."""
    compressed = path.suffix in COMPRESSED_SUFFIXES
    suffix = path.with_suffix("").suffix if compressed else path.suffix
    kind = next((kind for kind, suffixes in SUFFIXES.items() if suffix in suffixes), None)
    return None if compressed and kind == "arrow" else kind


Unreadable = Callable[[Path, str], None]
"""What to do with a place that cannot be read, and why it cannot."""


def expand(source: str, split: str, unreadable: Unreadable, repeated: list[str]) -> tuple[list[Path], list[Path], int]:
    """The files that a path, folder or glob stands for: its own, those behind links, and a count of what is no file."""
    path = Path(os.path.expanduser(source))
    if os.path.isdir(path):
        return walk(path, split, unreadable, repeated)
    if os.path.isfile(path):
        return [path], [], 0
    if os.path.islink(path):
        raise DataError(f"{source} is a link to {os.readlink(path)}, which does not exist or cannot be reached")
    path = with_plain_folders(path)
    for folder, reason in closed_folders(path):
        unreadable(folder, reason)
    # A folder that matches is read as if it were named, but not one that the glob goes through by itself.
    matches = [Path(name) for name in glob.glob(str(path), recursive=True)]
    found = [match for match in matches if "**" not in path.parts or not os.path.isdir(match)]
    if not found:
        raise DataError(f"{source}: {'no file matches' if glob.has_magic(source) else 'no such file or folder'}")
    own: list[Path] = []
    linked: list[Path] = []
    num_other = 0
    for path in found:
        if os.path.isdir(path):
            its_own, its_linked, its_other = walk(path, split, unreadable, repeated)
            own, linked, num_other = own + its_own, linked + its_linked, num_other + its_other
        elif os.path.isfile(path):
            (linked if os.path.realpath(path) != os.path.abspath(path) else own).append(path)
        elif os.path.islink(path):
            unreadable(path, f"it is a link to {os.readlink(path)}, which does not exist or cannot be reached")
        else:
            num_other += 1
    return own, linked, num_other


def with_plain_folders(pattern: Path) -> Path:
    """The pattern in which a folder that exists stands for itself: `run[1]/*.txt` never means run1."""
    folder = next((parent for parent in pattern.parents if os.path.isdir(parent)), Path())
    return Path(glob.escape(str(folder))) / pattern.relative_to(folder)


def closed_folders(pattern: Path) -> list[tuple[Path, str]]:
    """The folders that a glob has to look into and cannot, each with why: `glob` passes over them without a word."""
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
    return list(reasons.items())


def walk(folder: Path, split: str, unreadable: Unreadable, repeated: list[str]) -> tuple[list[Path], list[Path], int]:
    """The files below a folder: its own, those behind links, and the number of devices, pipes and the like."""
    own: list[Path] = []
    linked: list[Path] = []
    num_other = 0
    seen: dict[tuple[int, int], Path] = {}
    folders, links = [folder], list[Path]()
    behind_link = False
    while folders or links:
        behind_link = behind_link or not folders
        place = folders.pop() if folders else links.pop(0)
        try:
            status = place.stat()
            names = sorted(os.listdir(place))
        except OSError as error:
            unreadable(place, error.strerror or str(error))
            continue
        first = seen.setdefault((status.st_dev, status.st_ino), place)
        if first != place:
            repeated.append(f"{place} is the same folder as {first}")
            continue
        chosen, left_out = saved_data_set(place, names, split)
        num_other += sum(num_files(place / name) for name in left_out if not name.startswith("."))
        for path in (place / name for name in chosen if not name.startswith(".")):
            link = os.path.islink(path)
            if os.path.isdir(path):
                (links if link else folders).append(path)
            elif os.path.isfile(path):
                (linked if link or behind_link else own).append(path)
            elif link:
                unreadable(path, f"it is a link to {os.readlink(path)}, which does not exist or cannot be reached")
            elif os.path.lexists(path):
                num_other += 1
            else:
                unreadable(path, "No such file or directory")
    return own, linked, num_other


def saved_data_set(place: Path, names: list[str], split: str) -> tuple[list[str], list[str]]:
    """The names in a folder that hold data, and those that are no part of it: if `datasets` saved it, not all do."""
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
    """One for a file; for a folder those below it, hidden ones aside."""
    if not path.is_dir() or path.is_symlink():
        return 1
    return sum(not name.startswith(".") for _, _, names in os.walk(path) for name in names)


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object; empty for what is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}
