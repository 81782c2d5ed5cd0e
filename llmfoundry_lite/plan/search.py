"""Which way of dividing the devices trains a run fastest: every layout tried, each rejected one with its reason."""

import bisect
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from llmfoundry_lite.checkpoint.intervals import choose_save_interval
from llmfoundry_lite.config.check import check_together
from llmfoundry_lite.config.layout import Layout, divisors
from llmfoundry_lite.config.schema import (
    NEWTON_SCHULZ_STEPS,
    ContextParallelConfig,
    PipelineConfig,
    TensorParallelConfig,
    TrainConfig,
)
from llmfoundry_lite.config.spans import SaveInterval
from llmfoundry_lite.config.stages import takes_microbatches
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.hardware import GIB, Accelerator
from llmfoundry_lite.plan.cost import save_seconds
from llmfoundry_lite.plan.memory import estimate_training_memory
from llmfoundry_lite.plan.model_memory import MemoryEstimate
from llmfoundry_lite.plan.network import Node
from llmfoundry_lite.plan.step import FP32_BYTES, Shares, StepTime, Work, find_shares, step_time

CONTEXT_BYTES = 1 * GIB
"""The device's context, libraries and communication buffers, which `plan.memory` leaves out."""
CHECKPOINTING = (False, "selective", True)
MOST_DEVICES = 65_536
MOST_STAGES = 64
SLOW = 1.1
"""Layouts that take so much longer than the fastest are not looked at more closely."""
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

    def overlay(self, config: TrainConfig) -> dict[str, Any]:
        """The keys that make the run compute so, those among them that take back what it says itself."""
        fsdp: dict[str, Any] = {"sharding_strategy": self.strategy}
        if self.strategy == "HYBRID_SHARD":
            fsdp["data_parallel_shard_degree"] = self.layout.shard
        elif config.sharding.data_parallel_shard_degree is not None:
            fsdp["data_parallel_shard_degree"] = None
        fsdp["activation_checkpointing"] = self.work.activation_checkpointing
        unset = ("activation_checkpointing_reentrant", "activation_cpu_offload")
        fsdp |= {key: False for key in unset if getattr(config.sharding, key)}
        keys: dict[str, Any] = {
            "overlay": "hardware",
            "device_train_microbatch_size": self.work.microbatch_size,
            "fsdp_config": fsdp,
        }
        if self.layout.tensor > 1:
            tensor = {"tensor_parallel_degree": self.layout.tensor}
            is_said = self.work.sequence_parallel or config.tp_config is not None
            keys["tp_config"] = tensor | ({"sequence_parallel": self.work.sequence_parallel} if is_said else {})
        elif config.tp_config is not None:
            keys["tp_config"] = None
        if self.layout.context > 1:
            keys["cp_config"] = dataclasses.asdict(self.work.context)
        if self.layout.pipeline > 1:
            pipeline = self.work.pipeline
            keys["pp_config"] = {
                "pipeline_parallel_degree": self.layout.pipeline,
                "schedule": pipeline.schedule,
                "virtual_stages": pipeline.num_runs,
            }
            if pipeline.blocks is not None:
                keys["pp_config"]["blocks"] = list(pipeline.blocks)
            unset = ("num_microbatches", *(["blocks"] if pipeline.blocks is None else []))
            keys["pp_config"] |= {key: None for key in unset if getattr(config.pp_config, key, None) is not None}
        elif config.pipeline.pipeline_parallel_degree > 1:
            keys["pp_config"] = None
        return keys


@dataclass(kw_only=True, slots=True, frozen=True)
class Rejected:
    layout: Layout
    strategy: str
    reason: str
    needed: int = 0
    """Bytes, where memory is the reason."""
    slower: float = 0.0
    """How many times as long as the fastest it takes, where that is the reason."""


