"""What the ranks of a launch tell each other before the first batch; without a process group a rank is alone.

JSON in byte tensors, never pickles. For main threads only: every rank must come here in the same order.
"""

import json
import secrets
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from llmfoundry_lite.errors import DataError


def gather_notes(note: Any) -> list[Any]:
    """The note of each rank, in order of rank, on every rank."""
    if not dist.is_available() or not dist.is_initialized():
        return [note]
    raw = json.dumps(note).encode()
    size = torch.tensor([len(raw)], device=_device())
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, size)
    padded = torch.frombuffer(bytearray(raw.ljust(max(map(int, sizes)))), dtype=torch.uint8).to(_device())
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return [json.loads(bytes(part.cpu().numpy())) for part in gathered]


def draw_launch_id() -> str:
    """The same 16 hex digits on all ranks of a launch, and on no rank of another."""
    drawn = torch.tensor([secrets.randbits(63)])
    if dist.is_available() and dist.is_initialized():
        drawn = drawn.to(_device())
        dist.broadcast(drawn, src=0)
    return f"{int(drawn):016x}"


def check_alike(notes: Sequence[dict[str, Any]]) -> None:
    """Raise DataError on every rank unless all have the same data in the same order; names a node that has not.

    Each note has `node`, `order`, and for each of `streams` its name, folder, shards, samples and content.
    """
    kinds = [(note["order"], [stream["content"] for stream in note["streams"]]) for note in notes]
    usual = max(kinds, key=kinds.count)
    if all(kind == usual for kind in kinds):
        return
    there, here = (
        notes[kinds.index(usual)],
        next(note for note, kind in zip(notes, kinds, strict=True) if kind != usual),
    )
    differing = [
        f"{stream['name'] or 'the data'}: {_say(ours, here)}, but {_say(stream, there)}"
        for stream, ours in zip(there["streams"], here["streams"], strict=False)
        if stream["content"] != ours["content"]
    ]
    what = "; ".join(differing) or "the same shards, but other streams, weights, seed, batch size or shuffling"
    raise DataError(
        f"{here['node']} reads other data than {there['node']}: {what}; give every node the same data and configuration"
    )


def _say(stream: dict[str, Any], note: dict[str, Any]) -> str:
    size = f"{stream['samples']} samples in {stream['shards']} shards"
    return f"{stream['folder']} on {note['node']} has {size} ({stream['content']})"


def _device() -> torch.device:
    """Where the group's backend wants its tensors."""
    uses_accelerator = "nccl" in dist.get_backend() and torch.cuda.is_available()
    return torch.device("cuda", torch.cuda.current_device()) if uses_accelerator else torch.device("cpu")
