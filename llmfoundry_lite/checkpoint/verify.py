"""Verifies a checkpoint, at three costs. No torch.

`check_present` lists the files, `check_structure` reads their headers, and `verify_checkpoint` reads everything. A
restore needs only the first, because it verifies each block that it reads.
"""

from collections.abc import Callable

from llmfoundry_lite.checkpoint.commit import Checkpoint
from llmfoundry_lite.checkpoint.grid import Box
from llmfoundry_lite.checkpoint.open_folder import check_files, unreadable_file_error
from llmfoundry_lite.checkpoint.shards import open_shard, verify_file
from llmfoundry_lite.errors import DamagedCheckpointError


def check_present(checkpoint: Checkpoint) -> None:
    """Check that every shard file in the manifest is present and has the recorded size, without reading the files.

    Raises UnsoundCheckpointError for the first file that is absent or has another size, or if the folder cannot be
    listed.
    """
    expected_bytes = {file.name: file.num_bytes for file in checkpoint.manifest.files}
    try:
        check_files(checkpoint.folder, expected_bytes)
    except OSError as error:
        raise unreadable_file_error(checkpoint.folder.parent(), checkpoint.name, error) from error


def check_structure(checkpoint: Checkpoint) -> None:
    """Check that manifest and headers agree: the files together have every chunk of every tensor, and nothing else.

    Reads a few kilobytes of each file, and verifies these by their hash. Raises UnsoundCheckpointError if a file is
    absent, unreadable or damaged, or if its header has too much or too little.
    """
    # Each chunk in a header is in the manifest, in this file, with this dtype and at this place.
    tensors = checkpoint.manifest.tensors
    num_chunks_in_headers = dict.fromkeys(tensors, 0)
    for file_index, file in enumerate(checkpoint.manifest.files):
        with open_shard(checkpoint.folder, file) as shard:
            for chunk in shard.chunk_begins:
                record = tensors.get(chunk.tensor)
                box = Box(chunk.offset, chunk.shape)
                if record is None or record.dtype != chunk.dtype or not record.grid.has(record.shape, file_index, box):
                    raise shard.damage_error(f"{chunk.key} is {chunk.dtype} {list(chunk.shape)} in its header alone")
                num_chunks_in_headers[chunk.tensor] += 1

    # A header cannot have a key twice, so equal numbers mean that no chunk is missing.
    for name, num_in_headers in num_chunks_in_headers.items():
        num_in_manifest = tensors[name].num_chunks
        if num_in_headers != num_in_manifest:
            raise DamagedCheckpointError(
                f"{checkpoint.url}: {name} has {num_in_manifest} chunks in the manifest and {num_in_headers} in the "
                "files' headers"
            )


def verify_checkpoint(checkpoint: Checkpoint, on_read: Callable[[int], None] = lambda num_bytes: None) -> None:
    """Read a whole checkpoint: compare every block of every file with its hash, and all headers with the manifest.

    `on_read` is called, in several threads, with the number of bytes that have been read since its last call. Raises
    UnsoundCheckpointError, which names the file and a tensor in the damaged block. Returns if the checkpoint is intact.
    """
    for file in checkpoint.manifest.files:
        verify_file(checkpoint.folder, file, on_read)
    check_structure(checkpoint)
    check_present(checkpoint)
