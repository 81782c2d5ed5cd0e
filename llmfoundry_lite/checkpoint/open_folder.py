"""A path or URL that a user gives -> its folder. No torch, and fsspec for a URL alone."""

import os
from pathlib import Path

from llmfoundry_lite.checkpoint.folders import Folder, first_line
from llmfoundry_lite.checkpoint.local_folder import LocalFolder
from llmfoundry_lite.checkpoint.remote_folder import RemoteFolder, RenewingFilesystem
from llmfoundry_lite.errors import CheckpointError, is_masked


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
        filesystem, path = fsspec.core.url_to_fs(text)
    except ImportError as error:
        is_s3 = protocol in ("s3", "s3a")
        remedy = "pip install 'llmfoundry-lite[s3]'" if is_s3 else f"install the package it names: {error}"
        raise CheckpointError(f"{text}: {protocol}:// needs a package that is not installed; {remedy}") from None
    except Exception as error:  # a protocol that no one knows; a server that some clients connect to at once
        raise CheckpointError(f"{text}: {first_line(error)}") from error
    return RemoteFolder(RenewingFilesystem(filesystem), path, text.rstrip("/"))
