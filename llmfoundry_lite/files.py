"""Read, write and lock local files safely, and check the paths and URLs that users write.

The parts are independent: spelling of URLs (`check_url_spelling`, `check_is_path`), what exists (`exists`, `is_file`),
whether a command may replace a file (`check_replaceable`), openers that refuse pipes and links (`open_regular`,
`open_own`, `open_no_link`), and writes that survive a crash (`write_atomically`, `lock_folder`, `sync_folder`).
Checkpoints are published by `checkpoint/commit.py`, and `bounded.py` limits how much of a file is read.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import stat
import threading
from collections.abc import Iterable
from pathlib import Path

from llmfoundry_lite.errors import ConfigError

RESULT_SUFFIXES = (".json", ".md", ".png", ".pdf", ".svg", ".csv", ".tex")
"""Suffixes of the files with a command's result. The JSON file is its record."""
MAX_RESULT_BYTES = 128 << 20
"""Maximum number of bytes that are read of a file to see whether it is a command's result."""
RESULT_KEYS = ({"schema", "bench"}, {"rows"}, {"runs", "comparisons"}, {"results", "comparisons"}, {"host", "findings"})
"""Keys by which the records of a bench, `benchmarks memory`, `report`, `compare` and `doctor` are recognised."""

URL_SCHEMES = (
    *("s3", "s3a", "gs", "gcs", "hf", "az", "abfs", "abfss", "adl", "azure", "azure-dl", "oci", "dbfs", "alipan"),
    *("sftp", "ssh", "ftp", "http", "https", "hdfs", "webhdfs", "file", "memory"),
)
"""Schemes of URLs by which fsspec, or the transport of data sets, finds folders that runs use."""
RIGHT_SEPARATORS = {"hf": ("://", ":", ":///"), "dbfs": ("://", ":/"), "file": (":///", "://")}
"""Scheme -> what may follow it, the usual first, where that is not `://` alone: `hf:NAME` is a model or a data set,
`hf:///folder` a folder in the Hub's format, `dbfs:/` a folder of Databricks."""
LOCAL_WORDS = ("file", "memory", "ssh", "azure")
"""Schemes that are also usual names of folders, so that `file//x` is one."""


def guess_url(text: str) -> str:
    """Return the URL that a misspelt text probably means; empty if it is a correct URL or the name of a local folder.

    `s3:/bucket`, `gs//bucket` and `S3://bucket` would be taken for local folders without this check; the URL that they
    mean is `s3://bucket`, `gs://bucket` and `s3://bucket`. A folder that really has such a name can be given as
    `./s3:/bucket`.
    """
    # Split a word from what may be a separator: a colon or a semicolon with any slashes, or two slashes.
    match = re.match(r"([A-Za-z][A-Za-z0-9-]*)([:;][/\\]*|//+)(.*)", text, re.DOTALL)
    if match is None:
        return ""
    word, separator, path = match.groups()

    # Only words that are a URL's scheme are corrected.
    scheme = word.lower()
    has_colon = separator[0] in ":;"
    may_be_folder = scheme in LOCAL_WORDS and not has_colon
    if scheme not in URL_SCHEMES or may_be_folder:
        return ""

    # The separator may be wrong, or the scheme may be in upper case.
    right_separators = RIGHT_SEPARATORS.get(scheme, ("://",))
    if separator not in right_separators:
        return f"{scheme}{right_separators[0]}{path}"
    is_lower_case = word == scheme
    return "" if is_lower_case else f"{scheme}{separator}{path}"


def check_url_spelling(text: str) -> None:
    """Raise ConfigError, which suggests the right spelling, for a URL whose scheme or separator is misspelt."""
    url = guess_url(text)
    if url:
        raise ConfigError(f"did you mean {url}? For a local folder of the name that was given, write ./ before it")


def check_is_path(path: Path | str) -> None:
    """Raise ConfigError for a URL where only a local path can be written.

    As a path, `s3://b/x` would be a local folder named `s3:`.
    """
    has_scheme = re.match(r"\w[\w+.-]+:/", str(path)) is not None
    if has_scheme or guess_url(str(path)):
        raise ConfigError(f"{path}: a URL given, expected a path of this machine; a folder of that name is ./{path}")


def exists(path: str | Path) -> bool:
    """Return whether there is a file or folder at a path, which may be any text that a user has written.

    Text that cannot be a path, because it is too long for a file system, is not a file. Raises OSError if the system
    cannot tell, as on a disk that does not answer. `os.path.exists` would return False there.
    """
    return _stat(path) is not None


def is_file(path: str | Path) -> bool:
    """Return whether there is a regular file at a path, which may be any text, as `exists` does. Raises OSError."""
    status = _stat(path)
    return status is not None and stat.S_ISREG(status.st_mode)


def _stat(path: str | Path) -> os.stat_result | None:
    """Return the status of the file or folder at a path, following links; None if there is none.

    Raises OSError if the system cannot tell.
    """
    try:
        return os.stat(path)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # ValueError: the name contains a NUL
        return None
    except OSError as error:
        # The name is too long, or its links form a circle.
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            return None
        raise


