"""Tensor parallelism: each layer's heads and feed-forward width, and the vocabulary, divided among neighbouring ranks.

Parameters are DTensors, so that FSDP and checkpoints know which part a rank has, while computation uses local tensors.
Between layers, all ranks have the same residual stream or, with sequence parallelism, a slice of every sequence each.
`models/` knows nothing of this: `divide_layers` replaces methods of a model that is already built.

Legend: b batch, t time, d model width, v vocabulary, c tokens of the loss's chunk, r ranks.
"""

import logging
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement

from llmfoundry_lite.config.layout import divide_stack
from llmfoundry_lite.models.mpt import MPT, Norm
from llmfoundry_lite.models.products import linear

MAX_SEED = 1 << 48
"""Seeds of attention's dropout are below this number."""


def divide_layers(model: MPT, tensor_mesh: DeviceMesh, sequence_parallel: bool = False) -> None:
    """Divide a model's heads, feed-forward width and vocabulary among the ranks of `tensor_mesh`, in place.

    Collective over these ranks. It is the division of Shoeybi et al. 2019, "Megatron-LM". Each attention and
    feed-forward layer needs one sum over ranks forward, after its last matrix, and one backward, at its input. The
    embeddings need one sum forward, and the head one backward. Every rank computes all norms and learned positions.
    A head gets the output embedding as a DTensor.

    With `sequence_parallel` (Korthikanti et al. 2022, "Reducing Activation Recomputation") each sum becomes a
    reduce-scatter, and an all-gather comes before the next matrix. Ranks compute norms and dropout of their own tokens,
    so the gradients of parameters that all of them have are partial sums. Forward passes without a gradient still have
    whole sequences on every rank, so that their length may be any number.
    """
    # torch would warn on every rank that gathering whole matrices, for an export, takes two steps.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    group = TensorGroup(tensor_mesh, sequence_parallel)
    transformer: Any = model.transformer
    stage = getattr(model, "stage", None)  # only models of a pipeline have one
    is_first_stage = stage is None or stage.is_first
    is_last_stage = stage is None or stage.is_last

    if transformer.alibi_slopes is not None:
        num_heads = len(transformer.alibi_slopes) // group.degree
        first_head = group.rank * num_heads
        transformer.alibi_slopes = transformer.alibi_slopes[first_head : first_head + num_heads]

    # The embeddings and the head. A stage in the middle of a pipeline has neither.
    if hasattr(transformer, "wte"):
        group.divide(transformer.wte, Shard(0))
        transformer.wte.forward = partial(_embed, transformer.wte, group)
    if hasattr(model, "lm_head"):
        group.divide(model.lm_head, Shard(0))
    model_forward = model.forward
    model.forward = lambda *inputs, head=None, **options: model_forward(*inputs, head=head or gather_logits, **options)

    # Norms and the residual stream between layers.
    if sequence_parallel:
        _divide_stream(transformer, group, is_first_stage=is_first_stage)
        for block in transformer.blocks:
            _sum_norm_gradients(block.norm_1, group)
            _sum_norm_gradients(block.norm_2, group)
        if is_last_stage:
            _sum_norm_gradients(transformer.norm_f, group)
    if is_last_stage:
        norm_forward = transformer.norm_f.forward
        transformer.norm_f.forward = lambda x_btd: group.prepare_input(norm_forward(x_btd))  # the head's input

    for block in transformer.blocks:
        _divide_attention(block.attn, group)
        _divide_feed_forward(block.ffn, group)
        if model.config.attn_config.attn_pdrop and not sequence_parallel:
            _seed_dropout_by_rank(block.attn, group.rank)


