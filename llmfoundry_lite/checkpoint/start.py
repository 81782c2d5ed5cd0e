"""Decides where a launch starts: at a checkpoint, which must fit the launch's configuration, or at batch 1.

`choose_start` decides: the run's own folder comes first, then `load_path`, then batch 1. It refuses whatever would
surprise the user, such as carrying on another run or starting one over. The other public functions are parts of this
that `--dry-run`, reports and companions use as well.

This module reads manifests and the run's log, and imports no torch. `training/start.py` restores the chosen checkpoint.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from llmfoundry_lite.checkpoint.launch_record import record_early_end
from llmfoundry_lite.checkpoint.manifest import Manifest
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.paths import check_not_foreign, folder_of_checkpoints
from llmfoundry_lite.checkpoint.remote_folder import limited_calls
from llmfoundry_lite.checkpoint.run_log import METRICS, SAVED, read_lines, read_log
from llmfoundry_lite.checkpoint.store import (
    Candidate,
    Checkpoint,
    CheckpointStore,
    is_checkpoint,
    open_checkpoint,
    refuse_newer,
)
from llmfoundry_lite.config.changes import find_changes, refuse_another_past, refuse_changes, rule_of
from llmfoundry_lite.config.fields import RUN_NAME
from llmfoundry_lite.config.layout import describe_data_ranks, find_data_ranks, layout_here
from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.errors import CheckpointError, join_with_or, mask_credentials
from llmfoundry_lite.ranks.identity import describe_this_process

LISTING_SECONDS = 10.0
"""Time after which `check_access` waits no longer for a server's answer."""
SCHEDULING_KEYS = ("max_duration", "eval_interval", "save_interval")
"""Keys that say when something happens in a run. They do not change the numbers of a finished run, so a finished run
may be launched again with other values."""


class Start(NamedTuple):
    """Where a launch starts: at a checkpoint, or at batch 1. There are three kinds of checkpoint:

    the run's own folder (`is_run_folder`)    restores weights, optimizer, place in the data, clocks and log. This
                                              launch takes the folder's lease, unless other launches (islands) say which
                                              launch takes it
    `load_path`                               restores the same without a lease, so nothing there is moved or removed
    `load_path` with `load_weights_only`      restores the weights alone, for a new run
    """

    is_run_folder: bool = False
    """Whether to carry on from the newest intact checkpoint in the run's own folder."""
    url: str | None = None
    """A checkpoint, or a folder of checkpoints whose newest intact one is used. None: start at batch 1."""
    is_single_checkpoint: bool = False
    """Whether `url` is one checkpoint rather than a folder of checkpoints."""
    note: str = ""
    """A line that tells the user why a launch with `autoresume` starts at batch 1. Empty if it does not."""
    fingerprints: dict[str, str] = {}  # noqa: RUF012 - read only
    """This launch's fingerprints, such as the tokenizer's."""
    checkpoint_name: str = ""
    """The newest readable checkpoint in the run's own folder, or in its second place. Empty if there is none."""
    checkpoint_url: str = ""
    """Path or URL of that checkpoint."""
    training_done: dict[str, int] = {}  # noqa: RUF012 - read only
    """Training done at that checkpoint, by unit, as `training_done_at` returns it."""
    dead_holder: str = ""
    """The holder of the run's lease that was found dead, as `Leases.wait_until_free` returns it."""


def open_run_store(config: TrainConfig) -> CheckpointStore:
    """Return the store of a run's checkpoints, with that of its second place if it has one. Nothing is read.

    Raises CheckpointError if a URL cannot be opened.
    """
    second = None
    if config.save_fallback is not None:
        second = CheckpointStore(config.save_fallback)
    return CheckpointStore(config.checkpoint_folder, second=second)


def publish_early_end(config: TrainConfig, status: str, reason: str) -> None:
    """Record beside a run's checkpoints that this launch ends before it trains, for readers on other machines.

    status: `failed`, or `preempted` if the same command may succeed later.

    Nothing is recorded if the checkpoints are in the run folder, whose status.json says so. Waits some seconds at most,
    and raises nothing.
    """
    # The disk is not asked, because it may be the reason.
    folder = Path(os.path.abspath(config.checkpoint_folder))
    is_url = "://" in config.checkpoint_folder
    if not is_url and folder.is_relative_to(os.path.abspath(config.run_folder)):
        return
    record = {
        "status": status,
        "batch": 0,
        "reason": mask_credentials(reason),
        "run_name": config.run_name,
        "max_duration": str(config.max_duration),
        "process": describe_this_process(),
    }
    record_early_end(config.checkpoint_folder, record)


