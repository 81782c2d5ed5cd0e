"""Files in a bucket, read by ranges of bytes for `data prepare`: nothing is stored on this machine's disk.

`open_object` opens an object that `bucket_list.py` has listed. Each object is checked against its listed version. S3 is
asked for that version in every request. Other stores are asked for the version before the first range and after the
last one. `call_store` calls a store, and tries again what may pass. The clients are those of checkpoints, with their
options and renewal of credentials, see `checkpoint/open_folder.py` in the core.
"""

import errno
import io
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, BinaryIO, TypeVar
from urllib.parse import urlsplit

from llmfoundry_lite.bounded import BLOCK_BYTES
from llmfoundry_lite.checkpoint.open_folder import open_filesystem
from llmfoundry_lite.checkpoint.remote_folder import RenewingFilesystem
from llmfoundry_lite.errors import (
    CheckpointError,
    DataError,
    TransientDataError,
    is_masked,
    is_transient,
    needs_credentials,
    remember_url_secrets,
)
from llmfoundry_lite.prepare.contents import InputFile, RefusedFileError, RemoteFile
from llmfoundry_lite.retry import LASTING_ERRORS, Budget, as_os_errors, first_line, keep_trying

T = TypeVar("T")
V = TypeVar("V")

PAUSES_SECONDS = (0.2, 0.6, 1.8, 5.4, 16.2)
"""Pauses before further attempts at a request: 24 s in all, because a store may ask for less load for some seconds."""
RANGE_BYTES = 12 << 20
"""Maximum number of bytes that one request asks for. A unit of lines, which has 8 MiB, takes one request."""
TAIL_BYTES = 64 << 10
"""Bytes behind a unit of lines that its request asks for, too, so that most last lines need no request of their own."""
READS_AT_ONCE = 16
"""Small objects that one worker reads at the same time. The answer of a store takes 10 to 100 ms, however small."""
VERSION_KEYS = ("generation", "ETag", "etag", "blob_id", "mtime", "last_modified", "LastModified", "created")
"""Keys of fsspec's details that tell the version of an object, the surest first."""


@dataclass(frozen=True, slots=True)
class Store:
    """A bucket, or another file system behind URLs."""

    filesystem: RenewingFilesystem
    root_url: str
    """Beginning of the URLs of all objects: `s3://bucket`."""
    root_path: str
    """Beginning of the paths of all objects in the file system: `bucket`."""

    @property
    def is_s3(self) -> bool:
        """Whether the client is s3fs, which can be asked for pages of a listing, and for a certain version."""
        return hasattr(self.filesystem, "call_s3")

    def path(self, url: str) -> str:
        """Return the path of an object in the file system."""
        return self.root_path + url.removeprefix(self.root_url)


def open_store(url: str) -> Store:
    """Open the store of a URL. Raises DataError if its client is not installed, or the URL lacks its credentials."""
    remember_url_secrets(url)
    if is_masked(url):
        raise DataError(f"{url}: credentials are not recorded; give the URL with them")
    parts = urlsplit(url)
    if parts.scheme in ("file", "local"):
        path = url.partition("://")[2]
        raise DataError(f"{url}: expected the URL of a bucket, or a path; for files of this machine, give {path}")
    return _open_root(f"{parts.scheme}://{parts.netloc}")


@lru_cache(maxsize=16)
def _open_root(root_url: str) -> Store:
    """Open the store of a bucket's URL, once in each process. Raises DataError."""
    try:
        filesystem, path = open_filesystem(root_url)
    except CheckpointError as error:
        raise DataError(str(error)) from error.__cause__
    return Store(filesystem, root_url, path.rstrip("/"))


def version_of(details: dict[str, Any]) -> str:
    """Return what tells the version of an object, by fsspec's details about it; empty if the store tells nothing."""
    for key in VERSION_KEYS:
        value = details.get(key)
        if value:
            # `memory://` has times as numbers in a listing, and as objects in the details of a file.
            return str(value.timestamp() if isinstance(value, datetime) else value)
    return ""


def call_store(call: Callable[[], T], subject: str) -> T:
    """Call a store, and again with pauses after a fault that may pass. Returns its answer.

    `subject` is the beginning of the error's message: "s3://bucket/a.txt cannot be read". Raises FileNotFoundError, and
    DataError for any other fault. It is a TransientDataError if the same command may succeed later, and a
    RefusedFileError if the store refuses what was asked for.
    """

    def may_pass(error: OSError) -> bool:
        is_lasting = isinstance(error, LASTING_ERRORS) or needs_credentials(error)
        return not is_lasting

    try:
        budget = Budget(PAUSES_SECONDS, attempts=len(PAUSES_SECONDS))
        return keep_trying(as_os_errors()(call), budget, may_pass)
    except FileNotFoundError:
        raise
    except OSError as error:
        advice = DataError("")
        advice.__cause__ = error  # `remedy` follows from the cause
        reason = f"{first_line(error)}{advice.remedy}"
        if is_transient(error):
            raise TransientDataError(f"{subject}: {reason}") from error
        if isinstance(error, PermissionError) or needs_credentials(error):
            raise RefusedFileError(f"{subject}: {reason}", reason) from error
        raise DataError(f"{subject}: {reason}") from error


# ------------------------------------------------------------------------------------------------------------ reading


