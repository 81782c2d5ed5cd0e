"""Pipeline parallelism: a rank's stages of the model, and the schedules that pass microbatches through them.

`stages.py` assigns blocks to stages. The schedules are torch's (torch.distributed.pipelining).
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble, ScheduleZBVZeroBubble
from torch.distributed.tensor import DTensor

from llmfoundry_layouts.context import Context
from llmfoundry_layouts.stages import Stage, assign_stages
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.sharding_schema import PipelineConfig
from llmfoundry_lite.models.mpt import MPT, Head, KeyValueCache
from llmfoundry_lite.parallel.fsdp import build_parallel_model
from llmfoundry_lite.parallel.precision import Precision
from llmfoundry_lite.ranks.exchange import broadcast_bytes, broadcast_json

Loss = Callable[..., Tensor]
"""(hidden_btd, unembedding_vd, labels_bt, [weights_bt=]) -> the sum of the loss."""

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
TAKES_ONE_STAGE = ("gpipe", "1f1b")

# When a pass fails, torch would print the whole schedule on every rank, one line a step.
logging.getLogger("torch.distributed.pipelining.schedules").setLevel(logging.CRITICAL)


def build_pipeline(
    config: ModelConfig,
    pipeline: PipelineConfig,
    loss: Loss,
    context: Context | None,
    *,
    precision: Precision,
    mesh: DeviceMesh,
    sequence_parallel: bool,
    **options: Any,
) -> "Pipeline":
    """Build this rank's stages of a pipeline; the last stage computes `loss`.

    `options` are those of `build_parallel_model`, which builds each stage. Raises ConfigError as it does.
    """
    options |= {"precision": precision, "mesh": mesh, "sequence_parallel": sequence_parallel}
    stages = assign_stages(config, pipeline)[mesh["pipeline"].get_local_rank()]
    kinds = [partial(StageModel, stage=stage, loss=loss, precision=precision, context=context) for stage in stages]
    models = [build_parallel_model(config, model_class=kind, **options) for kind in kinds]
    degree = mesh["tensor"].size() if sequence_parallel else 1
    return Pipeline(models, pipeline, precision, mesh.get_group("pipeline"), degree)


def keep_stage(model: MPT, stage: Stage) -> None:
    """Remove the modules of other stages. Those that stay keep the names that they have in the whole model."""
    config, transformer = model.config, cast(Any, model.transformer)
    for number in {*range(config.n_layers)} - {*stage.blocks}:
        delattr(transformer.blocks, str(number))
    transformer.first_block = stage.blocks[0]
    if not stage.is_first:
        transformer.embed = lambda hidden_btd, *options: hidden_btd
        if config.uses_learned_positions:
            del transformer.wpe
        if not (stage.is_last and config.tie_word_embeddings):
            del transformer.wte
    if not stage.is_last:
        transformer.norm_f = nn.Identity()
        if not config.tie_word_embeddings:
            del model.lm_head


class StageModel(MPT):
    """One stage of the model. Given labels, the last stage returns the sum of the loss."""

    def __init__(
        self,
        config: ModelConfig,
        attn_impl: str,
        stage: Stage,
        loss: Loss,
        precision: Precision,
        context: Context | None = None,
    ):
        super().__init__(config, attn_impl)
        self.stage = stage
        keep_stage(self, stage)
        self.context = context
        self.sum_loss = loss
        self.autocast = precision.autocast

    def forward(  # type: ignore[override]
        self,
        inputs: Tensor,
        *,
        labels_bt: Tensor | None = None,
        weights_bt: Tensor | None = None,
        head: Head | None = None,
        **options: Any,
    ) -> Any:
        """Run the stage. `inputs`: tokens_bt, or hidden_btd in later stages. Labels are of this rank's tokens."""
        if labels_bt is not None:
            sum_loss = self.sum_loss if weights_bt is None else partial(self.sum_loss, weights_bt=weights_bt)
            head = partial(sum_loss, labels_bt=labels_bt)
            if self.context is not None:
                options |= self.context.options(labels_bt.size(1) * self.context.size, inputs.device)
        with torch.autocast(inputs.device.type, self.autocast) if self.autocast else nullcontext():
            if not self.stage.is_last:
                return self.transformer(inputs, **options)
            return super().forward(inputs, head=head, **options)


