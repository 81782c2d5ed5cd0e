"""`data ls`: the data sets in a folder or bucket, and whether they are complete.

Folders are listed several at a time, and each is listed once. Of the files, only indexes, summaries and requests are
read, up to the sizes of `bounded.py`. They may be anybody's: nothing in them is executed or opened by a name in them.
"""

import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from llmfoundry_engines.remote_folders import list_folders_of
from llmfoundry_lite.bounded import MAX_INDEX_BYTES, MAX_JSON_BYTES, parse_json, too_large
from llmfoundry_lite.checkpoint.folder import Folder
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.data.index_files import (
    INDEX,
    LISTINGS_AT_ONCE,
    SHARD_FILE,
    FolderContent,
    IndexFiles,
    ListFolder,
    walk,
)
from llmfoundry_lite.data.rows import UNPADDED_LENGTH, tokens_per_sample
from llmfoundry_lite.data.shard_table import ShardTable, read_indexes
from llmfoundry_lite.data.streams import ORIGIN
from llmfoundry_lite.errors import DataError, UserError, one_line
from llmfoundry_lite.prepare.out_folder import PARTIAL
from llmfoundry_lite.prepare.summary import SUMMARY_FILE
from llmfoundry_lite.tables import Table

COMPLETE = "complete"
NO_INDEX = "no index.json"
DIGEST_CHARACTERS = 12
"""Number of characters of a digest and a fingerprint that the table shows, after the name of the algorithm."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataFolder:
    """A folder of shards, or one with an unfinished preparation. None and empty texts are unknown."""

    path: str
    """Path relative to the folder that was searched; `.` is that folder itself."""
    state: str
    """COMPLETE, NO_INDEX, or a sentence that says what is missing, damaged or unfinished."""
    samples: int | None = None
    tokens: int | None = None
    columns: tuple[str, ...] = ()
    """Each column with its type, such as `tokens ndarray:uint16:2048`."""
    max_seq_len: int | None = None
    """Tokens of a sample."""
    shards: int | None = None
    num_bytes: int | None = None
    """Size of the shards' files that are there."""
    compression: str = ""
    tokenizer: str = ""
    """Fingerprint of the tokenizer, by the summary of `data prepare`."""
    digest: str = ""
    """Digest of the samples, sizes and hashes in the index: the one that checkpoints record as the content."""


@dataclass(kw_only=True, slots=True)
class _Tree:
    """The folder that is searched, and what a walk through it has found."""

    folder: Folder
    list_folder: ListFolder
    contents: dict[str, FolderContent] = field(default_factory=dict)
    """Listing of each folder that was walked through, by its path."""

    def content(self, path: str) -> FolderContent:
        """Return the listing of a folder, which is empty if it does not exist. Raises OSError."""
        if path not in self.contents:
            try:
                return self.list_folder(path)
            except (FileNotFoundError, NotADirectoryError):
                return FolderContent(files={}, folders=())
        return self.contents[path]

    def read(self, path: str, name: str, max_bytes: int) -> bytes | None:
        """Read a file, given its folder and name; None if there is none. Raises OSError, also if it is too large."""
        num_bytes = self.content(path).files.get(name)
        if num_bytes is None:
            return None
        if num_bytes > max_bytes:
            raise too_large(f"{self.folder.url}/{join(path, name)}", max_bytes, "such a file")
        return self.folder.read(join(path, name), num_bytes)

    def read_object(self, path: str, name: str) -> dict[str, Any]:
        """Read a JSON object; an empty one if the file is not there or is none. Raises OSError."""
        try:
            parsed = parse_json(self.read(path, name, MAX_JSON_BYTES) or b"")
        except ValueError:
            return {}
        return parsed if isinstance(parsed, dict) else {}


def find_data(url: str) -> list[DataFolder]:
    """Find the data sets in a folder of this machine or a bucket, in the order of their paths.

    Folders below one with an index are not searched, and folders without permission have a row that says so. Raises
    DataError if there is no such folder, and OSError if it cannot be listed.
    """
    folder = open_folder(url)
    if folder.path_here is not None and not folder.path_here.is_dir():
        raise DataError(f"{url} is not a folder; expected prepared data, or a folder above it")
    tree = _Tree(folder=folder, list_folder=list_folders_of(folder))
    indexed: list[str] = []
    without_index: list[str] = []
    unfinished: list[str] = []
    forbidden: list[DataFolder] = []

    def list_permitted(path: str) -> FolderContent:
        try:
            return tree.list_folder(path)
        except PermissionError as error:
            if not path:
                raise
            forbidden.append(DataFolder(path=path, state=f"cannot be listed: {one_line(error)}"))
            return FolderContent(files={}, folders=())

    def enter(path: str, content: FolderContent) -> Sequence[str]:
        tree.contents[path] = content
        if PARTIAL in content.folders:
            unfinished.append(path)
        if INDEX in content.files:
            indexed.append(path)
            return ()
        if any(map(SHARD_FILE.fullmatch, content.files)):
            without_index.append(path)
        return content.folders

    walk(list_permitted, enter)
    with ThreadPoolExecutor(LISTINGS_AT_ONCE, thread_name_prefix="read-index") as pool:
        data = list(pool.map(lambda path: describe_indexed(tree, path), indexed))
        data += pool.map(lambda path: describe_unfinished(tree, path), unfinished)
    data += [describe_without_index(tree, path) for path in without_index]
    data += forbidden
    return sorted(data, key=lambda found: found.path)


