"""The elastic order of samples for any training loop: a loader that knows its place.

`order.py` decides the order of samples, `dataset.py` reads them, and `loader.py` makes batches. `StatefulLoader`
adds the place, as torchdata's and torchtitan's loaders have it: `state_dict()` and `load_state_dict()`.
"""

import json
import os
from collections.abc import Iterator
from operator import index
from typing import Any, NoReturn

from torch import Tensor

from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.data_schema import TextDatasetConfig
from llmfoundry_lite.data.dataset import TextDataset
from llmfoundry_lite.data.loader import TextLoader, build_text_loader
from llmfoundry_lite.data.tokenizer import Tokenizer, load_tokenizer
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.ranks.exchange import rank_and_size
from llmfoundry_lite.ranks.rank import this_rank

OTHER_WORDS = {"batch_size": "global_batch_size, of all ranks together", "seed": "shuffle_seed", "path": "local"}
"""Words of other libraries -> ours, where the spelling is too different to guess by."""


class StatefulLoader(TextLoader):
    """Batches `{"input_ids": int64 [b, t]}` of one rank. b is the global batch size over the number of ranks.

    Each iteration begins where `state_dict()` says, and goes to the end of the epoch; the next one is the next epoch.
    `len()` counts the batches of an epoch, where there are no stages. No batch is lost or repeated after `break`.
    """

    dataset: TextDataset
    _place = (0, 0)
    """Epoch, and samples of it that all ranks together have been given."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        self.dataset.begin_at(*self._place)
        for batch in super().__iter__():
            epoch, num_samples = self._place
            self.move_to(epoch, num_samples + self.dataset.global_batch_size)
            yield batch

    def move_to(self, epoch: int, num_samples: int) -> None:
        """Begin the next iteration here. The end of an epoch is the beginning of the next one."""
        is_end = num_samples >= self.dataset.stages.num_batches(epoch) * self.dataset.global_batch_size
        self._place = (epoch + 1, 0) if is_end else (epoch, num_samples)

    def state_dict(self) -> dict[str, Any]:
        """Return the place: plain numbers and texts, the same on every rank, which any number of ranks loads."""
        epoch, num_samples = self._place
        return self.dataset.state_dict(num_samples, epoch=epoch)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the place of a `state_dict`. Raises DataError for one of other data, batch size, seed or shuffling."""
        self.dataset.load_state_dict(state_dict)
        self.move_to(state_dict["epoch"], state_dict["sample_in_epoch"])

    def __getitem__(self, index: Any) -> NoReturn:
        """Refuse to be the data set of another DataLoader: its workers would leave this place behind."""
        raise TypeError("this is a loader: iterate over it. For worker processes: open_dataset(..., num_workers=2)")


def open_dataset(
    local: str | os.PathLike[str] | None = None,
    *,
    global_batch_size: int,
    max_seq_len: int,
    rank: int | None = None,
    world_size: int | None = None,
    num_workers: int = 0,
    pin_memory: bool = False,
    drop_last: bool = True,
    tokenizer: str | os.PathLike[str] | Tokenizer | None = None,
    **dataset: Any,
) -> StatefulLoader:
    """Open MDS shards as this rank's batches, for any training loop.

    Batch 1000 holds the same samples on any number of ranks. The other words are those of
    [`train_loader.dataset`](data.md): `split`, `shuffle`, `shuffle_seed`, `streams`, `stages`, `remote`. Ranks are
    those of torch.distributed, all of which call this together. `rank` and `world_size` are for meshes whose ranks
    share data.
    `drop_last=False` fills the last batch with rows of -100. `tokenizer` is for shards of text, each cut after
    `max_seq_len` tokens: a folder, a Hub name, or a loaded model's `tokenizer`.

    >>> loader = lf.open_dataset("data/mine", split="train", shuffle=True, global_batch_size=8, max_seq_len=32)
    >>> for batch in loader:
    ...     break
    >>> batch["input_ids"].shape, batch["input_ids"].dtype
    (torch.Size([8, 32]), torch.int64)

    The place is plain data, the same on every rank. Any other number of ranks carries on from it.

    >>> place = loader.state_dict()
    >>> place["epoch"], place["sample_in_epoch"]
    (0, 8)
    >>> same = dict(split="train", shuffle=True, global_batch_size=8, max_seq_len=32)
    >>> other = lf.open_dataset("data/mine", rank=1, world_size=2, **same)
    >>> other.load_state_dict(place)
    >>> bool((next(iter(other))["input_ids"] == next(iter(loader))["input_ids"][4:]).all())
    True

    Raises ConfigError for unknown words and impossible ranks. Raises DataError for data that cannot be read, and for a
    batch that the ranks do not divide. So it does for samples of another length. `allow_truncation=True` reads the
    beginning of longer ones.
    """
    if word := next((one for one in dataset if one in OTHER_WORDS), None):
        raise ConfigError(f"open_dataset: {word}: unknown word; did you mean {OTHER_WORDS[word]}?")
    words = plain_words(dataset if local is None else {**dataset, "local": local})
    config = build_block(TextDatasetConfig, words, "open_dataset")
    opened = TextDataset(
        config,
        max_seq_len=whole_number("open_dataset: max_seq_len", max_seq_len),
        global_batch_size=whole_number("open_dataset: global_batch_size", global_batch_size),
        drop_last=drop_last,
        tokenizer=tokenizer if isinstance(tokenizer, Tokenizer | None) else load_tokenizer(os.fspath(tokenizer)),
        share=_share(rank, world_size),
    )
    num_workers = whole_number("open_dataset: num_workers", num_workers, least=0)
    return build_text_loader(opened, num_workers=num_workers, pin_memory=pin_memory, kind=StatefulLoader)


def _share(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return this rank's part of each batch, and the number of parts."""
    here, size = rank_and_size()
    num_launched = this_rank().world_size
    if num_launched > size:
        raise ConfigError(
            f"open_dataset: {num_launched} ranks were launched, and torch.distributed has {size}; call "
            "torch.distributed.init_process_group() first, as ranks open the data together"
        )
    if rank is None or world_size is None:
        if rank is not None or world_size is not None:
            raise ConfigError("open_dataset: rank and world_size belong together; give both or neither")
        return here, size
    rank, world_size = whole_number("open_dataset: rank", rank, 0), whole_number("open_dataset: world_size", world_size)
    if rank >= world_size:
        raise ConfigError(f"open_dataset: rank {rank} of {world_size} given, expected 0 to {world_size - 1}")
    return rank, world_size


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """Return a whole number of any library as Python's int. Raises ConfigError."""
    try:
        number = index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise ConfigError(f"{name} is {value!r}, expected a whole number from {least} on")
    return number


def plain_words(words: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a program as a YAML file would have them: paths as text, numpy's numbers as Python's."""
    plain = lambda value: value.item() if hasattr(value, "item") else os.fsdecode(value)  # noqa: E731
    return json.loads(json.dumps(words, default=plain))
