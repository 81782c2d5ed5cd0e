"""Search for the layout that trains a run fastest. No torch.

`search_layouts` is the entry. It lists every layout of the devices (`layouts_of`), has the run's own checks refuse
those that a launch would refuse, and for each of the others looks for the microbatch size and the activation
checkpointing that are fastest within the device's memory (`_Trial`). Layouts that do not make it are kept with the
reason. Times come from `step.py`, memory from `llmfoundry_lite.estimate`.
"""

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
"""The device's context, libraries and communication buffers, which the estimate of a run's memory leaves out."""
CHECKPOINTING = (False, "selective", True)
"""Values of `activation_checkpointing`, from the one that takes the most memory to the one that takes the least."""
MAX_DEVICES = 65_536
"""Largest number of devices that is tried for a run that does not fit."""
MAX_STAGES = 64
"""Most pipeline stages that are tried."""
SLOW = 1.1
"""A layout that takes more than this multiple of the fastest one's time is rejected, whatever its microbatch."""
AS_FAST = 0.01
"""Relative difference below which two times count as equal: the model of a step is not more exact."""


@dataclass(kw_only=True, slots=True, frozen=True)
class Candidate:
    """A layout that fits, with its best microbatch size and activation checkpointing."""

    layout: Layout
    config: TrainConfig
    """The run with the settings of this layout."""
    memory: MemoryEstimate
    time: StepTime
    mfu: float

    @property
    def strategy(self) -> str:
        """FSDP's sharding strategy, such as FULL_SHARD."""
        return self.config.sharding.sharding_strategy

    @property
    def microbatch_size(self) -> int:
        """Samples that a data rank computes at a time."""
        assert isinstance(self.config.device_train_microbatch_size, int)
        return self.config.device_train_microbatch_size

    @property
    def recomputed(self) -> bool | str:
        """Activation checkpointing: which blocks are computed again. One of CHECKPOINTING."""
        return self.config.sharding.activation_checkpointing

    def overlay(self, run: TrainConfig) -> dict[str, Any]:
        """Return the keys of a YAML that gives `run` this layout when it follows the run's own YAML.

        Keys of the run that contradict the layout are overridden by null or false. Other keys of the run that this
        layout does not need are left out.
        """
        layout = self.layout
        keys: dict[str, Any] = {
            "overlay": "hardware",
            "device_train_microbatch_size": self.microbatch_size,
            "fsdp_config": self._sharding_overlay(run),
        }

        if layout.tensor > 1:
            keys["tp_config"] = {"tensor_parallel_degree": layout.tensor}
            if self.config.sequence_parallel or run.tp_config is not None:
                keys["tp_config"]["sequence_parallel"] = self.config.sequence_parallel
        elif run.tp_config is not None:
            keys["tp_config"] = None

        if layout.context > 1:
            keys["cp_config"] = asdict(self.config.context)

        if layout.pipeline > 1:
            keys["pp_config"] = self._pipeline_overlay(run)
        elif run.pipeline.pipeline_parallel_degree > 1:
            keys["pp_config"] = None
        return keys

    def _sharding_overlay(self, run: TrainConfig) -> dict[str, Any]:
        """Return the keys of `fsdp_config` for `overlay`."""
        keys: dict[str, Any] = {"sharding_strategy": self.strategy}
        if self.strategy == "HYBRID_SHARD":
            keys["data_parallel_shard_degree"] = self.layout.shard
        elif run.sharding.data_parallel_shard_degree is not None:
            keys["data_parallel_shard_degree"] = None
        keys["activation_checkpointing"] = self.recomputed
        for key in ("activation_checkpointing_reentrant", "activation_cpu_offload"):
            if getattr(run.sharding, key):
                keys[key] = False
        return keys

    def _pipeline_overlay(self, run: TrainConfig) -> dict[str, Any]:
        """Return the keys of `pp_config` for `overlay`, for a layout of several stages."""
        pipeline = self.config.pipeline
        keys: dict[str, Any] = {
            "pipeline_parallel_degree": self.layout.pipeline,
            "schedule": pipeline.schedule,
            "virtual_stages": pipeline.num_runs,
        }
        keys_to_unset = ["num_microbatches"]
        if pipeline.blocks is None:
            keys_to_unset.append("blocks")
        else:
            keys["blocks"] = list(pipeline.blocks)
        for key in keys_to_unset:
            if getattr(run.pp_config, key, None) is not None:
                keys[key] = None
        return keys