def describe_indexed(tree: _Tree, path: str) -> DataFolder:
    """Describe a folder of shards by its index, and by the summary of `data prepare` in the folder above it."""
    found = DataFolder(path=path or ".", state=COMPLETE)
    try:
        table = read_table(tree, path)
    except (OSError, ValueError, UserError) as error:
        return replace(found, state=f"damaged: {one_line(error)}")

    # The columns and the compression, of which shards may have several.
    columns: set[str] = set()
    compressions: set[str] = set()
    lengths: set[int | None] = set()
    has_padding = False
    for schema in table.schemas:
        pairs = list(zip(schema["column_names"], schema["column_encodings"], strict=True))
        columns.update(f"{name} {encoding}" for name, encoding in pairs)
        compressions.add(str(schema["compression"] or "none"))
        lengths.add(tokens_per_sample(dict(pairs).get("tokens", "")))
        has_padding = has_padding or UNPADDED_LENGTH in dict(pairs)
    [length] = lengths if len(lengths) == 1 else [None]

    # The summary, and what is there.
    summary = find_summary(tree, path)
    if length is None and isinstance(summary.get("max_seq_len"), int):
        length = summary["max_seq_len"]
    num_samples = int(table.rows["samples"].sum(dtype=np.int64))
    num_tokens = num_samples * length if length is not None else None
    if has_padding:  # only the summary says how much
        num_tokens = summary.get("tokens")
    try:
        num_bytes, state = compare_files(tree, path, table)
    except OSError as error:
        num_bytes, state = None, f"damaged: {one_line(error)}"
    return replace(
        found,
        state=state,
        samples=num_samples,
        tokens=num_tokens,
        columns=tuple(sorted(columns)),
        max_seq_len=length,
        shards=len(table),
        num_bytes=num_bytes,
        compression=", ".join(sorted(compressions)),
        tokenizer=str(summary.get("fingerprint", "")),
        digest=table.content_digests[0],
    )


def read_table(tree: _Tree, path: str) -> ShardTable:
    """Read the index of a folder. Raises DataError, OSError, and ValueError."""
    folder = tree.folder.child(path) if path else tree.folder
    if folder.path_here is not None:
        return ShardTable(*read_indexes([IndexFiles(folder=folder.path_here)], [None], allow_unhashed_shards=True))
    content = tree.read(path, INDEX, MAX_INDEX_BYTES)
    assert content is not None
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, INDEX).write_bytes(content)
        files = IndexFiles(folder=Path(scratch))
        try:
            return ShardTable(*read_indexes([files], [None], allow_unhashed_shards=True))
        except DataError as error:
            raise DataError(str(error).replace(scratch, folder.url)) from error


def tokens_of_split(summary: dict[str, Any], path: str) -> int | None:
    """Return how many tokens the split at `path` has by its summary; None if the summary does not say it."""
    splits = summary.get("splits")
    counts = splits.get(path.rpartition("/")[2]) if isinstance(splits, dict) else None
    tokens = counts.get("tokens") if isinstance(counts, dict) else None
    return tokens if type(tokens) is int else None


def find_summary(tree: _Tree, path: str) -> dict[str, Any]:
    """Return what the summary of `data prepare` above a split says; empty if there is none or it is another tool's.

    The keys are `max_seq_len`, `fingerprint` of the tokenizer, and `tokens` of the split, which may be None.
    """
    if not path:
        return {}
    try:
        summary = tree.read_object(path.rpartition("/")[0], SUMMARY_FILE)
    except OSError:
        return {}
    tokenizer = summary.get("tokenizer")
    fingerprint = tokenizer.get("fingerprint") if isinstance(tokenizer, dict) else None
    return {
        "max_seq_len": summary.get("max_seq_len"),
        "fingerprint": fingerprint or "",
        "tokens": tokens_of_split(summary, path),
    }


