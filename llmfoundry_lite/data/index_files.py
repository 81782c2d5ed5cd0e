"""The index files of a folder of shards: its own `index.json`, or those of the folders below it.

If a folder has an `index.json`, this file alone describes its shards, also those in folders below it. Otherwise it may
be a folder of folders, as Spark and other parallel writers make it:

    data/0/index.json       data/0/shard.00000.mds
    data/1/index.json       data/1/shard.00000.mds

Then the indexes below it are read together, as if somebody had merged them. Their order is that of `merge_index` of
mosaicml-streaming, so the merged index has the same shards in the same order.

`find_indexes` lists the folders, several at a time. `shard_table.py` reads the files. No torch, no mosaicml-streaming.
"""

import os
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from llmfoundry_lite.errors import DataError

INDEX = "index.json"
SHARD_FILE = re.compile(r"[^.].*\.mds(\.(br|bz2|gz|snappy|zstd))?", re.DOTALL)
"""Name of a shard's file, compressed or not."""
SPLIT_FOLDER = re.compile(r"(train|val|valid|validation|test|dev|eval)([-_.].*)?", re.DOTALL)
"""Name of a folder that holds a split. Splits are never read together, because nobody wants to train on all of them."""
LISTINGS_AT_ONCE = 16
"""Number of folders that are listed at the same time, because a network disk or a bucket takes long to answer."""
MAX_DEPTH = 8
"""Number of folders within each other that are searched."""
MAX_FOLDERS = 200_000
"""Number of folders that are listed at most."""
MAX_NAMED = 5
"""Number of folders that an error names."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexFiles:
    """The index files that together describe the shards of a folder."""

    folder: Path
    names: Sequence[str] = (INDEX,)
    """Path of each file relative to the folder, in the order of reading: `index.json`, or `0/index.json`, …"""

    @property
    def label(self) -> str:
        """The path of the only file, or of the folder if there are several files. It is for messages."""
        return str(self.folder / self.names[0]) if len(self.names) == 1 else str(self.folder)


@dataclass(frozen=True, kw_only=True, slots=True)
class FolderContent:
    """The files and folders in a folder, from one listing."""

    files: Mapping[str, int]
    """Name -> size in bytes; 0 for what is no regular file."""
    folders: Sequence[str]
    linked_folders: Sequence[str] = ()
    """Names of links to folders. They are not followed, because they may lead anywhere, and in a circle."""


ListFolder = Callable[[str], FolderContent]
"""Function that lists a folder, given its path relative to the folder that is searched. That folder itself is ""."""


@dataclass(kw_only=True, slots=True)
class FoundIndexes:
    """Result of a search for index files. All paths are relative to the folder that was searched."""

    names: list[str] = field(default_factory=list)
    """Paths of the index files."""
    without_index: list[str] = field(default_factory=list)
    """Folders that hold shards, but no index."""
    linked_folders: list[str] = field(default_factory=list)


def list_local_folder(root: str | Path) -> ListFolder:
    """Return a function that lists a folder of this machine below `root`. It raises OSError."""

    def list_folder(path: str) -> FolderContent:
        files: dict[str, int] = {}
        folders: list[str] = []
        linked_folders: list[str] = []
        with os.scandir(os.path.join(root, path)) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                    continue
                try:
                    if entry.is_dir():
                        linked_folders.append(entry.name)
                        continue
                    num_bytes = entry.stat().st_size if entry.is_file() else 0
                except OSError:  # a link that leads in a circle, or a file that was removed meanwhile
                    num_bytes = 0
                files[entry.name] = num_bytes  # whoever opens it refuses pipes and broken links by name
        return FolderContent(files=files, folders=sorted(folders), linked_folders=sorted(linked_folders))

    return list_folder


def walk(list_folder: ListFolder, enter: Callable[[str, FolderContent], Iterable[str]]) -> None:
    """List a folder and the folders below it, several at a time. Hidden folders are left out.

    `enter` is called in this thread with the path and content of each listed folder, and returns the names of the
    folders in it that are listed next. Raises DataError if there are too many folders.
    """
    level = [""]
    num_folders = 1
    with ThreadPoolExecutor(LISTINGS_AT_ONCE, thread_name_prefix="list-folder") as pool:
        for _ in range(MAX_DEPTH + 1):
            next_level: list[str] = []
            for path, content in zip(level, pool.map(list_folder, level), strict=True):
                for name in enter(path, content):
                    if not name.startswith("."):
                        next_level.append(f"{path}/{name}" if path else name)
            level = next_level
            num_folders += len(level)
            if num_folders > MAX_FOLDERS:
                raise DataError(f"more than {MAX_FOLDERS:,} folders lie below the data folder; name one of them")
    if level:
        raise DataError(f"{level[0]} lies more than {MAX_DEPTH} folders below the data folder; name one between them")


def find_indexes(list_folder: ListFolder) -> FoundIndexes:
    """Find the index files of a folder of shards. Folders below one that has an index are not searched.

    Raises OSError of the listing.
    """
    found = FoundIndexes()

    def enter(path: str, content: FolderContent) -> Sequence[str]:
        prefix = f"{path}/" if path else ""
        if INDEX in content.files:
            found.names.append(prefix + INDEX)
            return ()
        if any(map(SHARD_FILE.fullmatch, content.files)):
            found.without_index.append(path)
        found.linked_folders += [prefix + name for name in content.linked_folders if not name.startswith(".")]
        return content.folders

    walk(list_folder, enter)
    found.names.sort()  # the order of `merge_index`, in which 10/index.json stands before 2/index.json
    found.without_index.sort()
    return found


def choose_indexes(found: FoundIndexes, folder: str) -> list[str]:
    """Return the paths of the index files to read, relative to a folder that was searched.

    `folder` is its path or URL, for errors. Raises DataError if there is none, if some shards have no index, if there
    are links to folders, and if the folder holds splits.
    """
    # The index of the folder itself describes all of it.
    if found.names == [INDEX]:
        return found.names

    # Splits must not be mixed, so the user has to choose one.
    splits = sorted({name.removesuffix(f"/{INDEX}") for name in found.names if in_split(name)})
    if splits:
        has_own_splits = all("/" not in split for split in splits)
        remedy = f"set `split` to one of: {', '.join(splits)}"
        if not has_own_splits:
            remedy = f"it holds the splits {name_some(splits)}; give each a stream of its own"
        raise DataError(f"{folder} has no {INDEX}, so it is not a finished MDS data set; {remedy}")

    # Data that is left out silently would not be missed.
    if found.without_index:
        folders = name_some([path or "." for path in found.without_index])
        raise DataError(
            f"{folder} has shards without {INDEX}, in {folders}: their writer was killed. Remove what a later attempt "
            "has written again (Spark repeats failed tasks), then write the missing indexes with "
            f"`llmfoundry-lite data index {shlex.quote(str(folder))}`"
        )
    if found.linked_folders:
        raise DataError(
            f"{folder} has no {INDEX}, and links to other folders, which are not followed: "
            f"{name_some(found.linked_folders)}; give each its own stream, or merge their indexes there"
        )
    if not found.names:
        raise DataError(f"{folder} has no {INDEX}, so it is not a finished MDS data set; prepare the data again")
    return found.names


def search_local_folder(folder: str | Path) -> FoundIndexes:
    """Find the index files of a folder of this machine, as `find_indexes` does. Raises OSError.

    A folder that has its own index is not listed, because that takes long with many shards.
    """
    if os.path.lexists(os.path.join(folder, INDEX)):
        return FoundIndexes(names=[INDEX])
    return find_indexes(list_local_folder(folder))


def find_local_indexes(folder: str | Path) -> IndexFiles:
    """Return the index files of a folder of this machine. Raises DataError as `choose_indexes` does, and OSError."""
    names = choose_indexes(search_local_folder(folder), str(folder))
    return IndexFiles(folder=Path(folder), names=tuple(names))


def find_first_index(folder: Path) -> Path | None:
    """Return one index file of a folder of this machine, without listing all folders below it; None if there is none.

    Splits in it are not searched.
    """
    for path in _walk_down(folder, MAX_DEPTH):
        return path
    return None


def _walk_down(folder: Path, depth: int) -> Iterator[Path]:
    """Yield index files at or below a folder, depth first."""
    try:
        content = list_local_folder(folder)("")
    except OSError:
        return
    if INDEX in content.files:
        yield folder / INDEX
        return
    for name in content.folders:
        is_left_out = name.startswith(".") or SPLIT_FOLDER.fullmatch(name) is not None
        if depth > 0 and not is_left_out:
            yield from _walk_down(folder / name, depth - 1)


def in_split(name: str) -> bool:
    """Return whether a path of an index file leads through a folder with the name of a split."""
    *folders, _ = name.split("/")
    return any(map(SPLIT_FOLDER.fullmatch, folders))


def name_some(names: Sequence[str]) -> str:
    """Join names for an error: the first few, and how many more there are."""
    more = f" and {len(names) - MAX_NAMED:,} more" if len(names) > MAX_NAMED else ""
    return ", ".join(names[:MAX_NAMED]) + more
