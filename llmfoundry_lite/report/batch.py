"""The rows of a run's batches: where they come from, their text, and the loss of each.

The order of samples is a pure function, so no log of rows is needed: the batch is read again, and its digest shows that
it is the one that was trained.
"""

import itertools
import math
import os
import secrets
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from llmfoundry_lite.checkpoint.store import open_checkpoint
from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.data_schema import LoaderConfig
from llmfoundry_lite.config.layers import Layer, lay_over, leaf_keys, merge_layers, read_layers
from llmfoundry_lite.config.replayed import refuse_unresolved, without
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.convert.tokenizer import find_tokenizer
from llmfoundry_lite.data.dataset import TextDataset
from llmfoundry_lite.data.folder_locks import check_not_held
from llmfoundry_lite.data.loader import batch_digest, build_text_loader, format_digest
from llmfoundry_lite.data.order import NO_SAMPLE
from llmfoundry_lite.data.recorded import DataLocations, locations_at
from llmfoundry_lite.data.stateful import StatefulLoader, plain_words, whole_number
from llmfoundry_lite.data.streams import build_folders
from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.evaluation.items import Request
from llmfoundry_lite.evaluation.models import Placement, find_checkpoint, load_checkpoint, model_config_of, separator_of
from llmfoundry_lite.evaluation.packing import Separator
from llmfoundry_lite.evaluation.scoring import score
from llmfoundry_lite.models.attention import number_documents
from llmfoundry_lite.report.reading import METRICS, Run, read_run

OF_DATA = ("train_loader", "global_train_batch_size", "max_seq_len", "max_duration", "tokenizer", "model")
"""Blocks of a configuration that say which rows a batch has, and what they are."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A sample of a batch."""

    stream: str
    """Name in `streams`, or the folder of a single data set."""
    shard: str
    sample: int
    """Index in the shard."""
    tokens_t: NDArray[np.int64]
    """Without padding."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """A batch of a run, and what is known of it."""

    run: str
    number: int
    epoch: int
    rows: list[Row]
    digest: str
    logged_digest: str | None
    """The log's digest, which equals `digest`; None where the log has none."""
    tokenizer: Tokenizer | None
    """None where it is not on this machine."""
    separator: Separator | None
    """The token between documents, as far as it is known."""
    checkpoint: str | None
    """URL of the run's newest checkpoint."""

    def text(self, row: Row) -> str:
        if self.tokenizer is None:
            return " ".join(map(str, row.tokens_t))
        return self.tokenizer.decode(row.tokens_t.tolist())

    def num_documents(self, row: Row) -> int | None:
        """Count documents that have a token in the row, besides the one that divides them."""
        if self.separator is None:
            return None
        tokens_bt = torch.from_numpy(row.tokens_t)[None]
        return int(number_documents(tokens_bt, self.separator.token, begins=self.separator.begins).unique().numel())


def read_batch(where: str, number: int, changes: Sequence[str] = ()) -> Batch:
    """Read batch `number` of a run again; the first is 1. `changes` (key=value) say where its data lies now.

    Raises DataError for a batch that was not trained, and for data that is not what the run was trained on.
    """
    run = read_run(where)
    last = int(run.log.batch[-1])
    if not 1 <= number <= last:
        raise DataError(f"{where}: batch {number:,} given, expected 1 to {last:,}, the last in {METRICS}")
    for change in changes:
        if not change.startswith(("train_loader.dataset.", "tokenizer.name=")) or "=" not in change:
            raise ConfigError(f"{change} given, expected train_loader.dataset.…=… or tokenizer.name=…")
    dataset, config, tokenizer = open_data(run, read_layers(changes, for_training=False))
    epoch, step = dataset.stages.locate_batch(number - 1)
    ids = dataset.stages.epoch(epoch).sample_ids(range(dataset.global_batch_size), range(step, step + 1))[0]
    rows = [read_row(dataset, int(sample_id)) for sample_id in ids if sample_id != NO_SAMPLE]
    digest = format_digest(sum(batch_digest(torch.from_numpy(padded_t)[None]) for padded_t, _ in rows))
    logged = check_digest(run, number, digest)
    return Batch(
        run=where,
        number=number,
        epoch=epoch,
        rows=[row for _, row in rows],
        digest=digest,
        logged_digest=logged,
        tokenizer=tokenizer,
        separator=separator_of(config) or (None if tokenizer is None else Separator(tokenizer.eos_token_id)),
        checkpoint=run.segments_from,
    )


class Samples(NamedTuple):
    """The samples of a global batch, in the order of the ranks."""

    batch: int
    """Its number in the log."""
    tokens_bt: NDArray[np.int64]
    digest: str


def read_batches(run: str | os.PathLike[str], first: int, last: int | None = None, **dataset: Any) -> Iterator[Samples]:
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
    first = whole_number("batches: first", first)
    last = first if last is None else whole_number("batches: last", last)
    if first > last:
        raise ConfigError(f"batches {first} to {last} given, expected two numbers from 1 on, the smaller first")
    found = read_run(run)
    words = {"train_loader": {"dataset": plain_words(dataset)}}
    opened, *_ = open_data(found, [Layer("batches", words)] if dataset else [])  # an empty block would stand for all
    loader = build_text_loader(opened, kind=StatefulLoader)
    epoch, num_batches = opened.stages.locate_batch(first - 1)
    loader.move_to(epoch, num_batches * opened.global_batch_size)
    return _read_batches(found, loader, first, last)


