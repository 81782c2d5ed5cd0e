"""Composer's Trainer, with a training step that waits for the device once and for the other ranks twice.

The loop, the events and evaluation are Composer's. Composer's own step synchronises host and device, or all ranks, a
dozen times, and twice more in each microbatch. This one does so in `measure` and, between two batches, in `Agreement`.
Exact sums take one exchange more.

The loss of a global batch is a mean over its W tokens with a loss, or samples with a loss. D data ranks divide the
samples. C ranks divide each sample: each has C times its part of the loss, and is averaged with the others.

    case         a rank's nats are divided by    over ranks     scale of fp16
    tokens       W / D                           mean           none
    samples      W / D and a full row's tokens   mean           none
    fp16         the same                        sum            `loss` multiplies gradients by scale / (D C);
                                                                `measure` divides them by scale
    exact sums   all of a full batch, not W / D  sum, float64   refused, and so is C > 1
    pipeline     the same, in `train_on`         the same       `train_on` multiplies the weights of losses

`loss_divisor` is W / D, or with exact sums what a batch without padding has; `ExactSums.finish` then makes it W. With
samples, `row_weights` let a short row count as much as a full one.
"""

import atexit
import datetime
import warnings
from collections.abc import Iterator
from itertools import islice
from typing import Any, cast

import torch
from composer import Trainer
from composer.core import DataSpec, Event
from composer.trainer import trainer as composer_trainer
from composer.utils import collect_env

from llmfoundry_lite import devices
from llmfoundry_lite.config.layout import DataRanks
from llmfoundry_lite.data.loader import format_digest
from llmfoundry_lite.parallel.exact import round_loss
from llmfoundry_lite.ranks.exchange import all_reduce_max, raise_on_all_ranks
from llmfoundry_lite.training.agreement import Agreement, count_rows
from llmfoundry_lite.training.gradient_step import LOSS, GradientStep
from llmfoundry_lite.training.optimizers import clear_gradients, whole_parameters
from llmfoundry_lite.training.partners import Partners

# The model is parallel already; without FSDP inside, as in a pipeline, Composer would wrap it in DDP.
composer_trainer.prepare_ddp_module = lambda model, find_unused_parameters: model

# Composer's Trainer asks for the processor's name on every rank and does not use it. py-cpuinfo starts processes and
# times the processor to find it: more than a second of every launch.
collect_env.get_cpu_model = devices.device_name


