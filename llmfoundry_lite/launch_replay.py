"""Train some batches of a run again, as one rank of `llmfoundry-lite replay`. Nothing is saved.

The command (`cli/run.py`) starts the ranks with a configuration whose run folder is temporary. `launch/replay.py` has
written that configuration and the run's own records into the folder (`write_replay`), and afterwards compares the
losses and digests that these ranks write there with the records.
"""

if __name__ == "__main__":
    # Before the imports below, which take seconds: a signal that arrives meanwhile ends the process with code 75.
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
from llmfoundry_lite.checkpoint.manifest import Segment
from llmfoundry_lite.checkpoint.manifest_json import decode_segment
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.errors import OtherDataError
from llmfoundry_lite.launch.replay import BEGUN, DETERMINISTIC, RECORDED
from llmfoundry_lite.launch_train import check, prepare_environment
from llmfoundry_lite.ranks.codec import Item
from llmfoundry_lite.ranks.ending import run_and_exit, sigterm_delayed
from llmfoundry_lite.ranks.rank import count_usable_cores, this_rank
from llmfoundry_lite.training.launch_role import LaunchRole
from llmfoundry_lite.training.run_handle import RunHandle
from llmfoundry_lite.training.run_state import find_differences
from llmfoundry_lite.training.train import train


class Replay(LaunchRole):
    """Role of a launch in a replay, by which `train` differs from a usual launch: it takes no lease and saves nothing.

    The only thing that it adds is a file about the state from which the replay starts.
    """

    writes_checkpoints = False
    takes_lease_at_start = False
    instead_of_saving = "a replay saves nothing"

    def __init__(self, folder: Path):
        """Prepare a replay whose files are in `folder`, its temporary run folder."""
        self.folder = folder

    def join_run(self, run: RunHandle) -> None:
        """Write the file BEGUN, about the state that was restored and the machine. Collective; rank 0 writes.

        The file has the digest of weights and optimizer, and the differences between the machines of the run and this
        one that may change the last digits of a loss, such as another version of torch.
        """
        digest = run.digest()
        this_segment = run.segment()
        if dist.get_rank() != 0:
            return

        # Only rank 0 goes on. The run may have trained these batches in several segments, on different machines.
        differences: dict[str, None] = {}  # a set that keeps its order
        for segment in read_segments(self.folder):
            differences |= dict.fromkeys(find_differences(segment, this_segment))
        begun = {"digest": digest, "differences": list(differences), DETERMINISTIC: run.config.deterministic}
        (self.folder / BEGUN).write_text(json.dumps(begun))


def main(arguments: Sequence[str]) -> None:
    """Train the batches that the configuration of a replay asks for. Collective.

    `arguments` is the path of the configuration, which `write_replay` has written. If the data here are not those of
    the run, rank 0 writes that as the outcome instead of raising an error.
    """
    with sigterm_delayed():
        config = check(arguments).invocation.config
    prepare_environment(config)
    folder = Path(config.run_folder)
    use_recorded_threads(folder)
    try:
        train(with_equal_digits(config, devices.device_type()), Replay(folder))
    except OtherDataError as error:  # the same on every rank
        if this_rank().rank == 0:
            (folder / BEGUN).write_text(json.dumps({"other_data": error.difference}))


def use_recorded_threads(folder: Path) -> None:
    """Compute on as many threads as the run's last launch, if their number is known and there are cores for them.

    Each thread adds up a part of a sum, so the number of threads changes the last digits of the result. `folder` has
    the file with the run's segments. A number that the user has set by OMP_NUM_THREADS takes precedence.
    """
    segments = read_segments(folder)
    if not segments or segments[-1].num_threads is None:
        return

    num_threads = segments[-1].num_threads
    num_needed_cores = num_threads * this_rank().local_world_size
    if 0 < num_needed_cores <= count_usable_cores():
        chosen_num_threads = os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
        torch.set_num_threads(int(chosen_num_threads))


def with_equal_digits(config: TrainConfig, device_type: str) -> TrainConfig:
    """Return the configuration with deterministic kernels on a GPU, so that any difference comes from the run.

    `device_type` is "cuda" or "cpu". On CPUs the kernels are deterministic anyway, and the configuration is unchanged.
    """
    if device_type != "cuda" or config.deterministic:
        return config
    if this_rank().rank == 0:
        print(f"deterministic: true, for a replay on {devices.device_name()}", flush=True)
    return replace(config, deterministic=True)


def read_segments(folder: Path) -> list[Segment]:
    """Return the segments of the run that trained these batches, oldest first.

    A segment is the part of a run that one launch trained, with facts of its machines. `write_replay` has written them
    into `folder`.
    """
    recorded = json.loads((folder / RECORDED).read_text())
    return [decode_segment(Item(segment, RECORDED)) for segment in recorded]


if __name__ == "__main__":
    run_and_exit(main)
