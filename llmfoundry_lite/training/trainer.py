"""Composer's Trainer, with a training step that waits for the device once and for the other ranks once.

The loop, the events and evaluation are Composer's. Composer's own step synchronises host and device, or all ranks, a
dozen times, and twice more in each microbatch. This one does so in `measure` and, between two batches, in `Agreement`.
"""

import datetime
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from composer import Trainer
from composer.core import Event
from composer.trainer import trainer as composer_trainer
from composer.utils import collect_env

from llmfoundry_lite import devices
from llmfoundry_lite.config.layout import DataRanks
from llmfoundry_lite.data.loader import format_digest
from llmfoundry_lite.parallel.exact import round_loss
from llmfoundry_lite.training.adapter import PipelinedLanguageModel
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

    Losses and gradients are means over ranks. Each sample is on equally many ranks, so these are means over samples.
    """

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
        super().__init__(**options)
        devices.set_tf32(options["model"].precision.tf32)  # Composer has allowed it on every GPU by now

    def _iter_dataloader(self, trainer_mode: Any) -> Iterator[Any]:
        if trainer_mode.name != "TRAIN":
            yield from super()._iter_dataloader(trainer_mode)
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

    def _begin_epoch(self) -> None:
        batches, length = self.partners.batches(), self.state.dataloader_len
        if batches is None:
            assert self.state.dataloader is not None
            batches = islice(self.state.dataloader, None if length is None else int(length))
        self.agreement.begin_epoch(batches)

    def _train_batch(self, use_grad_scaling: bool) -> None:  # type: ignore[override]
        """Train on `state.batch`. The loss is the mean over the global batch's tokens or samples, however ranks,
        microbatches and pipeline stages divide them.

        Returns None, so that Composer's loop does not sum the loss over ranks: `GradientStep.finish` has.
        """
        state = self.state
        loss_sum = self._compute_gradient()
        while not self.partners.exchange_gradient(loss_sum):
            self._begin_epoch()
            state.batch = self.agreement.take()
            loss_sum = self._compute_gradient()
        digest = format_digest(self.agreement.current.digest)
        metrics: dict[str, Any] = {**self.partners.metrics(), "data/digest": digest}
        self.logger.log_metrics(metrics)
        state.total_loss_dict = {LOSS: self.gradient_step.finish(state, self.logger, loss_sum, digest)}
        self.engine.run_event(Event.AFTER_TRAIN_BATCH)
        state.optimizers[0].step()
        self.first_train_batch_complete = True

    def _compute_gradient(self) -> torch.Tensor:
        """Add up the gradient of this rank's rows, microbatch by microbatch or in one pass through a pipeline.

        Returns this rank's share of the global batch's loss, times the number of data ranks: a scalar.
        """
        state, spec, run_event, step = self.state, self._train_data_spec, self.engine.run_event, self.gradient_step
        model: Any = self._original_model
        assert spec is not None and isinstance(state.device_train_microbatch_size, int)
        batch, agreed, size = state.batch, self.agreement.current, state.device_train_microbatch_size
        by_tokens, sums = self.accumulate_train_batch_on_tokens, step.sums
        total = agreed.weight(by_tokens=by_tokens)
        share = max(total, 1) / self.ranks.size  # all rows of one launch among several may be padding
        is_pipeline = isinstance(model, PipelinedLanguageModel)
        device = state.device._device
        assert device is not None
        self.partners.begin_batch()
        microbatches = [batch] if is_pipeline else spec.split_batch(batch, size)
        step.begin(len(microbatches), device, num_ranks=self.ranks.size * model.num_parts)
        run_event(Event.BEFORE_TRAIN_BATCH)
        clear_gradients(state.optimizers[0])
        if sums:  # no means over ranks, and a weight that does not depend on the rows of other launches
            num_rows, num_tokens = self.device_batch_size * self.ranks.size, max(batch["input_ids"].size(1) - 1, 1)
            share = num_rows * (num_tokens if by_tokens else 1)
            step.full_weight, step.weight = share, total
            sums.begin(whole_parameters(state.optimizers[0]), num_rows // size)
        loss_sum = torch.zeros((), device=device)
        for microbatch in microbatches:
            state.batch = state.device.batch_to_device(microbatch)
            step.before_forward()
            run_event(Event.BEFORE_FORWARD)
            if not is_pipeline:
                state.outputs = state.model(state.batch)
            run_event(Event.AFTER_FORWARD)
            run_event(Event.BEFORE_LOSS)
            if is_pipeline:  # forward and backward passes of all microbatches
                losses = model.train_on(state.batch, size, share)
                state.loss = losses.sum()
            else:
                state.loss = model.loss(state.outputs, state.batch)
            assert isinstance(state.loss, torch.Tensor)
            step.after_loss(state.loss)
            run_event(Event.AFTER_LOSS)
            run_event(Event.BEFORE_BACKWARD)
            if not is_pipeline:
                if sums:  # as a pipeline does, to the bit
                    outputs: Any = state.outputs
                    losses = outputs["loss_sum"] * model.weight_of_loss(microbatch["input_ids"], share)
                elif by_tokens:
                    losses = state.loss * (spec.get_num_tokens_in_batch(microbatch, "loss_generating") / share)
                else:
                    losses = state.loss * (count_rows(microbatch) / share)
                losses.backward()
            run_event(Event.AFTER_BACKWARD)
            loss_sum = loss_sum + (round_loss(losses.detach()) if sums else losses.detach()).sum()
        state.batch = batch
        return loss_sum

    def _accumulate_time_across_ranks(
        self, num_samples: int | float, num_tokens: int, batch_time: datetime.timedelta
    ) -> tuple[int, int, datetime.timedelta]:
        """Return the global batch's samples and tokens, agreed on before the batch, and this rank's time. Rank 0's
        time is recorded and saved."""
        return self.agreement.current.num_filled, self.agreement.current.num_tokens, batch_time
