"""Batches whose size or length changes during a run, made of the batches that the data set has.

`join_batches` is for `batch_size_schedule`, and `cut_rows` for `seq_len_schedule`. The order of samples depends on
`global_train_batch_size` alone. A larger batch is several consecutive batches of that size, so any schedule reads the
same samples in the same order. The place in the data, and the end of an epoch, are functions of the number of the
batch.
"""

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from llmfoundry_lite.config.batch_schedule import PerBatch
from llmfoundry_lite.data.dataset import TextDataset


def join_batches(loader: Iterable[dict[str, torch.Tensor]], dataset: TextDataset, batch: int) -> Iterator[Any]:
    """Yield this rank's part of each batch of a run, from the one after the first `batch` batches to the epoch's end.

    loader: yields the rest of an epoch of `dataset` each time it is iterated over, in batches of the data set's own
        size, and then begins with the next epoch.

    A batch in which an epoch ends may have samples of two epochs, as no batch is smaller than the schedule says. It is
    the last one that is yielded. Sets the position of `dataset`.
    """
    dataset.set_position(*dataset.position_after(batch))
    small_batches = iter(loader)
    while True:
        parts: list[dict[str, torch.Tensor]] = []
        for _ in range(dataset.parts_of_batches.of(batch)):
            part = next(small_batches, None)
            if part is None:  # the epoch ends within this batch
                small_batches = iter(loader)
                part = next(small_batches)
            parts.append(part)
        if len(parts) == 1:
            yield parts[0]  # `torch.cat` would copy it, out of pinned memory
        else:
            yield {"input_ids": torch.cat([part["input_ids"] for part in parts])}

        batch += 1
        if is_epoch_over(dataset, batch):
            return


def cut_rows(batches: Iterable[dict[str, torch.Tensor]], seq_lens: PerBatch, batch: int) -> Iterator[Any]:
    """Yield batches with their samples cut into rows, whose length `seq_lens` decides for each batch.

    batches: those of a run after its first `batch` batches, {"input_ids": [samples, max_seq_len]}.

    With rows of L tokens, a batch becomes [samples * max_seq_len / L, L]: a sample's rows follow each other.
    """
    for whole_samples in batches:
        yield {"input_ids": whole_samples["input_ids"].reshape(-1, seq_lens.of(batch))}
        batch += 1


def is_epoch_over(dataset: TextDataset, batch: int) -> bool:
    """Return whether an epoch of the data has ended in the last of a run's first `batch` batches."""
    epoch_before, _ = dataset.position_after(batch - 1)
    epoch, _ = dataset.position_after(batch)
    return epoch > epoch_before