def check_replaceable(record: Path, others: Iterable[Path] = ()) -> None:
    """Check that a command may write its result over existing files, so that it never destroys a user's own file.

    `record` is the JSON file of the result, and `others` are the files written beside it. If any of them exists,
    `record` has to be an earlier result of a command: a folder with `report.json` of an earlier report may be written
    again, one with only a `report.md` of the user may not.

    Raises ConfigError otherwise, and for links and anything but regular files. The folder may belong to another user:
    writing through a link could change any file, and opening a pipe would block.
    """
    check_is_path(record)
    existing = [path for path in (record, *others) if os.path.lexists(path)]  # broken links count as existing
    for path in existing:
        if path.is_symlink():
            raise ConfigError(f"{path}: a link, which would be written through; name another folder, or remove it")
    for path in existing:
        if not path.is_file():
            raise ConfigError(f"{path}: exists and is not a regular file; name another folder, or remove it")
    if existing and not _is_result(record):
        raise ConfigError(f"{existing[0]}: exists and was not written by this command; name another, or remove it")


def check_result_replaceable(folder: Path, name: str) -> None:
    """Check that a command may write NAME.json, NAME.md, NAME.png and the like into a folder.

    Raises ConfigError as `check_replaceable` does.
    """
    check_replaceable(folder / f"{name}.json", [folder / f"{name}{suffix}" for suffix in RESULT_SUFFIXES])


def _is_result(path: Path) -> bool:
    """Return whether a file is the JSON result of one of our commands, which `RESULT_KEYS` identify."""
    try:
        with open(path, "rb", opener=open_regular) as file:
            content = json.loads(file.read(MAX_RESULT_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and any(keys <= content.keys() for keys in RESULT_KEYS)


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file and return its descriptor. Pass this as `opener` to `open`.

    Raises IsADirectoryError for anything else, because reading a pipe would block without end. Raises OSError if the
    file cannot be opened.
    """
    return _open_regular(path, flags, 0o666)


def open_own(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file that belongs to this user, in a folder such as /tmp into which other users write.

    A file that this creates can be read by this user alone. Raises OSError for a link, which another user may have made
    to lead anywhere, PermissionError for another user's file, and IsADirectoryError for anything but a regular file.
    """
    descriptor = _open_regular(path, flags | os.O_NOFOLLOW, 0o600)
    owner = os.fstat(descriptor).st_uid
    if owner != os.geteuid():
        os.close(descriptor)
        raise PermissionError(errno.EPERM, f"belongs to user {owner}", str(path))
    return descriptor


def open_no_link(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a regular file, but do not follow a link. Use this to write into a run folder that somebody else may have
    made.

    Raises OSError for a link, because it may lead to any file of this user, and IsADirectoryError for anything but a
    regular file. The folder itself may be a link.
    """
    try:
        return _open_regular(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "a link, which would be written through; remove it", str(path)) from None


def _open_regular(path: str | Path, flags: int, mode: int) -> int:
    """Open a regular file with the flags and mode of `os.open`, and return its descriptor.

    Raises IsADirectoryError for folders, pipes, sockets and devices, so that callers handle a single error, and OSError
    if the file cannot be opened.
    """
    explanation = "not a regular file"
    try:
        # O_NONBLOCK, because opening a pipe would otherwise wait for its other end.
        descriptor = os.open(path, flags | os.O_NONBLOCK, mode)
        file_type = os.fstat(descriptor).st_mode
        if stat.S_ISREG(file_type):
            return descriptor
        os.close(descriptor)
        if stat.S_ISDIR(file_type):
            explanation = os.strerror(errno.EISDIR)
    except OSError as error:
        # The system does not open sockets at all.
        is_socket = error.errno == errno.ENXIO
        if not is_socket:
            raise
    raise IsADirectoryError(errno.EISDIR, explanation, str(path))


def write_atomically(path: Path, content: str | bytes | memoryview) -> None:
    """Replace a file, so that readers see either the old content or all of the new, even after a crash.

    Text is written as UTF-8. The new content is synced to disk under a temporary name, which is then renamed. Raises
    OSError, and then the old file is unchanged.
    """
    # The name is hidden, and differs for each process and thread that writes the same file.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.unfinished")
    encoded = content.encode() if isinstance(content, str) else content
    try:
        with open(unfinished, "wb", opener=open_no_link) as file:
            file.write(encoded)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def lock_folder(folder: Path, *, is_shared: bool = False) -> int:
    """Lock a folder for this process, and return the descriptor that holds the lock until it is closed.

    The system closes the descriptor however this process ends. Several processes may hold a shared lock at the same
    time, but none beside one that is not shared. Raises BlockingIOError if another process holds the lock. On a file
    system without locks, the folder is only opened.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:
        pass  # the file system has no locks
    return descriptor


def sync_folder(folder: Path) -> None:
    """Sync the files of a folder to disk, then the folder itself. Call this before a rename publishes the folder.

    Otherwise a crash soon after the rename may leave files without their content. Raises OSError.
    """
    for path in [*folder.iterdir(), folder]:
        sync(path)


def rename_unless_present(folder: Path, target: Path) -> bool:
    """Rename a folder, unless there is one with content under the new name already. Then remove this one.

    Of several processes that publish a folder under one name, on one machine or on several that share a disk, only the
    first one does. Returns whether it was this one. Raises OSError.
    """
    try:
        folder.rename(target)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        shutil.rmtree(folder)
        return False
    return True


def sync(path: Path) -> None:
    """Write a file's content, or the list of a folder's files, from the system's cache to disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
