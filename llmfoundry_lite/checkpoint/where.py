"""What a path or URL given by a user means: one checkpoint, a folder of them, or a run directory. No torch."""

from pathlib import Path

from llmfoundry_lite.checkpoint.places import LocalPlace, open_place
from llmfoundry_lite.checkpoint.store import Checkpoint
from llmfoundry_lite.errors import CheckpointError, DamagedCheckpointError

INSIDE_A_RUN = "checkpoints"
TOKENIZER = "tokenizer"
"""Beside the checkpoints of a run: the files of the tokenizer it was trained with."""
MAX_TOKENIZER_BYTES = 1 << 28


def folder_of_checkpoints(where: str) -> str:
    """A run directory keeps its checkpoints inside; any other place is the folder itself."""
    place = open_place(where)
    if isinstance(place, LocalPlace) and (place.path / INSIDE_A_RUN).is_dir():
        return str(place.path / INSIDE_A_RUN)
    return where


def check_not_from_elsewhere(where: str) -> None:
    """Raises CheckpointError for weights that others have written: a pickle, a Hugging Face folder."""
    place = open_place(where)
    if not isinstance(place, LocalPlace):
        return
    path: Path = place.path
    advice = "then load_path=OUT load_weights_only=true begins a run with its weights"
    if path.is_file():
        raise CheckpointError(
            f"{where}: a file, and a checkpoint is a folder; `llmfoundry-lite checkpoint import {where} OUT` makes one "
            f"of a checkpoint of Composer or LLM Foundry (a pickle: add --trust-pickle), {advice}"
        )
    pickled, hugging_face = (path / ".metadata").is_file(), (path / "config.json").is_file()
    if pickled or hugging_face:
        kind, option = ("Composer's", " --trust-pickle") if pickled else ("a Hugging Face folder", "")
        raise CheckpointError(
            f"{where}: {kind}, not a portable checkpoint; `llmfoundry-lite checkpoint import {where} OUT{option}` "
            f"makes one, {advice}"
        )


def put_tokenizer(folder: str, files: dict[str, bytes], *, last: str) -> None:
    """Beside the checkpoints of `folder`, unless one is there. `last` is the file without which the others are nothing.
    Raises OSError."""
    place = open_place(folder).child(TOKENIZER)
    if last in place.names():
        return
    for name in sorted(files, key=lambda name: name == last):
        place.put(name, files[name])


def read_tokenizer(checkpoint: Checkpoint, names: tuple[str, ...]) -> dict[str, bytes]:
    """What lies beside a checkpoint of the tokenizer's files; nothing if there is none to be read."""
    place = open_place(checkpoint.where.rstrip("/").rpartition("/")[0] or ".").child(TOKENIZER)
    try:
        here = place.names()
        return {name: place.read(name, MAX_TOKENIZER_BYTES) for name in names if name in here}
    except (OSError, DamagedCheckpointError):
        return {}
