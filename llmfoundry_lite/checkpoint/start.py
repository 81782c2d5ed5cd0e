"""Where a launch starts: at the checkpoint that it carries on from, which must fit its configuration, or at batch 1.

Reads manifests and the log; no torch. `training/checkpointing.py` restores from there; `--dry-run` prints where.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from llmfoundry_lite.checkpoint.manifest import Manifest
from llmfoundry_lite.checkpoint.paths import check_not_foreign, folder_of_checkpoints
from llmfoundry_lite.checkpoint.run_log import METRICS, SAVED, read_lines, read_log
from llmfoundry_lite.checkpoint.store import (
    Candidate,
    Checkpoint,
    CheckpointStore,
    is_checkpoint,
    open_checkpoint,
    refuse_newer,
)
from llmfoundry_lite.config.changes import find_changes, refuse_changes, rule_of
from llmfoundry_lite.config.fields import RUN_NAME
from llmfoundry_lite.config.layout import find_data_ranks, layout_here, name_data_ranks
from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.errors import CheckpointError, either

KEYS_OF_WHEN = ("max_duration", "eval_interval", "save_interval")
"""Keys that say when something happens in a run. A finished run, whose numbers they do not change, may be launched with
other ones."""


class Start(NamedTuple):
    """Where a launch starts: at a checkpoint, or at batch 1.

    the run's own folder (`is_own`)     restores weights, optimizer, place in the data, clocks, log; under its lease,
                                        unless partners (islands) say which launch takes that
    `load_path`                         the same, without a lease: nothing there is moved or removed
    `load_path`, `load_weights_only`    restores weights; the run is new
    """

    is_own: bool = False
    """Carry on from the newest intact checkpoint in the run's own folder."""
    url: str | None = None
    """A checkpoint, or a folder of checkpoints, whose newest intact one is used; None: batch 1."""
    is_one: bool = False
    """`url` is one checkpoint, not a folder of them."""
    note: str = ""
    """Tells the user why a launch with `autoresume` starts at batch 1."""
    fingerprints: dict[str, str] = {}  # noqa: RUF012 - read only
    name: str = ""
    """The newest of the run's own checkpoints that can be read; empty: none can."""
    done: dict[str, int] = {}  # noqa: RUF012 - read only
    """Training done at that checkpoint, by unit; epochs are whole."""
    watched: str = ""
    """The holder of the run's lease that was found dead, as `Leases.wait_until_free` returns it."""


def check_fit(config: TrainConfig, fingerprints: dict[str, str], manifest: Manifest) -> None:
    """Raise CheckpointError if the run cannot carry on with another model, tokenizer or batch size. Tensors and the
    place in the data are checked when they are restored."""
    if manifest.optimizer is None:  # an imported checkpoint
        raise CheckpointError("the checkpoint holds weights alone; load_weights_only=true begins a run with them")
    if manifest.config is None or "timestamp" not in manifest.scalars:
        raise CheckpointError(
            "the checkpoint was not saved by a training run; load_weights_only=true begins one with its weights"
        )
    changes = find_changes(manifest.config, as_dict(config))
    # A default that differs between releases is not a change that the user asked for.
    unsaid = [] if config.optimizer.weight_decay is not None else ["optimizer.weight_decay"]
    refuse_changes(changes["never"] + [change for change in changes["logged"] if change.key in unsaid])
    find_microbatch(config, manifest)
    here, there = fingerprints.get("tokenizer"), manifest.fingerprints.get("tokenizer")
    if here is not None and there is not None and here != there:
        raise CheckpointError(
            f"tokenizer is {here!r} here and {there!r} in the checkpoint; a run carries on as the run it was: name "
            "that tokenizer, or begin a new run with its weights (load_weights_only=true)"
        )


def find_microbatch(config: TrainConfig, manifest: Manifest) -> int | None:
    """Return the size of the checkpoint's microbatches, if this launch must have the same; else None. Raises
    CheckpointError if it cannot."""
    if not (config.exact_sums and (manifest.config or {}).get("exact_sums") and manifest.segments):
        return None
    size, here = manifest.segments[-1].device_train_microbatch_size, config.device_train_microbatch_size
    layout = layout_here(config)
    num_samples = config.global_train_batch_size // layout.num_data_ranks
    # The ranks come first, because no size of microbatches helps a launch of the wrong number.
    if size is not None and config.trains_alone and num_samples % size:
        counts = find_data_ranks(config, size)
        fitting = f"start {either(counts)} {name_data_ranks(layout)}" if counts else "no number of devices has them"
        raise CheckpointError(
            f"the run's microbatches have {size} samples, which exact_sums keeps, and that does not divide the "
            f"{num_samples} samples of a device here; {fitting}, with device_train_microbatch_size={size} or auto, or "
            "set exact_sums=false from here on"
        )
    if here not in ("auto", size):
        raise CheckpointError(
            f"device_train_microbatch_size is {here} here and {size} in the checkpoint, and exact_sums makes it a part "
            f"of the run: set it to {size} or auto, or exact_sums=false from here on"
        )
    return size


def choose_start(config: TrainConfig, fingerprints: dict[str, str]) -> Start:
    """Choose the checkpoint that a launch begins from. Raises CheckpointError."""
    store = CheckpointStore(config.checkpoint_folder)
    candidates = store.candidates()
    if candidates:
        newest = newest_of(candidates)
        if newest is not None:
            _refuse_other_run(config, newest)
        if not config.autoresume:
            raise CheckpointError(
                f"{store.root.url} already holds {candidates[0].name} of this run; carry on with autoresume=true, or "
                "choose another run_name"
            )
        start = Start(is_own=True, url=store.root.url, fingerprints=fingerprints)
        if newest is None:  # restoring prints the reason for each
            return start
        check_fit(config, fingerprints, newest.manifest)
        _refuse_changes_after_the_end(config, newest)
        return start._replace(name=newest.name, done=training_done(newest))
    store.check_is_new()
    note = _check_log(config, store.root.url)
    url, is_one = None, False
    if config.load_path is not None:
        url, is_one = _check_load_path(config, config.load_path, fingerprints)
    elif config.autoresume:
        note = note or f"no checkpoint in {store.root.url} yet; starting at batch 1"
    return Start(url=url, is_one=is_one, note=note, fingerprints=fingerprints)