def check_access(config: TrainConfig) -> None:
    """List the run's checkpoints once if they are behind a URL, and those of `load_path` if the run has none yet.

    A launch calls this before it imports torch, so that an expired token is reported within a second or two. Nothing is
    read but names. Raises CheckpointError, as `choose_start` does later, or if there is no answer for LISTING_SECONDS.
    """
    store = open_run_store(config)
    places = [store] if store.second is None else [store, store.second]
    has_checkpoints = False
    with limited_calls(LISTING_SECONDS):
        for place in places:
            # Whether a folder on a disk holds checkpoints matters only for `load_path`, which a resume does not open.
            is_asked = place.root.path_here is None or config.load_path is not None
            if is_asked and place.names():
                has_checkpoints = True
        if config.load_path is not None and not has_checkpoints and open_folder(config.load_path).path_here is None:
            with naming_load_path():
                CheckpointStore(config.load_path).names()


@contextlib.contextmanager
def naming_load_path() -> Iterator[None]:
    """Put `load_path:` before the text of a CheckpointError that is raised in a `with` block."""
    try:
        yield
    except CheckpointError as error:
        raise type(error)(f"load_path: {error}") from error


def choose_start(config: TrainConfig, fingerprints: dict[str, str]) -> Start:
    """Choose the checkpoint that a launch begins from, and check its manifest against the launch's configuration.

    `fingerprints` are those of this launch by name, such as the tokenizer's. Only rank 0 needs to call this, before
    there is a process group.

    Raises CheckpointError if the launch would carry on another run, if it would start a run over without being told to,
    or if its configuration does not fit the checkpoint.
    """
    # The run's own folder comes before `load_path`, so that a launch repeated with the same command carries on.
    store = open_run_store(config)
    candidates = store.all_candidates()
    if candidates:
        return _start_from_run_folder(config, store, candidates, fingerprints)

    # There is no checkpoint of this run. Make sure that there was none before.
    store.check_is_new()
    if store.second is not None:
        store.second.check_is_new()
    note = _check_log(config, store.root.url)
    if config.load_path is not None:
        url, is_single_checkpoint = _check_load_path(config, config.load_path, fingerprints)
        return Start(url=url, is_single_checkpoint=is_single_checkpoint, note=note, fingerprints=fingerprints)

    if config.autoresume and not note:
        note = f"no checkpoint in {store.root.url} yet; starting at batch 1"
    return Start(note=note, fingerprints=fingerprints)


def _start_from_run_folder(
    config: TrainConfig, store: CheckpointStore, candidates: list[Candidate], fingerprints: dict[str, str]
) -> Start:
    """Return where a launch starts whose run folder holds checkpoints: at the newest of `candidates`.

    Raises CheckpointError if they are another run's, if `autoresume` is not set, or if the newest does not fit this
    launch's configuration and fingerprints.
    """
    newest = newest_of(candidates)
    if newest is not None:
        _refuse_other_run(config, newest)
    if not config.autoresume:
        place = store.place_of(candidates[0].folder)
        raise CheckpointError(
            f"{place.root.url} already holds {candidates[0].name} of this run; carry on with autoresume=true, or "
            "choose another run_name"
        )

    start = Start(is_run_folder=True, url=store.root.url, fingerprints=fingerprints)
    if newest is None:
        return start  # the restore fails, and prints the reason for each checkpoint
    check_fit(config, fingerprints, newest.manifest)
    _refuse_changes_after_the_end(config, newest)
    return start._replace(
        checkpoint_name=newest.name, checkpoint_url=newest.folder.url, training_done=training_done_at(newest)
    )


def check_fit(config: TrainConfig, fingerprints: dict[str, str], manifest: Manifest) -> None:
    """Raise CheckpointError if a run cannot carry on from a checkpoint with this configuration and tokenizer.

    config, fingerprints: those of this launch.
    manifest: the checkpoint's, with the configuration and fingerprints of the launch that saved it.

    Checked are whether the checkpoint has what a run needs, which keys of the configuration have changed, the
    microbatch and the tokenizer. Tensors and the place in the data are checked later, when they are restored.
    """
    if manifest.optimizer is None:  # an imported checkpoint
        raise CheckpointError("the checkpoint holds weights alone; load_weights_only=true begins a run with them")
    if manifest.config is None or "timestamp" not in manifest.scalars:
        raise CheckpointError(
            "the checkpoint was not saved by a training run; load_weights_only=true begins one with its weights"
        )

    # `find_changes` sorts the changed keys by whether a run permits the change, never or in its log.
    changes = find_changes(manifest.config, as_dict(config))
    refused_changes = list(changes["never"])
    # An unset weight_decay takes the optimizer's default. That default may differ between releases, so a change of an
    # unset value is not one that the user asked for.
    if config.optimizer.weight_decay is None:
        refused_changes += [change for change in changes["logged"] if change.key == "optimizer.weight_decay"]
    refuse_changes(refused_changes)
    refuse_another_past(manifest.config, config, manifest.timestamp.batch)

    find_microbatch(config, manifest)

    tokenizer = fingerprints.get("tokenizer")
    saved_tokenizer = manifest.fingerprints.get("tokenizer")
    if tokenizer is not None and saved_tokenizer is not None and tokenizer != saved_tokenizer:
        raise CheckpointError(
            f"tokenizer is {tokenizer!r} here and {saved_tokenizer!r} in the checkpoint; a run must resume with "
            "its checkpoint's tokenizer: name that one, or begin a new run with its weights (load_weights_only=true)"
        )


