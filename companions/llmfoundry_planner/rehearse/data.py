"""Made-up samples for a rehearsal. They are as long as the run's own, and no file is read."""

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

NUM_BATCHES = 1000
"""Batches of an epoch: more than any rehearsal trains."""


class MadeUp(Dataset):
    """A dataset of samples {"input_ids": int64 [t]}, all of them the same t token ids 0, 1, 2 and so on."""

    def __init__(self, num_samples: int, num_tokens: int, vocab_size: int):
        self.num_samples = num_samples
        self.row_t = torch.arange(num_tokens) % vocab_size

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.row_t}


def load(
    device_batch_size: int, num_workers: int, drop_last: bool, *, num_tokens: int, vocab_size: int, num_data_ranks: int
) -> DataLoader:
    """Return the `train_loader` of a rehearsal, with samples of `num_tokens` tokens.

    device_batch_size, num_workers, drop_last: as the run's configuration gives them to every loader. There are no
    workers, because samples need no reading.
    num_data_ranks: the ranks among which an epoch is divided. The rank that is rehearsed reads as data rank 0.
    """
    dataset = MadeUp(NUM_BATCHES * device_batch_size * num_data_ranks, num_tokens, vocab_size)
    sampler = DistributedSampler(dataset, num_data_ranks, rank=0, shuffle=False)
    return DataLoader(dataset, device_batch_size, sampler=sampler, drop_last=drop_last, pin_memory=True)
