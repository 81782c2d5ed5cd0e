"""The mean of the weights of several checkpoints of a run, published as a checkpoint of its own.

    average_checkpoints("runs/mpt-1b", "averaged/mpt-1b", last=5)

Averaging the last checkpoints of a run lowers its loss as a decayed learning rate does, without training the decay
(Izmailov et al. 2018, "Averaging Weights Leads to Wider Optima and Better Generalization"; Li et al. 2025, "Model
Merging in Pre-training of Large Language Models"). The result can be evaluated, exported, and used as `load_path` with
`load_weights_only` like any other checkpoint. It has no optimizer state, so a run cannot resume from it.

Tensors are read, averaged and written one after another, so the memory depends on the largest tensor and not on the
model: about 24 bytes for each of its elements.
"""

import datetime
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from llmfoundry_lite.checkpoint.commit import Checkpoint
from llmfoundry_lite.checkpoint.folder import Folder
from llmfoundry_lite.checkpoint.full_tensors import read_full
from llmfoundry_lite.checkpoint.grid import Chunk, Grid
from llmfoundry_lite.checkpoint.manifest import FileRecord, Manifest, TensorRecord
from llmfoundry_lite.checkpoint.paths import folder_of_checkpoints, put_tokenizer, read_tokenizer
from llmfoundry_lite.checkpoint.save import file_name
from llmfoundry_lite.checkpoint.shards import BLOCK_BYTES, build_header, file_order, write_shard
from llmfoundry_lite.checkpoint.staging import as_bytes
from llmfoundry_lite.checkpoint.state_digest import format_digest, sum_keyed
from llmfoundry_lite.checkpoint.store import Candidate, CheckpointStore, refuse_newer
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.convert.to_checkpoint import open_empty_store
from llmfoundry_lite.data.tokenizer_files import FILES, TOKENIZER_FILE
from llmfoundry_lite.errors import CheckpointError, ConfigError

MODEL_PREFIX = "model/"
"""Beginning of the names of weights in a checkpoint. All other tensors belong to the optimizer."""
FILE_BYTES = 256 << 20
"""Size up to which tensors share a file of the result. A larger tensor has a file of its own."""
AVERAGED_FROM = "averaged_from"
"""Key of the manifest's `scalars` with the checkpoints that were averaged, newest first."""
FLOATING_DTYPES = ("F64", "F32", "F16", "BF16")
WINDOW_UNITS = ("tok", "ba", "sp")
"""Units in which `window` may be given: tokens, batches or samples."""


@dataclass(frozen=True, kw_only=True)
class Averaged:
    """A published mean of checkpoints."""

    checkpoint: Checkpoint
    parents: list[Checkpoint]
    """The checkpoints that were averaged, newest first."""


def average_checkpoints(
    run: str,
    out: str,
    *,
    last: int | None = None,
    window: str | None = None,
    candidates: Sequence[Candidate] | None = None,
    on_tensor: Callable[[int, int], None] = lambda done, total: None,
) -> Averaged:
    """Average the weights of the last checkpoints of a run, and publish the mean in `out`.

    run: a run folder, or a folder of checkpoints, also as a URL.
    out: a folder or URL without checkpoints. The result is `<out>/ba<batch of the newest parent>`.
    last: how many checkpoints to average.
    window: average every checkpoint of the last stretch of training, such as `2e9tok`, `500ba` or `4000sp`. Give either
        this or `last`.
    candidates: the checkpoints of the run, as `CheckpointStore.candidates` has returned them just now; None to list
        them here.
    on_tensor: called after each tensor with the number of tensors that are done, and their total.

    Every parent counts the same. Sums are float64, and the result is rounded to fp32 once. Raises ConfigError for a
    `last` and `window` that do not say which checkpoints to average. Raises CheckpointError for a run with fewer than
    two such checkpoints, for parents that do not hold the same model, and for damaged ones. Nothing is published then.
    Only if the tokenizer cannot be copied beside it, the mean has been published before the error.
    """
    if (last is None) == (window is None):
        raise ConfigError("checkpoint average: give either last or window, to say which checkpoints to average")
    if last is not None and last < 2:
        raise ConfigError(f"checkpoint average: last: {last} given, expected 2 or more")
    if folder_of_checkpoints(out) != out:
        raise CheckpointError(f"{out}: a run folder; give another folder, since the mean is not a save of that run")
    span = None if window is None else parse_window(window)
    run_store = CheckpointStore(folder_of_checkpoints(run))
    if candidates is None:
        candidates = run_store.candidates()
    parents = find_parents(run_store.root.url, candidates, last=last, window=span)
    check_same_model(parents)
    store = open_empty_store(out)
    lease = store.acquire()
    try:
        for candidate in store.candidates():  # another average may have published here since the folder was empty
            raise CheckpointError(f"{store.root.url}: already holds {candidate.name}; give another folder")
        newest = parents[0].manifest
        save_id = store.new_save_id(lease, newest.timestamp.batch)
        try:
            folder, prefix = store.open_draft(save_id)
            records, files, digest = write_mean(parents, folder, prefix, save_id, on_tensor)
            manifest = describe_mean(parents, save_id, lease.epoch, records, files, digest)
            checkpoint = store.publish(manifest, lease)
        except BaseException:
            store.abandon(save_id)
            raise
        keep_tokenizer(parents[0], out)
    finally:
        store.release(lease)
    return Averaged(checkpoint=checkpoint, parents=parents)


