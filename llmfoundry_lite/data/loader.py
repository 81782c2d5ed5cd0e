"""Rows of token ids -> batches, read ahead by worker processes, and a digest of batches.

`build_text_loader` builds a `TextLoader` for a `TextDataset`. It differs from torch's DataLoader in how it reports
errors and ends processes: a worker's error is one line, a rank that exits does not wait for its workers, and workers
exit when their rank does.

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
"""Time between two checks of a worker whether its rank is still running."""

_unfinished_iterations: "weakref.WeakSet[Generator[dict[str, Tensor]]]" = weakref.WeakSet()
"""Iterations over loaders that may still have threads, which must end before the interpreter unloads its modules."""


@atexit.register
def _close_iterations() -> None:
    """Close all iterations that are not finished. The interpreter calls this when it exits."""
    for batches in list(_unfinished_iterations):
        with contextlib.suppress(ValueError):  # another thread is running it
            batches.close()


class TextLoader(DataLoader):
    """Loader of one rank's part of each global batch: `{"input_ids": int64 [b, t]}`, b samples of t tokens.

    Batches are in the same order for any `num_workers`. Unlike torch's DataLoader, it raises a worker's error with its
    original text, and ends the workers before the interpreter exits.
    """

    _newest_iterator: weakref.ref | None = None
    """Torch's iterator of the most recent iteration, which owns the workers. None before the first iteration."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Iterate over the rest of an epoch's batches, from the position that the data set has been set to."""
        batches = self._read_epoch()
        _unfinished_iterations.add(batches)
        return batches

    def _read_epoch(self) -> Generator[dict[str, Tensor]]:
        """Start an epoch of the data set and yield its batches. A DataError of a worker is raised with its own text."""
        assert isinstance(self.dataset, TextDataset)
        # If torch has kept its iterator, persistent workers are running already.
        forks_workers = self.num_workers > 0 and self._iterator is None
        try:
            self.dataset.begin_epoch(forks_workers=forks_workers)
            yield from self._start_iterator()
        except DataError as error:
            # torch changes the text to "Caught DataError in DataLoader worker process 0.\nOriginal Traceback …
            # DataError: line". The error's traceback is part of a reference cycle that includes torch's iterator. The
            # garbage collector would close its queues before its workers, and two processes would wait 5 s each.
            error.with_traceback(None)
            line = str(error).rsplit("DataError: ", 1)[-1].strip()
            raise type(error)(line) from error.__cause__

    def _start_iterator(self) -> Iterator[dict[str, Tensor]]:
        """Create torch's iterator, which forks the workers, and register that they end when this process exits."""
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
    loader_class: type[Loader] = TextLoader,
) -> Loader:
    """Build a loader of this rank's batches, of class `loader_class`. Other options are those of torch's DataLoader.

    With `num_workers=0`, options that concern only workers are ignored. torch would raise an error, but a user should
    be able to switch off the workers of a YAML file with a single override.
    """
    return loader_class(
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
    """Stack b samples of t tokens each, as tensors [t], into a batch {"input_ids": tensor [b, t]}."""
    return {"input_ids": torch.stack(list(rows_t))}


def batch_digest(tokens_bt: Tensor) -> int:
    """Return a digest of a batch of token ids [samples, tokens] that does not depend on the order of samples.

    It is the sum, modulo 2**64, of the xxh3_64 hash of each row's little-endian int64 bytes. Rows of padding are left
    out. The digest of the global batch is the sum over all ranks, again modulo 2**64; int64 tensors compute it, because
    they wrap around.
    """
    rows_bt = np.ascontiguousarray(tokens_bt.detach().cpu().numpy(), "<i8")
    digest = 0
    for row_t in rows_bt:
        has_tokens = (row_t >= 0).any()
        if has_tokens:
            digest += xxhash.xxh3_64_intdigest(row_t.tobytes())
    return digest % 2**64


def format_digest(digest: int) -> str:
    """Format a digest as 16 hex digits. A negative digest, from a signed int64, is taken modulo 2**64."""
    return f"{digest % 2**64:016x}"


def _end_workers(loader_reference: "weakref.ref[TextLoader]") -> None:
    """End a loader's workers when the interpreter of the rank exits, in mid-epoch or with persistent workers.

    Without this, multiprocessing would send each worker a single SIGTERM, which it ignores, and wait for it forever.
    """
    loader = loader_reference()
    if loader is None or loader._newest_iterator is None:
        return
    iterator = loader._newest_iterator()
    if iterator is not None and hasattr(iterator, "_shutdown_workers"):  # without workers, torch's iterator lacks it
        iterator._shutdown_workers()


def _prepare_worker(worker: int) -> None:
    """Prepare a worker process: it survives the signals that stop a run, and exits soon after its rank does.

    torch's DataLoader calls this in each worker. The rank still needs its workers while it finishes the batch and saves
    a checkpoint after such a signal.
    """
    # The garbage collector writes to every object that it visits. That would copy the 100 MB of imported modules, which
    # the worker otherwise shares with its rank.
    gc.freeze()

    # SLURM sends its signals to every process of a step, including workers. Only the first SIGTERM is ignored, because
    # torch and multiprocessing end workers by sending another one.
    for number in set(LEAVING_SIGNALS) - {signal.SIGTERM, signal.SIGINT}:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _accept_next_sigterm)

    # torch's workers check only between two batches whether their parent still runs. A worker that waits for another
    # process to download a shard would wait forever if that process is killed too.
    parent = parent_process()
    assert parent is not None
    Thread(target=_exit_after_rank, args=[parent.pid], daemon=True).start()


def _accept_next_sigterm(number: int, frame: Any) -> None:
    """Signal handler: ignore this SIGTERM, and let the next one end the process."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _exit_after_rank(rank_pid: int | None) -> None:
    """Exit this worker process as soon as its rank has ended. Runs in a thread of the worker."""
    while os.getppid() == rank_pid:
        sleep(PARENT_CHECK_SECONDS)
    os._exit(1)
