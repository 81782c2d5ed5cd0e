"""Rows of token ids -> batches, read ahead by worker processes, and a digest of batches.

Shapes: b = samples in the batch of one rank, t = max_seq_len.
"""

import atexit
import contextlib
import gc
import os
import signal
import weakref
from collections.abc import Generator, Iterator, Sequence
from multiprocessing import parent_process
from threading import Thread
from time import sleep
from typing import TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import DataLoader

from llmfoundry_lite.data.dataset import TextDataset
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.ranks.signals import LEAVING_SIGNALS

_under_way: "weakref.WeakSet[Generator[dict[str, Tensor]]]" = weakref.WeakSet()
"""Iterations that are not finished. Their threads are ended before the interpreter unloads its modules."""


@atexit.register
def _end_iterations() -> None:
    for batches in list(_under_way):
        with contextlib.suppress(ValueError):  # another thread is running it
            batches.close()


class TextLoader(DataLoader):
    """Batches `{"input_ids": int64 [b, t]}`, one for each global batch, in order for any `num_workers`.

    Unlike torch's DataLoader, it raises a worker's error as the one line it was raised with, and tells workers to leave
    before the interpreter does.
    """

    _reading: weakref.ref | None = None
    """The iterator that owns the workers."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        batches = self._read()
        _under_way.add(batches)
        return batches

    def _read(self) -> Generator[dict[str, Tensor]]:
        assert isinstance(self.dataset, TextDataset)
        try:
            self.dataset.begin_epoch(forks_workers=self.num_workers > 0 and self._iterator is None)
            yield from self._begin()
        except DataError as error:
            # torch wraps it as "Caught DataError in DataLoader worker process 0.\nOriginal Traceback …DataError: line",
            # and its traceback is part of a reference cycle, which keeps the iterator alive until the garbage
            # collector takes its queues apart before its workers: two processes that wait 5 s each.
            error.with_traceback(None)
            raise type(error)(str(error).rsplit("DataError: ", 1)[-1].strip()) from error.__cause__

    def _begin(self) -> Iterator[dict[str, Tensor]]:
        iterator = super().__iter__()
        if self.num_workers and self._reading is None:
            atexit.register(_end_workers, weakref.ref(self))
        self._reading = weakref.ref(iterator)
        return iterator


Loader = TypeVar("Loader", bound=TextLoader)


def build_text_loader(
    dataset: TextDataset,
    *,
    num_workers: int = 0,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    timeout: float = 0,
    kind: type[Loader] = TextLoader,
) -> Loader:
    return kind(
        dataset,
        batch_size=dataset.device_batch_size,
        collate_fn=collate,
        worker_init_fn=_prepare_worker,
        num_workers=num_workers,
        pin_memory=pin_memory,
        # torch refuses these without workers, but a YAML may turn workers off with one override.
        multiprocessing_context="fork" if num_workers else None,
        prefetch_factor=prefetch_factor if num_workers else None,
        persistent_workers=persistent_workers and num_workers > 0,
        timeout=timeout if num_workers else 0,
    )


def collate(rows_t: Sequence[Tensor]) -> dict[str, Tensor]:
    """Stack rows [t] into {"input_ids": [b, t]}."""
    return {"input_ids": torch.stack(list(rows_t))}


def batch_digest(tokens_bt: Tensor) -> int:
    """Hash a batch, whatever the order of its rows. Padding rows count 0.

    The sum, modulo 2**64, of each row's xxh3_64 over its little-endian int64 bytes. The digest of the global batch is
    the sum of those of all ranks, modulo 2**64 again, which int64 tensors compute by wrapping around.
    """
    rows_bt = np.ascontiguousarray(tokens_bt.detach().cpu().numpy(), "<i8")
    return sum(xxhash.xxh3_64_intdigest(row_t.tobytes()) for row_t in rows_bt if (row_t >= 0).any()) % 2**64


def format_digest(digest: int) -> str:
    """Format a digest as 16 hex digits. It may be negative, having been a signed int64."""
    return f"{digest % 2**64:016x}"


def _end_workers(loader: "weakref.ref[TextLoader]") -> None:
    """End the workers when the rank exits in the middle of an epoch, or has persistent ones.

    multiprocessing would send each worker one SIGTERM, which it ignores, and wait for ever.
    """
    reading = getattr(loader(), "_reading", None)
    iterator = reading() if reading is not None else None
    if iterator is not None and hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


def _prepare_worker(worker: int) -> None:
    """Keep this worker alive until its rank has saved, and end it soon after the rank dies."""
    # The garbage collector writes to every object that it visits. It would copy 100 MB of imported modules out of the
    # pages that the worker shares with its rank.
    gc.freeze()
    # SLURM sends a signal to every process of a step, not to the ranks alone. Only the first SIGTERM is ignored: torch
    # and multiprocessing end workers that way, each with one of its own.
    for number in set(LEAVING_SIGNALS) - {signal.SIGTERM, signal.SIGINT}:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(signal.SIGTERM, signal.SIG_DFL))
    # torch's workers check for their parent only between two batches. A worker that waits for the download of another
    # process would wait for ever once that was killed too.
    parent = parent_process()
    assert parent is not None
    rank = parent.pid  # it may be gone by now

    def watch() -> None:
        while os.getppid() == rank:
            sleep(1)
        os._exit(1)

    Thread(target=watch, daemon=True).start()
