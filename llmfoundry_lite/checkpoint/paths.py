"""Paths and URLs that users give: a checkpoint, a folder of them, a run directory; the tokenizer there. No torch."""

import contextlib
import os
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


def folder_of_checkpoints(url: str) -> str:
    """Return the folder of checkpoints inside a run directory, or `url` as it is if it is no run directory."""
    path = open_folder(url).path_here
    if path is not None and (path / INSIDE_A_RUN).is_dir():
        return str(path / INSIDE_A_RUN)
    return url


def check_outside_checkpoints(target: Path) -> None:
    """Check a path that is about to be written, with and without links resolved.

    Raises CheckpointError if it lies in a checkpoint or in a run's hidden folders, or if it has the name of a
    checkpoint in a folder of checkpoints, where a relay or a launch would take it for one. Raises ConfigError for a
    URL.
    """
    check_is_path(target)
    target = target.absolute()
    for path in {target, target.resolve()}:
        for folder in (path, *path.parents):
            has_reserved_name = COMMITTED.fullmatch(folder.name) or folder.name.startswith(".")
            if _is_checkpoint(folder) or (has_reserved_name and _holds_checkpoints(folder.parent)):
                raise CheckpointError(
                    f"{target}: {folder} is a checkpoint, or has the name of one in a folder of checkpoints; give a "
                    "place outside it, or another name"
                )


def _holds_checkpoints(folder: Path) -> bool:
    """Return whether a local folder holds checkpoints, or the leases of a run that saves there."""
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
        return LEASES in names or any(COMMITTED.fullmatch(name) and _is_checkpoint(folder / name) for name in names)
    return False


def _is_checkpoint(folder: Path) -> bool:
    """Return whether a local folder has a manifest of our format. The manifest may be damaged further on."""
    with contextlib.suppress(OSError):
        return FORMAT.encode() in LocalFolder(folder).read(MANIFEST, HEAD_BYTES)
    return False


def check_not_foreign(url: str) -> None:
    """Raise CheckpointError for weights in another format, such as a pickle or a Hugging Face folder. The error says
    how to import them."""
    path = open_folder(url).path_here
    if path is None:
        return
    advice = "then load_path=OUT load_weights_only=true begins a run with its weights"
    if path.is_file():
        raise CheckpointError(
            f"{url}: a file, and a checkpoint is a folder; `llmfoundry-lite checkpoint import {url} OUT` makes one "
            f"of a checkpoint of Composer or LLM Foundry (a pickle: add --trust-pickle), {advice}"
        )
    formats = {".metadata": ("of Composer or DCP", " --trust-pickle"), "config.json": ("a Hugging Face folder", "")}
    for file_name, (format_name, option) in formats.items():
        if (path / file_name).is_file():
            raise CheckpointError(
                f"{url}: {format_name}, not a portable checkpoint; `llmfoundry-lite checkpoint import {url} "
                f"OUT{option}` makes one, {advice}"
            )


def put_tokenizer(url: str, files: dict[str, bytes], *, last: str) -> None:
    """Write a tokenizer's files beside the checkpoints in `url`, unless a tokenizer is there.

    The file named `last` is written last, so that its presence says that all files are there. Raises OSError.
    """
    folder = open_folder(url).child(TOKENIZER)
    if last in folder.names():
        return
    folder.make()
    for name in sorted(files, key=lambda name: name == last):
        folder.put(name, files[name])


def read_tokenizer(checkpoint: Checkpoint, names: tuple[str, ...]) -> dict[str, bytes]:
    """Return the files of the tokenizer beside a checkpoint, of those in `names`. Empty if they cannot be read, or if
    one is larger than MAX_TOKENIZER_BYTES."""
    folder = checkpoint.folder.parent().child(TOKENIZER)
    try:
        present = folder.names()
        files = {name: folder.read(name, MAX_TOKENIZER_BYTES) for name in names if name in present}
    except (OSError, DamagedCheckpointError):
        return {}
    if any(len(content) > MAX_TOKENIZER_BYTES for content in files.values()):
        return {}
    return files
