"""Tensor parallelism: each layer's heads and feed-forward width, and the vocabulary, divided among neighbouring ranks.

Parameters are DTensors, so that FSDP and checkpoints know their places; computation uses local tensors. Between layers,
ranks have the same residual stream or, with sequence parallelism, each a slice of every sequence.

Legend: b batch, t time, d model width, v vocabulary, c tokens of the loss's chunk, r ranks.
"""

import logging
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


def divide_layers(model: MPT, tensor_mesh: DeviceMesh, sequence_parallel: bool = False) -> None:
    """Give each rank some heads, some of the feed-forward width and some of the vocabulary (Shoeybi et al. 2019,
    "Megatron-LM").

    Each attention and feed-forward layer needs one sum over ranks forward, after its last matrix, and one backward, at
    its input. Embeddings need one forward, and the head one backward. Every rank computes norms and learned positions.
    A head gets the output embedding as a DTensor.

    With sequence parallelism (Korthikanti et al. 2022, "Reducing Activation Recomputation") each sum becomes a
    reduce-scatter, with an all-gather before the next matrix. Ranks compute norms and dropout of their own tokens, and
    gradients of shared parameters are partial sums. Without a gradient the stream stays whole, for any length.
    """
    # torch would warn on every rank that gathering whole matrices, for an export, takes two steps.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    group = TensorGroup(tensor_mesh, sequence_parallel)
    transformer: Any = model.transformer
    if transformer.alibi_slopes is not None:
        num_heads = len(transformer.alibi_slopes) // group.degree
        transformer.alibi_slopes = transformer.alibi_slopes[group.rank * num_heads : (group.rank + 1) * num_heads]
    if hasattr(transformer, "wte"):
        group.divide(transformer.wte, Shard(0))
        transformer.wte.forward = partial(_look_up, transformer.wte, group)
    if hasattr(model, "lm_head"):
        group.divide(model.lm_head, Shard(0))
    norms = [norm for block in transformer.blocks for norm in (block.norm_1, block.norm_2)]
    stage = getattr(model, "stage", None)  # of a pipeline
    is_last = stage is None or stage.is_last
    norms += [transformer.norm_f] if is_last else []
    if sequence_parallel:
        _divide_stream(transformer, group, is_first=stage is None or stage.is_first)
        for norm in norms:
            _share_norm(norm, group)
    if is_last:
        last_norm = transformer.norm_f.forward
        transformer.norm_f.forward = lambda x_btd: group.enter(last_norm(x_btd))
    forward = model.forward
    model.forward = lambda *inputs, head=None, **options: forward(*inputs, head=head or logits, **options)
    for block in transformer.blocks:
        _divide_attention(block.attn, group)
        _divide_feed_forward(block.ffn, group)
        if model.config.attn_config.attn_pdrop and not sequence_parallel:
            _drop_apart(block.attn, group.rank)


class TensorGroup:
    """The ranks that divide layers, and the collectives with which the residual stream enters and leaves a layer."""

    def __init__(self, mesh: DeviceMesh, sequence_parallel: bool):
        self.mesh = mesh
        self.rank, self.degree = mesh.get_local_rank(), mesh.size()
        self.name = mesh.get_group().group_name
        self.sequence_parallel = sequence_parallel
        self.divides_stream = False
        """The current forward pass divides sequences."""

    @property
    def shared_gradient(self) -> Placement | None:
        """Placement of the gradients of parameters that all ranks have whole; None: the same as the parameters'."""
        return Partial() if self.sequence_parallel else None

    def divide(self, module: nn.Module, weight: Placement, bias: Placement | None = None) -> None:
        """Replace a module's weight and bias with DTensors of these placements."""
        for name, placement in (("weight", weight), ("bias", bias)):
            parameter = getattr(module, name, None)
            if parameter is not None:
                assert placement is not None
                divided = distribute_tensor(parameter.data, self.mesh, [placement])
                setattr(module, name, nn.Parameter(divided, requires_grad=parameter.requires_grad))

    def enter(self, x_btd: Tensor) -> Tensor:
        """Make the input of a divided matrix whole on every rank. Backward sums its gradient over ranks."""
        function = _Gather if self.divides_stream else _SumGradient
        return cast(Tensor, function.apply(x_btd, self.name, self.degree))

    def leave(self, x_btd: Tensor) -> Tensor:
        """Sum an output over ranks. Of a divided stream, return this rank's slice."""
        function = _Scatter if self.divides_stream else _Sum
        return cast(Tensor, function.apply(x_btd, self.name, self.degree))

    def slice_of(self, x_bt: Tensor) -> Tensor:
        """Return this rank's slice of each sequence; the whole sequence while the stream is not divided."""
        return x_bt.chunk(self.degree, dim=1)[self.rank] if self.divides_stream else x_bt


