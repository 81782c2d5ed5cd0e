"""From the backward pass to the optimizer: sums over devices, unscaling, clipping, and what to do with a non-finite
batch."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from composer.core import State
from composer.loggers import Logger
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from llmfoundry_lite.config.schema import GradientClippingConfig
from llmfoundry_lite.errors import NonFiniteError
from llmfoundry_lite.parallel.exact import ExactSums, is_first_copy, norm_of_sum, round_to_fp32, split_sum, sum_squares
from llmfoundry_lite.parallel.one_device import renew_copies
from llmfoundry_lite.training.adapter import LanguageModel
from llmfoundry_lite.training.optimizers import clear_gradients, local

LOSS = "loss/train/total"
CLIPPING_EPS = 1e-6
"""Added to the norm that a gradient is divided by, as torch.nn.utils.clip_grad_norm_ does."""


class Measured(NamedTuple):
    """Norm and loss of a global batch, the same on every rank."""

    norm: float
    """L2 norm of the whole gradient, before clipping."""
    loss: float
    """Mean of the data ranks' losses; with exact sums the sum of the microbatches' losses, in float64."""
    num_bad_losses: int
    """Number of microbatches whose loss is not finite."""
    is_out_of_range: bool = False
    """An element of the gradient is larger than exact sums can hold."""


@dataclass
class LossScaler:
    """Dynamic loss scaling for fp16: the scale halves on overflow, and doubles after 2,000 finite batches in a row.

    It multiplies the global batch's loss, so what overflows does not depend on the number of ranks. Starting value,
    factors and interval are those of torch's GradScaler, which keeps its state on the device. This state is two numbers
    on the host, the same on all ranks.
    """

    scale: float = 2.0**16
    num_sound_batches: int = 0
    """Finite batches since the scale has changed."""
    growth_interval = 2000
    """Finite batches in a row after which the scale doubles."""

    def update(self, is_finite: bool) -> bool:
        """Halve the scale after a gradient that is not finite, or double it after enough finite ones in a row.

        Call this once a batch, with the same `is_finite` on all ranks. Changes `scale` and `num_sound_batches`. Returns
        whether the batch has overflowed: its gradient is not finite, and a lower scale may prevent that next time. At a
        scale of 1 nothing is lower, so the cause must be another one.
        """
        if not is_finite:
            has_overflowed = self.scale > 1.0
            self.scale = max(self.scale / 2, 1.0)
            self.num_sound_batches = 0
            return has_overflowed

        self.num_sound_batches += 1
        if self.num_sound_batches == self.growth_interval:
            self.scale *= 2
            self.num_sound_batches = 0
        return False

    def state_dict(self) -> dict[str, float | int]:
        """Return the state for a checkpoint, as JSON."""
        return asdict(self)

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        """Restore what `state_dict` has returned."""
        self.scale = float(state["scale"])
        self.num_sound_batches = int(state["num_sound_batches"])


@dataclass(kw_only=True)
class GradientStep:
    """Everything between the backward pass and the optimizer.

    It decides when gradients are summed over devices, unscales and clips them, and checks that they are finite. A batch
    that is not finite on any rank is skipped, or ends the run, on all ranks.

    Call order in a batch: `begin`; `before_forward` and `after_loss` for each microbatch; `finish`.
    """

    model: LanguageModel
    clipping: GradientClippingConfig | None = None
    on_non_finite: str
    """"skip" or "stop"."""
    max_skipped_batches: int
    """Batches of this launch that may be skipped. One more ends the run."""
    scaler: LossScaler | None = None
    """Loss scaling, for fp16 alone."""
    reduces_every_microbatch: bool = True
    """Gradients are reduce-scattered after each microbatch, so that no rank has to hold whole ones."""
    exact_sums: ExactSums | None = None
    """Adds up gradients so that they do not depend on the number of ranks; None if that is not asked for."""
    full_weight: int = 1
    """With exact sums: number of tokens with a loss, or of samples, in a batch without padding. It is the
    `loss_divisor`."""
    weight: int = 1
    """With exact sums: that number for this batch, and for all launches' rows by the time its gradient is finished."""
    num_skipped_batches: int = 0
    """Batches of this launch that were skipped for another reason than an overflow of fp16."""
    measured_by_launches: Measured | None = None
    """This batch's norm and loss as several launches have measured them together; None if `finish` must measure."""

    def begin(self, num_microbatches: int, device: torch.device, *, num_ranks: int = 1) -> None:
        """Begin a batch of `num_microbatches`, whose losses are on `device`. Call it before the first forward pass.

        Resets the counts of bad losses and of microbatches left, sets the model's `loss_scale`, and renews the 16-bit
        copies of a model on one device. FSDP2 averages an unscaled gradient over its `num_ranks` ranks, but sums a
        scaled one, so the scale is divided by `num_ranks`.
        """
        self.bad_losses = torch.zeros((), device=device)
        self.model.loss_scale = 1.0
        if self.scaler:
            self.model.loss_scale = self.scaler.scale / num_ranks
        self.num_microbatches_left = num_microbatches
        self.measured_by_launches = None
        renew_copies(self.model.model)

    def begin_exact_sums(
        self, full_weight: int, weight: int, parameters: list[torch.nn.Parameter], num_microbatches: int
    ) -> None:
        """Begin to add up this batch's gradients of `parameters` exactly.

        Call it after `begin`, if `exact_sums` is set. `weight` is the number of tokens or samples that have a loss in
        this batch, and `full_weight` in a batch without padding. `num_microbatches` counts those of all ranks.
        """
        assert self.exact_sums is not None
        self.full_weight = full_weight
        self.weight = weight
        self.exact_sums.begin_batch(parameters, num_microbatches)

    def before_forward(self) -> None:
        """Tell FSDP2 whether to sum the gradients of the next microbatch over devices. Call it before each one.

        By default FSDP2 would communicate after every microbatch. Here gradients are all-reduced over replicas after
        the batch's last microbatch only. They are reduce-scattered over shards after the last one too, or after each
        one with `reduces_every_microbatch`, so that no rank has to hold whole gradients. Counts down
        `num_microbatches_left`.
        """
        self.num_microbatches_left -= 1
        model = self.model.model
        if not isinstance(model, FSDPModule):
            return
        is_last = self.num_microbatches_left == 0
        model.set_requires_gradient_sync(self.reduces_every_microbatch or is_last)
        # FSDP2 would add up the microbatches in the dtype of the reduction. In 16 bits that loses precision, so each
        # microbatch's gradient is reduced completely, and then added in fp32.
        reduces_in_16_bits = self.exact_sums is None and self.model.precision.reduction != torch.float32
        model.set_requires_all_reduce(is_last or reduces_in_16_bits)

    def after_loss(self, loss: torch.Tensor) -> None:
        """Count the losses of a microbatch that are not finite, without waiting for the device."""
        self.bad_losses += (~torch.isfinite(loss.detach())).float().sum()

    def finish(self, state: State, logger: Logger, loss: torch.Tensor, digest: str) -> float:
        """Unscale and clip the gradient, or drop it if it is not finite, and log loss, norm and learning rate.

        Collective: all ranks call this after the last backward pass of a batch, and before the optimizer's step. `loss`
        is this rank's weighted loss, a scalar on the device. `digest` identifies the batch's data in messages.

        Returns the global batch's loss. Changes the loss scale and `num_skipped_batches`. Raises NonFiniteError on all
        ranks if the batch is not finite and must not be skipped.
        """
        # Loss and norm over all ranks. If several launches train together, they have measured them already.
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        measured = self.measured_by_launches
        if measured is None:
            measured = self.measure(parameters, loss)
        norm, mean_loss, num_bad_losses, is_out_of_range = measured
        if self.exact_sums:
            mean_loss = round_to_fp32(mean_loss * self.scale_of_sums)
        metrics = {LOSS: mean_loss, "grad_norm": norm, "lr": state.optimizers[0].param_groups[0]["lr"]}
        is_finite = math.isfinite(norm) and num_bad_losses == 0 and not is_out_of_range
        if is_finite and self.clipping is not None:
            clip([local(parameter.grad) for parameter in parameters], norm, self.clipping)

        # Adapt fp16's loss scale, and count a batch that is dropped for another reason than an overflow.
        has_overflowed = False
        if self.scaler:
            metrics["loss_scale"] = self.scaler.scale
            # Only the gradient is scaled, so a lower scale does not help against a loss that is not finite.
            has_overflowed = num_bad_losses == 0 and self.scaler.update(is_finite)
        if not is_finite:
            clear_gradients(state.optimizers[0])  # the optimizer's step does nothing without gradients
            if not has_overflowed:
                self.num_skipped_batches += 1
            metrics["skipped_batches"] = self.num_skipped_batches
        batch = int(state.timestamp.batch) + 1
        logger.log_metrics(metrics, step=batch)

        # The metrics are logged first, so that they are in the record also if the run ends here.
        if not is_finite:
            name = f"batch {batch} (data/digest {digest})"
            self._skip_or_stop(name, self._describe_fault(measured), has_overflowed)
        return mean_loss

    @property
    def scale_of_sums(self) -> float:
        """With exact sums: factor that turns a mean over a batch without padding into one over this batch."""
        return self.full_weight / max(self.weight, 1)

    def measure(self, parameters: list[torch.nn.Parameter], loss: torch.Tensor) -> Measured:
        """Bring the gradient to its final values, except for clipping, and measure norm and loss over all ranks.

        Collective. `parameters` are those of this rank that have a gradient, and `loss` is this rank's weighted loss, a
        scalar on the device. Changes gradients in place: with exact sums it replaces them by the finished sums, and
        with fp16 it divides them by the loss scale.
        """
        model = self.model
        if self.exact_sums:
            self.exact_sums.finish_batch(parameters, self.scale_of_sums)
        if self.scaler:
            torch._foreach_mul_([local(parameter.grad) for parameter in parameters], 1.0 / self.scaler.scale)
        if not self.exact_sums:
            return measure(parameters, loss, self.bad_losses, model.num_stages, model.shared_parameters)

        # Two pipeline stages have the tied embeddings. Their squares are counted once, by the first stage.
        counted_elsewhere: set[int] = set()
        if not model.has_first_stage:
            counted_elsewhere = {id(parameter) for parameter in model.shared_parameters}
        counted = [parameter for parameter in parameters if id(parameter) not in counted_elsewhere]
        return measure_exactly(counted, loss, self.bad_losses, self.exact_sums.count_out_of_range())

    def _describe_fault(self, measured: Measured) -> str:
        """Return what is wrong with a batch that is not finite, for a message."""
        if measured.num_bad_losses:
            return "the loss is not finite"
        if self.exact_sums and measured.is_out_of_range and math.isfinite(measured.norm):
            limit = self.exact_sums.element_limit
            return f"a microbatch's gradient has an element above {limit:g}, which exact_sums cannot add"
        return f"the gradient's norm is {measured.norm}"

    def _skip_or_stop(self, batch: str, fault: str, has_overflowed: bool) -> None:
        """Print on rank 0 that a batch was skipped, or raise NonFiniteError on all ranks.

        `batch` names the batch and its data, and `fault` says what is wrong with it. The run ends if `on_non_finite` is
        "stop", or if more than `max_skipped_batches` were skipped. An overflow of fp16 (`has_overflowed`) never ends
        the run, because it is how dynamic loss scaling finds its scale.
        """
        if has_overflowed:
            assert self.scaler is not None
            fault = f"the fp16 gradient overflowed; the loss scale is now {self.scaler.scale:g}"
        elif self.on_non_finite == "stop":
            raise NonFiniteError(
                f"{batch}: {fault}; the weights were not touched. "
                "Lower the learning rate, look at that data, or set on_non_finite: skip"
            )
        elif self.num_skipped_batches > self.max_skipped_batches:
            raise NonFiniteError(
                f"{batch}: {fault}, and {self.num_skipped_batches} batches of this launch were skipped for that; "
                "max_skipped_batches allows no more"
            )

        # The gradients have been dropped by now, so that the optimizer changes nothing.
        if dist.get_rank() == 0:
            print(f"{batch}: {fault}; skipped", flush=True)


