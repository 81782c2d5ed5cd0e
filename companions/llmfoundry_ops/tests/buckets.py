"""A run of four batches that saves behind a URL, with its log."""

import json
import time
from dataclasses import replace
from typing import Any

from llmfoundry_lite.checkpoint.launch_record import RecordWriter
from llmfoundry_lite.checkpoint.lease import Lease
from llmfoundry_lite.checkpoint.run_log import write_log
from llmfoundry_lite.checkpoint.store import CheckpointStore
from tests.checkpoint.saves import write_draft

CONFIG = {"run_name": "tiny", "max_duration": "4ba"}
LINE = {"loss/train/total": 4.5, "throughput/tokens_per_sec": 1234.0, "time/remaining_seconds": 75.0}


def save_with_log(url: str, batch: int, lease: Lease | None = None) -> Lease:
    """Save a batch with the log so far; returns the lease."""
    store = CheckpointStore(url)
    lease = lease or store.acquire()
    manifest = write_draft(store, lease, batch)
    lines = [json.dumps({"batch": number, **LINE}) + "\n" for number in range(1, batch + 1)]
    parts = write_log(store, manifest.save_id, "".join(lines).encode(), ())
    store.publish(replace(manifest, config=CONFIG, log=parts), lease)
    return lease


def end_last_writer(url: str) -> None:
    """Make the holder of the lease a process of this machine that is gone."""
    leases = CheckpointStore(url).leases
    name = f"{leases.highest_epoch():08d}.json"
    owner = json.loads(leases.folder.read(name, 1 << 16))
    leases.folder.put(name, json.dumps(owner | {"pid": 2**22 + 1, "started": 1}).encode())


def record_launch(url: str, lease: Lease, **facts: Any) -> None:
    """Record a launch beside its checkpoints, as a run on the host gpu-17 does that has saved batch 2."""
    process = {"host": "gpu-17", "pid": 42, "boot": "another", "namespace": "pid:[1]", "started": 7}
    record = {"status": "running", "batch": 2, "reason": None, "last_saved": "ba2", "max_duration": "4ba"}
    record |= {"process": process, "saved_at": time.time() - 120, "throughput/tokens_per_sec": 1234.0}
    writer = RecordWriter(CheckpointStore(url).root, lease.epoch)
    writer.write(record | facts)
    writer.end()
    writer.join(30)