def _divide_stream(transformer: Any, group: TensorGroup, *, is_first: bool) -> None:
    """Divide every sequence among ranks while gradients are computed."""
    forward, embed = transformer.forward, transformer.embed

    def divided(inputs: Tensor, positions_bt: Tensor | None = None, **options: Any) -> Tensor:
        """`inputs` are tokens_bt, or in a later stage this rank's slice of hidden_btd."""
        group.divides_stream = torch.is_grad_enabled()
        if group.divides_stream and positions_bt is None and not is_first:
            positions_bt = torch.arange(inputs.size(1) * group.degree, device=inputs.device)[None]
        return forward(inputs, positions_bt, **options)

    transformer.forward = divided
    transformer.slice_stream = group.slice_of
    transformer.embed = lambda tokens_bt, positions_bt, *keys: embed(tokens_bt, group.slice_of(positions_bt), *keys)
    if hasattr(transformer, "wpe"):
        positions = transformer.wpe
        group.divide(positions, Replicate())
        positions.forward = lambda positions_bt: F.embedding(positions_bt, _local(positions.weight, Partial()))


def _divide_attention(attention: Any, group: TensorGroup) -> None:
    """Divide heads. Of a fused matrix a rank has the q, k and v rows of its heads; `row_order` tells initialisation
    and checkpoints which these are."""
    if hasattr(attention, "Wqkv"):
        num_rows, kv_dim = attention.Wqkv.out_features, attention.kv_dim
        attention.Wqkv.row_order = divide_stack([num_rows - 2 * kv_dim, kv_dim, kv_dim], group.degree)
        attention.kv_dim = kv_dim // group.degree
    for name in ("Wqkv", "Wq", "Wk", "Wv"):
        if hasattr(attention, name):
            _divide_columns(getattr(attention, name), group)
    _divide_rows(attention.out_proj, group)
    if hasattr(attention, "q_ln"):  # one norm for all heads
        for norm in (attention.q_ln, attention.k_ln):
            _share_norm(norm, group)
    _enter_first(attention, group)


def _divide_feed_forward(ffn: Any, group: TensorGroup) -> None:
    for name in ("up_proj", "gate_proj"):
        if hasattr(ffn, name):
            _divide_columns(getattr(ffn, name), group)
    _divide_rows(ffn.down_proj, group)
    _enter_first(ffn, group)


def _enter_first(layer: Any, group: TensorGroup) -> None:
    forward = layer.forward
    layer.forward = lambda x_btd, *rest: forward(group.enter(x_btd), *rest)


def _divide_columns(layer: Any, group: TensorGroup) -> None:
    """Divide the outputs: in Megatron's words the columns, those of the transposed weight."""
    group.divide(layer, Shard(0), Shard(0))
    layer.forward = lambda x: linear(x, _local(layer.weight), _local(layer.bias))


def _divide_rows(layer: Any, group: TensorGroup) -> None:
    """Divide the inputs, and sum the outputs over ranks."""
    group.divide(layer, Shard(1), Replicate())

    def forward(x: Tensor) -> Tensor:
        y_btd = group.leave(linear(x, _local(layer.weight)))
        return y_btd if layer.bias is None else y_btd + _local(layer.bias, group.shared_gradient)

    layer.forward = forward


def _share_norm(norm: Norm, group: TensorGroup) -> None:
    """Make the gradient of a norm a partial sum, because each rank has other tokens."""
    group.divide(norm, Replicate(), Replicate())
    module: Any = norm
    module.forward = lambda x: norm.normalise(x, _local(norm.weight, Partial()), _local(norm.bias, Partial()))


def _local(parameter: Any, gradient: Placement | None = None) -> Any:
    """Return this rank's part. `gradient`: placement of its gradient, if it differs from the parameter's."""
    if parameter is None:
        return None
    return parameter.to_local(grad_placements=None if gradient is None else [gradient])


def _look_up(embedding: nn.Embedding, group: TensorGroup, tokens_bt: Tensor) -> Tensor:
    """Look up this rank's rows, zeros for those of other ranks, and sum over ranks."""
    rows_vd, start = divided_rows(embedding.weight)
    places_bt = tokens_bt - start
    is_here_bt = (places_bt >= 0) & (places_bt < rows_vd.size(0))
    x_btd = F.embedding(places_bt.where(is_here_bt, 0), rows_vd) * is_here_bt[..., None]
    return group.leave(x_btd)


def logits(hidden_btd: Tensor, unembedding_vd: Any) -> Tensor:
    """Compute logits, [b, t, v], gathered from the ranks."""
    part = linear(hidden_btd, unembedding_vd.to_local())
    shape = torch.Size((*hidden_btd.shape[:-1], unembedding_vd.size(0)))
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        part, unembedding_vd.device_mesh, [Shard(len(shape) - 1)], shape=shape, stride=stride
    ).full_tensor()


