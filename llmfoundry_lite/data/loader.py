"""Rows of token ids -> batches, read ahead by worker processes, and a digest of batches.

`build_text_loader` makes a `TextLoader` of a `TextDataset`. What differs from torch's DataLoader is how errors are told
and how processes end: a worker's error is one line, a rank that leaves does not wait for its workers, and workers do
not outlive their rank.

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
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import DataLoader

from llmfoundry_lite.data.dataset import TextDataset
from llmfoundry_lite.errors import DataError
from llmfoundry_lite.ranks.signals import LEAVING_SIGNALS

PARENT_CHECK_SECONDS = 1
"""Time after which a worker notices that its rank is gone."""

_unfinished_iterations: "weakref.WeakSet[Generator[dict[str, Tensor]]]" = weakref.WeakSet()
"""Iterations over loaders. Their threads are ended before the interpreter unloads its modules."""


@atexit.register
def _close_iterations() -> None:
    """Close all iterations that are not finished, when the interpreter ends."""
    for batches in list(_unfinished_iterations):
        with contextlib.suppress(ValueError):  # another thread is running it
            batches.close()


class TextLoader(DataLoader):
    """Batches `{"input_ids": int64 [b, t]}`, one for each global batch, in order for any `num_workers`.

    Unlike torch's DataLoader, it raises a worker's error as the one line it was raised with, and tells workers to leave
    before the interpreter does.
    """

    _newest_iterator: weakref.ref | None = None
    """Torch's iterator of the newest iteration, which owns the workers. None before the first iteration."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Iterate over an epoch's batches, from where the data set has been told to begin."""
        batches = self._read_epoch()
        _unfinished_iterations.add(batches)
        return batches

    def _read_epoch(self) -> Generator[dict[str, Tensor]]:
        """Begin the data set's epoch and yield its batches, with the errors of workers as they were raised."""
        assert isinstance(self.dataset, TextDataset)
        # Persistent workers have been forked already where torch has kept its iterator.
        forks_workers = self.num_workers > 0 and self._iterator is None
        try:
            self.dataset.begin_epoch(forks_workers=forks_workers)
            yield from self._start_iterator()
        except DataError as error:
            # torch wraps it as "Caught DataError in DataLoader worker process 0.\nOriginal Traceback …DataError: line",
            # and its traceback is part of a reference cycle, which keeps the iterator alive until the garbage
            # collector takes its queues apart before its workers: two processes that wait 5 s each.
            error.with_traceback(None)
            line = str(error).rsplit("DataError: ", 1)[-1].strip()
            raise type(error)(line) from error.__cause__

    def _start_iterator(self) -> Iterator[dict[str, Tensor]]:
        """Make torch's iterator, which forks the workers, and see to it that they end with this process."""
        iterator = super().__iter__()
        is_first = self._newest_iterator is None
        if self.num_workers and is_first:
            atexit.register(_end_workers, weakref.ref(self))
        self._newest_iterator = weakref.ref(iterator)
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
    """Build a loader of this rank's batches. `kind` is its class; the other options are those of torch's DataLoader.

    Options that only workers need are dropped without workers. torch would refuse them, but a YAML may turn workers off
    with one override.
    """
    return kind(
        dataset,
        batch_size=dataset.device_batch_size,
        collate_fn=collate,
        worker_init_fn=_prepare_worker,
        num_workers=num_workers,
        pin_memory=pin_memory,
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
    digest = 0
    for row_t in rows_bt:
        has_tokens = (row_t >= 0).any()
        if has_tokens:
            digest += xxhash.xxh3_64_intdigest(row_t.tobytes())
    return digest % 2**64


def format_digest(digest: int) -> str:
    """Format a digest as 16 hex digits. It may be negative, having been a signed int64."""
    return f"{digest % 2**64:016x}"


def _end_workers(loader_reference: "weakref.ref[TextLoader]") -> None:
    """End the workers when the rank exits in the middle of an epoch, or has persistent ones.

    multiprocessing would send each worker one SIGTERM, which it ignores, and wait for it without a limit.
    """
    loader = loader_reference()
    if loader is None or loader._newest_iterator is None:
        return
    iterator = loader._newest_iterator()
    if iterator is not None and hasattr(iterator, "_shutdown_workers"):  # torch's iterator without workers has none
        iterator._shutdown_workers()


def _prepare_worker(worker: int) -> None:
    """Keep this worker alive until its rank has saved, and end it soon after the rank dies. Runs in the worker."""
    # The garbage collector writes to every object that it visits. It would copy 100 MB of imported modules out of the
    # pages that the worker shares with its rank.
    gc.freeze()

    # SLURM sends a signal to every process of a step, not to the ranks alone. Only the first SIGTERM is ignored: torch
    # and multiprocessing end workers that way, each with one of its own.
    for number in set(LEAVING_SIGNALS) - {signal.SIGTERM, signal.SIGINT}:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _obey_next_sigterm)

    # torch's workers check for their parent only between two batches. A worker that waits for the download of another
    # process would wait without end once that was killed too.
    parent = parent_process()
    assert parent is not None
    Thread(target=_leave_after, args=[parent.pid], daemon=True).start()


def _obey_next_sigterm(number: int, frame: Any) -> None:
    """Ignore this SIGTERM, and let the next one end the process. A handler of signals."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _leave_after(rank_pid: int | None) -> None:
    """End this worker once its rank has ended, which may be so from the beginning."""
    while os.getppid() == rank_pid:
        sleep(PARENT_CHECK_SECONDS)
    os._exit(1)