def measure(
    parameters: list[torch.nn.Parameter],
    loss: torch.Tensor,
    bad_losses: torch.Tensor,
    num_stages: int = 1,
    shared: Sequence[torch.nn.Parameter] = (),
) -> Measured:
    """Return the whole gradient's norm, the loss and the number of bad losses, over all ranks.

    Collective. This is where the host waits for the device, once a batch: all three numbers go through one all-reduce.

    `parameters` are those of this rank that have a gradient. `loss` and `bad_losses` are this rank's, scalars on the
    device. A pipeline has `num_stages` stages, each with its own parameters, except for the `shared` ones (tied
    embeddings), which two stages have. Only one stage computes losses.

    Several ranks may hold the same part of a gradient. Each adds its squares divided by the number of such copies, so
    that every element counts once. For example, on 8 ranks a replicated gradient has 8 copies, one that is sharded over
    all ranks has 1, and one that is sharded over 4 ranks and replicated over 2 has 2.
    """
    # Group the gradients by the number of ranks that hold the same part, to add up their squares with few kernels.
    stage_size = dist.get_world_size() // num_stages
    shared_ids = {id(parameter) for parameter in shared}
    gradients_by_copies: dict[int, list[torch.Tensor]] = {}
    for parameter in parameters:
        num_copies = stage_size
        if id(parameter) in shared_ids:
            num_copies *= 2
        if isinstance(parameter.grad, DTensor):
            mesh = parameter.grad.device_mesh
            for dim, placement in enumerate(parameter.grad.placements):
                if not placement.is_replicate():
                    num_copies //= mesh.size(dim)
        gradient = local(parameter.grad)
        if gradient.numel():
            gradients_by_copies.setdefault(num_copies, []).append(gradient)

    total = torch.zeros((), device=bad_losses.device)
    for num_copies, gradients in gradients_by_copies.items():
        norms = torch.stack(torch._foreach_norm(gradients))
        squares = norms.float().square().sum().to(total.device)  # offloaded gradients are on the host
        total += squares / num_copies

    # One exchange for all three numbers. `tolist` waits for the device.
    sums = torch.stack([total, loss.float(), bad_losses])
    dist.all_reduce(sums)
    sum_of_squares, loss_sum, num_bad_losses = sums.tolist()
    norm = math.sqrt(sum_of_squares) if sum_of_squares >= 0 else sum_of_squares  # NaN stays NaN
    return Measured(norm, loss_sum / stage_size, int(num_bad_losses))


