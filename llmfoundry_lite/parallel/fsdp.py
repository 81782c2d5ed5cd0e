"""Build a parallel model: FSDP2, activation checkpointing and compilation, block by block.

`one_device.py` takes the place of FSDP2 on one device, and a companion divides layers for tensor parallelism. Composer
gets a model that is already parallel, and fp32 as its precision: FSDP2's policy casts instead, also on CPUs, where
Composer refuses bf16.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from llmfoundry_lite import companions
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.sharding_schema import FSDPConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models.initialise import initialise_weights
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.models.own_parts import refuse_random_layers
from llmfoundry_lite.parallel.exact import ExactSums, round_embedding_gradient
from llmfoundry_lite.parallel.mesh import dimensions_of, mesh_of_stage
from llmfoundry_lite.parallel.one_device import prepare_for_one_device
from llmfoundry_lite.parallel.precision import Precision
from llmfoundry_lite.parallel.recompute import checkpoint_activations

Model = TypeVar("Model", bound=MPT)


def build_parallel_model(
    config: ModelConfig,
    fsdp: FSDPConfig,
    precision: Precision,
    mesh: DeviceMesh,
    seed: int,
    compile_config: dict[str, Any] | None = None,
    attn_impl: str = "sdpa",
    *,
    sequence_parallel: bool = False,
    sums: ExactSums | None = None,
    model_class: Callable[[ModelConfig, str], Model] = MPT,
) -> Model:
    """Build an initialised, sharded model on this rank's device. No rank ever holds more than its shards.

    Collective: every rank of `mesh` calls this together. `fsdp` and `precision` say how parameters are sharded and
    computed with, `seed` decides the initial weights, and `attn_impl` the implementation of attention.
    `compile_config`, `sequence_parallel` and `sums` are explained by `shard_model`. `model_class` builds the model from
    `config` and `attn_impl`; a stage of a pipeline has its own.

    Raises ConfigError for a compiler that torch does not know, and with `sums` for a part of the user's own that draws
    random numbers.
    """
    backend = (compile_config or {}).get("backend", "inductor")
    # The default always exists. It is not looked up, because listing the backends takes a second.
    if backend != "inductor" and backend not in torch.compiler.list_backends(exclude_tags=()):
        common = ", ".join(torch.compiler.list_backends())
        raise ConfigError(f"compile_config.backend: {backend!r} given, expected one of {common}")

    # On the meta device, parameters have shapes but no memory, so a model that no rank could hold can be built.
    with torch.device("meta"):
        model = model_class(config, attn_impl)
    if sums is not None:
        refuse_random_layers(model)
    shard_model(model, fsdp, precision, mesh, compile_config, sequence_parallel, sums)

    # Only now do the shards get memory: on the GPU, or on the host if FSDP2 brings them from there.
    device = torch.device("cpu")
    if mesh.device_type == "cuda" and not fsdp.offload_optimizer:
        device = torch.device("cuda", torch.cuda.current_device())
    model.to_empty(device=device)
    initialise_weights(model, seed)
    return model


def shard_model(
    model: MPT,
    fsdp: FSDPConfig,
    precision: Precision,
    mesh: DeviceMesh,
    compile_config: dict[str, Any] | None = None,
    sequence_parallel: bool = False,
    sums: ExactSums | None = None,
) -> None:
    """Make a model parallel over the ranks of `mesh`. In place. Collective: every rank calls this together.

    The layers of each block are divided among the tensor group, its activations are checkpointed, and it is compiled
    and sharded. The embeddings and the last norm are sharded together, as one unit. A model on one device keeps plain
    parameters if it can (`one_device.py`).

    compile_config: keyword arguments of `torch.compile`; None compiles nothing.
    sequence_parallel: divide the residual stream among the tensor group as well.
    sums: collects the gradients, so that they do not depend on the number of ranks; None leaves them to FSDP2.
    """
    dimensions = dimensions_of(mesh)
    is_pipeline = "pipeline" in dimensions
    is_divided = "tensor" in dimensions
    stage_mesh = mesh_of_stage(mesh)
    if sums is not None and model.config.tie_word_embeddings and hasattr(model.transformer, "wte"):
        round_embedding_gradient(model.transformer.wte)

    # On one device, use plain parameters instead of FSDP2, with three exceptions.
    # A compiler may leave a block to be recomputed eagerly, when the parameters that it sees are the fp32 ones again.
    is_recomputed_and_compiled = compile_config is not None and bool(fsdp.activation_checkpointing)
    casts_once = fsdp.plain_on_one_device and not is_pipeline and not is_recomputed_and_compiled
    can_compile = compile_config is None or casts_once
    # Exact sums round the gradient of each use of a parameter. Gradients of a copy are those of all uses, added up.
    sums_gradients_of_copies = sums is not None and precision.parameters != torch.float32
    can_be_plain = can_compile and not fsdp.offload_optimizer and not sums_gradients_of_copies
    if stage_mesh.size() == 1 and can_be_plain:
        prepare_for_one_device(model, fsdp, precision, compile_config, casts_once=casts_once)
        if sums is not None:
            sums.attach(model)
        return

    # Tensor parallelism divides the layers first. FSDP2 then shards what each rank of a tensor group has.
    data_mesh = stage_mesh
    if is_divided:
        data_mesh = mesh_of_stage(mesh, without=("tensor",))
        key = "tp_config.tensor_parallel_degree"
        divide_layers = companions.load("llmfoundry_layouts.tensor:divide_layers", key)
        divide_layers(model, mesh["tensor"], sequence_parallel)

    policy = MixedPrecisionPolicy(
        param_dtype=precision.parameters,
        reduce_dtype=torch.float64 if sums is not None else precision.reduction,
        # FSDP2 would cast every float that enters a block or a stage: angles of RoPE, slopes and biases of ALiBi, and
        # weights of rows, which stay in fp32 without FSDP2. Hidden states have the parameters' dtype already.
        cast_forward_inputs=False,
    )
    is_offloaded = fsdp.offload_optimizer and mesh.device_type == "cuda"
    offload_policy = CPUOffloadPolicy() if is_offloaded else OffloadPolicy()
    shard = partial(fully_shard, mesh=data_mesh, mp_policy=policy, offload_policy=offload_policy)

    # Shard each block, and then what is left: the embeddings and the last norm.
    # SHARD_GRAD_OP keeps parameters whole between forward and backward: more memory, one gather less. Pipelines do the
    # same: their parameters stay whole from the first backward pass on, and zero-bubble schedules, which compute the
    # gradients of weights apart, need whole parameters in autograd's graph.
    reshards_blocks = fsdp.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD") and not is_pipeline
    for block in model.transformer.blocks:
        _checkpoint_and_compile(block, fsdp, compile_config, is_divided=is_divided)
        shard(block, reshard_after_forward=reshards_blocks)
    shard(model, reshard_after_forward=False)

    fsdp_modules: list[Any] = [model, *model.transformer.blocks]  # in the order in which they run
    for module in fsdp_modules:
        if sums is not None or precision.loss_scaling:
            # Sum over ranks instead of averaging, because the size of a mean depends on their number. trainer.py has a
            # table of the factors.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        if sums is not None:
            sums.attach(module)

    if data_mesh.size() > 1:
        # FSDP2 gathers a block's parameters when the block begins. Each block also prefetches those of its successor,
        # so that the gather overlaps with computation. Backward passes prefetch by default.
        for module, successor in itertools.pairwise(fsdp_modules):
            module.set_modules_to_forward_prefetch([successor])


def _checkpoint_and_compile(
    block: nn.Module, fsdp: FSDPConfig, compile_config: dict[str, Any] | None, *, is_divided: bool
) -> None:
    """Checkpoint the activations of a block and compile it, as far as either is configured. In place."""
    # torch 2.13 cannot compile the recomputation of a block with divided layers, but can recompute a compiled one.
    compiles_first = is_divided and fsdp.activation_checkpointing is True
    if compile_config is not None and compiles_first:
        block.forward = torch.compile(block.forward, **compile_config)
    if fsdp.activation_checkpointing:
        checkpoint_activations(block, fsdp)
    if compile_config is not None and not compiles_first:
        block.compile(**compile_config)
