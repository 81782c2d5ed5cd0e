"""The list of objects in a bucket that the first part of a preparation stores in the folder of all parts.

    .partial/objects.gz      a line of JSON, then URL, size and version of each object

So a bucket is listed once, and not by each part. Another machine has written the file, so it is read up to a limit, its
hash is compared, and its URLs must be below those of the request.
"""

import gzip
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from llmfoundry_engines.bucket_list import ObjectList
from llmfoundry_lite.bounded import open_unpacked, parse_json, read_file_at_most
from llmfoundry_lite.errors import DataError, mask_urls
from llmfoundry_lite.files import open_regular, write_atomically

OBJECTS_FILE = "objects.gz"
MAX_LIST_BYTES = 4 << 30
"""Maximum size of a list before compression: that of 30 million objects."""
COMPRESSION_LEVEL = 1
"""Level of gzip. Half of a list are ETags, which no level compresses."""


def store_list(path: Path, objects: ObjectList, urls: Sequence[str], on_error: str) -> None:
    """Write a list, unless there is one. A list with credentials in URLs, or line ends in names, is not stored."""
    has_credentials = any(mask_urls(url) != url for url in urls)
    has_line_ends = any(b"\n" in entry for entry in objects.entries)
    if has_credentials or has_line_ends or path.exists():
        return
    body = b"\n".join(objects.entries)
    header = describe_request(urls, on_error) | {
        "digest": hashlib.sha256(body).hexdigest(),
        "num_ignored": objects.num_ignored,
        "unreadable": objects.unreadable,
    }
    content = json.dumps(header).encode() + b"\n" + body
    write_atomically(path, gzip.compress(content, COMPRESSION_LEVEL, mtime=0))


def describe_request(urls: Sequence[str], on_error: str) -> dict[str, object]:
    """Return what of a request decides the list."""
    return {"urls": list(urls), "on_error": on_error}


def load_list(path: Path, urls: Sequence[str], on_error: str) -> ObjectList | None:
    """Load the list that an earlier part has stored. None if there is none, or it is of another request.

    Raises DataError if it is damaged.
    """
    try:
        with open(path, "rb", opener=open_regular) as packed, open_unpacked(packed, "gz") as file:
            content = read_file_at_most(file, MAX_LIST_BYTES, str(path), "a list of objects")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise damaged(path) from error

    first_line, _, body = content.partition(b"\n")
    del content
    try:
        header = parse_json(first_line)
        request = describe_request(urls, on_error)
        if {name: header[name] for name in request} != request:
            return None  # the error about another request comes from the comparison with request.json
        if header["digest"] != hashlib.sha256(body).hexdigest():
            raise damaged(path)
        objects = ObjectList(
            entries=body.split(b"\n"),
            num_ignored=int(header["num_ignored"]),
            unreadable=[str(sentence) for sentence in header["unreadable"]],
        )
        objects.total_bytes = sum(num_bytes for _, num_bytes in objects.files())
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path) from error
    if not all(entry.startswith(beginnings(urls)) for entry in objects.entries):
        raise damaged(path)
    return objects


def beginnings(urls: Sequence[str]) -> tuple[bytes, ...]:
    """Return the URLs of the stores of a request, with a slash, by which every URL of a list begins."""
    roots = ["/".join(url.split("/")[:3]) + "/" for url in urls]
    return tuple(root.encode() for root in roots)


def damaged(path: Path) -> DataError:
    """Return the error about a stored list that this command has not written."""
    return DataError(f"{path} is damaged; remove it, and this part lists the bucket again")
