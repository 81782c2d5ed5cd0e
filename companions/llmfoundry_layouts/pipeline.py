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
"""(hidden_btd, unembedding_vd, labels_bt, [weights_bt=]) -> the sum of the loss over tokens.

The letters stand for batch, time, model width (d) and vocabulary (v).
"""

SCHEDULES: dict[str, Any] = {
    "gpipe": ScheduleGPipe,
    "1f1b": Schedule1F1B,
    "interleaved": ScheduleInterleaved1F1B,
    "zero_bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}
"""`pp_config.schedule` -> torch's class."""
SCHEDULES_OF_ONE_STAGE = ("gpipe", "1f1b")
"""Schedules with one stage on each rank. torch's classes take it alone instead of a list."""

# When a pass fails, torch would print the whole schedule on every rank, one line for each step.
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
    """Build this rank's stages of a model. Collective: every rank of `mesh` calls this together.

    loss: computed by the last stage.
    context: with context parallelism, the ranks that divide the tokens of each sample.
    sequence_parallel: whether the ranks of `mesh["tensor"]` divide the residual stream between layers.
    options: further options of `build_parallel_model`, which builds each stage.

    Raises ConfigError for a compiler that torch does not know.
    """
    rank = mesh["pipeline"].get_local_rank()
    models: list[StageModel] = []
    for stage in assign_stages(config, pipeline)[rank]:
        model_class = partial(StageModel, stage=stage, loss=loss, precision=precision, context=context)
        model = build_parallel_model(
            config,
            model_class=model_class,
            precision=precision,
            mesh=mesh,
            sequence_parallel=sequence_parallel,
            **options,
        )
        models.append(model)

    sequence_parallel_degree = mesh["tensor"].size() if sequence_parallel else 1
    return Pipeline(models, pipeline, precision, mesh.get_group("pipeline"), sequence_parallel_degree)


def remove_other_stages(model: MPT, stage: Stage) -> None:
    """Remove, in place, the modules of a whole model that do not belong to a stage.

    The remaining parameters keep the names that they have in the whole model, so that checkpoints do not depend on the
    stages. If the embeddings are tied, both the first and the last stage keep the matrix.
    """
    config = model.config
    transformer = cast(Any, model.transformer)
    for index in range(config.n_layers):
        if index not in stage.blocks:
            delattr(transformer.blocks, str(index))
    transformer.first_block = stage.blocks[0]

    if not stage.is_first:
        # The input is the output of the stage before, not tokens.
        transformer.embed = lambda hidden_btd, *options: hidden_btd
        if config.uses_learned_positions:
            del transformer.wpe
        is_head_tied = stage.is_last and config.tie_word_embeddings
        if not is_head_tied:
            del transformer.wte

    if not stage.is_last:
        transformer.norm_f = nn.Identity()
        if not config.tie_word_embeddings:
            del model.lm_head


class StageModel(MPT):
    """One stage of a model: its blocks, with the embeddings in the first stage, and norm, head and loss in the last."""

    def __init__(
        self,
        config: ModelConfig,
        attn_impl: str,
        stage: Stage,
        loss: Loss,
        precision: Precision,
        context: Context | None = None,
    ):
        """Build the whole model, normally on the meta device, and remove what belongs to other stages.

        `loss` is computed by the last stage. `context` are the ranks that divide the tokens of each sample.
        """
        super().__init__(config, attn_impl)
        self.stage = stage
        remove_other_stages(self, stage)
        self.context = context
        self.sum_loss = loss
        self.autocast_dtype = precision.autocast

    def forward(  # type: ignore[override]
        self,
        inputs: Tensor,
        *,
        labels_bt: Tensor | None = None,
        weights_bt: Tensor | None = None,
        head: Head | None = None,
        **options: Any,
    ) -> Any:
        """Run the stage on the tokens of this rank.

        inputs: token ids [batch, time] for the first stage, hidden states [batch, time, width] for later ones.
        labels_bt: labels of these tokens, from which the last stage computes the loss.
        weights_bt: a factor for the loss of each token.
        head: computes the last stage's result from hidden states and output embedding, if there are no labels.
        options: options of the model's forward pass, such as `documents_bt` or `cache`.

        Returns hidden states [batch, time, width], or in the last stage the sum of the loss or the result of `head`.
        """
        if labels_bt is not None:
            sum_loss = self.sum_loss
            if weights_bt is not None:
                sum_loss = partial(sum_loss, weights_bt=weights_bt)
            head = partial(sum_loss, labels_bt=labels_bt)
            if self.context is not None:
                num_tokens = labels_bt.size(1) * self.context.size  # of a whole sample
                options |= self.context.options(num_tokens, inputs.device)

        autocast: Any = nullcontext()
        if self.autocast_dtype is not None:
            autocast = torch.autocast(inputs.device.type, self.autocast_dtype)
        with autocast:
            if self.stage.is_last:
                return super().forward(inputs, head=head, **options)
            return self.transformer(inputs, **options)


class Pipeline(nn.Module):
    """The stages of a model that this rank has.

    All ranks of a pipeline call the same methods together, with the same samples. Parameters have the names that they
    have in the whole model.
    """

    def __init__(
        self,
        stages: Sequence[StageModel],
        pipeline: PipelineConfig,
        precision: Precision,
        group: dist.ProcessGroup,
        sequence_parallel_degree: int = 1,
    ):
        """Connect this rank's stages with those of the other ranks. Collective over `group`, the ranks of the pipeline.

        `sequence_parallel_degree` is the number of ranks among which sequence parallelism divides each sequence.
        """
        super().__init__()
        self.sequence_parallel_degree = sequence_parallel_degree
        self.stages: Any = nn.ModuleList(stages)
        self.config = stages[0].config
        self.pipeline = pipeline
        self.group = group
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self.hidden_dtype = precision.parameters
        self.has_first = stages[0].stage.is_first
        self.has_last = stages[-1].stage.is_last
        self.rank_of_last = 0 if pipeline.schedule == "zbv" else self.num_ranks - 1
        self._schedules: dict[tuple[int, int, int], Any] = {}
        """(microbatches, samples in each, tokens in each sample) -> torch's schedule. At most one is kept."""
        self._send_in_flight: tuple[Any, Tensor] | None = None
        """torch's handle of the latest send, and the tensor, which must live until the send is complete."""

        # NCCL creates a group's communicator in the group's first call, which every rank must make. Without this call,
        # the first would be a batch of sends, which in some schedules only two ranks make (for tied embeddings).
        dist.all_reduce(torch.zeros(1, device=self.device), group=group)

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:  # type: ignore[override]
        """Yield modules under the names of the whole model, such as `transformer.blocks.7`, whichever stage has them.

        The names would otherwise begin with `stages.0.`. torch derives the names of parameters from these.
        """
        yield prefix, self
        if memo is None:
            memo = set()
        for stage in self.stages:
            yield from stage.named_modules(memo, prefix, remove_duplicate)

    @property
    def device(self) -> torch.device:
        """The device of this rank's parameters."""
        return next(self.parameters()).device

    @property
    def shared_parameters(self) -> list[nn.Parameter]:
        """This rank's parameters that another rank also has: tied embeddings, in the first and the last stage."""
        if not self.config.tie_word_embeddings:
            return []
        ends = [model for model in self.stages if model.stage.is_first or model.stage.is_last]
        return [model.transformer.wte.weight for model in ends]

    def train_on(self, tokens_bt: Tensor, labels_bt: Tensor, weights_m: Tensor, **options: Tensor | None) -> Tensor:
        """Add the gradient of a batch to this rank's parameters, in m microbatches. Collective over the pipeline.

        tokens_bt, labels_bt: the batch, [batch, time]. The number of samples must be a multiple of m.
        weights_m: a factor for the loss of each microbatch, which also decides their number, m.
        options: tensors for every stage, or None: documents_bt, weights_bt, dropout_seeds_b.

        Returns the losses, each times its weight: [m] on the rank of the last stage, and [0] on others.
        """
        num_microbatches = len(weights_m)
        schedule = self._schedule(num_microbatches, len(tokens_bt) // num_microbatches, tokens_bt.size(1))
        inputs = (tokens_bt,) if self.has_first else ()
        losses: list[Tensor] = []  # torch appends to it
        try:
            schedule.step(
                *inputs,
                target=weights_m if self.has_last else None,
                losses=losses if self.has_last else None,
                return_outputs=False,
                labels_bt=labels_bt,
                **{name: option for name, option in options.items() if option is not None},
            )
        except RuntimeError as error:
            # torch wraps errors of a stage in one that only lists the stage's arguments.
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None

        self._add_shared_gradients()
        if not losses:
            return weights_m.new_empty(0)
        return torch.stack([loss.detach() for loss in losses])

    def forward(self, tokens_bt: Tensor, *, cache: KeyValueCache | None = None, **options: Any) -> Any:
        """Run the whole model without a gradient, and return the head's result on every rank of the pipeline.

        Collective over the pipeline. The result is one tensor or a tuple of tensors. The arguments are those of
        `run_forward`.
        """
        return self._broadcast(self.run_forward(tokens_bt, cache=cache, **options))

    @torch.no_grad()
    def run_forward(
        self, tokens_bt: Tensor, *, cache: KeyValueCache | None = None, head: Head | None = None, **options: Any
    ) -> Any:
        """Run this rank's stages without a gradient, between those of the ranks before and after.

        Collective over the pipeline. Every rank gets the same `tokens_bt`, [batch, time].

        cache: keys and values of earlier tokens, to which each stage adds those of its blocks.
        head: computes the result from hidden states and output embedding.
        options: further options of `StageModel.forward`.

        Returns the result on the rank of the last stage, and None on others, which do not wait for it.
        """
        result = None
        x = tokens_bt
        num_past_tokens = 0 if cache is None else cache.length
        for model in self.stages:
            stage = model.stage
            if not stage.is_first and self._rank_of_stage(stage.index - 1) != self.rank:
                x = torch.empty(
                    (*tokens_bt.shape, self.config.d_model), dtype=self.hidden_dtype, device=tokens_bt.device
                )
                sender = dist.get_global_rank(self.group, self._rank_of_stage(stage.index - 1))
                dist.recv(x, sender, self.group)

            if cache is not None:
                # Each stage adds the tokens to `length`. The rank's next stage must see them as new, too.
                cache.length = num_past_tokens
            x = model(x, cache=cache, head=head, **options)

            if stage.is_last:
                result = x
            elif self._rank_of_stage(stage.index + 1) != self.rank:
                self._send(x, self._rank_of_stage(stage.index + 1))
        return result

    def _rank_of_stage(self, index: int) -> int:
        """Return the rank, within the pipeline's group, that has the model's stage of this index."""
        if self.pipeline.schedule == "zbv":
            return min(index, 2 * self.num_ranks - 1 - index)
        return index % self.num_ranks

    def _send(self, x: Tensor, to_rank: int) -> None:
        """Begin to send a tensor to a rank of the pipeline, after waiting for this rank's previous send."""
        if self._send_in_flight is not None:
            previous_send, _ = self._send_in_flight
            previous_send.wait()
        x = x.contiguous()
        send = dist.isend(x, dist.get_global_rank(self.group, to_rank), self.group)
        self._send_in_flight = (send, x)

    def _broadcast(self, result: Any) -> Any:
        """Return the last stage's result on every rank. Collective over the pipeline.

        `result` is a tensor or a tuple of tensors on the rank of the last stage, and ignored elsewhere. Other ranks do
        not know how many tensors there are nor their shapes, so a description in JSON is broadcast before the bytes.
        """
        is_tuple = isinstance(result, tuple)
        tensors: list[Tensor] = []
        if self.has_last:
            tensors = list(result) if is_tuple else [result]

        specs = [[str(tensor.dtype).removeprefix("torch."), list(tensor.shape)] for tensor in tensors]
        specs, is_tuple = broadcast_json([specs, is_tuple], self.group, source=self.rank_of_last)
        content = broadcast_bytes(b"".join(map(_bytes_of, tensors)), self.group, source=self.rank_of_last)
        if self.has_last:
            return result

        # All other ranks build the tensors from the bytes.
        begin = 0
        for dtype_name, shape in specs:
            dtype = getattr(torch, dtype_name)
            end = begin + dtype.itemsize * torch.Size(shape).numel()
            tensor = torch.frombuffer(bytearray(content[begin:end]), dtype=dtype)
            tensors.append(tensor.view(shape).to(self.device))
            begin = end
        return tuple(tensors) if is_tuple else tensors[0]

    def _schedule(self, num_microbatches: int, num_samples: int, seq_len: int) -> Any:
        """Return torch's schedule for microbatches of `num_samples` samples with `seq_len` tokens each.

        The latest schedule is kept for the next batch. A different one replaces it, because its buffers are large.
        """
        key = (num_microbatches, num_samples, seq_len)
        if key in self._schedules:
            return self._schedules[key]

        self._schedules.clear()
        stages: Any = [self._torch_stage(model, num_samples, seq_len) for model in self.stages]
        if self.pipeline.schedule in SCHEDULES_OF_ONE_STAGE:
            (stages,) = stages
        schedule_class = SCHEDULES[self.pipeline.schedule]
        self._schedules[key] = schedule_class(
            stages,
            num_microbatches,
            # `train_on` passes the microbatches' weights to torch as targets.
            loss_fn=lambda loss, weight_1: loss * weight_1[0],
            scale_grads=False,
        )
        return self._schedules[key]

    def _torch_stage(self, model: StageModel, num_samples: int, seq_len: int) -> PipelineStage:
        """Wrap a stage for torch's schedules, for microbatches of `num_samples` samples with `seq_len` tokens each.

        Inputs and outputs are described by tensors on the meta device. Without them torch would run a forward and a
        backward pass to find their shapes.
        """

        def describe(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
            """Return a tensor without memory. Floating-point ones have a gradient."""
            return torch.empty(shape, dtype=dtype, device="meta", requires_grad=dtype.is_floating_point)

        tokens = describe((num_samples, seq_len), torch.int64)
        num_hidden_tokens = seq_len // self.sequence_parallel_degree
        hidden = describe((num_samples, num_hidden_tokens, self.config.d_model), self.hidden_dtype)
        loss = describe((), torch.float32)
        return PipelineStage(
            model,
            model.stage.index,
            model.stage.num_stages,
            self.device,
            input_args=tokens if model.stage.is_first else hidden,
            output_args=loss if model.stage.is_last else hidden,
            group=self.group,
        )

    def _add_shared_gradients(self) -> None:
        """Sum the gradients of tied embeddings over the first and the last stage, in place.

        Only these two ranks communicate; the others return at once. Each adds the other's gradient to its own. Because
        addition commutes, both get the same bits, and the two copies of the embedding stay equal.
        """
        other_end = self.num_ranks - 1 if self.has_first else 0
        peer = dist.get_global_rank(self.group, other_end)
        for parameter in self.shared_parameters:
            gradient = parameter.grad
            if isinstance(gradient, DTensor):
                gradient = gradient.to_local()
            assert gradient is not None
            if gradient.numel() == 0:
                continue  # FSDP gives this rank no rows of it, and its peer neither

            peer_gradient = torch.empty_like(gradient)
            operations = [
                dist.P2POp(dist.isend, gradient.contiguous(), peer, self.group),
                dist.P2POp(dist.irecv, peer_gradient, peer, self.group),
            ]
            for work in dist.batch_isend_irecv(operations):
                work.wait()
            gradient += peer_gradient


def _bytes_of(tensor: Tensor) -> bytes:
    """Copy the elements of a tensor of any dtype, bfloat16 included, to bytes on the host."""
    return tensor.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