def search_layouts(
    config: TrainConfig,
    num_devices: int,
    accelerator: Accelerator,
    node: Node,
    shares: Shares | None = None,
    pipeline: PipelineConfig | None = None,
    stall_seconds: float | None = None,
) -> tuple[list[Candidate], list[Rejected]]:
    """The layouts that fit, the fastest first, each with its best microbatch and checkpointing; and those that do not.

    First of all stands the one that takes the least memory among those that are as fast as the fastest. Stages and
    parts of a sample are searched where neither `pipeline` nor the run says how many. `stall_seconds`: how long a save
    holds training up; without it, by what a device copies.
    Raises ConfigError where the hardware has no peak for the run's precision.
    """
    search = _Search(
        config, accelerator, node, shares or find_shares(accelerator), pipeline or config.pp_config, stall_seconds
    )
    rejected: list[Rejected] = []
    divided: list[_Divided] = []
    for layout, strategy in search.layouts(num_devices):
        found = search.divide(layout, strategy)
        (rejected if isinstance(found, Rejected) else divided).append(found)  # type: ignore[arg-type]
    candidates: list[Candidate] = []
    for one in sorted(divided, key=lambda one: one.least_seconds):
        found = search.best(one)
        (rejected if isinstance(found, Rejected) else candidates).append(found)  # type: ignore[arg-type]
    candidates.sort(key=lambda c: (c.time.seconds, c.layout.tensor))
    if candidates:
        best = min(_as_fast_as(candidates), key=lambda c: c.memory.total_bytes)
        candidates.remove(best)
        candidates.insert(0, best)
    return candidates, rejected


def nearest_that_fits(num_devices: int, has_layout: Callable[[int], bool]) -> int | None:
    """A number of devices that some layout fits: the first of twice, four times … so many, up to 65,536; where there is
    none, the first of half, a quarter … of the power of two below, such as a batch too small for so many calls for."""
    below = 1 << (num_devices - 1).bit_length()
    above = (num_devices << power for power in range(1, MOST_DEVICES.bit_length()))
    counts = itertools.chain((n for n in above if n <= MOST_DEVICES), (below >> n for n in range(1, 20)))
    return next((count for count in counts if count and has_layout(count)), None)


def layouts_of(
    num_devices: int, node_size: int, num_stages: Sequence[int] = (1,), num_parts: Sequence[int] = (1,)
) -> Iterator[tuple[Layout, str]]:
    """Every way of dividing so many devices: stages x copies x shards x parts of a sample x parts of a layer.

    Tensor and context parallelism stay within a node, unless the parts of a sample alone do not. A copy of the model
    takes whole nodes, or a part of one that divides it.
    """
    node_size = min(node_size, num_devices)
    for pipeline, context, tensor in itertools.product(num_stages, num_parts, divisors(node_size)):
        num_data_ranks, rest = divmod(num_devices, pipeline * context * tensor)
        if rest or (context * tensor > node_size and tensor > 1):
            continue
        for shard in divisors(num_data_ranks):
            spanned = shard * context * tensor
            if spanned % node_size and node_size % spanned:
                continue
            replicate = num_data_ranks // shard
            layout = Layout(
                pipeline=pipeline,
                replicate=replicate,
                shard=shard,
                context=context,
                tensor=tensor,
                node_size=node_size,
            )
            if shard == 1:
                copies = dataclasses.replace(layout, has_whole_copies=True)
                yield copies, "NO_SHARD"
                if replicate * context > 1:
                    yield copies, "ZERO_1"
            if shard * context > 1:
                yield layout, "HYBRID_SHARD" if replicate > 1 else "FULL_SHARD"


def usable_bytes(accelerator: Accelerator) -> int:
    return accelerator.free_bytes - CONTEXT_BYTES


class _Divided(NamedTuple):
    """A layout that a launch would not refuse."""

    config: TrainConfig
    layout: Layout
    strategy: str
    sizes: list[int]
    """Of microbatches, those that `auto` tries."""
    least_seconds: float
    """Of a step, if memory did not matter."""

    def reject(self, reason: str, **facts: Any) -> Rejected:
        return Rejected(layout=self.layout, strategy=self.strategy, reason=reason, **facts)


