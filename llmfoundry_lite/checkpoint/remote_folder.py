"""A folder behind an fsspec URL, such as a bucket: no renames and no syncs, and a save commits with its last put.

No torch, and fsspec when such a folder is opened.
"""

import contextlib
import errno
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llmfoundry_lite.bounded import read_up_to
from llmfoundry_lite.checkpoint.folder import Buffer
from llmfoundry_lite.errors import has_expired
from llmfoundry_lite.retry import as_os_errors, retry_transient_errors

REMOTE_PART_BYTES = 16 << 20
MAX_PARTS = 10_000
"""S3's limits on an upload: 10,000 parts of 5 MiB to 5 GiB, the last of any size. 16 MiB are enough up to 156 GiB."""

REMOVALS_AT_ONCE = 16
WAIT_SECONDS = 2.0
"""Time after which the user is told which folder does not answer."""
note_wait: Callable[[str], None] | None = None
"""Function that tells the user, given the folder's URL; programs set it."""


class RenewingFilesystem:
    """A file system of fsspec's that is made again, and called again, when its credentials have expired. The new one
    reads the credentials anew; fsspec itself would return the cached one with the old credentials."""

    def __init__(self, filesystem: Any, url: str = ""):
        self.url = url
        """URL of the folder that is opened."""
        self._filesystem = filesystem
        self._lock = threading.Lock()
        self._has_noted = False

    def __getattr__(self, name: str) -> Any:
        before = self._filesystem
        call = getattr(before, name)

        def asked(*arguments: Any, **options: Any) -> Any:
            try:
                with self._noting_a_wait():
                    return call(*arguments, **options)
            except Exception as error:
                if not has_expired(error):
                    raise
            self.renew(before)
            return getattr(self._filesystem, name)(*arguments, **options)

        return asked if callable(call) else call

    @contextlib.contextmanager
    def _noting_a_wait(self) -> Iterator[None]:
        """Say once what the user waits for, if an answer takes longer than WAIT_SECONDS. In background threads nobody
        waits."""
        is_waited_for = note_wait is not None and threading.current_thread() is threading.main_thread()
        if not is_waited_for or self._has_noted:
            yield
            return
        timer = threading.Timer(WAIT_SECONDS, self._note_wait)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _note_wait(self) -> None:
        self._has_noted = True
        if note_wait is not None:
            note_wait(self.url)

    def renew(self, before: Any = None) -> None:
        """Replace the file system, unless another thread has done so since it was `before`."""
        with self._lock:
            if before in (None, self._filesystem):
                kind, old = type(self._filesystem), self._filesystem
                kind.clear_instance_cache()
                self._filesystem = kind(*old.storage_args, **old.storage_options)


