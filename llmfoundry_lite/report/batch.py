"""The rows of a run's batches: where they come from, their text, and the loss of each.

The order of samples is a function of the configuration, so no log of rows is needed: the batch is read again, and its
digest shows that it is the one that was trained. A row is a sample of a batch.

`read_batch` reads one batch with everything that is known of its rows, and `read_batches` only the tokens of several.
Both use `open_data`, which opens the data set of a run. `compute_losses` runs a checkpoint on a batch. Suffixes of
array names: b rows of a batch, t tokens of a row.
"""

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
from llmfoundry_lite.config.batch_schedule import PerBatch, Steps
from llmfoundry_lite.config.build import build_block
from llmfoundry_lite.config.data_schema import LoaderConfig
from llmfoundry_lite.config.layers import ConfigLayer, leaf_keys, read_layers
from llmfoundry_lite.config.merge import lay_over, merge_layers
from llmfoundry_lite.config.replayed import refuse_unresolved, without
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.convert.tokenizer import find_tokenizer
from llmfoundry_lite.data.batches import join_batches
from llmfoundry_lite.data.dataset import TextDataset
from llmfoundry_lite.data.folder_locks import check_not_held
from llmfoundry_lite.data.loader import batch_digest, build_text_loader, format_digest
from llmfoundry_lite.data.order import NO_SAMPLE
from llmfoundry_lite.data.recorded import DataLocations, find_data_locations
from llmfoundry_lite.data.stateful import to_yaml_values, whole_number
from llmfoundry_lite.data.streams import build_folders
from llmfoundry_lite.data.tokenizer import Tokenizer
from llmfoundry_lite.errors import ConfigError, DataError
from llmfoundry_lite.evaluation.items import Request
from llmfoundry_lite.evaluation.models import Placement, find_checkpoint, load_checkpoint, model_config_of, separator_of
from llmfoundry_lite.evaluation.packing import Separator
from llmfoundry_lite.evaluation.scoring import score
from llmfoundry_lite.models.attention import number_documents
from llmfoundry_lite.report.reading import METRICS, Run, read_run

DATA_KEYS = (
    *("train_loader", "global_train_batch_size", "batch_size_schedule"),
    *("max_seq_len", "seq_len_schedule", "max_duration", "tokenizer", "model"),
)
"""Keys of a configuration that decide which rows a batch has, and what they contain."""


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
    seq_len: int
    """Tokens of the parts into which each row was cut for training; those of a whole row if it was not cut."""
    epoch: int
    rows: list[Row]
    digest: str
    logged_digest: str | None
    """The log's digest, which equals `digest`; None where the log has none."""
    tokenizer: Tokenizer | None
    """None where it is not on this machine."""
    separator: Separator | None
    """The token between documents; None if it is not known."""
    checkpoint: str | None
    """URL of the run's newest checkpoint; None if there is none."""

    def text(self, row: Row) -> str:
        """Return the text of a row, or its token ids where the tokenizer is not on this machine."""
        if self.tokenizer is None:
            return " ".join(map(str, row.tokens_t))
        return self.tokenizer.decode(row.tokens_t.tolist())

    def num_documents(self, row: Row) -> int | None:
        """Count the documents in a row; None where the token that separates documents is not known.

        A document counts if the row has a token of it besides the separating one. If 0 ends each document, the row
        5 7 0 9 9 has two documents.
        """
        if self.separator is None:
            return None
        tokens_bt = torch.from_numpy(row.tokens_t)[None]  # a batch of one row
        document_numbers_bt = number_documents(tokens_bt, self.separator.token, begins=self.separator.begins)
        return int(document_numbers_bt.unique().numel())


