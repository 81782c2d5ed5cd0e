"""Verification of a checkpoint: presence, headers, every block. No torch."""

from collections.abc import Callable

from llmfoundry_lite.checkpoint.commit import Checkpoint
from llmfoundry_lite.checkpoint.folders import find_absent, unreadable
from llmfoundry_lite.checkpoint.shards import check_headers, verify_file
from llmfoundry_lite.errors import DamagedCheckpointError, IncompleteCheckpointError


def check_present(checkpoint: Checkpoint) -> None:
    """Check by one listing that every file is there with its size. Raises UnsoundCheckpointError."""
    files = (*checkpoint.manifest.files, *checkpoint.manifest.attachments)
    expected = {file.name: file.num_bytes for file in files}
    try:
        absent = find_absent(checkpoint.folder, expected)
    except OSError as error:
        raise unreadable(checkpoint.folder.parent(), checkpoint.name, error) from error
    if absent is not None:
        name, size = absent
        where = f"{checkpoint.url}/{name}"
        if size is None:
            raise IncompleteCheckpointError(f"{where}: missing", name)
        raise DamagedCheckpointError(f"{where}: has {size:,} bytes, expected {expected[name]:,}", name)


def check_structure(checkpoint: Checkpoint) -> None:
    """Check every file's size, and its header against the manifest: a few kilobytes each."""
    check_headers(checkpoint.folder, checkpoint.manifest)


def check_readable(checkpoint: Checkpoint) -> None:
    """Check what one rank looks at before all read the tensors, which are verified as they are read."""
    check_present(checkpoint)
    for file in checkpoint.manifest.attachments:
        verify_file(checkpoint.folder, file)


def verify_checkpoint(checkpoint: Checkpoint, on_read: Callable[[int], None] = lambda num_bytes: None) -> None:
    """Hash every block of every file, and compare all headers with the manifest. Errors name file and tensor."""
    for file in checkpoint.manifest.files:
        verify_file(checkpoint.folder, file, on_read)
    check_structure(checkpoint)
    check_readable(checkpoint)