class ParallelTrainer(Trainer):
    """Composer's Trainer for parallel models. It counts each sample once, even if several ranks compute parts of it.
    Losses and gradients are means over ranks. Each sample is on equally many ranks, so these are means over samples."""

    def __init__(
        self,
        *,
        ranks: DataRanks,
        agreement: Agreement,
        gradient_step: GradientStep,
        partners: Partners,
        device_batch_size: int,
        **options: Any,
    ):
        self.ranks = ranks
        self.agreement = agreement
        self.gradient_step = gradient_step
        self.partners = partners
        self.device_batch_size = device_batch_size
        self.last_stepped_batch = 0
        """The last batch whose step has begun: until Composer counts it, the state is that of no batch."""
        super().__init__(**options)
        # Composer's loop says so of a run that carries on at the end of an epoch. Data without batches are refused.
        warnings.filterwarnings("ignore", message="No batches were trained", category=UserWarning)
        devices.set_tf32(options["model"].precision.tf32)  # Composer has allowed it on every GPU by now

    def close(self) -> None:
        """Close each callback. Composer would do so a second time when Python exits, without threads."""
        super().close()
        atexit.unregister(self.engine._close)

    def _iter_dataloader(self, trainer_mode: Any) -> Iterator[Any]:
        if trainer_mode.name != "TRAIN":
            yield from self._read_validation()
            return
        self._begin_epoch()
        try:
            while True:
                self.engine.run_event(Event.BEFORE_DATALOADER)
                batch = self.agreement.take()
                if batch is None:
                    self.engine.run_marker_only_event(Event.AFTER_DATALOADER)
                    return
                yield batch
        finally:
            self.agreement.end_epoch()

    def _read_validation(self) -> Iterator[Any]:
        """Yield the batches of a validation until one rank has no more. An error of one rank's loader is raised on all
        ranks, so that they can save what they have trained; Composer would let the others wait. Collective."""
        assert self.state.dataloader is not None
        length = self.state.dataloader_len
        batches = islice(self.state.dataloader, None if length is None else int(length))
        while True:
            batch, error = None, None
            try:
                batch = next(batches, None)
            except Exception as caught:
                error = caught
            is_finished = batch is None and error is None
            any_error, any_finished = all_reduce_max([int(error is not None), int(is_finished)])
            if any_error:
                raise_on_all_ranks(error)
            if any_finished:
                return
            yield batch

    def _begin_epoch(self) -> None:
        batches, length = self.partners.batches(), self.state.dataloader_len
        if batches is None:
            assert self.state.dataloader is not None
            batches = islice(self.state.dataloader, None if length is None else int(length))
        self.agreement.begin_epoch(batches)

    def _train_batch(self, use_grad_scaling: bool) -> None:  # type: ignore[override]
        """Train on this rank's rows in `state.batch`: microbatch by microbatch to a gradient, over ranks and launches,
        clipped, to the optimizer's step. `Checkpointing.batch_end` comes next.

        The loss is the mean over the global batch's tokens or samples, however ranks, microbatches and pipeline stages
        divide them. Returns None, so that Composer's loop does not sum the loss over ranks: `GradientStep.finish` has.
        """
        state, step, run_event = self.state, self.gradient_step, self.engine.run_event
        while True:
            rows = state.batch
            loss_sum = torch.zeros((), device=state.device._device)
            microbatches, loss_divisor = self._begin_batch(rows)
            for microbatch in microbatches:
                state.batch = state.device.batch_to_device(microbatch)
                step.before_forward()
                loss_sum = loss_sum + self._add_gradient(microbatch, loss_divisor)
            state.batch = rows
            if self.partners.exchange_gradient(loss_sum):
                break
            self._begin_epoch()  # again, with the rows that this launch has now
            state.batch = self.agreement.take()
        self.last_stepped_batch = int(state.timestamp.batch) + 1
        digest = format_digest(self.agreement.current.digest)
        metrics: dict[str, Any] = {**self.partners.metrics(), "data/digest": digest}
        self.logger.log_metrics(metrics)
        state.total_loss_dict = {LOSS: step.finish(state, self.logger, loss_sum, digest)}
        run_event(Event.AFTER_TRAIN_BATCH)
        state.optimizers[0].step()
        self.first_train_batch_complete = True

    def _begin_batch(self, rows: Any) -> tuple[list[Any], float]:
        """Divide a batch into microbatches; a pipeline does so itself. Returns them, on the host, where counting waits
        for no device; and the `loss_divisor` of the table above."""
        state, step, model = self.state, self.gradient_step, cast(Any, self._original_model)
        size, device = state.device_train_microbatch_size, state.device._device
        assert self._train_data_spec is not None and isinstance(size, int) and device is not None
        total = self.agreement.current.weight(by_tokens=self.accumulate_train_batch_on_tokens)
        loss_divisor = max(total, 1) / self.ranks.size  # all rows of one launch among several may be padding
        self.partners.begin_batch()
        is_pipeline = model.num_stages > 1
        microbatches = [rows] if is_pipeline else [*self._train_data_spec.split_batch(rows, size)]
        step.begin(len(microbatches), device, num_ranks=self.ranks.size * model.context_size)
        self.engine.run_event(Event.BEFORE_TRAIN_BATCH)
        clear_gradients(state.optimizers[0])
        if step.sums:  # no means over ranks, and a weight that does not depend on the rows of other launches
            num_rows, num_tokens = self.device_batch_size * self.ranks.size, max(rows["input_ids"].size(1) - 1, 1)
            full = num_rows * (num_tokens if self.accumulate_train_batch_on_tokens else 1)
            step.full_weight, step.weight, loss_divisor = full, total, full
            step.sums.begin_batch(whole_parameters(state.optimizers[0]), num_rows // size)
        return microbatches, loss_divisor

    def _add_gradient(self, microbatch: Any, loss_divisor: float) -> torch.Tensor:
        """Add a microbatch's gradient, or in one pass through a pipeline all microbatches'. `microbatch` is on the
        host, `state.batch` on the device. Returns this rank's loss, whose mean over ranks, or sum with exact sums, is
        the global batch's: a scalar."""
        state, step, run_event, sums = self.state, self.gradient_step, self.engine.run_event, self.gradient_step.sums
        model, spec = cast(Any, self._original_model), cast(DataSpec, self._train_data_spec)
        is_pipeline = model.num_stages > 1
        run_event(Event.BEFORE_FORWARD)
        if not is_pipeline:
            state.outputs = state.model(state.batch)
        run_event(Event.AFTER_FORWARD)
        run_event(Event.BEFORE_LOSS)
        if is_pipeline:  # forward and backward passes of all microbatches
            losses = model.train_on(state.batch, cast(int, state.device_train_microbatch_size), loss_divisor)
            state.loss = losses.sum()
        else:
            losses = state.loss = model.loss(state.outputs, state.batch)
        step.after_loss(cast(torch.Tensor, state.loss))
        run_event(Event.AFTER_LOSS)
        run_event(Event.BEFORE_BACKWARD)
        if not is_pipeline:
            if sums:  # as a pipeline does, to the bit
                outputs: Any = state.outputs
                losses = outputs["loss_sum"] * model.weight_of_loss(microbatch["input_ids"], loss_divisor)
            elif self.accumulate_train_batch_on_tokens:
                losses = losses * (spec.get_num_tokens_in_batch(microbatch, "loss_generating") / loss_divisor)
            else:
                losses = losses * (count_rows(microbatch) / loss_divisor)
            losses.backward()
        run_event(Event.AFTER_BACKWARD)
        return (round_loss(losses.detach()) if sums else losses.detach()).sum()

    def _accumulate_time_across_ranks(
        self, num_samples: int | float, num_tokens: int, batch_time: datetime.timedelta
    ) -> tuple[int, int, datetime.timedelta]:
        """Return the global batch's samples and tokens, agreed on before the batch, and this rank's time. Rank 0's
        time is recorded and saved."""
        return self.agreement.current.num_filled, self.agreement.current.num_tokens, batch_time
