"""A rank of `llmfoundry-lite replay`: trains some batches of a run again, and saves nothing.

The command starts it in a temporary run folder, and compares what it finds with the run's own records.
"""

if __name__ == "__main__":  # before the imports below, which take long
    from llmfoundry_lite.ranks.lean_imports import HEAVY, import_lean
    from llmfoundry_lite.ranks.signals import leave_with_75_when_asked

    leave_with_75_when_asked()
    import_lean(*HEAVY)

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from llmfoundry_lite import devices
from llmfoundry_lite.checkpoint.manifest import Segment, decode_segment
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import OtherDataError
from llmfoundry_lite.launch.replay import BEGUN, DETERMINISTIC, RECORDED
from llmfoundry_lite.launch_train import check, prepare_environment
from llmfoundry_lite.ranks.codec import Item
from llmfoundry_lite.ranks.ending import run_and_exit, sigterm_delayed
from llmfoundry_lite.ranks.rank import count_usable_cores, this_rank
from llmfoundry_lite.training.partners import Partners
from llmfoundry_lite.training.run_handle import RunHandle
from llmfoundry_lite.training.run_state import find_differences
from llmfoundry_lite.training.train import train


class Replay(Partners):
    """Partners of a replay: no other launch, and no saves."""

    writes_checkpoints = False
    takes_lease_at_start = False
    instead_of_saving = "a replay saves nothing"

    def __init__(self, folder: Path):
        self.folder = folder

    def join_run(self, run: RunHandle) -> None:
        """Write the digest of the restored state, and what may change the last digits here."""
        digest, here = run.digest(), run.segment()
        if dist.get_rank() == 0:
            found = [find_differences(segment, here) for segment in _read_segments(self.folder)]
            differences = [*dict.fromkeys(text for texts in found for text in texts)]
            begun = {"digest": digest, "differences": differences, DETERMINISTIC: run.config.deterministic}
            (self.folder / BEGUN).write_text(json.dumps(begun))


def main(arguments: Sequence[str]) -> None:
    with sigterm_delayed():
        config = check(arguments)[0].config
    prepare_environment(config)
    folder = Path(config.run_folder)
    # On as many threads as the run, if there are cores for them: each thread sums a part of its own.
    threads = next((segment.num_threads for segment in reversed(_read_segments(folder))), None)
    if threads is not None and 0 < threads * this_rank().local_world_size <= count_usable_cores():
        torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", str(threads))))
    try:
        train(with_equal_digits(config, devices.device_type()), Replay(folder))
    except OtherDataError as error:  # a finding, on every rank
        if this_rank().rank == 0:
            (folder / BEGUN).write_text(json.dumps({"other_data": error.difference}))


def with_equal_digits(config: TrainConfig, device_type: str) -> TrainConfig:
    """Ask a GPU for kernels whose digits do not vary: any difference is then the run's."""
    if device_type != "cuda" or config.deterministic:
        return config
    if this_rank().rank == 0:
        print(f"deterministic: true, for a replay on {devices.device_name()}", flush=True)
    return replace(config, deterministic=True)


def _read_segments(folder: Path) -> list[Segment]:
    return [decode_segment(Item(one, RECORDED)) for one in json.loads((folder / RECORDED).read_text())]


if __name__ == "__main__":
    run_and_exit(main)
