"""The contents of a checkpoint besides tensors, and whether a place for checkpoints is beside the run's log.

`Checkpointing` passes them to `checkpoint/save.py`. The ranks exchange nothing here.
"""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from composer.core import State

from llmfoundry_lite.checkpoint.manifest import Timestamp
from llmfoundry_lite.checkpoint.run_log import METRICS
from llmfoundry_lite.checkpoint.save import SaveMetadata
from llmfoundry_lite.checkpoint.store import CheckpointStore
from llmfoundry_lite.config.schema import TrainConfig, as_dict
from llmfoundry_lite.training.run_folder import log_until

if TYPE_CHECKING:  # it imports this module
    from llmfoundry_lite.training.checkpointing import Checkpointing


def collect_metadata(checkpointing: "Checkpointing", state: State) -> SaveMetadata:
    """Return what a checkpoint of this batch holds besides tensors: clocks, configuration, segments, and the log."""
    timestamp = state.timestamp
    batch = int(timestamp.batch)

    # A checkpoint outside the run folder needs a copy of the log. It is read when the save is published, because
    # loggers write this batch's record after the callback that saves.
    log_path = Path(checkpointing.config.run_folder) / METRICS
    is_beside_log = checkpointing.saves_into_run_folder
    if checkpointing.saver.second is not None:
        is_beside_log = is_beside_log and checkpointing.has_second_in_run_folder
    read_log_until_batch = None if is_beside_log else partial(log_until, log_path, batch)

    return SaveMetadata(
        timestamp=Timestamp(
            epoch=int(timestamp.epoch), batch=batch, sample=int(timestamp.sample), token=int(timestamp.token)
        ),
        run_name=checkpointing.config.run_name,
        fingerprints=checkpointing.start.fingerprints,
        config=as_dict(checkpointing.config),
        segments=checkpointing.segments_until(state),
        scalars=checkpointing.run_state.collect(state),
        log=read_log_until_batch,
    )


def is_in_run_folder(place: CheckpointStore, config: TrainConfig) -> bool:
    """Return whether a place for checkpoints is in the run folder, on this machine."""
    local_path = place.root.path_here
    return local_path is not None and local_path.resolve().is_relative_to(Path(config.run_folder).resolve())