class TensorGroup:
    """The ranks that divide layers, with the collectives at the input and the output of each divided layer."""

    def __init__(self, mesh: DeviceMesh, sequence_parallel: bool):
        """Describe the ranks of a mesh with one dimension. `sequence_parallel` lets them divide the residual stream."""
        self.mesh = mesh
        self.rank = mesh.get_local_rank()
        self.degree = mesh.size()
        self.name = mesh.get_group().group_name
        self.sequence_parallel = sequence_parallel
        self.divides_stream = False
        """Whether each rank has a slice of every sequence between layers. Each forward pass sets it."""

    @property
    def shared_gradient(self) -> Placement | None:
        """Placement of the gradients of parameters that all ranks have whole; None: the same as the parameters'."""
        return Partial() if self.sequence_parallel else None

    def divide(self, module: nn.Module, weight: Placement, bias: Placement | None = None) -> None:
        """Replace a module's weight, and its bias if it has one, with DTensors of these placements. Collective."""
        for name, placement in (("weight", weight), ("bias", bias)):
            parameter = getattr(module, name, None)
            if parameter is None:
                continue
            assert placement is not None
            divided = distribute_tensor(parameter.data, self.mesh, [placement])
            setattr(module, name, nn.Parameter(divided, requires_grad=parameter.requires_grad))

    def prepare_input(self, x_btd: Tensor) -> Tensor:
        """Return the whole input of a divided layer, [batch, time, width], on every rank.

        If ranks divide the stream, this gathers their slices of each sequence. Otherwise the input is whole already.
        The backward pass sums the gradient over ranks, because each rank has computed with its part of the layer.
        """
        function = _GatherSlices if self.divides_stream else _SumGradient
        return cast(Tensor, function.apply(x_btd, self.name, self.degree))

    def sum_output(self, x_btd: Tensor) -> Tensor:
        """Sum the ranks' outputs of a divided layer, [batch, time, width]. Returns this rank's slice if they divide the
        stream."""
        function = _SumSlices if self.divides_stream else _Sum
        return cast(Tensor, function.apply(x_btd, self.name, self.degree))

    def slice_of(self, x_bt: Tensor) -> Tensor:
        """Return this rank's slice of each sequence, or whole sequences if this forward pass does not divide them."""
        if not self.divides_stream:
            return x_bt
        return x_bt.chunk(self.degree, dim=1)[self.rank]


def _divide_stream(transformer: Any, group: TensorGroup, *, is_first_stage: bool) -> None:
    """Replace a transformer's methods so that ranks divide every sequence in forward passes that need a gradient."""
    forward = transformer.forward
    embed = transformer.embed

    def forward_divided(inputs: Tensor, positions_bt: Tensor | None = None, **options: Any) -> Tensor:
        """Run the transformer. `inputs` are whole tokens_bt, or in a later stage this rank's slice of hidden_btd."""
        group.divides_stream = torch.is_grad_enabled()
        if group.divides_stream and positions_bt is None and not is_first_stage:
            # The transformer would take the length of its inputs for that of the sequence.
            positions_bt = torch.arange(inputs.size(1) * group.degree, device=inputs.device)[None]
        return forward(inputs, positions_bt, **options)

    def embed_slice(tokens_bt: Tensor, positions_bt: Tensor, *options: Any) -> Tensor:
        """Embed the tokens. The look-up of the tokens returns this rank's slice, so the positions are sliced alike."""
        return embed(tokens_bt, group.slice_of(positions_bt), *options)

    transformer.forward = forward_divided
    transformer.slice_stream = group.slice_of
    transformer.embed = embed_slice
    if hasattr(transformer, "wpe"):
        wpe = transformer.wpe
        group.divide(wpe, Replicate())
        wpe.forward = lambda positions_bt: F.embedding(positions_bt, _local(wpe.weight, Partial()))


def _divide_attention(attention: Any, group: TensorGroup) -> None:
    """Give each rank some of an attention layer's heads, in place.

    In a fused matrix (Wqkv), a rank has those rows of the queries, of the keys and of the values that belong to its
    heads. `row_order` lists them, for initialisation and checkpoints.
    """
    if hasattr(attention, "Wqkv"):
        kv_dim = attention.kv_dim
        q_dim = attention.Wqkv.out_features - 2 * kv_dim
        attention.Wqkv.row_order = divide_stack([q_dim, kv_dim, kv_dim], group.degree)
        attention.kv_dim = kv_dim // group.degree
    for name in ("Wqkv", "Wq", "Wk", "Wv"):
        if hasattr(attention, name):
            _divide_outputs(getattr(attention, name), group)
    _divide_inputs(attention.out_proj, group)

    if hasattr(attention, "q_ln"):
        # Each norm has one weight for all heads, and a rank computes only the gradient of its own heads.
        _sum_norm_gradients(attention.q_ln, group)
        _sum_norm_gradients(attention.k_ln, group)
    _prepare_layer_input(attention, group)


def _divide_feed_forward(ffn: Any, group: TensorGroup) -> None:
    """Give each rank a part of a feed-forward layer's width, in place."""
    for name in ("up_proj", "gate_proj"):
        if hasattr(ffn, name):
            _divide_outputs(getattr(ffn, name), group)
    _divide_inputs(ffn.down_proj, group)
    _prepare_layer_input(ffn, group)


def _prepare_layer_input(layer: Any, group: TensorGroup) -> None:
    """Make a divided layer's `forward` begin with the collective of `TensorGroup.prepare_input`."""
    forward = layer.forward
    layer.forward = lambda x_btd, *options: forward(group.prepare_input(x_btd), *options)


