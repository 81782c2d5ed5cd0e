"""The one hook for launches that train a run together: all that the rest of this room knows of `islands.py`."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import torch
from composer import Trainer
from composer.core import State

from llmfoundry_lite.config.schema import TrainConfig


def find_partners(config: TrainConfig) -> "Partners":
    if config.islands is None:
        return Partners()
    from llmfoundry_lite.training.islands import Islands

    return Islands(config)


class Partners:
    """The other launches of this run: there are none. Every rank calls every method at the same places."""

    saves_here = True
    """This launch, and no other one, writes the run's checkpoints."""
    takes_lease_at_start = True
    instead_of_saving = ""
    """The end of the line about a launch that leaves without a save."""
    tokens_elsewhere = 0
    """Tokens of the run that other launches have trained in this launch's time."""
    segment: dict[str, Any] = {}  # noqa: RUF012 - read only
    """Fields of a checkpoint's segment that say who trained it."""

    def connect(self) -> None:
        """Reach the others, before anything heavy starts. Raises UserError on all ranks."""

    def enter(self, trainer: Trainer, checkpointing: Any, on_evicted: Callable[[str, str], None]) -> None:
        """Join the run, and take over its state if it is under way. `on_evicted`: called when the process must end."""

    def may_save(self) -> bool:
        """Tell whether a save that is due is this launch's to make."""
        return True

    def batches(self, state: State) -> Iterator[Any]:
        """Read this rank's rows of the epoch's batches, from the next one on."""
        length = state.dataloader_len
        assert state.dataloader is not None
        return islice(state.dataloader, None if length is None else int(length))

    def begin_batch(self) -> None:
        """Note that the batch is computed from here on."""

    def exchange_gradient(self, state: State, loss: torch.Tensor) -> bool:
        """Sum the gradient over launches. Return False if that failed: the batch is computed again, with other rows."""
        return True

    def metrics(self) -> dict[str, float]:
        """Measurements of the batch that was settled."""
        return {}

    def move_on(self, state: State) -> Iterator[Any] | None:
        """Return batches to go on with after this one, if this rank has other rows from now on."""
        return None

    def close(self, *, has_finished: bool = False) -> None:
        """Leave. `has_finished`: the run has come to its end, for all launches."""
