"""Seconds of a training step: a roofline for what a device computes, rings for what it exchanges. No torch.

`step_time` is the entry. It takes the device that computes the longest, times one microbatch of one block on it, and
adds up. The model of a step:

- Matrix products run at a share of the device's peak, attention at a smaller one, and all else at the rate of its
  memory (`rates.py` has the shares and their sources).
- FSDP's gathers and reductions hide behind the computing of a neighbouring block, and sends between stages behind the
  next microbatch. Exchanges for tensor and context parallelism do not hide. `exchanges.py` counts all of these, and
  `network.py` times each.
- Stages of a pipeline wait for each other (`bubble.py`).
- Every doubling of the number of nodes adds its share for stragglers, and saves stall each step by their share.

Left out: the host's own time, and storage slower than the loader.
"""

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from llmfoundry_layouts.stages import assign_stages, count_block_and_head_parameters
from llmfoundry_lite.config.counted_model import counted_model
from llmfoundry_lite.config.layout import Layout
from llmfoundry_lite.config.model_schema import ModelConfig
from llmfoundry_lite.config.optimizer_schema import NEWTON_SCHULZ_STEPS
from llmfoundry_lite.config.optimizers import estimated_optimizer
from llmfoundry_lite.config.schema import TrainConfig
from llmfoundry_lite.config.sharding_schema import PipelineConfig
from llmfoundry_lite.errors import ConfigError
from llmfoundry_lite.estimate.portion import FP32_BYTES, Portion
from llmfoundry_lite.hardware import ACCELERATORS, Accelerator, find_rows
from llmfoundry_lite.models.flops import count_flops_per_token, count_parameters
from llmfoundry_planner.plan.bubble import simulate_bubble
from llmfoundry_planner.plan.exchanges import context_exchanges, parameter_exchanges, stage_sends, stream_reductions
from llmfoundry_planner.plan.network import Group, Node, find_node, group_of, send_seconds
from llmfoundry_planner.plan.rates import (
    CLIPPING_BYTES,
    COMPILED_SHARE,
    LOGIT_BYTES,
    MANY_DEVICES,
    MEMORY_SHARE,
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
        """Return where the rates come from, for a plan of `num_devices`."""
        if self.is_extrapolated(num_devices):
            return f"{self.efficiency.origin}, extrapolated to more devices"
        return self.efficiency.origin

    def is_extrapolated(self, num_devices: int) -> bool:
        """Return whether the rates were measured on fewer devices."""
        num_measured_devices = self.efficiency.num_measured_devices
        return num_measured_devices is not None and num_devices > num_measured_devices

    def interval(self, num_devices: int, *, compiled: bool = False) -> tuple[float, float]:
        """Return factors (low, high) of a predicted rate between which the real rate lies in nine cases of ten.

        compiled: whether torch.compile makes the run's blocks. Its gain was measured with today's software only, so
        rates of 2023 get a wider interval.
        """
        efficiency = self.efficiency
        if efficiency.residuals is None:
            low, high = efficiency.interval
        else:
            low, high = efficiency.residuals.interval(self.node.doublings(num_devices), self.node.jitter)

        if self.is_extrapolated(num_devices):
            low = min(low, MANY_DEVICES)
        if compiled and efficiency.era == 2023:
            low = min(low, UNCOMPILED_LOW)
        return low, high


@dataclass(kw_only=True, slots=True, frozen=True)
class StepTime:
    """Seconds of one step on one device, by what the device does meanwhile."""

    products: float
    """Matrix products, without those of attention."""
    attention: float
    memory: float
    """Norms, activation functions, the loss: bound by memory."""
    optimizer: float
    tensor: float
    """Collectives of tensor parallelism, none of them hidden."""
    context: float
    """Collectives of context parallelism, none of them hidden."""
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
    """A step's share of the time for which saves stall the run. `search.py` fills it in."""
    num_tokens: int
    """Tokens of the whole step."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole step: all parts together."""
        computing = self.products + self.attention + self.memory + self.optimizer
        exchanging = self.tensor + self.context + self.sharding + self.pipeline
        return computing + exchanging + self.bubble + self.data + self.stragglers + self.saves

    @property
    def tokens_per_second(self) -> float:
        """Rate of all devices together."""
        return self.num_tokens / self.seconds

    def parts(self) -> dict[str, float]:
        """Return the share of the step that each part takes, by the name of its field, the largest first."""
        names = [field.name for field in dataclasses.fields(self) if field.name != "num_tokens"]
        shares = {name: getattr(self, name) / self.seconds for name in names}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))

    def mfu(self, config: TrainConfig, layout: Layout, accelerator: Accelerator) -> float:
        """Return the model FLOPs utilisation: model FLOP/s over the peak of all devices in the run's precision.

        Model FLOPs leave out what is computed again. The peak must be known, as it is where `step_time` has a result.
        """
        peak_flops_per_second = accelerator.peak_flops(Portion(config, layout).dtype)
        assert peak_flops_per_second is not None
        flops_per_token = count_flops_per_token(counted_model(config.model), config.max_seq_len)
        return flops_per_token * self.tokens_per_second / (peak_flops_per_second * layout.world_size)


