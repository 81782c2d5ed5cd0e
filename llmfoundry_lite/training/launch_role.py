"""The role of a launch in its run: alone, or one of several launches that train the run together.

The training loop asks the role what it may do: take the lease, save, choose rows, change a gradient. A companion has
the role of a launch among others (`SharedRun` in `config/blocks.py`).
"""

from collections.abc import Iterator
from typing import Any

import torch

from llmfoundry_lite import companions
from llmfoundry_lite.config.blocks import given_blocks
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.training.run_handle import RunHandle
from llmfoundry_lite.training.save_policy import Decision

OUTER_MOMENTUM = "outer_momentum"
"""Slot of the optimizer's state with the momentum of outer steps: those that launches take together after local
steps."""


def find_role(config: TrainConfig) -> "LaunchRole":
    """Return the role that a block of the configuration gives the launch, such as `islands`; else that of one alone."""
    for block in given_blocks(config.blocks).values():
        if block.shared_run is not None:
            return companions.import_address(block.shared_run.role)(config)
    return LaunchRole()


class LaunchRole:
    """The role of this launch in its run, as one of its ranks plays it. This base class is that of a launch alone.

    The training loop calls each method at the place that its docstring names. Every method is collective over the ranks
    of this launch.
    """

    writes_checkpoints = True
    """This launch writes the run's checkpoints. No other launch does."""
    takes_lease_at_start = True
    """This launch takes the lease of the checkpoint folder before it restores the run. Otherwise its first save takes
    it."""
    takes_outer_steps = False
    """The launches take outer steps, so the optimizer's state keeps their momentum."""
    instead_of_saving = ""
    """Part of the exit message of a launch that leaves and writes no checkpoints."""
    tokens_elsewhere = 0
    """Tokens that other launches have trained since this launch began."""
    segment: dict[str, Any] = {}  # noqa: RUF012 - read only
    """Additional fields of this launch's segment in checkpoints."""

    def connect(self) -> None:
        """Connect to the other launches, before the model is built. Raises UserError on all ranks."""

    def join_run(self, run: RunHandle) -> None:
        """Join the run once this launch has restored its checkpoint, and take over newer state if others train already.

        This base class has nobody to join. A checkpoint may have the momentum of outer steps, from a launch that took
        them; if this launch does not, it is removed from the optimizer's state and rank 0 prints that.
        """
        slots_with_momentum = [slots for slots in run.optimizer.state.values() if OUTER_MOMENTUM in slots]
        if slots_with_momentum and not self.takes_outer_steps:
            for slots in slots_with_momentum:
                del slots[OUTER_MOMENTUM]
            run.print("the momentum of outer steps is dropped: islands.sync is not set")

    def decide(self, decision: Decision) -> Decision:
        """Return `decision`, made after a batch, without a save or an end of this launch that is not possible now."""
        return decision

    def leave_early(self) -> None:
        """Bring the state to one that can be saved, because this launch leaves between two batches."""

    def may_save(self) -> bool:
        """Return whether this launch makes the save that is due."""
        return self.writes_checkpoints

    def batches(self) -> Iterator[Any] | None:
        """Return this rank's rows of the rest of the epoch, as batches; None if the loader's are to be used."""
        return None

    def begin_batch(self) -> None:
        """Note that the computation of a batch begins."""

    def exchange_gradient(self, loss: torch.Tensor) -> bool:
        """Replace this launch's gradient by the sum over all launches. `loss` is this rank's weighted loss, a scalar.

        Returns False if a launch has left meanwhile, so that the batch must be computed again with other rows.
        """
        return True

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last batch, for its record in the log."""
        return {}

    def end_batch(self) -> Iterator[Any] | None:
        """Note that a batch has ended, and let launches join and leave. Collective.

        Returns the batches to continue with if this rank reads other rows from the next batch on; else None.
        """
        return None

    def close(self, *, has_finished: bool = False) -> None:
        """Disconnect. `has_finished` says that the run is done for all launches."""
