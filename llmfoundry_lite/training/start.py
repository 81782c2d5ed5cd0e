"""Where a launch begins: at the run's own newest checkpoint, at that of `load_path`, or at batch 1.

Everything that can be refused is refused here, before the model is built and before the lease is taken, which would
stop a launch that still runs. `checkpointing` restores.
"""

from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from llmfoundry_lite.checkpoint.manifest import Manifest
from llmfoundry_lite.checkpoint.store import (
    Candidate,
    Checkpoint,
    CheckpointStore,
    is_checkpoint,
    open_checkpoint,
    refuse_newer,
)
from llmfoundry_lite.checkpoint.where import check_not_from_elsewhere, folder_of_checkpoints
from llmfoundry_lite.config.changes import find_changes, refuse_changes
from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.data.tokenizer import is_local_or_cached, load_tokenizer
from llmfoundry_lite.errors import CheckpointError
from llmfoundry_lite.launch.log_lines import read_lines
from llmfoundry_lite.ranks.exchange import broadcast_json, raise_on_all_ranks
from llmfoundry_lite.training.run_folder import METRICS, SAVED


class Start(NamedTuple):
    is_own: bool
    """Carries on from the newest intact checkpoint of the run's own folder."""
    note: str
    """Tells the user that a launch that may carry on begins at batch 1."""
    fingerprints: dict[str, str]


def find_start(config: TrainConfig) -> Start:
    """Look on rank 0, and tell all. Raises CheckpointError on all ranks."""
    name = config.tokenizer.name
    fingerprints = {"tokenizer": load_tokenizer(name).fingerprint} if is_local_or_cached(name) else {}
    error, found = None, (False, "")
    if dist.get_rank() == 0:
        try:
            found = look(config, fingerprints)
        except CheckpointError as caught:
            error = caught
    raise_on_all_ranks(error)
    is_own, note = broadcast_json(found)
    return Start(is_own, note, fingerprints)


def check_fit(config: TrainConfig, fingerprints: dict[str, str], manifest: Manifest) -> None:
    """Refuse to carry on as another run: another model, tokenizer or batch. Tensors and data check themselves."""
    if manifest.optimizer is None:  # imported
        raise CheckpointError("the checkpoint holds weights alone; load_weights_only=true begins a run with them")
    if manifest.config is None or "timestamp" not in manifest.scalars:
        raise CheckpointError(
            "the checkpoint was not saved by a training run; load_weights_only=true begins one with its weights"
        )
    changes = find_changes(manifest.config, as_dict(config))
    # A default that has changed since is not a change that the user has asked for.
    unsaid = [] if config.optimizer.weight_decay is not None else ["optimizer.weight_decay"]
    refuse_changes(changes["never"] + [change for change in changes["logged"] if change.key in unsaid])
    here, there = fingerprints.get("tokenizer"), manifest.fingerprints.get("tokenizer")
    if here is not None and there is not None and here != there:
        raise CheckpointError(
            f"tokenizer is {here!r} here and {there!r} in the checkpoint; a run carries on as the run it was: name "
            "that tokenizer, or begin a new run with its weights (load_weights_only=true)"
        )


def look(config: TrainConfig, fingerprints: dict[str, str]) -> tuple[bool, str]:
    """Return `is_own` and `note` of a Start. Raises CheckpointError."""
    store = CheckpointStore(config.checkpoint_folder)
    candidates = store.candidates()
    if candidates:
        if not config.autoresume:
            raise CheckpointError(
                f"{store.root.url} already holds {candidates[0].name} of this run; carry on with autoresume=true, or "
                "choose another run_name"
            )
        newest = newest_of(candidates)
        if newest is not None:
            check_fit(config, fingerprints, newest.manifest)
        return True, ""
    store.check_is_new()
    note = _check_log(config, store.root.url)
    if config.load_path is not None:
        _check_load_path(config, config.load_path, fingerprints)
        return False, note
    return False, (note or f"no checkpoint in {store.root.url} yet; starting at batch 1") if config.autoresume else ""


def newest_of(candidates: list[Candidate]) -> Checkpoint | None:
    """Return the newest checkpoint that can be read. Raises CheckpointError for one of a newer release."""
    refuse_newer(candidates)
    return next((found.checkpoint for found in candidates if found.checkpoint is not None), None)


def _check_log(config: TrainConfig, checkpoints: str) -> str:
    """Refuse to start a run without checkpoints over silently, or where its checkpoints have gone astray."""
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


def _check_load_path(config: TrainConfig, where: str, fingerprints: dict[str, str]) -> None:
    try:
        check_not_from_elsewhere(where)
        if is_checkpoint(where):
            newest = open_checkpoint(where)
        else:
            newest = newest_of(CheckpointStore(folder_of_checkpoints(where)).candidates())
    except CheckpointError as error:
        raise type(error)(f"load_path: {error}") from error
    if newest is None:
        raise CheckpointError(
            f"load_path: {where} holds no intact checkpoint; expected one (…/ba200), a folder of them, or a run "
            "directory"
        )
    if not config.load_weights_only:
        check_fit(config, fingerprints, newest.manifest)
