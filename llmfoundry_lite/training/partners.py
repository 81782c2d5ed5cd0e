"""The interface between the training loop and other launches of the same run, which a companion brings."""

from collections.abc import Iterator
from typing import Any

import torch

from llmfoundry_lite import companions
from llmfoundry_lite.config.blocks import given_blocks
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.training.run_handle import RunHandle
from llmfoundry_lite.training.save_policy import Decision

OUTER_MOMENTUM = "outer_momentum"
"""Slot of the optimizer's state with the momentum of outer steps, which follow local steps of several launches."""


def find_partners(config: TrainConfig) -> "Partners":
    for block in given_blocks(config.blocks).values():
        return companions.import_address(block.partners)(config)
    return Partners()


class Partners:
    """The other launches of this run; this base class has none. Every rank must call every method together."""

    saves_here = True
    """This launch writes the run's checkpoints; no other one does."""
    takes_lease_at_start = True
    takes_outer_steps = False
    instead_of_saving = ""
    """Text of the exit message if this launch leaves without saving."""
    tokens_elsewhere = 0
    """Tokens that other launches have trained since this launch began."""
    segment: dict[str, Any] = {}  # noqa: RUF012 - read only
    """Additional fields of a checkpoint's segment."""

    def connect(self) -> None:
        """Connect to the other launches, before the model is built. Raises UserError on all ranks."""

    def enter(self, run: RunHandle) -> None:
        """Join the run, and take over its state if it is under way."""
        having = [slots for slots in run.optimizer.state.values() if OUTER_MOMENTUM in slots]
        if having and not self.takes_outer_steps:
            for slots in having:
                del slots[OUTER_MOMENTUM]
            run.print("the momentum of outer steps is dropped: islands.sync is not set")

    def decide(self, decision: Decision) -> Decision:
        """Return which saves and ends of the launch are possible after this batch."""
        return decision

    def leave_early(self) -> None:
        """Make the state one that can be saved, before leaving between two batches."""

    def may_save(self) -> bool:
        """Return whether this launch makes the save that is due."""
        return self.saves_here

    def batches(self) -> Iterator[Any] | None:
        """Read this rank's rows of the epoch's batches, from the next one on. None: the loader's."""
        return None

    def begin_batch(self) -> None:
        """Note that the batch's computation begins."""

    def exchange_gradient(self, loss: torch.Tensor) -> bool:
        """Sum the gradient over launches. Returns False if the batch must be computed again, with other rows."""
        return True

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last batch."""
        return {}

    def move_on(self) -> Iterator[Any] | None:
        """Return other batches to go on with if this rank's rows change after this batch; else None."""
        return None

    def close(self, *, has_finished: bool = False) -> None:
        """Disconnect. `has_finished`: the run is over, for all launches."""
