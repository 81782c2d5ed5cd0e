"""Made-up samples for a rehearsal: as many tokens as the run's own, and no file behind them."""

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler

NUM_BATCHES = 1000


class MadeUp(Dataset):
    """int64 [t] token ids, the same at each index."""

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
    """Return the `train_loader` of a rehearsal."""
    dataset = MadeUp(NUM_BATCHES * device_batch_size * num_data_ranks, num_tokens, vocab_size)
    sampler = DistributedSampler(dataset, num_data_ranks, rank=0, shuffle=False)
    return DataLoader(dataset, device_batch_size, sampler=sampler, drop_last=drop_last, pin_memory=True)
