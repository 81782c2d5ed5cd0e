"""The interface by which other launches of a run (`launch_role.py`) may read and change this one.

They know nothing else of the training loop.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from composer import Trainer
from torch.distributed.fsdp import FSDPModule
from torch.nn import Parameter

from llmfoundry_lite import devices
from llmfoundry_lite.checkpoint.manifest import Segment
from llmfoundry_lite.checkpoint.manifest_json import decode_segment, encode_record
from llmfoundry_lite.data.loader import build_text_loader
from llmfoundry_lite.ranks.codec import Item, decode_value, encode_value
from llmfoundry_lite.ranks.exchange import broadcast_json
from llmfoundry_lite.training.agreement import BatchCounts
from llmfoundry_lite.training.gradient_step import LOSS, Measured
from llmfoundry_lite.training.optimizers import clear_gradients, whole_parameters

if TYPE_CHECKING:  # it imports the role, which import this module
    from llmfoundry_lite.training.checkpointing import Checkpointing


class RunHandle:
    """The parts of a run that other launches of it read and change, on one rank of this launch.

    All ranks of this launch call a method together, unless it says otherwise.
    """

    def __init__(self, trainer: Trainer, checkpointing: "Checkpointing", leave: Callable[[str, str], None]):
        """Wrap a run that has been restored, for the other launches of it.

        `checkpointing` restores and saves it. `leave` prints and records, with a status and a text, why this process
        ends. The public attributes may be read by the other launches' code; the private ones are the training loop's.
        """
        # The training loop's own objects, which the other launches reach by methods alone.
        self._state = trainer.state
        self._logger = trainer.logger
        self._checkpointing = checkpointing
        """Saves and restores the run, and decides when a save is due."""
        self._agreement = checkpointing.agreement
        """Exchange of this launch's ranks between two batches: counts, and reasons to leave."""
        self._gradient_step = checkpointing.gradient_step
        """Runs between the backward pass and the optimizer, where launches add up their gradients."""
        self._dataset: Any = getattr(trainer.state.train_dataloader, "dataset", None)
        self._newest_lease: int | None = None
        """On rank 0: number of the newest lease when `note_newest_lease` was called."""

        # What the other launches read, and functions that they call.
        self.config = checkpointing.config
        """The configuration, with the values that this launch has chosen itself."""
        self.model: Any = checkpointing.gradient_step.model.model
        self.optimizer = trainer.state.optimizers[0]
        self.num_data_ranks = checkpointing.agreement.ranks.size
        self.microbatch = int(trainer.state.device_train_microbatch_size or 1)
        """Number of samples in a microbatch."""
        self.is_exact = checkpointing.gradient_step.exact_sums is not None
        """Gradients are sums that do not depend on how rows are divided."""
        self.print = checkpointing.print_on_rank_0
        self.log = trainer.logger.log_metrics
        self.leave = partial(leave, "preempted")
        """Prints and records why this process ends at once. It may be called from any thread."""

    # ------------------------------------------------------------------------------------- where the run is

    @property
    def batch(self) -> int:
        """Number of batches that have been trained."""
        return int(self._state.timestamp.batch)

    @property
    def batch_in_epoch(self) -> int:
        """Number of batches of this epoch that have been trained."""
        return int(self._state.timestamp.batch_in_epoch)

    @property
    def counts(self) -> BatchCounts:
        """Samples and tokens of the current batch: this launch's, and after `commit` those of all launches."""
        return self._agreement.current

    @property
    def loss(self) -> float:
        """The last batch's loss, as it is logged."""
        return float(self._state.total_loss_dict[LOSS])

    @property
    def is_last(self) -> bool:
        """The run ends with the last batch."""
        return self._checkpointing.policy.is_last(self._state)

    @property
    def is_launch_over(self) -> bool:
        """`stop_after` or `stop_at` is reached, or a callback has asked for the end."""
        return self._checkpointing.policy.is_launch_over(self._state)

    @property
    def is_asked_to_leave(self) -> bool:
        """This rank knows of a reason to leave early. It may differ between ranks."""
        return bool(self._agreement.preemption.reason)

    def agree_on_leaving(self) -> str:
        """Return why this launch leaves early, for a message, if any rank knows of a reason; else an empty text."""
        preemption = self._agreement.preemption
        agreed_reason = preemption.agree_on_reason()
        if not agreed_reason:
            return ""
        return preemption.describe_reason(agreed_reason)

    def segment(self) -> Segment:
        """Return the description of where this launch runs that its checkpoints have."""
        return self._checkpointing.segments_until(self._state)[-1]

    # ---------------------------------------------------------------------------------------------- batches

    @property
    def data_order(self) -> str:
        """Fingerprint of the order of the training data."""
        return " ".join(order.fingerprint for order in self._dataset.stages.orders)

    def read(self, row_indices: Sequence[int], again: Sequence[int] = (), back: int = 0) -> Iterator[Any]:
        """Return the batches of the rest of the epoch, with those rows that this launch trains.

        `row_indices` are the rows of each global batch that all data ranks of this launch train, and each batch that is
        returned has this rank's part of them. The first one is the run's next batch. If `again` is given, each batch
        also has this rank's part of those rows of the batch that is `back` batches earlier.

        For example, with rows 4 to 7 and 2 data ranks, rank 0 gets rows 4 and 5 of every batch.
        """
        # Tell the data set which rows to read from here on. New workers then read them.
        loader = self.config.train_loader
        sample_in_epoch = self.batch_in_epoch * self._dataset.global_batch_size
        epoch = int(self._state.timestamp.epoch)
        self._dataset.resume_with_rows(self._part_of(row_indices), epoch, sample_in_epoch, self._part_of(again), back)
        return iter(
            build_text_loader(
                self._dataset,
                num_workers=loader.num_workers,
                pin_memory=loader.pin_memory and devices.device_type() == "cuda",
                prefetch_factor=loader.prefetch_factor,
                timeout=loader.timeout,
            )
        )

    def _part_of(self, row_indices: Sequence[int]) -> Sequence[int]:
        """Return this data rank's part of rows that are divided over all data ranks, in order.

        The parts differ by one row at most. For example, 3 ranks get 3, 3 and 4 of 10 rows.
        """
        ranks = self._agreement.ranks
        begin = ranks.rank * len(row_indices) // ranks.size
        end = (ranks.rank + 1) * len(row_indices) // ranks.size
        return row_indices[begin:end]

    def on_gradients(self, parameters: Mapping[str, Parameter], take: Callable[[str, Parameter], None]) -> None:
        """Call `take` with the name and the parameter as soon as a gradient is final, in each batch from now on.

        `parameters` are this rank's, by name. The calls come during the backward pass of the batch's last microbatch,
        so that gradients can be sent to other launches while others are still computed. Two kinds of parameters are not
        reported, and the caller has to read their gradients after the backward pass:

        - all parameters of a pipeline, unless FSDP shards every stage, because their hooks run after every microbatch
        - embeddings that are tied over two stages, because the stages' gradients are added up later
        """
        step = self._gradient_step
        model = step.model

        def after_accumulation(name: str, parameter: Parameter) -> None:
            if step.num_microbatches_left == 0:  # otherwise more will be added to this gradient
                take(name, parameter)

        if model.num_stages > 1 and not all(isinstance(stage, FSDPModule) for stage in self.model.stages):
            return
        tied_over_stages = {id(parameter) for parameter in model.shared_parameters}
        for name, parameter in parameters.items():
            if id(parameter) not in tied_over_stages:
                parameter.register_post_accumulate_grad_hook(partial(after_accumulation, name))

    def measure(self, loss: torch.Tensor, weight: int) -> Measured:
        """Finish the gradient, which contains all launches' rows, and return its norm and the loss.

        `loss` is this rank's, and `weight` the number of tokens or samples with a loss in those rows, which exact sums
        need.
        """
        step = self._gradient_step
        if step.exact_sums:
            step.weight = weight
        return step.measure(whole_parameters(self.optimizer), loss)

    def commit(self, measured: Measured, counts: BatchCounts) -> None:
        """Set the current batch's norm, loss and counts to those of all launches. The ranks exchange nothing."""
        self._gradient_step.measured_by_launches = measured
        self._agreement.current = counts

    def drop_gradient(self) -> None:
        """Drop the gradient of a batch that must be computed again. The ranks exchange nothing."""
        clear_gradients(self.optimizer)

    def add_counts(self, samples: int, tokens: int) -> None:
        """Add samples and tokens that other launches have trained to the run's clock. The ranks exchange nothing.

        Batches are not added. Replaces `state.timestamp`.
        """
        timestamp = self._state.timestamp
        additions = dict.fromkeys(("sample", "sample_in_epoch"), samples)
        additions |= dict.fromkeys(("token", "token_in_epoch", "token_in_iteration"), tokens)
        counts: Any = {name: int(getattr(timestamp, name)) + count for name, count in additions.items()}
        self._state.timestamp = timestamp.copy(**counts)

    # ------------------------------------------------------------------------------------- state, and saves

    def digest(self) -> str:
        """Return a digest of weights and optimizer state that does not depend on how ranks divide them."""
        return self._checkpointing.saver.digest(self.model, self.optimizer)

    def collect_state(self) -> dict[str, Any]:
        """Return the state besides tensors, as JSON. The ranks exchange nothing."""
        checkpointing = self._checkpointing
        segments: Sequence[Segment] = ()
        if self.batch >= checkpointing.first_batch:  # this launch has trained
            segments = checkpointing.segments_until(self._state)
        scalars = encode_value(checkpointing.run_state.collect(self._state))
        return {"scalars": scalars, "segments": [encode_record(segment) for segment in segments]}

    def restore_state(self, collected: Mapping[str, Any]) -> None:
        """Restore what `collect_state` of another launch has returned. This launch begins after that launch's batch."""
        self._checkpointing.run_state.restore(decode_value(collected["scalars"]), self._state)
        self._checkpointing.segments = tuple(decode_segment(Item(one, "segment")) for one in collected["segments"])
        self._checkpointing.begin(self._state)

    def save(self, *, begins: bool = True) -> int:
        """Wait for the save in progress, and with `begins` save the last batch before that.

        Returns the batch of the newest save. Raises UserError on all ranks if it fails.
        """
        if begins:
            self._checkpointing.save_now(self._state, self._logger)
        else:
            self._checkpointing.finish_saves(self._state, self._logger)
        return self._checkpointing.begun_batch

    def note_newest_lease(self) -> None:
        """Note which launch has taken the run's lease last, for `has_successor`. Rank 0 reads it."""
        if dist.get_rank() == 0:
            with suppress(OSError):
                self._newest_lease = self._checkpointing.saver.store.leases.highest_epoch()

    def has_successor(self) -> bool:
        """Return whether another launch has taken the run's lease since this one took it.

        If this launch has not, returns whether one has since `note_newest_lease`. Rank 0 reads the leases, and
        broadcasts the answer. If they cannot be read, the answer is False.
        """
        has_successor = False
        if dist.get_rank() == 0:
            saver = self._checkpointing.saver
            known_epoch = self._newest_lease if saver.lease is None else saver.lease.epoch
            with suppress(OSError):
                has_successor = known_epoch is not None and saver.store.leases.highest_epoch() > known_epoch
        return broadcast_json(has_successor)
