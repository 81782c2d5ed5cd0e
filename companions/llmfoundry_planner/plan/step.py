"""Seconds of a training step: a roofline for what a device computes, rings for what it exchanges. No torch.

A device computes matrix products at a share of its peak, attention at a smaller one, and all else at the rate of its
memory. FSDP's gathers and reductions hide behind the computing of the same block, and sends between stages behind the
next microbatch. Exchanges for tensor and context parallelism do not hide. Saves hold every step up by their share of
the run's interval, and every doubling of the nodes adds its share for stragglers.

Left out: the host's own time, storage slower than the loader.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from llmfoundry_layouts.stages import assign_stages, count_block_and_head_parameters
from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.schema import NEWTON_SCHULZ_STEPS, TrainConfig
from llmfoundry_lite.config.sharding_schema import PipelineConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.estimate.portion import FP32_BYTES, Portion
from llmfoundry_lite.hardware import ACCELERATORS, Accelerator, find_rows
from llmfoundry_lite.models.flops import count_flops_per_token, count_parameters
from llmfoundry_planner.plan.bubble import simulate_bubble
from llmfoundry_planner.plan.exchanges import context_exchanges, parameter_exchanges, stage_sends, stream_reductions
from llmfoundry_planner.plan.network import Group, Node, find_node, group_of, send_seconds
from llmfoundry_planner.plan.rates import (
    COMPILED_SHARE,
    LOGIT_BYTES,
    MANY_DEVICES,
    MEMORY_SHARE,
    OPTIMIZER_BYTES,
    OVERLAP_COST,
    READ_TOKENS_PER_SECOND,
    SCORE_GRADIENT_TRANSFERS,
    SCORE_TRANSFERS,
    STREAM_BYTES,
    UNCOMPILED_LOW,
    Efficiency,
    find_efficiency,
)


@dataclass(kw_only=True, slots=True, frozen=True)
class Hardware:
    """Devices and nodes that a run is planned for."""

    accelerator: Accelerator
    node: Node
    efficiency: Efficiency

    def origin(self, num_devices: int) -> str:
        """Say where the rates come from."""
        return self.efficiency.origin + (", extrapolated to more devices" if self.is_extrapolated(num_devices) else "")

    def is_extrapolated(self, num_devices: int) -> bool:
        """Return whether the rates were measured on fewer devices."""
        most = self.efficiency.num_measured_devices
        return most is not None and num_devices > most

    def interval(self, num_devices: int, *, compiled: bool = False) -> tuple[float, float]:
        """Return multiples of a predicted rate between which it comes, in nine cases of ten.

        `compiled`: of blocks that a compiler makes, whose gain was measured with today's software alone.
        """
        residuals = self.efficiency.residuals
        low, high = self.efficiency.interval
        if residuals is not None:
            low, high = residuals.interval(self.node.doublings(num_devices), self.node.jitter)
        if self.is_extrapolated(num_devices):
            low = min(low, MANY_DEVICES)
        if compiled and self.efficiency.era == 2023:
            low = min(low, UNCOMPILED_LOW)
        return low, high


@dataclass(kw_only=True, slots=True, frozen=True)
class StepTime:
    """Seconds of one step on one device, by what it does."""

    products: float
    attention: float
    memory: float
    """Norms, activation functions, the loss: bound by memory."""
    optimizer: float
    tensor: float
    """Collectives of tensor parallelism, none of them hidden."""
    context: float
    sharding: float
    """FSDP's gathers and reductions, as far as they are not hidden."""
    pipeline: float
    """Sending between stages."""
    bubble: float
    """Waiting for other stages."""
    data: float = 0.0
    """Waiting for the loader."""
    stragglers: float = 0.0
    """Waiting for the slowest node, and for links that others use too."""
    saves: float = 0.0
    """A step's share of the time that saves hold the run up."""
    num_tokens: int
    """Tokens of the whole step."""

    @property
    def seconds(self) -> float:
        computing = self.products + self.attention + self.memory + self.optimizer
        exchanging = self.tensor + self.context + self.sharding + self.pipeline
        return computing + exchanging + self.bubble + self.data + self.stragglers + self.saves

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    def parts(self) -> dict[str, float]:
        """Return name -> share of the step, the largest first."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "num_tokens"]
        shares = {name: getattr(self, name) / self.seconds for name in names}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def mfu(self, config: TrainConfig, layout: Layout, accelerator: Accelerator) -> float:
        """Return model FLOP/s over the peak of all devices."""
        peak = accelerator.peak_flops(Portion(config, layout).dtype)
        assert peak is not None
        flops = count_flops_per_token(config.model, config.max_seq_len)
        return flops * self.tokens_per_second / (peak * layout.world_size)


def accelerator_named(name: str) -> Accelerator:
    """Return the row of this name in upper or lower case, or the one that it begins: `h100` and `h100-8` are H100-80GB,
    a module rather than a PCIe card.

    Raises ConfigError, which lists the rows, for a name of none or of several.
    """
    rows = find_rows(name)
    if len(rows) > 1:
        names = " and ".join(row.name for row in rows)
        raise ConfigError(f"hardware {name!r} may be {names}; name one of them")
    if not rows:
        raise ConfigError(
            f"hardware {name!r} is not in the table; expected one of {', '.join(ACCELERATORS)}. For a new device, copy "
            "the row of one like it in llmfoundry_lite/hardware.py, and its node in llmfoundry_planner/plan/network.py"
        )
    return rows[0]


def find_hardware(accelerator: Accelerator, *, published: bool = False) -> Hardware:
    """Return an accelerator in its usual node, with the efficiency of today's software, or that `published` in 2023.

    Raises ConfigError without a node.
    """
    efficiency = find_efficiency(accelerator, published=published)
    return Hardware(accelerator=accelerator, node=find_node(accelerator.name), efficiency=efficiency)


def count_microbatches(p: Portion) -> int:
    """Count a data rank's microbatches in a step. Raises ConfigError if the batch does not divide."""
    samples = p.config.global_train_batch_size
    if samples % p.layout.num_data_ranks:
        raise ConfigError(
            f"global_train_batch_size: {samples} does not divide over {p.layout.num_data_ranks} data ranks"
        )
    return -(-p.device_batch_size // p.microbatch_size)


def step_time(config: TrainConfig, layout: Layout, hardware: Hardware) -> StepTime:
    """Predict a step. Raises ConfigError for a batch that does not divide and a dtype whose peak is not known."""
    p = Portion(config, layout)
    accelerator, node, efficiency = hardware.accelerator, hardware.node, hardware.efficiency
    peak = accelerator.peak_flops(p.dtype)
    if peak is None:
        known = ", ".join(accelerator.peak_teraflops)
        raise ConfigError(f"{accelerator.name}: no {p.dtype} peak is published for it (known: {known})")
    memory_rate = MEMORY_SHARE * accelerator.memory_bandwidth_bytes_per_second
    num_microbatches = count_microbatches(p)
    loads = find_loads(p.model, config.pipeline)
    block, head = _compute_seconds(p, efficiency.products * peak, efficiency.attention * peak, memory_rate)
    per_microbatch = {name: loads.num_blocks * seconds + head[name] * loads.has_head for name, seconds in block.items()}
    per_microbatch |= _exchange_seconds(p, loads.num_blocks, node, sum(per_microbatch.values()))
    seconds = {name: num_microbatches * value for name, value in per_microbatch.items()}
    waiting = 0.0
    parts, model = layout.of_parameters, p.model
    if layout.pipeline > 1:
        waiting = simulate_bubble(
            *(config.pipeline.schedule, layout.pipeline, num_microbatches, config.pipeline.num_runs),
            loads=loads.of_runs,
            in_few_rounds=True,
        )
        if model.tie_word_embeddings:  # both ends have them, and pass each other their gradient
            num_tied = model.vocab_size * model.d_model / layout.tensor / (parts.shard if p.is_sharded else 1)
            seconds["pipeline"] += send_seconds(layout, "pipeline", node, num_tied * p.sum_bytes)
    num_block, num_outside = count_block_and_outside(model)
    num_block, num_outside = num_block / layout.tensor, num_outside // layout.tensor
    share = parts.shard if p.is_sharded else parts.replicate if p.shares_optimizer else 1
    optimizer = OPTIMIZER_BYTES * (loads.num_blocks * num_block + num_outside) / share / memory_rate
    if config.optimizer.name == "muon":
        optimizer += _newton_schulz_seconds(p, loads.num_blocks, hardware)
    time = StepTime(
        **seconds,
        optimizer=optimizer,
        sharding=_sharding_seconds(
            p,
            node,
            num_blocks=loads.num_blocks,
            num_block=num_block,
            num_outside=num_outside,
            num_rounds=num_microbatches if layout.pipeline == 1 else 1,
            block_seconds=block["products"] + block["attention"] + block["memory"],
        ),
        bubble=waiting * num_microbatches * sum(per_microbatch.values()),
        num_tokens=config.global_train_batch_size * config.max_seq_len,
    )
    time = dataclasses.replace(time, stragglers=node.jitter * node.doublings(layout.world_size) * time.seconds)
    reading = time.num_tokens / layout.num_data_ranks / READ_TOKENS_PER_SECOND
    if num_workers := config.train_loader.num_workers:  # they read while the step is computed
        reading = max(0.0, reading / num_workers - time.seconds)
    return dataclasses.replace(time, data=reading)


def count_passes(p: Portion) -> float:
    """Count forward passes' worth of a block's matrix products in a step.

    A block is computed again up to the last tensor that the backward pass needs: its last product is left out
    (torch.utils.checkpoint, early stop), as `rehearse` counts it.
    """
    return _with_recomputation(p) if p.fsdp.activation_checkpointing is True else 3


def _with_recomputation(p: Portion) -> float:
    num_block, _ = count_block_and_outside(p.model)
    return 4 - p.model.d_model * p.model.ffn_dim / num_block


def _compute_seconds(
    p: Portion, products_rate: float, attention_rate: float, memory_rate: float
) -> tuple[dict[str, float], dict[str, float]]:
    """Time one microbatch of a block, and of the head, on one device: {products, attention, memory} in seconds."""
    model, layout, num_tokens, seq_len = p.model, p.layout, p.num_tokens, p.config.max_seq_len
    is_recomputed, passes = p.fsdp.activation_checkpointing, count_passes(p)
    num_block, _ = count_block_and_outside(model)
    num_logits = num_tokens * model.vocab_size / layout.tensor
    window = model.attn_config.sliding_window_size
    num_keys = seq_len if window < 0 else min(seq_len, 2 * (window + 1))
    num_forwards = 2 if is_recomputed is True else 1
    # A causal kernel computes half of the square; its backward pass has five products, the forward pass two.
    square = 2 * num_tokens * num_keys * model.q_dim / layout.tensor
    attention = square * (2.5 + num_forwards) / attention_rate
    if model.attn_config.attn_impl == "reference":  # as long, and each score passes through memory
        scores_bytes = num_tokens * seq_len * model.n_heads / layout.tensor * p.compute_bytes
        attention += (num_forwards * SCORE_TRANSFERS + SCORE_GRADIENT_TRANSFERS) * scores_bytes / memory_rate
    # Selective recomputation keeps products and attention, and repeats what memory bounds.
    stream_passes = _with_recomputation(p) if is_recomputed else 3
    moved = COMPILED_SHARE if p.config.compile_config is not None else 1.0
    stream = moved * STREAM_BYTES * p.compute_bytes / 2 * num_tokens * model.d_model * (stream_passes / 3)
    # Tensor parallelism divides the feed-forward layer's half of it. All compute the norms' half, unless the stream is
    # divided too.
    block = {
        "products": 2 * num_tokens * num_block / layout.tensor * passes / products_rate,
        "attention": attention,
        "memory": stream * (1 / p.num_stream_parts + 1 / layout.tensor) / 2 / memory_rate,
    }
    head = {
        "products": 3 * 2 * num_logits * model.d_model / products_rate,
        "attention": 0.0,
        "memory": moved * LOGIT_BYTES * num_logits / memory_rate,
    }
    return block, head


def _exchange_seconds(p: Portion, num_blocks: int, node: Node, computing: float) -> dict[str, float]:
    """Time one microbatch's exchanges beyond what `computing`, its seconds of computing, hides."""
    layout, config, is_recomputed = p.layout, p.config, p.fsdp.activation_checkpointing
    stream_bytes = p.num_tokens * p.model.d_model * p.compute_bytes
    reductions = stream_reductions(num_blocks, is_recomputed is True, layout.pipeline)
    context = group_of(layout, "context", node)
    num_numbers, num_exchanges = context_exchanges(p.model, config.context, p.num_tokens, bool(is_recomputed))
    context_bytes = num_numbers * p.compute_bytes / layout.tensor
    is_gathered = config.context.kind == "gather"
    one_context = context.gather_seconds(context_bytes) if is_gathered else context.exchange_seconds(context_bytes)
    send = send_seconds(layout, "pipeline", node, stream_bytes / p.num_stream_parts)
    return {
        "tensor": reductions * group_of(layout, "tensor", node).reduce_seconds(stream_bytes),
        "context": num_blocks * num_exchanges * one_context,
        "pipeline": _exposed(stage_sends(config.pipeline.num_runs) * send, computing) if layout.pipeline > 1 else 0.0,
    }


class Loads(NamedTuple):
    """Computing load of a pipeline's stages."""

    num_blocks: int
    """Blocks of the device that computes the longest."""
    has_head: bool
    of_runs: tuple[float, ...]
    """Time of each run of blocks, as a multiple of their mean."""


def find_loads(model: ModelConfig, pipeline: PipelineConfig) -> Loads:
    """Measure stages' loads in parameters; looking up embeddings takes no time."""
    blocks: Any = pipeline.blocks and tuple(pipeline.blocks)  # a key of the cache
    return _loads_of_stages(model, dataclasses.replace(pipeline, blocks=blocks, num_microbatches=None))


@functools.cache  # a search asks thousands of times
def _loads_of_stages(model: ModelConfig, pipeline: PipelineConfig) -> Loads:
    block, head = count_block_and_head_parameters(model)
    ranks = assign_stages(model, pipeline)
    loads = {
        stage.index: len(stage.blocks) + (head / block if stage.is_last else 0) for stages in ranks for stage in stages
    }
    busiest = max(ranks, key=lambda stages: sum(loads[stage.index] for stage in stages))
    mean = sum(loads.values()) / len(loads)
    return Loads(
        num_blocks=sum(len(stage.blocks) for stage in busiest),
        has_head=busiest[-1].is_last,
        of_runs=tuple(loads[index] / mean for index in range(len(loads))),
    )


def newton_schulz_flops(rows: int, columns: int, num_steps: int) -> int:
    """Count FLOPs of a matrix: each step multiplies it by its transpose, that product by itself, and both by it."""
    short, long = sorted((rows, columns))
    return num_steps * (4 * short * short * long + 2 * short**3)


def _newton_schulz_seconds(p: Portion, num_blocks: int, hardware: Hardware) -> float:
    """Time Muon's matrices. Ranks with the same blocks take turns: in each round every one owns a whole matrix.

    The largest come first. A rank gets the parts of its matrix from the others, and sends back the result.
    """
    model, options, d = p.model, p.config.optimizer, p.model.d_model
    dtype, num_steps = options.ns_dtype or "bf16", options.ns_steps or NEWTON_SCHULZ_STEPS
    qkv = [(model.q_dim, d), (model.kv_dim, d), (model.kv_dim, d)]  # a fused parameter stands for three shapes
    parameters = [qkv] if model.attn_config.fused_qkv else [[shape] for shape in qkv]
    parameters += [[(d, model.q_dim)], *[[(model.ffn_dim, d)]] * p.num_up_matrices, [(d, model.ffn_dim)]]
    parameters.sort(key=lambda shapes: -sum(map(math.prod, shapes)))
    node, accelerator = hardware.node, hardware.accelerator
    peak = accelerator.peak_flops(dtype) or accelerator.peak_flops(p.dtype)
    assert peak is not None
    num_bytes = 2 if dtype == "bf16" else FP32_BYTES
    num_ranks = p.layout.world_size // p.layout.pipeline
    group = Group(size=num_ranks, in_node=min(num_ranks, node.num_devices), node=node)
    seconds = 0.0
    for first in range(0, num_blocks * len(parameters), num_ranks):
        shapes = parameters[first // num_blocks]
        flops = sum(newton_schulz_flops(*shape, num_steps) for shape in shapes)
        exchange = group.exchange_seconds(sum(map(math.prod, shapes)) * num_bytes)
        seconds += flops / (hardware.efficiency.products * peak) + 2 * exchange
    return seconds


def count_block_and_outside(model: ModelConfig) -> tuple[int, int]:
    """Count parameters of one block, and of all that is outside of blocks."""
    num_outside = count_parameters(dataclasses.replace(model, n_layers=0))
    return (count_parameters(model) - num_outside) // model.n_layers, num_outside


def _sharding_seconds(
    p: Portion,
    node: Node,
    *,
    num_blocks: int,
    num_block: float,
    num_outside: int,
    num_rounds: int,
    block_seconds: float,
) -> float:
    """Time a step's gathers and reductions of parameters and gradients beyond the products that hide them.

    A block's gather runs beside the block before it, its reduction beside the block after. Nothing hides the first
    gather, the last reduction, and what is outside of blocks. Copies of the model add up their shares behind the last
    backward pass. `num_rounds`: as in `parameter_exchanges`.
    """
    layout, passes = p.layout.of_parameters, count_passes(p)
    shard, replicate = group_of(layout, "shard", node), group_of(layout, "replicate", node)
    forward_seconds, backward_seconds = block_seconds / passes, block_seconds * (passes - 1) / passes
    times = parameter_exchanges(p, num_rounds)
    seconds = 0.0
    if p.is_sharded and shard.size > 1:
        gather = shard.gather_seconds(num_block * p.compute_bytes)
        reduce = shard.gather_seconds(num_block * p.reduction_bytes)
        seconds += times.forward_gathers * (num_blocks * _exposed(gather, forward_seconds) + gather)
        again = gather if times.backward_gathers else 0.0
        seconds += times.reductions * (num_blocks * _exposed(again + reduce, backward_seconds) + reduce)
        seconds += (num_rounds - times.reductions) * num_blocks * _exposed(again, backward_seconds)
        seconds += times.forward_gathers * shard.gather_seconds(num_outside * p.compute_bytes)
        seconds += times.reductions * shard.gather_seconds(num_outside * p.reduction_bytes)
    if replicate.size > 1:
        # The whole gradient, or this rank's share of it.
        part = layout.shard if p.is_sharded else 1
        whole = (num_blocks * num_block + num_outside) / part * p.reduction_bytes
        seconds += times.copy_reductions * _exposed(replicate.reduce_seconds(whole), num_blocks * backward_seconds)
        if p.shares_optimizer:
            seconds += replicate.gather_seconds((num_blocks * num_block + num_outside) * FP32_BYTES)
    return seconds


def _exposed(exchange: float, beside: float) -> float:
    """Return the part of an exchange that is not hidden by `beside` seconds of computing."""
    hidden = min(exchange, beside)
    return exchange - hidden + OVERLAP_COST * hidden
