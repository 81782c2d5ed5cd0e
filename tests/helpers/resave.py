"""A callback that saves what it finds at the start of a launch, before anything is trained: what a restore has made."""

import re
from pathlib import Path

from composer.core import Callback

from llmfoundry_lite.checkpoint.full_tensors import diff, diff_scalars, open_checkpoint
from llmfoundry_lite.checkpoint.manifest import Timestamp
from llmfoundry_lite.checkpoint.save import SaveMetadata, Saver
from llmfoundry_lite.checkpoint.store import CheckpointStore


class Resave(Callback):
    """Into `<folder>/ba<batch>`."""

    def __init__(self, folder: str):
        self.folder = folder

    def fit_start(self, state, logger):
        saver = Saver(CheckpointStore(self.folder))
        saver.take_lease()
        about = SaveMetadata(timestamp=Timestamp(batch=int(state.timestamp.batch)))
        saver.save(state.model.model, state.optimizers[0], about)
        saver.wait()


def resave_into(folder: str | Path) -> dict[str, dict[str, str]]:
    """For `callbacks` of a configuration."""
    return {f"python:{__name__}:Resave": {"folder": str(folder)}}


def assert_same_state(a: str | Path, b: str | Path) -> None:
    """Model and optimizer bit for bit: arrays, steps, groups; less the learning rate, which each batch sets anew."""
    found = list(diff(a, b))
    assert [d for d in found if d.num_different or d.note] == []
    assert {d.name.split("/")[0] for d in found} == {"model", "optim"}
    numbers = diff_scalars(open_checkpoint(a).manifest, open_checkpoint(b).manifest)
    kept = [change for change in numbers if change[0].startswith("optimizer") and not re.search(r"\blr\W*$", change[0])]
    assert kept == []
