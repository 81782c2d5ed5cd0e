"""Is a checkpoint whole, and what is in it? Answers on a machine without torch.

verify_checkpoint(checkpoint)            every byte hashed; UnsoundCheckpointError names file and tensor
check_present(checkpoint)                files there, sizes right: one listing
check_structure(checkpoint)              files there, sizes right, headers agree: a few kilobytes read
check_readable(checkpoint)               the same, and what was saved beside the tensors hashed
read_attachment(checkpoint, name)        that, hashed
describe(checkpoint) -> Description      what `checkpoint inspect` prints
"""

import math
from collections import Counter
from dataclasses import dataclass

from llmfoundry_lite.checkpoint.folders import find_absent, unreadable
from llmfoundry_lite.checkpoint.manifest import Manifest
from llmfoundry_lite.checkpoint.shards import check_headers, read_verified, verify_file
from llmfoundry_lite.checkpoint.store import Checkpoint
from llmfoundry_lite.errors import DamagedCheckpointError, IncompleteCheckpointError


@dataclass(frozen=True, slots=True)
class Description:
    """Sums over a manifest."""

    num_parameters: int
    model_bytes: int
    optimizer_bytes: int
    num_files: int
    dtypes: dict[str, int]
    """Number of tensors of each."""


def check_present(checkpoint: Checkpoint) -> None:
    """Every file is there with its size."""
    files = (*checkpoint.manifest.files, *checkpoint.manifest.attachments)
    expected = {file.name: file.num_bytes for file in files}
    try:
        absent = find_absent(checkpoint.folder, expected)
    except OSError as error:
        raise unreadable(checkpoint.folder.parent(), checkpoint.name, error) from error
    if absent is not None:
        name, size = absent
        where = f"{checkpoint.where}/{name}"
        if size is None:
            raise IncompleteCheckpointError(f"{where}: missing", name)
        raise DamagedCheckpointError(f"{where}: {size:,} bytes, written were {expected[name]:,}", name)


def check_structure(checkpoint: Checkpoint) -> None:
    """Every file is there with its size and a header that says what the manifest says."""
    check_headers(checkpoint.folder, checkpoint.manifest)


def check_readable(checkpoint: Checkpoint) -> None:
    """What one rank looks at before all read the tensors, which are verified as they are read."""
    check_present(checkpoint)
    for file in checkpoint.manifest.attachments:
        verify_file(checkpoint.folder, file)


def read_attachment(checkpoint: Checkpoint, name: str) -> bytes | None:
    """What was saved beside the tensors as `name`; None if nothing was. Raises UnsoundCheckpointError."""
    for file in checkpoint.manifest.attachments:
        if file.name.rsplit("/", 1)[-1] == name:
            return read_verified(checkpoint.folder, file)
    return None


def verify_checkpoint(checkpoint: Checkpoint, num_threads: int = 2) -> None:
    """Every block of every file is hashed, and all headers are compared with the manifest."""
    manifest = checkpoint.manifest
    for file in manifest.files:
        verify_file(checkpoint.folder, file, num_threads=num_threads)
    check_structure(checkpoint)
    check_readable(checkpoint)


def describe(manifest: Manifest) -> Description:
    model = [tensor for name, tensor in manifest.tensors.items() if name.startswith("model/")]
    return Description(
        num_parameters=sum(math.prod(tensor.shape) for tensor in model),
        model_bytes=sum(tensor.num_bytes for tensor in model),
        optimizer_bytes=sum(t.num_bytes for name, t in manifest.tensors.items() if name.startswith("optim/")),
        num_files=len(manifest.files),
        dtypes=dict(Counter(tensor.dtype for tensor in manifest.tensors.values())),
    )
