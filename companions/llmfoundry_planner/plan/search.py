"""Search for the layout that trains a run fastest: tries every layout, and keeps the reason for each rejected one."""

import bisect
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from llmfoundry_lite.checkpoint.save_interval import MAX_SAVE_FRACTION
from llmfoundry_lite.config.check import check_together
from llmfoundry_lite.config.layout import Layout, divisors
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.sharding_schema import ContextParallelConfig, PipelineConfig, TensorParallelConfig
from llmfoundry_lite.config.spans import Duration
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.estimate.memory import estimate_training_memory
from llmfoundry_lite.estimate.model_memory import MemoryEstimate
from llmfoundry_lite.hardware import GIB, Accelerator
from llmfoundry_planner.plan.cost import save_seconds
from llmfoundry_planner.plan.step import Hardware, StepTime, step_time

CONTEXT_BYTES = 1 * GIB
"""The device's context, libraries and communication buffers, which `plan.memory` leaves out."""
CHECKPOINTING = (False, "selective", True)
MAX_DEVICES = 65_536
MAX_STAGES = 64
SLOW = 1.1
"""A layout whose time over the fastest's is more than this is rejected without a search of its microbatch."""
AS_FAST = 0.01
"""Relative difference below which two times count as equal: the model of a step is not more exact."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Candidate:
    """A layout that fits, with its best microbatch and checkpointing."""

    layout: Layout
    config: TrainConfig
    """The run, divided so."""
    memory: MemoryEstimate
    time: StepTime
    mfu: float

    @property
    def strategy(self) -> str:
        return self.config.sharding.sharding_strategy

    @property
    def microbatch_size(self) -> int:
        assert isinstance(self.config.device_train_microbatch_size, int)
        return self.config.device_train_microbatch_size

    @property
    def recomputed(self) -> bool | str:
        return self.config.sharding.activation_checkpointing

    def overlay(self, run: TrainConfig) -> dict[str, Any]:
        """Return keys that give the run this layout, and null for the run's keys that contradict it."""
        layout, config, pipeline = self.layout, self.config, self.config.pipeline
        fsdp: dict[str, Any] = {"sharding_strategy": self.strategy}
        if self.strategy == "HYBRID_SHARD":
            fsdp["data_parallel_shard_degree"] = layout.shard
        elif run.sharding.data_parallel_shard_degree is not None:
            fsdp["data_parallel_shard_degree"] = None
        fsdp["activation_checkpointing"] = self.recomputed
        unset = ("activation_checkpointing_reentrant", "activation_cpu_offload")
        fsdp |= {key: False for key in unset if getattr(run.sharding, key)}
        keys: dict[str, Any] = {
            "overlay": "hardware",
            "device_train_microbatch_size": self.microbatch_size,
            "fsdp_config": fsdp,
        }
        if layout.tensor > 1:
            keys["tp_config"] = {"tensor_parallel_degree": layout.tensor}
            if config.sequence_parallel or run.tp_config is not None:
                keys["tp_config"]["sequence_parallel"] = config.sequence_parallel
        elif run.tp_config is not None:
            keys["tp_config"] = None
        if layout.context > 1:
            keys["cp_config"] = asdict(config.context)
        if layout.pipeline > 1:
            blocks = pipeline.blocks
            keys["pp_config"] = {
                "pipeline_parallel_degree": layout.pipeline,
                "schedule": pipeline.schedule,
                "virtual_stages": pipeline.num_runs,
                **({} if blocks is None else {"blocks": list(blocks)}),
            }
            unset = ("num_microbatches", *(["blocks"] if blocks is None else []))
            keys["pp_config"] |= {key: None for key in unset if getattr(run.pp_config, key, None) is not None}
        elif run.pipeline.pipeline_parallel_degree > 1:
            keys["pp_config"] = None
        return keys


@dataclass(kw_only=True, slots=True, frozen=True)
class Rejected:
    layout: Layout
    strategy: str
    reason: str
    needed: int = 0
    """Bytes, if memory is the reason."""
    slower: float = 0.0
    """Time over the fastest's, if that is the reason."""


