"""The list of objects that URLs refer to, for `data prepare`.

    list_objects(["s3://bucket/corpus/"], "stop", {})  ->  ObjectList

The rules are those of `prepare/listing.py` for local files: kinds by suffix, the order of paths, hidden names ignored,
and globs. An object is listed with its size and version, and `bucket_files.py` reads that version. A list takes about
200 bytes of memory for each object.
"""

import glob
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from llmfoundry_engines.bucket_files import Store, call_store, open_store, version_of
from llmfoundry_lite.errors import DataError, mask_urls
from llmfoundry_lite.prepare.contents import COMPRESSED_SUFFIXES, RemoteFile
from llmfoundry_lite.prepare.listing import DATASET_FILES, SPLITS_FILE, describe_readable, file_kind

SEPARATOR = b"\0"
"""Byte between the fields of an entry. It sorts before all others, so that entries are in the order of their URLs."""


class Found(NamedTuple):
    """An object in a listing."""

    key: str
    """Its path in the bucket."""
    num_bytes: int
    version: str


@dataclass(kw_only=True, slots=True)
class ObjectList:
    """The objects to read, in the order of reading, and records of those that are not read."""

    entries: list[bytes] = field(default_factory=list)
    """URL, size and version of each object, in a form that takes little memory."""
    total_bytes: int = 0
    num_ignored: int = 0
    """Number of objects that are of an unsupported kind."""
    unreadable: list[str] = field(default_factory=list)
    """With `on_error` skip, a sentence for each object that cannot be read."""

    def files(self) -> Iterator[tuple[RemoteFile, int]]:
        """Yield each object, and its size in bytes."""
        for entry in self.entries:
            url, num_bytes, version = entry.decode("utf-8", "surrogatepass").rsplit("\0", 2)
            yield RemoteFile(url, int(num_bytes), version), int(num_bytes)

    def describe(self) -> dict[str, str | int]:
        """Describe the state of the objects: their number, total bytes, and a digest of names, sizes and versions."""
        digest = hashlib.sha256()
        for file, num_bytes in self.files():
            digest.update(f"{file}\0{num_bytes}\0{file.version}\n".encode("utf-8", "surrogatepass"))
        return {"files": len(self.entries), "bytes": self.total_bytes, "digest": digest.hexdigest()[:16]}


def list_objects(urls: Sequence[str], on_error: str, readers: Mapping[str, str]) -> ObjectList:
    """List the objects that URLs refer to, in the order in which they are read.

    That is the order of `urls`, and for each of them the order of paths. A URL is the name of an object, of a folder,
    which is listed recursively, or a glob. Hidden names are ignored unless a URL has them.

    on_error: "stop" to raise DataError for an object that cannot be read, or "skip" to record it.
    readers: the user's own readers, by suffix.

    Raises DataError if a URL has nothing to read.
    """
    objects = ObjectList()
    known_urls: set[bytes] | None = set() if len(urls) > 1 else None  # two URLs may have an object in common
    for url in urls:
        store = open_store(url)
        entries: list[bytes] = []
        num_found = 0
        num_readable = 0
        for found in without_dataset_files(find_objects(store, url), mask_urls(url)):
            num_found += 1
            file = RemoteFile(f"{store.root_url}/{found.key}", found.num_bytes, found.version)
            if file_kind(file, readers) is None:
                objects.num_ignored += 1
                continue
            num_readable += 1
            if found.num_bytes == 0 and file.suffix in COMPRESSED_SUFFIXES:
                record_unreadable(objects, on_error, str(file), f"it has 0 bytes, so it is no whole {file.suffix} file")
                continue
            encoded_url = file.url.encode("utf-8", "surrogatepass")
            if known_urls is not None:
                if encoded_url in known_urls:
                    continue
                known_urls.add(encoded_url)
            fields = (encoded_url, b"%d" % found.num_bytes, found.version.encode())
            entries.append(SEPARATOR.join(fields))
            objects.total_bytes += found.num_bytes

        if num_found == 0:
            is_pattern = glob.has_magic(url)
            raise DataError(f"{url}: {'no object matches' if is_pattern else 'no such object, and no folder with any'}")
        if num_readable == 0:
            raise DataError(f"{url}: nothing here can be read; expected {describe_readable(readers)}")
        objects.entries += sorted(entries)
    if not objects.entries:
        raise DataError(f"{' '.join(urls)}: no object can be read ({objects.unreadable[0]})")
    return objects


def record_unreadable(objects: ObjectList, on_error: str, name: str, reason: str) -> None:
    """Record an object that cannot be read, with the reason. With `on_error` "stop", raises DataError."""
    if on_error == "stop":
        raise DataError(f"{name} cannot be read: {reason}; repair it, or leave such places out with --on-error skip")
    objects.unreadable.append(f"{name}: {reason}")


