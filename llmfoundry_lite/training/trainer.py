"""Composer's Trainer with a batch of our own, in which the host asks the device once and the other ranks once.

Composer's loop, events and evaluation stand. Its batch asks the device for a number, or all ranks, a dozen times and
twice more in each microbatch; each time the host waits until the device has nothing left to do. Here the device is
asked in `GradientStep.finish`, and the other ranks in `Agreement`, between two batches.
"""

import datetime
from collections.abc import Iterator
from typing import Any

import torch
from composer import Trainer
from composer.core import Event
from composer.trainer import trainer as composer_trainer
from composer.utils import collect_env

from llmfoundry_lite import devices
from llmfoundry_lite.config.layout import DataRanks
from llmfoundry_lite.data.loader import format_digest
from llmfoundry_lite.training.adapter import PipelinedLanguageModel
from llmfoundry_lite.training.agreement import Agreement, count_filled
from llmfoundry_lite.training.gradients import LOSS, GradientStep
from llmfoundry_lite.training.optimizers import clear_gradients
from llmfoundry_lite.training.partners import Partners

# The model is parallel already; without FSDP inside, as in a pipeline, Composer would wrap it in DDP.
composer_trainer.prepare_ddp_module = lambda model, find_unused_parameters: model

# Composer's Trainer asks for the processor's name, on every rank and for nobody, and py-cpuinfo starts processes and
# times the processor to tell: more than a second of every launch.
collect_env.get_cpu_model = devices.device_name


class GroupedTrainer(Trainer):
    """Counts each sample and token once, although with tensor and pipeline parallelism several ranks have them.

    Losses and gradients are means over ranks, of which each group has equally many.
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
        self.agreement.begin_epoch(self.partners.batches(self.state))
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

    def _train_batch(self, use_grad_scaling: bool) -> None:  # type: ignore[override]
        """Train on `state.batch`. The gradient is that of the mean over the global batch's tokens, or samples, however
        ranks, microbatches and pipeline stages divide them.

        Returns None to Composer's loop, which would sum losses over ranks; `GradientStep.finish` has done that.
        """
        state, spec = self.state, self._train_data_spec
        assert spec is not None
        loss_sum = self._compute_gradient()
        while not self.partners.settle(state, loss_sum):
            self.agreement.begin_epoch(self.partners.batches(state))
            state.batch = spec.batch_transforms(self.agreement.take())
            loss_sum = self._compute_gradient()
        digest = format_digest(self.agreement.current.digest)
        metrics: dict[str, Any] = {**self.partners.metrics(), "data/digest": digest}
        self.logger.log_metrics(metrics)
        state.total_loss_dict = {LOSS: self.gradient_step.finish(state, self.logger, loss_sum, digest)}
        self.engine.run_event(Event.AFTER_TRAIN_BATCH)
        state.optimizers[0].step()
        self.first_train_batch_complete = True

    def _compute_gradient(self) -> torch.Tensor:
        """Add up the gradient of this rank's rows. Returns their weighted loss."""
        state, spec = self.state, self._train_data_spec
        assert spec is not None and isinstance(state.device_train_microbatch_size, int)
        batch, agreed, size = state.batch, self.agreement.current, state.device_train_microbatch_size
        total = agreed.num_losses if self.accumulate_train_batch_on_tokens else agreed.num_filled
        share = max(total, 1) / self.ranks.size  # all rows of one launch among several may be padding
        self.partners.begin_batch()
        self.gradient_step.begin(-(-len(batch["input_ids"]) // size), state.device._device)
        self.engine.run_event(Event.BEFORE_TRAIN_BATCH)
        clear_gradients(state.optimizers[0])
        if isinstance(self._original_model, PipelinedLanguageModel):
            loss_sum = self._run_pipeline(self._original_model, batch, share)
        else:
            loss_sum = torch.zeros((), device=state.device._device)
            for microbatch in spec.split_batch(batch, size):
                if self.accumulate_train_batch_on_tokens:
                    weight = spec.get_num_tokens_in_batch(microbatch, token_type="loss_generating")
                else:
                    weight = count_filled(microbatch)
                loss_sum += self._run_microbatch(microbatch, weight / share)
        state.batch = batch
        return loss_sum

    def _run_microbatch(self, microbatch: Any, weight: float) -> torch.Tensor:
        state, spec = self.state, self._train_data_spec
        assert spec is not None
        state.batch = spec.microbatch_transforms(state.device.batch_to_device(microbatch))
        self.gradient_step.before_forward()
        self.engine.run_event(Event.BEFORE_FORWARD)
        state.outputs = state.model(state.batch)
        self.engine.run_event(Event.AFTER_FORWARD)
        self.engine.run_event(Event.BEFORE_LOSS)
        state.loss = self._original_model.loss(state.outputs, state.batch)
        assert isinstance(state.loss, torch.Tensor)
        self.gradient_step.after_loss(state.loss)
        self.engine.run_event(Event.AFTER_LOSS)
        self.engine.run_event(Event.BEFORE_BACKWARD)
        weighted = state.loss * weight
        weighted.backward()
        self.engine.run_event(Event.AFTER_BACKWARD)
        return weighted.detach()

    def _run_pipeline(self, model: PipelinedLanguageModel, batch: Any, share: float) -> torch.Tensor:
        """Return the whole batch's weighted loss where the last stage is, 0 elsewhere. A microbatch's events come once
        for all of them."""
        state, spec = self.state, self._train_data_spec
        assert spec is not None and isinstance(state.device_train_microbatch_size, int)
        state.batch = spec.microbatch_transforms(state.device.batch_to_device(batch))
        num_samples = state.device_train_microbatch_size
        self.gradient_step.before_forward()
        for event in (Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.BEFORE_LOSS):
            self.engine.run_event(event)
        loss = model.train_on(state.batch, -(-self.device_batch_size // num_samples), num_samples, share)
        state.loss = loss
        self.gradient_step.after_loss(loss)
        for event in (Event.AFTER_LOSS, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD):
            self.engine.run_event(event)
        return loss

    def _accumulate_time_across_ranks(
        self, num_samples: int | float, num_tokens: int, batch_time: datetime.timedelta
    ) -> tuple[int, int, datetime.timedelta]:
        """Return the whole batch's samples and tokens, which ranks have agreed on before it. Each rank keeps its own
        clock; rank 0's is recorded and saved."""
        return self.agreement.current.num_filled, self.agreement.current.num_tokens, batch_time
