"""The start of a launch: where it starts, the restore of weights and optimizer, and how it differs from the run so far.

`find_start` chooses the checkpoint before the model is built. It checks the manifest, and refuses a run that another
launch is training. `restore_tensors` reads the checkpoint when the model is there. `checkpoint/start.py` has the rules
by which a checkpoint is chosen, and `checkpointing.py` restores what a run has besides tensors.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from composer.core import State

from llmfoundry_lite.checkpoint.lease import LeaseRequest
from llmfoundry_lite.checkpoint.manifest import Manifest
from llmfoundry_lite.checkpoint.open_folder import open_folder
from llmfoundry_lite.checkpoint.restore import Restored, load, load_newest
from llmfoundry_lite.checkpoint.save import Saver
from llmfoundry_lite.checkpoint.start import Start, check_fit, choose_start, open_run_store
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.config.changes import Change, find_model_changes
from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.data.tokenizer import find_fingerprints, load_configured_tokenizer
from llmfoundry_lite.errors import CheckpointError, DataError, printable
from llmfoundry_lite.own_code import is_own, trust_code
from llmfoundry_lite.preflight import check_own_tokenizer
from llmfoundry_lite.ranks.exchange import (
    all_gather_json,
    broadcast_json,
    raising_on_all_ranks,
    user_errors_on_all_ranks,
)
from llmfoundry_lite.training.adapter import LanguageModel
from llmfoundry_lite.training.run_state import build_segment, find_differences
from llmfoundry_lite.training.second_place import describe_missing_save


def build_own_tokenizer(config: TrainConfig) -> None:
    """Build the run's tokenizer if it is code of the user's own, and check it as other tokenizers. Collective.

    The checks before torch is imported run no such code, which may import torch. Raises UserError on all ranks. Rank 0
    prints what the checks note.
    """
    name = config.tokenizer.name
    if not is_own(name):
        return
    trust_code([name])  # the configuration of a launch is its user's
    with user_errors_on_all_ranks():
        notes = check_own_tokenizer(config)
    fingerprints = all_gather_json(load_configured_tokenizer(config.tokenizer).fingerprint)
    for rank, fingerprint in enumerate(fingerprints):
        if fingerprint != fingerprints[0]:
            raise DataError(
                f"tokenizer {name} is another on rank {rank} than on rank 0; let its code build the same on each"
            )
    if dist.get_rank() == 0:
        for note in notes:
            print(printable(note), flush=True)


def find_start(config: TrainConfig, *, takes_lease: bool = True) -> Start:
    """Choose on rank 0 where this launch starts, and broadcast it. Collective.

    With `takes_lease`, rank 0 waits until no other launch holds the run's lease. Raises CheckpointError on all ranks if
    a live launch holds it, or if the checkpoint does not fit the configuration.
    """
    start = Start()
    with raising_on_all_ranks(CheckpointError):
        if dist.get_rank() == 0:
            start = choose_start(config, find_fingerprints(config.tokenizer))
            if takes_lease:
                store = open_run_store(config)
                start = start._replace(dead_holder=store.wait_until_free(lease_request(config)))
            start = start._replace(note=start.note or describe_missing_save(config, start))
    return Start(*broadcast_json(start))


def lease_request(config: TrainConfig, dead_holder: str = "") -> LeaseRequest:
    """Return how this launch asks for the run's lease.

    `dead_holder` is a holder that was found dead before; empty if none.
    """
    fallback = ""
    if config.save_fallback is not None:
        path = open_folder(config.save_fallback).path_here
        fallback = "" if path is None else str(path.absolute())
    return LeaseRequest(
        run_name=config.run_name,
        fallback=fallback,
        takes_over=config.takeover,
        note=lambda line: print(printable(line), flush=True),
        dead_holder=dead_holder,
    )


def restore_tensors(
    config: TrainConfig, start: Start, model: LanguageModel, state: State, saver: Saver, *, carries_on: bool
) -> Restored | None:
    """Restore the model from the checkpoint that `start` names, and the optimizer too to carry on the run.

    state: Composer's, which has the optimizer.
    saver: the run's, whose lease lets this launch move damaged checkpoints away.
    carries_on: whether this launch continues the checkpoint's run, instead of beginning one with its weights.

    Collective. A folder of checkpoints is searched for its newest intact one. Returns which checkpoint it was, with its
    manifest and notes for the user, or None if this launch starts at batch 1. Raises CheckpointError on all ranks if no
    checkpoint is intact, or if it does not fit.
    """
    url = start.url
    if url is None:
        return None

    # Weights alone may be cast, and some of them ignored. To carry on, everything must fit.
    options: dict[str, Any] = {}
    optimizer = None
    if carries_on:
        optimizer = state.optimizers[0]
        options["check"] = partial(check_fit, config, start.fingerprints)
    if start.is_run_folder:
        options["lease"] = saver.lease
    else:
        options["cast"] = config.load_cast
        options["ignore_keys"] = tuple(config.load_ignore_keys)

    if start.is_single_checkpoint:
        return Restored(load(url, model.model, optimizer, **options), url, [])
    store = saver.store if start.is_run_folder else CheckpointStore(url)
    restored = load_newest(store, model.model, optimizer, **options)
    if restored.manifest is None:
        reasons = "; ".join(restored.notes)
        if start.is_run_folder:
            raise CheckpointError(
                f"{url}: no checkpoint is intact ({reasons}); move the folder away to start again from batch 1"
            )
        raise CheckpointError(f"load_path: {url} holds no intact checkpoint ({reasons})")
    return restored


def describe_differences(
    config: TrainConfig,
    model: LanguageModel,
    state: State,
    manifest: Manifest,
    changes: Sequence[Change],
    role_fields: Mapping[str, Any],
) -> str:
    """Return in parentheses how this launch differs from the one that made the checkpoint; empty if it does not.

    manifest: the checkpoint's.
    changes: changed keys of the configuration.
    role_fields: further fields of this launch's segment, as `LaunchRole.segment`.

    For example, " (optimizer.lr 0.001 -> 0.0005, devices 8 -> 4)": changed keys, and what may change the last digits of
    results. It is printed after the checkpoint's address.
    """
    if not manifest.segments:
        return ""

    # The microbatch size is compared only if it is configured: `auto` chooses it after the restore.
    microbatch_size = None
    if config.device_train_microbatch_size != "auto":
        microbatch_size = int(state.device_train_microbatch_size or 0)
    batch = manifest.timestamp.batch
    this_segment = build_segment(
        config,
        model,
        batch,
        batch,
        device_train_microbatch_size=microbatch_size,
        **role_fields,
    )
    differences = [*map(str, changes), *find_differences(manifest.segments[-1], this_segment)]
    if manifest.run_name != config.run_name:
        differences.insert(0, f"run_name {manifest.run_name} -> {config.run_name}")
    return f" ({', '.join(differences)})" if differences else ""


def describe_model_changes(config: TrainConfig, manifest: Manifest) -> list[str]:
    """Return a line if this launch's model differs from that of a checkpoint with whose weights it begins a new run.

    `manifest` is the checkpoint's. Empty if the models do not differ.
    """
    changes = find_model_changes(manifest.config or {}, as_dict(config))
    return [f"the checkpoint's model differs: {', '.join(map(str, changes))}"] if changes else []
