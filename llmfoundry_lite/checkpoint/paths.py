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
TOKENIZER = "tokenizer"
"""Folder beside a run's checkpoints that holds the files of the run's tokenizer."""


def folder_of_checkpoints(url: str) -> str:
    """Return the folder of checkpoints inside a run directory; any other `url` as it is."""
    path = open_folder(url).path_here
    return str(path / INSIDE_A_RUN) if path is not None and (path / INSIDE_A_RUN).is_dir() else url


def check_outside_checkpoints(target: Path) -> None:
    """Raise CheckpointError if `target`, about to be written, lies in a checkpoint or in a run's hidden folders, or has
    the name of a checkpoint in a folder of them: a relay or a launch would take it for one. ConfigError for a URL."""
    check_is_path(target)
    target = target.absolute()
    for path in {target, target.resolve()}:
        for folder in (path, *path.parents):
            is_named_so = COMMITTED.fullmatch(folder.name) or folder.name.startswith(".")
            if _is_checkpoint(folder) or (is_named_so and _holds_checkpoints(folder.parent)):
                raise CheckpointError(
                    f"{target}: {folder} is a checkpoint, or has the name of one in a folder of checkpoints; give a "
                    "place outside it, or another name"
                )


def _holds_checkpoints(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        names = os.listdir(folder)
        return LEASES in names or any(COMMITTED.fullmatch(name) and _is_checkpoint(folder / name) for name in names)
    return False


def _is_checkpoint(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        return FORMAT.encode() in LocalFolder(folder).read(MANIFEST, HEAD_BYTES)
    return False


def check_not_foreign(url: str) -> None:
    """Raise CheckpointError for weights in another format: a pickle, a Hugging Face folder."""
    path = open_folder(url).path_here
    advice = "then load_path=OUT load_weights_only=true begins a run with its weights"
    if path is not None and path.is_file():
        raise CheckpointError(
            f"{url}: a file, and a checkpoint is a folder; `llmfoundry-lite checkpoint import {url} OUT` makes one "
            f"of a checkpoint of Composer or LLM Foundry (a pickle: add --trust-pickle), {advice}"
        )
    signs = {".metadata": ("of Composer or DCP", " --trust-pickle"), "config.json": ("a Hugging Face folder", "")}
    for sign, (kind, option) in signs.items():
        if path is not None and (path / sign).is_file():
            raise CheckpointError(
                f"{url}: {kind}, not a portable checkpoint; `llmfoundry-lite checkpoint import {url} OUT{option}` "
                f"makes one, {advice}"
            )


def put_tokenizer(url: str, files: dict[str, bytes], *, last: str) -> None:
    """Write a tokenizer's files beside the checkpoints in `url`, unless one is there. `last` is the file whose presence
    says that all are there. Raises OSError."""
    folder = open_folder(url).child(TOKENIZER)
    if last in folder.names():
        return
    folder.make()
    for name in sorted(files, key=lambda name: name == last):
        folder.put(name, files[name])


def read_tokenizer(checkpoint: Checkpoint, names: tuple[str, ...]) -> dict[str, bytes]:
    """Return the tokenizer's files beside a checkpoint; {} if they cannot be read."""
    folder = checkpoint.folder.parent().child(TOKENIZER)
    try:
        here = folder.names()
        files = {name: folder.read(name, MAX_TOKENIZER_BYTES) for name in names if name in here}
    except (OSError, DamagedCheckpointError):
        return {}
    return files if all(len(content) <= MAX_TOKENIZER_BYTES for content in files.values()) else {}