def measure_exactly(
    parameters: list[torch.nn.Parameter], loss: torch.Tensor, bad_losses: torch.Tensor, num_too_large: torch.Tensor
) -> Measured:
    """Return norm, loss and number of bad losses over all ranks, whose bits do not depend on the order of summation.

    Collective, with two exchanges. It is `measure` for runs with exact sums: their results must be the same on any
    number of ranks, so the squares are added as integers.

    `parameters` are those that this rank counts. `loss`, `bad_losses` and `num_too_large`, the number of elements that
    exact sums cannot hold, are this rank's scalars on the device. The norm is NaN if a gradient is not finite.
    """
    # Of several ranks that hold the same part of a gradient, only the first one counts it.
    device = bad_losses.device
    gradients: list[torch.Tensor] = []
    for parameter in parameters:
        gradient = local(parameter.grad)
        if is_first_copy(parameter.grad) and gradient.numel():
            gradients.append(gradient)

    # The largest element on any rank decides the unit in which squares become integers: all ranks need the same unit.
    largest = torch.zeros((), device=device)
    if gradients:
        largest_of_each = torch.stack([norm.to(device) for norm in torch._foreach_norm(gradients, math.inf)])
        largest = torch.maximum(largest, largest_of_each.amax())
    is_finite = torch.isfinite(largest)
    largest = torch.where(is_finite, largest, 1.0)  # any finite number: the norm is reported as NaN then
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    exponent = torch.frexp(largest).exponent

    # Each sum of squares is split into limbs, float64 numbers that are small enough for additions without rounding.
    limbs = split_sum(sum_squares(gradients, exponent))
    counts = torch.stack([loss.double(), bad_losses.double(), num_too_large.to(device), (~is_finite).double()])
    sums = torch.cat([limbs, counts])
    dist.all_reduce(sums)
    *limb_sums, loss_sum, num_bad_losses, num_elements_too_large, num_ranks_not_finite = sums.tolist()
    norm = math.nan if num_ranks_not_finite else norm_of_sum(limb_sums, int(exponent))
    return Measured(norm, loss_sum, int(num_bad_losses), num_elements_too_large > 0)


def clip(gradients: list[torch.Tensor], norm: float, clipping: GradientClippingConfig) -> None:
    """Limit this rank's `gradients` in place.

    By norm, the whole gradient is scaled so that its norm is at most the threshold; `norm` is that of the gradient on
    all ranks. By value, each element is limited to +-threshold.
    """
    threshold = clipping.clipping_threshold
    if clipping.clipping_type == "value":
        torch._foreach_clamp_min_(gradients, -threshold)
        torch._foreach_clamp_max_(gradients, threshold)
    elif norm > threshold:
        torch._foreach_mul_(gradients, threshold / (norm + CLIPPING_EPS))