def divided_rows(weight_vd: Any) -> tuple[Tensor, int]:
    """Return this rank's rows of a matrix that a tensor group divides, and the index of the first."""
    _, offset = compute_local_shape_and_global_offset(weight_vd.shape, weight_vd.device_mesh, weight_vd.placements)
    return weight_vd.to_local(), offset[0]


class Vocabulary(NamedTuple):
    """A rank's part of the vocabulary, of which the loss has logits."""

    mesh: DeviceMesh
    start: int
    num_rows: int
    """Tokens of each rank; the last one may have fewer."""

    def normalise(self, logits_cv: Tensor, labels_c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Turn this rank's logits of c tokens into log-probabilities in place. Ranks exchange two numbers per token.

        Returns the labels' log-probabilities, and their columns here with 1.0 for each; 0 and 0.0 for other ranks'.
        """
        columns_c = labels_c - self.start
        is_here_c = ((columns_c >= 0) & (columns_c < logits_cv.size(1))).float()
        columns_c = columns_c * is_here_c.long()
        label_logits_c = logits_cv[torch.arange(len(columns_c), device=columns_c.device), columns_c] * is_here_c
        known_2c = torch.stack([logits_cv.logsumexp(dim=-1), label_logits_c])
        known_r2c = all_gather(known_2c, self.mesh.get_group().group_name, self.mesh.size())
        total_c = known_r2c[:, 0].logsumexp(dim=0)
        logits_cv -= total_c[:, None]
        return known_r2c[:, 1].sum(dim=0) - total_c, columns_c, is_here_c


def divide_vocabulary(unembedding_vd: Any) -> tuple[Tensor, Vocabulary]:
    """Return this rank's rows of the output embedding, and its part of the vocabulary."""
    mesh = unembedding_vd.device_mesh
    num_rows = -(-unembedding_vd.size(0) // mesh.size())
    rows_vd, start = divided_rows(unembedding_vd)
    return rows_vd, Vocabulary(mesh, start, num_rows)


# Functional collectives: DTensor and the compiler know them, and they wait only when their result is needed.
exchange = torch.ops._c10d_functional


def all_gather(x: Tensor, group: str, degree: int) -> Tensor:
    """Gather a tensor from the `degree` ranks of a group. Returns [degree, ...]."""
    gathered = exchange.all_gather_into_tensor(x.contiguous(), degree, group)
    return exchange.wait_tensor(gathered).view(degree, *x.shape)


def _keep(x: Tensor, group: str, degree: int) -> Tensor:
    return x.view_as(x)


def _all_reduce(x: Tensor, group: str, degree: int) -> Tensor:
    return exchange.wait_tensor(exchange.all_reduce(x.contiguous(), "sum", group))


def _gather_slices(x_btd: Tensor, group: str, degree: int) -> Tensor:
    """Gather the ranks' slices of each sequence, in order."""
    return all_gather(x_btd, group, degree).transpose(0, 1).flatten(1, 2)


def _reduce_scatter_slices(x_btd: Tensor, group: str, degree: int) -> Tensor:
    """Return this rank's slice of each sequence, summed over ranks (reduce-scatter)."""
    slices = x_btd.unflatten(1, (degree, -1)).transpose(0, 1).flatten(0, 1).contiguous()
    return exchange.wait_tensor(exchange.reduce_scatter_tensor(slices, "sum", degree, group))


Operation = Callable[[Tensor, str, int], Tensor]


def mirrored(there: Operation, back: Operation) -> type[torch.autograd.Function]:
    """Make an autograd function that applies one operation forward and another to the gradient."""

    class Exchanged(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, group, degree):
            ctx.ranks = group, degree
            return there(x, group, degree)

        @staticmethod
        def backward(ctx, grad):  # type: ignore[override]
            return back(grad, *ctx.ranks), None, None

    return Exchanged


_Sum, _SumGradient = mirrored(_all_reduce, _keep), mirrored(_keep, _all_reduce)
_Gather = mirrored(_gather_slices, _reduce_scatter_slices)
_Scatter = mirrored(_reduce_scatter_slices, _gather_slices)


def _drop_apart(attention: nn.Module, tensor_rank: int) -> None:
    """Seed the dropout of attention by rank, because ranks have different heads. All other dropout is the same."""
    forward = attention.forward

    def seeded(*args: Any) -> Any:
        if not attention.training:
            return forward(*args)
        seed = int(torch.randint(1 << 48, ()))  # the same on all ranks
        with torch.random.fork_rng(devices=[args[0].device] if args[0].is_cuda else []):
            torch.manual_seed(seed + tensor_rank)
            return forward(*args)

    attention.forward = seeded
