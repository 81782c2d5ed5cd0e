"""Run directories written by hand, for whoever reads runs."""

import json
from dataclasses import replace
from typing import Any

from llmfoundry_lite.checkpoint.manifest import Manifest, Segment, Timestamp
from llmfoundry_lite.checkpoint.run_log import write_log
from llmfoundry_lite.checkpoint.store import CheckpointStore
from tests.helpers.tiny import write_config

TOKENS = 1000
H100 = "NVIDIA H100 80GB HBM3"
FLOPS_PER_TOKEN = 1e9


def record(batch, loss: Any = 2.0, launch: Any = 1, *, seconds=2.0, device=None, num_devices: Any = 1, **more):
    rate = TOKENS / seconds
    line = {
        "batch": batch,
        "launch": launch,
        "loss/train/total": loss,
        "data/digest": f"{batch:016x}",
        "throughput/tokens_per_sec": rate,
        "throughput/device/tokens_per_sec": rate / num_devices,
        "throughput/device/flops_per_sec": rate / num_devices * FLOPS_PER_TOKEN,
        "time/token": batch * TOKENS,
        "time/batch_seconds": seconds,
        "time/elapsed_seconds": batch * seconds,
    }
    if device == H100:
        line["throughput/device/mfu"] = line["throughput/device/flops_per_sec"] / 989.5e12
    return line | {key.replace("__", "/"): value for key, value in more.items()}


def write_run(folder, records, segments=(), **config):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    settings = {"run_name": folder.name, "save_folder": None, "train_loader": {"dataset": {"local": "nowhere"}}}
    write_config(folder / "config.yaml", settings | config)
    if segments:
        save(config.get("save_folder") or folder / "checkpoints", segments)
    return str(folder)


def save(url, segments, log=None):
    """A checkpoint without tensors, and the log that travels with it."""
    store = CheckpointStore(url)
    lease = store.acquire()
    batch = segments[-1].last_batch
    save_id = store.new_save_id(lease, batch)
    manifest = Manifest(
        save_id=save_id, lease_epoch=lease.epoch, timestamp=Timestamp(batch=batch), segments=tuple(segments)
    )
    store.open_draft(save_id)
    if log is not None:
        content = "".join(json.dumps(line) + "\n" for line in log).encode()
        manifest = replace(manifest, log=write_log(store, save_id, content, ()))
    store.publish(manifest, lease)


def on_gpu(first, last, num_devices=2, device=H100):
    return Segment(
        first_batch=first,
        last_batch=last,
        vendor="nvidia",
        device=device,
        num_devices=num_devices,
        sharding="HYBRID_SHARD",
        shard_degree=2,
        precision="amp_bf16 PURE",
        runtime="13.0",
        environment={"NCCL_ALGO": "Tree"},
    )


def on_cpu(first, last):
    words = {"vendor": "cpu", "device": "AMD EPYC", "num_devices": 4, "sharding": "FULL_SHARD"}
    return Segment(first_batch=first, last_batch=last, precision="fp32 DEFAULT", **words)


def elapsed(batch, seconds):
    return {"time/elapsed_seconds": batch * seconds}
