"""Make a checkpoint of the present format for `fixtures/`, to be read by every later release.

    python -m tests.checkpoint.make_fixture 2 tests/checkpoint/fixtures/format-1/2-ranks

Never run it again over a folder that is there: those files are what a past release wrote.
"""

import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from llmfoundry_lite.checkpoint.manifest import Segment, Timestamp
from llmfoundry_lite.checkpoint.save import About, Saver
from llmfoundry_lite.checkpoint.shards import hash_buffers
from llmfoundry_lite.checkpoint.store import CheckpointStore
from tests.checkpoint.ranks import build, step, whole_state

ABOUT = About(
    timestamp=Timestamp(epoch=1, batch=3, sample=24, token=168),
    run_name="tiny",
    fingerprints={"tokenizer": "abc"},
    config={"seed": 17, "model": {"d_model": 6}},
    segments=(
        Segment(first_batch=1, last_batch=2, vendor="nvidia", num_devices=4, environment={"NCCL_DEBUG": "WARN"}),
        Segment(first_batch=3, last_batch=3, torch="2.13.0", compile_config={"mode": "default"}, tokens_per_second=1.5),
    ),
    scalars={"pair": (1, 2), "large": 2**60, "infinite": float("inf"), "raw": b"\x00\xff", "$odd": {"$x": None}},
)
LOG = b'{"batch": 1}\n{"batch": 2}\n{"batch": 3}\n'


def save(rank: int, num_ranks: int, folder: str, rendezvous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks)
    model, optimizer = build("plain" if num_ranks == 1 else "FULL_SHARD")
    for i in range(3):
        step(model, optimizer, i)
    saver = Saver(CheckpointStore(folder), parent_save_id="e1-ba2-000000000000")
    saver.save(model, optimizer, replace(ABOUT, log=lambda: LOG))
    saver.wait()
    digests = digests_of(whole_state(model, optimizer))
    if rank == 0:
        (Path(folder) / "expected.json").write_text(json.dumps(digests, indent=1) + "\n")
    dist.destroy_process_group()


def digests_of(tensors: dict[str, torch.Tensor]) -> dict[str, str]:
    """dtype, shape and hash of each tensor."""
    return {
        name: f"{tensor.dtype} {list(tensor.shape)} "
        + hash_buffers([tensor.contiguous().reshape(-1).view(torch.uint8).numpy()]).hex()
        for name, tensor in sorted(tensors.items())
    }


if __name__ == "__main__":
    num_ranks, out = int(sys.argv[1]), Path(sys.argv[2])
    assert not out.exists(), "a fixture is made once"
    with tempfile.TemporaryDirectory() as work:
        multiprocessing.spawn(save, (num_ranks, str(out), f"{work}/rendezvous"), nprocs=num_ranks)
    for name in ("latest.json", ".leases/00000001.json"):
        (out / name).unlink()
    (out / ".leases").rmdir()