def open_object(file: RemoteFile, begin: int, end: int) -> BinaryIO:
    """Open an object for reading, at its beginning. The bytes [begin, end) are needed; others can be read, too."""
    return io.BufferedReader(ObjectReader(file, end), BLOCK_BYTES)  # pyright: ignore[reportReturnType]


def read_ahead(read: Callable[[InputFile], V], files: Sequence[InputFile]) -> Iterator[V]:
    """Yield the results of reading files, in their order, of which READS_AT_ONCE are read at the same time.

    All results may be in memory at once, so the files are those of one unit.
    """
    pool = ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="read-bucket")
    try:
        yield from pool.map(read, files)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def open_ranges(file: RemoteFile) -> "ObjectReader":
    """Open an object for a reader that seeks: each read is one request for exactly its bytes."""
    return ObjectReader(file, None)


class ObjectReader(io.RawIOBase):
    """An object that is read by ranges. Reading raises DataError, which names the object."""

    def __init__(self, file: RemoteFile, needed_end: int | None) -> None:
        """Take an object, and the end of the bytes that are needed. None: each read asks for its bytes alone."""
        self.file = file
        self.store = open_store(file.url)
        self.path = self.store.path(file.url)
        self.needed_end = needed_end
        self.position = 0
        self._block = b""
        """The bytes that the last request has brought."""
        self._block_begin = 0
        self._tail_bytes = TAIL_BYTES
        """Bytes of the next request behind `needed_end`, twice as many each time."""
        self._is_checked = self.store.is_s3  # which checks the version in each request

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the position of the next byte."""
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to another position. Nothing is requested."""
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.file.num_bytes}[whence]
        self.position = origin + offset
        return self.position

    def readinto(self, buffer: Any) -> int:
        """Read bytes from the position on into a buffer, and return their number; 0 at the end."""
        view = memoryview(buffer).cast("B")
        offset = self.position - self._block_begin
        if not 0 <= offset < len(self._block):
            end = min(self.position + self._choose_length(len(view)), self.file.num_bytes)
            self._block = self._request(self.position, end) if self.position < end else b""
            self._block_begin = self.position
            offset = 0
        content = self._block[offset : offset + len(view)]
        view[: len(content)] = content
        self.position += len(content)
        if self.needed_end is None:
            self._block = b""
        return len(content)

    def _choose_length(self, wanted_bytes: int) -> int:
        """Return the length of the next request, for a reader that wants some bytes."""
        if self.needed_end is None:
            return wanted_bytes
        if self.position < self.needed_end:
            return min(RANGE_BYTES, self.needed_end + TAIL_BYTES - self.position)
        length = self._tail_bytes
        self._tail_bytes = min(2 * length, RANGE_BYTES)
        return length

    def _request(self, begin: int, end: int) -> bytes:
        """Request the bytes [begin, end)."""
        if not self._is_checked:
            self._check_version()

        def fetch() -> bytes:
            content = self._fetch_s3(begin, end) if self.store.is_s3 else self._fetch(begin, end)
            if len(content) != end - begin:
                raise OSError(errno.EIO, f"{len(content):,} bytes came, expected {end - begin:,}")
            return content

        try:
            return call_store(fetch, f"{self.file} cannot be read")
        except FileNotFoundError as error:
            raise self._changed("is not there any more") from error

    def _fetch(self, begin: int, end: int) -> bytes:
        """Fetch a range by fsspec's usual method."""
        return self.store.filesystem.cat_file(self.path, start=begin, end=end)

    def _fetch_s3(self, begin: int, end: int) -> bytes:
        """Fetch a range of the listed version from S3. fsspec has no method for this."""
        from fsspec.asyn import sync

        filesystem = self.store.filesystem
        bucket, _, key = self.path.partition("/")
        condition = {"IfMatch": self.file.version} if self.file.version else {}
        try:
            answer = filesystem.call_s3(
                "get_object",
                filesystem.req_kw,
                Bucket=bucket,
                Key=key,
                Range=f"bytes={begin}-{end - 1}",
                **condition,
            )
        except OSError as error:
            response = getattr(error.__cause__, "response", None) or {}
            if response.get("Error", {}).get("Code") in ("PreconditionFailed", "412"):
                raise self._changed("has changed") from error
            raise
        try:
            content: Any = sync(filesystem.loop, answer["Body"].read)
            return content
        finally:
            answer["Body"].close()

    def _check_version(self) -> None:
        """Raise DataError if the object has another size or version than was listed."""

        def load_details() -> dict[str, Any]:
            self.store.filesystem.invalidate_cache()
            return self.store.filesystem.info(self.path)

        try:
            details = call_store(load_details, f"{self.file} cannot be read")
        except FileNotFoundError as error:
            raise self._changed("is not there any more") from error
        self._is_checked = True
        if (details["size"], version_of(details)) != (self.file.num_bytes, self.file.version):
            raise self._changed("has changed")

    def _changed(self, change: str) -> DataError:
        """Return the error about an object that is not as it was listed."""
        return DataError(
            f"{self.file} {change} since it was listed; when the bucket is complete, prepare it into another --out, or "
            "remove what was begun"
        )

    def close(self) -> None:
        """Close, and check that the object has not changed while it was read."""
        if not self.closed and self._is_checked and not self.store.is_s3:
            super().close()
            self._check_version()
        super().close()
