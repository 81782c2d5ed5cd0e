"""A training run that is measured: it waits for the device, saves nothing, and draws weights quickly."""

import torch

from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.training.optimizers import local
from llmfoundry_lite.training.partners import Partners
from llmfoundry_lite.training.run_handle import RunHandle
from llmfoundry_machines.bench.turns import READY, STEPS, TIMED, WARM_UP, Mark


class Measured(Partners):
    """Partners of a measured run: no other launch. `mark` is called at each stage of the run."""

    writes_checkpoints = False
    takes_lease_at_start = False
    instead_of_saving = "a measurement saves nothing"

    def __init__(self, mark: Mark):
        self.mark = mark
        self.microbatch_size = 0
        """Samples of a microbatch, once the trainer is built."""

    def connect(self) -> None:
        """Wait for the device: up to here the run has nothing on it."""
        self.mark(READY)

    def join_run(self, run: RunHandle) -> None:
        self.run = run
        self.microbatch_size = run.microbatch
        self.mark(STEPS)

    def begin_batch(self) -> None:
        if self.run.batch == WARM_UP - 1:
            self.mark(TIMED)


@torch.no_grad()
def draw_on_device(model: MPT, seed: int) -> None:
    """Draw weights of a usual size on their own device, by torch: a step takes as long with them.

    The run's own draw on the host takes 4 s for MPT-1B on 16 cores.
    """
    torch.manual_seed(seed)
    for parameter in map(local, model.parameters()):
        torch.nn.init.normal_(parameter, std=0.02) if parameter.dim() > 1 else torch.nn.init.ones_(parameter)
