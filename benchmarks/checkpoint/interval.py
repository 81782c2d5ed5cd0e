"""What it costs to save after every batch: batches of real training with saves and without, in turns. One rank's part.

A block with saves has `SAVES` batches, each followed by a save as a run makes it, and one more batch during which the
last save is written. Nothing waits for a save except the next one. The other block of a round has the same number of
batches without saves. The cost of a save is the difference of the two blocks divided by the number of saves.

That difference also contains whatever else the machine does. Therefore the processor time of a save alone is measured
too: this is time that training cannot have on a busy machine.
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
from llmfoundry_lite.checkpoint.retention import prune
from llmfoundry_lite.checkpoint.save import SaveMetadata, Saver
from llmfoundry_lite.checkpoint.store import CheckpointStore, Lease
from llmfoundry_lite.training.loss import cross_entropy_sum, next_token_labels

SAVES = 2
"""Saves of one block."""
MICROBATCH = 4
"""Samples that a rank takes through the model at a time."""


class Shape(NamedTuple):
    """The shape of a batch. Its text, such as "24 x 512", is its key in the report."""

    num_samples: int
    """Samples of all ranks."""
    num_tokens: int
    """Tokens of each sample."""

    def __str__(self) -> str:
        return f"{self.num_samples} x {self.num_tokens}"


# Model size -> shapes of its batches: for the 125M model a long one, to which the target applies, and a short one.
SHAPES = {"tiny": (Shape(8, 32),), "125m": (Shape(24, 512), Shape(4, 512))}


def measure_interval(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    work: Path,
    num_rounds: int,
    size: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Measure blocks with and without saves for each shape of this model size. Collective.

    Returns {"batches": {shape: [{"plain", "saving", "processor"}, ...]}} with one entry for each round. `plain` and
    `saving` are the seconds of a block, see `Turns.train_block`; `processor` are the seconds of `Turns.save_alone`.
    """
    rounds_of_shapes: dict[str, Any] = {}
    for shape in SHAPES[size]:
        turns = Turns(model, optimizer, shape, CheckpointStore(work / str(shape).replace(" ", "")))
        rounds = []
        for round_number in range(num_rounds):
            seconds = {"processor": turns.save_alone()}
            # The order alternates, so that neither block always runs second.
            for is_saving in (False, True) if round_number % 2 == 0 else (True, False):
                seconds["saving" if is_saving else "plain"] = turns.train_block(is_saving)
            rounds.append(seconds)
            progress = ", ".join(f"{name} {seconds_taken:.2f} s" for name, seconds_taken in seconds.items())
            say(f"{shape}, round {round_number + 1} of {num_rounds}: {progress}")
        rounds_of_shapes[str(shape)] = rounds
    return {"batches": rounds_of_shapes}


class Turns:
    """Trains blocks of batches and saves, for one shape of batch, on one rank. Collective, from the constructor on.

    The constructor runs one microbatch and one save, so that buffers and memory pages exist before anything is timed.
    `batch` counts the saves, because every save needs a batch number of its own.
    """

    def __init__(
        self, model: torch.nn.Module, optimizer: torch.optim.Optimizer, shape: Shape, store: CheckpointStore
    ) -> None:
        """Build the saver, and run what should not be timed. Collective."""
        self.state = (model, optimizer)
        self.train = partial(train_batch, model, optimizer, shape)
        self.saver = Saver(store, after_publish=keep_one)
        self.saver.take_lease()
        self.batch = 0
        train_batch(model, optimizer, Shape(MICROBATCH, shape.num_tokens))
        self.save_alone()

    def train_block(self, is_saving: bool) -> float:
        """Train SAVES + 1 batches, the first SAVES of them followed by a save if `is_saving`. Returns the slowest
        rank's seconds.

        Waiting for the last save after the block is not part of the time.
        """
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
        """Return the processor seconds of one save while the rank does nothing else: all threads of the rank that needs
        most."""
        dist.barrier()
        processor_seconds_before = time.process_time()
        self._save()
        self.saver.wait()
        return slowest(time.process_time() - processor_seconds_before)

    def _save(self) -> None:
        """Start a save under the next batch number."""
        self.batch += 1
        self.saver.save(*self.state, SaveMetadata(timestamp=Timestamp(batch=self.batch)))


def keep_one(lease: Lease, place: CheckpointStore) -> None:
    """Remove all checkpoints except the newest, because the disk has room for few. Called after each publication."""
    prune(place, lease, keep_newest=1)


def train_batch(model: torch.nn.Module, optimizer: torch.optim.Optimizer, shape: Shape) -> None:
    """Train one optimizer step on this rank's share of a batch of generated tokens, one microbatch after the other."""
    num_samples_left = max(1, shape.num_samples // dist.get_world_size())
    device = next(model.parameters()).device
    while num_samples_left:
        microbatch_size = min(num_samples_left, MICROBATCH)
        tokens_bt = torch.arange(microbatch_size * shape.num_tokens, device=device).view(microbatch_size, -1) % 500
        labels_bt = next_token_labels(tokens_bt)
        model(tokens_bt, head=partial(cross_entropy_sum, labels_bt=labels_bt)).backward()
        num_samples_left -= microbatch_size
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