def search_layouts(
    config: TrainConfig,
    num_devices: int,
    hardware: Hardware,
    pipeline: PipelineConfig | None = None,
    stall_seconds: float | None = None,
) -> tuple[list[Candidate], list[Rejected]]:
    """Return the layouts that fit, the fastest first, each with its best microbatch and checkpointing; and the rest.

    The first takes the least memory among those that are as fast as the fastest. Stages and parts of a sample are
    searched if neither `pipeline` nor the run says how many. `stall_seconds`: time that a save stalls training; by
    default, the time to copy a device's state. Raises ConfigError if the hardware has no peak for the run's precision.
    """
    pipeline = pipeline or config.pp_config
    stages = [degree for degree in divisors(num_devices) if degree <= min(MAX_STAGES, config.model.n_layers)]
    if pipeline is not None:
        stages = [pipeline.pipeline_parallel_degree]
    node_size = hardware.node.num_devices
    parts = divisors(min(node_size, num_devices))
    if config.cp_config is not None:
        parts = [config.context.context_parallel_degree]
    rejected: list[Rejected] = []
    trials: list[tuple[float, _Trial]] = []
    divide = functools.cache(functools.partial(_divide, config, pipeline))
    for layout, strategy in layouts_of(num_devices, node_size, stages, parts):
        divided = divide(layout.pipeline, layout.context, layout.tensor, strategy)
        trial = _prepare(divided, layout, strategy, hardware)
        if isinstance(trial, Rejected):
            rejected.append(trial)
        else:
            trials.append((trial.least_seconds(), trial))
    candidates: list[Candidate] = []
    for least, trial in sorted(trials, key=lambda pair: pair[0]):
        fastest = min((c.time.seconds for c in candidates), default=math.inf)
        found = trial.find_best(least, fastest, stall_seconds)
        if isinstance(found, Rejected):
            rejected.append(found)
        else:
            candidates.append(found)
    candidates.sort(key=lambda c: (c.time.seconds, c.layout.tensor))
    if candidates:
        best = min(_as_fast_as(candidates), key=lambda c: c.memory.total_bytes)
        candidates.remove(best)
        candidates.insert(0, best)
    return candidates, rejected


def _divide(
    config: TrainConfig, stages: PipelineConfig | None, pipeline: int, context: int, tensor: int, strategy: str
) -> TrainConfig | str:
    """Return the run with these degrees, or the error with which a launch refuses it."""
    model = config.model
    divided = replace(
        config,
        device_train_microbatch_size=None if config.trains_alone else "auto",  # found later; an island names its own
        fsdp_config=replace(
            config.sharding,
            sharding_strategy=strategy,
            data_parallel_shard_degree=None,
            activation_checkpointing=False,
            activation_checkpointing_reentrant=False,
            activation_cpu_offload=False,
        ),
        # Divided streams take less memory and no more time.
        tp_config=TensorParallelConfig(
            tensor_parallel_degree=tensor, sequence_parallel=config.max_seq_len % (context * tensor) == 0
        ),
        cp_config=config.cp_config
        or ContextParallelConfig(
            context_parallel_degree=context,
            kind="gather" if math.gcd(model.n_heads, model.num_kv_heads) % (context * tensor) else "heads",
        ),
        pp_config=replace(stages or PipelineConfig(pipeline_parallel_degree=pipeline), num_microbatches=None),
    )
    try:
        check_together(divided)
    except ConfigError as error:
        return str(error).removeprefix("configuration: ")
    return divided


def nearest_that_fits(num_devices: int, has_layout: Callable[[int], bool]) -> int | None:
    """Find a number of devices that some layout fits: the first of 2, 4, 8 … times `num_devices`, up to 65,536.

    If none fits, as for a small batch, find the first of half, a quarter … of the power of two below.
    """
    below = 1 << (num_devices - 1).bit_length()
    above = (num_devices << power for power in range(1, MAX_DEVICES.bit_length()))
    counts = itertools.chain((n for n in above if n <= MAX_DEVICES), (below >> n for n in range(1, 20)))
    return next((count for count in counts if count and has_layout(count)), None)