# ------------------------------------------------------------------------------------------------ choosing parents


def parse_window(window: str) -> Duration:
    """Parse a stretch of training, such as `2e9tok`. Raises ConfigError."""
    try:
        return Duration.parse(window, WINDOW_UNITS)
    except ValueError as error:
        raise ConfigError(f"checkpoint average: window: {window!r} given, expected {error}") from None


def find_parents(
    run_url: str, candidates: Sequence[Candidate], *, last: int | None, window: Duration | None
) -> list[Checkpoint]:
    """Return the checkpoints of a run to average, newest first.

    run_url: the folder of the run's checkpoints, for errors.
    candidates: its checkpoints, newest first.

    A run that went back to an earlier checkpoint may still have others of the abandoned branch. Those are left out, by
    `_is_ancestor`. Raises CheckpointError if there are fewer than two, or fewer than `last`, and for a checkpoint among
    them that cannot be read.
    """
    refuse_newer(candidates)

    parents: list[Checkpoint] = []
    for candidate in candidates:
        if last is not None and len(parents) == last:
            break
        checkpoint = candidate.open()
        if parents and not _is_ancestor(checkpoint, parents[-1]):
            continue
        if window is not None and parents and not _is_within(checkpoint, parents[0], window):
            break
        parents.append(checkpoint)

    num_needed = 2 if last is None else last
    if len(parents) < num_needed:
        found = ", ".join(parent.name for parent in parents) or "none"
        wanted = f"the last {last} checkpoints" if window is None else f"at least 2 of the last {window.written}"
        raise CheckpointError(
            f"{run_url}: {wanted} are to be averaged, found {found}; average fewer or a longer stretch, or let "
            "the run keep more of them (save_num_checkpoints_to_keep)"
        )
    return parents


def _is_ancestor(checkpoint: Checkpoint, newer: Checkpoint) -> bool:
    """Return whether a run trained on from a checkpoint to a newer one, by the segments of both.

    Each launch adds a segment. If launch 2 went back to batch 100, the newer checkpoint's segments begin at batches 1
    and 101. Batch 140 of launch 1, whose only segment begins at batch 1, is not on that way.
    """
    batch = checkpoint.manifest.timestamp.batch
    beginnings = [segment.first_batch for segment in checkpoint.manifest.segments]
    newer_beginnings = [segment.first_batch for segment in newer.manifest.segments if segment.first_batch <= batch]
    return batch < newer.manifest.timestamp.batch and beginnings == newer_beginnings


def _is_within(checkpoint: Checkpoint, newest: Checkpoint, window: Duration) -> bool:
    """Return whether a checkpoint is at most `window` of training older than the newest one."""
    field_of_unit = {"tok": "token", "ba": "batch", "sp": "sample"}
    field = field_of_unit[window.unit]
    distance = getattr(newest.manifest.timestamp, field) - getattr(checkpoint.manifest.timestamp, field)
    return distance <= window.value


def check_same_model(parents: Sequence[Checkpoint]) -> None:
    """Raise CheckpointError unless all checkpoints hold the same weights of the same model, by the same tokenizer."""
    newest = parents[0]
    expected = _facts_of(newest)
    if not expected["tensors"]:
        raise CheckpointError(f"{newest.url}: none of its tensors is named {MODEL_PREFIX}…, so it holds no weights")
    for parent in parents[1:]:
        facts = _facts_of(parent)
        for key, value in expected.items():
            if facts[key] != value:
                raise CheckpointError(
                    f"{parent.url}: its {key} differ from those of {newest.url}, so their mean means nothing; average "
                    "checkpoints of one run"
                )


def _facts_of(checkpoint: Checkpoint) -> dict[str, object]:
    """Return what must be equal in all parents, by the word that an error has for it."""
    manifest = checkpoint.manifest
    config = manifest.config if isinstance(manifest.config, dict) else {}
    weights = {name: record.shape for name, record in manifest.tensors.items() if name.startswith(MODEL_PREFIX)}
    return {
        "tensors": weights,
        "tied tensors": manifest.aliases,
        "model settings": config.get("model"),
        "tokenizer's fingerprints": manifest.fingerprints.get("tokenizer"),
    }


