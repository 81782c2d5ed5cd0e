"""The way from the backward pass to the optimizer: sums over devices, unscaling, clipping, the guard."""

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


class Measured(NamedTuple):
    """Norm and loss of a global batch, the same on every rank."""

    norm: float
    """L2 norm of the whole gradient, before clipping."""
    loss: float
    """Mean of the data ranks' losses; with exact sums the sum of the microbatches', in float64."""
    num_bad_losses: int
    """Microbatches whose loss is not finite."""
    is_out_of_range: bool = False
    """An element of the gradient is larger than exact sums can hold."""


@dataclass
class LossScaler:
    """Dynamic loss scaling for fp16: halves on overflow, doubles after 2,000 finite batches in a row.

    It multiplies the global batch's loss: what overflows does not depend on the number of ranks. Starting value,
    factors and interval are those of torch's GradScaler, which keeps its state on the device. This state is two numbers
    on the host, the same on all ranks.
    """

    scale: float = 2.0**16
    num_sound_batches: int = 0
    growth_interval = 2000

    def update(self, finite: bool) -> bool:
        """Adapt to one batch. Returns True if its gradient is not finite and a lower scale may cure that."""
        if not finite:
            curable = self.scale > 1.0
            self.scale, self.num_sound_batches = max(self.scale / 2, 1.0), 0
            return curable
        self.num_sound_batches += 1
        if self.num_sound_batches == self.growth_interval:
            self.scale, self.num_sound_batches = self.scale * 2, 0
        return False

    def state_dict(self) -> dict[str, float | int]:
        return asdict(self)

    def load_state_dict(self, state: dict[str, float | int]) -> None:
        self.scale, self.num_sound_batches = float(state["scale"]), int(state["num_sound_batches"])


