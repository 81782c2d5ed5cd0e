"""Which steps wandb has on this disk: read from the files that its offline mode leaves behind.

wandb writes them every 15 seconds, so a killed launch loses some; what is in them is the only one who knows which.
They are in LevelDB's log format (github.com/google/leveldb, doc/log_format.md) behind a header of wandb's own, and hold
one protobuf for each record.
"""

import struct
from collections.abc import Iterator
from pathlib import Path

HEADER_BYTES = 7
BLOCK_BYTES = 32768
PREFIX = struct.Struct("<IHB")
"""Of each part: checksum, length, kind."""
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def offline_steps(folder: Path, run_id: str) -> list[int]:
    """Of all offline launches of this run in wandb's folder, in the order they were written."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    steps = []
    for path in sorted(path for path in folder.glob("offline-run-*/run-*.wandb") if path.name == f"run-{run_id}.wandb"):
        for raw in read_records(path.read_bytes()):
            record = Record.FromString(raw)
            if record.WhichOneof("record_type") == "history":
                steps.append(record.history.step.num)
    return steps


def read_records(content: bytes) -> Iterator[bytes]:
    """Those that are whole; a file that was cut off ends before its last one."""
    at, parts = HEADER_BYTES, b""
    while at + PREFIX.size <= len(content):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < PREFIX.size:
            at += left  # filled with zeros
            continue
        _, length, kind = PREFIX.unpack_from(content, at)
        end = at + PREFIX.size + length
        if kind not in (WHOLE, FIRST, MIDDLE, LAST) or end > len(content):
            return
        parts = (parts if kind in (MIDDLE, LAST) else b"") + content[at + PREFIX.size : end]
        at = end
        if kind in (WHOLE, LAST):
            yield parts
