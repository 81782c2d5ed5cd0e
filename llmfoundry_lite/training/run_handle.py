"""A run under way, as other launches of it may touch it (`partners.py`): all that they know of the training loop."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from composer import Trainer
from composer.core import State
from composer.loggers import Logger
from torch.distributed.fsdp import FSDPModule
from torch.nn import Parameter

from llmfoundry_lite import devices
from llmfoundry_lite.checkpoint.manifest import Segment, decode_segment, encode_record
from llmfoundry_lite.checkpoint.save import Saver
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.data.loader import build_text_loader
from llmfoundry_lite.ranks.codec import Item, decode_value, encode_value
from llmfoundry_lite.ranks.exchange import broadcast_json
from llmfoundry_lite.training.agreement import Agreement, Upcoming
from llmfoundry_lite.training.gradient_step import LOSS, GradientStep, Measured
from llmfoundry_lite.training.optimizers import clear_gradients, whole_parameters
from llmfoundry_lite.training.run_state import RunState
from llmfoundry_lite.training.save_policy import SavePolicy


class Saving(Protocol):
    """Parts of `Checkpointing`, which knows the partners."""

    config: TrainConfig
    agreement: Agreement
    gradient_step: GradientStep
    policy: SavePolicy
    run_state: RunState
    saver: Saver
    segments: tuple[Segment, ...]
    first_batch: int
    begun_batch: int

    def begin(self, state: State) -> None: ...
    def segments_until(self, state: State) -> tuple[Segment, ...]: ...
    def save_now(self, state: State, logger: Logger) -> None: ...
    def fit_end(self, state: State, logger: Logger) -> None: ...
    def print_on_rank_0(self, *lines: str) -> None: ...


class RunHandle:
    """The parts of a run that partners read and change. All ranks call a method together, unless it says otherwise."""

    def __init__(self, trainer: Trainer, saving: Saving, leave: Callable[[str, str], None]):
        self._state, self._logger, self._saving = trainer.state, trainer.logger, saving
        self._agreement, self._gradient_step = saving.agreement, saving.gradient_step
        self._dataset: Any = getattr(trainer.state.train_dataloader, "dataset", None)
        self._first_lease: int | None = None
        self.config = saving.config
        """The configuration, with the values that this launch has chosen by itself."""
        self.model: Any = saving.gradient_step.model.model
        self.optimizer = trainer.state.optimizers[0]
        self.num_data_ranks = saving.agreement.ranks.size
        self.microbatch = int(trainer.state.device_train_microbatch_size or 1)
        """Samples of a microbatch."""
        self.is_exact = saving.gradient_step.sums is not None
        """Gradients are sums that do not depend on how rows are divided."""
        self.print = saving.print_on_rank_0
        self.log = trainer.logger.log_metrics
        self.leave = partial(leave, "preempted")
        """Writes why this process ends at once, from any thread."""

    # ------------------------------------------------------------------------------------- where the run is

    @property
    def batch(self) -> int:
        """Batches that have been trained."""
        return int(self._state.timestamp.batch)

    @property
    def batch_in_epoch(self) -> int:
        return int(self._state.timestamp.batch_in_epoch)

    @property
    def counts(self) -> Upcoming:
        """Samples and tokens of the batch under way: this launch's, and all launches' after `commit`."""
        return self._agreement.current

    @property
    def loss(self) -> float:
        """The last batch's loss, as it is logged."""
        return float(self._state.total_loss_dict[LOSS])

    @property
    def is_last(self) -> bool:
        """The run ends with the last batch."""
        return self._saving.policy.is_last(self._state)

    @property
    def is_launch_over(self) -> bool:
        """`stop_after` or `stop_at` is reached."""
        return self._saving.policy.is_launch_over(self._state)

    @property
    def is_asked_to_leave(self) -> bool:
        """This rank knows of a reason to leave."""
        return bool(self._agreement.preemption.reason)

    def agree_on_leaving(self) -> str:
        """Return why this launch is asked to leave, if any rank knows of a reason; else an empty text."""
        preemption = self._agreement.preemption
        return preemption.describe_reason(agreed) if (agreed := preemption.agree_on_reason()) else ""

    def segment(self) -> Segment:
        """Describe where this launch runs."""
        return self._saving.segments_until(self._state)[-1]

    # ---------------------------------------------------------------------------------------------- batches

    @property
    def data_order(self) -> str:
        """Fingerprint of the order of the data."""
        return " ".join(order.fingerprint for order in self._dataset.stages.orders)

    def read(self, row_indices: Sequence[int], again: Sequence[int] = (), back: int = 0) -> Iterator[Any]:
        """Read this rank's share of these rows of every batch, from the next one on. Beside them, read rows `again` of
        the batch that was `back` batches earlier."""
        ranks, stamp, loader = self._agreement.ranks, self._state.timestamp, self.config.train_loader
        mine, earlier = (
            rows[ranks.rank * len(rows) // ranks.size : (ranks.rank + 1) * len(rows) // ranks.size]
            for rows in (row_indices, again)
        )
        place = self.batch_in_epoch * self._dataset.global_batch_size
        self._dataset.continue_with(mine, int(stamp.epoch), place, earlier, back)
        return iter(
            build_text_loader(
                self._dataset,
                num_workers=loader.num_workers,
                pin_memory=loader.pin_memory and devices.device_type() == "cuda",
                prefetch_factor=loader.prefetch_factor,
                timeout=loader.timeout,
            )
        )

    def on_gradients(self, parameters: Mapping[str, Parameter], take: Callable[[str, Parameter], None]) -> None:
        """Call `take` in each batch with every parameter whose gradient is final, as soon as it is.

        Of a pipeline these are those that FSDP reduces, once, after the stage's last microbatch. Hooks on others run
        after each. Tied embeddings of two stages are added up later still.
        """
        step, model = self._gradient_step, self._gradient_step.model

        def hook(name: str, parameter: Parameter) -> None:
            if step.num_microbatches_left == 0:
                take(name, parameter)

        if model.num_stages > 1 and not all(isinstance(stage, FSDPModule) for stage in self.model.stages):
            return
        later = {id(parameter) for parameter in model.shared_parameters}
        for name, parameter in parameters.items():
            if id(parameter) not in later:
                parameter.register_post_accumulate_grad_hook(partial(hook, name))

    def measure(self, loss: torch.Tensor, weight: int) -> Measured:
        """Finish and measure the gradient. `loss` is this rank's, `weight` that of the rows in the gradient."""
        step, parameters = self._gradient_step, whole_parameters(self.optimizer)
        if step.sums:
            step.weight = weight
        return step.measure(parameters, loss)

    def commit(self, measured: Measured, counts: Upcoming) -> None:
        """Set the batch's numbers to those of all launches. Every rank must call it; ranks exchange nothing."""
        self._gradient_step.agreed, self._agreement.current = measured, counts

    def drop_gradient(self) -> None:
        clear_gradients(self.optimizer)

    def count_elsewhere(self, samples: int, tokens: int) -> None:
        """Add what other launches have trained to the run's clock."""
        stamp = self._state.timestamp
        more = {"sample": samples, "sample_in_epoch": samples}
        more |= {"token": tokens, "token_in_epoch": tokens, "token_in_iteration": tokens}
        counts: Any = {key: int(getattr(stamp, key)) + count for key, count in more.items()}
        self._state.timestamp = stamp.copy(**counts)

    # ------------------------------------------------------------------------------------- state, and saves

    def digest(self) -> str:
        """Hash weights and optimizer."""
        return self._saving.saver.digest(self.model, self.optimizer)

    def collect(self) -> dict[str, Any]:
        """Return the state besides tensors, as JSON."""
        here = self._saving
        segments = here.segments_until(self._state) if self.batch >= here.first_batch else ()
        scalars = encode_value(here.run_state.collect(self._state))
        return {"scalars": scalars, "segments": [encode_record(segment) for segment in segments]}

    def take_over(self, collected: Mapping[str, Any]) -> None:
        """Carry on from a state that another launch has collected."""
        self._saving.run_state.restore(decode_value(collected["scalars"]), self._state)
        self._saving.segments = tuple(decode_segment(Item(one, "segment")) for one in collected["segments"])
        self._saving.begin(self._state)

    def save(self, *, begins: bool = True) -> int:
        """Save the last batch if `begins`. Wait for all saves, and return the last one's batch. Raises UserError."""
        (self._saving.save_now if begins else self._saving.fit_end)(self._state, self._logger)
        return self._saving.begun_batch

    def note_lease(self) -> None:
        """Note whose saves are the newest."""
        if dist.get_rank() == 0:
            with suppress(OSError):
                self._first_lease = self._saving.saver.store.leases.highest()

    def has_successor(self) -> bool:
        """Return whether another launch has begun to save since this one did, or since `note_lease`."""
        has_successor, saver = False, self._saving.saver
        if dist.get_rank() == 0:
            known = saver.lease.epoch if saver.lease is not None else self._first_lease
            with suppress(OSError):
                has_successor = known is not None and saver.store.leases.highest() > known
        return broadcast_json(has_successor)