def _divide_outputs(layer: Any, group: TensorGroup) -> None:
    """Divide a linear layer by its outputs, in place: the rows of its weight, [outputs, inputs].

    Megatron-LM calls this column parallel, after the transposed weight.
    """
    group.divide(layer, weight=Shard(0), bias=Shard(0))
    layer.forward = lambda x: linear(x, _local(layer.weight), _local(layer.bias))


def _divide_inputs(layer: Any, group: TensorGroup) -> None:
    """Divide a linear layer by its inputs, in place, so that its output is summed over ranks.

    Megatron-LM calls this row parallel. Every rank has the bias, and adds it after the sum.
    """
    group.divide(layer, weight=Shard(1), bias=Replicate())

    def forward(x: Tensor) -> Tensor:
        """Return the layer's output, [batch, time, width], from this rank's part of the inputs."""
        y_btd = group.sum_output(linear(x, _local(layer.weight)))
        if layer.bias is None:
            return y_btd
        return y_btd + _local(layer.bias, group.shared_gradient)

    layer.forward = forward


def _sum_norm_gradients(norm: Norm, group: TensorGroup) -> None:
    """Mark the gradients of a norm's parameters as partial sums over the group, in place, so that torch adds them up.

    Every rank has the whole parameters, but computes the norm of its own tokens or heads only.
    """
    group.divide(norm, weight=Replicate(), bias=Replicate())
    module: Any = norm
    module.forward = lambda x: norm.normalise(x, _local(norm.weight, Partial()), _local(norm.bias, Partial()))


def _local(parameter: Any, gradient: Placement | None = None) -> Any:
    """Return this rank's part of a DTensor parameter, or None for None.

    `gradient` is the placement of the parameter's gradient, if it differs from that of the parameter.
    """
    if parameter is None:
        return None
    return parameter.to_local(grad_placements=None if gradient is None else [gradient])


def _embed(embedding: nn.Embedding, group: TensorGroup, tokens_bt: Tensor) -> Tensor:
    """Look up tokens in an embedding whose rows the group divides. Returns [batch, time, width]. Collective.

    A rank has zeros for tokens in other ranks' rows, so the sum over ranks is the whole result.
    """
    rows_vd, first_row = local_rows(embedding.weight)
    indices_bt = tokens_bt - first_row
    is_local_bt = (indices_bt >= 0) & (indices_bt < rows_vd.size(0))
    x_btd = F.embedding(indices_bt.where(is_local_bt, 0), rows_vd)
    x_btd = x_btd * is_local_bt[..., None]
    return group.sum_output(x_btd)


def gather_logits(hidden_btd: Tensor, unembedding_vd: Any) -> Tensor:
    """Return the logits [batch, time, vocabulary] of hidden states on every rank. Collective.

    Each rank computes those of its rows of the output embedding, `unembedding_vd`, a DTensor.
    """
    local_logits = linear(hidden_btd, unembedding_vd.to_local())
    shape = torch.Size((*hidden_btd.shape[:-1], unembedding_vd.size(0)))
    # DTensor cannot infer these, because the last rank may have fewer rows than the others.
    stride = torch.empty(shape, device="meta").stride()
    vocabulary_dim = Shard(len(shape) - 1)
    logits = DTensor.from_local(local_logits, unembedding_vd.device_mesh, [vocabulary_dim], shape=shape, stride=stride)
    return logits.full_tensor()


def local_rows(weight_vd: Any) -> tuple[Tensor, int]:
    """Return this rank's rows of a matrix that a tensor group divides, and the index of the first of them."""
    _, offset = compute_local_shape_and_global_offset(weight_vd.shape, weight_vd.device_mesh, weight_vd.placements)
    return weight_vd.to_local(), offset[0]


