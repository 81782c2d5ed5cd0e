"""How the run's log travels with its checkpoints, so that another machine carries on with the same curve.

Checkpoints inside the run folder leave it at home: it lies beside them. The parts and their files are
`checkpoint.log_parts`'.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from llmfoundry_lite.checkpoint.folders import Folder
from llmfoundry_lite.checkpoint.local_folder import LocalFolder
from llmfoundry_lite.checkpoint.log_parts import Log, read_log
from llmfoundry_lite.checkpoint.store import open_checkpoint
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import CheckpointError
from llmfoundry_lite.ranks.exchange import raise_on_all_ranks, rank_and_size
from llmfoundry_lite.training.loggers import METRICS, log_until


class CarriedLog:
    def __init__(self, config: TrainConfig, checkpoints: Folder):
        self.path = Path(config.run_folder) / METRICS
        self.is_carried = not is_inside(checkpoints, Path(config.run_folder))
        self.history: bytes | None = None
        """The log that came with the checkpoint, on rank 0."""

    def until(self, batch: int) -> Callable[[], bytes] | None:
        """Reads what a save of that batch takes along; None if it takes nothing."""
        return partial(log_until, self.path, batch) if self.is_carried else None

    def restore(self, url: str) -> Log | None:
        """On rank 0, the log of that checkpoint. Every rank must call this; raises CheckpointError on all of them."""
        log, error = None, None
        try:
            if rank_and_size(None)[0] == 0:
                log = read_log(open_checkpoint(url))
                self.history = log.content
        except CheckpointError as caught:
            error = caught
        raise_on_all_ranks(error)
        return log


def is_inside(folder: Folder, outer: Path) -> bool:
    return isinstance(folder, LocalFolder) and folder.path.resolve().is_relative_to(outer.resolve())