@dataclass(kw_only=True, slots=True, frozen=True)
class Rejected:
    """A layout that was rejected, and the reason."""

    layout: Layout
    strategy: str
    reason: str
    needed: int = 0
    """Bytes that it needs, if memory is the reason; else 0."""
    slower: float = 0.0
    """Its time as a multiple of the fastest layout's, if that is the reason; else 0."""


def search_layouts(
    config: TrainConfig,
    num_devices: int,
    hardware: Hardware,
    pipeline: PipelineConfig | None = None,
    stall_seconds: float | None = None,
) -> tuple[list[Candidate], list[Rejected]]:
    """Try every layout of the devices. Return those that fit, the best one first, and those that do not.

    The first candidate takes the least memory among those that are within AS_FAST of the fastest. The others follow,
    fastest first.

    pipeline: stages to use. If it is None, those of the run, or if the run has none, every number up to MAX_STAGES.
        Context parallelism is tried in every degree in the same way unless the run has `cp_config`.
    stall_seconds: time for which a save stalls training. None: the time to copy a device's state to its host.

    Raises ConfigError if the hardware has no peak for the run's precision.
    """
    pipeline = pipeline or config.pp_config
    if pipeline is not None:
        pipeline_degrees = [pipeline.pipeline_parallel_degree]
    else:
        max_stages = min(MAX_STAGES, config.model.n_layers)
        pipeline_degrees = [degree for degree in divisors(num_devices) if degree <= max_stages]

    node_size = hardware.node.num_devices
    if config.cp_config is not None:
        context_degrees = [config.context.context_parallel_degree]
    else:
        context_degrees = divisors(min(node_size, num_devices))

    # Many layouts differ in shards and copies alone, for which the run's configuration is the same.
    configure = functools.cache(functools.partial(_configure, config, pipeline))
    rejected: list[Rejected] = []
    trials: list[tuple[float, _Trial]] = []
    for layout, strategy in layouts_of(num_devices, node_size, pipeline_degrees, context_degrees):
        configured = configure(layout.pipeline, layout.context, layout.tensor, strategy)
        trial = _prepare_trial(configured, layout, strategy, hardware)
        if isinstance(trial, Rejected):
            rejected.append(trial)
        else:
            trials.append((trial.least_seconds(), trial))

    # The most promising layouts come first, so that slow ones are rejected without a search of their microbatch.
    trials.sort(key=lambda least_seconds_and_trial: least_seconds_and_trial[0])
    candidates: list[Candidate] = []
    for least_seconds, trial in trials:
        fastest_seconds = min((candidate.time.seconds for candidate in candidates), default=math.inf)
        result = trial.find_best(least_seconds, fastest_seconds, stall_seconds)
        if isinstance(result, Rejected):
            rejected.append(result)
        else:
            candidates.append(result)

    candidates.sort(key=lambda candidate: (candidate.time.seconds, candidate.layout.tensor))
    if candidates:
        best = min(_as_fast_as_fastest(candidates), key=lambda candidate: candidate.memory.total_bytes)
        candidates.remove(best)
        candidates.insert(0, best)
    return candidates, rejected


