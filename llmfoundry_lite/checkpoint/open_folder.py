"""Opens the folder of a path or URL that a user gives, and makes errors about its files. No torch.

`open_folder` chooses between `LocalFolder` and `RemoteFolder`, and configures fsspec's client for the latter. fsspec is
imported only for URLs.
"""

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
    remember_url_secrets,
)
from llmfoundry_lite.files import check_url_spelling
from llmfoundry_lite.retry import first_line

BOTOCORE_ATTEMPTS, S3_ATTEMPTS = 2, 3
"""How often botocore tries a request, and how often s3fs tries a request of botocore."""
WRONG_IN_URLS = ("::", "?versionId=", "\n", "\r", "\0")
"""fsspec splits a URL at `::`. s3fs cuts it at `?versionId=`, and takes a newline for its end."""


def open_folder(url: str | os.PathLike[str]) -> Folder:
    """Return the folder of a path or URL, such as `runs/mpt/checkpoints`, `file:///data/run` or `s3://bucket/run`.

    Nothing is read, and the folder need not exist. Secrets in the URL are remembered, so that no message shows them.
    Raises CheckpointError if the URL was taken from a record that hides its credentials, if it is spelled so that a
    client would open another folder, or if a package that its protocol needs is not installed.
    """
    # A configuration or a report records URLs without their secrets, and somebody may have copied one from there.
    text = os.fspath(url)
    if "${oc." in text:
        raise CheckpointError(
            f"{text}: recorded as it was written, and only a launch resolves it; give the folder itself"
        )
    if is_masked(text):
        raise CheckpointError(
            f"{text}: credentials are not recorded; give the URL with them, in a YAML by ${{oc.env:NAME}}"
        )
    remember_url_secrets(text)
    check_url_spelling(text)

    protocol, separator, path = text.partition("://")
    if not separator:
        return LocalFolder(Path(os.path.expanduser(text)))
    if protocol in ("file", "local"):
        return LocalFolder(Path(path))

    # Some spellings would make a client open another folder without an error.
    wrong_parts = [part for part in WRONG_IN_URLS if part in text]
    if "//" in path.strip("/"):  # s3fs writes to such a folder, and lists nothing of it
        wrong_parts.append("//")
    if wrong_parts:
        raise CheckpointError(f"{text!r}: {wrong_parts[0]!r} is not possible in the URL of a folder; give another name")
    filesystem, path = open_filesystem(text)
    return RemoteFolder(filesystem, path, filesystem.url)


def open_filesystem(url: str) -> tuple[RenewingFilesystem, str]:
    """Return the fsspec file system of a URL, and the path of the URL in it.

    Changes the client: its event loop gets a handler for lost connections, and s3fs the number of attempts. Raises
    CheckpointError if fsspec does not know the protocol or lacks a package for it, or if the client refuses the URL.
    """
    import fsspec

    protocol, _, _ = url.partition("://")
    try:
        filesystem, path = fsspec.core.url_to_fs(url, **_client_options(protocol))
    except ImportError as error:
        is_s3 = protocol in ("s3", "s3a")
        remedy = "pip install 'llmfoundry-lite[s3]'" if is_s3 else f"install the package it names: {error}"
        raise CheckpointError(f"{url}: {protocol}:// needs a package that is not installed; {remedy}") from None
    except Exception as error:  # an unknown protocol, or a client that connects to its server at once
        raise CheckpointError(f"{url}: {first_line(error)}") from error

    loop = getattr(filesystem, "loop", None)
    if loop is not None:
        loop.set_exception_handler(_handle_unawaited)
    if hasattr(filesystem, "call_s3"):
        type(filesystem).retries = S3_ATTEMPTS  # s3fs reads it from the class
    return RenewingFilesystem(filesystem, url.rstrip("/")), path