def training_done(checkpoint: Checkpoint) -> dict[str, int]:
    """Return the training done at a checkpoint, by unit. Epochs are whole."""
    at = checkpoint.manifest.timestamp
    return {"ba": at.batch, "ep": at.epoch, "sp": at.sample, "tok": at.token}


def has_reached(span: Duration, done: Mapping[str, int]) -> bool:
    """Return whether the training done, by unit, is at the end of a span or beyond it."""
    return done[span.unit] >= span.value


def _refuse_changes_after_the_end(config: TrainConfig, newest: Checkpoint) -> None:
    """Raise CheckpointError for changes of a finished run that would have an effect only if it trained. A launch of it
    trains nothing, so it would record them beside numbers that came without them."""
    if not has_reached(config.max_duration, training_done(newest)):
        return
    changes = find_changes(newest.manifest.config or {}, as_dict(config))["logged"]
    lost = [change for change in changes if rule_of(change.key) == "logged" and change.key not in KEYS_OF_WHEN]
    if not lost:
        return
    raise CheckpointError(
        f"{newest.url} is the end of the run {config.run_name} (max_duration={config.max_duration.written}), so "
        f"nothing is trained with {', '.join(map(str, lost))}; choose another run_name for another run, or a longer "
        "max_duration, or leave the change out"
    )


def _refuse_other_run(config: TrainConfig, newest: Checkpoint) -> None:
    """Raise CheckpointError for a checkpoint of a run of another name, unless the run folder shows that this run has
    carried it on before. Else two runs with one save_folder would be taken for one run."""
    other = newest.manifest.run_name
    if other in (None, config.run_name):
        return
    log = Path(config.run_folder) / METRICS
    trained_here = _lines_of_batches(log.read_bytes()) if log.exists() else set()
    trained_there = _lines_of_batches(read_log(newest).content or b"")
    # A launch that carries a checkpoint on begins its log with the checkpoint's. One beside its own log has no copy.
    has_carried_on = bool(trained_here & trained_there) if trained_there else bool(trained_here)
    if has_carried_on:
        return
    raise CheckpointError(
        f"{newest.url} is a checkpoint of the run {other}, and this run is {config.run_name}, whose folder "
        f"{config.run_folder} does not carry it on; give each run its own folder, such as "
        f"save_folder={config.checkpoint_folder.rstrip('/')}/{RUN_NAME}, or carry that run on (run_name={other}), or "
        f"begin with its weights in another save_folder (load_path={newest.url} load_weights_only=true)"
    )


def _lines_of_batches(log: bytes) -> set[bytes]:
    return {line for line, record in read_lines(log) if record["batch"] >= 1}


def newest_of(candidates: list[Candidate]) -> Checkpoint | None:
    """Return the newest checkpoint that can be read. Raises CheckpointError for one of a newer release."""
    refuse_newer(candidates)
    return next((found.checkpoint for found in candidates if found.checkpoint is not None), None)


def _check_log(config: TrainConfig, checkpoints: str) -> str:
    """Return a note about trained batches that have no checkpoint; empty if there are none. Raises CheckpointError if
    checkpoints have disappeared, or if `autoresume` does not allow to train them again."""
    log = Path(config.run_folder) / METRICS
    records = [record for _, record in read_lines(log.read_bytes())] if log.exists() else []
    last_batch = max((record["batch"] for record in records), default=0)
    if last_batch < 1:
        return ""
    trained = f"{log} has batches of this run up to {last_batch}"
    over = f"to start over, choose another run_name or remove {config.run_folder}"
    if any(SAVED in record for record in records):
        raise CheckpointError(
            f"{trained} and says that it was saved, but {checkpoints} holds no checkpoint; is its disk mounted, is "
            f"save_folder the same? {over}"
        )
    if not config.autoresume:
        raise CheckpointError(f"{trained}, and {checkpoints} holds no checkpoint to carry on from; {over}")
    return f"{trained}, none of them saved yet: they are trained again"


def _check_load_path(config: TrainConfig, where: str, fingerprints: dict[str, str]) -> tuple[str, bool]:
    """Return the URL of a checkpoint or of a folder of them, and whether it is one. Raises CheckpointError."""
    try:
        check_not_foreign(where)
        is_one = is_checkpoint(where)
        url = where if is_one else folder_of_checkpoints(where)
        newest = open_checkpoint(url) if is_one else newest_of(CheckpointStore(url).candidates())
    except CheckpointError as error:
        raise type(error)(f"load_path: {error}") from error
    if newest is None:
        raise CheckpointError(
            f"load_path: {where} holds no intact checkpoint; expected one (…/ba200), a folder of them, or a run "
            "directory"
        )
    if not config.load_weights_only:
        check_fit(config, fingerprints, newest.manifest)
        if has_reached(config.max_duration, training_done(newest)):
            raise CheckpointError(
                f"load_path: {newest.url} is at batch {newest.manifest.timestamp.batch}, where a run with "
                f"max_duration={config.max_duration.written} is done, so nothing would be trained; set a longer "
                "max_duration, or begin a new run with its weights (load_weights_only=true)"
            )
    return url, is_one