def _configure(
    config: TrainConfig,
    pipeline: PipelineConfig | None,
    pipeline_degree: int,
    context_degree: int,
    tensor_degree: int,
    strategy: str,
) -> TrainConfig | str:
    """Return the run with these degrees and this sharding strategy, or the error with which a launch refuses it.

    pipeline: schedule and blocks of the stages; None: the default schedule.

    Microbatch size and activation checkpointing are left open, because the search finds them later.
    """
    # The search sets the microbatch size later. Islands and exact sums refuse a run without one, so they get `auto`
    # until then.
    needs_microbatch_size = config.exact_sums or not config.trains_alone
    microbatch_size = "auto" if needs_microbatch_size else None
    sharding = replace(
        config.sharding,
        sharding_strategy=strategy,
        data_parallel_shard_degree=None,
        activation_checkpointing=False,
        activation_checkpointing_reentrant=False,
        activation_cpu_offload=False,
    )

    # Sequence parallelism takes less memory and no more time, wherever the sequence can be divided.
    can_divide_sequence = config.max_seq_len % (context_degree * tensor_degree) == 0
    tensor_parallel = TensorParallelConfig(tensor_parallel_degree=tensor_degree, sequence_parallel=can_divide_sequence)

    context_parallel = config.cp_config
    if context_parallel is None:
        # Ranks exchange heads if each gets as many, and else gather all keys and values.
        num_divisible_heads = math.gcd(config.model.n_heads, config.model.num_kv_heads)
        has_even_heads = num_divisible_heads % (context_degree * tensor_degree) == 0
        context_parallel = ContextParallelConfig(
            context_parallel_degree=context_degree, kind="heads" if has_even_heads else "gather"
        )

    if pipeline is None:
        pipeline = PipelineConfig(pipeline_parallel_degree=pipeline_degree)
    configured = replace(
        config,
        device_train_microbatch_size=microbatch_size,
        fsdp_config=sharding,
        tp_config=tensor_parallel,
        cp_config=context_parallel,
        pp_config=replace(pipeline, num_microbatches=None),
    )
    try:
        check_together(configured)
    except ConfigError as error:
        return str(error).removeprefix("configuration: ")
    return configured


def nearest_that_fits(num_devices: int, has_layout: Callable[[int], bool]) -> int | None:
    """Return a number of devices for which `has_layout` is true, if it is not for `num_devices`.

    For 48 devices these are tried: 96, 192, 384 and so on up to MAX_DEVICES, because more devices have more memory, and
    then 32, 16, 8 and so on, because a small batch cannot be divided among many. Returns None if none of them fits.
    """
    count = 2 * num_devices
    while count <= MAX_DEVICES:
        if has_layout(count):
            return count
        count *= 2

    next_power_of_two = 1 << (num_devices - 1).bit_length()
    count = next_power_of_two // 2
    while count > 0:
        if has_layout(count):
            return count
        count //= 2
    return None


def layouts_of(
    num_devices: int, node_size: int, pipeline_degrees: Sequence[int] = (1,), context_degrees: Sequence[int] = (1,)
) -> Iterator[tuple[Layout, str]]:
    """Yield every layout of the devices, and the sharding strategy that goes with it.

    A layout divides the devices into stages x copies x shards x context parallel parts x tensor parallel parts. 8
    devices of one node without stages and context parallelism can be 8 shards (FULL_SHARD), 2 copies of 4 shards
    (HYBRID_SHARD), 8 copies (NO_SHARD or ZERO_1), 4 shards of tensor parallel pairs, and so on.

    Tensor and context parallel groups stay within a node, unless the context parallel group alone is larger than that.
    A copy of the model takes whole nodes, or a part of a node that divides it.
    """
    node_size = min(node_size, num_devices)
    for pipeline, context, tensor in itertools.product(pipeline_degrees, context_degrees, divisors(node_size)):
        num_data_ranks, num_left_over = divmod(num_devices, pipeline * context * tensor)
        leaves_node = context * tensor > node_size and tensor > 1
        if num_left_over or leaves_node:
            continue

        for shard in divisors(num_data_ranks):
            copy_size = shard * context * tensor
            fits_nodes = copy_size % node_size == 0 or node_size % copy_size == 0
            if not fits_nodes:
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
                whole_copies = replace(layout, has_whole_copies=True)
                yield whole_copies, "NO_SHARD"
                if replicate * context > 1:
                    yield whole_copies, "ZERO_1"
            if shard * context > 1:
                yield layout, "HYBRID_SHARD" if replicate > 1 else "FULL_SHARD"


