"""`data index`: write the `index.json` files that folders of MDS shards lack, because their writer was killed.

A shard's file contains everything but its own size and hashes: the number of samples, the offset of each and of the
end, and the columns. So the index has the bytes that the writer would have written. Files are data of somebody else:
every size in them is checked before it is used, and only known keys are taken over.
"""

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from llmfoundry_lite.bounded import BLOCK_BYTES, parse_json, unpack_at_most
from llmfoundry_lite.checkpoint.local_folder import LocalFolder
from llmfoundry_lite.config.data_schema import HASHES
from llmfoundry_lite.data.index_files import (
    INDEX,
    SHARD_FILE,
    FolderContent,
    find_indexes,
    list_local_folder,
    name_some,
)
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.files import open_regular
from llmfoundry_lite.prepare.request import SHARD_LIMIT_BYTES
from llmfoundry_lite.prepare.shards import OFFSET_BYTES
from llmfoundry_lite.ranks.rank import count_usable_cores

SHARD_KEYS = {
    "version": int,
    "format": str,
    "compression": (str, type(None)),
    "hashes": list,
    "size_limit": (int, str, type(None)),
    "column_names": list,
    "column_encodings": list,
    "column_sizes": list,
}
"""Key of the description in a shard -> its type. They are the keys of the shard's record in the index, too."""
MAX_DESCRIPTION_BYTES = 1 << 20
"""Maximum size of the description of the columns in a shard."""
NUMBER = re.compile(r"shard\.(\d{1,9})\.mds")
"""Name of a shard as MDSWriter gives it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenIndex:
    """An index that was written."""

    folder: Path
    shards: int
    samples: int
    missing: Sequence[str]
    """Names of shards that the numbers of the others say were there."""


def index_folders(root: str | Path, notify: Callable[[str], None] = lambda line: None) -> list[WrittenIndex]:
    """Write an `index.json` into each folder at or below `root` that has shards and no index.

    A folder with an index, and the folders below it, are left as they are. `notify` is called with a sentence for each
    index. Returns the indexes that were written. Raises DataError for a folder that is not there or has no shards, and
    for a file that is not a complete shard; the indexes of earlier folders are then there.
    """
    root = Path(root).expanduser()
    if not root.is_dir():
        raise DataError(f"{root} is not a folder; expected a folder of MDS shards")
    list_folder = list_local_folder(root)
    found = find_indexes(list_folder)
    if not found.names and not found.without_index:
        raise DataError(f"{root} has no MDS shards (files that end in .mds, or in .mds and a compression)")

    written = []
    for path in found.without_index:
        index = write_index_of(root / path, list_folder(path))
        written.append(index)
        lacking = f"; {name_some(index.missing)} not there" if index.missing else ""
        notify(f"{index.folder / INDEX}: {index.samples:,} samples in {index.shards:,} shards{lacking}")
    return written


def write_index_of(folder: Path, content: FolderContent) -> WrittenIndex:
    """Write the index of a folder, whose content is given. Raises DataError for a file that is not a complete shard."""
    names = sorted({_raw_name(name) for name in content.files if SHARD_FILE.fullmatch(name)}, key=_sort_key)
    with ThreadPoolExecutor(count_usable_cores(), thread_name_prefix="index-shards") as pool:
        records = list(pool.map(lambda name: describe_shard(folder, name, content.files), names))
    try:
        encoded = json.dumps({"version": 2, "shards": records}, sort_keys=True).encode()
        LocalFolder(folder).put(INDEX, encoded, only_if_new=True)
    except FileExistsError:
        raise DataError(f"{folder / INDEX} has been written meanwhile; run the command again") from None
    return WrittenIndex(
        folder=folder,
        shards=len(records),
        samples=sum(record["samples"] for record in records),
        missing=_missing_numbers(names),
    )


def describe_shard(folder: Path, raw_name: str, files: Iterable[str]) -> dict[str, Any]:
    """Return the record of a shard for the index, from its file, its compressed file, or both.

    raw_name: name of the uncompressed file, which need not be there.
    files: names of all files in the folder.

    Raises DataError for a file that is not a complete shard.
    """
    compressed_names = sorted(name for name in files if name != raw_name and _raw_name(name) == raw_name)
    if len(compressed_names) > 1:
        raise DataError(f"{folder} has {' and '.join(compressed_names)}, which are the same shard; remove one")
    compressed_path = folder / compressed_names[0] if compressed_names else None
    raw_path = folder / raw_name

    if raw_path.is_file():
        record, raw_data = _read_shard(raw_path, raw_path)
    elif compressed_path is None:
        raise _not_a_shard(raw_path, "it is no regular file")
    else:
        with tempfile.TemporaryDirectory() as scratch:
            unpacked = Path(scratch, raw_name)
            compression = compressed_path.suffix.removeprefix(".")
            try:
                unpack_at_most(compressed_path, compression, unpacked, SHARD_LIMIT_BYTES)
            except (OSError, ValueError) as error:
                raise _not_a_shard(compressed_path, f"it cannot be decompressed: {error}") from error
            record, raw_data = _read_shard(unpacked, compressed_path)

    zip_data = None
    if compressed_path is None:
        record["compression"] = None  # the compressed file is gone, so nobody has to decompress it
    else:
        if (record["compression"] or "").partition(":")[0] != compressed_path.suffix.removeprefix("."):
            raise _not_a_shard(compressed_path, f"its compression is {record['compression']} by its own description")
        with open(compressed_path, "rb", opener=open_regular) as file:
            zip_data = _describe_file(file, compressed_path.name, record["hashes"])
    return record | {"raw_data": raw_data | {"basename": raw_name}, "zip_data": zip_data}


def _read_shard(path: Path, named: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Read an uncompressed shard. Returns its number of samples and description, and the record of its file.

    Errors name the file `named`, from which `path` may have been decompressed. Raises DataError.
    """
    with open(path, "rb", opener=open_regular) as file:
        num_bytes = os.fstat(file.fileno()).st_size
        head = file.read(OFFSET_BYTES)
        num_samples = int(np.frombuffer(head, "<u4")[0]) if len(head) == OFFSET_BYTES else 0
        description_begin = OFFSET_BYTES * (num_samples + 2)
        if num_samples == 0 or description_begin > num_bytes:
            raise _not_a_shard(named, "its number of samples does not fit its size")

        # The offsets lead from the first sample, after the description, to the end of the file.
        offsets = np.frombuffer(file.read(OFFSET_BYTES * (num_samples + 1)), "<u4")
        is_in_order = bool((offsets[1:] >= offsets[:-1]).all())
        description_bytes = int(offsets[0]) - description_begin
        if not is_in_order or not 0 < description_bytes <= MAX_DESCRIPTION_BYTES:
            raise _not_a_shard(named, "its offsets are not those of samples")
        if int(offsets[-1]) != num_bytes:
            raise _not_a_shard(named, f"it has {num_bytes:,} bytes, {int(offsets[-1]):,} by its own offsets")

        description = _check_description(file.read(description_bytes), named)
        file.seek(0)
        return description | {"samples": num_samples}, _describe_file(file, path.name, description["hashes"])


