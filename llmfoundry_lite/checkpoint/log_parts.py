"""The run's log beside its checkpoints, for the machine that carries on: appended to, not sent again at every save.

`log/<save_id>.jsonl` has the lines that came since an earlier save; a manifest names all parts that make up the log
until its batch, with their hashes, so that later checkpoints share the parts of earlier ones. A new part takes in the
ones before it that are no longer than itself: a log of a million lines is in twenty parts or fewer. Parts that no
checkpoint names any more go when old checkpoints go (`store`). No torch.

A log is not the state. A part that is missing or damaged makes no checkpoint unusable: the rest of the log is read, and
the next launch writes what is missing again if its machine has it.
"""

from typing import NamedTuple

from llmfoundry_lite.checkpoint.local_folder import LocalFolder
from llmfoundry_lite.checkpoint.manifest import FileRecord
from llmfoundry_lite.checkpoint.shards import BLOCK_BYTES, hash_blocks, read_verified
from llmfoundry_lite.checkpoint.store import LOG, Checkpoint, CheckpointStore
from llmfoundry_lite.errors import CheckpointError

NAME = "metrics.jsonl"
"""Format 1 had the whole log as an attachment of this name."""


class Log(NamedTuple):
    content: bytes | None
    """None if the checkpoint came without."""
    parts: tuple[FileRecord, ...]
    """Those at its beginning that are whole."""
    notes: list[str]
    """A line for each part that is not."""


def read_log(checkpoint: Checkpoint) -> Log:
    for file in checkpoint.manifest.attachments:
        if file.name.rsplit("/", 1)[-1] == NAME:
            return Log(read_verified(checkpoint.folder, file), (), [])
    if not checkpoint.manifest.log:
        return Log(None, (), [])
    folder = checkpoint.folder.parent()
    found, whole, notes = [], [], []
    for part in checkpoint.manifest.log:
        try:
            found.append(read_verified(folder, part))
            if not notes:
                whole.append(part)
        except CheckpointError as error:
            notes.append(f"a part of the log is lost: {error}")
    return Log(b"".join(found), tuple(whole), notes)


def write_log(
    store: CheckpointStore, save_id: str, content: bytes, before: tuple[FileRecord, ...]
) -> tuple[FileRecord, ...]:
    """The parts of `content`, of which those `before` that still are its beginning lie there already.

    Raises OSError of the disk.
    """
    kept: list[FileRecord] = []
    end = 0
    for part in before:
        if hash_blocks(content[end : end + part.num_bytes], part.block_bytes).hex() != part.block_hashes:
            break
        kept.append(part)
        end += part.num_bytes
    while kept and kept[-1].num_bytes <= len(content) - end:
        end -= kept.pop().num_bytes
    new = content[end:]
    if not new:
        return tuple(kept)
    name = f"{save_id}.jsonl"
    folder = store.root.child(LOG)
    if isinstance(folder, LocalFolder):
        folder.make()
    folder.put(name, new)
    hashes = hash_blocks(new, BLOCK_BYTES).hex()
    return (
        *kept,
        FileRecord(name=f"{LOG}/{name}", num_bytes=len(new), block_bytes=BLOCK_BYTES, block_hashes=hashes),
    )
