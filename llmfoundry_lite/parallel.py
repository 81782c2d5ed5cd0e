"""Model in, parallel model out: meshes, tensor parallelism, FSDP2, precision, activation checkpointing, compilation.

Knows nothing of training. Composer is handed a model that is already parallel and is told fp32: the policy
below does all the casting, on CPUs too, where Composer refuses bf16.
"""

import logging
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from llmfoundry_lite.config.schema import FSDPConfig, ModelConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models.initialise import initialise_weights
from llmfoundry_lite.models.mpt import MPT


@dataclass(frozen=True, slots=True, kw_only=True)
class Precision:
    """The dtypes of one way to compute. Master weights and optimizer state are fp32 in all of them; so is the loss."""

    parameters: torch.dtype
    """Of the gathered parameters, and with them of activations and the residual stream."""
    reduction: torch.dtype
    """In which gradients are summed over devices."""
    autocast: torch.dtype | None = None
    """Matrix products are cast to this while parameters and residual stream stay fp32."""
    loss_scaling: bool = False
    """fp16 gradients underflow unless the loss is scaled."""


FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16

PRECISIONS = {
    ("fp32", "PURE"): Precision(parameters=FP32, reduction=FP32),
    ("fp32", "DEFAULT"): Precision(parameters=FP32, reduction=FP32),
    ("fp32", "FULL"): Precision(parameters=FP32, reduction=FP32),
    ("amp_bf16", "PURE"): Precision(parameters=BF16, reduction=BF16),
    ("amp_bf16", "DEFAULT"): Precision(parameters=BF16, reduction=FP32),
    ("amp_bf16", "FULL"): Precision(parameters=FP32, reduction=FP32, autocast=BF16),
    ("amp_fp16", "PURE"): Precision(parameters=FP16, reduction=FP16, loss_scaling=True),
    ("amp_fp16", "DEFAULT"): Precision(parameters=FP16, reduction=FP32, loss_scaling=True),
    ("amp_fp16", "FULL"): Precision(parameters=FP32, reduction=FP32, autocast=FP16, loss_scaling=True),
}
"""`precision` x `fsdp_config.mixed_precision`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DataRanks:
    """The ranks as the data has them. Tensor parallelism divides each layer among neighbouring ranks, which then see
    the same samples: wherever samples and tokens are shared out or added up, such a group counts as one."""

    rank: int
    """Of this process's group."""
    size: int
    """Number of groups, each with its share of the global batch."""
    speaks: bool
    """One process of each group counts what the group has seen."""


