"""A rank of `llmfoundry-lite replay`: trains some batches of a run again, and saves nothing.

`launch/replay.py` starts it in a temporary run folder, and compares what it finds with the run's own records.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from composer import Trainer

from llmfoundry_lite.checkpoint.manifest import decode_segment
from llmfoundry_lite.launch.replay import BEGUN, RECORDED
from llmfoundry_lite.ranks.codec import Item
from llmfoundry_lite.train import check, prepare_environment
from llmfoundry_lite.training.partners import Partners
from llmfoundry_lite.training.run_state import build_segment, find_differences
from llmfoundry_lite.training.train import train


class Replay(Partners):
    """No other launch; and nothing is saved here."""

    saves_here = False
    takes_lease_at_start = False
    instead_of_saving = "a replay saves nothing"

    def __init__(self, folder: Path):
        self.folder = folder

    def may_save(self) -> bool:
        return False

    def enter(self, trainer: Trainer, checkpointing: Any, on_evicted: Callable[[str, str], None]) -> None:
        """Write the digest of the restored state, and what may change the last digits here."""
        state = trainer.state
        digest = checkpointing.saver.digest(checkpointing.model.model, state.optimizers[0])
        size, batch = int(state.device_train_microbatch_size or 0), int(state.timestamp.batch)
        here = build_segment(checkpointing.config, checkpointing.model, batch, batch, device_train_microbatch_size=size)
        if dist.get_rank() == 0:
            recorded = json.loads((self.folder / RECORDED).read_text())
            found = [find_differences(decode_segment(Item(one, RECORDED)), here) for one in recorded]
            differences = [*dict.fromkeys(text for texts in found for text in texts)]
            (self.folder / BEGUN).write_text(json.dumps({"digest": digest, "differences": differences}))


def main(arguments: Sequence[str]) -> None:
    config = check(arguments)[0].config
    prepare_environment(config)
    train(config, Replay(Path(config.run_folder)))
