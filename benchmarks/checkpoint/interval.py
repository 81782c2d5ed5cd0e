"""Cost of a save after every batch, one rank's part: batches of real training, with saves and without, in turns.

A block with saves is `SAVES` batches, each followed by a save as a run makes it, and one batch more behind which the
last one is written. Nothing but the next save waits for a save. The same number of batches without saves is the other
block of the round. What a save costs is the difference over the number of saves. Whatever else runs on the machine has
its part in that difference, so the processor time of a save alone is measured too, which training cannot have.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from benchmarks.checkpoint.meters import slowest
from llmfoundry_lite.checkpoint.manifest import Timestamp
from llmfoundry_lite.checkpoint.save import SaveMetadata, Saver
from llmfoundry_lite.checkpoint.store import CheckpointStore, Lease
from llmfoundry_lite.training.loss import cross_entropy_sum, next_token_labels

SAVES = 2
MICROBATCH = 4
"""Samples that a rank takes at a time."""


class Shape(NamedTuple):
    num_samples: int
    """Samples of all ranks."""
    num_tokens: int
    """Tokens of each sample."""

    def __str__(self) -> str:
        return f"{self.num_samples} x {self.num_tokens}"


SHAPES = {"tiny": (Shape(8, 32),), "125m": (Shape(24, 512), Shape(4, 512))}


def measure_interval(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    work: Path,
    num_rounds: int,
    size: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """{shape: [{plain, saving, processor}]}: seconds that each round took, see `Turns`."""
    found: dict[str, Any] = {}
    for shape in SHAPES[size]:
        turns = Turns(model, optimizer, shape, CheckpointStore(work / str(shape).replace(" ", "")))
        rounds = []
        for number in range(num_rounds):
            seconds = {"processor": turns.save_alone()}
            for is_saving in (False, True) if number % 2 == 0 else (True, False):
                seconds["saving" if is_saving else "plain"] = turns.train_block(is_saving)
            rounds.append(seconds)
            told = ", ".join(f"{name} {taken:.2f} s" for name, taken in seconds.items())
            say(f"{shape}, round {number + 1} of {num_rounds}: {told}")
        found[str(shape)] = rounds
    return {"batches": found}


class Turns:
    """A first microbatch and save, which make buffers and pages, are behind it."""

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, shape: Shape, store: CheckpointStore
    ) -> None:
        self.state = (model, optimizer)
        self.train = partial(train_batch, model, optimizer, shape)
        self.saver = Saver(store, after_publish=partial(keep_one, store))
        self.saver.take_lease()
        self.batch = 0
        train_batch(model, optimizer, Shape(MICROBATCH, shape.num_tokens))
        self.save_alone()

    def train_block(self, is_saving: bool) -> float:
        """Seconds of the slowest rank."""
        dist.barrier()
        started = time.perf_counter()
        for _ in range(SAVES):
            self.train()
            if is_saving:
                self.saver.poll()
                self._save()
        self.train()
        self.saver.poll()
        seconds = slowest(time.perf_counter() - started)
        self.saver.wait()
        return seconds

    def save_alone(self) -> float:
        """Seconds of a processor, in all threads of the rank that needs most. Nothing else goes on in it."""
        dist.barrier()
        used = time.process_time()
        self._save()
        self.saver.wait()
        return slowest(time.process_time() - used)

    def _save(self) -> None:
        self.batch += 1
        self.saver.save(*self.state, SaveMetadata(timestamp=Timestamp(batch=self.batch)))


def keep_one(store: CheckpointStore, lease: Lease) -> None:
    """The disk has room for a few."""
    store.prune(lease, keep_newest=1)


def train_batch(model: torch.nn.Module, optimizer: torch.optim.Optimizer, shape: Shape) -> None:
    """Train on this rank's share of made-up tokens."""
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
