"""Two parts that turn a training run into a measurement: a role that marks its stages, and a quick draw of weights.

`steps.measure_trainer` passes them to the trainer. They are in a module of their own because it imports the training
code, which `turns.py` lets a server import before it forks the measurements.
"""

import torch

from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.training.launch_role import LaunchRole
from llmfoundry_lite.training.optimizers import local
from llmfoundry_lite.training.run_handle import RunHandle
from llmfoundry_machines.bench.turns import READY, STEPS, TIMED, WARM_UP, Mark


class MeasuredRole(LaunchRole):
    """Role of a launch in a measured run, which knows no other launch and saves nothing.

    The trainer calls the methods in their order here. `mark` is called with each stage of `turns.py` when the run
    reaches it, and the run goes on when it returns.
    """

    writes_checkpoints = False
    takes_lease_at_start = False
    instead_of_saving = "a measurement saves nothing"

    def __init__(self, mark: Mark):
        self.mark = mark
        self.microbatch_size = 0
        """Samples of a microbatch. 0 until the trainer is built, which chooses it if it is `auto`."""

    def connect(self) -> None:
        """Mark that the run is ready. Until here it has nothing on the device, which another may use."""
        self.mark(READY)

    def join_run(self, run: RunHandle) -> None:
        """Keep the run and the microbatch size that the trainer has chosen. The first step is next."""
        self.run = run
        self.microbatch_size = run.microbatch
        self.mark(STEPS)

    def begin_batch(self) -> None:
        """Mark the last step of the warm-up. Batches are counted from 0."""
        if self.run.batch == WARM_UP - 1:
            self.mark(TIMED)


@torch.no_grad()
def draw_on_device(model: MPT, seed: int) -> None:
    """Draw each weight on its own device, in place. `seed` gives other weights than it gives a real run.

    A step takes as long with them, because their sizes are usual. The real draw is made on the host, which takes 4 s
    for MPT-1B on 16 cores.
    """
    torch.manual_seed(seed)
    for parameter in map(local, model.parameters()):
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
        else:
            torch.nn.init.ones_(parameter)  # scales of norms