def find_sizes(config: TrainConfig, device_batch_size: int) -> list[int]:
    """Return the microbatch sizes to try, ascending: those that divide a device's batch and suit the pipeline.

    A schedule such as `interleaved` takes certain numbers of microbatches only. The list may be empty.
    """
    sizes = divisors(device_batch_size)
    if config.pipeline.pipeline_parallel_degree == 1:
        return list(sizes)
    return [size for size in sizes if config.pipeline.takes_microbatches(device_batch_size // size)]


def usable_bytes(accelerator: Accelerator) -> int:
    """Return the bytes of a device's memory that a run can fill."""
    return accelerator.free_bytes - CONTEXT_BYTES


def _prepare_trial(
    configured: TrainConfig | str, layout: Layout, strategy: str, hardware: Hardware
) -> "_Trial | Rejected":
    """Return a trial of one layout, or the reason why it cannot be tried.

    configured: result of `_configure`, the run's configuration or an error.
    """

    def reject(reason: str) -> Rejected:
        return Rejected(layout=layout, strategy=strategy, reason=reason)

    if isinstance(configured, str):
        return reject(configured)

    num_samples = configured.global_train_batch_size
    device_batch_size, num_left_over = divmod(num_samples, layout.num_data_ranks)
    if num_left_over:
        return reject(f"{num_samples} samples do not divide over {layout.num_data_ranks} data ranks")

    sizes = find_sizes(configured, device_batch_size)
    if not sizes:
        return reject(f"{configured.pipeline.schedule}: no number of microbatches suits {layout.pipeline} stages")
    return _Trial(configured, layout, strategy, hardware, sizes)


@dataclass(slots=True)
class _Trial:
    """A run on one layout, whose microbatch size and activation checkpointing are searched."""

    config: TrainConfig
    """The run with the settings of the layout."""
    layout: Layout
    strategy: str
    hardware: Hardware
    sizes: Sequence[int]
    """Microbatch sizes to try, ascending."""

    def least_seconds(self) -> float:
        """Return the time of a step if memory did not matter, so that nothing were computed again.

        Large microbatches gather parameters less often, and small ones fill a pipeline sooner. So the fastest size is
        the smallest or the largest.
        """
        extreme_sizes = {self.sizes[0], self.sizes[-1]}
        return min(self._time(False, size).seconds for size in extreme_sizes)

    def find_best(
        self, least_seconds: float, fastest_seconds: float, stall_seconds: float | None
    ) -> Candidate | Rejected:
        """Return the fastest microbatch size and activation checkpointing that fit, or the reason why none does.

        Among those that are about equally fast, the largest microbatch is taken.

        least_seconds: of this layout. fastest_seconds: time of the fastest layout so far, or inf.
        stall_seconds: time for which a save stalls training. None: the time to copy a device's state.
        """
        if least_seconds > SLOW * fastest_seconds:
            slower = least_seconds / fastest_seconds
            reason = f"takes {slower:.1f} times as long as the fastest, even with memory to spare"
            return Rejected(layout=self.layout, strategy=self.strategy, reason=reason, slower=slower)

        # Prepare to tell what fits. Estimates are cached and made only for what is compared, because they take most of
        # a search's time.
        estimate_memory = functools.cache(self._estimate_memory)
        limit_bytes = usable_bytes(self.hardware.accelerator)

        @functools.cache
        def count_fitting_sizes(checkpointing: bool | str) -> int:
            """Return how many sizes fit. They are the first ones, because memory grows with the microbatch."""
            return bisect.bisect_right(
                self.sizes, limit_bytes, key=lambda size: estimate_memory(checkpointing, size).total_bytes
            )

        # Reject the layout if the smallest microbatch does not fit, even with the least memory. A schedule that splits
        # the backward pass cannot compute blocks again.
        splits_backward = self.layout.pipeline > 1 and self.config.pipeline.splits_backward
        choices = (False,) if splits_backward else CHECKPOINTING
        least_memory_choice = choices[-1]
        if count_fitting_sizes(least_memory_choice) == 0:
            needed_bytes = estimate_memory(least_memory_choice, self.sizes[0]).total_bytes
            reason = f"needs {needed_bytes / GIB:.1f} GiB of {limit_bytes / GIB:.1f}, with one sample at a time"
            if not splits_backward:
                reason += " and every block computed again"
            return Rejected(layout=self.layout, strategy=self.strategy, reason=reason, needed=needed_bytes)

        # Collect what fits, from the fastest combination on, as long as the time is about that of the fastest.
        times = {(choice, size): self._time(choice, size) for choice in choices for size in self.sizes}
        fastest_first = sorted(times, key=lambda choice_and_size: times[choice_and_size].seconds)
        fitting: list[Candidate] = []
        for choice, size in fastest_first:
            time = times[choice, size]
            if fitting and time.seconds > (1 + AS_FAST) * fitting[0].time.seconds:
                break  # all that follow are slower
            fits = self.sizes.index(size) < count_fitting_sizes(choice)
            if fits:
                config = self._configure(choice, size)
                fitting.append(self._build_candidate(config, time, estimate_memory(choice, size), stall_seconds))
        return max(_as_fast_as_fastest(fitting), key=lambda candidate: candidate.microbatch_size)

    def _build_candidate(
        self, config: TrainConfig, time: StepTime, memory: MemoryEstimate, stall_seconds: float | None
    ) -> Candidate:
        """Return this layout with what was found for it, and with the time that saves take added to `time`.

        stall_seconds: as in `find_best`.
        """
        if stall_seconds is None:
            stall_seconds = save_seconds(memory)
        num_batches_between_saves = batches_between_saves(self.config, time.seconds, stall_seconds)
        time = replace(time, saves=stall_seconds / num_batches_between_saves)
        mfu = time.mfu(self.config, self.layout, self.hardware.accelerator)
        return Candidate(layout=self.layout, config=config, memory=memory, time=time, mfu=mfu)

    def _configure(self, checkpointing: bool | str, size: int) -> TrainConfig:
        """Return the run with this activation checkpointing and microbatch size."""
        sharding = replace(self.config.sharding, activation_checkpointing=checkpointing)
        return replace(self.config, device_train_microbatch_size=size, fsdp_config=sharding)

    def _time(self, checkpointing: bool | str, size: int) -> StepTime:
        """Predict the time of a step with this activation checkpointing and microbatch size."""
        return step_time(self._configure(checkpointing, size), self.layout, self.hardware)

    def _estimate_memory(self, checkpointing: bool | str, size: int) -> MemoryEstimate:
        """Estimate a device's memory with this activation checkpointing and microbatch size."""
        return estimate_training_memory(self._configure(checkpointing, size), self.layout)


def _as_fast_as_fastest(candidates: list[Candidate]) -> list[Candidate]:
    """Return the candidates, at least one, whose time is within AS_FAST of the fastest one's."""
    fastest_seconds = min(candidate.time.seconds for candidate in candidates)
    return [candidate for candidate in candidates if candidate.time.seconds <= (1 + AS_FAST) * fastest_seconds]


def batches_between_saves(config: TrainConfig, step_seconds: float, save_seconds: float) -> float:
    """Return how many batches lie between two saves, according to the run's `save_interval`.

    An interval in time is divided by the time of a step. For `auto`, saves take MAX_SAVE_FRACTION of the time.
    Returns inf for an interval in epochs, because their length depends on data that is not read.
    """
    interval = config.save_interval
    if interval.span is None:
        interval_seconds = interval.seconds or save_seconds / MAX_SAVE_FRACTION
        return interval_seconds / step_seconds

    num_tokens = count_tokens(interval.span, config)
    if num_tokens is None:
        return math.inf
    tokens_per_batch = config.global_train_batch_size * config.max_seq_len
    return max(1.0, num_tokens / tokens_per_batch)


def count_tokens(span: Duration, config: TrainConfig) -> float | None:
    """Return the tokens of a span of training, such as `100ba` (batches), `1e9tok` or `5000sp` (samples).

    Returns None for epochs, because their length depends on data that is not read.
    """
    tokens_per_unit = {
        "ba": config.global_train_batch_size * config.max_seq_len,
        "tok": 1,
        "sp": config.max_seq_len,
    }
    if span.unit not in tokens_per_unit:
        return None
    return span.value * tokens_per_unit[span.unit]
