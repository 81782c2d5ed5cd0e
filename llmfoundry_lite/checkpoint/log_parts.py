"""The run's log beside its checkpoints, in parts `log/<save_id>.jsonl` that checkpoints share. No torch.

A log is not state: if a part is lost, the others are read, and the next launch that has the whole log writes it again.
"""

from typing import NamedTuple

from llmfoundry_lite.checkpoint.commit import LOG, Checkpoint
from llmfoundry_lite.checkpoint.folder import Folder, Source
from llmfoundry_lite.checkpoint.manifest import LogPart
from llmfoundry_lite.checkpoint.shards import BLOCK_BYTES, hash_blocks, read_bytes, read_file
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.errors import CheckpointError, DamagedCheckpointError


class Log(NamedTuple):
    """A run's log as it was read."""

    content: bytes | None
    """None if the checkpoint has no log."""
    parts: tuple[LogPart, ...]
    """The intact parts at the beginning of the log."""
    notes: list[str]
    """A line for each damaged part."""


def read_log(checkpoint: Checkpoint) -> Log:
    """Read a checkpoint's log. Lost parts are noted."""
    if not checkpoint.manifest.log:
        return Log(None, (), [])
    found, whole, notes = [], [], []
    for part in checkpoint.manifest.log:
        try:
            found.append(_read_part(checkpoint.folder.parent(), part))
            if not notes:
                whole.append(part)
        except CheckpointError as error:
            notes.append(f"a part of the log is lost: {error}")
    return Log(b"".join(found), tuple(whole), notes)


def _read_part(folder: Folder, part: LogPart) -> bytes:
    def read(source: Source) -> bytes:
        content = read_bytes(source, 0, part.num_bytes)
        if hash_blocks(content, part.block_bytes).hex() != part.block_hashes:
            raise DamagedCheckpointError(f"{folder.url}/{part.name}: its bytes are not what was written", part.name)
        return content

    return read_file(folder, part, read)


def write_log(store: CheckpointStore, save_id: str, content: bytes, before: tuple[LogPart, ...]) -> tuple[LogPart, ...]:
    """Write the end of `content` that the parts `before` lack, and return all parts. Raises OSError. A new part absorbs
    those before it that are no longer than itself, so a million lines take at most twenty."""
    kept: list[LogPart] = []
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
    folder.make()
    folder.put(name, new)
    hashes = hash_blocks(new, BLOCK_BYTES).hex()
    record = LogPart(name=f"{LOG}/{name}", num_bytes=len(new), block_bytes=BLOCK_BYTES, block_hashes=hashes)
    return (*kept, record)
