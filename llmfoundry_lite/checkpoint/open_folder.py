"""A path or URL that a user gives -> its folder, and errors for its files. No torch, and fsspec for a URL alone."""

import errno
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from llmfoundry_lite.checkpoint.folder import Folder
from llmfoundry_lite.checkpoint.local_folder import NO_FILE, LocalFolder
from llmfoundry_lite.checkpoint.remote_folder import RemoteFolder, RenewingFilesystem
from llmfoundry_lite.errors import (
    CheckpointError,
    DamagedCheckpointError,
    IncompleteCheckpointError,
    UnreadableCheckpointError,
    UnsoundCheckpointError,
    is_masked,
    is_transient,
    learn_credentials,
)
from llmfoundry_lite.files import check_url_spelling
from llmfoundry_lite.retry import first_line

BOTOCORE_ATTEMPTS, S3_ATTEMPTS = 2, 3
"""Attempts of botocore at a request, and of s3fs at a request of botocore."""


def open_folder(url: str | os.PathLike[str]) -> Folder:
    """Return the folder of a path or URL. Raises CheckpointError if the protocol's package is not installed, or a
    client would read another folder."""
    text = os.fspath(url)
    protocol, separator, rest = text.partition("://")
    if "${oc." in text:
        raise CheckpointError(
            f"{text}: recorded as it was written, and only a launch resolves it; give the folder itself"
        )
    if is_masked(text):
        raise CheckpointError(
            f"{text}: credentials are not recorded; give the URL with them, in a YAML by ${{oc.env:NAME}}"
        )
    learn_credentials(text)
    check_url_spelling(text)
    if not separator:
        return LocalFolder(Path(os.path.expanduser(text)))
    if protocol in ("file", "local"):
        return LocalFolder(Path(rest))
    # fsspec splits an URL at `::`; s3fs cuts it at `?versionId=`, takes a newline for its end, and lists nothing of a
    # folder whose path has `//`, though it writes there.
    is_wrong = {part: part in text for part in ("::", "?versionId=", *"\n\r\0")} | {"//": "//" in rest.strip("/")}
    if wrong := next((part for part, is_here in is_wrong.items() if is_here), None):
        raise CheckpointError(f"{text!r}: {wrong!r} is not possible in the URL of a folder; give another name")
    import fsspec

    try:
        filesystem, path = fsspec.core.url_to_fs(text, **_options_of(protocol))
    except ImportError as error:
        is_s3 = protocol in ("s3", "s3a")
        remedy = "pip install 'llmfoundry-lite[s3]'" if is_s3 else f"install the package it names: {error}"
        raise CheckpointError(f"{text}: {protocol}:// needs a package that is not installed; {remedy}") from None
    except Exception as error:  # an unknown protocol, or a client that connects to its server at once
        raise CheckpointError(f"{text}: {first_line(error)}") from error
    loop = getattr(filesystem, "loop", None)
    if loop is not None:
        loop.set_exception_handler(_handle_unawaited)
    if hasattr(filesystem, "call_s3"):
        type(filesystem).retries = S3_ATTEMPTS  # s3fs takes it from the class
    url = text.rstrip("/")
    return RemoteFolder(RenewingFilesystem(filesystem, url), path, url)


def _handle_unawaited(loop: Any, context: dict[str, Any]) -> None:
    """Handle what asyncio reports of fsspec's loop, beside what its calls raise: drop lost links, print the rest.

    aiohttp sends a request in a task of its own (`ClientRequest.write_bytes`). If the server has closed the connection,
    that task fails too, and nobody awaits it. The request itself raises to its caller, who tries again or reports it.
    asyncio would print a traceback for each attempt.
    """
    is_unawaited = "never retrieved" in context.get("message", "")
    if is_unawaited and is_transient(context.get("exception")):
        return
    loop.default_exception_handler(context)


def _options_of(protocol: str) -> dict[str, Any]:
    """Return options of the client. Unless the user has set a number of attempts, botocore makes few, because s3fs and
    `retry_transient_errors` repeat them: by default all three together make 100, and take minutes to report a bucket
    that is down."""
    if protocol not in ("s3", "s3a") or _user_sets_attempts():
        return {}
    from fsspec.config import conf

    # What is given here replaces the option of the user's fsspec configuration, such as path-style addresses.
    given: dict[str, Any] = {}
    for name in ("s3", "s3a"):
        given |= conf.get(name, {}).get("config_kwargs") or {}
    if "retries" in given:
        return {}
    return {"config_kwargs": {**given, "retries": {"total_max_attempts": BOTOCORE_ATTEMPTS, "mode": "standard"}}}


def _user_sets_attempts() -> bool:
    """Return whether a variable or the user's AWS configuration file has a number of attempts."""
    try:
        from botocore.session import get_session

        return get_session().get_config_variable("max_attempts") is not None
    except Exception:  # botocore is not installed, or cannot read that file: the client says so when it is opened
        return "AWS_MAX_ATTEMPTS" in os.environ


def unreadable(folder: Folder, name: str, error: OSError) -> UnsoundCheckpointError:
    """Return the error for a file that is not there, or that this machine cannot read. Neither is damage."""
    reason = error.strerror or str(error)
    if error.errno in NO_FILE or isinstance(error, FileNotFoundError):
        is_missing = error.errno == errno.ENOENT or error.errno is None
        return IncompleteCheckpointError(f"{folder.url}/{name}: {'missing' if is_missing else reason}", name)
    host = socket.gethostname()
    return UnreadableCheckpointError(f"{folder.url}/{name}: cannot be read on host {host}: {reason}", name)


def check_files(folder: Folder, expected: Mapping[str, int]) -> None:
    """Check files by name -> bytes, with one listing a folder. Raises IncompleteCheckpointError for one that is not
    there, DamagedCheckpointError for one of another size, and OSError.

    A network disk may list what was there a moment ago, so a file that differs is opened.
    """
    parents = {name.rpartition("/")[0] for name in expected}
    sizes = {parent: (folder.child(parent) if parent else folder).sizes() for parent in parents}
    for path, num_bytes in expected.items():
        parent, _, name = path.rpartition("/")
        if sizes[parent].get(name) != num_bytes:
            try:
                source = folder.source(path, bypass_cache=True)
            except (FileNotFoundError, IsADirectoryError):
                raise IncompleteCheckpointError(f"{folder.url}/{path}: missing", path) from None
            source.close()
            if source.num_bytes != num_bytes:
                sizes = f"has {source.num_bytes:,} bytes, expected {num_bytes:,}"
                raise DamagedCheckpointError(f"{folder.url}/{path}: {sizes}", path)
