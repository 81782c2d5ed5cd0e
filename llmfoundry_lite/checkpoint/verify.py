"""Verifies a checkpoint: whether its files are present, their headers, and every block. No torch."""

from collections.abc import Callable

from llmfoundry_lite.checkpoint.commit import Checkpoint
from llmfoundry_lite.checkpoint.grid import Box
from llmfoundry_lite.checkpoint.open_folder import check_files, unreadable_file_error
from llmfoundry_lite.checkpoint.shards import open_shard, verify_file
from llmfoundry_lite.errors import DamagedCheckpointError


def check_present(checkpoint: Checkpoint) -> None:
    """Check by one listing that every file is present and has its size. Raises UnsoundCheckpointError."""
    try:
        check_files(checkpoint.folder, {file.name: file.num_bytes for file in checkpoint.manifest.files})
    except OSError as error:
        raise unreadable_file_error(checkpoint.folder.parent(), checkpoint.name, error) from error


def check_structure(checkpoint: Checkpoint) -> None:
    """Check that the headers of all files together have every chunk of every tensor, and nothing else.

    Reads a few kilobytes of each file. Raises UnsoundCheckpointError.
    """
    tensors = checkpoint.manifest.tensors
    num_chunks = dict.fromkeys(tensors, 0)
    for index, file in enumerate(checkpoint.manifest.files):
        with open_shard(checkpoint.folder, file) as shard:
            for chunk in shard.chunk_begins:
                record = tensors.get(chunk.tensor)
                box = Box(chunk.offset, chunk.shape)
                if record is None or record.dtype != chunk.dtype or not record.grid.has(record.shape, index, box):
                    raise shard.damage_error(f"{chunk.key} is {chunk.dtype} {list(chunk.shape)} in its header alone")
                num_chunks[chunk.tensor] += 1

    for name, count in num_chunks.items():
        expected = tensors[name].num_chunks
        if count != expected:
            raise DamagedCheckpointError(
                f"{checkpoint.url}: {name} has {expected} chunks in the manifest and {count} in the files' headers"
            )


def verify_checkpoint(checkpoint: Checkpoint, on_read: Callable[[int], None] = lambda num_bytes: None) -> None:
    """Hash every block of every file, and compare all headers with the manifest.

    `on_read` is called with the number of bytes of each range of blocks that has been hashed. Raises
    UnsoundCheckpointError that names the file and the tensor.
    """
    for file in checkpoint.manifest.files:
        verify_file(checkpoint.folder, file, on_read)
    check_structure(checkpoint)
    check_present(checkpoint)
