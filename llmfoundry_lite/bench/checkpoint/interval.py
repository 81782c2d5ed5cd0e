"""What does a save after every batch cost? One rank's part: batches of real training, with saves and without, in turns.

A block with saves is `SAVES` batches, each followed by a save as a run makes it, and one batch more behind which the
last one is written. Nothing but the next save waits for a save. The same number of batches without saves is the other
block of the round. What a save costs is the difference over the number of saves.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from llmfoundry_lite.bench.checkpoint.meters import slowest
from llmfoundry_lite.checkpoint.manifest import Timestamp
from llmfoundry_lite.checkpoint.save import About, Saver, open_saver
from llmfoundry_lite.checkpoint.store import CheckpointStore, Lease
from llmfoundry_lite.training.loss import cross_entropy_sum, next_token_labels

SAVES = 2
MICROBATCH = 4
"""Samples that a rank takes at a time."""


class Shape(NamedTuple):
    num_samples: int
    """Of all ranks."""
    num_tokens: int
    """Of each sample."""

    def __str__(self) -> str:
        return f"{self.num_samples} x {self.num_tokens}"


SHAPES = {"tiny": (Shape(8, 32),), "125m": (Shape(24, 512), Shape(4, 512))}


def measure_interval(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, work: Path, num_rounds: int, size: str
) -> dict[str, Any]:
    """{shape: {plain, saving}}: seconds of the blocks of each round, the first of which is left out."""
    found: dict[str, Any] = {}
    for shape in SHAPES[size]:
        store = CheckpointStore(work / str(shape).replace(" ", ""))
        saver = open_saver(store, after_publish=partial(keep_one, store))
        train = partial(train_batch, model, optimizer, shape)
        batch, rounds = 0, []
        for number in range(num_rounds + 1):
            seconds = {}
            for is_saving in (False, True) if number % 2 == 0 else (True, False):
                dist.barrier()
                started = time.perf_counter()
                for index in range(SAVES + 1):
                    train()
                    batch += 1
                    if is_saving:
                        saver.poll()
                        if index < SAVES:
                            save(saver, model, optimizer, batch)
                seconds["saving" if is_saving else "plain"] = slowest(time.perf_counter() - started)
                saver.wait()
            rounds.append(seconds)
        found[str(shape)] = rounds[1:]
    return {"batches": found}


def keep_one(store: CheckpointStore, lease: Lease) -> None:
    """The disk has room for a few."""
    store.prune(lease, keep_newest=1)


def save(saver: Saver, model: torch.nn.Module, optimizer: torch.optim.Optimizer, batch: int) -> None:
    saver.save(model, optimizer, About(timestamp=Timestamp(batch=batch)))


def train_batch(model: torch.nn.Module, optimizer: torch.optim.Optimizer, shape: Shape) -> None:
    """Of this rank's share of made-up tokens. The learning rate is whatever it is: nobody looks at the loss."""
    left = max(1, shape.num_samples // dist.get_world_size())
    device = next(model.parameters()).device
    while left:
        size = min(left, MICROBATCH)
        tokens_bt = torch.arange(size * shape.num_tokens, device=device).view(size, -1) % 500
        labels_bt = next_token_labels(tokens_bt)
        model(tokens_bt, head=partial(cross_entropy_sum, labels_bt=labels_bt)).backward()
        left -= size
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
