"""Build a parallel model: FSDP2 and compilation, on top of this folder's other kinds of parallelism.

Composer gets a model that is already parallel, and fp32 as its precision: FSDP2's policy casts, also on CPUs, where
Composer refuses bf16.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

from llmfoundry_lite import companions
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.schema import FSDPConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.models.initialise import initialise_weights
from llmfoundry_lite.models.mpt import MPT
from llmfoundry_lite.parallel.exact import ExactSums, round_tied_gradients
from llmfoundry_lite.parallel.mesh import names_of, within_stage
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
    kind: Callable[[ModelConfig, str], Model] = MPT,
) -> Model:
    """Build an initialised, sharded MPT on this rank's device. No rank ever holds more than its shards.

    Raises ConfigError for a compiler that torch does not know.
    """
    backend = (compile_config or {}).get("backend", "inductor")
    # Listing the backends takes a second; inductor always exists.
    if backend != "inductor" and backend not in torch.compiler.list_backends(exclude_tags=()):
        common = ", ".join(torch.compiler.list_backends())
        raise ConfigError(f"compile_config.backend: {backend!r} given, expected one of {common}")
    with torch.device("meta"):
        model = kind(config, attn_impl)
    shard_model(model, fsdp, precision, mesh, compile_config, sequence_parallel, sums)
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
    sequence_parallel: bool = False,
    sums: ExactSums | None = None,
) -> None:
    """Divide each block among the tensor group, checkpoint its activations, compile it and shard it; then shard the
    embeddings and the last norm. In place. Their gradients go to `sums`, if given."""
    data_mesh = within_stage(mesh)
    if sums and model.config.tie_word_embeddings and hasattr(model.transformer, "wte"):
        round_tied_gradients(model.transformer.wte)
    # Exact sums round each use's gradient by itself; a copy for the whole block would add them up before.
    sees_copies = sums is not None and precision.parameters != torch.float32
    # Eager recomputation of a compiled block would see the fp32 parameters again.
    recomputes_compiled = compile_config is not None and bool(fsdp.activation_checkpointing)
    casts_once = fsdp.plain_on_one_device and "pipeline" not in names_of(mesh) and not recomputes_compiled
    is_plain = (compile_config is None or casts_once) and not fsdp.offload_optimizer and not sees_copies
    if data_mesh.size() == 1 and is_plain:
        prepare_for_one_device(model, fsdp, precision, compile_config, casts_once=casts_once)
        if sums:
            sums.watch(model)
        return
    is_divided = "tensor" in names_of(mesh)
    if is_divided:
        data_mesh = within_stage(mesh, without=("tensor",))
        key = "tp_config.tensor_parallel_degree"
        divide_layers = companions.load("llmfoundry_layouts.tensor:divide_layers", key)
        divide_layers(model, mesh["tensor"], sequence_parallel)
    reduction = torch.float64 if sums else precision.reduction
    # FSDP2 would cast every float that enters a block or a stage: angles of RoPE, slopes and biases of ALiBi, weights
    # of rows. Without FSDP2 these stay in fp32. Hidden states have the parameters' dtype already.
    policy = MixedPrecisionPolicy(param_dtype=precision.parameters, reduce_dtype=reduction, cast_forward_inputs=False)
    is_offloaded = fsdp.offload_optimizer and mesh.device_type == "cuda"
    shard = partial(
        fully_shard, mp_policy=policy, offload_policy=CPUOffloadPolicy() if is_offloaded else OffloadPolicy()
    )
    # SHARD_GRAD_OP keeps parameters whole between forward and backward: more memory, one gather fewer. Pipelines do the
    # same: their parameters stay whole from the first backward pass on, and zero-bubble schedules, which compute the
    # gradients of weights apart, need whole parameters in autograd's graph.
    reshard = fsdp.sharding_strategy in ("FULL_SHARD", "HYBRID_SHARD") and "pipeline" not in names_of(mesh)
    # torch 2.13 cannot compile the recomputation of a whole divided layer, but can recompute a compiled one.
    compiles_first = is_divided and fsdp.activation_checkpointing is True
    for block in model.transformer.blocks:
        if compile_config is not None and compiles_first:
            block.forward = torch.compile(block.forward, **compile_config)
        if fsdp.activation_checkpointing:
            checkpoint_activations(block, fsdp)
        if compile_config is not None and not compiles_first:
            block.compile(**compile_config)
        shard(block, mesh=data_mesh, reshard_after_forward=reshard)
    shard(model, mesh=data_mesh, reshard_after_forward=False)
    modules: list[Any] = [model, *model.transformer.blocks]  # of FSDP
    for module in modules:
        if sums or precision.loss_scaling:  # no mean, whose size would depend on the ranks: see training/trainer.py
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        if sums:
            sums.watch(module)
    if data_mesh.size() > 1:
        # FSDP2 gathers a block's parameters when the block begins. Each block also prefetches its successor's, so that
        # the gather overlaps with computation. Backward passes prefetch by default.
        for module, following in itertools.pairwise(modules):
            module.set_modules_to_forward_prefetch([following])
