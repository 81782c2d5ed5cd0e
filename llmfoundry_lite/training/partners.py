"""The interface between the training loop and other launches of the same run (`islands.py`)."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from composer import Trainer
from composer.core import State

from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.training.save_policy import Decision

OUTER_MOMENTUM = "outer_momentum"
"""Slot of the optimizer's state with the momentum of local steps (`local_islands.py`)."""


def find_partners(config: TrainConfig) -> "Partners":
    if config.islands is None:
        return Partners()
    if config.islands.sync is not None:
        from llmfoundry_islands.training.local_islands import LocalIslands

        return LocalIslands(config)
    from llmfoundry_islands.training.islands import Islands

    return Islands(config)


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

    def enter(self, trainer: Trainer, checkpointing: Any, on_evicted: Callable[[str, str], None]) -> None:
        """Join the run, and take over its state if it is under way. `on_evicted` is called before the process exits."""
        having = [slots for slots in trainer.state.optimizers[0].state.values() if OUTER_MOMENTUM in slots]
        if having and not self.takes_outer_steps:
            for slots in having:
                del slots[OUTER_MOMENTUM]
            checkpointing.print_on_rank_0("the momentum of outer steps is dropped: islands.sync is not set")

    def decide(self, decision: Decision) -> Decision:
        """Return which saves and ends of the launch are possible after this batch."""
        return decision

    def leave_early(self, state: State) -> None:
        """Make the state one that can be saved, before leaving between two batches."""

    def may_save(self) -> bool:
        """Return whether this launch makes the save that is due."""
        return True

    def batches(self, state: State) -> Iterator[Any]:
        """Read this rank's rows of the epoch's batches, from the next one on."""
        length = state.dataloader_len
        assert state.dataloader is not None
        return islice(state.dataloader, None if length is None else int(length))

    def begin_batch(self, state: State) -> None:
        """Note that the batch's computation begins."""

    def exchange_gradient(self, state: State, loss: torch.Tensor) -> bool:
        """Sum the gradient over launches. Returns False if the batch must be computed again, with other rows."""
        return True

    def metrics(self) -> dict[str, float]:
        """Return metrics of the last batch."""
        return {}

    def move_on(self, state: State) -> Iterator[Any] | None:
        """Return other batches to go on with if this rank's rows change after this batch; else None."""
        return None

    def close(self, *, has_finished: bool = False) -> None:
        """Disconnect. `has_finished`: the run is over, for all launches."""
