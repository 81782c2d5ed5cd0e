"""The elastic order of samples for any training loop: a loader that keeps track of its position.

`order.py` decides the order of samples, `dataset.py` reads them, and `loader.py` makes batches. `StatefulLoader` adds
the position in the data, with `state_dict()` and `load_state_dict()` as in the loaders of torchdata and torchtitan.
`open_dataset`, which is public as `lf.open_dataset`, builds one from keyword arguments.
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

OTHER_LIBRARIES_NAMES = {
    "batch_size": "global_batch_size, of all ranks together",
    "seed": "shuffle_seed",
    "path": "local",
}
"""Argument names of other libraries -> ours, where spelling alone does not suggest the right one."""


class StatefulLoader(TextLoader):
    """Loader of one rank's batches, `{"input_ids": int64 [b, t]}`, that can save and restore its position.

    b is the global batch size divided by the number of ranks, and t is `max_seq_len`. An iteration begins at the
    current position and ends with the epoch; the next iteration is the next epoch. After a `break`, the next iteration
    goes on with the following batch, so none is lost or repeated. `len()` is the number of batches in an epoch; it
    raises TypeError for data with stages, whose epochs differ in length.
    """

    dataset: TextDataset
    _position = (0, 0)
    """Epoch, and number of its samples that have been yielded on all ranks together. Every batch advances it."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        """Yield batches from the current position to the end of the epoch.

        The position advances just before a batch is yielded, so a state saved while the caller trains on the batch
        counts it as done.
        """
        self.dataset.set_position(*self._position)
        for batch in super().__iter__():
            epoch, num_samples = self._position
            self.set_position(epoch, num_samples + self.dataset.global_batch_size)
            yield batch

    def set_position(self, epoch: int, num_samples: int) -> None:
        """Set the position to `num_samples` samples after the beginning of an epoch, counted over all ranks.

        The end of an epoch becomes the beginning of the next one.
        """
        epoch_samples = self.dataset.stages.num_batches(epoch) * self.dataset.global_batch_size
        is_epoch_done = num_samples >= epoch_samples
        self._position = (epoch + 1, 0) if is_epoch_done else (epoch, num_samples)

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON-compatible data.

        It is the same on every rank, and any number of ranks can load it.
        """
        epoch, num_samples = self._position
        return self.dataset.state_dict(num_samples, epoch=epoch)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the position of a `state_dict`.

        Raises DataError if the data, batch size, seed or shuffling differ.
        """
        self.dataset.load_state_dict(state_dict)
        self.set_position(state_dict["epoch"], state_dict["sample_in_epoch"])

    def __getitem__(self, index: Any) -> NoReturn:
        """Raise TypeError, so that torch's DataLoader does not take this loader for a data set.

        Its workers would advance copies of the position, and this object's position would stay behind.
        """
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
    of them must call this function together. Set `rank` and `world_size` if several ranks read the same data.

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
    # Check the arguments, and build the configuration of the data set from them.
    for name in dataset:
        if name in OTHER_LIBRARIES_NAMES:
            raise ConfigError(f"open_dataset: {name}: unknown word; did you mean {OTHER_LIBRARIES_NAMES[name]}?")
    if local is not None:
        dataset = {**dataset, "local": local}
    config = build_block(TextDatasetConfig, to_yaml_values(dataset), "open_dataset")

    max_seq_len = whole_number("open_dataset: max_seq_len", max_seq_len)
    global_batch_size = whole_number("open_dataset: global_batch_size", global_batch_size)
    if not isinstance(tokenizer, Tokenizer | None):
        tokenizer = load_tokenizer(os.fspath(tokenizer))

    # Open the data on all ranks together.
    text_dataset = TextDataset(
        config,
        max_seq_len=max_seq_len,
        global_batch_size=global_batch_size,
        drop_last=drop_last,
        tokenizer=tokenizer,
        data_rank_and_size=_choose_rank(rank, world_size),
    )
    num_workers = whole_number("open_dataset: num_workers", num_workers, minimum=0)
    return build_text_loader(text_dataset, num_workers=num_workers, pin_memory=pin_memory, loader_class=StatefulLoader)


def _choose_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return the data rank and the number of data ranks: the arguments, or those of torch.distributed for None.

    A global batch is divided evenly among data ranks. Raises ConfigError for impossible numbers, and if several ranks
    were launched but torch.distributed is not initialized on them, because ranks open the data together.
    """
    # Compare the launcher's number of ranks with torch's.
    this_process_rank, num_ranks = rank_and_size()
    num_launched = this_rank().world_size
    if num_launched > num_ranks:
        raise ConfigError(
            f"open_dataset: {num_launched} ranks were launched, and torch.distributed has {num_ranks}; call "
            "torch.distributed.init_process_group() first, as ranks open the data together"
        )

    # Use torch's rank, or check the arguments.
    if rank is None and world_size is None:
        return this_process_rank, num_ranks
    if rank is None or world_size is None:
        raise ConfigError("open_dataset: rank and world_size belong together; give both or neither")
    rank = whole_number("open_dataset: rank", rank, minimum=0)
    world_size = whole_number("open_dataset: world_size", world_size)
    if rank >= world_size:
        raise ConfigError(f"open_dataset: rank {rank} of {world_size} given, expected 0 to {world_size - 1}")
    return rank, world_size


def whole_number(name: str, value: Any, minimum: int = 1) -> int:
    """Convert an integer of any library, such as numpy's, to Python's int.

    Raises ConfigError for any other value, and for a number below `minimum`. Errors begin with `name`.
    """
    try:
        number = index(value)
    except TypeError:  # not a whole number, or a fraction
        number = None
    if number is None or number < minimum:
        raise ConfigError(f"{name} is {value!r}, expected a whole number from {minimum} on")
    return number


def to_yaml_values(settings: dict[str, Any]) -> dict[str, Any]:
    """Convert settings to the types that a YAML file has: paths to strings, and numpy's numbers to Python's.

    Raises TypeError for a value of any other type.
    """
    return json.loads(json.dumps(settings, default=_as_plain))


def _as_plain(value: Any) -> Any:
    """Convert a value that JSON has no type for: numpy's numbers and paths. Raises TypeError for others."""
    return value.item() if hasattr(value, "item") else os.fsdecode(value)
