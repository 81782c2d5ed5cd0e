"""A folder behind an fsspec URL, such as a bucket. There are no renames and no syncs: a save commits with its last put.

`RenewingFilesystem` wraps an fsspec file system: it renews expired credentials, and tells the user when there is no
answer. `RemoteFolder` implements `Folder` with it; `RemoteSink` uploads a file and `RemoteSource` reads one.
`open_folder` makes them from a URL. No torch, and fsspec only when such a folder is opened.
"""

import contextlib
import errno
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from llmfoundry_lite.bounded import read_up_to
from llmfoundry_lite.checkpoint.folder import Buffer
from llmfoundry_lite.errors import has_expired, is_transient
from llmfoundry_lite.retry import NoAnswerError, as_os_errors, retry_transient_errors

REMOTE_PART_BYTES = 16 << 20
MAX_PARTS = 10_000
"""S3's limits on an upload: 10,000 parts of 5 MiB to 5 GiB, the last of any size. 16 MiB are enough up to 156 GiB."""

REMOVALS_AT_ONCE = 16
"""Keys that are removed at the same time."""
WAIT_SECONDS = 2.0
"""Time after which the user is told which folder does not answer."""
WAIT_AGAIN_SECONDS = 30.0
"""Time after which the user is told again, if there was no answer meanwhile."""
note_wait: Callable[[str], None] | None = None
"""Function that tells the user that a folder does not answer, given a line of text. Programs set it."""
PATIENCE_SECONDS = 120.0
"""A usual `patience_seconds`. With s3fs, one failed call takes 90 s, so that a command ends after two of them."""
patience_seconds: float | None = None
"""Time without an answer after which a failed call is not tried again. None: as often as `retry_transient_errors` says,
which may take many minutes. Programs set it whose user waits at a terminal, but not a launch that trains."""
call_seconds: float | None = None
"""Time after which a call that has neither returned nor failed counts as unanswered. `limited_calls` sets it."""
LOCAL_METHODS = ("invalidate_cache", "split_path")
"""Methods of a file system that ask no server, so that their return does not count as an answer."""
GIVEN_UP_SECONDS = 5.0
"""Time after giving up in which further calls fail at once, because a command may ask again although it got no answer.
`watch` looks again later than that."""


@contextlib.contextmanager
def limited_calls(seconds: float) -> Iterator[None]:
    """Let calls of remote file systems in a `with` block raise NoAnswerError after `seconds` without an answer.

    Otherwise a call takes as long as its client tries. Meant for a process with one thread that asks.
    """
    global call_seconds
    call_seconds = seconds
    try:
        yield
    finally:
        call_seconds = None


