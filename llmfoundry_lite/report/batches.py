"""The very samples of a run's batches, read again from its data."""

import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.data_schema import LoaderConfig
from llmfoundry_lite.data.dataset import TextDataset
from llmfoundry_lite.data.loader import batch_digest, build_text_loader, format_digest
from llmfoundry_lite.data.stateful import StatefulLoader
from llmfoundry_lite.data.tokenizer import LazyTokenizer
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.report.reading import Run, read_run


class Batch(NamedTuple):
    """A global batch: its number in the log, its rows [b, t], and its `data/digest`."""

    batch: int
    tokens_bt: NDArray[np.int64]
    digest: str


def batches(run: str | os.PathLike[str], first: int, last: int | None = None, **dataset: Any) -> Iterator[Batch]:
    """Read the samples of a run's batches again, from `first` to `last`, both included.

    Each has the rows of all ranks, as int64 [batch, tokens]. Its digest is compared with `data/digest` in the log,
    where the log has that batch. Batches that the run has not reached yet are those it will train on. `dataset` has
    words of [`train_loader.dataset`](data.md) that differ here, such as `local`.

    >>> for batch in lf.batches("runs/tiny", 3, 4):
    ...     print(batch.batch, batch.tokens_bt.shape)
    3 (8, 32)
    4 (8, 32)
    >>> batch.digest == lf.read_run("runs/tiny").log.digest[3]
    True

    Raises DataError if the data is not there, or is not what the run was trained on.
    """
    last = first if last is None else last
    if not 1 <= first <= last:
        raise ConfigError(f"batches {first} to {last} given, expected two numbers from 1 on, the smaller first")
    found = read_run(run)
    loader = _open(found, dataset)
    epoch, num_batches = divmod(first - 1, len(loader))
    loader.move_to(epoch, num_batches * loader.dataset.global_batch_size)
    return _read(found, loader, first, last)


def _open(run: Run, changes: dict[str, Any]) -> StatefulLoader:
    config: Any = run.config
    if not isinstance(config, dict) or "train_loader" not in config:
        raise DataError(f"{run.where}: the run's configuration is not there, which names its data")
    block = {**config["train_loader"], "dataset": {**(config["train_loader"].get("dataset") or {}), **changes}}
    loader: LoaderConfig = build_block(LoaderConfig, block, "train_loader")
    if loader.name != "text":
        raise DataError(f"{run.where}: its batches come from {loader.name}; only shards can be read again")
    tokenizer: Any = (config.get("tokenizer") or {}).get("name")
    dataset = TextDataset(
        loader.dataset,
        max_seq_len=config["max_seq_len"],
        global_batch_size=config["global_train_batch_size"],
        drop_last=loader.drop_last,
        vocab_size=config["model"]["vocab_size"],
        tokenizer=LazyTokenizer(tokenizer),
        share=(0, 1),
    )
    return build_text_loader(dataset, kind=StatefulLoader)


def _read(run: Run, loader: StatefulLoader, first: int, last: int) -> Iterator[Batch]:
    logged = dict(zip(run.log.batch.tolist(), run.log.digest, strict=True))
    number = first
    while number <= last:
        for rows in loader:
            tokens_bt = rows["input_ids"]
            digest = format_digest(batch_digest(tokens_bt))
            if (there := logged.get(number)) is not None and there != digest:
                raise DataError(
                    f"batch {number} has data/digest {digest} here and {there} in the log of {run.where}; the data or "
                    "its settings are not those it was trained with"
                )
            yield Batch(number, tokens_bt.numpy(), digest)
            number += 1
            if number > last:
                break