class RemoteFolder:
    """A folder behind a URL of fsspec's; methods of `Folder`, and those by which `PutCommits` commits."""

    path_here: Path | None = None
    max_open_files = 16

    def __init__(self, filesystem: RenewingFilesystem, path: str, url: str):
        self.filesystem = filesystem
        self.path = path.rstrip("/")
        self.url = url
        """URL that the user gave: `path` alone may lack the host, and other ranks open this again."""

    def child(self, name: str) -> "RemoteFolder":
        return RemoteFolder(self.filesystem, f"{self.path}/{name}", f"{self.url}/{name}")

    def parent(self) -> "RemoteFolder":
        return RemoteFolder(self.filesystem, self.path.rpartition("/")[0], self.url.rstrip("/").rpartition("/")[0])

    def make(self, *, with_parents: bool = False) -> None:
        """Do nothing: a put makes the folders above it."""

    def names(self) -> list[str]:
        return sorted({_name(entry) for entry in self._list()} - {""})

    def sizes(self) -> dict[str, int]:
        return {_name(entry): int(entry["size"] or 0) for entry in self._list() if entry["type"] == "file"}

    def _list(self) -> list[dict[str, Any]]:
        def listed() -> list[dict[str, Any]]:
            self.filesystem.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                return self.filesystem.ls(self.path, detail=True)
            return []

        return retry_transient_errors(listed)

    def exists(self) -> bool:
        return bool(self.names())

    def read(self, name: str, max_bytes: int) -> bytes:
        def fetched() -> bytes:
            self.filesystem.invalidate_cache()
            path = f"{self.path}/{name}"
            if "http" in self.filesystem.protocol:  # a server may answer with the whole file, whatever was asked for
                with self.filesystem.open(path, "rb", block_size=0) as file:
                    return read_up_to(file, max_bytes + 1)
            try:
                return self.filesystem.cat_file(path, start=0, end=max_bytes + 1)
            except OSError:  # S3 refuses any range of an empty object
                if self.filesystem.info(path)["size"] == 0:
                    return b""
                raise

        return retry_transient_errors(fetched)

    def put(self, name: str, data: bytes, *, only_if_new: bool = False) -> None:
        path = f"{self.path}/{name}"
        if not only_if_new:
            retry_transient_errors(lambda: self.filesystem.pipe_file(path, data))
            return
        if name in self.names():
            raise FileExistsError(path)
        try:
            with as_os_errors():
                self.filesystem.pipe_file(path, data, mode="create")
            return
        except (TypeError, NotImplementedError, ValueError):  # a client without conditional put
            pass
        except OSError as error:  # a server without conditional put
            if error.errno != errno.ENOSYS:
                raise
        retry_transient_errors(lambda: self.filesystem.pipe_file(path, data))
        if self.read(name, len(data)) != data:
            raise FileExistsError(path)

    def remove(self, name: str) -> None:
        retry_transient_errors(lambda: self._remove_key(f"{self.path}/{name}"))

    def version(self, name: str) -> str | None:
        """Return the version for `remove_version`; None where the client has none. Raises OSError if it is absent."""
        self.filesystem.invalidate_cache()
        return retry_transient_errors(lambda: self.filesystem.info(f"{self.path}/{name}")).get("ETag")

    def remove_version(self, name: str, version: str | None) -> bool:
        """Remove a file if it still has this version; else return False. Servers without versions remove it anyway."""
        if version is not None and hasattr(self.filesystem, "call_s3"):
            bucket, key, _ = self.filesystem.split_path(f"{self.path}/{name}")
            condition = {"Bucket": bucket, "Key": key, "IfMatch": version}
            try:
                retry_transient_errors(lambda: self.filesystem.call_s3("delete_object", **condition), ())
                return True
            except FileNotFoundError:
                return True
            except OSError as error:
                answer = getattr(error.__cause__, "response", None) or {}
                if answer.get("Error", {}).get("Code") in ("PreconditionFailed", "412"):
                    return False
                if error.errno not in (errno.ENOSYS, errno.EINVAL, errno.EPERM):  # a server that knows no condition
                    raise
        self.remove(name)
        return True

    def abort_uploads(self, is_dead: Callable[[str], bool]) -> None:
        """Abort unfinished uploads whose name in this folder `is_dead`. Only S3 needs this: it keeps, and bills, what
        they have sent until they are aborted. Other stores drop it after a week."""
        if not hasattr(self.filesystem, "call_s3"):
            return
        bucket, key, _ = self.filesystem.split_path(self.path)
        prefix = f"{key}/" if key else ""
        more: dict[str, str] = {}
        while True:
            found = self.filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **more)
            for upload in found.get("Uploads", []):
                if upload["Key"].startswith(prefix) and is_dead(upload["Key"].removeprefix(prefix)):
                    which = {"Key": upload["Key"], "UploadId": upload["UploadId"]}
                    with contextlib.suppress(FileNotFoundError):
                        self.filesystem.call_s3("abort_multipart_upload", Bucket=bucket, **which)
            if not found.get("IsTruncated"):
                return
            more = {"KeyMarker": found["NextKeyMarker"], "UploadIdMarker": found["NextUploadIdMarker"]}

    def remove_all(self) -> None:
        """Remove key by key: `rm` of fsspec takes `[`, `*` and `?` in a path for a pattern."""

        def removed() -> None:
            with ThreadPoolExecutor(REMOVALS_AT_ONCE, thread_name_prefix="checkpoint-remove") as pool:
                list(pool.map(self._remove_key, self._find()))
            for path in sorted(self._find(withdirs=True), key=len, reverse=True):  # empty on a store without folders
                self.filesystem.rmdir(path)

        retry_transient_errors(removed)

    def _find(self, *, withdirs: bool = False) -> list[str]:
        """Return every key of this folder, or of the file that has its name."""
        self.filesystem.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            found = self.filesystem.find(self.path, withdirs=withdirs)
            return [path for path in found if f"{path.strip('/')}/".startswith(f"{self.path.strip('/')}/")]
        return []

    def _remove_key(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.rm_file(path)

    def sink(self, name: str, num_bytes: int) -> "RemoteSink":
        return RemoteSink(self.filesystem, f"{self.path}/{name}", part_bytes(num_bytes))

    def source(self, name: str, *, bypass_cache: bool = False) -> "RemoteSource":
        if bypass_cache:
            self.filesystem.invalidate_cache()
        return RemoteSource(self.filesystem, f"{self.path}/{name}")


class RemoteSink:
    """A multi-part upload; the object appears when it is closed."""

    any_order = False

    def __init__(self, filesystem: RenewingFilesystem, path: str, part_bytes: int):
        self.path = path
        self.filesystem = filesystem
        with as_os_errors():
            self._file = filesystem.open(path, "wb", block_size=part_bytes)
        self._offset = 0

    def write_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        assert offset == self._offset, "an upload takes bytes in order"
        for buffer in buffers:
            data = memoryview(buffer).cast("B")
            with as_os_errors():
                self._file.write(data)
            self._offset += len(data)

    def close(self) -> None:
        with as_os_errors():
            self._file.close()

    def abandon(self) -> None:
        with contextlib.suppress(Exception):
            self._file.discard()
        with contextlib.suppress(Exception):
            self._file.closed = True  # else fsspec completes the upload when the object is collected
        self.filesystem.renew()  # an upload belongs to the file system that began it; the next one begins afresh


class RemoteSource:
    """An object that is read by ranges."""

    def __init__(self, filesystem: RenewingFilesystem, path: str):
        self.filesystem = filesystem
        self.path = path
        self.num_bytes = int(retry_transient_errors(lambda: filesystem.info(path))["size"])

    def read_into(self, offset: int, buffers: Sequence[Buffer]) -> None:
        end = offset + sum(len(buffer) for buffer in buffers)
        data = memoryview(retry_transient_errors(lambda: self.filesystem.cat_file(self.path, start=offset, end=end)))
        if len(data) != end - offset:
            raise EOFError(f"{self.path}: ends before byte {end}")
        for buffer in buffers:
            memoryview(buffer).cast("B")[:] = data[: len(buffer)]
            data = data[len(buffer) :]

    def close(self) -> None:
        pass


def part_bytes(num_bytes: int) -> int:
    """Return the bytes of each part of an upload: as small as the number of parts permits."""
    mebibytes = -(-num_bytes // (MAX_PARTS << 20))
    return max(REMOTE_PART_BYTES, mebibytes << 20)


def _name(entry: dict[str, Any]) -> str:
    return str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]