class Rates(NamedTuple):
    """Rates that kernels reach on one device."""

    products_flops_per_second: float
    attention_flops_per_second: float
    memory_bytes_per_second: float


class StageLoads(NamedTuple):
    """How a model's blocks and its head are divided among the devices of a pipeline.

    With virtual stages, a device has several runs of consecutive blocks instead of one. A model without a pipeline is
    one run on one device.
    """

    num_blocks: int
    """Blocks of the busiest device, which is the one that computes the longest."""
    has_head: bool
    """Whether the busiest device has the head, which computes the logits."""
    relative_run_loads: tuple[float, ...]
    """Computing time of each run of blocks, in the model's order, as a multiple of their mean."""


class DeviceParameters(NamedTuple):
    """Parameters of one device's part of each layer, as tensor parallelism divides it, before FSDP shards them."""

    per_block: float
    outside_blocks: int
    """Embeddings, the last norm and the head."""


def accelerator_named(name: str) -> Accelerator:
    """Return the accelerator of the hardware table that a user names, such as `h100`.

    Upper and lower case are the same. The name may leave out the end of the row's name, and may end with a number of
    devices as names of overlays do: `h100` and `h100-8` both mean H100-80GB, the module rather than the PCIe card.
    Raises ConfigError if no row or more than one may be meant, with the rows to choose from.
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
    """Return an accelerator in the node that it is usually sold in, with the rates that its kernels reach.

    `published` asks for rates of the software of 2023, which published runs used, even if today's were measured.
    Raises ConfigError if no node is known for the accelerator.
    """
    efficiency = find_efficiency(accelerator, published=published)
    return Hardware(accelerator=accelerator, node=find_node(accelerator.name), efficiency=efficiency)


def count_microbatches(p: Portion) -> int:
    """Return how many microbatches a data rank computes in a step. The last one may be smaller.

    Raises ConfigError if the global batch does not divide over the data ranks.
    """
    num_samples = p.config.global_train_batch_size
    if num_samples % p.layout.num_data_ranks:
        raise ConfigError(
            f"global_train_batch_size: {num_samples} does not divide over {p.layout.num_data_ranks} data ranks"
        )
    return -(-p.device_batch_size // p.microbatch_size)


def step_time(config: TrainConfig, layout: Layout, hardware: Hardware) -> StepTime:
    """Predict the time of one training step of a run whose devices are divided as `layout` says.

    The time is that of the device that computes the longest. Saves are not included. Raises ConfigError for a batch
    that does not divide over the data ranks, and for a precision for which the device has no published peak.
    """
    p = Portion(config, layout)
    rates = _find_rates(hardware, p.dtype)
    node = hardware.node
    num_microbatches = count_microbatches(p)
    loads = find_loads(p.model, config.pipeline)
    parameters = _count_device_parameters(p)

    # One microbatch on the busiest device: computing first, because some exchanges hide behind it.
    block_seconds = _time_block(p, rates)
    head_seconds = _time_head(p, rates)
    microbatch_seconds = {}
    for part, seconds in block_seconds.items():
        microbatch_seconds[part] = loads.num_blocks * seconds + head_seconds[part] * loads.has_head
    compute_seconds = sum(microbatch_seconds.values())
    microbatch_seconds |= _time_activation_exchanges(p, loads.num_blocks, node, compute_seconds)
    step_seconds = {part: num_microbatches * seconds for part, seconds in microbatch_seconds.items()}

    waiting_share = 0.0
    if layout.pipeline > 1:
        waiting_share = simulate_bubble(
            config.pipeline.schedule,
            layout.pipeline,
            num_microbatches,
            config.pipeline.num_runs,
            loads=loads.relative_run_loads,
            in_few_rounds=True,
        )
        if p.model.tie_word_embeddings:
            step_seconds["pipeline"] += _time_tied_embeddings(p, node)

    # FSDP gathers parameters for each microbatch, unless a pipeline keeps them whole for the whole step.
    num_rounds = num_microbatches if layout.pipeline == 1 else 1
    time = StepTime(
        **step_seconds,
        optimizer=_time_optimizer(p, loads.num_blocks, parameters, rates, hardware),
        sharding=_time_sharding(
            p,
            node,
            num_blocks=loads.num_blocks,
            parameters=parameters,
            num_rounds=num_rounds,
            block_seconds=block_seconds["products"] + block_seconds["attention"] + block_seconds["memory"],
        ),
        bubble=waiting_share * num_microbatches * sum(microbatch_seconds.values()),
        num_tokens=config.global_train_batch_size * config.max_seq_len,
    )

    # The slowest node delays the others by a share of all parts so far.
    straggler_share = node.jitter * node.doublings(layout.world_size)
    time = dataclasses.replace(time, stragglers=straggler_share * time.seconds)
    data_seconds = time.num_tokens / layout.num_data_ranks / READ_TOKENS_PER_SECOND
    num_workers = config.train_loader.num_workers
    if num_workers:
        # Workers of the loader read the next batch during the step, so only what takes longer shows.
        data_seconds = max(0.0, data_seconds / num_workers - time.seconds)
    return dataclasses.replace(time, data=data_seconds)


def _find_rates(hardware: Hardware, dtype: str) -> Rates:
    """Return the rates of one device for matrix products in `dtype`. Raises ConfigError if their peak is not known."""
    accelerator = hardware.accelerator
    peak_flops_per_second = accelerator.peak_flops(dtype)
    if peak_flops_per_second is None:
        known_dtypes = ", ".join(accelerator.peak_teraflops)
        raise ConfigError(f"{accelerator.name}: no {dtype} peak is published for it (known: {known_dtypes})")
    return Rates(
        products_flops_per_second=hardware.efficiency.products * peak_flops_per_second,
        attention_flops_per_second=hardware.efficiency.attention * peak_flops_per_second,
        memory_bytes_per_second=MEMORY_SHARE * accelerator.memory_bandwidth_bytes_per_second,
    )


def _count_device_parameters(p: Portion) -> DeviceParameters:
    """Count the parameters of a device's part of a block and of the layers outside of blocks."""
    num_block, num_outside = count_block_and_outside(p.model)
    return DeviceParameters(per_block=num_block / p.layout.tensor, outside_blocks=num_outside // p.layout.tensor)


# --------------------------------------------------------------------------------------- computing of a microbatch


def count_passes(p: Portion) -> float:
    """Return how much a step computes of a block's matrix products, in multiples of a forward pass.

    Without activation checkpointing this is 3, because the backward pass computes twice as much as the forward pass.
    With full checkpointing it is nearly 4.
    """
    return _count_recomputed_passes(p) if p.fsdp.activation_checkpointing is True else 3


def _count_recomputed_passes(p: Portion) -> float:
    """Return `count_passes` of a block that is computed again before its backward pass.

    torch.utils.checkpoint stops as soon as it has the last tensor that the backward pass needs (early stop). So the
    block's last matrix product, of d_model x ffn_dim parameters, is not computed again. `rehearse` counts the same.
    """
    num_block, _ = count_block_and_outside(p.model)
    last_product_share = p.model.d_model * p.model.ffn_dim / num_block
    return 4 - last_product_share


def _time_block(p: Portion, rates: Rates) -> dict[str, float]:
    """Return seconds of one block and microbatch, forward and backward: {"products", "attention", "memory"}.

    A product of t tokens with N parameters takes 2 t N FLOPs in each pass.
    """
    model = p.model
    tensor_degree = p.layout.tensor
    checkpointing = p.fsdp.activation_checkpointing
    num_block, _ = count_block_and_outside(model)

    # Norms and activation functions move the residual stream through memory. Selective checkpointing keeps the results
    # of products and attention, and repeats these as full checkpointing does.
    stream_passes = _count_recomputed_passes(p) if checkpointing else 3
    moved_share = _share_moved(p)
    stream_bytes = moved_share * STREAM_BYTES * p.compute_bytes / 2 * p.num_tokens * model.d_model * (stream_passes / 3)
    # Half of it is the feed-forward layer's, which tensor parallelism divides. The other half is the norms', which
    # every rank computes for the whole stream, unless sequence parallelism divides it.
    device_share = (1 / p.num_stream_parts + 1 / tensor_degree) / 2

    return {
        "products": 2 * p.num_tokens * num_block / tensor_degree * count_passes(p) / rates.products_flops_per_second,
        "attention": _time_attention(p, rates),
        "memory": stream_bytes * device_share / rates.memory_bytes_per_second,
    }


def _time_attention(p: Portion, rates: Rates) -> float:
    """Return seconds of the attention kernels of one block and microbatch, forward and backward.

    A product of t queries with k keys of width d takes 2 t k d FLOPs, and a causal kernel computes half of them. The
    forward pass has two products, queries with keys and weights with values, and the backward pass five.
    """
    model = p.model
    seq_len = p.config.max_seq_len
    window = model.attn_config.sliding_window_size
    num_forwards = 2 if p.fsdp.activation_checkpointing is True else 1

    # With a sliding window of w tokens a query sees w + 1 keys. Counting twice as many makes up for the causal half.
    has_window = window >= 0
    num_keys = min(seq_len, 2 * (window + 1)) if has_window else seq_len
    forward_flops = 2 * p.num_tokens * num_keys * model.q_dim / p.layout.tensor
    backward_per_forward = 2.5
    seconds = forward_flops * (backward_per_forward + num_forwards) / rates.attention_flops_per_second

    if model.attn_config.attn_impl == "reference":
        # Without a fused kernel, every score passes through memory too.
        scores_bytes = p.num_tokens * seq_len * model.n_heads / p.layout.tensor * p.compute_bytes
        num_transfers = num_forwards * SCORE_TRANSFERS + SCORE_GRADIENT_TRANSFERS
        seconds += num_transfers * scores_bytes / rates.memory_bytes_per_second
    return seconds


def _time_head(p: Portion, rates: Rates) -> dict[str, float]:
    """Return seconds of the logits and the loss of one microbatch, with the same keys as `_time_block`."""
    num_logits = p.num_tokens * p.model.vocab_size / p.layout.tensor
    return {
        "products": 3 * 2 * num_logits * p.model.d_model / rates.products_flops_per_second,
        "attention": 0.0,
        "memory": _share_moved(p) * LOGIT_BYTES * num_logits / rates.memory_bytes_per_second,
    }


def _share_moved(p: Portion) -> float:
    """Return the share of STREAM_BYTES and LOGIT_BYTES that the run moves: less if torch.compile fuses kernels."""
    return COMPILED_SHARE if p.config.compile_config is not None else 1.0


# ------------------------------------------------------------------------------- exchanges of activations, pipeline


def _time_activation_exchanges(p: Portion, num_blocks: int, node: Node, compute_seconds: float) -> dict[str, float]:
    """Return seconds that exchanges of one microbatch's activations add: {"tensor", "context", "pipeline"}.

    compute_seconds: computing time of the microbatch, behind which sends between stages hide.
    """
    layout = p.layout
    config = p.config
    checkpointing = p.fsdp.activation_checkpointing
    stream_bytes = p.num_tokens * p.model.d_model * p.compute_bytes

    num_reductions = stream_reductions(num_blocks, checkpointing is True, layout.pipeline)
    tensor_group = group_of(layout, "tensor", node)

    context_group = group_of(layout, "context", node)
    num_elements, num_exchanges = context_exchanges(p.model, config.context, p.num_tokens, bool(checkpointing))
    context_bytes = num_elements * p.compute_bytes / layout.tensor
    if config.context.kind == "gather":
        context_seconds = context_group.gather_seconds(context_bytes)
    else:
        context_seconds = context_group.exchange_seconds(context_bytes)

    pipeline_seconds = 0.0
    if layout.pipeline > 1:
        one_send = send_seconds(layout, "pipeline", node, stream_bytes / p.num_stream_parts)
        pipeline_seconds = _exposed_seconds(stage_sends(config.pipeline.num_runs) * one_send, compute_seconds)

    return {
        "tensor": num_reductions * tensor_group.reduce_seconds(stream_bytes),
        "context": num_blocks * num_exchanges * context_seconds,
        "pipeline": pipeline_seconds,
    }


def _time_tied_embeddings(p: Portion, node: Node) -> float:
    """Return seconds in which a pipeline's first and last stage pass each other the gradient of tied embeddings.

    Both stages hold the same matrix: one looks up tokens in it, the other computes logits with it.
    """
    num_elements = p.model.vocab_size * p.model.d_model / p.layout.tensor
    num_elements /= p.layout.of_parameters.shard if p.is_sharded else 1
    return send_seconds(p.layout, "pipeline", node, num_elements * p.sum_bytes)


ADVICE = 'say in its class which layer of ours is as large, such as like = "mptglu", or plan with that layer'
"""Advice for a layer of the user's own whose time is not known."""


def refuse_unknown_layers(model: ModelConfig, advice: str = ADVICE) -> None:
    """Raise ConfigError for a layer that is the user's own code, because nothing is known of its time.

    model: the model of `counted_model`, to accept layers whose class says which layer of ours they are like.
    advice: the end of the message.

    A norm of the user's own takes little of a step's time, and a plan says that it is not counted.
    """
    for key, name in model.own_parts.items():
        if not key.endswith("norm_type"):
            raise ConfigError(
                f"plan: nothing is known of the time of {name} (model.{key}), which is code of your own; {advice}"
            )


def refuse_schedules(config: TrainConfig, command: str = "plan", advice: str | None = None) -> None:
    """Raise ConfigError for a run whose batches differ in size or length, because `command` computes one batch of it.

    `advice` ends the message; by default it tells how to compute the run nevertheless.
    """
    sizes, lengths = config.batch_sizes, config.seq_lens
    if sizes.largest > config.global_train_batch_size:
        raise ConfigError(
            f"{command}: batch_size_schedule has batches of {sizes.smallest} to {sizes.largest} samples, and {command} "
            f"takes one size; {advice or 'give each in turn by batch_size_schedule=null global_train_batch_size=…'}"
        )
    if lengths.smallest < config.max_seq_len:
        raise ConfigError(
            f"{command}: seq_len_schedule has rows of {lengths.smallest} to {lengths.largest} tokens, and {command} "
            f"takes one length; {advice or 'seq_len_schedule=null computes whole samples, which take longest'}"
        )


def find_loads(model: ModelConfig, pipeline: PipelineConfig) -> StageLoads:
    """Return how evenly a pipeline's stages divide the computing of a model.

    Computing time is taken to be in proportion to parameters, without the embeddings, whose lookup takes no time.
    """
    # Make the configuration a key of the cache: hashable, and without what does not matter.
    blocks: Any = pipeline.blocks and tuple(pipeline.blocks)
    return _find_loads(model, dataclasses.replace(pipeline, blocks=blocks, num_microbatches=None))


@functools.cache  # a search asks thousands of times
def _find_loads(model: ModelConfig, pipeline: PipelineConfig) -> StageLoads:
    """Compute `find_loads`. Loads are in multiples of a block."""
    num_block, num_head = count_block_and_head_parameters(model)
    stages_of_ranks = assign_stages(model, pipeline)
    load_of_stage: dict[int, float] = {}
    for stages in stages_of_ranks:
        for stage in stages:
            head_load = num_head / num_block if stage.is_last else 0
            load_of_stage[stage.index] = len(stage.blocks) + head_load

    busiest_stages = max(stages_of_ranks, key=lambda stages: sum(load_of_stage[stage.index] for stage in stages))
    mean_load = sum(load_of_stage.values()) / len(load_of_stage)
    return StageLoads(
        num_blocks=sum(len(stage.blocks) for stage in busiest_stages),
        has_head=busiest_stages[-1].is_last,
        relative_run_loads=tuple(load_of_stage[index] / mean_load for index in range(len(load_of_stage))),
    )


# ------------------------------------------------------------------------------------------------------ optimizer


def _time_optimizer(
    p: Portion, num_blocks: int, parameters: DeviceParameters, rates: Rates, hardware: Hardware
) -> float:
    """Return seconds of the optimizer's step: memory traffic for this rank's share of parameters, and Muon's products.

    num_blocks: blocks of the device.
    """
    num_sharing = 1
    if p.is_sharded:
        num_sharing = p.layout.of_parameters.shard
    elif p.shares_optimizer:
        num_sharing = p.layout.of_parameters.replicate
    optimizer = estimated_optimizer(p.config.optimizer.name)
    bytes_of_matrices = optimizer.moved_bytes_of_matrices or optimizer.moved_bytes
    moved_bytes = (CLIPPING_BYTES + bytes_of_matrices) * num_blocks * parameters.per_block
    moved_bytes += (CLIPPING_BYTES + optimizer.moved_bytes) * parameters.outside_blocks
    seconds = moved_bytes / num_sharing / rates.memory_bytes_per_second

    if optimizer.multiplies_matrices:
        seconds += _time_newton_schulz(p, num_blocks, hardware)
    return seconds


def newton_schulz_flops(rows: int, columns: int, num_steps: int) -> int:
    """Return the FLOPs with which Muon orthogonalises one matrix X by `num_steps` Newton-Schulz iterations.

    With s the shorter and l the longer side, an iteration computes X Xᵀ (2 s² l), the square of that (2 s³), and the
    product of both with X (2 s² l).
    """
    short_side, long_side = sorted((rows, columns))
    return num_steps * (4 * short_side * short_side * long_side + 2 * short_side**3)


def _time_newton_schulz(p: Portion, num_blocks: int, hardware: Hardware) -> float:
    """Return seconds in which the ranks of a stage orthogonalise the matrices of Muon's update.

    The ranks that have the same blocks work in rounds. In each round every rank owns one whole matrix: it receives the
    other ranks' parts of it, orthogonalises it, and sends the result back. The largest matrices come first, so that the
    matrices of a round are about equal, and the first one, which is the largest, is taken for the time of the round.
    """
    dtype = p.config.optimizer.ns_dtype or "bf16"
    num_steps = p.config.optimizer.ns_steps or NEWTON_SCHULZ_STEPS
    accelerator = hardware.accelerator
    peak_flops_per_second = accelerator.peak_flops(dtype) or accelerator.peak_flops(p.dtype)
    assert peak_flops_per_second is not None
    products_rate = hardware.efficiency.products * peak_flops_per_second
    element_bytes = 2 if dtype == "bf16" else FP32_BYTES
    num_ranks = p.layout.world_size // p.layout.pipeline
    group = Group(size=num_ranks, in_node=min(num_ranks, hardware.node.num_devices), node=hardware.node)

    # Each parameter comes `num_blocks` times in the order of the rounds, the largest one first.
    parameters = _list_block_matrices(p)
    parameters.sort(key=lambda shapes: -sum(map(math.prod, shapes)))
    seconds = 0.0
    for index_of_first in range(0, num_blocks * len(parameters), num_ranks):
        shapes = parameters[index_of_first // num_blocks]
        flops = sum(newton_schulz_flops(*shape, num_steps) for shape in shapes)
        exchange_seconds = group.exchange_seconds(sum(map(math.prod, shapes)) * element_bytes)
        # One exchange brings the parts to their owner, and another one brings the result back.
        seconds += flops / products_rate + 2 * exchange_seconds
    return seconds


def _list_block_matrices(p: Portion) -> list[list[tuple[int, int]]]:
    """Return the shapes of the matrices of each parameter of a block that Muon updates.

    Most parameters are one matrix. A fused one of queries, keys and values is three, which are orthogonalised apart.
    """
    model = p.model
    d_model = model.d_model
    qkv_shapes = [(model.q_dim, d_model), (model.kv_dim, d_model), (model.kv_dim, d_model)]
    if model.attn_config.fused_qkv:
        parameters = [qkv_shapes]
    else:
        parameters = [[shape] for shape in qkv_shapes]
    parameters.append([(d_model, model.q_dim)])
    parameters += [[(model.ffn_dim, d_model)]] * p.num_up_matrices
    parameters.append([(d_model, model.ffn_dim)])
    return parameters


# ------------------------------------------------------------------------------------------------------- sharding


def count_block_and_outside(model: ModelConfig) -> tuple[int, int]:
    """Return the number of parameters of one block, and of all layers outside of blocks."""
    num_outside = count_parameters(dataclasses.replace(model, n_layers=0))
    num_block = (count_parameters(model) - num_outside) // model.n_layers
    return num_block, num_outside


def _time_sharding(
    p: Portion, node: Node, *, num_blocks: int, parameters: DeviceParameters, num_rounds: int, block_seconds: float
) -> float:
    """Return seconds that FSDP's exchanges of parameters and gradients add to a step, beyond what computing hides.

    While a block is computed, the next one is gathered and the gradients of the one before are reduced. Nothing hides
    the first gather, the last reduction, and the layers outside of blocks. Copies of the model add up their gradients
    during the last backward pass.

    num_blocks: blocks of the device.
    num_rounds: as in `parameter_exchanges`.
    block_seconds: computing time of one block and microbatch, forward and backward.
    """
    layout = p.layout.of_parameters
    shard_group = group_of(layout, "shard", node)
    copy_group = group_of(layout, "replicate", node)
    exchanges = parameter_exchanges(p, num_rounds)
    passes = count_passes(p)
    forward_seconds = block_seconds / passes
    backward_seconds = block_seconds * (passes - 1) / passes

    seconds = 0.0
    if p.is_sharded and shard_group.size > 1:
        gather = shard_group.gather_seconds(parameters.per_block * p.compute_bytes)
        reduction = shard_group.gather_seconds(parameters.per_block * p.reduction_bytes)
        gather_again = gather if exchanges.backward_gathers else 0.0

        # Forward passes: one gather of each block, and a first one that nothing hides.
        exposed_gathers = num_blocks * _exposed_seconds(gather, forward_seconds)
        seconds += exchanges.forward_gathers * (exposed_gathers + gather)

        # Backward passes that reduce gradients, with a last reduction that nothing hides, and those that only gather.
        exposed_backward = num_blocks * _exposed_seconds(gather_again + reduction, backward_seconds)
        seconds += exchanges.reductions * (exposed_backward + reduction)
        num_without_reduction = num_rounds - exchanges.reductions
        seconds += num_without_reduction * num_blocks * _exposed_seconds(gather_again, backward_seconds)

        seconds += exchanges.forward_gathers * shard_group.gather_seconds(parameters.outside_blocks * p.compute_bytes)
        seconds += exchanges.reductions * shard_group.gather_seconds(parameters.outside_blocks * p.reduction_bytes)

    if copy_group.size > 1:
        # A rank reduces the gradient of the parameters that it holds: all of them, or its shard.
        num_parameters = num_blocks * parameters.per_block + parameters.outside_blocks
        num_shards = layout.shard if p.is_sharded else 1
        gradient_bytes = num_parameters / num_shards * p.reduction_bytes
        reduction = copy_group.reduce_seconds(gradient_bytes)
        seconds += exchanges.copy_reductions * _exposed_seconds(reduction, num_blocks * backward_seconds)
        if p.shares_optimizer:
            # ZeRO-1: after the step, every rank gathers the parameters that the others have updated.
            seconds += copy_group.gather_seconds(num_parameters * FP32_BYTES)
    return seconds


def _exposed_seconds(exchange_seconds: float, compute_seconds: float) -> float:
    """Return how much an exchange adds to a step if it runs beside `compute_seconds` of computing.

    The part that is longer than the computing shows in full. Of the hidden part OVERLAP_COST shows, because it takes
    compute units and memory bandwidth from the products.
    """
    hidden_seconds = min(exchange_seconds, compute_seconds)
    return exchange_seconds - hidden_seconds + OVERLAP_COST * hidden_seconds
