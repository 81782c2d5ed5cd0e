"""The elastic order of samples for any training loop: a loader that knows its place.

`order.py` decides the order of samples, `dataset.py` reads them, and `loader.py` makes batches. `StatefulLoader`
adds the place, as torchdata's and torchtitan's loaders have it: `state_dict()` and `load_state_dict()`. `open_dataset`
builds one from a user's words; it is `lf.open_dataset`.
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
"""Words of other libraries -> ours, where the spelling is so different that it cannot be guessed."""


class StatefulLoader(TextLoader):
    """Batches `{"input_ids": int64 [b, t]}` of one rank. b is the global batch size over the number of ranks.

    Each iteration begins where `state_dict()` says, and goes to the end of the epoch; the next one is the next epoch.
    `len()` counts the batches of an epoch, where there are no stages. No batch is lost or repeated after `break`.
    """

    dataset: TextDataset
    _place = (0, 0)
    """Epoch, and samples of it that all ranks together have been given. Each batch that is yielded moves it on."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield batches from this place to the end of the epoch. The place counts a batch as soon as it is yielded."""
        self.dataset.set_position(*self._place)
        for batch in super().__iter__():
            epoch, num_samples = self._place
            self.move_to(epoch, num_samples + self.dataset.global_batch_size)
            yield batch

    def move_to(self, epoch: int, num_samples: int) -> None:
        """Set the place: `num_samples` of an epoch are done. The end of an epoch is the beginning of the next one."""
        epoch_samples = self.dataset.stages.num_batches(epoch) * self.dataset.global_batch_size
        is_end = num_samples >= epoch_samples
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
    """Open MDS shards and iterate over this rank's batches, in any training loop.

    Batch 1000 has the same samples on any number of ranks. By default the ranks are those of torch.distributed, and all
    of them must call this function together. Set `rank` and `world_size` for meshes in which several ranks share data.

    All other arguments are keys of [`train_loader.dataset`](data.md), such as `split`, `shuffle`, `shuffle_seed`,
    `streams`, `stages` and `remote`. `drop_last=False` fills the last batch with rows of -100.
    `tokenizer` is for shards of text, which are cut after `max_seq_len` tokens. It is a folder, a Hub name, or the
    `tokenizer` of a loaded model.

    >>> loader = lf.open_dataset("data/mine", split="train", shuffle=True, global_batch_size=8, max_seq_len=32)
    >>> for batch in loader:
    ...     break
    >>> batch["input_ids"].shape, batch["input_ids"].dtype
    (torch.Size([8, 32]), torch.int64)

    `state_dict()` is plain data and the same on every rank. Any other number of ranks can resume from it.

    >>> place = loader.state_dict()
    >>> place["epoch"], place["sample_in_epoch"]
    (0, 8)
    >>> same = dict(split="train", shuffle=True, global_batch_size=8, max_seq_len=32)
    >>> other = lf.open_dataset("data/mine", rank=1, world_size=2, **same)
    >>> other.load_state_dict(place)
    >>> bool((next(iter(other))["input_ids"] == next(iter(loader))["input_ids"][4:]).all())
    True

    Raises ConfigError for unknown arguments and impossible ranks. Raises DataError for data that cannot be read, for a
    batch that the ranks do not divide, and for samples of another length, unless `allow_truncation=True` lets it read
    the beginning of longer ones.
    """
    for word in dataset:
        if word in OTHER_WORDS:
            raise ConfigError(f"open_dataset: {word}: unknown word; did you mean {OTHER_WORDS[word]}?")
    if local is not None:
        dataset = {**dataset, "local": local}
    config = build_block(TextDatasetConfig, plain_words(dataset), "open_dataset")

    max_seq_len = whole_number("open_dataset: max_seq_len", max_seq_len)
    global_batch_size = whole_number("open_dataset: global_batch_size", global_batch_size)
    if not isinstance(tokenizer, Tokenizer | None):
        tokenizer = load_tokenizer(os.fspath(tokenizer))
    opened = TextDataset(
        config,
        max_seq_len=max_seq_len,
        global_batch_size=global_batch_size,
        drop_last=drop_last,
        tokenizer=tokenizer,
        data_rank_and_size=_choose_rank(rank, world_size),
    )
    num_workers = whole_number("open_dataset: num_workers", num_workers, least=0)
    return build_text_loader(opened, num_workers=num_workers, pin_memory=pin_memory, kind=StatefulLoader)


def _choose_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return this rank's part of each batch, and the number of parts: those of torch.distributed, or what is given.

    Raises ConfigError for impossible numbers, and where several ranks were launched but torch.distributed does not know
    of them, since then they could not open the data together.
    """
    own_rank, num_ranks = rank_and_size()
    num_launched = this_rank().world_size
    if num_launched > num_ranks:
        raise ConfigError(
            f"open_dataset: {num_launched} ranks were launched, and torch.distributed has {num_ranks}; call "
            "torch.distributed.init_process_group() first, as ranks open the data together"
        )

    if rank is None and world_size is None:
        return own_rank, num_ranks
    if rank is None or world_size is None:
        raise ConfigError("open_dataset: rank and world_size belong together; give both or neither")
    rank = whole_number("open_dataset: rank", rank, least=0)
    world_size = whole_number("open_dataset: world_size", world_size)
    if rank >= world_size:
        raise ConfigError(f"open_dataset: rank {rank} of {world_size} given, expected 0 to {world_size - 1}")
    return rank, world_size


def whole_number(name: str, value: Any, least: int = 1) -> int:
    """Return a whole number of any library, such as numpy's, as Python's int.

    Raises ConfigError for another value, and below `least`; `name` says whose value it is.
    """
    try:
        number = index(value)
    except TypeError:  # not a whole number, or a fraction
        number = None
    if number is None or number < least:
        raise ConfigError(f"{name} is {value!r}, expected a whole number from {least} on")
    return number


def plain_words(words: dict[str, Any]) -> dict[str, Any]:
    """Return settings of a program as a YAML file would have them: paths as text, numpy's numbers as Python's."""
    return json.loads(json.dumps(words, default=_as_plain))


def _as_plain(value: Any) -> Any:
    """Return a value that JSON does not know as one that it knows. Raises TypeError."""
    return value.item() if hasattr(value, "item") else os.fsdecode(value)
