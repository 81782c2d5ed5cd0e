"""Rows of token ids -> batches, read ahead by worker processes, and the digest that tells whether two are the same.

Owns collation, the loader, how long its workers live, and the batch digest. Leaves the rows to `dataset.py`.

Shapes: b = samples in the batch of one rank, t = max_seq_len.
"""

import atexit
import gc
import multiprocessing
import os
import signal
import weakref
from collections.abc import Iterator, Sequence
from threading import Thread
from time import sleep

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import DataLoader

from llmfoundry_lite.data.dataset import TextDataset
from llmfoundry_lite.errors import DataError


def build_text_loader(
    dataset: TextDataset,
    *,
    num_workers: int = 0,
    pin_memory: bool = False,
    prefetch_factor: int | None = None,
    persistent_workers: bool = False,
    timeout: float = 0,
) -> "TextLoader":
    """A DataLoader of `{"input_ids": int64 tensor [b, t]}`, one a global batch, in order for any `num_workers`."""
    return TextLoader(
        dataset,
        batch_size=dataset.device_batch_size,
        collate_fn=collate,
        worker_init_fn=_stay_with_the_rank,
        num_workers=num_workers,
        pin_memory=pin_memory,
        # torch refuses these three without workers, but a YAML may turn workers off with one override.
        prefetch_factor=prefetch_factor if num_workers else None,
        persistent_workers=persistent_workers and num_workers > 0,
        timeout=timeout if num_workers else 0,
    )


def collate(rows_t: Sequence[Tensor]) -> dict[str, Tensor]:
    """Rows [t] -> {"input_ids": [b, t]}."""
    return {"input_ids": torch.stack(list(rows_t))}


class TextLoader(DataLoader):
    """torch's DataLoader, except that an error of a worker arrives as the one line it was raised with, and that workers
    are told to leave before the interpreter does."""

    _reading: weakref.ref | None = None
    """The iterator that has the workers."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        assert isinstance(self.dataset, TextDataset)
        try:
            if self.num_workers and self._iterator is None:  # workers are about to be forked
                self.dataset.lay_out_next_epoch()
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


def batch_digest(tokens_bt: Tensor) -> int:
    """A number that two batches share if and only if they hold the same rows, in any order (padding rows count 0).

    The sum, modulo 2**64, of each row's xxh3_64 over its little-endian int64 bytes: summing the numbers of all ranks
    modulo 2**64 (int64 tensors wrap around just so) gives the digest of the global batch.
    """
    rows_bt = np.ascontiguousarray(tokens_bt.detach().cpu().numpy(), "<i8")
    return sum(xxhash.xxh3_64_intdigest(row_t.tobytes()) for row_t in rows_bt if (row_t >= 0).any()) % 2**64


def format_digest(digest: int) -> str:
    """16 hex digits; a digest that went through a signed int64 is understood too."""
    return f"{digest % 2**64:016x}"


def _end_workers(loader: "weakref.ref[TextLoader]") -> None:
    """When the rank exits in the middle of an epoch, or keeps its workers: multiprocessing would send each the one
    SIGTERM that it passes over, and wait for it for ever."""
    reading = getattr(loader(), "_reading", None)
    iterator = reading() if reading is not None else None
    if iterator is not None and hasattr(iterator, "_shutdown_workers"):
        iterator._shutdown_workers()


def _stay_with_the_rank(worker: int) -> None:
    # The garbage collector writes to every object that it looks at, and so would copy all that the rank has imported,
    # 100 MB, from the pages that rank and workers share.
    gc.freeze()
    _outlive_preemption()
    _leave_with_the_rank()


def _outlive_preemption() -> None:
    """Serve the rank until it has saved: SLURM sends a signal to every process of a step, not to the ranks alone.

    Only the first SIGTERM is passed over. torch and multiprocessing end workers that way, each with one of its own.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, frame: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def _leave_with_the_rank() -> None:
    """End a DataLoader worker soon after its rank was killed.

    torch's workers look for their parent only between two batches; one that waits at StreamingDataset's barrier, for
    others that were killed as well, would wait, and hold on to its shared memory, for ever.
    """
    rank = multiprocessing.parent_process()
    assert rank is not None
    # A process of the fork server is not a child of the rank; one of `fork` may hold the pipe by which another would
    # see the rank end.
    is_child = multiprocessing.get_start_method() != "forkserver"

    def watch() -> None:
        while rank.is_alive() and (os.getppid() == rank.pid or not is_child):
            sleep(1)
        os._exit(1)

    Thread(target=watch, daemon=True).start()