def find_microbatch(config: TrainConfig, manifest: Manifest) -> int | None:
    """Return the microbatch size that this launch has to use because the checkpoint's run has it; None if it is free.

    The size is in samples of one device. Sums of gradients depend on how a batch is divided, so `exact_sums` requires
    one size for a whole run: the launch has to use it if both it and the launch that saved have `exact_sums`. Raises
    CheckpointError if this launch cannot have that size.
    """
    had_exact_sums = manifest.config is not None and manifest.config.get("exact_sums")
    if not config.exact_sums or not had_exact_sums or not manifest.segments:
        return None

    run_microbatch = manifest.segments[-1].device_train_microbatch_size
    launch_microbatch = config.device_train_microbatch_size
    layout = layout_here(config)
    samples_per_rank = config.global_train_batch_size // layout.num_data_ranks

    # The number of ranks is checked before the launch's own microbatch size, because no size helps a launch that has
    # the wrong number of ranks.
    is_divisible = run_microbatch is None or samples_per_rank % run_microbatch == 0
    if config.trains_alone and not is_divisible:
        fitting_rank_counts = find_data_ranks(config, run_microbatch)
        remedy = "no number of devices has them"
        if fitting_rank_counts:
            remedy = f"start {join_with_or(fitting_rank_counts)} {describe_data_ranks(layout)}"
        raise CheckpointError(
            f"the run's microbatches have {run_microbatch} samples, which exact_sums keeps, and that does not divide "
            f"the {samples_per_rank} samples of a device here; {remedy}, with "
            f"device_train_microbatch_size={run_microbatch} or auto, or set exact_sums=false from here on"
        )
    if launch_microbatch not in ("auto", run_microbatch):
        raise CheckpointError(
            f"device_train_microbatch_size is {launch_microbatch} here and {run_microbatch} in the checkpoint, and "
            f"exact_sums makes it a part of the run: set it to {run_microbatch} or auto, or exact_sums=false from here "
            "on"
        )
    return run_microbatch


def training_done_at(checkpoint: Checkpoint) -> dict[str, int]:
    """Return how much a run had trained at a checkpoint, by the units of durations: `ba` batches, `ep` whole epochs,
    `sp` samples, `tok` tokens."""
    timestamp = checkpoint.manifest.timestamp
    return {"ba": timestamp.batch, "ep": timestamp.epoch, "sp": timestamp.sample, "tok": timestamp.token}


def has_reached(span: Duration, training_done: Mapping[str, int]) -> bool:
    """Return whether a run has trained for at least a duration, such as `100ba`. `training_done` is by unit, as
    `training_done_at` returns it."""
    return training_done[span.unit] >= span.value


def newest_of(candidates: list[Candidate]) -> Checkpoint | None:
    """Return the newest checkpoint whose manifest can be read, or None if there is none.

    `candidates` are a run's checkpoints, newest first, as `CheckpointStore.candidates` lists them. Raises
    CheckpointError if a newer release has written one of them, because the run may have gone on with that release.
    """
    refuse_newer(candidates)
    for candidate in candidates:
        if candidate.checkpoint is not None:
            return candidate.checkpoint
    return None


def _refuse_changes_after_the_end(config: TrainConfig, newest: Checkpoint) -> None:
    """Raise CheckpointError for changed keys of a finished run that would have an effect only if it trained on.

    `newest` is the run's newest checkpoint. A launch of a finished run trains nothing, so its record would show the
    changed values beside numbers that came from the old ones. Keys that are not checked: those that a run may change at
    any time, and SCHEDULING_KEYS.
    """
    is_finished = has_reached(config.max_duration, training_done_at(newest))
    if not is_finished:
        return
    logged_changes = find_changes(newest.manifest.config or {}, as_dict(config))["logged"]
    changes_without_effect = []
    for change in logged_changes:
        if rule_of(change.key) == "logged" and change.key not in SCHEDULING_KEYS:
            changes_without_effect.append(str(change))
    if not changes_without_effect:
        return
    raise CheckpointError(
        f"{newest.url} is the end of the run {config.run_name} (max_duration={config.max_duration.written}), so "
        f"nothing is trained with {', '.join(changes_without_effect)}; choose another run_name for another run, or a "
        "longer max_duration, or leave the change out"
    )


