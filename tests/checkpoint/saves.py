"""Small saves without torch, for tests of files, stores and crashes."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from llmfoundry_lite.checkpoint.grid import Chunk, Grid
from llmfoundry_lite.checkpoint.manifest import Manifest, TensorRecord, Timestamp
from llmfoundry_lite.checkpoint.shards import build_header, write_shard
from llmfoundry_lite.checkpoint.store import Checkpoint, CheckpointStore, Lease

ROWS = 50_000
"""Rows of int64: a few blocks of 64 KiB in each of the two files."""
BLOCK_BYTES = 1 << 16


def values_of(batch: int) -> np.ndarray:
    return np.arange(2 * ROWS, dtype=np.int64) + batch


def write_draft(store: CheckpointStore, lease: Lease, batch: int, parent: str | None = None) -> Manifest:
    """Write a draft of two shards with half a tensor each."""
    save_id = store.new_save_id(lease, batch)
    folder, prefix = store.open_draft(save_id)
    files = []
    for rank, half in enumerate(np.split(values_of(batch), 2)):
        entry = Chunk("model/w", "I64", (rank * ROWS,), (ROWS,))
        header = build_header({entry.key: entry}, {}, block_bytes=BLOCK_BYTES)
        name = f"shard-{rank:05d}.safetensors"
        options = {"block_bytes": BLOCK_BYTES, "num_threads": 2, "on_phase": store.on_phase}
        record = write_shard(folder, name, header, [half.view(np.uint8)], **options)
        files.append(replace(record, name=prefix + name))
    return Manifest(
        save_id=save_id,
        parent_save_id=parent,
        lease_epoch=lease.epoch,
        timestamp=Timestamp(batch=batch),
        tensors={"model/w": TensorRecord("I64", (2 * ROWS,), Grid((ROWS,), (0,), (1,)))},
        files=tuple(files),
    )


def save(store: CheckpointStore, lease: Lease, batch: int) -> Checkpoint:
    return store.publish(write_draft(store, lease, batch), lease)


def saved(where: str | Path, *batches: int) -> tuple[CheckpointStore, Lease]:
    """Return a store in which these batches have been saved under a lease."""
    store = CheckpointStore(where)
    lease = store.acquire()
    for batch in batches:
        save(store, lease, batch)
    return store, lease


def names(store: CheckpointStore) -> list[str]:
    return [candidate.name for candidate in store.candidates()]


def flip(path: Path, position: int, bits: int = 1) -> None:
    raw = bytearray(path.read_bytes())
    raw[position] ^= bits
    path.write_bytes(raw)