class Pipeline(nn.Module):
    """This rank's stages. Every rank of a pipeline calls the same methods with the same samples.

    Its parameters have the names that they have in the whole model.
    """

    def __init__(
        self,
        stages: Sequence[StageModel],
        pipeline: PipelineConfig,
        precision: Precision,
        group: dist.ProcessGroup,
        sequence_parallel_degree: int = 1,
    ):
        """`sequence_parallel_degree`: ranks among which sequence parallelism divides each sequence."""
        super().__init__()
        self.sequence_parallel_degree = sequence_parallel_degree
        self.stages: Any = nn.ModuleList(stages)
        self.config = stages[0].config
        self.pipeline = pipeline
        self.group = group
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.hidden_dtype = precision.parameters
        self.has_first, self.has_last = stages[0].stage.is_first, stages[-1].stage.is_last
        self.rank_of_last = 0 if pipeline.schedule == "zbv" else self.num_ranks - 1
        self._schedules: dict[tuple[int, int, int], Any] = {}
        self._sent: list[tuple[Any, Tensor]] = []
        # NCCL creates a group's communicator in the group's first call, which every rank must make. Otherwise that call
        # would be a batch of sends, which in some schedules only two ranks make (for tied embeddings).
        dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:  # type: ignore[override]
        """Name modules as in the whole model: `transformer.blocks.7`, whichever stage has it."""
        yield prefix, self
        memo = set() if memo is None else memo
        for stage in self.stages:
            yield from stage.named_modules(memo, prefix, remove_duplicate)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def shared_parameters(self) -> list[nn.Parameter]:
        """This rank's parameters that another stage also has: tied embeddings."""
        if not self.config.tie_word_embeddings:
            return []
        ends = [stage for stage in self.stages if stage.stage.is_first or stage.stage.is_last]
        return [stage.transformer.wte.weight for stage in ends]

    def train_on(self, tokens_bt: Tensor, labels_bt: Tensor, weights_m: Tensor, **options: Tensor | None) -> Tensor:
        """Add up the gradient of m microbatches' losses, each times its weight.

        `options` go to every stage: documents_bt, weights_bt, dropout_seeds_b. The number of samples must be a multiple
        of m. Returns the weighted losses: [m] on the rank of the last stage, [0] elsewhere.
        """
        num_microbatches = len(weights_m)
        schedule = self._schedule(num_microbatches, len(tokens_bt) // num_microbatches, tokens_bt.size(1))
        losses: list[Tensor] = []
        try:
            schedule.step(
                *((tokens_bt,) if self.has_first else ()),
                target=weights_m if self.has_last else None,
                losses=losses if self.has_last else None,
                return_outputs=False,
                labels_bt=labels_bt,
                **{name: option for name, option in options.items() if option is not None},
            )
        except RuntimeError as error:
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None  # torch's own text only lists the stage's arguments
        self._add_shared_gradients()
        return torch.stack([loss.detach() for loss in losses]) if losses else weights_m.new_empty(0)

    def forward(self, tokens_bt: Tensor, *, cache: KeyValueCache | None = None, **options: Any) -> Any:
        """Run the whole model without a gradient. Every rank returns the result of the head, a tensor or several."""
        return self._broadcast(self.run_forward(tokens_bt, cache=cache, **options))

    @torch.no_grad()
    def run_forward(
        self, tokens_bt: Tensor, *, cache: KeyValueCache | None = None, head: Head | None = None, **options: Any
    ) -> Any:
        """Return the result of the head on the rank of the last stage; None on other ranks, which do not wait."""
        result, x = None, tokens_bt
        num_past = 0 if cache is None else cache.length
        for model in self.stages:
            stage = model.stage
            if not stage.is_first and self._rank_of(stage.index - 1) != self.rank:
                shape = (*tokens_bt.shape, self.config.d_model)
                x = torch.empty(shape, dtype=self.hidden_dtype, device=tokens_bt.device)
                dist.recv(x, dist.get_global_rank(self.group, self._rank_of(stage.index - 1)), self.group)
            if cache is not None:
                cache.length = num_past  # each stage of this rank advances it
            x = model(x, cache=cache, head=head, **options)
            if stage.is_last:
                result = x
            elif self._rank_of(stage.index + 1) != self.rank:
                self._send(x, self._rank_of(stage.index + 1))
        return result

    def _rank_of(self, index: int) -> int:
        """Return the rank in the group that has this stage."""
        if self.pipeline.schedule == "zbv":
            return min(index, 2 * self.num_ranks - 1 - index)
        return index % self.num_ranks

    def _send(self, x: Tensor, to_rank: int) -> None:
        """Send without waiting for the receiver. Waits for the previous send."""
        for work, _ in self._sent:
            work.wait()
        x = x.contiguous()
        self._sent = [(dist.isend(x, dist.get_global_rank(self.group, to_rank), self.group), x)]

    def _broadcast(self, result: Any) -> Any:
        """Broadcast the result of the last stage to every rank of the pipeline."""
        tensors = [] if result is None else list(result) if isinstance(result, tuple) else [result]
        described = [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors], isinstance(result, tuple)
        described, is_tuple = broadcast_json(described, self.group, source=self.rank_of_last)
        raw = b"".join(t.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for t in tensors)
        raw = broadcast_bytes(raw, self.group, source=self.rank_of_last)
        if self.has_last:
            return result
        tensors, begin = [], 0
        for name, shape in described:
            dtype = getattr(torch, name)
            end = begin + dtype.itemsize * torch.Size(shape).numel()
            tensors.append(torch.frombuffer(bytearray(raw[begin:end]), dtype=dtype).view(shape).to(self.device))
            begin = end
        return tuple(tensors) if is_tuple else tensors[0]

    def _schedule(self, num_microbatches: int, num_samples: int, seq_len: int) -> Any:
        """Return torch's schedule for microbatches of this shape. Only the latest is kept: its buffers are large."""
        key = (num_microbatches, num_samples, seq_len)
        if key not in self._schedules:
            self._schedules.clear()
            stages = [self._torch_stage(model, num_samples, seq_len) for model in self.stages]
            kind = SCHEDULES[self.pipeline.schedule]
            self._schedules[key] = kind(
                stages[0] if self.pipeline.schedule in TAKES_ONE_STAGE else stages,
                num_microbatches,
                loss_fn=lambda loss, weight_1: loss * weight_1[0],
                scale_grads=False,
            )
        return self._schedules[key]

    def _torch_stage(self, model: StageModel, num_samples: int, seq_len: int) -> PipelineStage:
        """Make torch's stage, given its shapes: torch would infer them by a forward and a backward pass."""
        stage, shape = model.stage, (num_samples, seq_len)

        def like(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)

        hidden = like((num_samples, seq_len // self.sequence_parallel_degree, self.config.d_model), self.hidden_dtype)
        return PipelineStage(
            model,
            stage.index,
            stage.num_stages,
            self.device,
            input_args=like(shape, torch.int64) if stage.is_first else hidden,
            output_args=like((), torch.float32) if stage.is_last else hidden,
            group=self.group,
        )

    def _add_shared_gradients(self) -> None:
        """Sum the gradients of tied embeddings over the first and the last stage. Both get the same bits, so the
        embeddings stay equal."""
        peer = dist.get_global_rank(self.group, self.num_ranks - 1 if self.has_first else 0)
        for parameter in self.shared_parameters:
            gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
            assert gradient is not None
            if not gradient.numel():
                continue
            theirs = torch.empty_like(gradient)
            exchange = [
                dist.P2POp(dist.isend, gradient.contiguous(), peer, self.group),
                dist.P2POp(dist.irecv, theirs, peer, self.group),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            gradient += theirs