class _Search:
    """Of one run on one kind of device."""

    def __init__(
        self,
        config: TrainConfig,
        accelerator: Accelerator,
        node: Node,
        shares: Shares,
        pipeline: PipelineConfig | None,
        stall_seconds: float | None = None,
    ):
        self.config, self.accelerator, self.node, self.shares = config, accelerator, node, shares
        self.pipeline, self.stall_seconds = pipeline, stall_seconds
        self.fastest = math.inf
        """Seconds of the fastest so far."""
        self._configs: dict[tuple[int, int, int, str], TrainConfig | str] = {}

    def layouts(self, num_devices: int) -> Iterator[tuple[Layout, str]]:
        stages = [degree for degree in divisors(num_devices) if degree <= min(MOST_STAGES, self.config.model.n_layers)]
        if self.pipeline is not None:
            stages = [self.pipeline.pipeline_parallel_degree]
        parts = divisors(min(self.node.num_devices, num_devices))
        if self.config.cp_config is not None:
            parts = [self.config.context.context_parallel_degree]
        return layouts_of(num_devices, self.node.num_devices, stages, parts)

    def divide(self, layout: Layout, strategy: str) -> _Divided | Rejected:
        """The run, divided so; or why that cannot be."""
        key = (layout.pipeline, layout.context, layout.tensor, strategy)
        if key not in self._configs:
            self._configs[key] = self._configure(*key)
        config = self._configs[key]
        if isinstance(config, str):
            return Rejected(layout=layout, strategy=strategy, reason=config)
        samples = config.global_train_batch_size
        device_batch_size, rest = divmod(samples, layout.num_data_ranks)
        sizes = [
            size
            for size in divisors(device_batch_size)
            if layout.pipeline == 1 or takes_microbatches(config.pipeline, device_batch_size // size)
        ]
        if rest:
            reason = f"{samples} samples do not divide over {layout.num_data_ranks} data ranks"
            return Rejected(layout=layout, strategy=strategy, reason=reason)
        if not sizes:
            reason = f"{config.pipeline.schedule}: no number of microbatches suits {layout.pipeline} stages"
            return Rejected(layout=layout, strategy=strategy, reason=reason)
        # Larger microbatches gather less often; in a pipeline, smaller ones fill it sooner.
        works = [work_of(config, strategy, size, False) for size in {sizes[0], sizes[-1]}]
        least = min(self._time(work, layout).seconds for work in works)
        return _Divided(config, layout, strategy, sizes, least)

    def best(self, divided: _Divided) -> Candidate | Rejected:
        """The fastest microbatch and checkpointing of a layout, or why there is none."""
        config, layout, strategy, sizes, least = divided
        if least > SLOW * self.fastest:
            slower = least / self.fastest
            return divided.reject(
                f"takes {slower:.1f} times as long as the fastest, even with memory to spare", slower=slower
            )

        @functools.cache
        def memory(checkpointing: bool | str, size: int) -> MemoryEstimate:
            return memory_of(config, layout, strategy, work_of(config, strategy, size, checkpointing))

        @functools.cache
        def num_fitting(checkpointing: bool | str) -> int:
            """Of the sizes, from the smallest on."""
            return bisect.bisect_right(sizes, limit, key=lambda size: memory(checkpointing, size).total_bytes)

        limit = usable_bytes(self.accelerator)
        splits = layout.pipeline > 1 and config.pipeline.splits_backward
        choices = (False,) if splits else CHECKPOINTING
        if not num_fitting(choices[-1]):
            again = "" if splits else " and every block computed again"
            needed = memory(choices[-1], sizes[0]).total_bytes
            return divided.reject(
                f"needs {needed / GIB:.1f} GiB of {limit / GIB:.1f}, with one sample at a time{again}", needed=needed
            )
        works = [work_of(config, strategy, size, choice) for choice in choices for size in sizes]
        timed = sorted(((self._time(work, layout), work) for work in works), key=lambda of: of[0].seconds)
        fitting: list[Candidate] = []
        for time, work in timed:
            if fitting and time.seconds > (1 + AS_FAST) * fitting[0].time.seconds:
                break
            if sizes.index(work.microbatch_size) >= num_fitting(work.activation_checkpointing):
                continue
            needs = memory(work.activation_checkpointing, work.microbatch_size)
            stall = save_seconds(needs) if self.stall_seconds is None else self.stall_seconds
            time = dataclasses.replace(time, saves=stall / batches_between_saves(config, time.seconds, stall))
            mfu = time.mfu(work, self.accelerator, layout.world_size)
            fitting.append(Candidate(layout=layout, strategy=strategy, work=work, memory=needs, time=time, mfu=mfu))
        best = max(_as_fast_as(fitting), key=lambda c: c.work.microbatch_size)
        self.fastest = min(self.fastest, best.time.seconds)
        return best

    def _time(self, work: Work, layout: Layout) -> StepTime:
        return step_time(work, layout, self.accelerator, self.node, self.shares)

    def _configure(self, pipeline: int, context: int, tensor: int, strategy: str) -> TrainConfig | str:
        """Or the words in which a launch refuses it."""
        config, model = self.config, self.config.model
        stages = self.pipeline or PipelineConfig(pipeline_parallel_degree=pipeline)
        parts = config.cp_config or ContextParallelConfig(
            context_parallel_degree=context,
            kind="gather" if math.gcd(model.n_heads, model.num_kv_heads) % (context * tensor) else "heads",
        )
        # Divided streams take less memory and no more time.
        sequence_parallel = config.max_seq_len % (context * tensor) == 0
        divided = dataclasses.replace(
            config,
            device_train_microbatch_size=None if config.islands is None else 1,  # found later; an island must say one
            fsdp_config=dataclasses.replace(
                config.sharding,
                sharding_strategy=strategy,
                data_parallel_shard_degree=None,
                activation_checkpointing=False,
                activation_checkpointing_reentrant=False,
                activation_cpu_offload=False,
            ),
            tp_config=TensorParallelConfig(tensor_parallel_degree=tensor, sequence_parallel=sequence_parallel),
            cp_config=parts,
            pp_config=dataclasses.replace(stages, num_microbatches=None),
        )
        try:
            check_together(divided)
        except ConfigError as error:
            return str(error).removeprefix("configuration: ")
        return divided


def _as_fast_as(candidates: list[Candidate]) -> list[Candidate]:
    """Those that are as fast as the fastest."""
    least = min(c.time.seconds for c in candidates)
    return [c for c in candidates if c.time.seconds <= (1 + AS_FAST) * least]


def work_of(config: TrainConfig, strategy: str, microbatch_size: int, checkpointing: bool | str) -> Work:
    dtype = config.precision.removeprefix("amp_")
    is_pure = config.sharding.mixed_precision == "PURE" and dtype in ("bf16", "fp16")
    is_pipelined = config.pipeline.pipeline_parallel_degree > 1
    is_muon = config.optimizer.name == "muon"
    return Work(
        model=config.model,
        seq_len=config.max_seq_len,
        global_batch_size=config.global_train_batch_size,
        microbatch_size=microbatch_size,
        dtype=dtype,
        reduction_bytes=2 if is_pure else FP32_BYTES,
        activation_checkpointing=checkpointing,
        reshard_after_forward=strategy in ("FULL_SHARD", "HYBRID_SHARD") and not is_pipelined,
        reduces_every_microbatch=config.reduces_every_microbatch,
        is_sharded=strategy not in ("NO_SHARD", "ZERO_1"),
        shares_optimizer=strategy == "ZERO_1",
        sequence_parallel=config.sequence_parallel,
        context=config.context,
        pipeline=config.pipeline,
        newton_schulz_steps=(config.optimizer.ns_steps or NEWTON_SCHULZ_STEPS) if is_muon else 0,
        newton_schulz_dtype=config.optimizer.ns_dtype or "bf16",
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