@dataclass(kw_only=True)
class GradientStep:
    """Everything between the backward pass and the optimizer: when gradients are summed over devices, unscaling,
    clipping, and the guard. A batch that is not finite on any rank is skipped, or ends the run, on all ranks.

    Order: `begin`; `before_forward` and `after_loss` for each microbatch; `finish`.
    """

    model: LanguageModel
    clipping: GradientClippingConfig | None = None
    on_non_finite: str
    max_skipped_batches: int
    scaler: LossScaler | None = None
    reduces_every_microbatch: bool = True
    sums: ExactSums | None = None
    """Set where the gradient does not depend on the number of ranks."""
    full_weight: int = 1
    """With exact sums: tokens with a loss, or samples, of a batch without padding; the `loss_divisor`."""
    weight: int = 1
    """The same count for this batch; over all launches when its gradient is finished."""
    num_skipped_batches: int = 0
    agreed: Measured | None = None
    """The batch's, measured by `partners` over all launches; None: `finish` measures."""

    def begin(self, num_microbatches: int, device: torch.device, *, num_ranks: int = 1) -> None:
        """Begin a batch. FSDP2 averages the unscaled loss over `num_ranks` and sums the scaled one, so the scale is
        divided by `num_ranks`. trainer.py has a table."""
        self.bad_losses = torch.zeros((), device=device)
        self.model.loss_scale = self.scaler.scale / num_ranks if self.scaler else 1.0
        self.num_microbatches_left = num_microbatches
        self.agreed = None
        renew_copies(self.model.model)

    def before_forward(self) -> None:
        """Keep gradients on their device until the batch's last microbatch; FSDP2 would reduce them after each.

        With `reduces_every_microbatch`, gradients are reduce-scattered after each, and all-reduced over replicas after
        the last. Reduction in 16 bits does both each time, or FSDP2 would add up microbatches in 16 bits.
        """
        self.num_microbatches_left -= 1
        if isinstance(self.model.model, FSDPModule):
            is_last = self.num_microbatches_left == 0
            self.model.model.set_requires_gradient_sync(self.reduces_every_microbatch or is_last)
            is_low = self.sums is None and self.model.precision.reduction != torch.float32
            self.model.model.set_requires_all_reduce(is_last or is_low)

    def after_loss(self, loss: torch.Tensor) -> None:
        self.bad_losses += (~torch.isfinite(loss.detach())).float().sum()

    def finish(self, state: State, logger: Logger, loss: torch.Tensor, digest: str) -> float:
        """Unscale and clip the gradient, or drop it if it is not finite. Returns the global batch's loss. `loss` is
        this rank's; messages name the batch's `digest`. Raises NonFiniteError."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        norm, mean_loss, num_bad_losses, is_out_of_range = self.agreed or self.measure(parameters, loss)
        if self.sums:
            mean_loss = round_to_fp32(mean_loss * self.scale_of_sums)
        metrics = {LOSS: mean_loss, "grad_norm": norm, "lr": state.optimizers[0].param_groups[0]["lr"]}
        finite = math.isfinite(norm) and num_bad_losses == 0 and not is_out_of_range
        if finite and self.clipping is not None:
            clip([local(p.grad) for p in parameters], norm, self.clipping)
        if self.scaler:
            metrics["loss_scale"] = self.scaler.scale
        # Only the gradient is scaled: a lower scale does not cure a loss that is not finite.
        overflowed = self.scaler is not None and num_bad_losses == 0 and self.scaler.update(finite)
        if not finite:
            clear_gradients(state.optimizers[0])  # without gradients the optimizer's step does nothing
            self.num_skipped_batches += not overflowed
            metrics["skipped_batches"] = self.num_skipped_batches
        logger.log_metrics(metrics)
        if not finite:
            where = f"batch {int(state.timestamp.batch) + 1} (data/digest {digest})"
            what = "the loss is not finite" if num_bad_losses else f"the gradient's norm is {norm}"
            if self.sums and is_out_of_range and math.isfinite(norm) and not num_bad_losses:
                limit = self.sums.element_limit
                what = f"a microbatch's gradient has an element above {limit:g}, which exact_sums cannot add"
            self._skip_or_stop(where, what, overflowed)
        return mean_loss

    @property
    def scale_of_sums(self) -> float:
        """Factor of the sums: 1 for a batch without padding."""
        return self.full_weight / max(self.weight, 1)

    def measure(self, parameters: list[torch.nn.Parameter], loss: torch.Tensor) -> Measured:
        """Unscale the gradient, or round its sums, and measure it. Every rank must call it together."""
        model = self.model
        if self.sums:
            self.sums.finish_batch(parameters, self.scale_of_sums)
        if self.scaler:
            torch._foreach_mul_([local(p.grad) for p in parameters], 1.0 / self.scaler.scale)
        if self.sums:
            shared = () if model.has_first_stage else [id(p) for p in model.shared_parameters]
            counted = [p for p in parameters if id(p) not in shared]
            return measure_exactly(counted, loss, self.bad_losses, self.sums.count_out_of_range())
        return measure(parameters, loss, self.bad_losses, model.num_stages, model.shared_parameters)

    def _skip_or_stop(self, where: str, what: str, overflowed: bool) -> None:
        if overflowed:
            assert self.scaler is not None
            what = f"the fp16 gradient overflowed; the loss scale is now {self.scaler.scale:g}"
        elif self.on_non_finite == "stop":
            raise NonFiniteError(
                f"{where}: {what}; the weights were not touched. "
                "Lower the learning rate, look at that data, or set on_non_finite: skip"
            )
        elif self.num_skipped_batches > self.max_skipped_batches:
            raise NonFiniteError(
                f"{where}: {what}, and {self.num_skipped_batches} batches of this launch were skipped for that; "
                "max_skipped_batches allows no more"
            )
        if dist.get_rank() == 0:
            print(f"{where}: {what}; skipped", flush=True)


def measure(
    parameters: list[torch.nn.Parameter],
    loss: torch.Tensor,
    bad_losses: torch.Tensor,
    num_stages: int = 1,
    shared: Sequence[torch.nn.Parameter] = (),
) -> Measured:
    """All-reduce norm, loss and bad losses of the batch: the one time that the host waits for the device.

    Each rank adds up the squares of its shards; a shard that r ranks hold counts 1/r on each. Each parameter is on all
    ranks of a stage, replicated or sharded. Of `num_stages` pipeline stages one has the losses, and two have the
    `shared` parameters. The ranks of a tensor group each count a bad loss.
    """
    total, by_replicas = torch.zeros((), device=bad_losses.device), dict[int, list[torch.Tensor]]()
    stage_size, shared_ids = dist.get_world_size() // num_stages, {id(parameter) for parameter in shared}
    for parameter in parameters:
        replicas = stage_size * (2 if id(parameter) in shared_ids else 1)
        if isinstance(parameter.grad, DTensor):
            mesh = parameter.grad.device_mesh
            shards = [mesh.size(i) for i, kind in enumerate(parameter.grad.placements) if not kind.is_replicate()]
            replicas //= math.prod(shards)
        gradient = local(parameter.grad)
        if gradient.numel():
            by_replicas.setdefault(replicas, []).append(gradient)
    for replicas, gradients in by_replicas.items():
        norms = torch.stack(torch._foreach_norm(gradients))
        total += norms.float().square().sum().to(total.device) / replicas  # offloaded gradients are on the host
    sums = torch.stack([total, loss.float(), bad_losses])
    dist.all_reduce(sums)
    squares, loss_sum, num_bad_losses = sums.tolist()
    norm = math.sqrt(squares) if squares >= 0 else squares
    return Measured(norm, loss_sum / stage_size, int(num_bad_losses))


def measure_exactly(
    parameters: list[torch.nn.Parameter], loss: torch.Tensor, bad_losses: torch.Tensor, num_too_large: torch.Tensor
) -> Measured:
    """Measure like `measure`, but independent of any order of summation. `parameters` are those that this rank counts.
    The unit of the squares follows from the largest element on any rank, which takes a collective of its own."""
    device = bad_losses.device
    gradients = [g for p in parameters if is_first_copy(p.grad) and (g := local(p.grad)).numel()]
    norms = torch._foreach_norm(gradients, math.inf) if gradients else ()
    largest = torch.stack([torch.zeros((), device=device), *(n.to(device) for n in norms)]).amax()
    is_finite = torch.isfinite(largest)
    largest = torch.where(is_finite, largest, 1.0)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    exponent = torch.frexp(largest).exponent
    squares = split_sum(sum_squares(gradients, exponent))
    counts = torch.stack([loss.double(), bad_losses.double(), num_too_large.to(device), (~is_finite).double()])
    found = torch.cat([squares, counts])
    dist.all_reduce(found)
    *summands, loss_sum, num_bad_losses, num_too_large_found, num_infinite = found.tolist()
    norm = math.nan if num_infinite else norm_of_sum(summands, int(exponent))
    return Measured(norm, loss_sum, int(num_bad_losses), num_too_large_found > 0)


def clip(gradients: list[torch.Tensor], norm: float, clipping: GradientClippingConfig) -> None:
    """Scale the whole gradient down to the threshold (by norm), or clamp each element (by value)."""
    threshold = clipping.clipping_threshold
    if clipping.clipping_type == "value":
        torch._foreach_clamp_min_(gradients, -threshold)
        torch._foreach_clamp_max_(gradients, threshold)
    elif norm > threshold:
        torch._foreach_mul_(gradients, threshold / (norm + 1e-6))