# ---------------------------------------------------------------------------------------------------- writing the mean


def write_mean(
    parents: Sequence[Checkpoint],
    folder: Folder,
    prefix: str,
    save_id: str,
    on_tensor: Callable[[int, int], None],
) -> tuple[dict[str, TensorRecord], list[FileRecord], str]:
    """Write the mean of each weight into files of a draft.

    `folder` is the draft's, and `prefix` stands before its files' names in the manifest. Returns the records of the
    tensors and of the files, and the state digest. Raises CheckpointError if a file cannot be written, or if a parent
    is damaged: every block that is read is verified.
    """
    groups = group_into_files(parents[0].manifest)
    num_tensors = sum(len(group) for group in groups)
    records: dict[str, TensorRecord] = {}
    files: list[FileRecord] = []
    digest_sum = 0
    num_done = 0
    for index, group in enumerate(groups):
        buffers = []
        for chunk in group.values():
            mean = average_tensor(parents, chunk.tensor)
            digest_sum += sum_keyed(chunk.tensor, mean, chunk.offset, chunk.shape)
            buffers.append(as_bytes(mean.reshape(-1)))
            records[chunk.tensor] = TensorRecord(chunk.dtype, chunk.shape, Grid((), (index,)))
            num_done += 1
            on_tensor(num_done, num_tensors)

        header = build_header(group, {"save_id": save_id}, block_bytes=BLOCK_BYTES)
        try:
            record = write_shard(folder, file_name(index), header, buffers)
        except OSError as error:
            url = f"{folder.url}/{file_name(index)}"
            raise CheckpointError(f"{url}: not written: {error.strerror or error}") from error
        files.append(replace(record, name=prefix + record.name))
    return records, files, format_digest(digest_sum)


def group_into_files(manifest: Manifest) -> list[dict[str, Chunk]]:
    """Divide a model's tensors among files of about FILE_BYTES, so that few bytes are in memory at once.

    Returns the chunks of each file by key, in the order in which the file holds them. Each tensor is one chunk, in
    fp32.
    """
    groups: list[dict[str, Chunk]] = []
    group: dict[str, Chunk] = {}
    for name, record in manifest.tensors.items():
        if not name.startswith(MODEL_PREFIX):
            continue
        if record.dtype not in FLOATING_DTYPES or 0 in record.shape:
            raise CheckpointError(f"{name}: {record.dtype} {list(record.shape)} has no mean; nothing is averaged")
        chunk = Chunk(name, "F32", (0,) * len(record.shape), record.shape)
        group_bytes = sum(other.num_bytes for other in group.values())
        if group and group_bytes + chunk.num_bytes > FILE_BYTES:
            groups.append(file_order(group))
            group = {}
        group[chunk.key] = chunk
    groups.append(file_order(group))
    return groups


def average_tensor(parents: Sequence[Checkpoint], name: str) -> torch.Tensor:
    """Return the mean of a tensor over all parents: fp32, contiguous, on the CPU. The sum is float64."""
    total: torch.Tensor | None = None
    for parent in parents:
        tensor = read_full(parent, [name])[name]
        total = tensor.double() if total is None else total.add_(tensor)
    assert total is not None
    return total.div_(len(parents)).float().contiguous()


def describe_mean(
    parents: Sequence[Checkpoint],
    save_id: str,
    lease_epoch: int,
    records: dict[str, TensorRecord],
    files: Sequence[FileRecord],
    digest: str,
) -> Manifest:
    """Return the manifest of a mean: the newest parent's model and position, and which checkpoints it is the mean of.

    The position says how much training the weights have seen, so that a curve over tokens shows the mean at its place.
    """
    newest = parents[0].manifest
    origins = [
        {"url": parent.url, "save_id": parent.manifest.save_id, "state_digest": parent.manifest.state_digest}
        for parent in parents
    ]
    return Manifest(
        save_id=save_id,
        lease_epoch=lease_epoch,
        timestamp=newest.timestamp,
        written_at=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        state_digest=digest,
        fingerprints=newest.fingerprints,
        config=newest.config,
        segments=newest.segments,
        scalars={AVERAGED_FROM: origins},
        aliases=newest.aliases,
        tensors=records,
        files=tuple(files),
    )


def keep_tokenizer(parent: Checkpoint, out: str) -> None:
    """Copy the tokenizer that lies beside a checkpoint to the result. Does nothing if there is none.

    Raises CheckpointError if it cannot be written.
    """
    files = read_tokenizer(parent, FILES)
    if TOKENIZER_FILE not in files:
        return
    try:
        put_tokenizer(out, files)
    except OSError as error:
        raise CheckpointError(f"{out}: the tokenizer was not written: {error.strerror or error}") from error