def _read_batches(run: Run, loader: StatefulLoader, first: int, last: int) -> Iterator[Samples]:
    epochs = itertools.chain.from_iterable(itertools.repeat(loader))
    for number, rows in zip(range(first, last + 1), epochs, strict=False):
        tokens_bt = rows["input_ids"]
        digest = format_digest(batch_digest(tokens_bt))
        check_digest(run, number, digest)
        yield Samples(number, tokens_bt.numpy(), digest)


def open_data(run: Run, changes: Sequence[Layer]) -> tuple[TextDataset, dict[str, Any], Tokenizer | None]:
    """Open the data that a run was trained on; return its configuration and tokenizer too.

    Raises DataError for other data, and says what differs, and at once for a folder that a run is downloading into.
    """
    if run.config is None:
        raise DataError(f"{run.where}: the run's configuration is not there")
    given = [key for layer in changes for key in leaf_keys(layer.values)]
    recorded = without(given, {key: run.config[key] for key in OF_DATA if key in run.config})
    recorded = refuse_unresolved(recorded, run.where)
    config, checkpoint = lay_over(recorded, merge_layers(changes, TrainConfig) if changes else {}), None
    if run.segments_from is not None:
        checkpoint = open_checkpoint(run.segments_from)
    moved_to = next((name for layer in changes if (name := layer.values.get("tokenizer", {}).get("name"))), None)
    tokenizer = find_tokenizer(config, checkpoint, run.where, moved_to)
    loader = build_block(LoaderConfig, config["train_loader"], "train_loader")
    if loader.name != "text":
        raise ConfigError(f"{run.where}: train_loader.name is {loader.name}, whose order only its own code knows")
    own = Path(tempfile.gettempdir(), f"llmfoundry-lite-data-{secrets.token_hex(8)}")
    locations = DataLocations(download_folder=own, named_by_user=locations_at(config, given))
    placed = locations.choose_for(loader.dataset)
    for folder in build_folders(placed):
        if folder.remote:
            check_not_held(folder.path)
    duration = config.get("max_duration")
    dataset = TextDataset(
        replace(placed, allow_truncation=True),  # as the run read it
        max_seq_len=config["max_seq_len"],
        global_batch_size=config["global_train_batch_size"],
        drop_last=loader.drop_last,
        vocab_size=(config.get("model") or {}).get("vocab_size"),
        tokenizer=tokenizer,
        share=(0, 1),
        max_duration=None if duration is None else Duration.parse(duration),
    )
    weakref.finalize(dataset, shutil.rmtree, own, ignore_errors=True)
    state = checkpoint.manifest.scalars.get("data") if checkpoint is not None else None
    if isinstance(state, dict):
        dataset.load_state_dict(state)
    return dataset, config, tokenizer


def check_digest(run: Run, number: int, digest: str) -> str | None:
    """Return the log's digest of a batch, if it has one. Raises DataError if it is another."""
    at = int(np.searchsorted(run.log.batch, number))
    logged = run.log.digest[at] if at < len(run.log.batch) and run.log.batch[at] == number else None
    if logged not in (None, digest):
        raise DataError(
            f"{run.where}: batch {number:,} has data/digest {digest} here and {logged} in {METRICS}: this is not the "
            "data that the run was trained on"
        )
    return logged


def read_row(dataset: TextDataset, sample_id: int) -> tuple[NDArray[np.int64], Row]:
    """Return the row as it was trained, padding included, and without."""
    shard, sample = dataset.locate_sample(sample_id)
    padded_t = dataset.read_sample(shard, sample).numpy()
    folder = dataset.folders[dataset.cache.table.stream_of(shard)]
    name = Path(dataset.cache.path(shard)).name
    stream = folder.name or folder.remote or folder.path
    return padded_t, Row(stream=stream, shard=name, sample=sample, tokens_t=padded_t[padded_t >= 0])


class Losses(NamedTuple):
    """Losses in fp32 by one checkpoint."""

    of_rows: list[float]
    """Mean over the tokens of each row; NaN for a row of less than two tokens."""
    of_batch: float
    """Mean over all tokens."""
    checkpoint: str


def compute_losses(batch: Batch, where: str | None, device: torch.device) -> Losses:
    """Compute losses by the checkpoint at `where`, or by the run's newest. Raises CheckpointError and DataError."""
    checkpoint = find_checkpoint(where or batch.checkpoint or "")[0] if where or batch.checkpoint else None
    if checkpoint is None:
        raise DataError(f"{where or batch.run}: no checkpoint here, which losses need; name one with --checkpoint")
    found = load_checkpoint(checkpoint, model_config_of(checkpoint), Placement(torch.float32, device, None))
    separator = batch.separator if found.separates_documents else None
    if found.separates_documents and separator is None:
        raise DataError(f"{batch.run}: the token between documents is not known; name its place: tokenizer.name=…")
    rows = [tuple(row.tokens_t.tolist()) for row in batch.rows]
    asked = [number for number, row in enumerate(rows) if len(row) > 1]  # else, of a shard of texts, nothing to predict
    groups = [[Request(rows[number][:1], rows[number][1:], 0, 0)] for number in asked]
    of_rows, total, num_predicted = [math.nan] * len(rows), 0.0, 0
    for scores in score(found, groups, found.max_seq_len, separator=separator):
        for number, (nats, _) in scores.items():
            count = len(groups[number][0].continuation)
            of_rows[asked[number]] = -nats / count
            total, num_predicted = total - nats, num_predicted + count
    return Losses(of_rows, total / max(num_predicted, 1), checkpoint.url)