def call_within(seconds: float, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call a function in another thread, and return its result or raise its error.

    Raises NoAnswerError if it has not ended after `seconds`. The thread then ends with the call, or with the process.
    """
    outcomes: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()

    def put_outcome() -> None:
        """Call the function, and pass its result or error on."""
        try:
            outcomes.put((function(*arguments, **options), None))
        except BaseException as error:
            outcomes.put((None, error))

    threading.Thread(target=put_outcome, daemon=True).start()
    try:
        result, error = outcomes.get(timeout=seconds)
    except queue.Empty:
        raise NoAnswerError(f"no answer for {seconds:g} s") from None
    if error is not None:
        raise error
    return result


class RenewingFilesystem:
    """An fsspec file system that renews expired credentials, and tells the user when a server does not answer.

    It has all attributes and methods of the file system that it wraps. If a call fails because the credentials have
    expired, the file system is made anew, which reads the credentials again, and the call is repeated. fsspec itself
    would return a cached file system with the old credentials. Several threads may use it.
    """

    def __init__(self, filesystem: Any, url: str = ""):
        """Wrap an fsspec file system. `url` names the folder in messages."""
        self.url = url
        """URL of the folder that was opened."""
        self._filesystem = filesystem
        self._lock = threading.Lock()
        self._has_noted = False
        """Whether the user has been told that the folder does not answer."""
        self._silent_since: float | None = None
        """When the first of the calls began that have failed since the last answer; None if none has. By the monotonic
        clock, as the times below."""
        self._given_up_at: float | None = None
        """When the last call was given up; None if none was."""
        self._given_up_text = ""
        self._next_note_at = 0.0
        """When the user may be told again. Several threads may wait at once."""

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the file system; a method is wrapped.

        The wrapped method calls the file system's, and once more after a renewal if the credentials have expired. It
        tells the user if the answer takes long, and raises NoAnswerError if there was none for `patience_seconds`,
        counted over all failed calls since the last answer.
        """
        used_filesystem = self._filesystem
        attribute = getattr(used_filesystem, name)
        if not callable(attribute) or name in LOCAL_METHODS:
            return attribute

        def call(*arguments: Any, **options: Any) -> Any:
            """Call the method, and once more after a renewal if the credentials have expired."""
            began = time.monotonic()
            self._check_patience(began)
            try:
                with self._noting_a_wait(began):
                    if call_seconds is None:
                        answer = attribute(*arguments, **options)
                    else:
                        answer = call_within(call_seconds, attribute, *arguments, **options)
            except NoAnswerError:
                raise  # not counted: the next call, which may have more time, is to be made
            except Exception as error:
                if not has_expired(error):
                    self._note_failure(error, began)
                    raise
            else:
                self._silent_since = None
                return answer

            # The credentials have expired. Another thread may have renewed them meanwhile.
            self.renew(used_filesystem)
            return getattr(self._filesystem, name)(*arguments, **options)

        return call

    def _check_patience(self, now: float) -> None:
        """Raise NoAnswerError at once if another call was given up less than GIVEN_UP_SECONDS before `now`."""
        if self._given_up_at is not None and now - self._given_up_at < GIVEN_UP_SECONDS:
            raise NoAnswerError(self._given_up_text)

    def _note_failure(self, error: Exception, began: float) -> None:
        """Record that a call which began at `began` has failed, and raise NoAnswerError if patience is at its end.

        That is so if no call had an answer for `patience_seconds`. An error that is not transient, such as a missing
        file, counts as an answer. Changes `_silent_since` and, when giving up, `_given_up_at` and `_given_up_text`.
        """
        if not is_transient(error):
            self._silent_since = None
            return
        if self._silent_since is None:
            self._silent_since = began
        now = time.monotonic()
        silent_seconds = now - self._silent_since
        if patience_seconds is not None and silent_seconds >= patience_seconds:
            self._silent_since = None
            self._given_up_at = now
            self._given_up_text = f"no answer for {silent_seconds:.0f} s"
            raise NoAnswerError(self._given_up_text) from error

    @contextlib.contextmanager
    def _noting_a_wait(self, began: float) -> Iterator[None]:
        """Tell the user if a `with` block takes longer than WAIT_SECONDS, and again every WAIT_AGAIN_SECONDS.

        `began` is when the block began. Nothing is told if no program has set `note_wait`, or if nobody waits for the
        block: in a launch that trains, that is so in all threads except the main one.
        """
        is_waited_for = patience_seconds is not None or threading.current_thread() is threading.main_thread()
        if note_wait is None or not is_waited_for:
            yield
            return

        # A second thread tells the user, because this one waits in the block.
        has_ended = threading.Event()
        threading.Thread(target=self._tell_of_wait, args=(has_ended, began), daemon=True).start()
        try:
            yield
        finally:
            has_ended.set()

    def _tell_of_wait(self, has_ended: threading.Event, began: float) -> None:
        """Tell the user after a while that the folder does not answer, and again until `has_ended` is set.

        Runs in a separate thread for each call that waits. `_has_noted` and `_next_note_at`, under the lock, make one
        thread tell for all of them.
        """
        if has_ended.wait(WAIT_SECONDS):
            return
        with self._lock:
            if not self._has_noted:
                self._has_noted = True
                self._next_note_at = time.monotonic() + WAIT_AGAIN_SECONDS - WAIT_SECONDS
                self._tell(f"waiting for {self.url}")

        # If this call repeats one that failed, the time since the first of them counts.
        silent_since = began if self._silent_since is None else self._silent_since
        next_note_at = max(self._next_note_at, silent_since + WAIT_AGAIN_SECONDS)
        while not has_ended.wait(max(0.0, next_note_at - time.monotonic())):
            now = time.monotonic()
            with self._lock:
                if now >= self._next_note_at:
                    self._next_note_at = now + WAIT_AGAIN_SECONDS
                    self._tell(f"still waiting for {self.url}, for {now - silent_since:.0f} s")
            next_note_at = self._next_note_at

    def _tell(self, line: str) -> None:
        """Tell the user a line of text, if a program wants to."""
        if note_wait is not None:
            note_wait(line)

    def renew(self, used_filesystem: Any = None) -> None:
        """Make the file system anew, so that it reads the credentials again.

        `used_filesystem` is the one that a call has failed with. If another thread has replaced it already, nothing is
        done. With None, it is made anew in any case.
        """
        with self._lock:
            if used_filesystem not in (None, self._filesystem):
                return
            expired = self._filesystem
            filesystem_class = type(expired)
            filesystem_class.clear_instance_cache()
            self._filesystem = filesystem_class(*expired.storage_args, **expired.storage_options)


class RemoteFolder:
    """A folder behind an fsspec URL. It has the methods of `Folder`, and those by which `PutCommits` commits."""

    path_here: Path | None = None
    max_open_files = 16

    def __init__(self, filesystem: RenewingFilesystem, path: str, url: str):
        """Use the folder at a path of an fsspec file system. It need not exist."""
        self.filesystem = filesystem
        self.path = path.rstrip("/")
        self.url = url
        """URL that the user gave. `path` alone may lack the host, and other ranks open this again."""

    def child(self, name: str) -> "RemoteFolder":
        """Return the folder of this name in this folder. It need not exist."""
        return RemoteFolder(self.filesystem, f"{self.path}/{name}", f"{self.url}/{name}")

    def parent(self) -> "RemoteFolder":
        """Return the folder that this folder is in."""
        path, _, _ = self.path.rpartition("/")
        url, _, _ = self.url.rstrip("/").rpartition("/")
        return RemoteFolder(self.filesystem, path, url)

    def make(self, *, with_parents: bool = False) -> None:
        """Do nothing: a put creates the folders above it."""

    def names(self) -> list[str]:
        """Return the sorted names of files and folders directly in this folder. Empty if it does not exist."""
        return sorted({_name_of(entry) for entry in self.entries()} - {""})

    def folders(self) -> list[str]:
        """Return the sorted names of the folders directly in this folder, from one listing."""
        return sorted({_name_of(entry) for entry in self.entries() if entry["type"] == "directory"} - {""})

    def sizes(self) -> dict[str, int]:
        """Return the bytes of each file directly in this folder, from one listing."""
        return {_name_of(entry): int(entry["size"] or 0) for entry in self.entries() if entry["type"] == "file"}

    def tree_sizes(self) -> dict[str, int]:
        """Return the bytes of each file below this folder, by its path in it."""
        prefix = f"{self.path.strip('/')}/"

        def list_sizes() -> dict[str, int]:
            self.filesystem.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                entries = self.filesystem.find(self.path, detail=True)
                paths = {path.strip("/"): int(entry["size"] or 0) for path, entry in entries.items()}
                # Some stores find by prefix, and `ba20` is a prefix of `ba200`.
                return {path.removeprefix(prefix): size for path, size in paths.items() if path.startswith(prefix)}
            return {}

        return retry_transient_errors(list_sizes)

    def entries(self) -> list[dict[str, Any]]:
        """List this folder, past fsspec's cache: a dict with `name`, `size` and `type` for each file and folder in it.

        Returns an empty list if the folder does not exist. Raises OSError.
        """

        def list_entries() -> list[dict[str, Any]]:
            self.filesystem.invalidate_cache()
            with contextlib.suppress(FileNotFoundError):
                return self.filesystem.ls(self.path, detail=True)
            return []

        return retry_transient_errors(list_entries)

    def exists(self) -> bool:
        """Return whether there is anything in this folder."""
        return bool(self.names())

    def read(self, name: str, max_bytes: int) -> bytes:
        """Return at most `max_bytes` + 1 bytes of a file, so that the caller sees whether there are more.

        Raises FileNotFoundError if it is absent, and OSError.
        """

        def read_start() -> bytes:
            self.filesystem.invalidate_cache()
            path = f"{self.path}/{name}"
            if "http" in self.filesystem.protocol:
                # A server may answer with the whole file, however few bytes are asked for, so the answer is streamed.
                with self.filesystem.open(path, "rb", block_size=0) as file:
                    return read_up_to(file, max_bytes + 1)
            try:
                return self.filesystem.cat_file(path, start=0, end=max_bytes + 1)
            except OSError:  # S3 refuses any range of an empty object
                if self.filesystem.info(path)["size"] == 0:
                    return b""
                raise

        return retry_transient_errors(read_start)

    def put(self, name: str, data: bytes, *, only_if_new: bool = False) -> None:
        """Write a file, whole or not at all. With `only_if_new`, raises FileExistsError if there is one. Raises
        OSError.

        A client or server without conditional puts may overwrite a file that appears at the same moment. The file is
        then read again, and the writer that does not find its own bytes gets the error.
        """
        path = f"{self.path}/{name}"
        if not only_if_new:
            retry_transient_errors(lambda: self.filesystem.pipe_file(path, data))
            return
        if name in self.names():
            raise FileExistsError(path)

        # Try a conditional put, by which the server decides. It is not repeated: if the answer to a put that succeeded
        # was lost, a second one would find the file.
        try:
            with as_os_errors():
                self.filesystem.pipe_file(path, data, mode="create")
            return
        except (TypeError, NotImplementedError, ValueError):  # a client without conditional put
            pass
        except OSError as error:  # a server without conditional put
            if error.errno != errno.ENOSYS:
                raise

        # Put the file, and see whose bytes are there.
        retry_transient_errors(lambda: self.filesystem.pipe_file(path, data))
        if self.read(name, len(data)) != data:
            raise FileExistsError(path)

    def remove(self, name: str) -> None:
        """Remove a file, if it is there."""
        retry_transient_errors(lambda: self._remove_key(f"{self.path}/{name}"))

    def version(self, name: str) -> str | None:
        """Return the version of a file, for `remove_version`, or None if the client has no versions. Raises OSError if
        the file is absent."""
        self.filesystem.invalidate_cache()
        info = retry_transient_errors(lambda: self.filesystem.info(f"{self.path}/{name}"))
        return info.get("ETag")

    def remove_version(self, name: str, version: str | None) -> bool:
        """Remove a file if it still has the version that `version` returned. Returns False if it has another one.

        If the version is None, or if the server has no conditional removal, the file is removed in any case. Returns
        True if the file is gone. Raises OSError.
        """
        if version is not None and hasattr(self.filesystem, "call_s3"):
            # Only S3 has conditional removals, and fsspec has no method for them.
            bucket, key, _ = self.filesystem.split_path(f"{self.path}/{name}")
            condition = {"Bucket": bucket, "Key": key, "IfMatch": version}
            try:
                retry_transient_errors(lambda: self.filesystem.call_s3("delete_object", **condition), ())
                return True
            except FileNotFoundError:
                return True
            except OSError as error:
                response = getattr(error.__cause__, "response", None) or {}
                error_code = response.get("Error", {}).get("Code")
                if error_code in ("PreconditionFailed", "412"):
                    return False
                has_no_conditions = error.errno in (errno.ENOSYS, errno.EINVAL, errno.EPERM)
                if not has_no_conditions:
                    raise
        self.remove(name)
        return True

    def abort_uploads(self, is_dead: Callable[[str], bool]) -> None:
        """Abort unfinished uploads of files below this folder.

        `is_dead` is called with the path of a file in this folder, and returns whether to abort its upload. Only S3
        needs this: it keeps, and bills, what an upload has sent until it is aborted. Other stores drop it after a week.
        Raises OSError.
        """
        if not hasattr(self.filesystem, "call_s3"):
            return

        # S3 lists uploads in pages. fsspec has no method for this.
        bucket, key, _ = self.filesystem.split_path(self.path)
        prefix = f"{key}/" if key else ""
        page_start: dict[str, str] = {}
        while True:
            page = self.filesystem.call_s3("list_multipart_uploads", Bucket=bucket, Prefix=prefix, **page_start)
            for upload in page.get("Uploads", []):
                upload_key = upload["Key"]
                if upload_key.startswith(prefix) and is_dead(upload_key.removeprefix(prefix)):
                    upload_id = upload["UploadId"]
                    with contextlib.suppress(FileNotFoundError):
                        self.filesystem.call_s3(
                            "abort_multipart_upload", Bucket=bucket, Key=upload_key, UploadId=upload_id
                        )
            if not page.get("IsTruncated"):
                return
            page_start = {"KeyMarker": page["NextKeyMarker"], "UploadIdMarker": page["NextUploadIdMarker"]}

    def remove_all(self) -> None:
        """Remove everything in this folder. Raises OSError.

        Keys are removed one by one, because fsspec's `rm` takes `[`, `*` and `?` in a path for a pattern.
        """

        def remove_keys() -> None:
            with ThreadPoolExecutor(REMOVALS_AT_ONCE, thread_name_prefix="checkpoint-remove") as pool:
                list(pool.map(self._remove_key, self._find_keys()))
            # The folders, the innermost first. A store without folders has none.
            for path in sorted(self._find_keys(with_folders=True), key=len, reverse=True):
                self.filesystem.rmdir(path)

        retry_transient_errors(remove_keys)

    def _find_keys(self, *, with_folders: bool = False) -> list[str]:
        """Return the paths of all files below this folder, and of folders too `with_folders`.

        If a file has the folder's name, it is the only one. Returns an empty list if there is nothing.
        """
        self.filesystem.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            paths = self.filesystem.find(self.path, withdirs=with_folders)
            # Some stores find by prefix, and `ba20` is a prefix of `ba200`.
            folder_prefix = f"{self.path.strip('/')}/"
            return [path for path in paths if f"{path.strip('/')}/".startswith(folder_prefix)]
        return []

    def _remove_key(self, path: str) -> None:
        """Remove a key, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self.filesystem.rm_file(path)

    def sink(self, name: str, num_bytes: int) -> "RemoteSink":
        """Begin the upload of a file of `num_bytes`."""
        return RemoteSink(self.filesystem, f"{self.path}/{name}", part_bytes(num_bytes))

    def source(self, name: str, *, bypass_cache: bool = False) -> "RemoteSource":
        """Open a file for reading. With `bypass_cache`, fsspec's listings are dropped first."""
        if bypass_cache:
            self.filesystem.invalidate_cache()
        return RemoteSource(self.filesystem, f"{self.path}/{name}")


class RemoteSink:
    """A file being uploaded in parts, from its first byte to its last. The object appears when it is closed."""

    any_order = False

    def __init__(self, filesystem: RenewingFilesystem, path: str, part_bytes: int):
        """Begin an upload to a path, in parts of `part_bytes`. Raises OSError."""
        self.path = path
        self.filesystem = filesystem
        with as_os_errors():
            self._file = filesystem.open(path, "wb", block_size=part_bytes)
        self._offset = 0

    def write_at(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Send the bytes of all buffers. `offset` must be where the previous call ended. Raises OSError."""
        assert offset == self._offset, "an upload takes bytes in order"
        for buffer in buffers:
            data = memoryview(buffer).cast("B")
            with as_os_errors():
                self._file.write(data)
            self._offset += len(data)

    def close(self) -> None:
        """Complete the upload. Raises OSError."""
        with as_os_errors():
            self._file.close()

    def abandon(self) -> None:
        """Abort the upload, so that no object appears. Raises nothing, even if the store does not answer."""
        with contextlib.suppress(Exception):
            self._file.discard()
        with contextlib.suppress(Exception):
            self._file.closed = True  # otherwise fsspec completes the upload when the object is garbage-collected
        self.filesystem.renew()  # an upload belongs to the file system that began it; the next one begins afresh


class RemoteSource:
    """An object that is read by ranges of bytes, from any thread. Each range is a separate request."""

    def __init__(self, filesystem: RenewingFilesystem, path: str):
        """Look up the size of the object at a path. Raises FileNotFoundError and OSError."""
        self.filesystem = filesystem
        self.path = path
        self.num_bytes = int(retry_transient_errors(lambda: filesystem.info(path))["size"])

    def read_into(self, offset: int, buffers: Sequence[Buffer]) -> None:
        """Fill all buffers, one after the other, with the bytes of the object from `offset` on.

        Raises EOFError if the object ends before the buffers are full, and OSError.
        """
        end = offset + sum(len(buffer) for buffer in buffers)
        received = retry_transient_errors(lambda: self.filesystem.cat_file(self.path, start=offset, end=end))
        if len(received) != end - offset:
            raise EOFError(f"{self.path}: ends before byte {end}")

        unread = memoryview(received)
        for buffer in buffers:
            memoryview(buffer).cast("B")[:] = unread[: len(buffer)]
            unread = unread[len(buffer) :]

    def close(self) -> None:
        """Do nothing, because no connection stays open between requests."""


def part_bytes(num_bytes: int) -> int:
    """Return the size of the parts in which a file of `num_bytes` is uploaded.

    That is REMOTE_PART_BYTES or, if the file would have more than MAX_PARTS parts of this size, the smallest number of
    whole MiB with which it does not.
    """
    mebibytes = -(-num_bytes // (MAX_PARTS << 20))
    return max(REMOTE_PART_BYTES, mebibytes << 20)


def _name_of(entry: dict[str, Any]) -> str:
    """Return the name of a file or folder in fsspec's listing: the last part of its path."""
    return str(entry["name"]).rstrip("/").rsplit("/", 1)[-1]