def _handle_unawaited(loop: Any, context: dict[str, Any]) -> None:
    """Handle an error that asyncio reports from fsspec's event loop: ignore a lost connection, and print the others.

    The arguments are those of asyncio's exception handlers. aiohttp sends a request in a separate task
    (`ClientRequest.write_bytes`). If the server has closed the connection, that task fails, and nobody awaits it, so
    that asyncio would print a traceback for each attempt. The request itself raises to its caller, who tries again or
    reports it.
    """
    is_unawaited = "never retrieved" in context.get("message", "")
    if is_unawaited and is_transient(context.get("exception")):
        return
    loop.default_exception_handler(context)


def _client_options(protocol: str) -> dict[str, Any]:
    """Return options for fsspec's client of a protocol: for S3, a small number of attempts, unless the user has set
    one.

    botocore repeats a failed request, s3fs repeats the attempts of botocore, and `retry_transient_errors` those of
    s3fs. By default all three together make 100 attempts, and take minutes to report that a bucket does not answer.
    """
    if protocol not in ("s3", "s3a") or _user_sets_attempts():
        return {}
    from fsspec.config import conf

    # What is passed here replaces the same option of the user's fsspec configuration, so that has to be merged in. It
    # may ask for path-style addresses, for instance.
    config_options: dict[str, Any] = {}
    for name in ("s3", "s3a"):
        config_options |= conf.get(name, {}).get("config_kwargs") or {}
    if "retries" in config_options:
        return {}
    retries = {"total_max_attempts": BOTOCORE_ATTEMPTS, "mode": "standard"}
    return {"config_kwargs": {**config_options, "retries": retries}}


def _user_sets_attempts() -> bool:
    """Return whether an environment variable or the user's AWS configuration file sets the number of attempts."""
    try:
        from botocore.session import get_session

        return get_session().get_config_variable("max_attempts") is not None
    except Exception:  # botocore is not installed, or cannot read that file: the client says so when it is opened
        return "AWS_MAX_ATTEMPTS" in os.environ


def unreadable_file_error(folder: Folder, name: str, error: OSError) -> UnsoundCheckpointError:
    """Return the error about a file of a checkpoint that could not be opened or read because of `error`.

    That is IncompleteCheckpointError if the file is absent, and UnreadableCheckpointError, which names this host, if
    this machine cannot read it. Neither means that the file is damaged. `name` is relative to `folder`.
    """
    reason = error.strerror or str(error)
    is_absent = error.errno in NO_FILE or isinstance(error, FileNotFoundError)
    if is_absent:
        if error.errno in (errno.ENOENT, None):  # other reasons, such as a link in a circle, are shown
            reason = "missing"
        return IncompleteCheckpointError(f"{folder.url}/{name}: {reason}", name)
    host = socket.gethostname()
    return UnreadableCheckpointError(f"{folder.url}/{name}: cannot be read on host {host}: {reason}", name)


def check_files(folder: Folder, expected: Mapping[str, int]) -> None:
    """Check that files are present and have the expected number of bytes, without reading them.

    `expected` has the number of bytes by path, relative to `folder`, such as `{"shard-00000.safetensors": 8192}`. Each
    folder is listed once, which is faster than opening each file.

    Raises IncompleteCheckpointError for an absent file, DamagedCheckpointError for one of another size, and OSError.
    """
    sizes_by_parent: dict[str, dict[str, int]] = {}  # "" stands for `folder` itself
    for path, num_bytes in expected.items():
        parent, _, name = path.rpartition("/")
        if parent not in sizes_by_parent:
            parent_folder = folder.child(parent) if parent else folder
            sizes_by_parent[parent] = parent_folder.sizes()
        if sizes_by_parent[parent].get(name) == num_bytes:
            continue

        # A network disk may list what was there a moment ago, so a file that differs in the listing is opened.
        try:
            source = folder.source(path, bypass_cache=True)
        except (FileNotFoundError, IsADirectoryError):
            raise IncompleteCheckpointError(f"{folder.url}/{path}: missing", path) from None
        source.close()
        if source.num_bytes != num_bytes:
            sizes = f"has {source.num_bytes:,} bytes, expected {num_bytes:,}"
            raise DamagedCheckpointError(f"{folder.url}/{path}: {sizes}", path)