def layouts_of(
    num_devices: int, node_size: int, num_stages: Sequence[int] = (1,), num_parts: Sequence[int] = (1,)
) -> Iterator[tuple[Layout, str]]:
    """Yield every layout of the devices: stages x copies x shards x parts of a sample x parts of a layer.

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
                copies = replace(layout, has_whole_copies=True)
                yield copies, "NO_SHARD"
                if replicate * context > 1:
                    yield copies, "ZERO_1"
            if shard * context > 1:
                yield layout, "HYBRID_SHARD" if replicate > 1 else "FULL_SHARD"


def find_sizes(config: TrainConfig, device_batch_size: int) -> list[int]:
    """Return microbatch sizes, ascending, that divide a device's batch and suit the pipeline's schedule."""
    has_one_stage = config.pipeline.pipeline_parallel_degree == 1
    counts = {size: device_batch_size // size for size in divisors(device_batch_size)}
    return [size for size, count in counts.items() if has_one_stage or config.pipeline.takes_microbatches(count)]


def usable_bytes(accelerator: Accelerator) -> int:
    return accelerator.free_bytes - CONTEXT_BYTES


def _prepare(divided: TrainConfig | str, layout: Layout, strategy: str, hardware: Hardware) -> "_Trial | Rejected":
    """Return a trial of one layout, or why there is none. `divided`: as `_divide` returns it."""

    def reject(reason: str) -> Rejected:
        return Rejected(layout=layout, strategy=strategy, reason=reason)

    if isinstance(divided, str):
        return reject(divided)
    samples = divided.global_train_batch_size
    device_batch_size, rest = divmod(samples, layout.num_data_ranks)
    if rest:
        return reject(f"{samples} samples do not divide over {layout.num_data_ranks} data ranks")
    if sizes := find_sizes(divided, device_batch_size):
        return _Trial(divided, layout, strategy, hardware, sizes)
    return reject(f"{divided.pipeline.schedule}: no number of microbatches suits {layout.pipeline} stages")


@dataclass(slots=True)
class _Trial:
    """A run on one layout."""

    config: TrainConfig
    """The divided run."""
    layout: Layout
    strategy: str
    hardware: Hardware
    sizes: Sequence[int]
    """Microbatches that `auto` tries."""

    def reject(self, reason: str, **facts: Any) -> Rejected:
        return Rejected(layout=self.layout, strategy=self.strategy, reason=reason, **facts)

    def least_seconds(self) -> float:
        """Return the seconds of a step if memory did not matter."""
        # Larger microbatches gather less often; in a pipeline, smaller ones fill it sooner.
        return min(self._time(False, size).seconds for size in {self.sizes[0], self.sizes[-1]})

    def find_best(self, least: float, fastest: float, stall_seconds: float | None) -> Candidate | Rejected:
        """Return the fastest microbatch and checkpointing, or why there is none.

        `least`: this layout's least seconds. `fastest`: those of the fastest so far.
        """
        config, layout, sizes = self.config, self.layout, self.sizes
        if least > SLOW * fastest:
            slower = least / fastest
            return self.reject(
                f"takes {slower:.1f} times as long as the fastest, even with memory to spare", slower=slower
            )
        limit = usable_bytes(self.hardware.accelerator)

        @functools.cache
        def memory(checkpointing: bool | str, size: int) -> MemoryEstimate:
            return estimate_training_memory(self._sized(checkpointing, size), layout)

        @functools.cache
        def num_fitting(checkpointing: bool | str) -> int:
            """Count sizes that fit, from the smallest on."""
            return bisect.bisect_right(sizes, limit, key=lambda size: memory(checkpointing, size).total_bytes)

        splits = layout.pipeline > 1 and config.pipeline.splits_backward
        choices = (False,) if splits else CHECKPOINTING
        if not num_fitting(choices[-1]):
            again = "" if splits else " and every block computed again"
            needed = memory(choices[-1], sizes[0]).total_bytes
            return self.reject(
                f"needs {needed / GIB:.1f} GiB of {limit / GIB:.1f}, with one sample at a time{again}", needed=needed
            )
        times = {(choice, size): self._time(choice, size) for choice in choices for size in sizes}
        fitting: list[Candidate] = []
        for (choice, size), time in sorted(times.items(), key=lambda item: item[1].seconds):
            if fitting and time.seconds > (1 + AS_FAST) * fitting[0].time.seconds:
                break
            if sizes.index(size) >= num_fitting(choice):
                continue
            needs = memory(choice, size)
            stall = save_seconds(needs) if stall_seconds is None else stall_seconds
            time = replace(time, saves=stall / batches_between_saves(config, time.seconds, stall))
            mfu = time.mfu(config, layout, self.hardware.accelerator)
            found = self._sized(choice, size)
            fitting.append(Candidate(layout=layout, config=found, memory=needs, time=time, mfu=mfu))
        return max(_as_fast_as(fitting), key=lambda c: c.microbatch_size)

    def _sized(self, checkpointing: bool | str, size: int) -> TrainConfig:
        fsdp = replace(self.config.sharding, activation_checkpointing=checkpointing)
        return replace(self.config, device_train_microbatch_size=size, fsdp_config=fsdp)

    def _time(self, checkpointing: bool | str, size: int) -> StepTime:
        return step_time(self._sized(checkpointing, size), self.layout, self.hardware)


def _as_fast_as(candidates: list[Candidate]) -> list[Candidate]:
    """Return those that are as fast as the fastest."""
    least = min(c.time.seconds for c in candidates)
    return [c for c in candidates if c.time.seconds <= (1 + AS_FAST) * least]


def batches_between_saves(config: TrainConfig, step_seconds: float, save_seconds: float) -> float:
    """Return batches of the run's `save_interval`; inf for epochs, whose length the data say."""
    interval = config.save_interval
    if interval.span is None:
        return (interval.seconds or save_seconds / MAX_SAVE_FRACTION) / step_seconds
    num_tokens = count_tokens(interval.span, config)
    per_batch = config.global_train_batch_size * config.max_seq_len
    return math.inf if num_tokens is None else max(1.0, num_tokens / per_batch)


def count_tokens(span: Duration, config: TrainConfig) -> float | None:
    """Count a span's tokens; None for epochs, whose length the data say."""
    per_sample = config.max_seq_len
    each = {"ba": config.global_train_batch_size * per_sample, "tok": 1, "sp": per_sample}
    return span.value * each[span.unit] if span.unit in each else None
