"""Paths and URLs that users give: a checkpoint, a folder of checkpoints or a run directory. No torch.

These functions find the checkpoints, refuse what is not a checkpoint or must not be overwritten, and read and write the
run's tokenizer beside the checkpoints.
"""

import contextlib
import os
import shlex
from pathlib import Path

from llmfoundry_lite.bounded import MAX_TOKENIZER_BYTES
from llmfoundry_lite.checkpoint.commit import COMMITTED, Checkpoint
from llmfoundry_lite.checkpoint.lease import FOLDER as LEASES
from llmfoundry_lite.checkpoint.local_folder import LocalFolder
from llmfoundry_lite.checkpoint.manifest import FORMAT, HEAD_BYTES, MANIFEST
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.errors import CheckpointError, DamagedCheckpointError
from llmfoundry_lite.files import check_is_path

INSIDE_A_RUN = "checkpoints"
"""Folder of checkpoints in a run directory."""
TOKENIZER = "tokenizer"
"""Folder beside a run's checkpoints that holds the files of the run's tokenizer."""
TOKENIZER_FILE = "tokenizer.json"
"""The file of that folder that is written last, so that its presence says that all files are there."""


def folder_of_checkpoints(url: str) -> str:
    """Return the folder of checkpoints inside a run directory, `<url>/checkpoints`, or `url` itself if there is none.

    Only local run directories are recognised.
    """
    path = open_folder(url).path_here
    if path is not None and (path / INSIDE_A_RUN).is_dir():
        return str(path / INSIDE_A_RUN)
    return url


def check_outside_checkpoints(target: Path) -> None:
    """Raise CheckpointError if a file or folder that is about to be written could damage checkpoints.

    That is so if `target` lies in a checkpoint or in a run's hidden folders, or if it has the name of a checkpoint in a
    folder of checkpoints, where a relay or a launch would take it for one. Raises ConfigError for a URL.
    """
    check_is_path(target)
    target = target.absolute()
    # Look at the path as it was given and with links resolved, and at each folder above it.
    for path in {target, target.resolve()}:
        for folder in (path, *path.parents):
            has_reserved_name = COMMITTED.fullmatch(folder.name) or folder.name.startswith(".")
            if _is_checkpoint(folder) or (has_reserved_name and _holds_checkpoints(folder.parent)):
                raise CheckpointError(
                    f"{target}: {folder} is a checkpoint, or has the name of one in a folder of checkpoints; give a "
                    "place outside it, or another name"
                )


def _holds_checkpoints(folder: Path) -> bool:
    """Return whether a local folder holds checkpoints, or the leases of a run that saves there. False if it cannot be
    listed."""
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
        if LEASES in names:
            return True
        return any(COMMITTED.fullmatch(name) and _is_checkpoint(folder / name) for name in names)
    return False


def _is_checkpoint(folder: Path) -> bool:
    """Return whether a local folder has a manifest of our format. The manifest may be damaged further on."""
    with contextlib.suppress(OSError):
        return FORMAT.encode() in LocalFolder(folder).read(MANIFEST, HEAD_BYTES)
    return False


def check_not_foreign(url: str) -> None:
    """Raise CheckpointError, which says how to import them, if a path leads to weights in another format.

    Recognised are a single file, checkpoints of Composer and DCP, and Hugging Face folders, all on this machine. Other
    paths and URLs pass.
    """
    path = open_folder(url).path_here
    if path is None:
        return
    advice = "then load_path=OUT load_weights_only=true begins a run with its weights"
    quoted = shlex.quote(url)
    if path.is_file():
        raise CheckpointError(
            f"{url}: a file, and a checkpoint is a folder; `llmfoundry-lite checkpoint import {quoted} OUT` makes one "
            f"of a checkpoint of Composer or LLM Foundry (a pickle: add --trust-pickle), {advice}"
        )
    formats = {".metadata": ("of Composer or DCP", " --trust-pickle"), "config.json": ("a Hugging Face folder", "")}
    for file_name, (format_name, option) in formats.items():
        if (path / file_name).is_file():
            raise CheckpointError(
                f"{url}: {format_name}, not a portable checkpoint; `llmfoundry-lite checkpoint import {quoted} "
                f"OUT{option}` makes one, {advice}"
            )


def put_tokenizer(url: str, files: dict[str, bytes]) -> None:
    """Write a tokenizer's files beside the checkpoints of a run, unless a tokenizer is there already.

    url: the folder of checkpoints. The files go to its folder `tokenizer`.
    files: the content by file name.

    Raises OSError.
    """
    folder = open_folder(url).child(TOKENIZER)
    if TOKENIZER_FILE in folder.names():
        return
    folder.make()
    for name in sorted(files, key=lambda name: name == TOKENIZER_FILE):  # False comes before True
        folder.put(name, files[name])


def read_tokenizer(checkpoint: Checkpoint, names: tuple[str, ...]) -> dict[str, bytes]:
    """Read the files of the tokenizer beside a checkpoint, which `put_tokenizer` has written.

    Returns the content by name of those files in `names` that are there. Returns nothing if a file cannot be read or is
    larger than MAX_TOKENIZER_BYTES, so that the caller does not get half a tokenizer.
    """
    folder = checkpoint.folder.parent().child(TOKENIZER)
    try:
        present_names = folder.names()
        files = {name: folder.read(name, MAX_TOKENIZER_BYTES) for name in names if name in present_names}
    except (OSError, DamagedCheckpointError):
        return {}
    is_too_large = any(len(content) > MAX_TOKENIZER_BYTES for content in files.values())
    return {} if is_too_large else files
