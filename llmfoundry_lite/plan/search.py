"""Which way of dividing the devices trains a run fastest: every layout tried, each rejected one with its reason."""

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from llmfoundry_lite.checkpoint.intervals import choose_save_interval
from llmfoundry_lite.config.layout import Layout, divisors
from llmfoundry_lite.config.schema import PipelineConfig, SaveInterval, TensorParallelConfig, TrainConfig
from llmfoundry_lite.config.stages import takes_microbatches
from llmfoundry_lite.hardware import GIB, Accelerator
from llmfoundry_lite.plan.cost import save_seconds
from llmfoundry_lite.plan.memory import MemoryEstimate, estimate_training_memory
from llmfoundry_lite.plan.network import Node
from llmfoundry_lite.plan.step import FP32_BYTES, Shares, StepTime, Work, step_time

CONTEXT_BYTES = 1 * GIB
"""The device's context, libraries and communication buffers, which `plan.memory` leaves out."""
CHECKPOINTING = (False, "selective", True)
MOST_DEVICES = 65_536
AS_FAST = 0.01
"""Times that differ by less are alike: the model of a step is not that exact."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Candidate:
    layout: Layout
    strategy: str
    """fsdp_config.sharding_strategy"""
    work: Work
    memory: MemoryEstimate
    time: StepTime
    mfu: float

    def overlay(self) -> dict[str, Any]:
        """The keys that make a run compute so."""
        fsdp: dict[str, Any] = {"sharding_strategy": self.strategy}
        if self.strategy == "HYBRID_SHARD":
            fsdp["data_parallel_shard_degree"] = self.layout.shard
        fsdp["activation_checkpointing"] = self.work.activation_checkpointing
        keys: dict[str, Any] = {
            "overlay": "hardware",
            "device_train_microbatch_size": self.work.microbatch_size,
            "fsdp_config": fsdp,
        }
        if self.layout.tensor > 1:
            tensor = {"tensor_parallel_degree": self.layout.tensor}
            keys["tp_config"] = tensor | ({"sequence_parallel": True} if self.work.sequence_parallel else {})
        if self.layout.context > 1:
            keys["cp_config"] = dataclasses.asdict(self.work.context)
        if self.layout.pipeline > 1:
            pipeline = {"pipeline_parallel_degree": self.layout.pipeline, "schedule": self.work.schedule}
            keys["pp_config"] = pipeline | {"virtual_stages": self.work.virtual_stages}
        return keys


@dataclass(kw_only=True, slots=True, frozen=True)
class Rejected:
    layout: Layout
    strategy: str
    reason: str


def search_layouts(
    config: TrainConfig,
    num_devices: int,
    accelerator: Accelerator,
    node: Node,
    shares: Shares | None = None,
    pipeline: PipelineConfig | None = None,
) -> tuple[list[Candidate], list[Rejected]]:
    """The layouts that fit, the fastest first, each with its best microbatch and checkpointing; and those that do not.

    First of all stands the one that takes the least memory among those that are as fast as the fastest.
    Raises ConfigError where the hardware has no peak for the run's precision.
    """
    candidates: list[Candidate] = []
    rejected: list[Rejected] = []
    pipeline = pipeline or config.pipeline
    for layout, strategy in layouts_of(
        num_devices, node.num_devices, pipeline.pipeline_parallel_degree, config.context.context_parallel_degree
    ):
        found = _best(config, layout, strategy, accelerator, node, shares, pipeline)
        if isinstance(found, str):
            rejected.append(Rejected(layout=layout, strategy=strategy, reason=found))
        else:
            candidates.append(found)
    candidates.sort(key=lambda c: (c.time.seconds, c.layout.tensor))
    if candidates:
        best = min(_as_fast_as(candidates), key=lambda c: c.memory.total_bytes)
        candidates.remove(best)
        candidates.insert(0, best)
    return candidates, rejected


def smallest_that_fits(
    config: TrainConfig, num_devices: int, accelerator: Accelerator, node: Node, shares: Shares | None = None
) -> int | None:
    """The first of twice, four times ... so many devices that some layout fits; None up to 65,536."""
    while (num_devices := 2 * num_devices) <= MOST_DEVICES:
        if search_layouts(config, num_devices, accelerator, node, shares)[0]:
            return num_devices
    return None


def layouts_of(
    num_devices: int, node_size: int, num_stages: int = 1, num_parts: int = 1
) -> Iterator[tuple[Layout, str]]:
    """Every way of dividing so many devices: stages x copies x shards x parts of a sample x parts of a layer.

    Tensor parallelism stays within a node. A copy of the model takes whole nodes, or a part of one that divides it.
    """
    node_size = min(node_size, num_devices)
    num_groups = num_devices // (num_stages * num_parts)
    if num_devices % (num_stages * num_parts):
        return
    for tensor in range(1, node_size + 1):
        if num_groups % tensor or node_size % tensor:
            continue
        num_data_ranks = num_groups // tensor
        for shard in range(1, num_data_ranks + 1):
            spanned = shard * num_parts * tensor
            if num_data_ranks % shard or (spanned % node_size and node_size % spanned):
                continue
            replicate = num_data_ranks // shard
            strategy = "HYBRID_SHARD" if replicate > 1 else "FULL_SHARD"
            layout = Layout(
                pipeline=num_stages,
                replicate=replicate,
                shard=shard,
                context=num_parts,
                tensor=tensor,
                node_size=node_size,
            )
            if shard == 1:
                yield dataclasses.replace(layout, has_whole_copies=True), "NO_SHARD"
            if shard * num_parts > 1:
                yield layout, strategy


def usable_bytes(accelerator: Accelerator) -> int:
    return accelerator.free_bytes - CONTEXT_BYTES


def _best(
    config: TrainConfig,
    layout: Layout,
    strategy: str,
    accelerator: Accelerator,
    node: Node,
    shares: Shares | None,
    pipeline: PipelineConfig,
) -> Candidate | str:
    """The fastest microbatch and checkpointing of a layout, or why there is none."""
    reason = _refuse(config, layout, pipeline)
    if reason:
        return reason
    # Divided streams take less memory and no more time.
    tensor = TensorParallelConfig(
        tensor_parallel_degree=layout.tensor,
        sequence_parallel=config.max_seq_len % (layout.context * layout.tensor) == 0,
    )
    config = dataclasses.replace(config, pp_config=pipeline, tp_config=tensor)
    device_batch_size = config.global_train_batch_size // layout.num_data_ranks
    limit = usable_bytes(accelerator)
    fitting: list[Candidate] = []
    least: MemoryEstimate | None = None
    for checkpointing in CHECKPOINTING:
        for microbatch_size in divisors(device_batch_size):  # what `auto` tries, too
            work = work_of(config, strategy, microbatch_size, checkpointing)
            work = dataclasses.replace(work, schedule=pipeline.schedule, virtual_stages=pipeline.num_runs)
            if layout.pipeline > 1 and not takes_microbatches(pipeline, device_batch_size // microbatch_size):
                continue
            if layout.pipeline > 1 and pipeline.splits_backward and checkpointing:
                continue
            memory = memory_of(config, layout, strategy, work)
            if least is None or memory.total_bytes < least.total_bytes:
                least = memory
            if memory.total_bytes > limit:
                continue
            time = step_time(work, layout, accelerator, node, shares)
            every = batches_between_saves(config, time.seconds, save_seconds(memory))
            time = dataclasses.replace(time, saves=save_seconds(memory) / every)
            mfu = time.mfu(work, accelerator, layout.world_size)
            fitting.append(Candidate(layout=layout, strategy=strategy, work=work, memory=memory, time=time, mfu=mfu))
    if least is None:
        return f"{pipeline.schedule}: no number of microbatches suits {layout.pipeline} stages"
    if fitting:
        return max(_as_fast_as(fitting), key=lambda c: c.work.microbatch_size)
    return (
        f"needs {least.total_bytes / GIB:.1f} GiB of {limit / GIB:.1f}, with one sample at a time and every block "
        "computed again"
    )


def _as_fast_as(candidates: list[Candidate]) -> list[Candidate]:
    """Those that are as fast as the fastest."""
    least = min(c.time.seconds for c in candidates)
    return [c for c in candidates if c.time.seconds <= (1 + AS_FAST) * least]


def _refuse(config: TrainConfig, layout: Layout, pipeline: PipelineConfig) -> str:
    """Why the layout does not divide this run; empty where it does."""
    model = config.model
    num_groups = layout.tensor * (layout.context if config.context.kind == "heads" else 1)
    for name, number in (("heads", model.n_heads), ("key and value heads", model.num_kv_heads)):
        if number % num_groups:
            return f"{number} {name} do not divide over {num_groups} devices"
    if model.ffn_dim % layout.tensor:
        return f"{model.ffn_dim} hidden units do not divide over {layout.tensor} devices"
    if layout.pipeline * pipeline.num_runs > model.n_layers:
        return f"{layout.pipeline * pipeline.num_runs} stages are more than {model.n_layers} blocks"
    if config.global_train_batch_size % layout.num_data_ranks:
        return f"{config.global_train_batch_size} samples do not divide over {layout.num_data_ranks} data ranks"
    return ""


def work_of(config: TrainConfig, strategy: str, microbatch_size: int, checkpointing: bool | str) -> Work:
    dtype = config.precision.removeprefix("amp_")
    is_pure = config.sharding.mixed_precision == "PURE" and dtype in ("bf16", "fp16")
    return Work(
        model=config.model,
        seq_len=config.max_seq_len,
        global_batch_size=config.global_train_batch_size,
        microbatch_size=microbatch_size,
        dtype=dtype,
        reduction_bytes=2 if is_pure else FP32_BYTES,
        activation_checkpointing=checkpointing,
        reshard_after_forward=strategy in ("FULL_SHARD", "HYBRID_SHARD"),
        is_sharded=strategy not in ("NO_SHARD", "ZERO_1"),
        shares_optimizer=strategy == "ZERO_1",
        sequence_parallel=config.sequence_parallel,
        context=config.context,
        num_workers=config.train_loader.num_workers,
    )


def batches_between_saves(config: TrainConfig, step_seconds: float, save_seconds: float) -> float:
    """By the run's `save_interval`; inf where its epochs are as long as data that is not looked at."""
    interval = SaveInterval.parse(config.save_interval)
    if interval.span is None:
        return (interval.seconds or choose_save_interval(save_seconds)) / step_seconds
    samples = config.global_train_batch_size
    per_batch = {"ba": 1, "sp": samples, "tok": samples * config.max_seq_len}
    unit = interval.span.unit
    return max(1.0, interval.span.value / per_batch[unit]) if unit in per_batch else math.inf


def memory_of(config: TrainConfig, layout: Layout, strategy: str, work: Work) -> MemoryEstimate:
    """Of the fullest device."""
    fsdp = dataclasses.replace(
        config.sharding, sharding_strategy=strategy, activation_checkpointing=work.activation_checkpointing
    )
    divided = dataclasses.replace(
        config,
        device_train_microbatch_size=work.microbatch_size,
        fsdp_config=fsdp,
    )
    return estimate_training_memory(divided, layout)
