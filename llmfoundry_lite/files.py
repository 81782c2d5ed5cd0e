"""Atomic writes, locks, and checks of files that commands write. For checkpoints see `checkpoint.commit`."""

import errno
import fcntl
import json
import os
import re
import stat
import threading
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from llmfoundry_lite.errors import ConfigError

ANSWERS = (".json", ".md", ".png", ".pdf", ".svg", ".csv")
"""Suffixes of the files with a command's result. The JSON file is its record."""
MAX_RECORD_BYTES = 128 << 20
RECORDS = ({"schema", "bench"}, {"rows"}, {"runs", "comparisons"}, {"results", "comparisons"}, {"host", "findings"})
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


def meant_url(text: str) -> str:
    """Return the URL that a text probably means, if its scheme is misspelt and it would be taken for a local folder, as
    `s3:/bucket`, `gs//bucket` or `S3://bucket`; else empty.

    A folder of such a name is given as `./s3:/bucket`.
    """
    found = re.match(r"([A-Za-z][A-Za-z0-9-]*)([:;][/\\]*|//+)(.*)", text, re.DOTALL)
    if found is None:
        return ""
    word, separator, rest = found.groups()
    scheme = word.lower()
    has_colon = separator[0] in ":;"
    if scheme not in URL_SCHEMES or (scheme in LOCAL_WORDS and not has_colon):
        return ""
    right_separators = RIGHT_SEPARATORS.get(scheme, ("://",))
    if separator in right_separators:
        return "" if word == scheme else f"{scheme}{separator}{rest}"
    return f"{scheme}{right_separators[0]}{rest}"


def check_url_spelling(text: str) -> None:
    """Raise ConfigError for a URL whose scheme is misspelt."""
    if url := meant_url(text):
        raise ConfigError(f"did you mean {url}? For a local folder of the name that was given, write ./ before it")


def check_is_path(path: Path | str) -> None:
    """Raise ConfigError for a URL, because as a path `s3://b/x` is a local folder named `s3:`."""
    if meant_url(str(path)) or re.match(r"\w[\w+.-]+:/", str(path)):
        raise ConfigError(f"{path}: a URL given, expected a path of this machine; a folder of that name is ./{path}")


def check_replaceable(record: Path, others: Iterable[Path] = ()) -> None:
    """Raise ConfigError if one of the files exists and `record`, the JSON file, is no earlier result of a command.

    The folder may be another user's, so a link is refused too, which may lead anywhere, and a pipe, which would be
    waited for.
    """
    check_is_path(record)
    there = [path for path in (record, *others) if os.path.lexists(path)]
    if link := next((path for path in there if path.is_symlink()), None):
        raise ConfigError(f"{link}: a link, which would be written through; name another folder, or remove it")
    if other := next((path for path in there if not path.is_file()), None):
        raise ConfigError(f"{other}: exists and is no regular file; name another folder, or remove it")
    if there and not _is_record(record):
        raise ConfigError(f"{there[0]}: exists and is no earlier answer of this command; name another, or remove it")


def check_answer_replaceable(folder: Path, name: str) -> None:
    """Check NAME.json, NAME.md, NAME.png and the like, as `check_replaceable` does."""
    check_replaceable(folder / f"{name}.json", [folder / f"{name}{suffix}" for suffix in ANSWERS])


def _is_record(path: Path) -> bool:
    with suppress(OSError, ValueError, RecursionError), open(path, "rb", opener=open_regular) as file:
        content = json.loads(file.read(MAX_RECORD_BYTES))
        return isinstance(content, dict) and any(keys <= content.keys() for keys in RECORDS)
    return False


def open_regular(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a file and return its descriptor, as an `opener` for `open`. Raises IsADirectoryError for anything but a
    regular file, because a pipe would make its reader wait for ever."""
    return _open_regular(path, flags, 0o666)


def open_own(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a file, as `open_regular` does, in a folder that others write into. A new file is private to this user.
    Raises OSError for a link, which may lead anywhere, and PermissionError for another user's file."""
    descriptor = _open_regular(path, flags | os.O_NOFOLLOW, 0o600)
    if (owner := os.fstat(descriptor).st_uid) == os.geteuid():
        return descriptor
    os.close(descriptor)
    raise PermissionError(errno.EPERM, f"belongs to user {owner}", str(path))


def open_no_link(path: str | Path, flags: int = os.O_RDONLY) -> int:
    """Open a file, as `open_regular` does, to write into a run folder, which somebody else may have made.

    Raises OSError for a link, which may lead to any file of this user. The folder itself may be a link.
    """
    try:
        return _open_regular(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise OSError(errno.ELOOP, "a link, which would be written through; remove it", str(path)) from None


def _open_regular(path: str | Path, flags: int, mode: int) -> int:
    kind = 0
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK, mode)
        if stat.S_ISREG(kind := os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a socket
            raise
    what = os.strerror(errno.EISDIR) if stat.S_ISDIR(kind) else "not a regular file"
    raise IsADirectoryError(errno.EISDIR, what, str(path))


def write_atomically(path: Path, content: str | bytes | memoryview) -> None:
    """Replace `path` by `content` (text as UTF-8), entirely or not at all. Raises OSError."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}.unfinished")
    try:
        with open(unfinished, "wb", opener=open_no_link) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except OSError:
        unfinished.unlink(missing_ok=True)
        raise


def lock_folder(folder: Path) -> int:
    """Open a folder and lock it, if its file system can lock. Raises BlockingIOError if another process holds the lock.
    The lock ends with the returned descriptor, however this process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise
    except OSError:  # the file system has no locks
        pass
    return descriptor


def sync_folder(folder: Path) -> None:
    """Sync the files of a folder, and the folder itself, to disk. Call this before it is renamed."""
    for path in [*folder.iterdir(), folder]:
        sync(path)


def sync(path: Path) -> None:
    """Sync a file, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