class Vocabulary(NamedTuple):
    """This rank's part of a vocabulary that a tensor group divides. The loss has only the part's logits here."""

    mesh: DeviceMesh
    """The ranks of the group."""
    start: int
    """The first token id of the part."""
    num_rows: int
    """Tokens of each rank; the last one may have fewer."""

    def normalise(self, logits_cv: Tensor, labels_c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Turn this rank's logits of c tokens into log-probabilities, in place. Collective.

        Ranks exchange two numbers for each token: the logsumexp of their logits, and the label's logit.

        Returns three tensors of shape [c]: the log-probabilities of the labels; the labels' columns in `logits_cv`, or
        0 if another rank has the label; and 1.0 if this rank has the label, otherwise 0.0.
        """
        columns_c = labels_c - self.start
        is_local_c = ((columns_c >= 0) & (columns_c < logits_cv.size(1))).float()
        columns_c = columns_c * is_local_c.long()
        tokens_c = torch.arange(len(columns_c), device=columns_c.device)
        label_logits_c = logits_cv[tokens_c, columns_c] * is_local_c

        local_2c = torch.stack([logits_cv.logsumexp(dim=-1), label_logits_c])
        gathered_r2c = all_gather(local_2c, self.mesh.get_group().group_name, self.mesh.size())
        logsumexp_c = gathered_r2c[:, 0].logsumexp(dim=0)
        label_logits_c = gathered_r2c[:, 1].sum(dim=0)  # all ranks but one have 0

        logits_cv -= logsumexp_c[:, None]
        return label_logits_c - logsumexp_c, columns_c, is_local_c


def divide_vocabulary(unembedding_vd: Any) -> tuple[Tensor, Vocabulary]:
    """Return this rank's rows of the output embedding, a DTensor, and the part of the vocabulary in these rows."""
    mesh = unembedding_vd.device_mesh
    num_rows = math.ceil(unembedding_vd.size(0) / mesh.size())
    rows_vd, start = local_rows(unembedding_vd)
    return rows_vd, Vocabulary(mesh, start, num_rows)


# Functional collectives: DTensor and the compiler know them, and they wait only when their result is needed.
collectives = torch.ops._c10d_functional


def all_gather(x: Tensor, group: str, degree: int) -> Tensor:
    """Gather tensors of one shape from the `degree` ranks of the group of this name. Returns [degree, ...]."""
    gathered = collectives.all_gather_into_tensor(x.contiguous(), degree, group)
    return collectives.wait_tensor(gathered).view(degree, *x.shape)


def _keep(x: Tensor, group: str, degree: int) -> Tensor:
    """Return x unchanged, as a new tensor, which autograd functions must return."""
    return x.view_as(x)


def _all_reduce(x: Tensor, group: str, degree: int) -> Tensor:
    """Return the sum of x over the ranks of a group."""
    return collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group))


def _gather_slices(x_btd: Tensor, group: str, degree: int) -> Tensor:
    """Return whole sequences [batch, time, width] from the slices of each sequence that the ranks of a group have."""
    return all_gather(x_btd, group, degree).transpose(0, 1).flatten(1, 2)


def _reduce_scatter_slices(x_btd: Tensor, group: str, degree: int) -> Tensor:
    """Sum whole sequences [batch, time, width] over the ranks of a group, and return this rank's slice of each."""
    # Slice r of every sequence goes to rank r, so the slices come first: [degree * batch, time / degree, width].
    slices = x_btd.unflatten(1, (degree, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    return collectives.wait_tensor(collectives.reduce_scatter_tensor(slices, "sum", degree, group))


Operation = Callable[[Tensor, str, int], Tensor]
"""(tensor, name of a group, number of its ranks) -> tensor. Collective over the group."""


def make_autograd_function(forward: Operation, backward: Operation) -> type[torch.autograd.Function]:
    """Return an autograd function that applies one operation to its input, and another to the gradient of its output.

    Its `apply` takes the arguments of an `Operation`.
    """
    forward_operation = forward
    backward_operation = backward

    class Collective(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group, degree):
            """Apply the first operation."""
            ctx.group = group
            ctx.degree = degree
            return forward_operation(x, group, degree)

        @staticmethod
        def backward(ctx, grad):  # type: ignore[override]
            """Apply the second operation. The group and its number of ranks have no gradient."""
            return backward_operation(grad, ctx.group, ctx.degree), None, None

    return Collective


_Sum = make_autograd_function(_all_reduce, _keep)
_SumGradient = make_autograd_function(_keep, _all_reduce)
_GatherSlices = make_autograd_function(_gather_slices, _reduce_scatter_slices)
_SumSlices = make_autograd_function(_reduce_scatter_slices, _gather_slices)


def _seed_dropout_by_rank(attention: nn.Module, tensor_rank: int) -> None:
    """Make attention's dropout differ between the ranks of a tensor group, in place, because they have different heads.

    All other dropout is the same on these ranks, which therefore draw the same numbers. So the seed comes from the
    common generator, and the generator's state is restored afterwards.
    """
    forward = attention.forward

    def forward_with_seed(*args: Any) -> Any:
        """Compute attention with a seed of this rank, if the model is training."""
        if not attention.training:
            return forward(*args)
        seed = int(torch.randint(MAX_SEED, ()))  # the same on all ranks
        cuda_devices = [args[0].device] if args[0].is_cuda else []
        with torch.random.fork_rng(devices=cuda_devices):
            torch.manual_seed(seed + tensor_rank)
            return forward(*args)

    attention.forward = forward_with_seed