def without_dataset_files(found_objects: Iterator[Found], url: str) -> Iterator[Found]:
    """Leave out the descriptions that the `datasets` library writes beside its .arrow files.

    Raises DataError for a data set of several splits, because the URL of one is needed.
    """
    descriptions: list[Found] = []
    has_arrow = False
    for found in found_objects:
        name = found.key.rpartition("/")[2]
        if name == SPLITS_FILE:
            raise DataError(f"{url} has a data set of several splits; give the URL of one, which ends in /train")
        has_arrow |= name.endswith(".arrow")
        if name in DATASET_FILES:
            descriptions.append(found)
        else:
            yield found
    if not has_arrow:
        yield from descriptions


def find_objects(store: Store, url: str) -> Iterator[Found]:
    """Yield all objects that a URL refers to: one object, those of a folder, or those that match a glob."""
    key = url.removeprefix(store.root_url).strip("/")
    if store.root_url.startswith(("http://", "https://")):
        yield from find_single(store, key)  # a web server has no folders
        return

    # A name that exists is taken literally, even if it contains characters of a glob.
    num_found = 0
    for found in find_folder(store, f"{key}/" if key else ""):
        num_found += 1
        if is_visible(found.key[len(key) :]):
            yield found
    if num_found == 0 and key:
        for found in find_single(store, key):
            num_found += 1
            yield found
    if num_found == 0 and glob.has_magic(key):
        yield from find_matches(store, key)


def find_single(store: Store, key: str) -> Iterator[Found]:
    """Yield the object of a name, if there is one."""
    url = f"{store.root_url}/{key}"
    try:
        details = call_store(lambda: store.filesystem.info(store.path(url)), f"{mask_urls(url)} cannot be read")
    except FileNotFoundError:
        return
    if details["type"] == "file":
        if details["size"] is None:
            raise DataError(f"{url}: the server does not tell its size, so it cannot be read by ranges; download it")
        yield Found(key, int(details["size"]), version_of(details))


def find_matches(store: Store, pattern: str) -> Iterator[Found]:
    """Yield the objects that match a glob, and those in folders that match it.

    Each part of the pattern matches hidden names only if it begins with a dot.
    """
    from fsspec.utils import glob_translate

    try:
        expression = re.compile(glob_translate(pattern)[: -len(r"\Z")] + r"(?:/.*)?\Z", re.DOTALL)
    except ValueError as error:
        raise DataError(f"{store.root_url}/{pattern}: {error}") from error
    literal = re.split(r"[*?[]", pattern, maxsplit=1)[0]
    folder, _, _ = literal.rpartition("/")
    names_hidden = any(part.startswith(".") for part in pattern[len(folder) :].split("/"))
    for found in find_folder(store, literal):
        if expression.match(found.key) and (names_hidden or is_visible(found.key[len(folder) :])):
            yield found


def is_visible(key: str) -> bool:
    """Return whether no part of a key begins with a dot."""
    return "/." not in f"/{key}"


def find_folder(store: Store, prefix: str) -> Iterator[Found]:
    """Yield all objects whose keys begin with a prefix. Markers of folders, which end in a slash, are left out."""
    find = find_s3_pages if store.is_s3 else find_in_folders
    for found in find(store, prefix):
        if not found.key.endswith("/"):
            yield found


def find_s3_pages(store: Store, prefix: str) -> Iterator[Found]:
    """Yield the objects of S3 below a prefix, 1,000 for each request. fsspec would collect all of them first."""
    subject = f"{mask_urls(store.root_url)}/{prefix} cannot be listed"
    request = {"Bucket": store.root_path, "Prefix": prefix}
    while True:
        call = lambda: store.filesystem.call_s3("list_objects_v2", store.filesystem.req_kw, **request)  # noqa: E731
        try:
            page = call_store(call, subject)
        except FileNotFoundError as error:
            raise DataError(f"{subject}: there is no such bucket") from error
        for item in page.get("Contents", ()):
            yield Found(item["Key"], int(item["Size"]), item["ETag"])
        if not page.get("IsTruncated"):
            return
        request["ContinuationToken"] = page["NextContinuationToken"]


def find_in_folders(store: Store, prefix: str) -> Iterator[Found]:
    """Yield the objects of another store below a prefix, one folder after the other, without hidden folders."""
    root = store.root_path.strip("/")
    first_folder, _, _ = prefix.rpartition("/")
    folders = [first_folder]
    while folders:
        folder = folders.pop()
        for details in list_folder(store, folder):
            key = str(details["name"]).strip("/").removeprefix(root).strip("/")
            is_hidden = key.rpartition("/")[2].startswith(".")
            if details["type"] == "directory":
                may_match = key.startswith(prefix) or prefix.startswith(f"{key}/")
                if may_match and not is_hidden:
                    folders.append(key)
            elif key.startswith(prefix):
                yield Found(key, int(details["size"] or 0), version_of(details))


def list_folder(store: Store, folder: str) -> list[dict[str, Any]]:
    """List a folder, past fsspec's cache: fsspec's details of each object and folder in it. Empty if there is none."""
    path = f"{store.root_path}/{folder}".rstrip("/")

    def list_details() -> list[dict[str, Any]]:
        store.filesystem.invalidate_cache()
        return store.filesystem.ls(path, detail=True)

    try:
        return call_store(list_details, f"{mask_urls(store.root_url)}/{folder} cannot be listed")
    except (FileNotFoundError, NotADirectoryError):
        return []