def _check_description(content: bytes, named: Path) -> dict[str, Any]:
    """Return the known keys of a shard's description. Raises DataError if it is not one of MDS version 2."""
    try:
        parsed = parse_json(content)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict):
        raise _not_a_shard(named, "it has no description of its columns")
    description: dict[str, Any] = {key: parsed.get(key) for key in SHARD_KEYS}
    has_types = all(isinstance(description[key], expected) for key, expected in SHARD_KEYS.items())
    if not has_types or description["version"] != 2 or description["format"] != "mds":
        raise _not_a_shard(named, "its description is not of MDS version 2")
    names, encodings = description["column_names"], description["column_encodings"]
    are_texts = all(isinstance(text, str) for text in [*names, *encodings])
    if not are_texts or len(names) != len(encodings):
        raise _not_a_shard(named, "its description does not have a type for each column")
    unknown = [name for name in description["hashes"] if name not in HASHES.split()]
    if unknown:
        raise _not_a_shard(named, f"its hash {unknown[0]!r} is none of {HASHES}")
    return description


def _describe_file(file: BinaryIO, name: str, hash_names: Sequence[str]) -> dict[str, Any]:
    """Return the record of an open file for the index: its name, size and hashes. It is read once, in blocks."""
    digests: dict[str, Any] = {}
    for hash_name in hash_names:
        is_xxhash = hash_name in xxhash.algorithms_available
        digests[hash_name] = getattr(xxhash, hash_name)() if is_xxhash else hashlib.new(hash_name)
    while digests:
        block = file.read(BLOCK_BYTES)
        if not block:
            break
        for digest in digests.values():
            digest.update(block)
    hashes = {hash_name: digest.hexdigest() for hash_name, digest in digests.items()}
    return {"basename": name, "bytes": os.fstat(file.fileno()).st_size, "hashes": hashes}


def _not_a_shard(path: Path, problem: str) -> DataError:
    """Return the error for a file that is not a complete shard."""
    return DataError(f"{path} is not a complete MDS shard: {problem}; remove it, or write it again")


def _raw_name(name: str) -> str:
    """Return the name of a shard's uncompressed file: `shard.00000.mds` for `shard.00000.mds.zstd`."""
    return name[: name.rindex(".mds") + len(".mds")] if ".mds" in name else name


def _sort_key(name: str) -> tuple[int, str]:
    """Return the key by which shards are sorted: by their number, which may have more than five digits."""
    match = NUMBER.fullmatch(name)
    return (int(match[1]), name) if match else (-1, name)


def _missing_numbers(names: Sequence[str]) -> list[str]:
    """Return the names of shards that are missing between others of MDSWriter's names, at most a few."""
    numbers = {int(match[1]) for match in map(NUMBER.fullmatch, names) if match}
    missing: list[str] = []
    for number in range(max(numbers, default=-1)):
        if number not in numbers:
            missing.append(f"shard.{number:05}.mds")
        if len(missing) > len(numbers):  # they are not numbered as MDSWriter does
            return []
    return missing
