"""Composer's Trainer, with a training step that waits for the device once and for the other ranks twice.

The loop, the events and the evaluation are Composer's. Composer's own step synchronises host and device, or all ranks,
a dozen times, and twice more in each microbatch. This one does so in `gradient_step.measure` and, between two batches,
in `Agreement.end_batch`. Exact sums need one exchange more.

The loss of a global batch is a mean over its W tokens that have a loss, or over its W samples that have one. D data
ranks divide the samples. C ranks divide the tokens of each sample; each multiplies its part of the loss by C, because
FSDP averages over all D C ranks.

    case         a rank divides its nats by     over ranks       loss scale (fp16)
    tokens       W / D                          mean             none
    samples      W / D and a full row's tokens  mean             none
    fp16         the same                       sum              `loss` multiplies gradients by scale / (D C);
                                                                 `measure` divides them by scale
    exact sums   all of a full batch, not W / D sum, in float64  refused, as C > 1 is
    pipeline     the same, in `train_on`        the same         `train_on` multiplies the weights of losses

`loss_divisor` is W / D. With exact sums it is the W of a batch without padding, and `ExactSums.finish_batch` corrects
that to this batch's W. For a mean over samples, `row_weights` let a short row count as much as a full one.
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
from llmfoundry_lite.config.batch_schedule import PerBatch
from llmfoundry_lite.config.layout import DataRanks
from llmfoundry_lite.data.batches import cut_rows, is_epoch_over, join_batches
from llmfoundry_lite.data.dataset import TextDataset
from llmfoundry_lite.data.loader import format_digest
from llmfoundry_lite.parallel.exact import round_loss
from llmfoundry_lite.ranks.exchange import all_reduce_max, raise_on_all_ranks
from llmfoundry_lite.training.agreement import Agreement, count_rows
from llmfoundry_lite.training.gradient_step import LOSS, GradientStep
from llmfoundry_lite.training.launch_role import LaunchRole
from llmfoundry_lite.training.optimizers import clear_gradients, whole_parameters

# The model is parallel already. Without FSDP inside, as in a pipeline, Composer would wrap it in DDP.
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
        role: LaunchRole,
        batch_sizes: PerBatch,
        seq_lens: PerBatch,
        **options: Any,
    ):
        """Build the trainer. Meanwhile Composer fires AFTER_LOAD, at which `Checkpointing.after_load` restores the run.

        `ranks` tells which part of each global batch this rank reads, `batch_sizes` how many samples a batch has on all
        ranks, and `seq_lens` how many tokens their rows have. `options` are those of Composer's Trainer.
        """
        self.ranks = ranks
        self.agreement = agreement
        self.gradient_step = gradient_step
        self.role = role
        self.batch_sizes = batch_sizes
        self.seq_lens = seq_lens
        self.last_stepped_batch = 0
        """The last batch whose optimizer step has begun. Until Composer counts that batch, weights and clock do not
        belong together, so the state must not be saved."""
        super().__init__(**options)
        # Composer warns so when a run carries on from the end of an epoch. Data without batches are an error before.
        warnings.filterwarnings("ignore", message="No batches were trained", category=UserWarning)
        # Composer has allowed TF32 on every GPU by now, whatever the precision of the run is.
        devices.set_tf32(options["model"].precision.tf32)

    def close(self) -> None:
        """Close the callbacks and loggers now.

        Composer would do so again when Python exits, where no thread can start.
        """
        super().close()
        atexit.unregister(self.engine._close)

    def _iter_dataloader(self, trainer_mode: Any) -> Iterator[Any]:
        """Yield this rank's part of each batch of an epoch, or of a validation set if `trainer_mode` is not TRAIN.

        Overrides Composer's method, which its loop calls once an epoch and once a validation set. All ranks end after
        the same batch, and fail together. Collective.
        """
        if trainer_mode.name != "TRAIN":
            yield from self._read_validation()
            return

        self._begin_epoch()
        try:
            while True:
                self.engine.run_event(Event.BEFORE_DATALOADER)
                batch = self.agreement.next_batch()
                if batch is None:  # the epoch has ended on all ranks
                    self.engine.run_marker_only_event(Event.AFTER_DATALOADER)
                    return
                yield batch
        finally:
            # The loop leaves this generator early when training stops in the middle of an epoch.
            self.agreement.end_epoch()

    def _read_validation(self) -> Iterator[Any]:
        """Yield this rank's part of each batch of a validation set, until one rank has no more. Collective.

        Before each batch, the ranks exchange whether they have one. If a loader raises an error on one rank, it is
        raised on all ranks, so that they can save what they have trained. Composer would let the others wait.
        """
        batches = self._loader_batches()
        while True:
            batch = None
            error = None
            try:
                batch = next(batches, None)
            except Exception as caught:
                error = caught
            is_finished = batch is None and error is None

            # An error counts more than the end of the data. Ranks that have a batch drop it in either case.
            any_error, any_finished = all_reduce_max([int(error is not None), int(is_finished)])
            if any_error:
                raise_on_all_ranks(error)
            if any_finished:
                return
            yield batch

    def _begin_epoch(self) -> None:
        """Let `agreement` read the epoch's remaining batches, of which it reads the first one now. Collective.

        They contain this launch's share of the rows if it trains the run together with others; otherwise all rows that
        the data loader yields. A run that several launches train together has batches of one size.
        """
        batches = self.role.batches()
        dataset = getattr(self.state.dataloader, "dataset", None)
        if isinstance(dataset, TextDataset) and dataset.joins_batches:
            batches = self._joined_batches(dataset)
        elif batches is None:
            batches = self._loader_batches()
        if self.agreement.sample_length is not None:
            batches = cut_rows(batches, self.seq_lens, int(self.state.timestamp.batch))
        self.agreement.begin_epoch(batches)

    def _joined_batches(self, dataset: TextDataset) -> Iterator[Any]:
        """Return an iterator over the epoch's remaining batches, whose sizes `batch_size_schedule` decides.

        It is empty if the run has been restored from a save after the last batch of an epoch.
        """
        batch = int(self.state.timestamp.batch)
        has_begun = int(self.state.timestamp.batch_in_epoch) > 0
        if has_begun and is_epoch_over(dataset, batch):
            return iter(())
        assert self.state.dataloader is not None
        return join_batches(self.state.dataloader, dataset, batch)

    def _loader_batches(self) -> Iterator[Any]:
        """Return an iterator over Composer's current data loader, which is that of training or of a validation set.

        It ends after `dataloader_len` batches if Composer has been given a limit, such as `eval_subset_num_batches`.
        """
        assert self.state.dataloader is not None
        num_batches = self.state.dataloader_len
        if num_batches is None:
            return islice(self.state.dataloader, None)
        return islice(self.state.dataloader, int(num_batches))

    def _train_batch(self, use_grad_scaling: bool) -> None:  # type: ignore[override]
        """Train on one batch: add the microbatches' gradients, sum them over ranks, clip, and step the optimizer.

        Overrides Composer's training step. Collective. This rank's rows are in `state.batch`, on the host. The loss is
        the mean over the global batch's tokens or samples, however ranks, microbatches and pipeline stages divide them.

        Sets `state.total_loss_dict` and `last_stepped_batch`. Returns None, so that Composer's loop does not sum the
        loss over ranks again: `GradientStep.finish` has done that. `use_grad_scaling` is Composer's, and not used.
        """
        state, step = self.state, self.gradient_step
        is_final = False
        while not is_final:
            # Add up the gradients of this rank's microbatches. Composer's callbacks see each one in `state.batch`.
            rows = state.batch
            loss_sum = torch.zeros((), device=state.device._device)
            microbatches, loss_divisor = self._begin_batch(rows)
            for microbatch in microbatches:
                state.batch = state.device.batch_to_device(microbatch)
                step.before_forward()
                loss_sum = loss_sum + self._add_gradient(microbatch, loss_divisor)
            state.batch = rows

            # Sum the gradient over other launches of this run, if there are any.
            is_final = self.role.exchange_gradient(loss_sum)
            if not is_final:  # another launch has left, so this one computes the batch again with other rows
                self._begin_epoch()
                state.batch = self.agreement.next_batch()

        # From here until Composer counts the batch, weights and clock do not belong together.
        self.last_stepped_batch = int(state.timestamp.batch) + 1
        digest = format_digest(self.agreement.current.digest)
        metrics: dict[str, Any] = {**self.role.metrics(), "data/digest": digest}
        if self.batch_sizes.largest > self.batch_sizes.smallest:
            metrics["data/batch_size"] = self.batch_sizes.of(int(state.timestamp.batch))
        if self.agreement.sample_length is not None:
            metrics["data/seq_len"] = self.seq_lens.of(int(state.timestamp.batch))
        self.logger.log_metrics(metrics, step=self.last_stepped_batch)

        # Measure, clip or drop the gradient. The host waits for the device here.
        state.total_loss_dict = {LOSS: step.finish(state, self.logger, loss_sum, digest)}
        self.engine.run_event(Event.AFTER_TRAIN_BATCH)
        state.optimizers[0].step()
        self.first_train_batch_complete = True

    def _begin_batch(self, rows: Any) -> tuple[list[Any], float]:
        """Divide this rank's `rows` of a batch into microbatches, clear the gradients, and prepare the gradient step.

        Returns the microbatches and the `loss_divisor`, the number that this rank divides its nats by; see the table
        at the top of this file. A pipeline divides its rows itself, so it gets one microbatch. Microbatches stay on the
        host, where counting their tokens does not wait for the device.

        For example, if 4 data ranks share a batch that has 8,000 tokens with a loss, `loss_divisor` is 2,000, because
        FSDP then averages over the 4 ranks.
        """
        state, step, model = self.state, self.gradient_step, cast(Any, self._original_model)
        microbatch_size, device = state.device_train_microbatch_size, state.device._device
        assert self._train_data_spec is not None and isinstance(microbatch_size, int) and device is not None
        by_tokens = self.accumulate_train_batch_on_tokens
        weight = self.agreement.current.weight(by_tokens=by_tokens)  # tokens or samples with a loss, of all ranks
        loss_divisor = max(weight, 1) / self.ranks.size  # of several launches, one may have rows of padding alone

        # A microbatch keeps its number of tokens where samples are cut into shorter rows.
        row_length = rows["input_ids"].size(1)
        rows_of_sample = (self.agreement.sample_length or row_length) // row_length
        microbatch_size *= rows_of_sample

        self.role.begin_batch()
        microbatches = [rows]
        if model.num_stages == 1:
            microbatches = list(self._train_data_spec.split_batch(rows, microbatch_size))
        step.begin(len(microbatches), device, num_ranks=self.ranks.size * model.context_size)
        self.engine.run_event(Event.BEFORE_TRAIN_BATCH)
        clear_gradients(state.optimizers[0])

        if step.exact_sums:
            # The divisor must not depend on the padding, which is in the rows of other launches too.
            # `ExactSums.finish_batch` multiplies the sums by full_weight / weight.
            num_rows = self.batch_sizes.of(int(state.timestamp.batch)) * rows_of_sample
            full_weight = num_rows
            if by_tokens:
                tokens_of_full_row = max(row_length - 1, 1)  # the last token of a row has no label
                full_weight = num_rows * tokens_of_full_row
            parameters = whole_parameters(state.optimizers[0])
            step.begin_exact_sums(full_weight, weight, parameters, num_rows // microbatch_size)
            loss_divisor = full_weight
        return microbatches, loss_divisor

    def _add_gradient(self, microbatch: Any, loss_divisor: float) -> torch.Tensor:
        """Run the forward and backward pass of a microbatch, which adds its gradient to `parameter.grad`.

        `microbatch` is on the host, and `state.batch` is the same on the device. This rank's nats are divided by
        `loss_divisor`; see the table at the top of this file. Fires Composer's events where Composer's own step does,
        and sets `state.outputs` and `state.loss`, because callbacks may read them.

        Returns a scalar, this rank's weighted loss. Its mean over ranks, or its sum with exact sums, is the global
        batch's loss.
        """
        state, step, run_event = self.state, self.gradient_step, self.engine.run_event
        model: Any = self._original_model
        if model.num_stages > 1:
            return self._add_pipeline_gradient(loss_divisor)

        # Forward pass. `state.model` may be a wrapper of `model`, so it is the one that is called.
        run_event(Event.BEFORE_FORWARD)
        outputs: Any = state.model(state.batch)
        state.outputs = outputs
        run_event(Event.AFTER_FORWARD)

        # The mean over the microbatch, which callbacks see. A loss that is not finite is counted on the device.
        run_event(Event.BEFORE_LOSS)
        mean_loss = model.loss(outputs, state.batch)
        state.loss = mean_loss
        step.after_loss(mean_loss)
        run_event(Event.AFTER_LOSS)

        # Weight the microbatch by its part of the global batch, and add its gradient.
        run_event(Event.BEFORE_BACKWARD)
        if step.exact_sums:  # the product that a pipeline computes, so that both give the same bits
            loss = outputs["loss_sum"] * model.weight_of_loss(microbatch["input_ids"], loss_divisor)
        elif self.accumulate_train_batch_on_tokens:
            spec = cast(DataSpec, self._train_data_spec)
            num_tokens = spec.get_num_tokens_in_batch(microbatch, "loss_generating")
            loss = mean_loss * (num_tokens / loss_divisor)
        else:
            num_samples = count_rows(microbatch)
            loss = mean_loss * (num_samples / loss_divisor)
        loss.backward()
        run_event(Event.AFTER_BACKWARD)
        return round_loss(loss.detach()) if step.exact_sums else loss.detach()

    def _add_pipeline_gradient(self, loss_divisor: float) -> torch.Tensor:
        """Compute all microbatches of `state.batch` in one pass through the pipeline's stages, and add their gradients.

        `loss_divisor` is the number that nats are divided by; see the table at the top of this file. Sets
        `state.loss`. Returns a scalar, the sum of the microbatches' weighted losses on this rank. It is 0 on ranks
        whose stage does not compute the loss.
        """
        state, step, run_event = self.state, self.gradient_step, self.engine.run_event
        model: Any = self._original_model

        # Forward and backward passes alternate within one call. So Composer's events fire in their order, but before
        # and after it, and the time between two of them does not tell how long a pass takes.
        for event in (Event.BEFORE_FORWARD, Event.AFTER_FORWARD, Event.BEFORE_LOSS):
            run_event(event)
        losses_m = model.train_on(state.batch, state.device_train_microbatch_size, loss_divisor)  # one per microbatch
        loss_sum = losses_m.sum()
        state.loss = loss_sum
        step.after_loss(loss_sum)
        for event in (Event.AFTER_LOSS, Event.BEFORE_BACKWARD, Event.AFTER_BACKWARD):
            run_event(event)

        # Exact sums add losses that are rounded one by one, so that their order does not matter.
        losses_m = losses_m.detach()
        if step.exact_sums:
            losses_m = round_loss(losses_m)
        return losses_m.sum()

    def _accumulate_time_across_ranks(
        self, num_samples: int | float, num_tokens: int, batch_time: datetime.timedelta
    ) -> tuple[int, int, datetime.timedelta]:
        """Return the global batch's samples and tokens, and this rank's time, for Composer's clock.

        Composer passes this rank's samples and tokens, and would sum them over ranks. The ranks have agreed on them
        before the batch. Rank 0's time is the one that is recorded and saved.
        """
        return self.agreement.current.num_samples, self.agreement.current.num_tokens, batch_time