def read_batch(location: str, number: int, changes: Sequence[str] = ()) -> Batch:
    """Read a batch of a run again, from the run's data set, and check it against the digest in the run's log.

    location: run directory, its URL, or a folder of its checkpoints.
    number: the batch's number in the log; the first is 1.
    changes: `key=value` texts that say where the data set or the tokenizer is now, such as
        "train_loader.dataset.local=data/moved".

    Raises DataError for a batch that was not trained, and for data that the run was not trained on. Raises
    ConfigError for a change of any other key.
    """
    # Check the arguments.
    run = read_run(location)
    last_batch = int(run.log.batch[-1])
    if not 1 <= number <= last_batch:
        raise DataError(f"{location}: batch {number:,} given, expected 1 to {last_batch:,}, the last in {METRICS}")
    for change in changes:
        is_allowed = change.startswith(("train_loader.dataset.", "tokenizer.name=")) and "=" in change
        if not is_allowed:
            raise ConfigError(f"{change} given, expected train_loader.dataset.…=… or tokenizer.name=…")

    # Compute which samples the batch has. Stages and steps count batches from 0.
    data = open_data(run, read_layers(changes, for_training=False))
    stages, parts = data.dataset.stages, data.dataset.parts_of_batches
    first_part = parts.sum_before(number - 1)
    epoch, _ = stages.locate_batch(first_part)
    all_rows = range(data.dataset.global_batch_size)
    sample_ids: list[int] = []
    for part in range(first_part, first_part + parts.of(number - 1)):
        epoch_of_part, step = stages.locate_batch(part)
        sample_ids += stages.build_epoch(epoch_of_part).sample_ids(all_rows, range(step, step + 1))[0].tolist()

    # Read them. As in training, the batch's digest is the sum of its rows' digests, padding included.
    rows: list[Row] = []
    digest_sum = 0
    for sample_id in sample_ids:
        if sample_id == NO_SAMPLE:  # the last batch of an epoch may have fewer rows
            continue
        padded_t, row = read_row(data.dataset, sample_id)
        rows.append(row)
        digest_sum += batch_digest(torch.from_numpy(padded_t)[None])
    digest = format_digest(digest_sum)

    # If the configuration does not name the token between documents, take the tokenizer's end-of-text token, with which
    # `data prepare` ends every document.
    separator = separator_of(data.config)
    if separator is None and data.tokenizer is not None:
        separator = Separator(data.tokenizer.eos_token_id)
    return Batch(
        run=location,
        number=number,
        seq_len=data.seq_lens.of(number - 1),
        epoch=epoch,
        rows=rows,
        digest=digest,
        logged_digest=check_digest(run, number, digest),
        tokenizer=data.tokenizer,
        separator=separator,
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

    Each batch has the rows of all ranks, as int64 [batch, tokens]. If the log has the batch, its digest is compared
    with `data/digest` in the log. You can also read batches that the run has not reached yet. `dataset` has keys of
    [`train_loader.dataset`](data.md) whose values differ on this machine, such as `local`.

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

    # Open the run's data set, with the user's changes.
    recorded_run = read_run(run)
    changes = []
    if dataset:  # an empty block would replace the recorded one
        changes.append(ConfigLayer("batches", {"train_loader": {"dataset": to_yaml_values(dataset)}}))
    text_dataset = open_data(recorded_run, changes).dataset

    # This process is the only rank, so the loader has whole global batches.
    return _yield_checked_batches(recorded_run, text_dataset, first, last)


def _yield_checked_batches(run: Run, dataset: TextDataset, first: int, last: int) -> Iterator[Samples]:
    """Yield batches `first` to `last` of a run's data set, after comparing the digest of each with the run's log.

    Raises DataError if a batch's digest is not the one in the log. This is a generator of its own, so that
    `read_batches` raises its errors when it is called, not when the first batch is asked for.
    """
    loader = build_text_loader(dataset)
    number = first
    while number <= last:
        for batch in join_batches(loader, dataset, number - 1):  # those of an epoch
            tokens_bt = batch["input_ids"]  # [batch, tokens]
            digest = format_digest(batch_digest(tokens_bt))
            check_digest(run, number, digest)
            yield Samples(number, tokens_bt.numpy(), digest)
            number += 1
            if number > last:
                return


@dataclass(frozen=True, slots=True)
class OpenedData:
    """The data that a run was trained on."""

    dataset: TextDataset
    config: dict[str, Any]
    """The recorded values of DATA_KEYS, with the changes."""
    tokenizer: Tokenizer | None
    """None where it is not on this machine."""
    seq_lens: PerBatch
    """Tokens of the rows into which each batch's samples were cut."""


def open_data(run: Run, changes: Sequence[ConfigLayer]) -> OpenedData:
    """Open the data set that a run was trained on, for reading alone.

    `changes` are values of the configuration that differ on this machine. Folders that the run recorded are only read:
    copies and downloads go to a temporary folder, which is removed when the data set is garbage-collected, unless
    `changes` name another one. A remote is used only if `changes` name it, because the run's configuration may be
    written by anybody.

    Raises DataError for data other than the run's, and for a folder that another run is downloading into. Raises
    ConfigError for a loader of the user's own, and for a reference that would have to be resolved.
    """
    # Combine the recorded configuration with the changes. Recorded values that are changed need not be resolvable.
    if run.config is None:
        raise DataError(f"{run.location}: the run's configuration is missing")
    changed_keys = [key for layer in changes for key in leaf_keys(layer.values)]
    recorded = {key: run.config[key] for key in DATA_KEYS if key in run.config}
    recorded = refuse_unresolved(without(changed_keys, recorded), run.location)
    config = lay_over(recorded, merge_layers(changes, TrainConfig) if changes else {})

    # Find the tokenizer: the one that `changes` name, or the one of the newest checkpoint or the configuration.
    checkpoint = None
    if run.segments_from is not None:
        checkpoint = open_checkpoint(run.segments_from)
    tokenizer_names = [layer.values.get("tokenizer", {}).get("name") for layer in changes]
    changed_tokenizer = next(filter(None, tokenizer_names), None)
    tokenizer = find_tokenizer(config, checkpoint, run.location, changed_tokenizer)

    # Choose the folders to read from.
    loader = build_block(LoaderConfig, config["train_loader"], "train_loader")
    if loader.name != "text":
        raise ConfigError(f"{run.location}: train_loader.name is {loader.name}, whose order only its own code knows")
    download_folder = Path(tempfile.gettempdir(), f"llmfoundry-lite-data-{secrets.token_hex(8)}")
    locations = DataLocations(download_folder=download_folder, named_by_user=find_data_locations(config, changed_keys))
    dataset_config = locations.choose_for(loader.dataset)
    for folder in build_folders(dataset_config):
        if folder.remote:
            check_not_held(folder.path)

    # Open the data set.
    duration = config.get("max_duration")
    dataset = TextDataset(
        replace(dataset_config, allow_truncation=True),  # the run was trained on it: no text is refused as too long
        max_seq_len=config["max_seq_len"],
        global_batch_size=config["global_train_batch_size"],
        drop_last=loader.drop_last,
        vocab_size=(config.get("model") or {}).get("vocab_size"),
        tokenizer=tokenizer,
        data_rank_and_size=(0, 1),  # this process is the only rank, so it reads all rows
        max_duration=None if duration is None else Duration.parse(duration),
        batch_sizes=_read_schedule(run, config, "batch_size_schedule", config["global_train_batch_size"]),
    )
    weakref.finalize(dataset, shutil.rmtree, download_folder, ignore_errors=True)

    # Load the recorded state. It has fingerprints of the data, with which the data set compares itself, and the stages
    # that the run has begun.
    state = checkpoint.manifest.scalars.get("data") if checkpoint is not None else None
    if isinstance(state, dict):
        dataset.load_state_dict(state)
    seq_lens = _read_schedule(run, config, "seq_len_schedule", config["max_seq_len"])
    return OpenedData(dataset, config, tokenizer, seq_lens)


def _read_schedule(run: Run, config: dict[str, Any], key: str, value: int) -> PerBatch:
    """Return the number of each batch that a run's recorded schedule gives; `value` for all of them without one.

    Raises DataError for a record that is no schedule.
    """
    try:
        return PerBatch.build(value, Steps.parse(config.get(key) or {}))
    except ValueError as error:
        raise DataError(f"{run.location}: its {key} is not valid, expected {error}") from None


def check_digest(run: Run, number: int, digest: str) -> str | None:
    """Compare the digest of batch `number` with the one in the run's log.

    Returns the log's digest, or None if the log has none of this batch. Raises DataError if the two differ.
    """
    log = run.log
    row = int(np.searchsorted(log.batch, number))
    has_row = row < len(log.batch) and log.batch[row] == number
    logged_digest = log.digest[row] if has_row else None
    if logged_digest not in (None, digest):
        raise DataError(
            f"{run.location}: batch {number:,} has data/digest {digest} here and {logged_digest} in {METRICS}: this is "
            "not the data that the run was trained on"
        )
    return logged_digest


def read_row(dataset: TextDataset, sample_id: int) -> tuple[NDArray[np.int64], Row]:
    """Read a sample of a data set by its id, which numbers the samples of all its streams.

    Returns its tokens [max_seq_len] as they were trained, with padding, of which the batch's digest is computed; and
    the sample as a Row, without padding.
    """
    shard, sample = dataset.locate_sample(sample_id)
    padded_t = dataset.read_sample(shard, sample).numpy()
    folder = dataset.folders[dataset.cache.table.stream_of(shard)]
    row = Row(
        stream=folder.name or folder.remote or folder.path,
        shard=Path(dataset.cache.path(shard)).name,
        sample=sample,
        tokens_t=padded_t[padded_t >= 0],  # padding is negative
    )
    return padded_t, row


class Losses(NamedTuple):
    """Losses in fp32 by one checkpoint."""

    of_rows: list[float]
    """Mean over the tokens of each row; NaN for a row of less than two tokens."""
    of_batch: float
    """Mean over all tokens."""
    checkpoint: str


def compute_losses(batch: Batch, location: str | None, device: torch.device) -> Losses:
    """Compute the loss of each row of a batch, in fp32 on `device`, in nats per token.

    location: a checkpoint, or a run, whose newest one is taken. None is the newest checkpoint of the batch's run.

    Raises CheckpointError if the checkpoint cannot be read. Raises DataError if there is none, or if the model
    separates documents and the token between them is not known.
    """
    # Load the model.
    source = location or batch.checkpoint
    checkpoint = find_checkpoint(source)[0] if source else None
    if checkpoint is None:
        raise DataError(f"{location or batch.run}: no checkpoint here, which losses need; name one with --checkpoint")
    model = load_checkpoint(checkpoint, model_config_of(checkpoint), Placement(torch.float32, device, None))
    separator = batch.separator if model.separates_documents else None
    if model.separates_documents and separator is None:
        raise DataError(f"{batch.run}: the token between documents is not known; name its place: tokenizer.name=…")

    # Build a request for each part of a row: the model predicts all of its tokens but the first. In a part of one
    # token, as a shard of texts may have, there is nothing to predict. `scored_rows` has the row's number for each
    # request.
    scored_rows: list[int] = []
    requests: list[Request] = []
    for row_number, row in enumerate(batch.rows):
        row_tokens = tuple(row.tokens_t.tolist())
        for start in range(0, len(row_tokens), batch.seq_len):
            tokens = row_tokens[start : start + batch.seq_len]
            if len(tokens) > 1:
                scored_rows.append(row_number)
                requests.append(Request(context=tokens[:1], continuation=tokens[1:], num_characters=0, num_trimmed=0))

    # Score the requests. A score has the sum of the log-probabilities of a row's tokens.
    loss_of_rows = [0.0] * len(batch.rows)
    predicted_of_rows = [0] * len(batch.rows)
    groups = [[request] for request in requests]
    for scores in score(model, groups, model.max_seq_len, separator=separator):
        for request_number, request_score in scores.items():
            row_number = scored_rows[request_number]
            loss_of_rows[row_number] -= request_score.log_probability
            predicted_of_rows[row_number] += len(requests[request_number].continuation)

    mean_of_rows: list[float] = []
    for loss, num_predicted in zip(loss_of_rows, predicted_of_rows, strict=True):
        mean_of_rows.append(loss / num_predicted if num_predicted else math.nan)
    return Losses(mean_of_rows, sum(loss_of_rows) / max(sum(predicted_of_rows), 1), checkpoint.url)