def _refuse_other_run(config: TrainConfig, newest: Checkpoint) -> None:
    """Raise CheckpointError for a checkpoint of a run with another name, which this run has not carried on before.

    `newest` is the newest checkpoint in this run's save_folder. Without this check, two runs with the same save_folder
    would be taken for one. A renamed run may go on: its run folder has a log that shares lines with the checkpoint's
    log, because a launch that carries a checkpoint on begins its log with a copy of the checkpoint's.
    """
    saved_run_name = newest.manifest.run_name
    if saved_run_name in (None, config.run_name):
        return

    log_path = Path(config.run_folder) / METRICS
    lines_here = set()
    if log_path.exists():
        lines_here = _lines_of_batches(log_path.read_bytes())
    lines_in_checkpoint = _lines_of_batches(read_log(newest).content or b"")
    if lines_in_checkpoint:
        has_carried_on = bool(lines_here & lines_in_checkpoint)
    else:
        # A checkpoint without a log was saved beside its run's log, so any batch in this run folder counts.
        has_carried_on = bool(lines_here)
    if has_carried_on:
        return

    save_folder = config.checkpoint_folder.rstrip("/")
    raise CheckpointError(
        f"{newest.url} is a checkpoint of the run {saved_run_name}, but this run is {config.run_name}, and its folder "
        f"{config.run_folder} does not continue that run; give each run its own folder, such as "
        f"save_folder={save_folder}/{RUN_NAME}, or continue that run (run_name={saved_run_name}), or "
        f"begin with its weights in another save_folder (load_path={newest.url} load_weights_only=true)"
    )


def _lines_of_batches(log: bytes) -> set[bytes]:
    """Return the lines of a log, given as the bytes of metrics.jsonl, that are about trained batches. Lines of batch 0
    are about an evaluation before training."""
    return {line for line, record in read_lines(log) if record["batch"] >= 1}


def _check_log(config: TrainConfig, checkpoint_folder: str) -> str:
    """Check the log of a run that has no checkpoint, so that a run which has trained does not start over silently.

    `checkpoint_folder` is where the checkpoints would be, for messages. Returns a note for the user that batches are
    trained again, or an empty string if the log has no trained batches. Raises CheckpointError if the log says that the
    run was saved, or if it has batches and `autoresume` is not set.
    """
    log_path = Path(config.run_folder) / METRICS
    records = []
    if log_path.exists():
        records = [record for _, record in read_lines(log_path.read_bytes())]
    last_batch = max((record["batch"] for record in records), default=0)
    if last_batch < 1:
        return ""

    trained_text = f"{log_path} has batches of this run up to {last_batch}"
    remedy = f"to start over, choose another run_name or remove {config.run_folder}"
    was_saved = any(SAVED in record for record in records)
    if was_saved:
        raise CheckpointError(
            f"{trained_text} and says that it was saved, but {checkpoint_folder} holds no checkpoint; is its disk "
            f"mounted, is save_folder the same? {remedy}"
        )
    if not config.autoresume:
        raise CheckpointError(f"{trained_text}, and {checkpoint_folder} holds no checkpoint to carry on from; {remedy}")
    return f"{trained_text}, none of them saved yet: they are trained again"


def _check_load_path(config: TrainConfig, load_path: str, fingerprints: dict[str, str]) -> tuple[str, bool]:
    """Find the checkpoint that `load_path` names, and check that this launch can begin from it.

    `load_path` may be a checkpoint, a folder of checkpoints or a run directory. Returns the URL of the checkpoint or of
    the folder of checkpoints, and whether it is a single checkpoint. Raises CheckpointError, with `load_path:` before
    it, if no manifest there can be read. Unless only weights are loaded, it is also raised if the newest checkpoint
    does not fit this launch, or if no training would be left.
    """
    with naming_load_path():
        check_not_foreign(load_path)
        is_single_checkpoint = is_checkpoint(load_path)
        if is_single_checkpoint:
            url = load_path
            newest = open_checkpoint(url)
        else:
            url = folder_of_checkpoints(load_path)
            newest = newest_of(CheckpointStore(url).candidates())
    if newest is None:
        raise CheckpointError(
            f"load_path: {load_path} holds no intact checkpoint; expected one (…/ba200), a folder of them, or a run "
            "directory"
        )

    if not config.load_weights_only:
        check_fit(config, fingerprints, newest.manifest)
        if has_reached(config.max_duration, training_done_at(newest)):
            raise CheckpointError(
                f"load_path: {newest.url} is at batch {newest.manifest.timestamp.batch}, where a run with "
                f"max_duration={config.max_duration.written} is done, so nothing would be trained; set a longer "
                "max_duration, or begin a new run with its weights (load_weights_only=true)"
            )
    return url, is_single_checkpoint