def data_ranks(tensor_parallel_degree: int) -> DataRanks:
    """Of the process group as it stands; a process alone is one."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    group, place_in_group = divmod(rank, tensor_parallel_degree)
    return DataRanks(rank=group, size=world_size // tensor_parallel_degree, speaks=place_in_group == 0)


def build_mesh(
    fsdp: FSDPConfig, device_type: str, world_size: int, local_world_size: int, tensor_parallel_degree: int = 1
) -> DeviceMesh:
    """One dimension, `shard`; or two, `replicate` x `shard`, for HYBRID_SHARD and NO_SHARD. Tensor parallelism adds a
    last one, `tensor`: neighbouring ranks, because they exchange the most.

    Raises ConfigError when the devices cannot be divided that way.
    """
    num_groups = world_size // tensor_parallel_degree
    shape, names = (num_groups,), ("shard",)
    if fsdp.sharding_strategy in ("NO_SHARD", "HYBRID_SHARD"):
        shard_degree = 1
        if fsdp.sharding_strategy == "HYBRID_SHARD":
            in_node = max(1, local_world_size // tensor_parallel_degree)
            shard_degree = fsdp.data_parallel_shard_degree or in_node
        if num_groups % shard_degree:
            divided = f" / {tensor_parallel_degree} (tp_config)" if tensor_parallel_degree > 1 else ""
            raise ConfigError(
                f"fsdp_config.data_parallel_shard_degree: {shard_degree} does not divide the {world_size}{divided} "
                "devices of this launch"
            )
        shape, names = (num_groups // shard_degree, shard_degree), ("replicate", "shard")
    if tensor_parallel_degree > 1:
        shape, names = (*shape, tensor_parallel_degree), (*names, "tensor")
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def build_parallel_model(
    config: ModelConfig,
    fsdp: FSDPConfig,
    precision: Precision,
    mesh: DeviceMesh,
    seed: int,
    compile_config: dict[str, Any] | None = None,
    attn_impl: str = "sdpa",
) -> MPT:
    """An initialised, sharded MPT on this rank's device; no rank ever holds more of it than its share.

    Raises ConfigError for a compiler that torch does not know.
    """
    backend = (compile_config or {}).get("backend", "inductor")
    if backend not in torch.compiler.list_backends(exclude_tags=()):
        common = ", ".join(torch.compiler.list_backends())
        raise ConfigError(f"compile_config.backend: {backend!r} given, expected one of {common}")
    with torch.device("meta"):
        model = MPT(config, attn_impl)
    shard_model(model, fsdp, precision, mesh, compile_config)
    on_device = mesh.device_type == "cuda" and not fsdp.offload_optimizer
    device = torch.device("cuda", torch.cuda.current_device()) if on_device else torch.device("cpu")
    model.to_empty(device=device)
    initialise_weights(model, seed)
    return model


def shard_model(
    model: MPT,
    fsdp: FSDPConfig,
    precision: Precision,
    mesh: DeviceMesh,
    compile_config: dict[str, Any] | None = None,
) -> None:
    """Divide, checkpoint, compile and shard each block, then shard the rest (embeddings and last norm), in place."""
    if mesh.size() == 1 and compile_config is None and not fsdp.offload_optimizer:
        prepare_for_one_device(model, fsdp, precision)
        return
    data_mesh = whole_mesh = mesh
    if "tensor" in (mesh.mesh_dim_names or ()):
        data_mesh, whole_mesh = _without_tensor(mesh), _with_tensor_as_shard(mesh)
        _divide_layers(model, mesh["tensor"])
    policy = MixedPrecisionPolicy(param_dtype=precision.parameters, reduce_dtype=precision.reduction)
    is_offloaded = fsdp.offload_optimizer and mesh.device_type == "cuda"
    shard = partial(
        fully_shard, mp_policy=policy, offload_policy=CPUOffloadPolicy() if is_offloaded else OffloadPolicy()
    )
    # SHARD_GRAD_OP keeps parameters whole between forward and backward: more memory, one gather fewer.
    reshard = fsdp.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD")
    for block in model.transformer.blocks:
        if compile_config is not None and data_mesh is not mesh:
            # torch 2.13 cannot compile the recomputation of a divided layer; but a compiled one can be recomputed.
            block.forward = torch.compile(block.forward, **compile_config)
        if fsdp.activation_checkpointing:
            _checkpoint_activations(block, fsdp)
        if compile_config is not None and data_mesh is mesh:
            block.compile(**compile_config)
        shard(block, mesh=data_mesh, reshard_after_forward=reshard)
    shard(model, mesh=whole_mesh, reshard_after_forward=False)


def prepare_for_one_device(model: MPT, fsdp: FSDPConfig, precision: Precision) -> None:
    """The same without FSDP, which copies everything twice to share it with nobody.

    Each block casts its parameters when it runs, and autograd casts their gradients back; in fp32 there is nothing to
    do. A compiled block stays with FSDP, since what is done here to its parameters cannot be compiled.
    """
    inside = {module for block in model.transformer.blocks for module in block.modules()}
    outside = [module for module in model.modules() if module not in inside]
    if precision.parameters != torch.float32:
        for block in model.transformer.blocks:
            _compute_in(precision.parameters, block, block.modules())
        _compute_in(precision.parameters, model, outside)
    if fsdp.activation_checkpointing:
        for block in model.transformer.blocks:
            _checkpoint_activations(block, fsdp)


def _compute_in(dtype: torch.dtype, module: nn.Module, owners: Iterable[nn.Module]) -> None:
    """Replace `module.forward` by one in which the parameters of `owners` are copies in another type."""
    forward = module.forward
    places = [(owner, name) for owner in owners for name, p in owner._parameters.items() if p is not None]

    def cast_forward(*args: Any, **kwargs: Any) -> Any:
        masters = [owner._parameters[name] for owner, name in places]
        try:
            for (owner, name), master in zip(places, masters, strict=True):
                owner._parameters[name] = cast(Any, master).to(dtype)
            return forward(*args, **kwargs)
        finally:
            for (owner, name), master in zip(places, masters, strict=True):
                owner._parameters[name] = master

    module.forward = cast_forward


def _without_tensor(mesh: DeviceMesh) -> DeviceMesh:
    names = mesh.mesh_dim_names
    assert names is not None
    return mesh[names[:-1]]


def _with_tensor_as_shard(mesh: DeviceMesh) -> DeviceMesh:
    """For what is not divided by layer: a tensor group's ranks compute the same gradient of it, and the mean of equal
    numbers is that number; so they may share it out, and each keeps that much less."""
    *data_sizes, tensor_size = mesh.shape
    names = mesh.mesh_dim_names
    assert names is not None
    return init_device_mesh(
        mesh.device_type, (*data_sizes[:-1], data_sizes[-1] * tensor_size), mesh_dim_names=names[:-1]
    )


def _divide_layers(model: MPT, tensor_mesh: DeviceMesh) -> None:
    """Shoeybi et al. 2019, "Megatron-LM": each rank has some heads and some of the feed-forward layer's width.

    One sum over ranks for each attention and feed-forward layer, in the forward pass of its last matrix and in the
    backward pass of its input. Norms, embeddings and the loss are computed by every rank.
    """
    # Whole matrices are gathered for an export alone; that it takes two steps, torch would warn of on every rank.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    rank, degree = tensor_mesh.get_local_rank(), tensor_mesh.size()
    transformer = model.transformer
    if transformer.slopes is not None:
        num_heads = len(transformer.slopes) // degree
        transformer.slopes = transformer.slopes[rank * num_heads : (rank + 1) * num_heads]
    for block in transformer.blocks:
        # The input is made a tensor of all ranks before the first matrices, or each of them would sum its gradient.
        whole = Replicate()
        plan: dict[str, ParallelStyle] = {
            "attn": PrepareModuleInput(
                input_layouts=(whole, None, None, None), desired_input_layouts=(whole, None, None, None)
            ),
            "ffn": PrepareModuleInput(input_layouts=(whole,), desired_input_layouts=(whole,)),
            **{f"attn.{name}": ColwiseParallel() for name in ("Wq", "Wk", "Wv")},
            **{f"ffn.{name}": ColwiseParallel() for name in ("up_proj", "gate_proj") if hasattr(block.ffn, name)},
            "attn.out_proj": RowwiseParallel(),
            "ffn.down_proj": RowwiseParallel(),
        }
        if hasattr(block.attn, "q_ln"):  # one norm for all heads, which are the third dimension
            over_heads = {"sequence_dim": 2, "use_local_output": True}
            plan |= {f"attn.{name}": SequenceParallel(**over_heads) for name in ("q_ln", "k_ln")}
        parallelize_module(block, tensor_mesh, plan)
        if model.config.attn_config.attn_pdrop:
            _drop_apart(cast(nn.Module, block.attn), rank)


def _drop_apart(attention: nn.Module, tensor_rank: int) -> None:
    """Dropout is the same on all ranks of a tensor group, as the residual stream is; but other heads drop others."""
    forward = attention.forward

    def seeded(*args: Any) -> Any:
        if not attention.training:
            return forward(*args)
        seed = int(torch.randint(1 << 48, ()))  # everywhere the same
        with torch.random.fork_rng(devices=[args[0].device] if args[0].is_cuda else []):
            torch.manual_seed(seed + tensor_rank)
            return forward(*args)

    attention.forward = seeded


def _checkpoint_activations(block: nn.Module, fsdp: FSDPConfig) -> None:
    """Recompute the block in backward. Replacing `forward` rather than wrapping keeps parameter names as they are."""
    forward = block.forward
    options: dict[str, Any] = {"use_reentrant": fsdp.activation_checkpointing_reentrant}
    if fsdp.activation_checkpointing == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)

    def checkpointed(*args: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args)
        with torch.autograd.graph.save_on_cpu() if fsdp.activation_cpu_offload else nullcontext():
            return checkpoint(forward, *args, **options)

    block.forward = checkpointed


def _keep_products(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Keep what matrix units computed, recompute what memory bandwidth did: norms, activations, rotations."""
    name = operation.__name__.partition(".")[0]
    is_product = name in ("mm", "addmm", "bmm", "product") or "attention" in name
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE
