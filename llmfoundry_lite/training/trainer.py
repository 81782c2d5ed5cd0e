"""Composer's Trainer with a batch of our own, in which ranks and devices are asked once.

Composer's loop, events and evaluation stand. Its batch asks the device for a number, or all ranks, a dozen times and
twice more in each microbatch; each time the host waits until the device has nothing left to do. Here the host asks the
device once a batch (`gradients`), and the other ranks once (`agreement`).
"""

import datetime
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from composer import Trainer
from composer.core import Event
from composer.trainer import trainer as composer_trainer
from composer.utils import collect_env, ensure_tuple

from llmfoundry_lite import devices
from llmfoundry_lite.config.layout import DataRanks
from llmfoundry_lite.training.adapter import PipelinedLanguageModel
from llmfoundry_lite.training.agreement import Agreement, count_filled
from llmfoundry_lite.training.gradients import LOSS
from llmfoundry_lite.training.islands import Islands
from llmfoundry_lite.training.optimizers import clear_gradients

# What the Trainer is given is parallel already; without FSDP inside, as in a pipeline, Composer would wrap it in DDP.
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
        device_batch_size: int,
        islands: Islands | None = None,
        **options: Any,
    ):
        self.ranks = ranks
        self.islands = islands
        """None: this launch trains alone."""
        self.device_batch_size = device_batch_size
        self.agreement = agreement
        super().__init__(**options)
        devices.set_tf32(options["model"].precision.tf32)  # Composer has allowed it on every GPU by now

    def _iter_dataloader(self, trainer_mode: Any) -> Iterator[Any]:
        if trainer_mode.name != "TRAIN":
            yield from super()._iter_dataloader(trainer_mode)
            return
        assert self.state.dataloader is not None
        if self.islands is not None:
            self.agreement.begin_epoch(self.islands.batches(self.state))
        else:
            length = self.state.dataloader_len
            self.agreement.begin_epoch(islice(self.state.dataloader, None if length is None else int(length)))
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
        """The gradient is that of the mean over the global batch's tokens, or samples, whatever each rank has of them,
        and whichever way it is computed: microbatch by microbatch, or through the stages of a pipeline.

        None for Composer's loop, which would sum losses over ranks; `gradients` has done that.
        """
        state = self.state
        loss_sum = self._run_batch()
        while self.islands is not None and not self._settle(self.islands, loss_sum):
            loss_sum = self._run_batch()
        state.total_loss_dict = {LOSS: loss_sum}  # type: ignore[dict-item]
        self.engine.run_event(Event.AFTER_TRAIN_BATCH)
        for optimizer in ensure_tuple(state.optimizers):
            optimizer.step()
        self.first_train_batch_complete = True

    def _run_batch(self) -> torch.Tensor:
        """The weighted loss of this rank's rows, of which the gradient has been added up."""
        state, spec = self.state, self._train_data_spec
        assert spec is not None and state.device_train_microbatch_size is not None
        batch, agreed = state.batch, self.agreement.current
        total = agreed.num_losses if self.accumulate_train_batch_on_tokens else agreed.num_filled
        share = max(total, 1) / self.ranks.size  # an island's rows may all be padding
        if self.islands is not None:
            self.islands.begin()
        self.engine.run_event(Event.BEFORE_TRAIN_BATCH)
        for optimizer in ensure_tuple(state.optimizers):
            clear_gradients(optimizer)
        if isinstance(self._original_model, PipelinedLanguageModel):
            loss_sum = self._run_pipeline(self._original_model, batch, share)
        else:
            loss_sum = torch.zeros((), device=state.device._device)
            for microbatch in spec.split_batch(batch, state.device_train_microbatch_size):
                if self.accumulate_train_batch_on_tokens:
                    size = spec.get_num_tokens_in_batch(microbatch, token_type="loss_generating")
                else:
                    size = count_filled(microbatch)
                loss_sum += self._run_microbatch(microbatch, size / share)
        state.batch = batch
        return loss_sum

    def _settle(self, islands: Islands, loss_sum: torch.Tensor) -> bool:
        """Whether the batch counts, on all islands. If not, this rank has other rows of it from now on."""
        if islands.settle(self.state, loss_sum):
            self.logger.log_metrics(islands.metrics)
            return True
        self.agreement.begin_epoch(islands.batches(self.state))
        assert self._train_data_spec is not None
        self.state.batch = self._train_data_spec.batch_transforms(self.agreement.take())
        return False

    def _run_microbatch(self, microbatch: Any, weight: float) -> torch.Tensor:
        """Its weighted loss, of which the gradient has been added up."""
        state, spec = self.state, self._train_data_spec
        assert spec is not None
        state.batch = spec.microbatch_transforms(state.device.batch_to_device(microbatch))
        self.engine.run_event(Event.BEFORE_FORWARD)
        state.outputs = state.model(state.batch)
        self.engine.run_event(Event.AFTER_FORWARD)
        self.engine.run_event(Event.BEFORE_LOSS)
        state.loss = self._original_model.loss(state.outputs, state.batch)
        self.engine.run_event(Event.AFTER_LOSS)
        self.engine.run_event(Event.BEFORE_BACKWARD)
        assert isinstance(state.loss, torch.Tensor)
        weighted = state.loss * weight
        weighted.backward()
        self.engine.run_event(Event.AFTER_BACKWARD)
        return weighted.detach()

    def _run_pipeline(self, model: PipelinedLanguageModel, batch: Any, share: float) -> torch.Tensor:
        """The whole batch's weighted loss, where the last stage is. Events of a microbatch come once for all."""
        state, spec = self.state, self._train_data_spec
        assert spec is not None and isinstance(state.device_train_microbatch_size, int)
        state.batch = spec.microbatch_transforms(state.device.batch_to_device(batch))
        num_samples = state.device_train_microbatch_size
        for event in (Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.BEFORE_LOSS):
            self.engine.run_event(event)
        state.loss = model.train_on(state.batch, -(-self.device_batch_size // num_samples), num_samples, share)
        for event in (Event.AFTER_LOSS, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD):
            self.engine.run_event(event)
        return state.loss

    def _accumulate_time_across_ranks(
        self, num_samples: int | float, num_tokens: int, batch_time: datetime.timedelta
    ) -> tuple[int, int, datetime.timedelta]:
        """All ranks' samples and tokens were agreed on before the batch. Each rank keeps its own clock; rank 0's is
        recorded and saved."""
        return self.agreement.current.num_filled, self.agreement.current.num_tokens, batch_time