def compare_files(tree: _Tree, path: str, table: ShardTable) -> tuple[int, str]:
    """Compare the files that are there with an index, by name and size.

    Returns the bytes of all shards that are there, compressed or not, and COMPLETE or a text that says what is missing.
    """
    sizes = list_sizes(tree, path, [name.decode() for name in table.rows["raw_name"]])
    num_bytes = 0
    num_missing = 0
    num_differing = 0
    for row in table.rows:
        present: list[int] = []
        is_intact = False
        for prefix in ("raw", "zip"):
            size = sizes.get(row[f"{prefix}_name"].decode())
            if size is not None:
                present.append(size)
                is_intact |= size == row[f"{prefix}_bytes"]
        num_bytes += sum(present)
        num_missing += not present
        num_differing += bool(present) and not is_intact

    problems = []
    is_cache = ORIGIN in tree.content(path).files
    if num_missing and is_cache:
        problems.append(f"cache: {num_missing:,} of {len(table):,} shards not downloaded")
    elif num_missing:
        problems.append(f"{num_missing:,} of {len(table):,} shards missing")
    if num_differing:
        problems.append(f"{num_differing:,} shards of another size than in the index")
    return num_bytes, "; ".join(problems) or COMPLETE


def list_sizes(tree: _Tree, path: str, names: Iterable[str]) -> dict[str, int]:
    """Return the size of each file in the folders that hold the shards of an index, by its path relative to the index.

    `names` are those of the shards. A merged index has folders in them.
    """
    folders = sorted({name.rpartition("/")[0] for name in names})
    sizes: dict[str, int] = {}
    with ThreadPoolExecutor(LISTINGS_AT_ONCE, thread_name_prefix="list-shards") as pool:
        for folder, content in zip(
            folders, pool.map(lambda name: tree.content(join(path, name)), folders), strict=True
        ):
            for name, num_bytes in content.files.items():
                sizes[join(folder, name)] = num_bytes
    return sizes


def describe_without_index(tree: _Tree, path: str) -> DataFolder:
    """Describe a folder that has shards and no index."""
    sizes = [size for name, size in tree.content(path).files.items() if SHARD_FILE.fullmatch(name)]
    return DataFolder(path=path or ".", state=NO_INDEX, shards=len(sizes), num_bytes=sum(sizes))


def describe_unfinished(tree: _Tree, path: str) -> DataFolder:
    """Describe a preparation that is not finished, by the work in progress in its folder."""
    partial = join(path, PARTIAL)
    try:
        num_units = sum(name.endswith(".npz") for name in tree.content(f"{partial}/units").files)
        num_parts = len(tree.content(f"{partial}/parts").folders)
        request = tree.read_object(partial, "request.json")
    except OSError as error:
        return DataFolder(path=join(path, PARTIAL), state=f"unfinished: {one_line(error)}")
    parts = f", {num_parts:,} parts begun" if num_parts else ""
    max_seq_len = request.get("max_seq_len")
    return DataFolder(
        path=partial,
        state=f"unfinished: {num_units:,} pieces tokenized{parts}",
        max_seq_len=max_seq_len if isinstance(max_seq_len, int) else None,
    )


def join(folder: str, name: str) -> str:
    """Join the path of a folder and a name. "" is the folder that is searched."""
    if not name:
        return folder
    return f"{folder}/{name}" if folder else name


# Output


def table_of(data: Sequence[DataFolder], url: str) -> Table:
    """Build the table of data sets, with a row of all complete ones at the end if there are several."""
    columns = ["folder", "samples", "tokens", "columns", "length", "shards", "MB", "compression", "tokenizer", "digest"]
    rows = []
    for found in data:
        rows.append(
            [
                found.path,
                number_text(found.samples),
                number_text(found.tokens),
                ", ".join(found.columns),
                number_text(found.max_seq_len),
                number_text(found.shards),
                "" if found.num_bytes is None else f"{found.num_bytes / 1e6:,.1f}",
                found.compression,
                shorten(found.tokenizer),
                shorten(found.digest),
                found.state,
            ]
        )
    complete = [found for found in data if found.state == COMPLETE]
    if len(complete) > 1:
        total = [f"{len(complete):,} complete"]
        for name in ("samples", "tokens"):
            numbers = [getattr(found, name) for found in complete]
            total.append(number_text(sum(numbers)) if None not in numbers else "")
        num_shards = sum(found.shards or 0 for found in complete)
        num_bytes = sum(found.num_bytes or 0 for found in complete)
        rows.append([*total, "", "", number_text(num_shards), f"{num_bytes / 1e6:,.1f}", "", "", "", ""])
    return Table(f"data in {url}", [*columns, "state"], rows, right=(1, 2, 4, 5, 6))


def as_json(data: Sequence[DataFolder], url: str) -> Mapping[str, Any]:
    """Return a JSON record of all data sets, with whole digests."""
    return {"folder": url, "data": [asdict(found) for found in data]}


def number_text(number: int | None) -> str:
    """Format a number; an unknown one is empty."""
    return "" if number is None else f"{number:,}"


def shorten(digest: str) -> str:
    """Return a digest with its algorithm and its first characters: `xxh64:0f3a12bc9d4e`."""
    algorithm, separator, characters = digest.partition(":")
    return f"{algorithm}{separator}{characters[:DIGEST_CHARACTERS]}"
